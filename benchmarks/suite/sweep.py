"""The sweep: what an epoch of a training takes with none, a quarter, half, three quarters, all of it cached.

stocaching's own benchmark at the size of two cores: JPEGs of 512 pixels, a network that waits for them
(:mod:`benchmarks.training`), a local disk and a slow link (:mod:`benchmarks.throttle`), a first epoch that
fills and later ones that read. What it claims for itself is what any such cache should do: later epochs
get faster *in proportion* to what is cached, and the first one costs next to nothing. So the bounds are the
straight line between an uncached and a wholly cached later epoch, and the first epoch without a cache.

Each training is one contestant, opened anew each round: ``hotset, 25 %`` is ``hotset.DataLoader`` over
``hotset.cache(memory=a quarter of what all samples take)``, ``stocaching, 25 %`` its README's dataset with
room for a quarter of the samples, under torch's DataLoader. At 0 % both are the same, torch's DataLoader over
the source. All train the same network from the same seed, and each step's loss must be, to the last bit,
what it is without a cache: a contestant that lost, repeated or mixed up samples is out.

What opening takes (probe and fingerprint there, touching every page of the cache here) is told apart.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from torch.utils.data import Dataset

from benchmarks import curves, data, hotset_entries, peers
from benchmarks.harness import Comparison, Outcome, Row, Spread, Target, compare
from benchmarks.settings import Settings
from benchmarks.throttle import Throttle
from benchmarks.training import train
from benchmarks.truth import WrongData

__all__ = ["sweep"]

NONE = "no cache"
_KINDS = ("hotset", "stocaching")
_EPOCHS = 3
_BATCH = 32
_WORKERS = 2

# A hundred megabits a second, and a server in the same city: at best 230 of these files a second, where two
# cores decode 500.
_BYTES_PER_SECOND = 12_500_000
_LATENCY_SECONDS = 0.002


def sweep(settings: Settings) -> Outcome:
    """Later epochs at most 1.10x of the straight line, first epochs at most 1.03x of no cache."""
    files = data.photographs(settings.out, settings.swept)
    total, panels = Outcome(), []
    with tempfile.TemporaryDirectory() as folder:
        link = Throttle(Path(folder, "link"), _BYTES_PER_SECOND, _LATENCY_SECONDS)
        for source in (
            _Source("local disk", data.Photographs(files), None),
            _Source("throttled source", _Remote(files, link), link),
        ):
            found = _Sweep(source, (50, 100) if settings.quick else (25, 50, 75, 100))
            first, later = _compare(found, 1 if settings.quick else settings.pairs)
            total.comparisons += [first, later]
            total.targets += [_first_target(first), _line_target(found, later)]
            total.notes += _notes(found, later)
            panels.append(curves.Panel(f"{source.name}, {len(files)} JPEGs", _curves(found, later)))
    drawn = settings.out / "sweep.png"
    curves.draw(drawn, panels)
    total.notes += [
        f"the throttled source stands for remote storage: {_BYTES_PER_SECOND / 1e6:g} MB/s and "
        f"{_LATENCY_SECONDS * 1e3:g} ms, shared by all workers; the local disk's files are in the page cache",
        f"epoch times against what was cached: {drawn}",
    ]
    return total


@dataclasses.dataclass(frozen=True)
class _Source:
    """Where the pictures come from."""

    name: str
    dataset: Dataset[Any]
    link: Throttle | None

    @property
    def requests(self) -> int:
        return self.link.counts().requests if self.link is not None else 0


class _Remote(data.Photographs):
    """The same pictures, whose files pass a link."""

    def __init__(self, files: list[Path], link: Throttle) -> None:
        super().__init__(files)
        self._link = link

    def __getitem__(self, i: int) -> data.Sample:
        return data.decode(io.BytesIO(self._link.read(self._files[i]))), i


class _Stocached(Dataset[data.Sample]):
    """The example of stocaching's README, with room for a share of the samples."""

    def __init__(self, source: Dataset[Any], share: float) -> None:
        from stocaching import SharedCache

        self._source = source
        count = len(source)  # type: ignore[arg-type]
        picture = source[0][0]
        with contextlib.redirect_stdout(io.StringIO()):
            self.cache = SharedCache(
                # A byte of state for each sample comes on top.
                size_limit_gib=(share * count * picture.nbytes + count) / 2**30,
                dataset_len=count,
                data_dims=tuple(picture.shape),
                dtype=picture.dtype,
            )

    def __len__(self) -> int:
        return len(self._source)  # type: ignore[arg-type]

    def __getitem__(self, i: int) -> data.Sample:
        picture = self.cache.get_slot(i)
        if picture is None:
            picture = self._source[i][0]
            self.cache.set_slot(i, picture)
        return picture, i


