"""A loader's state: what it holds, and how a loader resumes an interrupted pass from it.

The state says how a pass *began* (the random states and the samplers' own) and how much of it was consumed;
its size does not depend on the data. Batches that were made ahead and not handed over yet are made again.
What follows depends on draws that were not made yet, so the state also holds generators:

==========================  ===============================================================================
the passes to come          A shuffling sampler draws from this process's global generators in each
                            ``iter()``, and dropout between batches. They are saved by ``state_dict()`` and
                            restored by ``load_state_dict()``, so that what the trainer then does with them
                            counts.
live parts without workers  They draw from this process's generators as well.
live parts with workers     The state holds each worker's generators as they were after its last batch that
                            was *consumed*: once a worker has drawn, it sends them with every batch.
another number of workers   The remaining samples come, none twice and none dropped; the draws are others.
or of ranks
==========================  ===============================================================================

A loader without a cache behind it is torch's own and cannot start in the middle
(:mod:`hotset.loader.torch_batches`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.utils.data import IterableDataset

from hotset._warnings import warn
from hotset.dataset.active_window import ActiveWindow, WindowPosition, positions_of
from hotset.dataset.streams.cached_stream import CachedStream
from hotset.determinism.draws.rng import Generators
from hotset.errors import StateError
from hotset.loader.epoch_summary import EpochSummary
from hotset.loader.remaining_batches import BatchCut, EpochPosition
from hotset.loader.rng_state import DAMAGE, Beginning, damaged, restore, unpack_states

__all__ = [
    "EpochProgress",
    "SavedState",
    "header",
    "identity_of",
    "is_of_stream",
    "read_state",
]

_FORMAT = 2


@dataclass
class EpochProgress:
    """A loader's pass over the data, and how much of it was consumed.

    Attributes:
        number: of the pass, from 0.
        beginning: the state that it began from, as plain values.
        fresh: whether its workers, if any, were started for it (and a base seed drawn).
        batches, samples, dealt: how much was consumed: see
            :class:`~hotset.loader.remaining_batches.EpochPosition`.
        turn: the number of the worker that makes the next batch.
        over: whether its end was reached.
        followed: whether samples from a stream follow those from the cache, as the second part of the pass.
        workers: for each worker the states after its last consumed batch.
        resumed: whether it was begun before, so that its workers' states are to be restored.
        ask_workers: whether to ask the workers for their states first: they are from an earlier pass, and
            have built batches that were not consumed.
        common: what all states of the pass have in common.
        gathered: whether its batches come from the cache alone, with nothing live.
        watch: called before each batch, to raise errors from the background.
        summary: the figures of the pass, for the user.
    """

    number: int
    beginning: dict[str, Any] = field(repr=False)
    fresh: bool
    batches: int = 0
    samples: int = 0
    dealt: int = 0
    turn: int = 0
    over: bool = False
    followed: bool = False
    workers: dict[int, Any] = field(default_factory=dict, repr=False)
    resumed: bool = False
    ask_workers: bool = False
    gathered: bool = False
    common: dict[str, Any] = field(default_factory=dict, repr=False)
    watch: tuple[Callable[[], None], ...] = field(default=(), repr=False)
    summary: EpochSummary = field(init=False, repr=False)
    _failed: tuple[int, int] = field(default=(0, 0), init=False, repr=False)  # batches and samples

    def describe(self, header: dict[str, Any], *, under_way: bool) -> None:
        """Make the part that all states of this pass share, as one may be taken after every batch."""
        own = {"under_way": under_way, "pass": self.number, "fresh": self.fresh, "beginning": self.beginning}
        self.common = {**header, **own}

    def state(self, in_process: dict[str, Any]) -> dict[str, Any]:
        """The state of a loader in the midst of this pass, or before it.

        Args:
            in_process: the present states of this process's generators.
        """
        return {
            **self.common,
            "batches": self.batches,
            "samples": self.samples,
            "dealt": self.dealt,
            "turn": self.turn,
            "in_process": in_process,
            "in_workers": {str(worker): states for worker, states in self.workers.items()},
        }

    def raise_errors(self) -> None:
        """Raise an error from the background, before a batch is taken: it is about none of this pass."""
        for check in self.watch:
            check()

    def count(self, samples: int, start: float, shown: int | None = None) -> None:
        """Count a batch that is handed over.

        Args:
            start: since when the consumer has waited for it, as ``time.perf_counter()`` says it.
            shown: the samples in it for the summary, if that knows better.
        """
        failed_batches, failed_samples = self._failed
        self._failed = 0, 0
        self.batches += 1 + failed_batches
        self.samples += samples + failed_samples
        self.summary._count(samples if shown is None else shown, time.perf_counter() - start)

    def failed(self, samples: int) -> None:
        """Note that a batch raised an exception in place of being handed over.

        It counts as consumed once another batch is: a loader that resumes before that tries it again.
        """
        batches, before = self._failed
        self._failed = batches + 1, before + samples

    def end(self) -> None:
        """Note that the last batch of the pass, or of its first part, was handed over."""
        if self.followed:
            self.followed = False
        else:
            self.over = True
            self.summary._end()


@dataclass(frozen=True)
class SavedState:
    """A state that was read and checked against this loader.

    Attributes:
        state: the state itself.
        cut: how the loader that saved it cut the order.
        position: how far its pass had come, converted to the present number of ranks.
        under_way: whether it was saved in the midst of a pass, not between two.
        same_rank: whether rank and number of ranks are unchanged, so that the order is drawn in the same way.
        same_loader: whether workers and batches are unchanged too, so that live transforms draw the same.
        windows: the position of each running window behind the loader.
    """

    state: dict[str, Any]
    cut: BatchCut
    position: EpochPosition
    under_way: bool
    same_rank: bool
    same_loader: bool
    windows: tuple[WindowPosition, ...]

    def run(self) -> EpochProgress:
        """The pass to resume."""
        state = self.state
        return EpochProgress(
            number=state["pass"],
            beginning=state["beginning"],
            fresh=state["fresh"],
            batches=self.position.batches,
            samples=self.position.samples,
            dealt=self.position.dealt,
            turn=state["turn"] if self.same_loader else 0,
            workers={
                int(worker): states for worker, states in state["in_workers"].items() if self.same_loader
            },
            resumed=True,
        )

    @property
    def began_with_workers(self) -> bool:
        """Whether the pass was begun with workers; it may have been resumed without since."""
        return bool(self.state["beginning"]["workers"])

    def redraws(self, workers: int) -> bool:
        """Whether a loader with this many new workers begins with other draws than the saved pass did."""
        return not self.state["fresh"] or bool(workers) != self.began_with_workers

    def require_replay(self, loader: Any, cut: BatchCut) -> None:
        """Make sure that torch's own loader can begin the pass again.

        Raises:
            StateError: a sentence that says what must be unchanged.
        """
        saved_cut, saved_workers, workers = self.cut, self.state["workers"], loader.num_workers
        if not self.under_way:
            return
        batches, samples, dealt = self.position
        if (
            saved_cut != cut
            or dealt
            or (saved_cut.batch_size and batches != -(-samples // saved_cut.batch_size))
        ):
            raise StateError(
                "the state is from a loader with another batch size or number of ranks, and only a loader "
                "over a cached dataset can change these in mid-epoch; load it with the same batch size and "
                "ranks."
            )
        if saved_workers != workers and isinstance(loader.dataset, (IterableDataset, CachedStream)):
            raise StateError(
                f"num_workers must be {saved_workers} as in the state, got {workers}: an iterable dataset "
                f"itself divides its samples among the workers; load it with num_workers={saved_workers}."
            )
        if not self.state["fresh"] and not (workers and loader.persistent_workers):
            raise StateError(
                "the state is from a later pass of persistent workers, which begins with other draws; load "
                "it with persistent_workers=True."
            )

    def require_size(self, cut: BatchCut) -> None:
        """Make sure that the rest of a stream, of which some batches were consumed, comes in such batches.

        Raises:
            StateError: its batches had another size.
        """
        if self.cut.batch_size != cut.batch_size:
            raise StateError(
                f"batch_size must be {self.cut.batch_size} as in the state, got {cut.batch_size}: it is from "
                "the end of a pass, which comes from the stream itself in batches of that size; load it with "
                f"batch_size={self.cut.batch_size}."
            )

    def has_moved_on(self, beginning: Beginning, windows: Sequence[ActiveWindow]) -> bool:
        """Whether the user has since set a sampler or a window to another epoch, which wins; warns if so."""
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

    def restore_samplers(self, beginning: Beginning) -> None:
        """See :meth:`Beginning.restore_samplers`.

        Raises:
            StateError: the state is damaged.
        """
        try:
            beginning.restore_samplers(self.state["beginning"])
        except Exception as error:  # a user's sampler may raise any error
            raise damaged(error) from error

    def restore_generators(self, beginning: Beginning, *, with_globals: bool) -> None:
        """See :meth:`Beginning.restore_generators`.

        Raises:
            StateError: the state is damaged.
        """
        try:
            beginning.restore_generators(self.state["beginning"], with_globals=with_globals)
        except DAMAGE as error:
            raise damaged(error) from error

    def restore_globals(self) -> None:
        """Set this process's global generators to their states at ``state_dict()``.

        Raises:
            StateError: the state is damaged.
        """
        restore(Generators([]), self.state["in_process"])

    def restore_live(self, live: Generators) -> None:
        """As :meth:`restore_globals`, for all generators that the batches made in this process draw from.

        The global generators are restored as well, even if something has drawn since the state was loaded:
        Accelerate makes one batch ahead, and takes the loader's state before that batch, but the training's
        random states after it. If batches are only gathered, the training's own states count.
        """
        saved = self.state["in_process"]
        restore(live, saved, held_only=len(saved) <= 1)


def header(data: dict[str, Any], cut: BatchCut, workers: int, windows: list[list[int]]) -> dict[str, Any]:
    """The part of a state that identifies its loader."""
    return {"format": _FORMAT, "data": data, "cut": list(cut), "workers": workers, "windows": windows}


def identity_of(dataset: Any, fingerprints: list[str]) -> dict[str, Any]:
    """A dataset's identity in a state: its length, and the fingerprints of the caches behind it."""
    try:
        length = len(dataset)
    except (TypeError, NotImplementedError):
        length = None
    return {"samples": length, "fingerprints": fingerprints}


