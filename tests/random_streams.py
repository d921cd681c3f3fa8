"""Streams composed at random, each with and without hotset: ``python -m tests.random_streams --seed 7``.

As :mod:`random_programs`, for iterable datasets. The first pass must give what torch's loader gives over the
stream itself, batch for batch, and leave the same random states. Every later one must give the same samples,
in the stream's order if one process reads it and none is asked to shuffle. A sample has two parts: what does
not depend on chance, and what is drawn for it, which must be another in each pass.

Loops break off, go on from a loader's state in a new loader, change the number of workers, or set something
on the stream, between passes and in the midst of them.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

if __package__:  # else it is a program of its own that imports this file
    sys.path.insert(0, str(Path(__file__).parent))

from composed_programs import block, code, compare_all, digest, run_main, states, taken_up

# ---- in the program ---------------------------------------------------------------------------------------


def run(main: Any, options: dict[str, Any], *, in_order: bool, exact: bool) -> None:
    """Run ``main(cache, Loader, observe, go_on)`` as the first argument says, and print what it observes.

    Args:
        in_order: whether later passes come in the stream's order.
        exact: whether the first pass that is observed is the first of all.
    """
    import torch

    import hotset

    how = sys.argv[1]
    cached: list[Any] = []
    drawn: list[Any] = []
    passes = [0]

    def observe(batches: Any) -> None:
        """Print what a pass gives."""
        samples: list[str] = []
        draws: list[Any] = []
        for batch in batches:
            if exact and not passes[0]:
                print("batch", digest(batch), *states())
            for fixed, draw in _samples(batch):
                samples.append(digest(fixed))
                draws.append(draw)
        passes[0] += 1
        print(f"pass {passes[0]}:", len(samples), *(samples if in_order else sorted(samples)))
        chance = [each for each in draws if each is not None]
        print("draws:", len(chance), len({*chance}) == len(chance), not {*chance} & {*drawn})
        drawn.extend(chance)

    def cache(stream: Any, transform: Any = None) -> Any:
        if how == "plain":
            return stream if transform is None else _Transformed(stream, transform)
        cached.append(hotset.cache(stream, transform=transform, **options))
        return cached[-1]

    def make_loader(stream: Any, **given: Any) -> Any:
        if how == "plain":
            given.pop("shuffle", None)
            return torch.utils.data.DataLoader(stream, **given)
        return hotset.DataLoader(stream, **given)

    run_main(lambda: main(cache, make_loader, observe, taken_up), cached)


def _samples(batch: Any) -> Any:
    """The samples of a batch, each as what does not depend on chance, and what was drawn."""
    if isinstance(batch, dict):
        whole = zip(*(_each(batch[key]) for key in ("x", "i")), strict=True)
        draws = _each(batch["draw"]) if "draw" in batch else None
    else:
        whole = zip(*(_each(part) for part in batch[:2]), strict=True)
        draws = _each(batch[2]) if len(batch) > 2 else None
    for place, fixed in enumerate(whole):
        yield fixed, None if draws is None else float(draws[place])


def _each(part: Any) -> list[Any]:
    return list(part)


def _transformed(stream: Any, transforms: Any) -> Any:
    for sample in stream:
        for transform in transforms:
            sample = transform(sample)
        yield sample


import torch.utils.data  # noqa: E402


class _Transformed(torch.utils.data.IterableDataset[Any]):
    """A stream with transforms after it, as ``transform=`` says."""

    def __init__(self, stream: Any, transforms: Any) -> None:
        self.stream, self.transforms = stream, transforms

    def __iter__(self) -> Any:
        return _transformed(self.stream, self.transforms)

    def __len__(self) -> int:
        return len(self.stream)

    def __getattr__(self, name: str) -> Any:
        if name == "stream":
            raise AttributeError(name)
        return getattr(self.stream, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("stream", "transforms"):
            super().__setattr__(name, value)
        else:
            setattr(self.stream, name, value)


# ---- how programs are composed ----------------------------------------------------------------------------

HEAD = """
import io
import itertools
import pickle
import random
import sqlite3
import tarfile

import numpy as np
import torch
from torch.utils.data import ChainDataset, IterableDataset, get_worker_info

from random_streams import run

