"""The fingerprint: 32 digits that two pipelines share only if they give the same samples.

A cache outlives the object that filled it, so its name must say what is in it: which dataset, with which
parameters, over which files, through which code. The name of a class or function does not say that: two
lambdas have one name, and an edited function keeps its name. So an object is described by *what it is made
of*, recursively, and the description is hashed.

======================  ===========================================================================
what                    is described by
======================  ===========================================================================
number, text, None      type and value: 1, 1.0 and True are three things
tuple, list, dict       type, length, elements in order
set                     type, length, elements in the order of their own descriptions
array, tensor           dtype, shape and all of its bytes; over a mapped large file: its place in the file
object                  its class and attributes; written in C: what pickling it returns
class of the user       bases and everything in its body, methods by their code
class, installed        its name, and the distribution's version
function                code, constants, defaults, closure; the user's, the globals it reads too
text that is a path     also the file's size and date: :mod:`.data_files`
Arrow table             its rows, or the large file that it maps: :mod:`.arrow_tables`
open file, mapping, ..  the file, or content: :mod:`.handles`
file of `fsspec`        file system, path and version: :mod:`.remote_files`
``__hotset_version__``  what this method of an object returns, besides its attributes
the environment         variables that code reads, torch's defaults: :mod:`.environment`
======================  ===========================================================================

Some things hold no data of the dataset and count by their type alone: random generators, locks, threads,
loggers, weak references. Attributes whose names begin with ``_hotset`` do not count. An object that cannot be
described (a running generator, a connection) is described by random bytes: no other process has such a
fingerprint, and a sentence names the object.

**Encoding.** Every description begins with a tag, and what follows has a length or a fixed number of parts,
so that no two things have one description (``("ab", "c")`` and ``("a", "bc")``). Anything but a number or a
text is hashed by itself, and its hash stands in its parent's description. So a shared object counts like two
equal ones: whether two attributes hold one list or two equal lists must not matter, as pickling may change
it. A cycle is described by how many objects lie between its two ends.

**Columns.** A million ``(path, label)`` pairs are described column by column by ``marshal``, whose version 2
writes text, numbers and None without a trace of identity or hash seed, in C: 1.3 million pairs take 0.6 s.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hotset.determinism.fingerprint.describe import Describer
from hotset.determinism.fingerprint.environment import describe_environment
from hotset.determinism.fingerprint.type_handlers import HANDLERS

__all__ = ["Fingerprint", "fingerprint"]

# Part of every digest: increase the number with every change of the encoding.
_ENCODING = b"hotset fingerprint 7"


@dataclass(frozen=True)
class Fingerprint:
    """What tells one pipeline from another.

    Attributes:
        digest: 32 hexadecimal digits.
        notes: sentences about what was only sampled, or does not count.
        unknowns: phrases about what could not be described. If there are any, no two fingerprints are alike,
            even of one object.
    """

    digest: str
    notes: tuple[str, ...]
    unknowns: tuple[str, ...] = ()


def fingerprint(
    source: object, prefix: Sequence[Callable[..., Any]] = (), *, seconds: float = 2.0
) -> Fingerprint:
    """Return the identity of a dataset and of the deterministic transforms after it.

    It is the same in every process and run, under every hash seed, for the same code and parameters, the same
    versions of libraries, files of the same sizes and dates, and the same environment. It is another one
    otherwise, and wherever something could not be described. Only attributes are read (and ``__reduce_ex__``
    of objects written in C, and ``__hotset_version__``); no random number is drawn.

    State that changes while samples are read (a count of the calls, a log file that the dataset names)
    changes the fingerprint: take it before reading, or give ``hotset.cache`` a ``key=``.

    Args:
        source: the dataset.
        prefix: the transforms that are applied to its samples before they are cached, in order.
        seconds: about how long to ask for sizes and dates of files. If there are more files than that allows,
            a fixed number of evenly spread ones is compared, and a note says so. Right at the limit, two
            processes may decide differently, and have different fingerprints.

    Raises:
        OSError: the dataset holds a PIL image, and its file could not be read.

    Example:
        >>> ours = fingerprint([1, 2, 3], [lambda x: x + 1])
        >>> ours == fingerprint([1, 2, 3], [lambda x: x + 1])
        True
        >>> ours == fingerprint([1, 2, 3], [lambda x: x + 2])
        False
    """
    to = Describer(HANDLERS)
    described = [to.describe(source), to.describe(tuple(prefix))]
    environment, notes = describe_environment(to)
    files, notes_on_files = to.files.compare(seconds)
    digest = hashlib.blake2b(_ENCODING, digest_size=16)
    for part in (*described, environment, files):
        digest.update(len(part).to_bytes(8, "little") + part)
    unknowns = (*to.unknowns, *to.files.unreachable)
    return Fingerprint(digest.hexdigest(), (*notes_on_files, *notes), unknowns)