def is_of_stream(state: dict[str, Any]) -> bool:
    """Whether a state is of a pass that ran a stream: its samples are not counted."""
    return bool(state["data"].get("samples") is None)


def read_state(
    state: Any, identity: dict[str, Any], cut: BatchCut, workers: int, windows: list[list[int]]
) -> SavedState:
    """Check a state.

    Raises:
        StateError: a sentence that says why this loader cannot resume from it.
    """
    if not isinstance(state, dict) or "format" not in state:
        raise StateError("state must be what hotset.DataLoader.state_dict() returned, and has no `format`.")
    if state["format"] != _FORMAT:
        raise StateError(
            f"the state has format {state['format']!r}, and this hotset reads format {_FORMAT}; load it with "
            "the version of hotset that saved it."
        )
    try:
        saved_cut = _cut(state["cut"])
        position = EpochPosition(*(_count(state[name]) for name in ("batches", "samples", "dealt")))
        saved_data, saved_workers = dict(state["data"]), _count(state["workers"])
        under_way, _, _ = bool(state["under_way"]), _count(state["pass"]), bool(state["fresh"])
        _count(state["turn"]), unpack_states(dict(state["in_process"]))
        for worker, states in state["in_workers"].items():
            _count(int(worker)), unpack_states(states)
        for own in state["beginning"]["samplers"]:
            _count(abs(own.get("epoch", 0)))
        bool(state["beginning"]["workers"])
        for kept in saved_data.get("parts") or ():
            _count(kept)
        saved_windows = [[_count(number) for number in window] for window in state["windows"]]
    except DAMAGE as error:
        raise damaged(error) from error
    _require_same_data(saved_data, identity)
    if under_way:
        _require_same_parts(saved_data.get("parts"), identity.get("parts"))
    _require_same_order(saved_cut, cut, under_way)
    if 0 in (saved_cut.ranks, cut.ranks) and (position.dealt or saved_cut.ranks != cut.ranks):
        raise damaged(ValueError("its sampler does not divide the order among ranks"))
    same_rank = (saved_cut.rank, saved_cut.ranks) == (cut.rank, cut.ranks)
    position = position.under(saved_cut, cut)
    same_loader = saved_cut == cut and saved_workers == workers
    positions = positions_of(saved_windows, windows)
    return SavedState(state, saved_cut, position, under_way, same_rank, same_loader, positions)


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 53:
        raise ValueError(f"expected a count, got {value!r}")
    return value