N = {n}
"""

# How the numbers of a pass are divided among the workers: statements after which there is `numbers`.
DIVISIONS = {
    "by steps": ["worker, workers = who()", "numbers = list(range(N))[worker::workers]"],
    "in blocks": [
        "worker, workers = who()",
        "share = -(-N // workers)",
        "numbers = list(range(N))[worker * share : (worker + 1) * share]",
    ],
    "by shards": [
        "worker, workers = who()",
        "shards = [list(range(first, min(first + 5, N))) for first in range(0, N, 5)]",
        "numbers = [i for shard in shards[worker::workers] for i in shard]",
    ],
    "one worker": ["worker, workers = who()", "numbers = list(range(N)) if worker == 0 else []"],
    "not": ["numbers = list(range(N))"],
}
ORDERS = {
    "fixed": [],
    "epoch": ["random.Random(self.epoch).shuffle(numbers)"],
    "global": ["random.shuffle(numbers)"],
    "torch": ["numbers = [numbers[i] for i in torch.randperm(len(numbers)).tolist()]"],
    "own": ["self.rng.shuffle(numbers)"],
    "buffer": ["numbers = buffered(numbers)"],
    "backwards": ["numbers.reverse()"],
}
# How x of a number is read; what __init__ does, what precedes the loop.
KEPT = {
    "tensor": ("self.images = make()", "", "x = self.images[i].clone()"),
    "array": ("self.images = make().numpy()", "", "x = self.images[i].copy()"),
    "views": ("self.images = make()", "", "x = self.images[i]"),
    "files": (
        "for i, image in enumerate(make()):\n    np.save(f'{i}.npy', image.numpy())",
        "",
        "x = np.load(f'{i}.npy')",
    ),
    "one file": (
        "with open('all.bin', 'wb') as file:\n"
        "    for image in make():\n"
        "        file.write(image.numpy().tobytes())",
        "file = open('all.bin', 'rb')",
        "file.seek(i * 48)\nx = torch.frombuffer(bytearray(file.read(48)), dtype=torch.float32)",
    ),
    "pickles": (
        "with open('all.pkl', 'wb') as file:\n"
        "    for image in make():\n"
        "        pickle.dump(image.numpy(), file)",
        "with open('all.pkl', 'rb') as file:\n    loaded = [pickle.load(file) for _ in range(N)]",
        "x = loaded[i]",
    ),
    "sqlite": (
        "with sqlite3.connect('all.db') as db:\n"
        "    db.execute('create table t (i integer, image blob)')\n"
        "    rows = [(i, x.numpy().tobytes()) for i, x in enumerate(make())]\n"
        "    db.executemany('insert into t values (?, ?)', rows)",
        "db = sqlite3.connect('all.db')",
        "(blob,) = db.execute('select image from t where i = ?', (i,)).fetchone()\n"
        "x = torch.frombuffer(bytearray(blob), dtype=torch.float32)",
    ),
    "lines": (
        "with open('all.txt', 'w') as file:\n"
        "    for image in make():\n"
        "        print(*image.flatten().tolist(), file=file)",
        "with open('all.txt') as file:\n    lines = file.read().splitlines()",
        "x = torch.tensor([float(word) for word in lines[i].split()])",
    ),
    "tar": (
        "with tarfile.open('all.tar', 'w') as tar:\n"
        "    for i, image in enumerate(make()):\n"
        "        info = tarfile.TarInfo(f'{i}.bin')\n"
        "        info.size = 48\n"
        "        tar.addfile(info, io.BytesIO(image.numpy().tobytes()))",
        "tar = tarfile.open('all.tar')",
        "x = np.frombuffer(tar.extractfile(f'{i}.bin').read(), np.float32)",
    ),
}
# What is done to x of number i, and what is yielded: {give} yields one sample.
READS = {
    "plain": ["{give}"],
    "filter": ["if i % 5 == 3:", "    continue", "{give}"],
    "crops": ["for part in range(2):", "    x = x + part", "    i = i + 1000 * part", "    {give}"],
    "some more": ["{give}", "if i % 7 == 2:", "    i = -i", "    {give}"],
    "scaled": ["x = x * self.scale", "{give}"],
    "counts": ["self.given += 1", "{give}"],
    "remembers": ["x = x + self.known.setdefault(i, i * 0.5)", "{give}"],
    "buffer reused": ["held[: len(x.reshape(-1))] = torch.as_tensor(x).reshape(-1)", "x = held", "{give}"],
    "epoch": ["x = x + self.epoch", "{give}"],
    "running": ["total += i", "x = x + total", "{give}"],
    "seeded": ["own = random.Random(i)", "x = x + own.random()", "{give}"],
    "method": ["yield from self.samples_of(i, x)"],
    "caught": [
        "try:",
        "    if i % 6 == 4:",
        "        raise ValueError",
        "except ValueError:",
        "    continue",
        "{give}",
    ],
}
DRAWS = {
    "random": "draw = random.random()",
    "numpy": "draw = np.random.rand()",
    "torch": "draw = torch.rand(()).item()",
    "own": "draw = self.rng.random()",
    "rare": "draw = random.random() if i % 6 == 5 else i * 1e-3 + 2 * passes()",
    "unseeded": "draw = np.random.default_rng().random()",
}
RETURNS = {
    "tuple": ("({x}, {i})", "({x}, {i}, draw)"),
    "list": ("[{x}, {i}]", "[{x}, {i}, draw]"),
    "dict": ("{{'x': {x}, 'i': {i}}}", "{{'x': {x}, 'i': {i}, 'draw': draw}}"),
    "text": ("({x}, str({i}))", "({x}, str({i}), draw)"),
}
TRANSFORMS = {
    "twice": "lambda sample: doubled(sample)",
    "draws": "drawing",
    "own": "Drawing()",
}
BETWEEN = {  # `stream` is the user's, `dataset` what is trained on
    "nothing": [],
    "epoch": ["dataset.set_epoch(number)"],
    "own epoch": ["stream.epoch = number"],
    "scale": ["stream.scale = 1.0 + number"],
    "scale through": ["dataset.scale = 1.0 + number // 2"],
    "once": ["if number == 2:", "    stream.scale = 5.0"],
    "image": ["if number == 1:", "    stream.images[2] += 7"],
    "reseed": ["random.seed(number + 50)", "torch.manual_seed(number + 50)"],
    "workers": ["options['num_workers'] = [0, 2, 0, 3][number]", "loaders[-1] = make_loader()"],
    "batch size": ["options['batch_size'] = 3 + number", "loaders[-1] = make_loader()"],
    "anew": ["loaders[-1] = make_loader()"],
}
LOOPS = {
    "plain": ["observe(loaders[-1])"],
    "breaks first": [
        "if number == 0:",
        "    for batch in itertools.islice(loaders[-1], 2):",
        "        print('batch', len(batch))",
        "observe(loaders[-1])",
    ],
    "breaks each": [
        "observe(loaders[-1])",
        "for batch in itertools.islice(loaders[-1], 2):",
        "    print('batch', len(batch))",
    ],
    "goes on": ["observe(go_on(loaders, make_loader, {after}))"],
    "goes on later": ["observe(go_on(loaders, make_loader, {after}) if number == {late} else loaders[-1])"],
    "goes on first": ["observe(go_on(loaders, make_loader, {after}) if number == 0 else loaders[-1])"],
    "drawing step": ["observe((torch.rand(1), batch)[1] for batch in loaders[-1])"],
    "kept": ["observe(list(loaders[-1]))"],
    "in part": ["observe(loaders[-1])", "print(sum(1 for _ in loaders[-1]) > 0)"],
}


def compose(seed: int) -> str:
    """The text of a program."""
    rng = random.Random(seed)
    name = {
        table: rng.choice(list(globals()[table]))
        for table in ("DIVISIONS", "ORDERS", "KEPT", "READS", "RETURNS", "BETWEEN", "LOOPS")
    }
    for table, usual, share in (
        ("DIVISIONS", "by steps", 0.4),
        ("ORDERS", "fixed", 0.6),
        ("READS", "plain", 0.3),
        ("BETWEEN", "nothing", 0.5),
        ("LOOPS", "plain", 0.4),
    ):
        if rng.random() < share:
            name[table] = usual
    workers = rng.choice([0, 0, 2, 3])
    if name["BETWEEN"] == "image" and name["KEPT"] not in ("tensor", "array"):
        name["BETWEEN"] = "once"
    # A running total, or a buffer that is used again, depends on the order and on who reads what.
    if name["READS"] == "running" and (workers or name["ORDERS"] != "fixed" or name["BETWEEN"] == "workers"):
        name["READS"] = "crops"
    if name["DIVISIONS"] == "not" and name["BETWEEN"] == "workers":
        name["DIVISIONS"] = "by shards"
    draws = rng.random() < 0.15
    behind = rng.choice(list(TRANSFORMS)) if rng.random() < 0.35 else None
    if behind in ("draws", "own"):
        draws = False
        name["RETURNS"] = rng.choice(["tuple", "text"])
    draw = DRAWS[rng.choice(list(DRAWS))] if draws else ""
    without, with_draw = RETURNS[name["RETURNS"]]
    give = "yield " + (with_draw if draws else without).format(x="x", i="i")
    opened, before, load = KEPT[name["KEPT"]]
    options = {"batch_size": rng.choice([4, 4, 5, 7, 1]), "num_workers": workers}
    is_single = options["batch_size"] == 1 and name["BETWEEN"] != "batch size"
    if name["READS"] == "buffer reused" and not is_single:
        name["READS"] = "counts"  # all samples of a batch of torch's would be the last one
    more = []
    shuffles = rng.random() < 0.35
    more += ["shuffle=True"] * shuffles
    if rng.random() < 0.15:
        more.append("generator=torch.Generator().manual_seed(11)")
    # torch's persistent workers do not see what is set on the stream between passes; hotset starts others.
    unseen = name["BETWEEN"] not in ("nothing", "reseed", "batch size", "anew")
    persistent = rng.random() < 0.3 and workers > 0 and not unseen
    if persistent:
        more.append("persistent_workers=options['num_workers'] > 0")
    given: dict[str, Any] = {}
    if rng.random() < 0.15:
        given["memory"] = rng.choice([2000, 9000])
    elif rng.random() < 0.1:
        given["memory"], given["spill"] = 3000, "spilled"
    wrap = rng.choice(["chain", "inner"]) if rng.random() < 0.15 else ""
    if wrap == "chain" and name["BETWEEN"] in ("epoch", "scale through"):
        wrap = ""
    made = "Data()"
    if wrap == "chain":
        made = "ChainDataset([stream, stream])"
    elif wrap == "inner":
        made = "Around(stream)"
    has_length = rng.random() < 0.2 and name["READS"] in ("plain", "scaled", "counts") and not wrap
    in_order = not (
        shuffles or workers or name["ORDERS"] != "fixed" or name["BETWEEN"] == "workers" or "memory" in given
    )
    transform = f", transform=[{TRANSFORMS[behind]}]" if behind else ""
    after = rng.randrange(5)
    exact = name["LOOPS"] != "breaks first"  # workers may have read all when that breaks off
    lines = [
        f"# seed {seed}: {', '.join(f'{k.lower()} {v}' for k, v in name.items())}; {behind or draw}; {wrap}",
        HEAD.format(n=rng.choice([12, 17, 24, 40])).strip("\n"),
        code("""
            def make():
                return torch.arange(N * 12, dtype=torch.float32).reshape(N, 12) % 251 / 251


            def who():
                info = get_worker_info()
                return (info.id, info.num_workers) if info is not None else (0, 1)


            def buffered(numbers):
                held = []
                for i in numbers:
                    held.append(i)
                    if len(held) == 5:
                        yield held.pop(random.randrange(5))
                random.shuffle(held)
                yield from held


            def doubled(sample):
                if isinstance(sample, dict):
                    return {**sample, "x": sample["x"] * 2}
                return type(sample)([sample[0] * 2, *sample[1:]])


            def drawing(sample):
                return (*sample, random.random())


            class Drawing:
                def __init__(self):
                    self.rng = np.random.default_rng(3)

                def __call__(self, sample):
                    return (*sample, self.rng.random() + torch.rand(()).item())


            class Around(IterableDataset):
                def __init__(self, inner):
                    self.inner = inner

                def __iter__(self):
                    return iter(self.inner)

                def __getattr__(self, name):
                    if name == "inner":
                        raise AttributeError(name)
                    return getattr(self.inner, name)


            PASSES = [0]


            def passes():
                PASSES[0] += 1
                return PASSES[0]
        """),
        "class Data(IterableDataset):\n    def __init__(self):",
        block(opened, 2),
        block(
            "self.epoch = 0\nself.scale = 1.0\nself.given = 0\nself.known = {}\nself.rng = random.Random(9)",
            2,
        ),
        block("def set_epoch(self, epoch):\n    self.epoch = epoch\n", 1),
        block("def __len__(self):\n    return N\n", 1) if has_length else "",
        block(
            ["def samples_of(self, i, x):", *(f"    {line}" for line in filter(None, [draw])), f"    {give}"],
            1,
        ),
        "    def __iter__(self):",
        block([*DIVISIONS[name["DIVISIONS"]], *ORDERS[name["ORDERS"]]], 2),
        block(before, 2) if before else "",
        "        held, total = torch.zeros(12), 0",
        "        for i in numbers:",
        block(load, 3),
        block(draw, 3) if draw and name["READS"] != "method" else "",
        block([line.format(give=give) for line in READS[name["READS"]]], 3),
        "def main(cache, Loader, observe, go_on):",
        "    stream = Data()",
        f"    dataset = cache({'stream' if not wrap else made}{transform})",
        f"    options = {options!r}",
        "    def make_loader():",
        f"        return Loader(dataset, **options, {', '.join(more)})",
        "    loaders = [make_loader()]",
        "    for number in range(4):",
        block(BETWEEN[name["BETWEEN"]], 2),
        block([line.format(after=after, late=rng.randrange(1, 4)) for line in LOOPS[name["LOOPS"]]], 2),
        f"if __name__ == '__main__':\n    run(main, {given!r}, in_order={in_order}, exact={exact})",
    ]
    return "\n".join(line for line in lines if line) + "\n"


if __name__ == "__main__":
    sys.exit(compare_all(compose, __doc__.splitlines()[0]))
