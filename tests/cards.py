"""A graphics card that is not there: streams whose work is done when a test says so, or never.

:class:`Card` stands for ``torch.cuda``, and as a context for what tensors do on it. A copy from page-locked
memory is put in the current stream and done later, by address, as a card does it: it holds nothing alive, and
reads what is at that address by then. A step's work is put in the consumer's stream, and sees what the copies
have brought by the time it is done. So memory that is given back too early, or a wait that is missing, shows
as wrong numbers.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from hotset.device.trees import memory_of


class Stream:
    """Work in order.

    Attributes:
        left: the work that is not done yet.
        done: how much of it is.
    """

    def __init__(self) -> None:
        self.left: list[Callable[[], object]] = []
        self.done = 0

    def issue(self, work: Callable[[], object]) -> None:
        self.left.append(work)

    def run(self, until: int | None = None) -> None:
        """Do the work that is left, or all up to a number."""
        while self.left and (until is None or self.done < until):
            self.left.pop(0)()
            self.done += 1

    def record_event(self) -> Event:
        return Event(self)

    def wait_event(self, event: Event) -> None:
        self.issue(event.pass_by)


class Event:
    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.at = stream.done + len(stream.left)
        self.waits = 0

    def query(self) -> bool:
        return self.stream.done >= self.at

    def pass_by(self) -> None:
        self.stream.run(self.at)

    def synchronize(self) -> None:
        """The host waits."""
        self.waits += 1
        self.pass_by()


class Card(TorchFunctionMode):
    """The card, and the stream that the consumer's steps run in.

    Args:
        pinned: whether all host memory is page-locked; otherwise only what ``pin_memory()`` gives.

    Attributes:
        steps: the consumer's stream.
        copies: the streams that were made.
        pageable: copies from memory that was not page-locked.
        locked: tensors that ``pin_memory()`` gave. They stay, as torch's own such memory waits for copies.
        used: tensors, each with the stream that it was said to be used by.
        room: copies until the card's memory is full.
    """

    device = torch.device("cuda", 0)

    def __init__(self, *, pinned: bool = True) -> None:
        super().__init__()
        self.pinned = pinned
        self.steps = Stream()
        self.copies: list[Stream] = []
        self.pageable = 0
        self.locked: list[torch.Tensor] = []
        self.used: list[tuple[torch.Tensor, Any]] = []
        self.room = 1 << 30
        self._parts: set[int] = set()  # addresses of what sparse tensors are made of
        self._current = self.steps

    # ---- as torch.cuda -------------------------------------------------------------------------------

    def Stream(self, device: torch.device) -> Stream:
        assert device == self.device
        self.copies.append(Stream())
        return self.copies[-1]

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        outer, self._current = self._current, stream
        try:
            yield
        finally:
            self._current = outer

    def current_stream(self, device: torch.device) -> Stream:
        assert device == self.device
        return self._current

    # ---- as its tensors ------------------------------------------------------------------------------

    def __enter__(self) -> Card:
        def record_stream(tensor: torch.Tensor, stream: Any) -> None:
            self.used.append((tensor, stream))

        # Its argument must be a stream of torch's before anything else is asked.
        torch.Tensor.record_stream = record_stream  # type: ignore[method-assign, assignment]
        return super().__enter__()  # type: ignore[no-any-return]

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        del torch.Tensor.record_stream
        self.used.clear()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == torch.Tensor.device.__get__:  # type: ignore[attr-defined]
            return self.device if self._is_there(args[0]) else func(*args)
        if func is torch.Tensor.to and self.device in args:
            return self._copy(args[0], **(kwargs or {}))
        if func is torch.Tensor.is_pinned:
            return self._is_pinned(args[0])
        if func is torch.Tensor.pin_memory:
            assert not self._is_pinned(args[0]), "it is page-locked already"
            self.locked.append(args[0].clone())
            return self.locked[-1]
        return func(*args, **(kwargs or {}))

    def _is_pinned(self, tensor: torch.Tensor) -> bool:
        return self.pinned or any(tensor is one for one in self.locked)

    def _is_there(self, tensor: torch.Tensor) -> bool:
        if tensor.layout is torch.strided and tensor.data_ptr() in self._parts:
            return True
        return bool(getattr(tensor, "on_card", False))

    def _copy(self, host: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        self.room -= 1
        if self.room < 0:
            raise torch.OutOfMemoryError("the card is full")
        if host.layout is not torch.strided:
            assert not non_blocking
            made = host.clone()
            made.on_card = True  # type: ignore[attr-defined]
            self._parts |= {part.data_ptr() for part in memory_of(made)}
            return made
        assert host.is_contiguous()
        there = torch.full((host.nbytes,), 0xA5, dtype=torch.uint8).view(host.dtype).view(host.shape)
        there.on_card = True  # type: ignore[attr-defined]
        address, size = host.data_ptr(), host.nbytes
        if size == 0:
            return there
        if non_blocking and self._is_pinned(host):
            self._current.issue(lambda: ctypes.memmove(there.data_ptr(), address, size))
        else:
            self.pageable += 1
            ctypes.memmove(there.data_ptr(), address, size)
        return there