def _cut(value: Any) -> BatchCut:
    cut = BatchCut(*value)
    if cut.batch_size is not None and not _count(cut.batch_size):
        raise ValueError("batch_size must not be 0")
    if not _count(cut.rank) < max(_count(cut.ranks), 1):
        raise ValueError(f"rank must be less than {cut.ranks}, got {cut.rank}")
    return cut


def _require_same_data(saved: dict[str, Any], now: dict[str, Any]) -> None:
    if saved.get("samples") != now["samples"]:
        raise StateError(
            f"the state is from a dataset of {saved.get('samples')} samples, and this one has "
            f"{now['samples']}; load it into a loader over the same dataset."
        )
    fingerprints = saved.get("fingerprints")
    if fingerprints and now["fingerprints"] and fingerprints != now["fingerprints"]:
        raise StateError(
            "the state is from a dataset with other content (its fingerprint differs: files, parameters or "
            "transforms have changed); load it into a loader over the same dataset, or name the cache with "
            "key=."
        )


def _require_same_parts(theirs: list[int] | None, ours: list[int] | None) -> None:
    """Refuse the order of a recorded stream where it is another, as its parts are."""
    if theirs is not None and ours is not None and theirs != ours:
        raise StateError(
            f"the state is from a stream whose workers recorded {_numbers(theirs)} samples, and here they "
            f"recorded {_numbers(ours)}, which gives another order; record it by as many workers "
            f"(fill(num_workers={len(theirs)})), or keep it in a session (session=)."
        )


