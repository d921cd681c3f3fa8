"""Programs composed at random, each with and without hotset: ``python -m tests.random_programs --seed 7``.

Tests are written by those who wrote the library, and share their assumptions. These programs are put together
from what users write: how a dataset keeps and reads its samples, which transforms it has and how it calls
them, what draws random numbers and from which generator, what the training loop does with batches, and what
it changes between epochs. Each is a file that reads as a user's would, runs twice without hotset and once
with it, and prints a digest of each batch and of all random states. If the two runs without hotset differ,
the program says nothing; the one with it must be equal to them, or refuse in words.

It prints each program that differs, and where, and exits with 1. The same seeds give the same programs.
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


def run(main: Any, options: dict[str, Any]) -> None:
    """Run ``main(cache, Loader, observe, go_on)`` as the first argument says, and print what it observes."""
    import torch

    import hotset

    cached: list[Any] = []

    def observe(moment: str, *seen: Any) -> None:
        print(moment, *map(digest, seen), *states())

    def cache(dataset: Any, **given: Any) -> Any:
        cached.append(hotset.cache(dataset, **given, **options))
        return cached[-1]

    def transformed(dataset: Any, transform: Any = None) -> Any:
        return dataset if transform is None else _Transformed(dataset, transform)

    how = sys.argv[1]
    given = transformed if how == "plain" else cache
    loader = hotset.DataLoader if how == "hotset" else torch.utils.data.DataLoader
    run_main(lambda: main(given, loader, observe, taken_up), cached)


class _Transformed:
    """A dataset with transforms after it, as ``transform=`` says."""

    def __init__(self, dataset: Any, transforms: Any) -> None:
        self._dataset, self._transforms = dataset, transforms

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        sample = self._dataset[index]
        for transform in self._transforms:
            sample = transform(sample)
        return sample

    def __getattr__(self, name: str) -> Any:
        return getattr(self._dataset, name)


# ---- how programs are composed ----------------------------------------------------------------------------

HEAD = """
import dataclasses
import functools
import os
import pickle
import random
import sqlite3
import sys
from collections import namedtuple

import numpy as np
import torch
from torch import nn
from torch.utils.data import BatchSampler, ConcatDataset, Dataset
from torch.utils.data import RandomSampler, Subset, WeightedRandomSampler

from random_programs import run