class _Training(NamedTuple):
    """What one training took and left.

    Attributes:
        first: seconds of the first epoch.
        later: mean seconds of the epochs after it.
        held: the share of the samples that was cached at the end, 0 to 1.
        opened: seconds that making dataset and loader took.
        requested: requests to the link for each sample, beyond opening.
        audited: how many of these hotset's audit made, to compare what is cached with the source.
        losses: of each step of each epoch.
    """

    first: float
    later: float
    held: float
    opened: float
    requested: float
    audited: float
    losses: list[tuple[float, ...]]


class _Sweep:
    """All trainings from one source. Called with a contestant's name it runs one, and gives its later epochs.

    Args:
        source: where the pictures come from.
        limits: of the caches in per cent of what all samples take, ascending, the last one 100.

    Attributes:
        limits: each contestant's limit, by its name; that of no cache is 0.
        done: its trainings so far, round by round, by its name.
    """

    def __init__(self, source: _Source, limits: Sequence[int]) -> None:
        self.source = source
        self.limits = {NONE: 0} | {_name(kind, limit): limit for kind in _KINDS for limit in limits}
        self.done: dict[str, list[_Training]] = {name: [] for name in self.limits}
        self._count: int = len(source.dataset)  # type: ignore[arg-type]
        self._bytes = 0
        self._truth: list[tuple[float, ...]] = []

    def contestants(self, kind: str) -> list[str]:
        """Return the names of ``kind``'s contestants, by ascending limit."""
        return [name for name in self.limits if name.startswith(kind)]

    def warm_up(self) -> None:
        """Train once for nothing: files come into the page cache, torch chooses kernels; keep the losses."""
        from hotset import cache

        with cache(self.source.dataset) as cached:
            self._bytes = cached.plan.total_bytes
        self._truth = self._train(NONE).losses

    def __call__(self, name: str) -> float:
        training = self._train(name)
        for number, (ours, theirs) in enumerate(zip(training.losses, self._truth, strict=True), start=1):
            if ours != theirs:
                raise WrongData(f"the losses of epoch {number} are not those without a cache")
        self.done[name].append(training)
        return training.later

    def spread(self, name: str, figure: str) -> Spread:
        """Return the spread of a figure (an attribute of the trainings) over the rounds."""
        return Spread.of(getattr(training, figure) for training in self.done[name])

    def _train(self, name: str) -> _Training:
        with ExitStack() as stack, _expected_warnings():
            start = time.perf_counter()
            begin, counted = self._open(stack, name)
            opened = time.perf_counter() - start
            before = self.source.requests
            epochs = list(train(begin, _EPOCHS))
            requested = self.source.requests - before
            held, audited = counted()
            return _Training(
                first=epochs[0].seconds,
                later=sum(epoch.seconds for epoch in epochs[1:]) / (_EPOCHS - 1),
                held=held / self._count,
                opened=opened,
                requested=requested / self._count,
                audited=audited / self._count,
                losses=[epoch.losses for epoch in epochs],
            )

    def _open(self, stack: ExitStack, name: str) -> tuple[peers.Epoch, Callable[[], tuple[int, int]]]:
        """Return how epochs begin, and what tells how many samples are cached, and were audited."""
        from hotset import cache

        source, limit = self.source.dataset, self.limits[name]
        if limit == 0:
            return peers.loader(stack, source, _BATCH, _WORKERS), lambda: (0, 0)
        if name.startswith("stocaching"):
            stocached = _Stocached(source, limit / 100)
            return peers.loader(stack, stocached, _BATCH, _WORKERS), lambda: (len(stocached.cache), 0)
        cached = stack.enter_context(cache(source, memory=self._bytes * limit // 100))

        def counted() -> tuple[int, int]:
            stats = cached.stats()
            return stats.cached, stats.audited

        return hotset_entries.loader(stack, cached, _BATCH, _WORKERS), counted


def _name(kind: str, limit: int) -> str:
    return f"{kind}, {limit} %"


def _compare(found: _Sweep, rounds: int) -> tuple[Comparison, Comparison]:
    """Run all trainings ``rounds`` times; return the comparisons of their first and their later epochs."""
    found.warm_up()
    later = compare(
        {name: partial(found, name) for name in found.limits},
        NONE,
        rounds,
        title=f"Later epochs, {found.source.name}",
        unit="s",
        subjects=tuple(found.contestants("hotset")),
        lower_is_better=True,
        warm_up=False,
    )
    later.matched = dict(zip(found.contestants("stocaching"), later.subjects, strict=True))
    rows = {
        name: Row(name, [] if row.unfit else [training.first for training in found.done[name]], row.unfit)
        for name, row in later.rows.items()
    }
    return dataclasses.replace(later, title=f"First epoch, {found.source.name}", rows=rows), later


def _first_target(first: Comparison) -> Target:
    text = f"{first.title}, any limit: hotset's time as a multiple of no cache's"
    reason = _unfit(first)
    if reason:
        return Target(text, None, 1.03, at_least=False, reason=reason)
    ratios = {name: ratio for name in first.subjects if (ratio := first.ratio(name, NONE)) is not None}
    worst = max(ratios, key=lambda name: ratios[name].median)
    return Target(f"{text} (the worst: {worst})", ratios[worst], 1.03, at_least=False)


def _line_target(found: _Sweep, later: Comparison) -> Target:
    text = f"{later.title}: hotset's time as a multiple of the straight line's"
    reason = _unfit(later)
    if reason:
        return Target(text, None, 1.1, at_least=False, reason=reason)
    ratios = _to_the_line(found, later)
    worst = max(ratios, key=lambda name: ratios[name].median)
    return Target(f"{text} (the worst: {worst})", ratios[worst], 1.1, at_least=False)


def _unfit(found: Comparison) -> str:
    reasons = (found.rows[name].unfit for name in (NONE, *found.subjects))
    return next((reason for reason in reasons if reason), "")


def _to_the_line(found: _Sweep, later: Comparison) -> dict[str, Spread]:
    """Return, for hotset's limits between nothing and all, time as a multiple of the straight line's.

    The line of a round leads from its training without a cache to the one with everything cached.
    """
    *between, whole = later.subjects
    ratios = {}
    for name in between:
        rounds = zip(found.done[name], found.done[NONE], found.done[whole], strict=True)
        ratios[name] = Spread.of(
            ours.later / (none.later + (full.later - none.later) * ours.held / full.held)
            for ours, none, full in rounds
        )
    return ratios


def _curves(found: _Sweep, later: Comparison) -> list[curves.Curve]:
    drawn = []
    for kind in _KINDS:
        names = [name for name in (NONE, *found.contestants(kind)) if later.rows[name].figures]
        drawn.append(
            curves.Curve(
                kind,
                [found.spread(name, "held").median for name in names],
                [found.spread(name, "first") for name in names],
                [found.spread(name, "later") for name in names],
            )
        )
    return drawn


def _notes(found: _Sweep, later: Comparison) -> list[str]:
    """Return what the tables do not tell: shares, the line, opening, requests."""
    source, notes = found.source.name, []
    if not _unfit(later):
        ratios = (f"{name}: {ratio.median:.3g}" for name, ratio in _to_the_line(found, later).items())
        notes.append(f"{source}, later epochs as multiples of the straight line: {'; '.join(ratios)}")
    told = [("held", "share cached", ".1%"), ("opened", "seconds to open", ".2f")]
    if found.source.link is not None:
        told.append(("requested", f"requests to the link for a sample in {_EPOCHS} epochs", ".3f"))
        told.append(("audited", "of these made by the audit", ".3f"))
    for figure, meaning, form in told:
        each = (
            f"{name}: {found.spread(name, figure).median:{form}}"
            for name in found.limits
            if later.rows[name].figures
        )
        notes.append(f"{source}, {meaning}: {'; '.join(each)}")
    return notes


@contextlib.contextmanager
def _expected_warnings() -> Iterator[None]:
    """Let hotset not tell that its limit is reached, which is what is being measured."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*its memory limit is reached")
        yield
