"""``hotset.SharedCache``: a list of samples in shared memory that a dataset fills and reads itself.

It has the interface of stocaching 0.2.1, so changing an import is enough:

    from hotset import SharedCache      # from stocaching import SharedCache

There is a slot for each of the first ``len(cache)`` samples, and no plan or probe: the user decides what is
cached, and must make sure that it is the same each time. Otherwise use :func:`hotset.cache`.

It differs from stocaching where that lost or mixed up samples: no memory is touched before a slot is set; a
read returns a complete copy, which the caller owns; if workers set one slot at the same time, both calls
return, and one of the samples is kept; without room a slot stays empty, after one warning; ``cache[i] = x``
marks the slot as set, and ``cache[i]`` of an empty slot is an error instead of zeros; dtypes and shapes must
be the cache's.
"""

from __future__ import annotations

import contextlib
import copy
import json
import operator
import os
import secrets
import threading
from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np
import torch

from hotset._warnings import warn
from hotset.dataset.attachment import Attachment
from hotset.dataset.sample_spec import SampleSpec, limit_in_bytes, sample_count
from hotset.errors import ArgumentError, SegmentError
from hotset.session.find_or_create import find_or_create_in_job
from hotset.store.format import PRESENT, Live
from hotset.store.segment import Words
from hotset.store.slots import Slots

__all__ = ["SharedCache", "get_shm_size"]

_EMPTY, _SET, _OUTSIDE = 0, 1, 2


class _Seen(threading.local):
    """For each slot, the index word of the record that this thread has set or read last."""

    words: Words | None = None