N = {n}
SETTINGS = {{"gain": 2.0}}
Sample = namedtuple("Sample", "image label")
"""

# Transforms of a float32 array, or tensor, of shape (3, 6, 6): how each is made, and what defines it.
KNOWN = {
    "Scale(3.0)": """
        class Scale:
            def __init__(self, factor):
                self.factor = factor

            def __call__(self, x):
                return x * self.factor
    """,
    "centre": """
        def centre(x):
            return x - x.mean()
    """,
    "lambda x: x + 0.25": "",
    "functools.partial(power, exponent=2)": """
        def power(x, exponent):
            return x**exponent
    """,
    "add_one": """
        def add_one(x):
            x += 1
            return x
    """,
    "gain": """
        def gain(x):
            return x * SETTINGS["gain"]
    """,
    "Counts()": """
        class Counts:
            def __init__(self):
                self.calls = 0

            def __call__(self, x):
                self.calls += 1
                return x - 1
    """,
    "shifted_by(0.5)": """
        def shifted_by(amount):
            def shift(x):
                return x + amount

            return shift
    """,
    "Table()": """
        class Table:
            def __init__(self):
                self.table = {}

            def __call__(self, x):
                key = round(float(x.sum()), 3)
                if key not in self.table:
                    self.table[key] = len(self.table) * 0 + key
                return x + self.table[key] % 1
    """,
    "seeded_by_content": """
        def seeded_by_content(x):
            own = random.Random(int(abs(float(x.sum())) * 100))
            return x + own.random()
    """,
    "upside_down": """
        def upside_down(x):
            return x[:, ::-1].copy() if isinstance(x, np.ndarray) else x.flip(1)
    """,
    "Identity()": """
        class Identity:
            def __call__(self, x):
                return x
    """,
}
RANDOM = {
    "Flip(0.5)": """
        class Flip:
            def __init__(self, p):
                self.p = p

            def __call__(self, x):
                if random.random() < self.p:
                    return x[..., ::-1].copy() if isinstance(x, np.ndarray) else x.flip(-1)
                return x
    """,
    "TorchNoise()": """
        class TorchNoise:
            scale = 0.1

            def __call__(self, x):
                return x + self.scale * torch.rand(()).item()
    """,
    "numpy_noise": """
        def numpy_noise(x):
            return x + np.random.normal()
    """,
    "OwnNumpy()": """
        class OwnNumpy:
            def __init__(self):
                self.rng = np.random.default_rng(5)

            def __call__(self, x):
                return x + self.rng.random()
    """,
    "OwnRandom(7)": """
        class OwnRandom:
            def __init__(self, seed):
                self.rng = random.Random(seed)

            def __call__(self, x):
                return x * self.rng.choice([1, 2, 3])
    """,
    "OwnTorch()": """
        class OwnTorch:
            def __init__(self):
                self.generator = torch.Generator().manual_seed(3)

            def __call__(self, x):
                return x + torch.rand((), generator=self.generator).item()
    """,
    "OneOf([Scale2(), Scale2(4)])": """
        class Scale2:
            def __init__(self, factor=2):
                self.factor = factor

            def __call__(self, x):
                return x * self.factor


        class OneOf:
            def __init__(self, choices):
                self.choices = choices

            def __call__(self, x):
                return random.choice(self.choices)(x)
    """,
    "sometimes": """
        def sometimes(x):
            if float(x.sum()) % 3 < 0.6:
                x = x + random.random()
            return x
    """,
    "several_times": """
        def several_times(x):
            for _ in range(random.randrange(3)):
                x = x + torch.rand(1).item()
            return x
    """,
    "noise_in_place": """
        def noise_in_place(x):
            x += np.random.rand()
            return x
    """,
    "Warmup()": """
        class Warmup:
            def __init__(self):
                self.calls = 0

            def __call__(self, x):
                self.calls += 1
                return x + self.calls
    """,
}
COMPOSE = """
    class Compose:
        def __init__(self, transforms):
            self.transforms = transforms

        def __call__(self, x):
            for transform in self.transforms:
                x = transform(x)
            return x
