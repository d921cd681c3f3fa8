"""Files of `fsspec`, which may lie on another machine: described by the version that their store reports.

=============  =========================================================================================
what           is described by
=============  =========================================================================================
file system    its class and the arguments that it was made with, without passwords; what it holds
               besides (process number, listings, connections) differs from process to process
file system    its files, of which only this process has any
in memory
file, opened   its file system, path and mode; unless it is only written to, its version: ETag, version,
or not         generation, checksum, size and date, as far as the store tells them
=============  =========================================================================================

hotset asks for all versions together: :meth:`hotset.determinism.fingerprint.data_files.Files.add_remote`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from hotset.determinism.fingerprint.describe import Describer, Handler, by_parts

__all__ = ["OF_REMOTE_FILES"]

_VERSION = re.compile(
    r"etag|version(id)?|generation|(content)?md5(hash)?|crc32c|digest|checksum|size|mtime|updated|"
    r"(time|last)?modified"
)
_SECRET = re.compile(r"key|secret|token|password|username|loop|asynchronous|.*_(key|token|secret|password)")


def _parts_of_file_system(system: Any) -> tuple[Any, ...]:
    options = {name: value for name, value in system.storage_options.items() if not _SECRET.fullmatch(name)}
    return type(system), system.storage_args, options


def _file(to: Describer, file: Any) -> None:
    to.put(b"o")
    to.add(type(file), file.fs)
    to.name(str(file.path), str(file.mode))
    to.add(getattr(file, "compression", None), getattr(file, "encoding", None))
    if "r" in file.mode or "+" in file.mode:
        name = f"{file.path} ({to.describe(file.fs).hex()[:8]})"
        to.files.add_remote(name, lambda: _version(file.fs.info(file.path)))


def _version(info: Mapping[str, Any]) -> bytes:
    """The part of a store's information about a file that changes with the file's content."""
    plain = {re.sub(r"[-_ ]", "", name.lower()): value for name, value in info.items()}
    said = sorted((name, str(value)) for name, value in plain.items() if _VERSION.fullmatch(name))
    return repr(said).encode("utf-8", "surrogatepass")


OF_REMOTE_FILES: dict[type | str, Handler] = {
    "fsspec.spec.AbstractFileSystem": by_parts(b"h", _parts_of_file_system),
    "fsspec.implementations.memory.MemoryFileSystem": by_parts(
        b"h", lambda system: (type(system), dict(system.store))
    ),
    "fsspec.core.OpenFile": _file,
    "fsspec.spec.AbstractBufferedFile": _file,
    "fsspec.implementations.local.LocalFileOpener": _file,
}
