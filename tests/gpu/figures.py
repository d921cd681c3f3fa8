"""What sinking gives, in figures: each the median of ratios of pairs that were run in turn, in one process.

=====================  ====================================================================  ==============
launch-bound           LeNet-5, batch 32: steps/s of the sink, resident, over those of an    at least 3
                       eager loop with the faster of three DataLoaders; the note says how
                       long the kernels themselves take
by hand                the same sink over one graph of the same step, gathering included,    at least 0.95
                       captured and replayed by hand
against a scan         the same sink over JAX's scan of as many of the same steps; JAX       at least 0.9
                       compiles its step, so the sink of a compiled one is there, too
fed from the cache     ResNet-50, batch 256, bfloat16, channels last: steps/s from the       at least 0.99
                       cache over those on one batch that never leaves the device, in
                       passes of 40 batches, each a call
not launch-bound       a network of large products: the sink over an eager loop with a       at least 0.99
                       DataLoader
idle                   the part of the time that lies between steps, ResNet-50 from the      below 0.01
                       cache, of a profiler's trace; the note has that in them, too
copies                 bytes/s of a queue over page-locked batches, over those of copies     at least 0.9
                       of one page-locked block
gathered               bytes/s of batches of 2048 resident samples of 150 KB, over those     at least 0.8
                       of a copy within the device's memory
frozen encoder         samples/s of an epoch over cached features of a vision transformer    above 1
                       of size B, over those of computing them anew
photographs            images/s of a plain loop of ResNet-18 and of ResNet-50 over JPEG      above 1
                       files, resized, then cropped and flipped at random: a later epoch
                       of hotset's loader over one of torch's (photographs.py)
=====================  ====================================================================  ==============

Each function gives its figures one by one, so that those before an error are told.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

import hotset

from .networks import Encoder, colour, grey, lenet, resnet50, sgd, training_step, wide


class Scale(NamedTuple):
    """How large everything is; the tiny one is to try the code on a CPU."""

    pairs: int
    lenet_samples: int
    lenet_steps: int
    resnet: dict[str, Any]
    image: int
    batch: int
    batches: int
    resnet_steps: int
    width: int
    wide_batch: int
    wide_steps: int
    block: int
    blocks: int
    workers: tuple[int, ...]
    row: int
    rows: int
    gathers: tuple[int, int]  # batches, and rows of each
    encoder: dict[str, Any]
    pictures: int
    photographs: tuple[int, int]  # files, and how often each is in the dataset


FULL = Scale(
    5,
    60_000,
    1000,
    {},
    224,
    256,
    10,
    40,
    8192,
    4096,
    50,
    64 << 20,
    40,
    (0, 4, 8),
    150_000,
    8192,
    (1024, 2048),
    {},
    2048,
    (512, 16),
)
TINY = Scale(
    2,
    128,
    4,
    {"width": 4, "blocks": (1, 1), "classes": 10},
    32,
    4,
    3,
    2,
    16,
    8,
    3,
    1 << 16,
    4,
    (0, 2),
    64,
    512,
    (4, 32),
    {"width": 16, "layers": 1, "heads": 2},
    64,
    (12, 2),
)


class Kernel(NamedTuple):
    """What ran on the device: when, in microseconds, and what it was."""

    begin: float
    end: float
    name: str


class Figure(NamedTuple):
    """One line of the table.

    Attributes:
        name, asked: what it is, and what it should be: ``">= 10"``, say.
        value: the median; None if it cannot be measured here, and then ``note`` says why.
        pairs: all that it is the median of.
        note: what else was found: absolute speeds.
    """

    name: str
    asked: str
    value: float | None
    pairs: list[float]
    note: str

    @property
    def met(self) -> bool | None:
        if self.value is None:
            return None
        sign, bound = self.asked.split()
        return self.value >= float(bound) if sign == ">=" else self.value < float(bound)


def _wait(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def seconds(device: str, run: Callable[[], object]) -> float:
    _wait(device)
    begun = time.perf_counter()
    run()
    _wait(device)
    return time.perf_counter() - begun


def ratios(
    device: str, pairs: int, ours: Callable[[], object], theirs: Callable[[], object]
) -> tuple[list[float], float, float]:
    """How many times as fast ours is, for each pair, and the median seconds of both; each ran once before."""
    ours(), theirs()
    found = []
    for number in range(pairs):
        # Each is first in every other pair: what is warm from the run before favours neither.
        if number % 2:
            theirs_took, ours_took = seconds(device, theirs), seconds(device, ours)
        else:
            ours_took, theirs_took = seconds(device, ours), seconds(device, theirs)
        found.append((ours_took, theirs_took))
    times = [theirs_took / ours_took for ours_took, theirs_took in found]
    return times, statistics.median(o for o, _ in found), statistics.median(t for _, t in found)


class _Endless:
    """An eager loop over a DataLoader as people write it, a number of steps at a time, going on."""

    def __init__(self, step: Callable[..., Any], loader: Any, device: str) -> None:
        self._step = step
        self._loader = loader
        self._device = device
        self._batches: Iterator[Any] = iter(())

    def __call__(self, steps: int) -> None:
        for _ in range(steps):
            batch = next(self._batches, None)
            if batch is None:
                self._batches = iter(self._loader)
                batch = next(self._batches)
            self._step(*(one.to(self._device, non_blocking=True) for one in batch))


class _Digits(torch.utils.data.Dataset[Any]):
    """MNIST's make: bytes in memory, made an image when they are asked for."""

    def __init__(self, count: int) -> None:
        made = torch.Generator().manual_seed(1)
        self.images = torch.randint(0, 256, (count, 1, 32, 32), dtype=torch.uint8, generator=made)
        self.labels = torch.randint(0, 10, (count,), generator=made)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Any:
        return self.images[index], self.labels[index]


