"""What programs that are composed at random share: :mod:`random_programs`, :mod:`random_streams`.

A composed program is a file that reads as a user's would. It gets from here what it observes with, and is run
from here, twice without hotset and once with it. If the two runs without hotset differ, the program says
nothing; the one with it must be equal to them, or refuse in words.
"""

from __future__ import annotations

import argparse
import collections
import hashlib
import os
import random
import sys
import tempfile
import textwrap
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

if __package__:  # else it is imported by a program
    sys.path.insert(0, str(Path(__file__).parent))

__all__ = ["block", "code", "compare_all", "digest", "run_main", "states", "taken_up"]

# ---- in the program ---------------------------------------------------------------------------------------


def run_main(main: Callable[[], None], cached: list[Any]) -> None:
    """Run a program's main function with seeds, and print how it ends.

    Args:
        main: the function.
        cached: gets the cached datasets, whose hits are counted.
    """
    import warnings

    import numpy as np
    import torch

    import hotset.errors

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)
    try:
        main()
    except hotset.errors.HotsetError as error:
        print("refused:", type(error).__name__, str(error).replace("\n", " "))
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        print("raised", type(error).__name__, "" if "hotset" in place.filename else str(error)[:60])
        traceback.print_exc()
    print(f"hits: {sum(each.stats().hits for each in cached)}", file=sys.stderr)


def taken_up(loaders: list[Any], make: Callable[[], Any], after: int) -> Iterator[Any]:
    """A pass that goes on after so many batches in another loader, which comes in the last one's place.

    Without hotset it goes on as it is.
    """
    import pickle

    batches = iter(loaders[-1])
    for _ in range(after):
        try:
            yield next(batches)
        except StopIteration:
            return
    if sys.argv[1] != "hotset":
        yield from batches
        return
    saved = pickle.dumps(loaders[-1].state_dict())
    del batches
    loaders[-1] = make()
    loaders[-1].load_state_dict(pickle.loads(saved))
    yield from loaders[-1]


def states() -> list[str]:
    """Digests of the states of the global generators."""
    import numpy as np
    import torch

    return [digest(each) for each in (random.getstate(), np.random.get_state(), torch.get_rng_state())]


def digest(value: Any) -> str:
    """Tells a value from others, by its types, too."""
    found = hashlib.sha256()
    for part in _parts(value):
        found.update(part)
    return found.hexdigest()[:8]


def _parts(value: Any) -> Iterator[bytes]:
    import numpy as np
    import torch

    yield type(value).__name__.encode()
    if isinstance(value, torch.Tensor):
        yield f"{value.dtype}{tuple(value.shape)}{value.is_contiguous()}".encode()
        yield value.contiguous().numpy().tobytes()
    elif isinstance(value, np.ndarray):
        yield f"{value.dtype}{value.shape}".encode() + value.tobytes()
    elif isinstance(value, dict):
        for key, part in value.items():
            yield from (*_parts(key), *_parts(part))
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _parts(part)
    elif hasattr(value, "__dict__"):
        yield from _parts(vars(value))
    else:
        yield repr(value).encode()


# ---- how programs are composed and compared ----------------------------------------------------------------


def code(text: str) -> str:
    """The text of a table's entry, as it stands in a program."""
    return textwrap.dedent(text).strip("\n")


def block(lines: list[str] | str, depth: int) -> str:
    """Lines that are so many levels deep."""
    text = lines if isinstance(lines, str) else "\n".join(lines)
    return textwrap.indent(text, "    " * depth)


def _compare(programs: Any, path: Path, loader: str) -> tuple[str, str]:
    """What came of a program with hotset: a word, and a sentence."""
    runs = []
    for how in ("plain", "plain", loader):
        with tempfile.TemporaryDirectory() as folder:
            runs.append(programs.run([str(path), how], Path(folder)))
    first, second, cached = runs
    if first.stdout != second.stdout or first.returncode:
        return "not reproducible", ""
    if cached.stdout == first.stdout and not cached.returncode:
        return ("hits" if "hits: 0" not in cached.stderr else "equal"), ""
    said = cached.stdout.splitlines()
    if said and said[-1].startswith("refused:"):
        return "refused", said[-1]
    for number, (line, expected) in enumerate(zip(said, first.stdout.splitlines(), strict=False)):
        if line != expected:
            return "differs", f"line {number}: {line!r} in place of {expected!r}"
    return "differs", f"{len(said)} lines, exit code {cached.returncode}: {cached.stderr[-300:]}"


def compare_all(
    compose: Callable[[int], str],
    about: str,
    loader_of: Callable[[int, str], str] = lambda seed, text: "hotset",
) -> int:
    """Compare programs as the command line says; the exit code: 1 if one differs.

    Args:
        compose: makes the text of a program from a seed.
        about: what the command does.
        loader_of: of a seed and a text: ``"torch"`` for a program that is to be run with torch's own loader.
    """
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--seed", type=int, default=0, help="of the first program")
    parser.add_argument("--count", type=int, default=10**9)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--keep", type=Path, help="a folder for programs that differ")
    parser.add_argument("--show", action="store_true", help="print the first program, and end")
    arguments = parser.parse_args()
    if arguments.show:
        print(compose(arguments.seed))
        return 0
    from programs import Programs

    keep = arguments.keep or Path(tempfile.mkdtemp(prefix="hotset-programs-"))
    keep.mkdir(parents=True, exist_ok=True)
    started, found = time.monotonic(), collections.Counter[str]()
    with Programs() as programs:
        for seed in range(arguments.seed, arguments.seed + arguments.count):
            if time.monotonic() - started > arguments.seconds:
                break
            path = keep / f"program_{seed}.py"
            path.write_text(compose(seed))
            loader = loader_of(seed, path.read_text())
            outcome, why = _compare(programs, path, loader)
            found[outcome] += 1
            if outcome in ("differs", "refused"):
                print(f"{outcome}: {path} {loader}: {why}", flush=True)
            if outcome != "differs":
                os.unlink(path)
    print(dict(found), f"{time.monotonic() - started:.0f} s")
    return 1 if found["differs"] else 0