def _numbers(parts: list[int]) -> str:
    return ", ".join(map(str, parts[:8])) + (", ..." if len(parts) > 8 else "")


def _require_same_order(saved: BatchCut, now: BatchCut, under_way: bool) -> None:
    if (saved.sampler, saved.batch_sampler) != (now.sampler, now.batch_sampler):
        kinds = (saved.batch_sampler, now.batch_sampler)
        theirs, ours = ("batch_size=None" if kind == "NoneType" else kind for kind in kinds)
        raise StateError(
            f"the state is from a loader with {theirs} over {saved.sampler}, and this one has {ours} over "
            f"{now.sampler}, which gives another order; use the same samplers."
        )
    if under_way and saved.ranks != now.ranks and now.sampler == "StreamSampler":
        raise StateError(
            f"the state is from {max(saved.ranks, 1)} ranks that divide a recorded stream, and there are "
            f"{max(now.ranks, 1)} now; resume with {max(saved.ranks, 1)} ranks, or begin the epoch anew."
        )
    if under_way and saved.ranks != now.ranks and now.batch_size is None:
        raise StateError(
            f"the state is from {saved.ranks} ranks, and there are {now.ranks} now: only torch's "
            f"BatchSampler over DistributedSampler can divide the rest anew; resume with {saved.ranks} ranks."
        )
    if under_way and (saved.batch_size is None) != (now.batch_size is None):
        raise StateError(
            "the state is from a loader whose batch_size was None where this one's is not, or the reverse; "
            "load it with the same batch_size."
        )