"""

# How the dataset keeps its samples: what __init__ does, and load(i).
KEPT = {
    "tensor": ("self.images = make().clone()", "return self.images[i]", "tensor"),
    "cloned": ("self.images = make()", "return self.images[i].clone()", "tensor"),
    "array": ("self.images = make().numpy()", "return self.images[i]", "array"),
    "list": ("self.images = [image.numpy() for image in make()]", "return self.images[i]", "array"),
    "files": (
        "self.paths = []\n"
        "for i, image in enumerate(make()):\n"
        "    self.paths.append(f'{i}.npy')\n"
        "    np.save(self.paths[-1], image.numpy())",
        "return np.load(self.paths[i])",
        "array",
    ),
    "saved": (
        "for i, image in enumerate(make()):\n    torch.save(image.clone(), f'{i}.pt')",
        "return torch.load(f'{i}.pt')",
        "tensor",
    ),
    "memmap": (
        "np.save('all.npy', make().numpy())\nself.images = np.load('all.npy', mmap_mode='r')",
        "return np.array(self.images[i])",
        "array",
    ),
    "opened late": (
        "np.save('all.npy', make().numpy())\nself.images = None",
        "if self.images is None:\n    self.images = np.load('all.npy')\nreturn self.images[i]",
        "array",
    ),
    "remembered": (
        "self.known = {}\nself.images = make()",
        "if i not in self.known:\n    self.known[i] = self.images[i] * 2\nreturn self.known[i]",
        "tensor",
    ),
    "pickles": (
        "self.rows = [pickle.dumps(image.numpy()) for image in make()]",
        "return pickle.loads(self.rows[i])",
        "array",
    ),
    "sqlite": (
        "self.db = None\n"
        "with sqlite3.connect('all.db') as db:\n"
        "    db.execute('create table t (i integer, image blob)')\n"
        "    rows = [(i, x.numpy().tobytes()) for i, x in enumerate(make())]\n"
        "    db.executemany('insert into t values (?, ?)', rows)",
        "if self.db is None:\n    self.db = sqlite3.connect('all.db')\n"
        "(blob,) = self.db.execute('select image from t where i = ?', (int(i),)).fetchone()\n"
        "return np.frombuffer(blob, np.float32).reshape(3, 6, 6).copy()",
        "array",
    ),
    "dicts": (
        "self.rows = [{'image': image.clone(), 'name': f'{i}.png'} for i, image in enumerate(make())]",
        "return self.rows[i]['image']",
        "tensor",
    ),
}

# How __getitem__ makes x of load(i); {t} is the chain.
CALLS = {
    "plain": ["x = self.load(i)", "x = self.transform(x)"],
    "if": ["x = self.load(i)", "if self.transform is not None:", "    x = self.transform(x)"],
    "after": ["x = self.load(i)", "x = self.transform(x)", "x = x / 2"],
    "before": ["x = self.load(i)", "x = x / 255", "x = self.transform(x)"],
    "two views": ["x = self.load(i)", "a, x = self.transform(x), self.transform(x)", "x = a + 2 * x"],
    "views": ["x = self.load(i)", "x = sum(self.transform(x) for _ in range(self.views))"],
    "own loop": ["x = self.load(i)", "for t in self.transforms:", "    x = t(x)"],
    "inline draw": ["x = self.transform(self.load(i))", "if random.random() < 0.5:", "    x = x * 2"],
    "draw first": ["shift = np.random.randint(3)", "x = self.transform(self.load(i))", "x = x + shift"],
    "rare draw": ["x = self.transform(self.load(i))", "if i % 7 == 5:", "    x = x + torch.rand(()).item()"],
    "rare": ["x = self.transform(self.load(i))", "if i % 7 == 5:", "    x = x + 3"],
    "rare in place": ["x = self.transform(self.load(i))", "if i % 7 == 5:", "    x += 3"],
    "rare other": ["x = self.load(i)", "if i % 7 != 5:", "    x = self.transform(x)"],
    "by class": ["x = self.load(i)", "x = self.transform(x) if i % 3 else self.other(x)"],
    "partner": [
        "x = self.transform(self.load(i))",
        "j = random.randrange(len(self))",
        "x = 0.5 * x + 0.5 * self.transform(self.load(j))",
    ],
    "training": ["x = self.load(i)", "if self.training:", "    x = self.transform(x)"],
    "epoch": ["x = self.transform(self.load(i))", "x = x + self.epoch"],
    "retry": [
        "for _ in range(5):",
        "    x = self.transform(self.load(i))",
        "    if float(x.sum()) > 100:",
        "        break",
    ],
    "counted": [
        "found = []",
        "x = self.load(i)",
        "while len(found) < 2:",
        "    found.append(self.transform(x))",
        "x = found[0] - 3 * found[1]",
    ],
    "caught": [
        "try:",
        "    if i % 5 == 4:",
        "        raise ValueError('damaged')",
        "    x = self.transform(self.load(i))",
        "except ValueError:",
        "    x = self.transform(self.load(0))",
    ],
    "method": ["x = self.augment(self.load(i))"],
    "in place": ["x = self.load(i)", "x *= 2", "x = self.transform(x)"],
    "own generator": ["x = self.transform(self.load(i))", "x = x + self.rng.random()"],
    "seeded by index": ["x = self.transform(self.load(i))", "x = x + np.random.default_rng(int(i)).random()"],
    "seeds all": ["random.seed(int(i))", "x = self.transform(self.load(i))"],
}
RETURNS = {
    "tuple": "return x, self.labels[i]",
    "ints": "return x, int(self.labels[i])",
    "dict": "return {'image': x, 'label': self.labels[i], 'name': f'{i}.png'}",
    "alone": "return x",
    "list": "return [x, self.labels[i]]",
    "namedtuple": "return Sample(x, self.labels[i])",
    "index": "return x, self.labels[i], i",
    "nested": "return {'x': (x, [self.labels[i]]), 'meta': {'i': int(i), 'side': None}}",
    "float": "return x, float(self.labels[i]) / 3",
}
CHANGES = {  # between epochs; `dataset` is what is trained on, `raw` the user's
    "none": [],
    "epoch": ["dataset.set_epoch(epoch)"],
    "raw epoch": ["raw.epoch = epoch"],
    "transform": ["if epoch == 1:", "    dataset.transform = lambda x: x - 2"],
    "raw transform": ["if epoch == 2:", "    raw.transform = Late()"],
    "setting": ["SETTINGS['gain'] = 2.0 + epoch"],
    "label": ["raw.labels[3] = 7 + epoch"],
    "labels": ["raw.labels = raw.labels + epoch"],
    "evaluation": ["dataset.training = epoch % 2 == 0"],
    "views": ["raw.views = 1 + epoch"],
    "reseed": ["random.seed(epoch)", "torch.manual_seed(epoch)", "np.random.seed(epoch)"],
    "generator": ["raw.rng = random.Random(epoch)"],
    "late": ["if epoch == 1:", "    Late.amount = 5"],
}
LATE = """
    class Late:
        amount = 1

        def __call__(self, x):
            return x + self.amount
