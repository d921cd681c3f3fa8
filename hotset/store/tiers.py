"""The tiers: the segments of one store, made together and found together.

::

    first     in memory, always        its index is in charge; its metadata say what the samples are (schema),
                                       whether it is a ring, and where the second tier is (spill)
    second    on a disk, if wanted     for records that memory has no room for (hotset.store.spill)

The second is made first, as the metadata of the first name it. If it cannot be made, the user is warned, and
the store has no second tier. Both functions are context managers, which undo their work if the block fails,
so that no file is left behind.

A process that attaches to a store verifies it: the schema must describe the rows, and the second tier must be
of the same samples.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Iterator
from typing import Any

from hotset._warnings import warn
from hotset.errors import SegmentError
from hotset.store import memory_limits
from hotset.store.format import Geometry
from hotset.store.schema import Schema
from hotset.store.segment import Address, Segment
from hotset.store.spill import Spill, SpillTo, attach_spill

__all__ = ["found_tiers", "new_tiers", "require_index_room"]


@contextlib.contextmanager
def new_tiers(
    schema: Schema,
    samples: int,
    space: tuple[int, int],
    limit: int,
    *,
    ring: bool,
    keyed: bool,
    about: dict[str, Any],
    path: str | None,
    spill: SpillTo | None,
) -> Iterator[tuple[Segment, Spill | None]]:
    """Make the empty tiers of a store.

    Args:
        schema: of its samples.
        samples: how many index words it has.
        space: how many rows and lines there may ever be in memory.
        limit: bytes that these may take.
        ring: whether its rows are used again.
        keyed: whether its sample ids are given to keys.
        about: further metadata; JSON's types only.
        path: a new file for the first tier; a memfd if None.
        spill: where the second tier is to be made; None: there is none.

    Raises:
        OSError: the first tier cannot be made, or its index alone takes more memory than there is.
    """
    about = {**about, "schema": schema.to_json(), **({"ring": True} if ring else {})}
    second = _create_spill(spill, schema, samples, about) if spill is not None else None
    try:
        if spill is not None and second is not None:
            about = {**about, "spill": spill.said(second)}
        metadata = json.dumps(about).encode()
        geometry = Geometry(samples, schema.stride, *space, len(metadata), keyed)
        require_index_room(geometry)
        yield Segment.create(geometry, metadata, path=path, limit=limit), second
    except BaseException:
        if second is not None:
            second.close()
        if second is not None and spill is not None and spill.path is not None:
            os.unlink(spill.path)
        raise


def _create_spill(spill: SpillTo, schema: Schema, samples: int, about: dict[str, Any]) -> Spill | None:
    try:
        return spill.create(schema, samples, about)
    except OSError as error:
        warn(
            f"nothing is spilled to {spill.folder} ({error.strerror or error}), so samples that memory has "
            "no room for come from the source. Free space there, or name another folder by `spill=`."
        )
        return None


def require_index_room(geometry: Geometry) -> None:
    """Refuse a segment whose index alone is too large: any word of it may be touched at any time.

    Raises:
        OSError: there is not that much memory; this is not checked again later.
    """
    free = memory_limits.headroom()
    if geometry.rows_at > free.bytes:
        raise OSError(
            errno.ENOMEM,
            f"the index of {geometry.samples:,} samples takes {geometry.rows_at:,} bytes of memory, "
            f"and {free.what} has {free.bytes:,} to give",
        )


@contextlib.contextmanager
def found_tiers(where: str | Address, *, ring: bool) -> Iterator[tuple[Segment, Schema, Spill | None]]:
    """Attach to the tiers of a store that exists.

    Args:
        where: the first tier's place.
        ring: whether it must be a ring.

    Raises:
        SegmentError: see :meth:`Segment.attach`, :meth:`Schema.from_json`, :func:`attach_spill`; or it is not
            such a store.
    """
    segment, second = Segment.attach(where), None
    try:
        schema = Schema.from_json(segment.metadata.get("schema"))
        geometry = segment.geometry
        if schema.stride != geometry.stride or (schema.has_tail and not geometry.lines):
            raise SegmentError("the segment's schema does not describe its rows; `hotset gc` frees it.")
        if segment.metadata.get("ring", False) is not ring:
            raise SegmentError(
                "either the existing cache or the requested one has a window, not both; make them agree."
            )
        second = attach_spill(where, segment, schema)
        yield segment, schema, second
    except BaseException:
        if second is not None:
            second.close()
        segment.close()
        raise
