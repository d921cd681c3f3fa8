"""A small network by timm's loader, model and optimizer, as its train script puts them together.

timm sets the dataset's transform after the dataset was made; hotset follows, and cuts it after its
deterministic beginning. A random resized crop comes first here, so what is kept is the decoded picture.
"""

from __future__ import annotations

from common import Epochs, arguments, pictures

# isort: split
import timm
import torch
from timm.data import create_dataset, create_loader
from timm.optim import create_optimizer_v2

import hotset


def main() -> None:
    given, told = arguments(), Epochs()
    torch.set_num_threads(1)
    timm.utils.random_seed(0)
    pictures(given.folder, given.samples)
    dataset = create_dataset("", root=str(given.folder / "pictures"))
    if given.hotset:
        dataset = hotset.cache(dataset)
    loader = create_loader(
        dataset,
        input_size=(3, 64, 64),
        batch_size=16,
        is_training=True,
        num_workers=given.workers,
        use_prefetcher=False,
        device=torch.device("cpu"),
        persistent_workers=False,
    )
    model = timm.create_model("test_resnet", num_classes=2)
    optimizer = create_optimizer_v2(model, opt="sgd", lr=0.01)
    for _ in range(given.epochs):
        told.begin()
        for images, labels in loader:
            loss = torch.nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            told.step(loss.item())
        told.end()


if __name__ == "__main__":
    main()