class SharedCache:
    """Slots for the samples of a dataset, shared by every process that has the object.

    By fork, or by pickle to spawned workers, all processes share one cache; each may set and get. If a
    process is killed while it sets a slot, the slot stays empty.

    Args:
        size_limit_gib: the most that the samples may take, in GiB; may be a fraction. If the dataset does
            not fit, the first ``len(cache)`` samples have a slot. As with stocaching, the samples' own bytes
            are counted, and one byte for each sample's state; records and their index take up to 31 bytes a
            slot more. With ``data_dims=None`` whole records are counted.
        dataset_len: the number of samples of the dataset.
        data_dims: the shape of each sample, without a batch dimension, such as ``(3, 224, 224)``; or None if
            it varies, also in the number of dimensions.
        dtype: the dtype of the samples: any torch.dtype whose values are whole bytes.
        key: a name for what is cached. Ranks of one job on one machine (torchrun, Accelerate, Lightning,
            srun, mpirun) that each make a cache with one key and equal arguments share it: sample ``i``
            must be the same for all of them. Without a key each rank has its own.

    Raises:
        QuantityError: ``size_limit_gib`` is negative, or not a number.
        ArgumentError: one of the others is not as described above, or a sample would have 2 GiB or more.
        UnsupportedPlatform: this is not Linux.

    Example:
        >>> cache = SharedCache(size_limit_gib=0.001, dataset_len=3, data_dims=(2,), dtype=torch.int16)
        >>> cache.get_slot(1)  # None: not set yet
        >>> cache.set_slot(1, torch.tensor([4, 5], dtype=torch.int16))
        >>> cache.get_slot(1), len(cache), cache.aux_array
        (tensor([4, 5], dtype=torch.int16), 3, tensor([0, 1, 0], dtype=torch.uint8))
        >>> molecules = SharedCache(0.001, dataset_len=3, data_dims=None, dtype=torch.float32)
        >>> molecules[2] = torch.zeros(7, 3)
        >>> molecules[2].shape
        torch.Size([7, 3])
    """

    def __init__(
        self,
        size_limit_gib: float,
        dataset_len: int,
        data_dims: Sequence[int] | None,
        dtype: torch.dtype = torch.uint8,
        *,
        key: str | None = None,
    ) -> None:
        limit = limit_in_bytes(size_limit_gib)
        self._samples = sample_count(dataset_len)
        self._spec = SampleSpec(data_dims, dtype)
        self._length, lines = self._spec.share_out(limit, self._samples)
        self._slots: Slots | None = None
        self._attachment = Attachment(None, None, "")
        self._seen = _Seen()
        if self._length:
            # A random key is not shared. Ranks share only with `key=`, as each may have its own part of the
            # data.
            self._open(lines, secrets.token_hex(16) if key is None else key)
        elif limit:
            warn(
                f"SharedCache: size_limit_gib={size_limit_gib} is too small for one of {self._samples:,} "
                "samples, so nothing is cached; raise `size_limit_gib=`, or give 0 to cache nothing without "
                "a warning."
            )

    # ---- stocaching's interface ----------------------------------------------------------------------

    def __len__(self) -> int:
        """The number of slots: this many samples of the dataset, from the first on, can be cached."""
        return self._length

    @property
    def array(self) -> torch.Tensor:
        """All slots as one tensor of shape ``(len(cache), *data_dims)`` over the shared memory itself.

        It is a strided, writable view, and shows zeros where nothing was set. It is not synchronised: while a
        slot is overwritten, a read may return half of one sample and half of the next. A write does not mark
        the slot as set, does not check whether there is room, and makes ``hotset check`` report that record
        as damaged.

        Raises:
            ArgumentError: the cache was made with ``data_dims=None``.
            SegmentError: its memory cannot be attached to.
        """
        spec, shape = self._spec, (self._length, *(self._spec.dims or ()))
        if spec.dims is None:
            raise ArgumentError(
                "A SharedCache with data_dims=None has no array, as its samples have no common shape; read "
                "them one by one with `get_slot`."
            )
        if 0 in shape:
            return torch.empty(shape, dtype=spec.dtype, device="cpu")
        slots = self._here()
        if slots is None:
            raise SegmentError(
                "This SharedCache has no memory in this process, so there is no array; the warning that came "
                "before says why."
            )
        segment = slots.segment
        stride = segment.geometry.stride // spec.dtype.itemsize
        everything = torch.frombuffer(
            segment.buffer, dtype=spec.dtype, count=stride * self._length, offset=segment.geometry.rows_at
        )
        inner = torch.empty(spec.dims, device="meta").stride()
        return everything.as_strided(shape, (stride, *inner), spec.schema.offsets[0] // spec.dtype.itemsize)

    @property
    def aux_array(self) -> torch.Tensor:
        """The state of each sample of the dataset, uint8, shape ``(dataset_len,)``: 0 is empty, 1 is set, 2
        has no slot.

        Each access makes a new snapshot (about 1 ms for a million samples): it does not change, and writing
        to it has no effect. For the state of one sample use ``get_slot``.
        """
        states = np.full(self._samples, _OUTSIDE, np.uint8)
        slots = self._here()
        states[: self._length] = _EMPTY if slots is None else np.where(slots.present(), _SET, _EMPTY)
        return torch.from_numpy(states)

    def __getitem__(self, idx: int) -> torch.Tensor:
        """Return a copy of a slot; negative numbers count from the end of the cache.

        Raises:
            IndexError: ``idx`` is out of range.
            RuntimeError: the slot is empty.
            TypeError: ``idx`` is not an integer.
        """
        return self._get(self._slot_number(idx), allow_empty_slot=False)  # type: ignore[return-value]

    def __setitem__(self, idx: int, value: torch.Tensor) -> None:
        """Set a slot, whether or not it was set; negative numbers count from the end of the cache.

        Raises:
            IndexError, ArgumentError, TypeError: as :meth:`set_slot`.
        """
        self._set(self._slot_number(idx), value, allow_overwrite=True)

    def get_slot(
        self, idx: int, allow_oob_idx: bool = True, allow_empty_slot: bool = True
    ) -> torch.Tensor | None:
        """Return a copy of sample ``idx``, or None if it is not cached.

        Args:
            idx: the index of a sample of the dataset.
            allow_oob_idx: False raises for a sample that has no slot.
            allow_empty_slot: False raises for a slot that is empty.

        Raises:
            IndexError: ``idx`` is out of range, or has no slot and ``allow_oob_idx`` is False.
            RuntimeError: the slot is empty, and ``allow_empty_slot`` is False.
            TypeError: ``idx`` is not an integer.
        """
        number = self._sample_number(idx)
        if number >= self._length:
            return None if allow_oob_idx else self._no_slot(number)
        return self._get(number, allow_empty_slot)

    def set_slot(
        self, idx: int, value: torch.Tensor, allow_oob_idx: bool = True, allow_overwrite: bool = False
    ) -> None:
        """Set sample ``idx``, if it has a slot and there is room.

        If another worker has set the slot, or sets it at the same time, that worker's sample is kept, and
        this call returns as if it had been the first. Only a thread that has set or read the present record
        before gets an error when it sets the slot again.

        Args:
            idx: the index of a sample of the dataset.
            value: a tensor of the cache's dtype and shape on any device, a numpy array, or a number that the
                dtype can hold. The slot holds a contiguous copy.
            allow_oob_idx: False raises for a sample that has no slot.
            allow_overwrite: replace a present sample. Processes that read it meanwhile get the old one or the
                new one.

        Raises:
            IndexError: ``idx`` is out of range, or has no slot and ``allow_oob_idx`` is False.
            RuntimeError: this thread has set or read the slot before, and ``allow_overwrite`` is False.
            ArgumentError: ``value`` has another dtype or shape than the cache.
            TypeError: ``idx`` is not an integer.

        Warns:
            HotsetWarning: there is no room; once for all processes.
        """
        number = self._sample_number(idx)
        if number < self._length:
            self._set(number, value, allow_overwrite)
        elif not allow_oob_idx:
            self._no_slot(number)

    def clear(self) -> None:
        """Empty all slots, for all processes, and free their memory.

        Raises:
            SegmentError: another process went on setting slots for five seconds.
        """
        slots = self._here()
        if slots is not None and not slots.store.clear():
            raise SegmentError(
                "This SharedCache cannot be cleared while other processes fill it; stop them first."
            )

    # ---- slots ---------------------------------------------------------------------------------------

    def _get(self, number: int, allow_empty_slot: bool) -> torch.Tensor | None:
        slots = self._here()
        found = slots.get(number) if slots is not None else None
        if found is not None:
            self._known()[number] = found[1]
            return self._spec.unpack(found[0])
        if allow_empty_slot:
            return None
        raise RuntimeError(
            f"Slot {number} of this SharedCache is empty; set it first, or use `get_slot`, which returns "
            "None."
        )

    def _set(self, number: int, value: object, allow_overwrite: bool) -> None:
        slots = self._here()
        if slots is None:
            self._spec.prepare(value)  # raise an error for a wrong sample also without a cache
            return
        word = slots.word(number)
        if word >= PRESENT and not allow_overwrite:
            if self._known()[number] == word:
                raise RuntimeError(
                    f"Slot {number} of this SharedCache is set already; to replace its sample, give "
                    "`allow_overwrite=True`."
                )
            return
        word = slots.put(number, self._spec.prepare(value), overwrite=allow_overwrite)
        if word:
            self._known()[number] = word
        else:
            self._warn_full(slots)

    def _known(self) -> Words:
        """The records that this thread has seen. Memory is only touched for the slots that it uses."""
        if self._seen.words is None:
            self._seen.words = np.zeros(self._length, np.int64)
        return self._seen.words

    def _warn_full(self, slots: Slots) -> None:
        """Warn, once for all processes, that the cache is full, and which argument to raise."""
        live = slots.segment.live
        if slots.store.allocator.why_full is not None and not live[Live.WARNED]:
            live[Live.WARNED] = 1
            warn(
                f"SharedCache: {int(slots.present().sum()):,} of {self._length:,} slots are set, and no more "
                f"fit: {slots.store.allocator.why_full}."
            )

    def _sample_number(self, idx: int) -> int:
        number = _integer(idx)
        if not 0 <= number < self._samples:
            raise IndexError(f"Index {number} is out of range for a dataset of {self._samples:,} samples.")
        return number

    def _slot_number(self, idx: int) -> int:
        number = _integer(idx)
        if not -self._length <= number < self._length:
            self._no_slot(number)
        return number % self._length

    def _no_slot(self, number: int) -> NoReturn:
        raise IndexError(
            f"Index {number} has no slot in a SharedCache of {self._length:,} slots; raise "
            "`size_limit_gib=`, or use `get_slot` and `set_slot`, which accept every index of the dataset."
        )

    # ---- processes -----------------------------------------------------------------------------------

    def _open(self, lines: int, key: str) -> None:
        spec, name = self._spec, f"SharedCache of {self._samples} x {self._spec.dims or 'any shape'}"

        def create() -> Slots | None:
            try:
                return Slots.create(spec.schema, self._length, lines, about={"name": name})
            except (OSError, MemoryError, ValueError, OverflowError) as error:
                warn(
                    f"SharedCache: no cache can be made, so every slot stays empty: {error}. Check the "
                    "limits of this shell (`ulimit -a`), or lower `size_limit_gib=`."
                )
                return None

        content = json.dumps([key, self._samples, self._length, lines, spec.dims, str(spec.dtype)])
        content = f"hotset.SharedCache {content}"
        shared = find_or_create_in_job(content, name, create=create, attach=Slots.attach)
        if shared.value is not None:
            self._slots = shared.value
            self._attachment = Attachment(shared.value.store, shared.handle, name)

    def _here(self) -> Slots | None:
        """The slots, after listing this process as one that keeps them alive; None without a cache."""
        return self._slots if self._attachment.store() is not None else None

    def __getstate__(self) -> dict[str, Any]:
        # A copy in this process attaches by itself, and has a share of its own, as it may be closed first.
        return {**self.__dict__, "_seen": None, "_slots": None, "_attachment": copy.copy(self._attachment)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _seen=_Seen())
        try:
            store = self._attachment.attach()  # at once: the sending process may close it soon
        except (SegmentError, OSError) as error:
            self._attachment.close()
            warn(
                f"SharedCache: its memory cannot be attached to, so every slot is empty: {error} Unpickle it "
                "on the same machine, while a process that has it lives."
            )
            return
        self._slots = Slots(store) if store is not None else None

    def __del__(self, suppress: type[contextlib.suppress] = contextlib.suppress) -> None:
        # At interpreter exit anything may be gone already, this module's imports included.
        with suppress(Exception):
            self._attachment.close()


def get_shm_size() -> int:
    """Return the size of ``/dev/shm`` in whole GiB, rounded down.

    stocaching's caches are there. A :class:`SharedCache` is not, so this does not limit it; the limits are
    the memory of the machine and of the control group.

    Raises:
        OSError: ``/dev/shm`` does not exist.

    Example:
        >>> get_shm_size() >= 0
        True
    """
    status = os.statvfs("/dev/shm")
    return status.f_blocks * status.f_frsize >> 30


def _integer(idx: object) -> int:
    try:
        return operator.index(idx)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"The index of a SharedCache must be an int, got {idx!r}.") from None
