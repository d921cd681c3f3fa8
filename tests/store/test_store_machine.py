"""A state machine that holds the store against a dict.

The dict says what each process may see: a sample that is in it comes out of the store equal, by whichever
view of the segment; one that is not has to come from the source. Each reading of the source gives another
version of the sample, so that a record of before a clear, or another sample's, is told from the right one.

The one thing that the dict does not know is room: whether a fill finds some. It asks the index for that, and
holds what was published against what was read.
"""

from __future__ import annotations

import os
import signal
from typing import Any

import numpy as np
import pytest
import torch
from helpers import often
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from kills import child, ended
from samples import Opaque
from stores import ids

from hotset.determinism.equality import differs
from hotset.store.claims import Claims, Participant
from hotset.store.format import PRESENT
from hotset.store.leaves.schema import Schema
from hotset.store.store import Store

N = 24
VIEWS = 3


def used(store: Store) -> int:
    return store.segment.taken


def version(i: int, reading: int) -> Any:
    """A sample in its ``reading``-th version; some cannot be kept, some have other forms or large
    tails.
    """
    if i % 11 == 7:
        return {"image": torch.zeros(2, 2), "text": reading, "object": Opaque(reading)}
    if i % 7 == 3:
        image = torch.full((1 + i * 37 % 400, 2), i * 1000 + reading)
        return {"image": image, "boxes": [{"at": reading, "of": None}] * (i % 4)}
    length = 3000 if i % 5 == 4 else i * 7 % 40
    return {"image": torch.full((5,), i * 1000 + reading), "text": f"{i}/{reading} " + "x" * length}


def fits(i: int) -> bool:
    return i % 11 != 7


class StoreMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.model: dict[int, Any] = {}
        self.views: list[Store] = []
        self.readings = 0

    @initialize(limit=st.sampled_from([0, 100, 1000, 5000, 20_000, 1 << 20]))
    def create(self, limit: int) -> None:
        schema = Schema.infer([version(0, 0), version(1, 0)], keep_order=True)
        self.limit = limit
        self.views = [Store.create(schema, N, limit, about={})]

    def teardown(self) -> None:
        for view in self.views:
            view.close()

    @property
    def first(self) -> Store:
        return self.views[0]

    def _read(self, i: int) -> Any:
        self.readings += 1
        self.last[i] = self.readings
        return version(i, self.readings)

    # ---- what a process does --------------------------------------------------------------------------

    @rule(
        view=st.integers(0, VIEWS - 1), wanted=st.lists(st.integers(0, N - 1), max_size=8), keep=st.booleans()
    )
    def fill(self, view: int, wanted: list[int], keep: bool) -> None:
        store = self.views[view % len(self.views)]
        self.last: dict[int, int] = {}
        before = self.readings
        store.allocator.reopen()  # as after half a second
        uncached = store.fill(ids(wanted), self._read, keep=keep)
        assert set(self.last) == set(wanted) - set(self.model)
        assert self.readings - before == len(self.last), "each absent sample is read once"
        for i, reading in self.last.items():
            published = self.first.segment.index[i] >= PRESENT
            assert (i in uncached) == (keep or not published)
            if published:
                assert fits(i)
                self.model[i] = version(i, reading)
            elif fits(i):
                assert store.allocator.why_full is not None
            else:
                assert store.filler.mismatches or store.allocator.why_full is not None
        for i, value in uncached.items():
            assert differs(value, version(i, self.last[i])) is None
            if fits(i):
                value["image"].zero_()  # it is the reader's own, whether it was stored or not

    @rule(view=st.integers(0, VIEWS - 1), wanted=st.lists(st.integers(0, N - 1), min_size=1, max_size=8))
    def read(self, view: int, wanted: list[int]) -> None:
        store = self.views[view % len(self.views)]
        assert store.present(ids(wanted)).tolist() == [i in self.model for i in wanted]
        assert store.holds(ids(wanted)) == all(i in self.model for i in wanted)
        found = store.read(ids(wanted))
        if not all(i in self.model for i in wanted):
            assert found is None
            return
        assert found is not None
        for i, value in zip(wanted, found, strict=True):
            assert differs(value, self.model[i]) is None
            value["image"].zero_()  # it is a copy: the cache never knows

    @rule(view=st.integers(0, VIEWS - 1))
    def clear(self, view: int) -> None:
        assert self.views[view % len(self.views)].clear()
        self.model.clear()
        assert used(self.first) == 0

    # ---- who is attached ------------------------------------------------------------------------------

    @precondition(lambda self: len(self.views) < VIEWS)
    @rule()
    def attach(self) -> None:
        self.views.append(Store.attach(self.first.segment.address))

    @precondition(lambda self: len(self.views) > 1)
    @rule(view=st.integers(1, VIEWS - 1))
    def close(self, view: int) -> None:
        self.views.pop(view % (len(self.views) - 1) + 1).close()

    @rule(view=st.integers(0, VIEWS - 1))
    def leave(self, view: int) -> None:
        """Slots change hands: claims end, counters and what was reserved stay."""
        self.views[view % len(self.views)].participant.leave()

    @rule(wanted=st.lists(st.integers(0, N - 1), min_size=1, max_size=4))
    def claim_and_vanish(self, wanted: list[int]) -> None:
        """A process that claims and ends, however: here a membership that leaves without a release."""
        gone = Participant(self.first.segment)
        Claims(gone).take(ids(wanted), N)
        gone.leave()

    @rule(view=st.integers(0, VIEWS - 1), wanted=st.lists(st.integers(0, N - 1), min_size=1, max_size=3))
    def fill_in_a_child_that_is_killed(self, view: int, wanted: list[int]) -> None:
        store = self.views[view % len(self.views)]

        def read(i: int) -> Any:
            if i == wanted[-1]:
                os.kill(os.getpid(), signal.SIGKILL)
            return version(i, 0)

        ended(child(lambda: store.fill(ids(wanted), read)))
        for i in wanted:
            if self.first.segment.index[i] >= PRESENT and i not in self.model:
                self.model[i] = version(i, 0)

    # ---- what is always so ------------------------------------------------------------------------------

    @invariant()
    def nothing_is_wrong(self) -> None:
        if not self.views:
            return
        assert self.first.check() == []
        assert used(self.first) <= self.limit
        everything = np.arange(N)
        for view in self.views:
            assert np.flatnonzero(view.present(everything)).tolist() == sorted(self.model)
            found = view.read(ids(self.model)) or []
            for i, value in zip(self.model, found, strict=True):
                assert differs(value, self.model[i]) is None


TestStoreMachine = pytest.mark.timeout(often(300, 1800))(StoreMachine.TestCase)
TestStoreMachine.settings = settings(
    max_examples=often(12, 300), stateful_step_count=30, deadline=None, database=None
)
