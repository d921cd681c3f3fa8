"""A small language model, trained as torchtune trains: texts are tokenised and packed as they are read.

Tokenising is pure, and takes most of the time of reading: it is kept. Masking of random tokens runs anew.
"""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

from common import Epochs, arguments

# isort: split
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import hotset

LENGTH, WORDS = 128, 512
_PIECES = re.compile(r"\w{1,3}|\W")


def texts(folder: Path, count: int) -> list[Path]:
    """So many text files of about 20 KB."""
    rng = random.Random(0)
    files = [folder / "texts" / f"{number:05}.txt" for number in range(count)]
    for file in files:
        words = " ".join("".join(rng.choices("abcdefgh", k=rng.randint(2, 9))) for _ in range(3000))
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(words)
    return files


class Packed(Dataset[torch.Tensor]):
    """One text, tokenised and packed into sequences of equal length."""

    def __init__(self, files: list[Path]) -> None:
        self.files = files

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> torch.Tensor:
        tokens = [sum(map(ord, piece)) % WORDS for piece in _PIECES.findall(self.files[index].read_text())]
        whole = torch.tensor(tokens[: len(tokens) // LENGTH * LENGTH]).view(-1, LENGTH)
        return whole[:8]


def masked(tokens: torch.Tensor) -> torch.Tensor:
    """The tokens with some of them replaced at random."""
    return torch.where(torch.rand(tokens.shape) < 0.1, 0, tokens)


class Transformer(nn.Module):
    """One layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 32)
        self.layer = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True, dropout=0.0)
        self.head = nn.Linear(32, WORDS)

    def forward(self, tokens: torch.Tensor) -> Any:
        return self.head(self.layer(self.embed(tokens)))


class Masked(Dataset[torch.Tensor]):
    """A dataset with random tokens masked: a collator of torchtune's would do that."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> torch.Tensor:
        return masked(self.dataset[index])


def main() -> None:
    given, told = arguments(), Epochs()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dataset: Any = Packed(texts(given.folder, given.samples))
    if given.hotset:
        dataset = hotset.cache(dataset)
    loader = DataLoader(Masked(dataset), batch_size=4, shuffle=True, num_workers=given.workers)
    model = Transformer()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(given.epochs):
        told.begin()
        for batch in loader:
            tokens = batch.flatten(0, 1)
            loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            told.step(loss.item())
        told.end()


if __name__ == "__main__":
    main()