"""
SAMPLERS = {
    "shuffle": ("", "shuffle=True"),
    "order": ("", "shuffle=False"),
    "generator": ("generator = torch.Generator().manual_seed(11)", "shuffle=True, generator=generator"),
    "replacement": (
        "sampler = RandomSampler(dataset, replacement=True, num_samples=2 * N)",
        "sampler=sampler",
    ),
    "weighted": (
        "sampler = WeightedRandomSampler([1 + i % 3 for i in range(len(dataset))], N)",
        "sampler=sampler",
    ),
    "batches": (
        "sampler = BatchSampler(RandomSampler(dataset), batch_size, drop_last=True)",
        "batch_sampler=sampler",
    ),
    "backwards": ("sampler = list(range(len(dataset)))[::-1]", "sampler=sampler"),
}
LOOPS = {
    "plain": ["for batch in loader:", "    observe('batch', batch)"],
    "draws": ["for batch in loader:", "    observe('batch', batch, torch.rand(2), random.random())"],
    "breaks": [
        "for step, batch in enumerate(loader):",
        "    observe('batch', batch)",
        "    if step == 1:",
        "        break",
    ],
    "in place": ["for batch in loader:", "    observe('batch', batch)", "    spoil(batch)"],
    "reads samples": ["for batch in loader:", "    observe('batch', batch, dataset[2])"],
    "next": [
        "batches = iter(loader)",
        "for _ in range(len(loader)):",
        "    observe('batch', next(batches))",
    ],
    "zipped": ["for a, b in zip(loader, loader):", "    observe('batch', a, b)"],
    "kept": ["kept = list(loader)", "for batch in kept:", "    observe('batch', batch)"],
    "goes on": [
        "for batch in go_on(loaders, make_loader, {after}):",
        "    observe('batch', batch)",
        "loader = loaders[-1]",
    ],
    "goes on once": [
        "for batch in go_on(loaders, make_loader, {after}) if epoch == {late} else loader:",
        "    observe('batch', batch)",
        "loader = loaders[-1]",
    ],
    "evaluates": [
        "for batch in loader:",
        "    observe('batch', batch)",
        "for batch in Loader(dataset, batch_size=5):",
        "    observe('evaluation', batch)",
    ],
}
WRAPS = {
    "itself": "dataset = cache(raw)",
    "subset": "dataset = Subset(cache(raw), list(range(1, N, 2)) + [0, 2, 4])",
    "cached subset": "dataset = cache(Subset(raw, list(range(1, N, 2)) + [0, 2, 4]))",
    "concatenated": "dataset = ConcatDataset([cache(raw), Subset(raw, [1, 3])])",
    "cached concatenation": "dataset = cache(ConcatDataset([raw, Subset(raw, [1, 3])]))",
    "wrapped": "dataset = cache(Wrapped(raw))",
}
ON_IMAGE = """
    class OnImage:
        def __init__(self, transform):
            self.transform = transform

        def __call__(self, sample):
            return (self.transform(sample[0]), *sample[1:])
