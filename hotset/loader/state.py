"""Going on where a loader stopped: what its state says, and how a pass is taken up again.

The state says where a pass *began* (the random states and the samplers' own) and how much of it was
consumed; nothing in it grows with the data. Batches that were made ahead and not handed over yet are simply
made again. What comes after that depends on draws that were not made yet:

==========================  ===============================================================================
the passes to come          a shuffling sampler draws from this process's global generator in each ``iter()``,
                            as dropout does between batches: saved when the state is asked for, and put back
                            when it is loaded, so that what the trainer does with them afterwards counts
live parts without workers  they draw from this process's generators as well
live parts with workers     each worker's generators as they were after its last batch that was *consumed*:
                            every batch brings them along, once something was drawn
another number of workers   the samples go on, none twice and none dropped; the draws are others
or of ranks
==========================  ===============================================================================

A loader that has nothing cached behind it is torch's own and cannot be started in the middle: its pass is
begun again under the old random states, and the batches that were consumed are made and dropped.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.utils.data import IterableDataset

from hotset._warnings import warn
from hotset.dataset.active_window import ActiveWindow, WindowPosition, positions_of
from hotset.determinism.rng import Generators
from hotset.errors import StateError
from hotset.loader.epoch_summary import EpochSummary
from hotset.loader.index_route import samples_in
from hotset.loader.remaining_batches import BatchCut, EpochPosition
from hotset.loader.rng_state import DAMAGE, Beginning, damaged, pack, put, unpack_states

__all__ = [
    "FORMAT",
    "Counted",
    "EpochProgress",
    "Noted",
    "SavedState",
    "between_passes",
    "header",
    "identity_of",
    "read_state",
]

FORMAT = 2
_READ = (1, FORMAT)


@dataclass
class EpochProgress:
    """A loader's pass over the data, counted as its batches are handed over.

    Attributes:
        number: of the pass, from 0.
        beginning: what it began from, in plain values.
        fresh: whether its workers, if any, were started for it (and a base seed drawn).
        batches, samples, dealt: how much was consumed: see
        :class:`~hotset.loader.remaining_batches.EpochPosition`.
        turn: the worker whose turn it is to make the next batch.
        over: whether its end was reached.
        workers: for each worker the states after its last consumed batch.
        goes_on: whether it was begun before, so that its workers' states are to be put back.
        asks: whether the workers, which have worked before, are to be asked for their states first: they
            have built batches that were not consumed.
        said: what all states of the pass have in common.
        gathered: whether its batches come from the cache alone, with nothing live.
        watch: called with each batch, to raise what has gone wrong in the background.
    """

    number: int
    beginning: dict[str, Any] = field(repr=False)
    fresh: bool
    batches: int = 0
    samples: int = 0
    dealt: int = 0
    turn: int = 0
    over: bool = False
    workers: dict[int, Any] = field(default_factory=dict, repr=False)
    goes_on: bool = False
    asks: bool = False
    gathered: bool = False
    said: dict[str, Any] = field(default_factory=dict, repr=False)
    watch: tuple[Callable[[], None], ...] = field(default=(), repr=False)

    def begin(self, header: dict[str, Any]) -> None:
        """Put down what all states of this pass have in common: they are asked for after every batch."""
        own = {"under_way": True, "pass": self.number, "fresh": self.fresh, "beginning": self.beginning}
        self.said = {**header, **own}

    def state(self, in_process: dict[str, Any]) -> dict[str, Any]:
        """The state of a loader in the midst of this pass.

        Args:
            in_process: the generators of this process as they are now.
        """
        return {
            **self.said,
            "batches": self.batches,
            "samples": self.samples,
            "dealt": self.dealt,
            "turn": self.turn,
            "in_process": in_process,
            "in_workers": {str(worker): states for worker, states in self.workers.items()},
        }

    def count(self, samples: int) -> None:
        """Count a batch that is handed over."""
        self.batches += 1
        self.samples += samples
        for look in self.watch:
            look()


@dataclass(frozen=True)
class SavedState:
    """A state that was read and found fit for this loader.

    Attributes:
        state: as it was given.
        cut: how its loader cut the order.
        position: how far its pass had come, under the number of ranks there are now.
        under_way: whether it was saved in the midst of a pass, not between two.
        same_rank: whether rank and number of ranks are what they were, so that its order is drawn alike.
        alike: whether workers and batches are, too, so that the draws of live transforms go on alike.
        windows: where each running window behind it stood.
    """

    state: dict[str, Any]
    cut: BatchCut
    position: EpochPosition
    under_way: bool
    same_rank: bool
    alike: bool
    windows: tuple[WindowPosition, ...]

    def run(self) -> EpochProgress:
        """The pass that goes on from here."""
        state = self.state
        return EpochProgress(
            number=state["pass"],
            beginning=state["beginning"],
            fresh=state["fresh"],
            batches=self.position.batches,
            samples=self.position.samples,
            dealt=self.position.dealt,
            turn=state["turn"] if self.alike else 0,
            workers={int(worker): states for worker, states in state["in_workers"].items() if self.alike},
            goes_on=True,
        )

    def redraws(self, workers: int) -> bool:
        """Whether a loader with so many new workers makes other draws than those the pass began with."""
        return not self.state["fresh"] or bool(workers) != bool(self.state["workers"])

    def require_replay(self, loader: Any, cut: BatchCut) -> None:
        """Make sure that torch's own loader can begin the pass again.

        Raises:
            StateError: a sentence that says what must be as it was.
        """
        was, then, now = self.cut, self.state["workers"], loader.num_workers
        if not self.under_way:
            return
        batches, samples, dealt = self.position
        if was != cut or dealt or (was.batch_size and batches != -(-samples // was.batch_size)):
            raise StateError(
                "the state is of a loader that cut its batches otherwise (batch size or ranks), and only a "
                "cached dataset can go on in the middle; load it with the same batch size and ranks."
            )
        if then != now and isinstance(loader.dataset, IterableDataset):
            raise StateError(
                f"the state is of {then} workers, and this loader has {now}; an iterable dataset deals its "
                "samples to them itself. Load it with num_workers as it was."
            )
        if not self.state["fresh"] and not (now and loader.persistent_workers):
            raise StateError(
                "the state is of a later pass of persistent workers, which begins with other draws; load it "
                "with persistent_workers=True."
            )

    def has_moved_on(self, beginning: Beginning, windows: Sequence[ActiveWindow]) -> bool:
        """Whether the user has set a sampler or a window to another epoch since, and so wants that; warns."""
        now = [own.get("epoch") for own in beginning.sampler_states()]
        now += [residents.position.epoch for residents in windows]
        then = [own.get("epoch") for own in self.state["beginning"]["samplers"]]
        then += [position.epoch for position in self.windows]
        if not self.under_way or now == then:
            return False
        warn(
            f"the sampler was set to epoch {now} after a state in the midst of epoch {then} was loaded: the "
            "rest of that epoch is dropped. Begin your loop with the epoch that was interrupted."
        )
        return True

    def put_samplers(self, beginning: Beginning) -> None:
        """See :meth:`Beginning.put_samplers`.

        Raises:
            StateError: the state is damaged.
        """
        try:
            beginning.put_samplers(self.state["beginning"])
        except Exception as error:  # whatever a sampler of the user's raises
            raise damaged(error) from error

    def put_generators(self, beginning: Beginning, *, with_globals: bool) -> None:
        """See :meth:`Beginning.put_generators`.

        Raises:
            StateError: the state is damaged.
        """
        try:
            beginning.put_generators(self.state["beginning"], with_globals=with_globals)
        except DAMAGE as error:
            raise damaged(error) from error

    def put_globals(self) -> None:
        """Put this process's global generators to where they were when the state was asked for.

        Raises:
            StateError: the state is damaged.
        """
        put(Generators([]), self.state["in_process"] or {})

    def put_live(self, live: Generators) -> None:
        """As :meth:`put_globals`, with all that the batches made in this process draw from.

        The global ones as well, whatever has drawn since the state was loaded: Accelerate looks one batch
        ahead, and takes the state before that batch was made, but the training's random states after it.
        Where batches are only gathered, the states of the training count.
        """
        saved = self.state["in_process"] or {}
        put(live, saved, held_only=len(saved) <= 1)


def header(data: dict[str, Any], cut: BatchCut, workers: int, windows: list[list[int]]) -> dict[str, Any]:
    """The part of a state that identifies its loader.

    Args:
        data: identity of the dataset.
        cut: how the loader cuts the order.
        workers: how many it has.
        windows: for each running window behind it where that stands: see :meth:`ActiveWindow.state`.
    """
    return {"format": FORMAT, "data": data, "cut": list(cut), "workers": workers, "windows": windows}


def between_passes(
    header: dict[str, Any],
    last: EpochProgress | None,
    fresh: bool,
    beginning: dict[str, Any],
    in_process: dict[str, Any],
) -> dict[str, Any]:
    """The state of a loader between two passes, or before the first.

    Args:
        header: see :func:`header`.
        last: the pass that is over, if there was one.
        fresh: whether the next pass starts workers.
        beginning: what it would begin from.
        in_process: see :meth:`EpochProgress.state`.
    """
    return {
        **header,
        "under_way": False,
        "pass": last.number + 1 if last is not None else 0,
        "fresh": fresh,
        "beginning": beginning,
        **dict.fromkeys(("batches", "samples", "dealt", "turn"), 0),
        "in_process": in_process,
        # New workers have drawn nothing yet.
        "in_workers": {str(worker): states for worker, states in last.workers.items()}
        if last is not None and not fresh
        else {},
    }


def identity_of(dataset: Any, fingerprints: list[str]) -> dict[str, Any]:
    """What tells a dataset from another: its length, and the fingerprints of the caches behind it."""
    try:
        length = len(dataset)
    except (TypeError, NotImplementedError):
        length = None
    return {"samples": length, "fingerprints": fingerprints}


def read_state(
    state: Any, identity: dict[str, Any], cut: BatchCut, workers: int, windows: list[list[int]]
) -> SavedState:
    """Check a state.

    Raises:
        StateError: a sentence that says why this loader cannot go on from it.
    """
    if not isinstance(state, dict) or "format" not in state:
        raise StateError("state must be what hotset.DataLoader.state_dict() returned, and has no `format`.")
    if state["format"] not in _READ:
        raise StateError(
            f"the state has format {state['format']!r}, and this hotset reads formats 1 and {FORMAT}; load "
            "it with the version of hotset that saved it."
        )
    try:
        state = state if state["format"] == FORMAT else _of_format_1(state)
        was = _cut(state["cut"])
        position = EpochPosition(*(_count(state[name]) for name in ("batches", "samples", "dealt")))
        before, saved_workers = dict(state["data"]), _count(state["workers"])
        under_way, _, _ = bool(state["under_way"]), _count(state["pass"]), bool(state["fresh"])
        _count(state["turn"]), unpack_states(state["in_process"])
        for worker, states in state["in_workers"].items():
            _count(int(worker)), unpack_states(states)
        for own in state["beginning"]["samplers"]:
            _count(abs(own.get("epoch", 0)))
        stood = [[_count(number) for number in window] for window in state["windows"]]
    except DAMAGE as error:
        raise damaged(error) from error
    _require_same_data(before, identity)
    _require_same_order(was, cut, under_way)
    if 0 in (was.ranks, cut.ranks) and (position.dealt or was.ranks != cut.ranks):
        raise damaged(ValueError("its sampler deals to no ranks"))
    same_rank = (was.rank, was.ranks) == (cut.rank, cut.ranks)
    position = position.under(was, cut)
    alike = was == cut and saved_workers == workers
    return SavedState(state, was, position, under_way, same_rank, alike, positions_of(stood, windows))


def _of_format_1(state: dict[str, Any]) -> dict[str, Any]:
    """It held samplers' states as they were; and of this process's generators, where no live part drew from
    them, only what a pass that was still to come would begin from.
    """
    beginning = state["beginning"]
    beginning = {
        **beginning,
        "samplers": [{name: pack(part) for name, part in own.items()} for own in beginning["samplers"]],
    }
    in_process = state["in_process"]
    if in_process is None and not state["under_way"]:
        in_process = beginning["globals"]
    return {**state, "format": FORMAT, "beginning": beginning, "in_process": in_process}


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 53:
        raise ValueError(f"{value!r} is no count")
    return value


def _cut(value: Any) -> BatchCut:
    cut = BatchCut(*value)
    if cut.batch_size is not None and not _count(cut.batch_size):
        raise ValueError("batches of no samples")
    if not _count(cut.rank) < max(_count(cut.ranks), 1):
        raise ValueError(f"there is no rank {cut.rank} of {cut.ranks}")
    return cut


def _require_same_data(before: dict[str, Any], now: dict[str, Any]) -> None:
    if before.get("samples") != now["samples"]:
        raise StateError(
            f"the state is of a dataset of {before.get('samples')} samples, and this one has "
            f"{now['samples']}; load it into a loader over the same data."
        )
    fingerprints = before.get("fingerprints")
    if fingerprints and now["fingerprints"] and fingerprints != now["fingerprints"]:
        raise StateError(
            "the state is of a dataset with other content (its fingerprint differs: files, parameters or "
            "transforms have changed); load it into a loader over the same data, or name the cache with key=."
        )


def _require_same_order(was: BatchCut, now: BatchCut, under_way: bool) -> None:
    if (was.sampler, was.batch_sampler) != (now.sampler, now.batch_sampler):
        raise StateError(
            f"the state is of a loader with {was.batch_sampler} over {was.sampler}, and this one has "
            f"{now.batch_sampler} over {now.sampler}; its order would be another."
        )
    if under_way and was.ranks != now.ranks and now.batch_size is None:
        raise StateError(
            f"the state was saved by {was.ranks} ranks, this is one of {now.ranks}, and only torch's "
            "BatchSampler over DistributedSampler can be dealt anew; resume with as many ranks."
        )
    if under_way and (was.batch_size is None) != (now.batch_size is None):
        raise StateError("the state is of a loader that cut its batches otherwise.")


class Noted:
    """A loader's order that notes how many samples each batch has, as it is drawn.

    Args:
        order: the loader's batch sampler, or its sampler with ``batch_size=None``.

    Attributes:
        sizes: of the batches that were drawn and not handed over yet.
    """

    def __init__(self, order: Any) -> None:
        self._order = order
        self.sizes: deque[int] = deque()

    def __iter__(self) -> Iterator[Any]:
        self.sizes.clear()
        return self._drawn(iter(self._order))

    def _drawn(self, indices: Iterator[Any]) -> Iterator[Any]:
        for index in indices:
            self.sizes.append(samples_in(index))
            yield index

    def __len__(self) -> int:
        return len(self._order)


class Counted:
    """Iterator over torch's own batches, counted; the rest of a pass is its whole, less what was consumed.

    Args:
        batches: of the whole pass.
        run: the pass.
        noted: their order; None for an iterable dataset, which has none: its batches count as full ones.
        size: samples in a batch of that.
        summary: counts batches, samples and waiting.
    """

    def __init__(
        self,
        batches: Iterator[Any],
        run: EpochProgress,
        noted: Noted | None,
        size: int,
        summary: EpochSummary,
    ) -> None:
        self._batches = batches
        self._run = run
        self._noted = noted
        self._size = size
        self._summary = summary
        for _ in range(run.batches):
            try:
                next(batches)
            except StopIteration:
                break
            self._samples()

    def _samples(self) -> int:
        """How many samples the batch has that was handed over last."""
        return self._noted.sizes.popleft() if self._noted is not None and self._noted.sizes else self._size

    def __iter__(self) -> Counted:
        return self

    def __next__(self) -> Any:
        start = time.perf_counter()
        try:
            batch = next(self._batches)
        except StopIteration:
            self._run.over = True
            self._summary._end()
            raise
        except BaseException:
            self._samples()  # of the batch that failed: the next one may well come
            raise
        samples = self._samples()
        self._run.count(samples)
        self._summary._count(samples, time.perf_counter() - start)
        return batch

    def __len__(self) -> int:
        return len(self._batches)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batches, name)
