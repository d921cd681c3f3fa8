"""``hotset.SharedCache``: a list of samples in shared memory that a data set fills and reads by hand.

It has the interface of stocaching 0.2.1, so that changing an import is enough:

    from hotset import SharedCache      # from stocaching import SharedCache

There is a slot for each of the first ``len(cache)`` samples, and no key, plan or probe: what is cached, and
that it is the same each time, is the user's business. :func:`hotset.cache` is for everybody else.

What differs, because it lost or mixed up samples: nothing is touched before it is set; what is read is a
copy, whole, and the reader's own; workers that set one slot at the same time both return, and one of their
samples is kept; without room a slot stays empty, after one warning; ``cache[i] = x`` marks the slot as set,
and ``cache[i]`` of an empty slot is an error instead of zeros; dtypes and shapes must be the cache's.
"""

from __future__ import annotations

import contextlib
import json
import operator
import os
import secrets
import threading
from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np
import torch
from torch.utils.data import get_worker_info

from hotset._warnings import warn
from hotset.dataset.sample_spec import SampleSpec, limit_in_bytes, sample_count
from hotset.errors import ArgumentError, SegmentError, UnsupportedPlatform
from hotset.session.find_or_create import CacheHandle, attach_again, find_or_create_in_job
from hotset.store.format import PRESENT, Live
from hotset.store.segment import Address, Words
from hotset.store.slots import Slots

__all__ = ["SharedCache", "get_shm_size"]

_EMPTY, _SET, _OUTSIDE = 0, 1, 2


class _Seen(threading.local):
    """For each slot, the index word of the record that this thread has set or read last."""

    words: Words | None = None