"""
WRAPPED = """
    class Wrapped(Dataset):
        def __init__(self, inner):
            self.inner = inner

        def __len__(self):
            return len(self.inner)

        def __getitem__(self, i):
            return self.inner[i], i * 10
"""
SPOIL = """
    def spoil(batch):
        if isinstance(batch, torch.Tensor):
            batch.zero_()
        elif isinstance(batch, dict):
            for part in batch.values():
                spoil(part)
        elif isinstance(batch, (list, tuple)):
            for part in batch:
                spoil(part)
"""


SET_EPOCH = "def set_epoch(self, epoch):\n    self.epoch = epoch\n"


# Works on what it is given. Where that is the dataset's own, a run without hotset changes the dataset, and
# one with it does not, as promised.
IN_PLACE = {"add_one", "noise_in_place", "in place", "rare in place"}
GIVES_ITS_OWN = {"tensor", "array", "list", "opened late", "remembered", "dicts"}


def compose(seed: int) -> str:
    """The text of a program."""
    rng = random.Random(seed)
    name = {
        table: rng.choice(list(globals()[table]))
        for table in ("KEPT", "CALLS", "RETURNS", "CHANGES", "SAMPLERS", "LOOPS")
    }
    wraps = rng.choice(list(WRAPS)) if rng.random() < 0.3 else "itself"
    if rng.random() < 0.5:
        name["CHANGES"] = "none"
    elif name["CHANGES"] == "epoch" and wraps != "itself":
        name["CHANGES"] = "raw epoch"  # torch's wrappers have no set_epoch
    if rng.random() < 0.4:
        name["CALLS"] = rng.choice(["plain", "if", "own loop"])
    if rng.random() < 0.4:
        name["LOOPS"] = "plain"
    made = rng.sample(list(KNOWN), rng.randrange(4))
    if rng.random() < 0.75:
        made += rng.sample(list(RANDOM), rng.choice([1, 1, 1, 2]))
    if rng.random() < 0.3:
        rng.shuffle(made)
    if name["CALLS"] not in ("own loop",) and not made:
        made = ["Identity()"]
    if IN_PLACE & {*made, name["CALLS"]} or rng.random() < 0.2:
        name["KEPT"] = rng.choice(sorted({*KEPT} - GIVES_ITS_OWN))
    makes, load, kind = KEPT[name["KEPT"]]
    as_tensor = kind == "array" and rng.random() < 0.5
    if as_tensor:
        made.insert(rng.randrange(len(made) + 1), "torch.as_tensor")
    definitions = [code({**KNOWN, **RANDOM}.get(each, "")) for each in made]
    listed = "[" + ", ".join(made) + "]"
    compose_it = len(made) > 1 and name["CALLS"] != "own loop"
    if compose_it:
        definitions.append(code(COMPOSE))
    chain = f"Compose({listed})" if compose_it else made[0] if made else "None"
    attribute = f"self.transforms = {listed}" if name["CALLS"] == "own loop" else f"self.transform = {chain}"
    ahead, order = SAMPLERS[name["SAMPLERS"]]
    workers = rng.choice([0, 0, 2])
    options = [order, f"num_workers={workers}"]
    if "batch_sampler" not in order:
        options.insert(0, "batch_size=batch_size")
        options += ["drop_last=True"] * (rng.random() < 0.3)
    if workers:
        # With these, torch makes of two passes one, and of a resumed one workers that see what was changed.
        persistent = rng.random() < 0.3 and name["LOOPS"] not in ("zipped", "goes on", "goes on once")
        options += ["persistent_workers=True"] * persistent
        options += ["worker_init_fn=seed_worker"] * (rng.random() < 0.3)
        options += ["prefetch_factor=1"] * (rng.random() < 0.2)
    if rng.random() < 0.15 and name["LOOPS"] != "in place":
        options.append("collate_fn=as_it_is")
    behind = ""
    if rng.random() < 0.25 and wraps == "itself" and name["CHANGES"] != "transform":
        name["RETURNS"] = rng.choice(["tuple", "ints", "index", "float"])
        more = rng.sample([*KNOWN, *RANDOM], rng.choice([1, 2, 3]))
        definitions += [code({**KNOWN, **RANDOM}[each]) for each in more]
        definitions.append(code(ON_IMAGE))
        behind = f", transform=[{', '.join(f'OnImage({each})' for each in more)}]"
    anew = rng.random() < 0.2
    after, late = rng.randrange(5), rng.randrange(4)
    body = [*filter(None, [ahead]), f"return Loader(dataset, {', '.join(options)})"]
    make_loader = ["def make_loader():", block(body, 1)]
    begin = ["loader = make_loader()", "loaders = [loader]"]
    given = {}
    if rng.random() < 0.15:
        given["memory"] = 3000
        if rng.random() < 0.4:
            given["spill"] = "spilled"
    if rng.random() < 0.1:
        given["concurrency"] = 3
    in_groups = rng.random() < 0.15 and not behind
    lines = [
        f"# seed {seed}: {', '.join(f'{k.lower()} {v}' for k, v in name.items())}; {wraps}",
        HEAD.format(n=rng.choice([12, 17, 24])).strip("\n"),
        *definitions,
        code(LATE),
        code(WRAPPED) if wraps == "wrapped" else "",
        code(SPOIL),
        code("""
            def make():
                return torch.arange(N * 108, dtype=torch.float32).reshape(N, 3, 6, 6) % 251 / 251


            def seed_worker(number):
                random.seed(number)
                np.random.seed(number)


            def as_it_is(samples):
                return samples
        """),
        "class Data(Dataset):\n    def __init__(self):",
        block(makes, 2),
        block(f"self.labels = torch.arange(N)\n{attribute}\nself.training = True\nself.epoch = 0", 2),
        block(f"self.views = 2\nself.rng = random.Random(9)\nself.other = {rng.choice(made or ['None'])}", 2),
        block(SET_EPOCH, 1) if name["CHANGES"] == "epoch" else "",
        block("def __len__(self):\n    return N\n", 1),
        block(["def load(self, i):", block(load, 1), ""], 1),
        block("def augment(self, x):\n    return self.transform(x) + 1\n", 1),
        block("def __getitems__(self, indices):\n    return [self[i] for i in indices]\n", 1)
        if in_groups
        else "",
        "    def __getitem__(self, i):",
        block([*CALLS[name["CALLS"]], RETURNS[name["RETURNS"]]], 2),
        "def main(cache, Loader, observe, go_on):\n    batch_size = 4\n    raw = Data()",
        block(WRAPS[wraps].replace("cache(raw)", f"cache(raw{behind})"), 1),
        block(make_loader, 1),
        "" if anew else block(begin, 1),
        "    for epoch in range(4):",
        block(CHANGES[name["CHANGES"]], 2),
        block(begin, 2) if anew else "",
        block([line.format(after=after, late=late) for line in LOOPS[name["LOOPS"]]], 2),
        "        observe('end of epoch')",
        f"if __name__ == '__main__':\n    run(main, {given!r})",
    ]
    return "\n".join(line for line in lines if line) + "\n"


def _loader_of(seed: int, text: str) -> str:
    # torch's loader does not tell of every pass that it begins, so not of every change.
    return "hotset" if seed % 4 or "changes none" not in text else "torch"


if __name__ == "__main__":
    sys.exit(compare_all(compose, __doc__.splitlines()[0], _loader_of))
