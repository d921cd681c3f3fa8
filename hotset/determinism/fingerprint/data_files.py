"""The files that a dataset names: their sizes and dates, as part of its identity.

A dataset does not say which of its strings are paths, so every string of its state is a candidate, and so are
bytes. A string that names a file counts with the file's size and time of change; one that names a folder
stands for the files in it; any other string is ignored here. Candidates come singly (an attribute, a global
constant) or as a column (the first members of a million ``(path, label)`` pairs).

To ask for a million dates may take seconds on a local disk and many minutes over a network. So of a column
hotset first looks at 64 evenly spread candidates, then at 1,024, then at all. The next round follows only if,
at the pace of the last one, it will end in time. The number of candidates that it looked at is part of the
digest, and a note tells it. Two processes agree unless one of them is right at the limit, or only one finds
the network's answers cached; then they have two caches where one would do, and neither is wrong.

hotset asks for the versions of files that a library reads over a network in the same rounds.

It searches a folder only if the state does not name a file in it: an ``ImageFolder`` names all of its files,
a dataset that keeps ``root`` and bare names does not. Hidden files and locks do not count, as reading a
dataset may make them. Nor do folders into which any program writes: the home directory, the temporary
directory, the working directory and its parents. Nor does what the kernel makes up (``/proc``), which each
process sees otherwise.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import stat
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

__all__ = ["LONGEST", "Decoded", "Files", "OfArrow"]

_ROUNDS = (64, 1024)
_FILES_OF_FOLDERS = 20_000
LONGEST = 4096
"""What is longer than so many bytes is no path."""


class Files:
    """Collects candidates, then asks for them once.

    Example:
        >>> files = Files()
        >>> files.add("/no/such/file")
        >>> _, notes = files.compare(2.0)
        >>> notes
        []
    """

    def __init__(self) -> None:
        self._single: dict[str, bool] = {}
        self._columns: list[Sequence[str]] = []
        self._remote: dict[str, Callable[[], bytes]] = {}
        self.unreachable: list[str] = []

    def add(self, text: str, *, folder: bool = True) -> None:
        """Add one candidate. ``folder=False``: a constant in code, which may name a file but not a folder."""
        if 0 < len(text) <= LONGEST:
            self._single[text] = folder or self._single.get(text, False)

    def add_column(self, texts: Sequence[str]) -> None:
        """Add many candidates of one kind."""
        self._columns.append(texts)

    def add_remote(self, name: str, version: Callable[[], bytes]) -> None:
        """Add a file that is not on this machine: ``version`` asks for what changes when it does.

        If it raises, ``unreachable`` gets a phrase that says so.
        """
        self._remote[name] = version

    def texts(self) -> list[str]:
        """The candidates that came singly, sorted."""
        return sorted(self._single)

    def compare(self, seconds: float) -> tuple[bytes, list[str]]:
        """Ask for sizes and dates, for about ``seconds`` at most.

        Returns:
            A digest of the files that exist, and sentences about what was left out.
        """
        deadline = time.perf_counter() + seconds
        notes: list[str] = []
        columns = [_Column(sorted(self._single), deadline, _look_on_disk, mixed=True)]
        columns += [_Column(texts, deadline, _look_on_disk) for texts in self._columns]
        folders = [path for column in columns for path in column.folders if self._single.get(path, True)]
        known = [path for column in columns for path in _spread(column.files, _ROUNDS[-1])]
        columns.append(_Column(_inside(folders, known, notes), deadline, _look_on_disk))
        columns.append(_Column(sorted(self._remote), deadline, self._look_at_remote))
        # The candidates of a set come in another order in each process.
        digests = sorted(column.digest for column in columns)
        asked = sum(len(column.asked) for column in columns if column.files)
        total = sum(column.size for column in columns if column.files)
        if asked < total:
            notes.append(f"the sizes and dates of {asked:,} of {total:,} files were compared")
        return hashlib.blake2b(b"".join(digests), digest_size=16).digest(), notes

    def _look_at_remote(self, name: str) -> bytes:
        try:
            version = self._remote[name]()
        except Exception as error:  # of a library's or a server's
            self.unreachable.append(f"the version of {name} could not be asked for ({error})")
            version = os.urandom(16)
        parts = name.encode("utf-8", "surrogatepass"), version
        return b"".join(len(part).to_bytes(8, "little") + part for part in parts)


class Decoded(Sequence[str]):
    """Candidates that are bytes, each decoded as it is asked for: most columns of bytes are no paths.

    Many keep a million paths in an array of numpy's, whose dtype is ``S``, so that forked workers do not copy
    the memory of a list.

    Example:
        >>> Decoded([b"a.jpg", b"b.jpg"])[1]
        'b.jpg'
    """

    def __init__(self, encoded: Any) -> None:
        self._encoded = encoded

    def __len__(self) -> int:
        return len(self._encoded)

    def __getitem__(self, place: Any) -> Any:
        text = self._encoded[place]
        return os.fsdecode(text) if len(text) <= LONGEST else ""


class OfArrow(Decoded):
    """Candidates in a column of Arrow's that holds texts, each read as it is asked for."""

    def __getitem__(self, place: Any) -> Any:
        return self._encoded[place].as_py() or ""  # None where one is missing


