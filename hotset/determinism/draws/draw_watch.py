"""A watch over all reading for a cache: which samples draw random numbers as they are read?

A probe reads a few samples. If a dataset augments its rare classes, a twentieth of its samples draw, and a
probe of a few may miss them. But every sample that goes into a cache is read once, so hotset watches all of
that reading: it compares the states of all generators after every few samples::

    begin ── a few are read ── drew? no ── a few more ── drew? yes: put back ── each again, alone ── drew? ...

When :meth:`DrawWatch.drew` returns True, it has put all generators back to their states at
:meth:`DrawWatch.begin`. So reading for a cache leaves no trace, and the process that serves the sample draws
what it would have drawn without a cache.

A comparison costs 5 to 20 microseconds, and about 40 between two decoded pictures: up to a percent of
decoding one. To find the generators that objects hold takes milliseconds. The watch looks for them again only
if something near has another type than before, as when a generator is made at its first use: an attribute of
the dataset, of a transform, or of an object that these hold, of a class, a global, an element of a small list
or dict (:mod:`hotset.determinism.objects.near_attributes`). Such a generator is taken away again, and the
next reading makes it anew, if a reading in between shows that it gives the same then.

Another thread may have drawn meanwhile, for mixup in the training loop while a queue reads ahead, for
example. Where other threads run, the watch has the samples read once more to find out: a sample that draws
does so each time, or its two readings differ. If the samples turn out not to draw, the watch puts no state
back, as that thread would draw the same numbers twice. A thread that draws all the time moves the generators
in these readings, too. So the watch looks whether they also move while nothing is read. If they do, it reads
on until none moves; if that does not come, it counts the samples as drawing, and puts no state back. Nor does
it take away a generator that another thread may have made.

A generator that comes in the place of another one may have been drawn from before it is known: so the samples
are read once more, and compared. A dataset may make its generator anew of each index: then only some of the
later ones are compared.

A generator that the system seeds for one draw, and that is then dropped, leaves no state to compare. But the
watch notices the entropy that seeded it (:mod:`hotset.determinism.draws.entropy`), and compares two readings.
"""

from __future__ import annotations

import math
import re
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from hotset.determinism.draws import entropy
from hotset.determinism.draws.rng import KINDS, Generators
from hotset.determinism.equality import differs
from hotset.determinism.objects.code_dependencies import package_of
from hotset.determinism.objects.near_attributes import NearAttributes, Noted, put_back

__all__ = ["DrawWatch", "others_run"]

_COMPARED, _LATER = 32, 128  # the first readings with entropy are compared, later each so many-th
_REPEATS = 2  # further readings, to tell a sample that draws from a thread that drew at the same time
_MORE = 8  # further ones, beside a thread that draws all the time
_SHORTEST, _LONGEST = 5e-3, 0.2  # seconds, of the wait that tells whether there is one
_RECENT = 1.0  # seconds: one that has drawn so lately is taken to draw all the time
# Threads that run no code of the user's: those of multiprocessing, torch and tqdm, and hotset's own but one.
_HARMLESS = re.compile(r"QueueFeederThread|hotset-(?!ahead).*|.*\((_serve|_pin_memory_loop)\)")


