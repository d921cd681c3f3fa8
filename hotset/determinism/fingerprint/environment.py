"""The environment of code: variables, torch's defaults, modules that code imports by name.

A fingerprint describes the environment after the objects, as only then does it know which code may run, and
which texts that code has:

======================  ==============================================================================
condition               described
======================  ==============================================================================
always                  torch's default dtype and device, the time zone, the encoding of text files
code reads the          each variable that a text met (constant or attribute) names, or holds as
environment             ``$NAME``, with its value
code reads descriptors  for each number met that is the descriptor of an open file: path, size, date
code imports by name    for each text met that names a module of the user's: its source
user's modules met      numbers, texts and containers that differ from what the source says; the
                        sources of the user's modules that they import, at any depth
libraries met           functions of the user's that were put into their modules
======================  ==============================================================================

Variables by which a launcher tells a process its rank do not count, so that the ranks of one job can share a
cache; a note says so. Names that are put together (``os.environ[prefix + name]``), what C code reads,
services and clocks cannot be known from here: only an audit of samples finds them
(:mod:`hotset.dataset.audit`).
"""

from __future__ import annotations

import contextlib
import locale
import operator
import os
import re
import stat
import sys
import time
import types

import torch

from hotset.determinism.fingerprint.describe import Describer
from hotset.determinism.objects import code_dependencies as codes

__all__ = ["describe_environment"]

_READS_DESCRIPTORS = frozenset({"pread", "preadv", "readv", "fdopen", "lseek", "sendfile"})
_IMPORTS_BY_NAME = frozenset({"import_module", "__import__", "modules", "resolve_name", "locate"})
_IN_TEXT = re.compile(r"\$\{?(\w+)")
_NAME = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")
_LONGEST = 256
_RANK_VARIABLE = re.compile(
    r"((LOCAL_|GROUP_|ROLE_|NODE_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_(ADDR|PORT)"
    r"|(TORCHELASTIC|SLURM|OMPI|PMI|PMIX|MPI|PALS)_\w+|CUDA_VISIBLE_DEVICES)\Z"
)

# The values of each library's module that had none of the user's functions; torch's modules have 30,000.
_WITHOUT_REPLACED: dict[str, list[object]] = {}


def describe_environment(to: Describer) -> tuple[bytes, list[str]]:
    """Describe the environment that the code reads.

    Args:
        to: the describer, which has described the objects and met their code.

    Returns:
        A description, and sentences about what does not count in it.
    """
    names = frozenset[str]().union(*map(codes.names_in, to.codes))
    texts = [text for text in to.files.texts() if len(text) <= _LONGEST]
    reads = to.reads_environment or names & codes.READS_ENVIRONMENT
    variables, notes = _variables(texts) if reads else ([], [])
    modules = {name for name in to.modules if codes.installed(name) is None}
    if names & _IMPORTS_BY_NAME:
        modules |= {text for text in texts if _is_users_module(text)}
    installed = {name: codes.installed(name) or "" for name in to.modules - modules}
    libraries = {name.partition(".")[0] for name, by in installed.items() if not by.startswith("python ")}
    wanted = names.union(texts)
    parts = [
        (str(torch.get_default_dtype()), str(torch.get_default_device())),
        (time.tzname, time.timezone, time.altzone, os.environ.get("TZ")),
        locale.getpreferredencoding(False),
        _open_files(to.numbers) if names & _READS_DESCRIPTORS or {"os", "read"} <= names else (),
        [(name, value.encode("utf-8", "surrogateescape")) for name, value in variables],
        [(name, codes.source_of(name), codes.constants_of(name, wanted)) for name in sorted(modules)],
        [(name, codes.source_of(name)) for name in sorted(codes.with_imported(modules) - modules)],
        _patched(libraries),
    ]
    return to.describe(parts), notes


def _variables(texts: list[str]) -> tuple[list[tuple[str, str]], list[str]]:
    """The variables that texts name, with their values; and a note for each that tells a process its rank."""
    named = {*texts, *(name for text in texts for name in _IN_TEXT.findall(text))}
    rank_variables = sorted(name for name in named if _RANK_VARIABLE.match(name))
    found = [(name, os.environ[name]) for name in sorted(named.difference(rank_variables)) if _is_set(name)]
    notes = [
        f"the code names the environment variable {name}, which does not count, so that ranks can share; "
        "give each rank its own key= if samples depend on it"
        for name in rank_variables
    ]
    return found, notes


def _open_files(numbers: set[int]) -> list[tuple[int, str, int, int]]:
    """Path, size and date of the files whose descriptors these numbers are."""
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


def _patched(packages: set[str]) -> list[tuple[str, str, object]]:
    """The functions that users have put into the imported modules of these packages."""
    found = [
        (name, own, value)
        for name, module in list(sys.modules.items())
        if name.partition(".")[0] in packages and issubclass(type(module), types.ModuleType)
        for own, value in _replaced_in(name, module)
    ]
    return sorted(found, key=operator.itemgetter(0, 1))


def _replaced_in(name: str, module: types.ModuleType) -> list[tuple[str, object]]:
    """As :func:`codes.replaced_by_users`, which runs again only once a value of the module is another one."""
    values = list(vars(module).values())
    known = _WITHOUT_REPLACED.get(name, [])
    if len(known) == len(values) and all(map(operator.is_, known, values)):
        return []
    found = codes.replaced_by_users(vars(module))
    if not found:
        _WITHOUT_REPLACED[name] = values
    return found