class _Column:
    """Candidates of one kind, looked at in rounds.

    Args:
        candidates: the texts.
        deadline: when the last round should be over.
        look: returns what changes when a file does; nothing (``b""``) for a folder, None for any other text.
        mixed: whether they are of several kinds; if not, a first round without files and folders is the last.

    Attributes:
        size: number of candidates.
        asked: the candidates that were looked at.
        files, folders: those of them that are files, and that are folders.
        digest: of how many were looked at, and of what ``look`` has returned for the files.
    """

    def __init__(
        self,
        candidates: Sequence[str],
        deadline: float,
        look: Callable[[str], bytes | None],
        *,
        mixed: bool = False,
    ) -> None:
        self.size = len(candidates)
        self.asked: Sequence[str] = ()
        pace = 0.0
        for count in (*_ROUNDS, self.size):
            begun = time.perf_counter()
            # At the last round's pace, with a fifth to spare: a round that was begun is finished.
            if self.asked and begun + 1.2 * pace * min(count, self.size) > deadline:
                break
            self.asked = _spread(candidates, count)
            self._ask(look)
            pace = (time.perf_counter() - begun) / max(1, len(self.asked))
            if len(self.asked) == self.size or not (mixed or self.files or self.folders):
                break

    def _ask(self, look: Callable[[str], bytes | None]) -> None:
        digest = hashlib.blake2b(len(self.asked).to_bytes(8, "little"), digest_size=16)
        self.files: list[str] = []
        self.folders: list[str] = []
        for text in self.asked:
            found = look(text)
            if found:
                self.files.append(text)
                digest.update(found)
            elif found is not None:
                self.folders.append(text)
        self.digest = digest.digest()


def _look_on_disk(path: str) -> bytes | None:
    try:
        found = os.stat(path)
    except (OSError, ValueError):  # it does not exist, or the string is not a path
        return None
    if found.st_dev in _of_kernel():
        return None
    if stat.S_ISREG(found.st_mode):
        name = path.encode("utf-8", "surrogatepass")
        numbers = len(name) + (found.st_size << 128) + (found.st_mtime_ns << 256)  # 16 bytes each
        return numbers.to_bytes(48, "little", signed=True) + name
    return b"" if stat.S_ISDIR(found.st_mode) else None


@functools.cache
def _of_kernel() -> frozenset[int]:
    """The devices of file systems whose files the kernel makes up. (psutil names ``/proc`` in a global.)"""
    return frozenset(os.stat(path).st_dev for path in ("/proc", "/sys") if os.path.ismount(path))


def _spread(items: Sequence[str], count: int) -> Sequence[str]:
    if count >= len(items):
        return items
    return [items[i * (len(items) - 1) // (count - 1)] for i in range(count)]


def _inside(folders: Iterable[str], known: Sequence[str], notes: list[str]) -> list[str]:
    """The files in the folders that hold no known file, sorted; adds a note for each folder left out."""
    busy = _busy()
    prefixes = {parent for path in known for parent in _parents(path)}
    found: list[str] = []
    for folder in folders:
        if folder.rstrip("/") in prefixes:
            continue
        if _whole(folder) in busy:
            if folder.strip("./"):  # otherwise it is most likely a separator or a suffix
                notes.append(f"the files in {folder} were not compared: other programs write there")
            continue
        before = len(found)
        _walk(folder, found)
        if len(found) >= _FILES_OF_FOLDERS:
            notes.append(f"of the files in {folder} only the first {len(found) - before:,} were compared")
            break
    return found


def _busy() -> set[Path]:
    """Folders in which other programs write."""
    busy = {Path(os.path.expanduser("~"))}
    with contextlib.suppress(OSError):  # the working folder was removed
        here = Path.cwd()
        busy |= {here, *here.parents}
    with contextlib.suppress(OSError):  # there is no folder for temporary files that can be written to
        busy.add(Path(tempfile.gettempdir()))
    return busy


def _whole(folder: str) -> Path:
    """The folder's path from the root; of one that is relative to a folder that was removed, as it is."""
    try:
        return Path(folder).resolve()
    except OSError:
        return Path(folder)


def _parents(path: str) -> Iterable[str]:
    end = path.rfind("/")
    while end > 0:
        yield path[:end]
        end = path.rfind("/", 0, end)


def _walk(folder: str, found: list[str]) -> None:
    """Append the folder's files, then its subfolders', up to the bound."""
    waiting = [folder]
    while waiting and len(found) < _FILES_OF_FOLDERS:
        try:
            with os.scandir(waiting.pop()) as scan:
                entries = sorted(scan, key=lambda entry: entry.name)
        except OSError:  # not readable, or removed since
            continue
        visible = [entry for entry in entries if not _is_temporary(entry.name)]
        found += [entry.path for entry in visible if _is_file(entry)][: _FILES_OF_FOLDERS - len(found)]
        waiting += [entry.path for entry in reversed(visible) if entry.is_dir(follow_symlinks=False)]


def _is_file(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_file()
    except OSError:  # a link that leads round, or to where this user may not look
        return False


def _is_temporary(name: str) -> bool:
    return name.startswith(".") or name == "__pycache__" or name.endswith((".lock", "lock.mdb"))