class DrawWatch:
    """Tells whether reading has moved a generator, and puts the generators back. Can be pickled.

    Args:
        holders: objects that may hold generators: the dataset, its transforms.

    Example:
        >>> import random
        >>> watch = DrawWatch([])
        >>> watch.begin()
        >>> watch.drew()
        False
        >>> drawn = random.random()
        >>> watch.drew(), random.random() == drawn
        (True, True)
    """

    # Of this process, so not pickled: the generators, and the attributes of near objects, from the first
    # begin() on; the count of entropy.taken(), how many readings took some, and whether a sample depended on
    # it; what was there before generators were made, or took the place of others, since the last comparison;
    # when another thread was last seen to draw.
    _generators: Generators
    _near: NearAttributes
    _entropy = _asked = 0
    _entropy_matters = False
    _made: Noted | None = None
    _replaced: Noted | None = None
    _others_drew = -math.inf

    def __init__(self, holders: Sequence[object]) -> None:
        self._holders = list(holders)

    def begin(self) -> None:
        """From here on, compare with the present states."""
        if not hasattr(self, "_generators"):
            self._near = NearAttributes(self._holders, KINDS)
            self._generators = Generators(self._holders)  # last: an interrupt may come before it
        elif self._near.have_other_types:  # a reading for use may have made a generator
            self._generators.look_again(self._holders)
            self._near.look()
        self._generators.forget(self._near.generators)
        self._follow()
        self._generators.note()
        self._near.note()
        self._entropy = entropy.taken()

    def drew(self, read: object = None, read_again: Callable[[], object] | None = None) -> bool:
        """Whether reading has drawn random numbers since :meth:`begin`.

        If it has, all generators are put back to their states at :meth:`begin`, but for those of a program in
        which other threads draw all the time. If not, the next call compares with the present states.

        Args:
            read: what was read.
            read_again: reads the same samples once more. It is called a few times, and only where another
                thread may have drawn, where a generator was made or replaced, or where reading took entropy.
        """
        self._generators.forget(self._near.generators)
        before, self._entropy = self._entropy, entropy.taken()
        took_entropy = before != self._entropy
        self._made = self._replaced = None
        drew = self._moved()
        if drew or took_entropy or self._replaced:
            drew = self._judge(drew, took_entropy or self._replaced is not None, read, read_again)
        self._near.note()
        return drew

    def _judge(
        self, drew: bool, took_entropy: bool, read: object, read_again: Callable[[], object] | None
    ) -> bool:
        """As :meth:`drew`, where a generator has moved, or is another, or entropy was taken."""
        began, others, made = self._generators.noted(), drew and others_run(), self._made
        if (others or made) and read_again is not None:
            found = self._draws_again(read, read_again)
            if found is None:
                self._generators.note()
                return True
            drew = found
        if not drew and took_entropy:
            drew = self._is_from_entropy(read, read_again)
        if drew:
            self._generators.put(began)
            made = made or self._replaced
            if made and not others_run() and read_again is not None:
                self._unmake(made, read, read_again)
                self._generators.put(began)
            self._generators.note()
        return drew

    def _unmake(self, made: Noted, read: object, read_again: Callable[[], object]) -> None:
        """Put back what was there before a generator was made, if what was read comes from that."""
        had = self._near.all_now()
        put_back(made)
        try:
            is_same = differs(read, read_again()) is None
        except Exception:  # something else says that it was made, in a list perhaps
            is_same = False
        if is_same:
            put_back(made)
        else:
            put_back(had, all_kinds=True)
        self._follow()
        self._near.look()

    def _draws_again(self, read: object, read_again: Callable[[], object]) -> bool | None:
        """Whether this reading has drawn, rather than another thread meanwhile, or only made a generator.

        None if it cannot be told, as other threads draw all the time.
        """
        begun = time.perf_counter()
        for number in range(_REPEATS + _MORE):
            if number == _REPEATS and not self._others_draw(time.perf_counter() - begun):
                return True
            self._generators.note()
            again = read_again()
            if not self._moved():
                # If the draws were this reading's, and rare, the two readings differ.
                drew = differs(read, again) is not None
                if not drew:
                    self._others_drew = time.monotonic()
                return drew
        return None

    def _others_draw(self, seconds: float) -> bool:
        """Whether a generator moves in about as much time, while this thread reads nothing."""
        if not others_run():
            return False
        if time.monotonic() - self._others_drew > _RECENT:
            self._generators.note()
            time.sleep(min(max(seconds, _SHORTEST), _LONGEST))
            if not self._generators.any_moved:
                return False
            self._others_drew = time.monotonic()
        return True

    def _is_from_entropy(self, read: object, read_again: Callable[[], object] | None) -> bool:
        """Whether what was read depends on the entropy that reading took.

        If one reading did, all later ones are taken to do so. If many did not, only some of the later ones
        are compared: they take entropy for the name of a file, say.
        """
        if self._entropy_matters or read_again is None:
            return True
        self._asked += 1
        if self._asked > _COMPARED and self._asked % _LATER:
            return False
        again = read_again()
        self._entropy = entropy.taken()
        self._entropy_matters = self._moved() or differs(read, again) is not None
        return self._entropy_matters

    def _moved(self) -> bool:
        """Whether a generator has moved, or was made."""
        moved = self._generators.any_moved
        noted = self._near.noted
        if self._follow() and self._replaced is None:
            self._replaced = noted
        if self._near.have_other_types:
            # A generator that was made meanwhile counts as having drawn.
            if self._generators.look_again(self._holders):
                moved = True
                if self._made is None and self._near.have_new:
                    self._made = self._near.noted
            self._near.look()
        return moved

    def _follow(self) -> bool:
        """Watch what has come in the place of generators; whether there is any."""
        replaced = self._near.replaced()
        for before, now in replaced:
            self._generators.follow(before, now)
        return bool(replaced)

    def __getstate__(self) -> dict[str, Any]:
        return {"_holders": self._holders}


def others_run() -> bool:
    """Whether another thread runs that may draw, or read the dataset."""
    here = threading.current_thread()
    return any(
        each is not here and _HARMLESS.fullmatch(each.name) is None and package_of(type(each)) != "tqdm"
        for each in threading.enumerate()
    )
