"""The key table: gives sample ids to 128-bit keys, for stores whose samples are results of functions.

A dataset numbers its samples; a function's results have keys, hashes of the function and its arguments. Which
keys will be asked for is not known beforehand. So a keyed segment hands out its sample ids in the order in
which new keys come, and this table finds the id of a key. From there on all is as in any store: claims,
index words, records. Its regions lie at the segment's end, behind the lines::

    keys_at       keys       samples x 40 B, by sample id; five u64:
                             key, high half | key, low half | version | last used, ms | function
    counters_at   counters   1,024 slots x 1,024 functions x 64 B; eight i64, written by the slot's holder:
                             calls | hits | computed | not kept | ns computing | audits | in use | 0
    functions_at  functions  1,024 x 256 B: fingerprint, 16 B | flags, 8 B | length of the name, 8 B | name
    table_at      table      u32 words, in levels: level k is words 2**k up to 2**(k+1)

Live words count the keys and the functions; each is entered before it is counted.

**Levels.** A level is a hash table with linear probing; a word holds a sample id plus one, or zero. How many
keys there are says which level is in use: the smallest that is at most half full. A writer that needs the
next level fills it from the keys, and only then counts the key that needs it, so that a reader, which loads
the count first, always has a whole table. Levels that were outgrown stay: all of them together are as large
as the last. Memory is touched in proportion to the keys that there are, not to those that there might be.

**Readers** take no lock. Keys are only ever added, until a clear; a word that is not counted yet, or that a
killed process has left, names a key that differs from the wanted one. **Writers** hold the short lock.

**Version**: of what a key names besides the arguments, the size and date of a file for instance. A record is
served only to a caller that asks for its version. A version changes while the sample is claimed, so that the
index word tells a reader whether version and record belong together (:mod:`hotset.store.keyed_store`).
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from hotset.store import memory_limits
from hotset.store.claims import Ids, Participant
from hotset.store.format import (
    FUNCTION_BYTES,
    FUNCTION_WORDS,
    FUNCTIONS,
    KEY_WORDS,
    LIVE_AT,
    LIVE_WORDS,
    Live,
    Slot,
)
from hotset.store.segment import Words

__all__ = ["Counter", "Function", "KeyTable"]

_KEY = struct.Struct("<QQ")
_FUNCTION = struct.Struct("<16sQQ")
_LONGEST_NAME = FUNCTION_BYTES - _FUNCTION.size
_FIRST_LEVEL = 10
_VERSION, _USED, _OF = 2, 3, 4
_FLAGS = 2  # the word of a function
_NOBODYS = (1 << 64) - 1


class Counter:
    """Positions of the words that a process counts for a function."""

    CALLS = 0
    HITS = 1
    COMPUTED = 2
    NOT_KEPT = 3  # of those computed
    NS = 4  # spent computing
    AUDITS = 5  # hits that were computed anew and compared; not counted as computed
    IN_USE = 6  # the slot's incarnation while its holder uses the function


class Function(NamedTuple):
    """A function whose results are kept.

    Attributes:
        number: its place in the list of functions.
        name: module and name; several functions may have one name.
        digest: 16 bytes: what it is made of.
        flags: sums of the constants below.
    """

    number: int
    name: str
    digest: bytes
    flags: int


EVICTABLE = 1  # its least recently used results make room for others
VIEWED = 2  # callers hold views of its results, whose memory is never used again
WRONG = 4  # a result was computed anew and differed: none is served


class KeyTable:
    """The keys of one keyed segment, as this process sees them.

    Attributes:
        why_full: a phrase that says why a key was last refused; None if none was, or the lock was taken.
    """

    def __init__(self, participant: Participant) -> None:
        self.why_full: str | None = None
        self._participant = participant
        self._segment = segment = participant.segment
        self._geometry = geometry = segment.geometry
        whole = memoryview(segment.buffer)
        self._live = whole[LIVE_AT : LIVE_AT + 8 * LIVE_WORDS].cast("q")
        self._keys = whole[geometry.keys_at : geometry.keys_at + 8 * KEY_WORDS * geometry.samples].cast("Q")
        self._table = whole[geometry.table_at : geometry.table_at + 4 * geometry.table_words].cast("I")
        self._counters = whole[geometry.counters_at : geometry.functions_at].cast("q")
        self._functions = whole[geometry.functions_at : geometry.table_at]
        self._function_words = self._functions.cast("Q")

    def __len__(self) -> int:
        count: int = self._live[Live.KEYS]
        return count

    # ---- keys ----------------------------------------------------------------------------------------

    def find(self, key: bytes) -> int:
        """The sample id of a key of 16 bytes; -1 if it has none."""
        count = self._live[Live.KEYS]
        if not count:
            return -1
        keys, table = self._keys, self._table
        high, low = _KEY.unpack(key)
        base = 1 << _level(count)
        at = low & (base - 1)
        for _ in range(base):
            sample: int = table[base + at] - 1
            if sample < 0:
                return -1
            place = sample * KEY_WORDS
            if sample < count and keys[place + 1] == low and keys[place] == high:
                return sample
            at = (at + 1) & (base - 1)
        return -1

    def add(self, key: bytes, function: int, new: Callable[[int], object] | None = None) -> int:
        """The sample id of a key of 16 bytes, given to it now if it has none; -1 without room or the lock.

        Args:
            key: names a result of the function.
            new: is called with the id, still under the lock, if the key had none.
        """
        with self._participant.short_lock() as held:
            if not held or self._live[Live.CLEAR_GENERATION] % 2:
                return -1
            found = self.find(key)
            if found >= 0:
                return found
            entered = self._enter(key, function)
            if entered >= 0 and new is not None:
                new(entered)
            return entered

    def _enter(self, key: bytes, function: int) -> int:
        sample = self._live[Live.KEYS]
        geometry = self._geometry
        if sample >= geometry.samples:
            self.why_full = (
                f"there have been {geometry.samples:,} different calls, one for each place, and a call keeps "
                "its place, also when its result has made room; give the first memoised one more `memory=`"
            )
            return -1
        place = sample * KEY_WORDS
        if not (
            self._has_level_for(sample + 1)
            and self._reserve(geometry.keys_at + 8 * place, 8 * KEY_WORDS)
            and self._reserve(geometry.rows_at + sample * geometry.stride, geometry.stride)
        ):
            self.why_full = "there is no memory for further keys; free some"
            return -1
        high, low = _KEY.unpack(key)
        self._keys[place], self._keys[place + 1], self._keys[place + _VERSION] = high, low, 0
        self._keys[place + _USED], self._keys[place + _OF] = _now(), function
        base = 1 << _level(sample + 1)
        at = low & (base - 1)
        while self._table[base + at]:
            at = (at + 1) & (base - 1)
        self._table[base + at] = sample + 1
        self._live[Live.ROWS_NEXT] = self._live[Live.KEYS] = sample + 1
        return sample

    def _has_level_for(self, count: int) -> bool:
        """Fill the level that so many keys need, if they are the first to need it; False without memory."""
        level, before = _level(count), _level(count - 1) if count > 1 else -1
        if level == before:
            return True
        base = 1 << level
        if 4 * base > memory_limits.headroom().bytes:
            return False
        if not self._reserve(self._geometry.table_at + 4 * base, 4 * base):
            return False
        words: np.ndarray[tuple[int], np.dtype[np.uint32]] = np.frombuffer(self._table, np.uint32)
        _fill_level(words[base : 2 * base], self.rows()[: count - 1, 1])
        return True

    def _reserve(self, offset: int, length: int) -> bool:
        """Allocate what is about to be touched, where a file system may have no more; False if it has not."""
        return not self._segment.bounded or self._segment.reserve(offset, length)

    def rows(self) -> np.ndarray[tuple[int, int], np.dtype[np.uint64]]:
        """The keys' words, one row of five for each sample id; those that were given are the first."""
        return np.frombuffer(self._keys, np.uint64).reshape(-1, KEY_WORDS)

    def version(self, sample: int) -> int:
        """The version of a sample's record; valid as long as its index word stays the same."""
        version: int = self._keys[sample * KEY_WORDS + _VERSION]
        return version

    def set_version(self, sample: int, version: int, function: int) -> None:
        """Note whose version this process is about to store; it has claimed the sample."""
        place = sample * KEY_WORDS
        self._keys[place + _VERSION], self._keys[place + _OF] = version, function

    def use(self, sample: int) -> None:
        """Note that a sample was used now."""
        self._keys[sample * KEY_WORDS + _USED] = _now()

    def forget(self, samples: Ids) -> None:
        """Give these samples a key that no function has; their records stay where they are."""
        rows = self.rows()
        rows[samples, 0] = rows[samples, 1] = rows[samples, _OF] = _NOBODYS

    def is_forgotten(self, sample: int) -> bool:
        """Whether a sample has a key that no function has."""
        place = sample * KEY_WORDS
        return bool(self._keys[place] == self._keys[place + 1] == _NOBODYS)

    def used(self, samples: Ids) -> Words:
        """When each of these samples was last used, in milliseconds of the monotonic clock."""
        return self._column(samples, _USED)

    def functions_of(self, samples: Ids) -> Words:
        """The number of the function whose result each of these samples is."""
        return self._column(samples, _OF)

    def _column(self, samples: Ids, word: int) -> Words:
        column: Words = self.rows()[samples, word].astype(np.int64)
        return column

    # ---- functions -----------------------------------------------------------------------------------

    def functions(self) -> list[Function]:
        """The functions that are entered, the oldest first."""
        return [self._function(number) for number in range(self._live[Live.FUNCTIONS])]

    def _function(self, number: int) -> Function:
        at = number * FUNCTION_BYTES
        digest, flags, length = _FUNCTION.unpack_from(self._functions, at)
        at += _FUNCTION.size
        name = bytes(self._functions[at : at + min(length, _LONGEST_NAME)])
        return Function(number, name.decode("utf-8", "replace"), digest, flags)

    def enter(self, name: str, digest: bytes, flags: int) -> int:
        """The number of a function, entered now if it is new; -1 if there are too many.

        The flags are added to those that it has. See :class:`Function`.

        Raises:
            BlockingIOError: another process holds the lock, and does not go on; it may later.
        """
        with self._participant.short_lock() as held:
            if not held:
                if self._participant.slot >= 0:
                    raise BlockingIOError("the short lock is taken")
                return -1
            number = self._live[Live.FUNCTIONS]
            for known in self.functions():
                if known.digest == digest:
                    self._set_flags(known.number, known.flags | flags)
                    return known.number
            start = self._geometry.functions_at + number * FUNCTION_BYTES
            if number >= FUNCTIONS or not self._reserve(start, FUNCTION_BYTES):
                return -1
            encoded = name.encode("utf-8", "surrogatepass")[:_LONGEST_NAME]
            at = number * FUNCTION_BYTES
            _FUNCTION.pack_into(self._functions, at, digest, flags, len(encoded))
            self._functions[at + _FUNCTION.size : at + _FUNCTION.size + len(encoded)] = encoded
            self._live[Live.FUNCTIONS] = number + 1
        return number

    def flags(self, number: int) -> int:
        """The flags of a function."""
        flags: int = self._function_words[number * FUNCTION_BYTES // 8 + _FLAGS]
        return flags

    def _set_flags(self, number: int, flags: int) -> None:
        # This word alone, in one store: struct's pack_into writes zeros first, and others read meanwhile.
        self._function_words[number * FUNCTION_BYTES // 8 + _FLAGS] = flags

    def set_flag(self, number: int, flag: int) -> bool:
        """Set a function's flag; True to the first process that does."""
        with self._participant.short_lock():
            flags = self.flags(number)
            self._set_flags(number, flags | flag)
        return not flags & flag

    def counters(self, number: int) -> memoryview | None:
        """The words in which this process counts for a function; None if it has no slot, or no memory."""
        slot = self._participant.slot
        if slot < 0:
            return None
        at = (slot * FUNCTIONS + number) * FUNCTION_WORDS
        if not self._reserve(self._geometry.counters_at + 8 * at, 8 * FUNCTION_WORDS):
            return None
        return self._counters[at : at + FUNCTION_WORDS]

    def in_use(self, number: int) -> bool:
        """Whether a living process uses a function."""
        for slot, words in self._counted_by_slot(number):
            incarnation = int(self._segment.slots[slot, Slot.INCARNATION])
            if words[Counter.IN_USE] == incarnation and self._participant.is_alive(slot):
                return True
        return False

    def counted(self, number: int) -> list[int]:
        """What all processes have counted for a function."""
        counted = np.zeros(FUNCTION_WORDS, np.int64)
        for _, words in self._counted_by_slot(number):
            counted += words
        return [int(each) for each in counted]

    def _counted_by_slot(self, number: int) -> Iterator[tuple[int, Words]]:
        """What the holders of each slot have counted for a function."""
        # Read from the file, as a touch of a page that no process has written would allocate it.
        for slot in np.flatnonzero(self._segment.slots[:, Slot.INCARNATION]).tolist():
            first = FUNCTION_WORDS * (slot * FUNCTIONS + number)
            words = np.zeros(FUNCTION_WORDS, np.int64)
            read = self._segment.read(self._geometry.counters_at + 8 * first, words.data.cast("B"))
            if not read and not self._segment.bounded:  # the program has closed the file
                words[:] = self._counters[first : first + FUNCTION_WORDS]
            yield slot, words

    def check(self) -> list[str]:
        """What is wrong with the table; an empty list if each key is found where it is looked for."""
        problems = []
        for sample, (high, low, *_) in enumerate(self.rows()[: len(self)].tolist()):
            found = self.find(_KEY.pack(high, low))
            if found != sample and not high == low == _NOBODYS:
                problems.append(f"sample {sample}: its key finds {found if found >= 0 else 'no sample'}")
        return problems


def _now() -> int:
    return time.monotonic_ns() >> 20


def _level(count: int) -> int:
    """The level that so many keys use, at least one."""
    return max(_FIRST_LEVEL, (2 * count - 1).bit_length())


def _fill_level(
    words: np.ndarray[tuple[int], np.dtype[np.uint32]], lows: np.ndarray[tuple[int], np.dtype[np.uint64]]
) -> None:
    """Enter all keys that functions have into a level, given the low halves of the keys."""
    words[:] = 0
    mask = len(words) - 1
    # Those that nobody looks for are all the same, and would take a round each.
    samples = np.flatnonzero(lows != np.uint64(_NOBODYS))
    at = (lows[samples] & np.uint64(mask)).astype(np.int64)
    while len(samples):
        # In each round, one of the keys that want a free word gets it; the others go on to the next word.
        first = np.zeros(len(samples), bool)
        first[np.unique(at, return_index=True)[1]] = True
        first &= words[at] == 0
        words[at[first]] = samples[first] + 1
        samples, at = samples[~first], (at[~first] + 1) & mask