class SharedCache:
    """Slots for the samples of a data set, shared by every process that is given the object.

    By fork, or by pickle to spawned workers, all processes see one cache; each may set and get. A process
    that is killed while it sets a slot leaves it empty.

    Args:
        size_limit_gib: the most that the samples may take, in GiB; may be a fraction. If the data set does
            not fit, the first ``len(cache)`` samples have a slot. As with stocaching the samples' own bytes
            are counted, and one for each sample's state; records and their index take up to 31 bytes a slot
            more. With ``data_dims=None`` records are counted whole.
        dataset_len: number of samples of the data set.
        data_dims: shape of each sample, without a batch dimension, such as ``(3, 224, 224)``; or None if
            it varies, also in the number of dimensions.
        dtype: of the samples; any of torch's whose values are whole bytes.
        key: a name for what is cached. Ranks of one job on one machine (torchrun, Accelerate, Lightning,
            srun, mpirun) that each make a cache with one key and equal arguments share it: sample ``i``
            must be the same for all of them. Without a key each rank has its own.

    Raises:
        QuantityError: ``size_limit_gib`` is negative, or no number.
        ArgumentError: one of the others is not as described above, or a sample would have 2 GiB or more.
        UnsupportedPlatform: this is not Linux.

    Example:
        >>> cache = SharedCache(size_limit_gib=0.001, dataset_len=3, data_dims=(2,), dtype=torch.int16)
        >>> cache.get_slot(1)  # None: not there yet
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
        self._form = SampleSpec(data_dims, dtype)
        self._length, lines = self._form.share_out(limit, self._samples)
        self._slots: Slots | None = None
        self._registration: CacheHandle | None = None
        self._joined = os.getpid()
        self._seen = _Seen()
        if self._length:
            # Nobody else has a random key. Ranks share only when told: each may have its part of the data.
            self._open(lines, secrets.token_hex(16) if key is None else key)
        elif limit:
            _warn(
                f"SharedCache: size_limit_gib={size_limit_gib} is too little for one of {self._samples:,} "
                "samples, so nothing is cached; raise `size_limit_gib=`, or give 0 to say so."
            )

    # ---- stocaching's interface ----------------------------------------------------------------------

    def __len__(self) -> int:
        """Number of slots: the first so many samples of the data set can be cached."""
        return self._length

    @property
    def array(self) -> torch.Tensor:
        """All slots as one tensor of shape ``(len(cache), *data_dims)`` over the shared memory itself.

        It is a strided view, writable, and shows zeros where nothing was set. Nothing guards it: what is
        read through it may be half of one sample and half of the next while a slot is overwritten, and
        what is written through it marks no slot as set, does not ask whether there is room, and makes
        ``hotset check`` call that record damaged.

        Raises:
            ArgumentError: the cache was made with ``data_dims=None``.
            SegmentError: its memory is out of reach.
        """
        form, shape = self._form, (self._length, *(self._form.dims or ()))
        if form.dims is None:
            raise ArgumentError(
                "This SharedCache was made with data_dims=None: its samples have no shape in common, and so "
                "no array; read them one by one with `get_slot`."
            )
        if 0 in shape:
            return torch.empty(shape, dtype=form.dtype)
        slots = self._here()
        if slots is None:
            raise SegmentError("The memory of this SharedCache is out of reach here, so there is no array.")
        segment = slots.segment
        stride = segment.geometry.stride // form.dtype.itemsize
        everything = torch.frombuffer(
            segment.buffer, dtype=form.dtype, count=stride * self._length, offset=segment.geometry.rows_at
        )
        inner = torch.empty(form.dims, device="meta").stride()
        return everything.as_strided(shape, (stride, *inner), form.schema.offsets[0] // form.dtype.itemsize)

    @property
    def aux_array(self) -> torch.Tensor:
        """State of each sample of the data set, uint8, shape ``(dataset_len,)``: 0 is empty, 1 is set, 2 has
        no slot.

        It is a snapshot, made anew at each access (about 1 ms for a million samples): it does not change,
        and writing to it changes nothing. To ask for one sample, ask ``get_slot``.
        """
        states = np.full(self._samples, _OUTSIDE, np.uint8)
        slots = self._here()
        states[: self._length] = _EMPTY if slots is None else np.where(slots.present(), _SET, _EMPTY)
        return torch.from_numpy(states)

    def __getitem__(self, idx: int) -> torch.Tensor:
        """Return a copy of a slot; negative numbers count from the end of the cache.

        Raises:
            IndexError: there is no such slot.
            RuntimeError: it is empty.
            TypeError: ``idx`` is no integer.
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
            idx: number of a sample of the data set.
            allow_oob_idx: False raises for a sample that has no slot.
            allow_empty_slot: False raises for a slot that is empty.

        Raises:
            IndexError: ``idx`` is no sample of the data set (or has no slot, if that was asked for).
            RuntimeError: the slot is empty, if that was asked for.
            TypeError: ``idx`` is no integer.
        """
        number = self._sample_number(idx)
        if number >= self._length:
            return None if allow_oob_idx else self._no_slot(number)
        return self._get(number, allow_empty_slot)

    def set_slot(
        self, idx: int, value: torch.Tensor, allow_oob_idx: bool = True, allow_overwrite: bool = False
    ) -> None:
        """Set sample ``idx``, if it has a slot and there is room.

        A slot that another worker has set, or is setting, at the same time keeps that worker's sample, and
        this call returns as if it had been the first. Only who has set or read the record that is there
        is told that it overwrites one.

        Args:
            idx: number of a sample of the data set.
            value: a tensor of the cache's dtype and shape on any device; a numpy array too, or a number
                that the dtype can hold. The slot holds a contiguous copy.
            allow_oob_idx: False raises for a sample that has no slot.
            allow_overwrite: replace the sample that is there. Processes that read it meanwhile get the old
                one or the new one.

        Raises:
            IndexError: ``idx`` is no sample of the data set (or has no slot, if that was asked for).
            RuntimeError: this thread has set or read the slot before, and may not overwrite it.
            ArgumentError: ``value`` has another dtype or shape than the cache.
            TypeError: ``idx`` is no integer.

        Warns:
            HotsetWarning: there is no room; once for all processes.
        """
        number = self._sample_number(idx)
        if number < self._length:
            self._set(number, value, allow_overwrite)
        elif not allow_oob_idx:
            self._no_slot(number)

    def clear(self) -> None:
        """Empty all slots, for all processes, and give their memory back.

        Raises:
            SegmentError: another process went on setting slots for five seconds.
        """
        slots = self._here()
        if slots is not None and not slots.store.clear():
            raise SegmentError("This SharedCache cannot be cleared while other processes fill it; stop them.")

    # ---- slots ---------------------------------------------------------------------------------------

    def _get(self, number: int, allow_empty_slot: bool) -> torch.Tensor | None:
        slots = self._here()
        found = slots.get(number) if slots is not None else None
        if found is not None:
            self._known()[number] = found[1]
            return self._form.unpack(found[0])
        if allow_empty_slot:
            return None
        raise RuntimeError(
            f"Slot {number} of this SharedCache is empty; set it first, or use `get_slot`, which gives None."
        )

    def _set(self, number: int, value: object, allow_overwrite: bool) -> None:
        slots = self._here()
        if slots is None:
            self._form.prepare(value)  # what is wrong with it is wrong without a cache too
            return
        word = slots.word(number)
        if word >= PRESENT and not allow_overwrite:
            if self._known()[number] == word:
                raise RuntimeError(
                    f"Slot {number} of this SharedCache is set already; to replace its sample give "
                    "`allow_overwrite=True`."
                )
            return
        word = slots.put(number, self._form.prepare(value), overwrite=allow_overwrite)
        if word:
            self._known()[number] = word
        else:
            self._tell(slots)

    def _known(self) -> Words:
        """Which records this thread has seen; as sparse in memory as its use of the slots."""
        if self._seen.words is None:
            self._seen.words = np.zeros(self._length, np.int64)
        return self._seen.words

    def _tell(self, slots: Slots) -> None:
        """Say, once for all processes, that there is no room, and which knob to turn."""
        live = slots.segment.live
        if slots.store.room.why_full is not None and not live[Live.TOLD]:
            live[Live.TOLD] = 1
            _warn(
                f"SharedCache: {int(slots.present().sum()):,} of {self._length:,} slots are set, and no more "
                f"fit: {slots.store.room.why_full}."
            )

    def _sample_number(self, idx: int) -> int:
        number = _integer(idx)
        if not 0 <= number < self._samples:
            raise IndexError(f"Index {number} is out of range for a data set of {self._samples:,} samples.")
        return number

    def _slot_number(self, idx: int) -> int:
        number = _integer(idx)
        if not -self._length <= number < self._length:
            self._no_slot(number)
        return number % self._length

    def _no_slot(self, number: int) -> NoReturn:
        raise IndexError(
            f"Index {number} has no slot in a SharedCache of {self._length:,} slots; raise "
            "`size_limit_gib=`, or use `get_slot` and `set_slot`, which take every sample of the data set."
        )

    # ---- processes -----------------------------------------------------------------------------------

    def _open(self, lines: int, key: str) -> None:
        form, name = self._form, f"SharedCache of {self._samples} x {self._form.dims or 'any shape'}"

        def create() -> Slots | None:
            try:
                return Slots.create(form.schema, self._length, lines, about={"name": name})
            except UnsupportedPlatform:
                raise
            except (OSError, MemoryError, ValueError, OverflowError) as error:
                _warn(
                    f"SharedCache: no cache can be made, so every slot stays empty: {error}. Look at the "
                    "limits of this shell (`ulimit -a`), or lower `size_limit_gib=`."
                )
                return None

        content = json.dumps([key, self._samples, self._length, lines, form.dims, str(form.dtype)])
        content = f"hotset.SharedCache {content}"
        shared = find_or_create_in_job(content, name, create=create, attach=Slots.attach)
        self._slots, self._registration = shared.value, shared.registration
        if self._slots is not None:
            self._slots.store.room.knob = "`size_limit_gib=`"

    def _here(self) -> Slots | None:
        """The slots, with this process listed as one that keeps them alive; None without a cache."""
        if self._joined != os.getpid():
            self._joined = os.getpid()
            # A loader's worker does not outlive those who are listed.
            if self._slots is not None and self._registration is not None and get_worker_info() is None:
                self._registration.join(self._slots.segment.fd)
        return self._slots

    def __getstate__(self) -> dict[str, Any]:
        state = dict(self.__dict__)
        del state["_seen"]
        state["_slots"] = self._slots.segment.address if self._slots is not None else None
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _seen=_Seen(), _joined=0)
        # At once: who sent it may let go of it soon.
        self._slots = self._attach(state["_slots"]) if state["_slots"] is not None else None

    def _attach(self, address: Address) -> Slots | None:
        try:
            slots = attach_again(address, Slots.attach)
        except (SegmentError, OSError) as error:
            _warn(
                f"SharedCache: its memory is out of reach, so every slot is empty: {error} Unpickle it on "
                "the same machine, while a process that has it lives."
            )
            return None
        slots.store.room.knob = "`size_limit_gib=`"
        return slots

    def __del__(self, suppress: type[contextlib.suppress] = contextlib.suppress) -> None:
        # At the interpreter's end anything may be gone already, what this module has imported too.
        with suppress(Exception):
            if isinstance(self._slots, Slots):
                self._slots.close()
            if self._registration is not None:
                self._registration.close()


def get_shm_size() -> int:
    """Return the size of ``/dev/shm`` in whole GiB, rounded down.

    stocaching's caches lie there. A :class:`SharedCache` does not, so this is no limit for it; the machine's
    memory and the control group's are.

    Raises:
        OSError: there is no ``/dev/shm``.

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
        raise TypeError(f"{idx!r} is no index of a SharedCache; give an int.") from None


def _warn(sentence: str) -> None:
    warn(sentence)