def _lenet_step(device: str) -> Callable[..., Any]:
    torch.manual_seed(7)
    network = lenet().to(device)
    return training_step(network, sgd(network), grey)


def _compiled_lenet_step(device: str) -> Callable[..., Any]:
    """The same; torch.compile makes few kernels of it."""
    torch.manual_seed(7)
    network = lenet().to(device)
    optimizer: Any = torch.optim.SGD(network.parameters(), lr=0.01, momentum=0.9, fused=True)

    def loss_of(images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(network(grey(images)), labels)

    compiled = torch.compile(loss_of)

    def step(images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss: torch.Tensor = compiled(images, labels)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss

    return step


@contextmanager
def _lenet_sink(
    device: str, scale: Scale, dataset: Any, make: Callable[[str], Callable[..., Any]] = _lenet_step
) -> Iterator[Any]:
    """LeNet-5 sunk, over samples that are resident."""
    with hotset.cache(dataset, memory="1GiB") as cached:
        loader = hotset.DataLoader(cached, batch_size=32, shuffle=True)
        for _ in loader:
            pass
        queue = hotset.DeviceQueue(loader, device=device, resident="1GiB")
        with hotset.data_sink(make(device), queue, scale.lenet_steps) as sink:
            yield sink


def _figure(
    name: str, asked: str, found: tuple[list[float], float, float], amount: float, unit: str, note: str = ""
) -> Figure:
    """One of ratios: what is done ``amount`` times, and how often in a second."""
    pairs, ours, theirs = found
    said = f"{amount / ours:,.0f} {unit} against {amount / theirs:,.0f}{note}"
    return Figure(name, asked, statistics.median(pairs), pairs, said)


def launch_bound(device: str, scale: Scale) -> Iterator[Figure]:
    dataset, steps = _Digits(scale.lenet_samples), scale.lenet_steps
    loops = {}
    for workers in scale.workers:
        loader = DataLoader(
            dataset,
            batch_size=32,
            shuffle=True,
            num_workers=workers,
            pin_memory=device != "cpu",
            persistent_workers=workers > 0,
        )
        loops[workers] = _Endless(_lenet_step(device), loader, device)
    for loop in loops.values():
        loop(10)
    took = {workers: seconds(device, lambda loop=loop: loop(steps)) for workers, loop in loops.items()}
    best = min(took, key=lambda workers: took[workers])
    with _lenet_sink(device, scale, dataset) as sink:
        found = ratios(device, scale.pairs, sink, lambda: loops[best](steps))
        note = f" with {best} workers" + (f"; {sink.why}" if sink.why else "")
        yield _figure("launch-bound: LeNet-5, sink / eager", ">= 3", found, steps, "steps/s", note)
        loops.clear()
        yield _against_by_hand(device, scale, dataset, sink)
        if device != "cpu":
            part, whole = _kernel_part(sink), seconds(device, sink)
            note = f"{1e6 * part * whole / steps:.0f} of {1e6 * whole / steps:.0f} us a step"
            yield Figure("the kernels' own part of a sunk step", ">= 0", part, [], note)


def against_scan(device: str, scale: Scale) -> Iterator[Figure]:
    name = "against a scan: LeNet-5, sink / JAX's scan"
    if importlib.util.find_spec("jax") is None:
        yield Figure(name, ">= 0.9", None, [], "JAX is not installed")
        return
    from .scan import lenet_scan

    dataset = _Digits(scale.lenet_samples)
    theirs = lenet_scan(dataset.images.numpy(), dataset.labels.numpy(), scale.lenet_steps)
    for make, more in ((_lenet_step, ""), (_compiled_lenet_step, ", compiled")):
        if make is _compiled_lenet_step and device == "cpu":
            continue
        with _lenet_sink(device, scale, dataset, make) as sink:
            found = ratios(device, scale.pairs, sink, theirs)
            kernels = "" if device == "cpu" else f", kernels {_kernel_part(sink):.2f} of the time"
            note = kernels + (f"; {sink.why}" if sink.why else "")
        yield _figure(name + more, ">= 0.9", found, scale.lenet_steps, "steps/s", note)


def _kernel_part(run: Callable[[], object]) -> float:
    """The part of the time in which a kernel runs."""
    return 1 - _idle_part(_trace(run))


def _against_by_hand(device: str, scale: Scale, dataset: _Digits, sink: Any) -> Figure:
    name = "by hand: LeNet-5, sink / hand-written graph"
    if device == "cpu":
        return Figure(name, ">= 0.95", None, [], "there are no graphs on a CPU")
    images, labels = dataset.images.to(device), dataset.labels.to(device)
    rows = torch.zeros(32, dtype=torch.int64, device=device)
    step = _lenet_step(device)

    def gathered() -> Any:
        return step(images.index_select(0, rows), labels.index_select(0, rows))

    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        for _ in range(3):
            gathered()
    torch.cuda.current_stream(device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # loaders' threads pin memory meanwhile
        gathered()

    def by_hand() -> None:
        order = torch.randint(len(images), (scale.lenet_steps, 32)).pin_memory()
        for some in order.to(device, non_blocking=True):
            rows.copy_(some, non_blocking=True)
            graph.replay()

    return _figure(name, ">= 0.95", ratios(device, scale.pairs, sink, by_hand), scale.lenet_steps, "steps/s")


def _photos(scale: Scale) -> TensorDataset:
    made = torch.Generator().manual_seed(1)
    count = scale.batch * scale.batches
    shape = (count, 3, scale.image, scale.image)
    classes = scale.resnet.get("classes", 1000)
    return TensorDataset(
        torch.randint(0, 256, shape, dtype=torch.uint8, generator=made),
        torch.randint(0, classes, (count,), generator=made),
    )


_MARK = "spin_kernel"  # as the profiler names what torch.cuda._sleep runs


def _resnet_step(device: str, scale: Scale) -> Callable[..., Any]:
    """Its first kernel is the mark by which a trace is divided into steps."""
    torch.manual_seed(7)
    network = resnet50(**scale.resnet).to(device, memory_format=torch.channels_last)
    step = training_step(network, sgd(network), colour, torch.bfloat16)

    def marked(images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if device != "cpu":
            torch.cuda._sleep(1)
        return step(images, labels)

    return marked


def fed_from_the_cache(device: str, scale: Scale) -> Iterator[Figure]:
    """Both that need ResNet-50 and its cache: the speed, and the idle time."""
    with ExitStack() as held:
        cached = held.enter_context(hotset.cache(_photos(scale), memory="2GiB"))
        steps = scale.resnet_steps
        sampler = RandomSampler(cached, replacement=True, num_samples=scale.batch * steps)
        loader = hotset.DataLoader(
            cached, batch_size=scale.batch, sampler=sampler, pin_memory=device != "cpu"
        )
        one = tuple(part.to(device) for part in next(iter(loader)))
        for _ in hotset.DataLoader(cached, batch_size=scale.batch):
            pass
        fed = held.enter_context(hotset.data_sink(_resnet_step(device, scale), loader, steps, device=device))
        synthetic = held.enter_context(
            hotset.data_sink(
                _resnet_step(device, scale), hotset.DeviceQueue([one], depth=0, device=device), steps
            )
        )
        found = ratios(device, scale.pairs, fed, synthetic)
        yield _figure(
            "fed from the cache: ResNet-50, cache / synthetic",
            ">= 0.99",
            found,
            steps * scale.batch,
            "images/s",
            " on one batch" + (f"; {fed.why}" if fed.why else ""),
        )
        yield _idle(device, fed, synthetic, min(3, scale.pairs))


def _idle(device: str, fed: Any, synthetic: Any, times: int) -> Figure:
    name = "idle: between steps, ResNet-50 from the cache"
    if device == "cpu":
        return Figure(name, "< 0.01", None, [], "a CPU has no stream")
    traces = [_trace(fed) for _ in range(times)]
    found = [_idle_between(kernels) for kernels in traces]
    note = f"{_said_of(traces[-1])}; on one batch {_said_of(_trace(synthetic))}"
    return Figure(name, "< 0.01", statistics.median(found), found, note)


def _said_of(kernels: list[Kernel]) -> str:
    begins = [one.begin for one in kernels if _MARK in one.name]
    steps = [(end - begin) / 1e3 for begin, end in itertools.pairwise(begins)]
    return (
        f"{statistics.median(steps):.2f} ms a step ({min(steps):.2f} to {max(steps):.2f}), "
        f"{_idle_part(kernels):.4f} idle with the gaps within steps"
    )


def _trace(run: Callable[[], object]) -> list[Kernel]:
    """What runs on the device meanwhile, in the order in which it begins."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    return kernels_of(profiler)


def kernels_of(profiler: Any) -> list[Kernel]:
    """Whatever ran on the device, but for copies from the host, in the order in which it began."""
    found = sorted(
        Kernel(event.time_range.start, event.time_range.end, event.name)
        for event in profiler.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
        and "HtoD" not in event.name
        and not event.is_user_annotation  # an optimizer's step, say, from its first kernel to its last
    )
    if not found:
        raise RuntimeError("the profiler saw no kernel; it may lack the right to read the device's counters.")
    return found


def _idle_part(kernels: list[Kernel]) -> float:
    """The part of the whole span in which none of them runs.

    Example:
        >>> _idle_part([Kernel(0.0, 4.0, ""), Kernel(2.0, 6.0, ""), Kernel(9.0, 10.0, "")])
        0.3
    """
    return _gaps(kernels) / (max(one.end for one in kernels) - kernels[0].begin)


def _gaps(kernels: list[Kernel]) -> float:
    idle, reached = 0.0, kernels[0].end
    for one in kernels:
        idle += max(0.0, one.begin - reached)
        reached = max(reached, one.end)
    return idle


def _idle_between(kernels: list[Kernel]) -> float:
    """The part of the whole span that lies between steps: after a step's last kernel, before the next one's
    first. That copies of the next batch to where a graph reads it run there is not idle.

    Example:
        >>> copy = "Memcpy DtoD (Device -> Device)"
        >>> names = [_MARK, "a", copy, _MARK, "a", "b"]
        >>> begins = [0.0, 2.0, 4.0, 6.0, 8.0, 9.5]
        >>> _idle_between([Kernel(at, at + 1, name) for at, name in zip(begins, names, strict=True)])
        0.19047619047619047
    """
    idle = 0.0
    for number, one in enumerate(kernels):
        if number and _MARK in one.name:
            before = number - 1
            while before and "Memcpy" in kernels[before].name:
                before -= 1
            idle += _gaps(kernels[before : number + 1])
    return idle / (max(one.end for one in kernels) - kernels[0].begin)


def not_launch_bound(device: str, scale: Scale) -> Iterator[Figure]:
    made = torch.Generator().manual_seed(1)
    count = scale.wide_batch * 8
    images = torch.randint(0, 256, (count, scale.width), dtype=torch.uint8, generator=made)
    dataset = TensorDataset(images, torch.randint(0, 10, (count,), generator=made))

    def training() -> Callable[..., Any]:
        torch.manual_seed(7)
        network = wide(scale.width).to(device)
        return training_step(network, sgd(network), lambda x: x.float() / 255, torch.bfloat16)

    workers = scale.workers[-1]
    loader = DataLoader(
        dataset,
        batch_size=scale.wide_batch,
        shuffle=True,
        num_workers=workers,
        pin_memory=device != "cpu",
        persistent_workers=workers > 0,
    )
    eager = _Endless(training(), loader, device)
    with hotset.cache(dataset, memory="1GiB") as cached:
        ours_loader = hotset.DataLoader(
            cached, batch_size=scale.wide_batch, shuffle=True, pin_memory=device != "cpu"
        )
        with hotset.data_sink(training(), ours_loader, scale.wide_steps, device=device) as sink:
            pairs, ours, theirs = ratios(device, scale.pairs, sink, lambda: eager(scale.wide_steps))
    note = f"{1e3 * ours / scale.wide_steps:.2f} ms a step against {1e3 * theirs / scale.wide_steps:.2f}"
    yield Figure("not launch-bound: sink / eager", ">= 0.99", statistics.median(pairs), pairs, note)


def copies(device: str, scale: Scale) -> Iterator[Figure]:
    name = "copies: queue / page-locked bandwidth"
    if device == "cpu":
        yield Figure(name, ">= 0.9", None, [], "nothing is copied to a CPU")
        return
    blocks = [torch.empty(scale.block, dtype=torch.uint8, pin_memory=True).fill_(n) for n in range(4)]
    target = torch.empty(scale.block, dtype=torch.uint8, device=device)
    batches = [blocks[number % len(blocks)] for number in range(scale.blocks)]

    def by_hand() -> None:
        for block in batches:
            target.copy_(block, non_blocking=True)

    queue = hotset.DeviceQueue(batches, depth=2, device=device)

    def queued() -> None:
        for _ in queue:
            pass

    pairs, ours, theirs = ratios(device, scale.pairs, queued, by_hand)
    queue.close()
    size = scale.block * scale.blocks / 1e9
    note = f"{size / ours:.1f} GB/s against {size / theirs:.1f}"
    yield Figure(name, ">= 0.9", statistics.median(pairs), pairs, note)


def gathered(device: str, scale: Scale) -> Iterator[Figure]:
    name = "gathered: resident rows / copy on the device"
    size, (batches, count) = scale.row, scale.gathers
    made = torch.Generator().manual_seed(1)
    # Not zeros, which some devices move faster.
    some = torch.randint(0, 256, (256, size), dtype=torch.uint8, generator=made)
    data = TensorDataset(some.repeat(scale.rows // len(some), 1))
    # Many batches a pass: what a pass begins with is not what is measured. Arrays, as lists take longer.
    order = torch.randint(scale.rows, (batches, count), generator=made).numpy()
    with hotset.cache(data, memory="4GiB") as cached:
        for _ in hotset.DataLoader(cached, batch_size=256):
            pass
        loader = hotset.DataLoader(cached, batch_sampler=list(order))
        queue = hotset.DeviceQueue(loader, device=device, resident="4GiB")
        source = some.to(device).repeat(-(-count // len(some)), 1)[:count].contiguous()

        def copied() -> None:
            for _ in range(batches):
                source.clone()

        def queued() -> None:
            for _ in queue:
                pass

        pairs, ours, theirs = ratios(device, scale.pairs, queued, copied)
        kept = queue.stats().resident
        queue.close()
    by_hand = _gather_by_hand(device, some, scale)
    moved = 2e-9 * count * size * batches
    note = f"{moved / ours:,.0f} GB/s against {moved / theirs:,.0f}, {kept} samples resident"
    note += f"; gathers by hand {moved / by_hand:,.0f}"
    median = statistics.median(pairs) if device != "cpu" else None  # nothing is resident twice there
    yield Figure(name, ">= 0.8", median, pairs, note)


def _gather_by_hand(device: str, some: torch.Tensor, scale: Scale) -> float:
    """Seconds that the device takes for as many gathers, without whatever a queue does on the host."""
    batches, count = scale.gathers
    rows = some.to(device).repeat(scale.rows // len(some), 1)
    # As integers of eight bytes, which a row is made of: they are what torch gathers fastest.
    wide = rows.view(torch.int64) if scale.row % 8 == 0 else rows
    picked = [torch.randint(scale.rows, (count,), device=device) for _ in range(8)]

    def run() -> None:
        for number in range(batches):
            wide.index_select(0, picked[number % 8])

    run()
    return statistics.median(seconds(device, run) for _ in range(scale.pairs))


def frozen_encoder(device: str, scale: Scale) -> Iterator[Figure]:
    torch.manual_seed(7)
    image = scale.image
    encoder = Encoder(image, **scale.encoder).to(device).eval().requires_grad_(False)
    made = torch.Generator().manual_seed(1)
    shape = (scale.pictures, 3, image, image)
    pictures = TensorDataset(torch.randint(0, 256, shape, dtype=torch.uint8, generator=made))

    def encode(batch: Any) -> Any:
        with torch.no_grad(), torch.autocast(torch.device(device).type, torch.bfloat16):
            return encoder(batch[0].to(device).float() / 255).float().cpu()

    plain = DataLoader(pictures, batch_size=256, num_workers=scale.workers[-1], persistent_workers=True)

    def anew() -> None:
        for batch in plain:
            encode(batch)

    transform = hotset.batched(hotset.deterministic(encode), size=256)
    with hotset.cache(pictures, transform=transform, memory="1GiB") as cached:
        queue = hotset.DeviceQueue(hotset.DataLoader(cached, batch_size=256, shuffle=True), device=device)

        def again() -> None:
            for _ in queue:
                pass

        again()
        pairs, ours, theirs = ratios(device, scale.pairs, again, anew)
    found = pairs, ours, theirs
    yield _figure("frozen encoder: cached / anew", ">= 1", found, scale.pictures, "samples/s")


def photographs(device: str, scale: Scale) -> Iterator[Figure]:
    missing = [
        name for name in ("torchvision", "sklearn", "skimage") if importlib.util.find_spec(name) is None
    ]
    if missing:
        why = f"{' and '.join(missing)} are not installed"
        yield Figure("photographs: ResNet-18, hotset / torch", ">= 1", None, [], why)
        return
    from . import photographs as files

    yield from files.photographs(device, scale)


# In the order in which they are measured; JAX last, which may not go well beside torch.
FIGURES: list[Callable[[str, Scale], Iterator[Figure]]] = [
    launch_bound,
    fed_from_the_cache,
    not_launch_bound,
    copies,
    gathered,
    frozen_encoder,
    photographs,
    against_scan,
]


# The report


def machine(device: str) -> dict[str, Any]:
    """What they were measured on."""
    found = {
        "cores": os.cpu_count(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "device": "CPU",
    }
    if device != "cpu":
        properties = torch.cuda.get_device_properties(device)
        found["device"] = properties.name
        found["memory_gib"] = round(properties.total_memory / 2**30)
        found["cuda"] = torch.version.cuda
    return found


def measure(figure: Callable[[str, Scale], Iterator[Figure]], device: str, tiny: bool) -> Iterator[Any]:
    """What a function measures, in plain values."""
    torch.backends.cudnn.benchmark = True
    if device != "cpu":
        torch.cuda.empty_cache()  # JAX takes its memory beside torch's
    for one in figure(device, TINY if tiny else FULL):
        yield {"kind": "figure", **one._asdict(), "met": one.met}


def line(one: dict[str, Any]) -> str:
    """A figure as a line of the table."""
    value = "-" if one["value"] is None else f"{one['value']:.3f}"
    verdict = {True: "met", False: "MISSED", None: "not measured"}[one["met"]]
    return f"{one['name']:50} {value:>9}  asked {one['asked']:8} {verdict:13} {one['note']}"
