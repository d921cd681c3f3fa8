"""What code reads that hangs on no object: the environment, torch's defaults, modules asked for by name.

Asked once the objects are described, as only then is known which code may run and which texts it has:

======================  ===========================================================================
always                  torch's default dtype and device, the time zone, the encoding of text files
code reads the          of all texts that were met (constants and attributes) those that name a
environment             variable, or hold ``$NAME``, with its value
code reads descriptors  of all numbers that were met those of an open file: its path, size and date
code imports by name    of all texts those that name a module of the user's: its source
user's modules so met   numbers, texts and containers that are not what the source says any more
libraries so met        functions of the user's that were put into their modules
======================  ===========================================================================

Variables by which a launcher tells a process its rank do not count, as the ranks of one job are to share:
a note says so. What is composed (``os.environ[prefix + name]``), what C code reads, services and clocks
cannot be known from here: that is found by whoever looks at samples (:mod:`hotset.dataset.audit`).
"""

from __future__ import annotations

import contextlib
import locale
import os
import re
import stat
import sys
import time
import types

import torch

from hotset.determinism import code_dependencies as codes
from hotset.determinism.describe import Describer

__all__ = ["describe_surroundings"]

_READS_ENVIRONMENT = frozenset({"environ", "environb", "getenv", "getenvb", "expandvars"})
_READS_DESCRIPTORS = frozenset({"pread", "preadv", "readv", "fdopen", "lseek", "sendfile"})
_IMPORTS_BY_NAME = frozenset({"import_module", "__import__", "modules", "resolve_name", "locate"})
_IN_TEXT = re.compile(r"\$\{?(\w+)")
_NAME = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")
_LONGEST = 256
_OF_RANKS = re.compile(
    r"((LOCAL_|GROUP_|ROLE_|NODE_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_(ADDR|PORT)"
    r"|(TORCHELASTIC|SLURM|OMPI|PMI|PMIX|MPI|PALS)_\w+|CUDA_VISIBLE_DEVICES)\Z"
)


def describe_surroundings(to: Describer) -> tuple[bytes, list[str]]:
    """Describe what the code that was met reads beside its objects.

    Args:
        to: what has described the objects.

    Returns:
        A description, and sentences about what does not count.
    """
    names = frozenset[str]().union(*map(codes.names_in, to.codes))
    texts = [text for text in to.files.texts() if len(text) <= _LONGEST]
    asks = to.asks_environment or names & _READS_ENVIRONMENT
    variables, notes = _variables(texts) if asks else ([], [])
    modules = {name for name in to.modules if codes.installed(name) is None}
    if names & _IMPORTS_BY_NAME:
        modules |= {text for text in texts if _is_users_module(text)}
    wanted = names.union(texts)
    parts = [
        (str(torch.get_default_dtype()), str(torch.get_default_device())),
        (time.tzname, time.timezone, time.altzone, os.environ.get("TZ")),
        locale.getpreferredencoding(False),
        _open_files(to.numbers) if names & _READS_DESCRIPTORS or {"os", "read"} <= names else (),
        [(name, value.encode("utf-8", "surrogateescape")) for name, value in variables],
        [(name, codes.source_of(name), codes.constants_of(name, wanted)) for name in sorted(modules)],
        [_put_in(root) for root in sorted(_libraries(to.modules))],
    ]
    return to.describe(parts), notes


def _variables(texts: list[str]) -> tuple[list[tuple[str, str]], list[str]]:
    named = {*texts, *(name for text in texts for name in _IN_TEXT.findall(text))}
    of_ranks = sorted(name for name in named if _OF_RANKS.match(name))
    found = [(name, os.environ[name]) for name in sorted(named.difference(of_ranks)) if _is_set(name)]
    notes = [
        f"the code names {name} of the environment, which does not count, as ranks share: give each its "
        "key= if samples depend on it"
        for name in of_ranks
    ]
    return found, notes


def _open_files(numbers: set[int]) -> list[tuple[int, str, int, int]]:
    found = []
    for number in sorted(numbers):
        with contextlib.suppress(OSError):
            about = os.fstat(number)
            if stat.S_ISREG(about.st_mode):
                path = os.readlink(f"/proc/self/fd/{number}")
                found.append((number, path, about.st_size, about.st_mtime_ns))
    return found


def _is_set(name: str) -> bool:
    try:
        return name in os.environ
    except (UnicodeEncodeError, ValueError):
        return False


def _is_users_module(text: str) -> bool:
    if not _NAME.fullmatch(text):
        return False
    return codes.installed(text) is None and bool(codes.source_of(text))


def _libraries(modules: set[str]) -> set[str]:
    """The packages of these modules, without Python's own and those of users."""
    found = {module: codes.installed(module) for module in modules}
    return {
        module.partition(".")[0]
        for module, version in found.items()
        if version is not None and not version.startswith("python ")
    }


def _put_in(root: str) -> list[tuple[str, str, object]]:
    """The functions of users in the modules of a package that were imported."""
    loaded = [
        (name, module)
        for name, module in list(sys.modules.items())
        if name.partition(".")[0] == root and issubclass(type(module), types.ModuleType)
    ]
    return [
        (name, own, value)
        for name, module in sorted(loaded, key=lambda pair: pair[0])
        for own, value in sorted(codes.replaced(vars(module)), key=lambda pair: pair[0])
    ]
