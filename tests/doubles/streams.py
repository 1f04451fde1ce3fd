"""Streams and events without computation, and a recorder of their order, for tests without a GPU.

    with Recorder() as recorder:             # torch.cuda's streams and events, .to("cuda") and page-locked memory
        ...
    assert recorder.races == []

Each stream has a clock, and knows which operations of the others it has waited for. Tensors on "cuda" are tensors on
the CPU here, with the stream that created them. A race is: a read by a stream that has not waited for the creating
stream; memory that is freed to its stream while a different stream, neither waited for nor recorded, may still read it;
a copy from memory that is not page-locked, for which the host waits.

It detects missing orders even if a GPU would not show them. It does not model durations, nor kernels that write into
tensors that they receive.
"""

from __future__ import annotations

import weakref
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

Clock = dict[int, int]


class Stream:
    """Operations in order. `seen`: the last operation of each stream, by number, that this one has waited for."""

    def __init__(self, recorder: Recorder, number: int) -> None:
        self.recorder, self.number = recorder, number
        self.seen: Clock = {number: 0}

    def work(self) -> int:
        """Add an operation; returns its time."""
        self.seen[self.number] += 1
        return self.seen[self.number]

    def wait_event(self, event: Event) -> None:
        for number, time in event.seen.items():
            self.seen[number] = max(time, self.seen.get(number, 0))

    def wait_stream(self, other: Stream) -> None:
        event = Event()
        event.record(other)
        self.wait_event(event)

    def comes_after(self, stream: int, time: int) -> bool:
        """Whether the next operation of this stream is ordered after operation `time` of the other stream."""
        return self.seen.get(stream, 0) >= time


class Event:
    def __init__(self, **_: object) -> None:
        self.seen: Clock = {}

    def record(self, stream: Stream) -> None:
        self.seen = dict(stream.seen)


class _Memory:
    """The memory of a tensor on the device, until its last view is deleted."""

    def __init__(self, stream: Stream) -> None:
        self.stream, self.made = stream, stream.work()
        self.reads: Clock = {}
        self.recorded: set[int] = set()


class Recorder(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.races: list[tuple[str, *tuple[int, ...]]] = []  # what happened, on which stream, and the other stream
        self.copies = 0
        """that went to the device"""
        self._streams = [Stream(self, 0)]
        self._current = self._streams[0]
        self._memory: dict[int, _Memory] = {}  # by address
        self._locked: set[int] = set()

    def __enter__(self) -> Recorder:
        cuda = {
            "Stream": lambda device=None: self._new(), "Event": Event, "stream": self._on,
            "current_stream": lambda device=None: self._current,
        }  # fmt: skip
        self._patches = ExitStack()
        self._patches.enter_context(patch.multiple(torch.cuda, **cuda))
        # its arguments are looked at before a mode is asked
        self._patches.enter_context(patch.object(Tensor, "record_stream", self._recorded))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._patches.close()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(kwargs or {})
        if func is Tensor.pin_memory:
            locked = args[0].clone()
            self._keep(self._locked, locked)
            return locked
        if func is Tensor.to and len(args) > 1 and torch.device(args[1]).type == "cuda":
            return self._sent(args[0], **given)
        for one in (*args, *given.values()):
            if isinstance(one, Tensor):
                self._read(one)
        return func(*args, **given)

    @property
    def _recorded(self) -> Any:
        def record_stream(tensor: Tensor, stream: Stream) -> None:
            self._memory[_address(tensor)].recorded.add(stream.number)

        return record_stream

    def _sent(self, tensor: Tensor, non_blocking: bool = False) -> Tensor:
        if not non_blocking or _address(tensor) not in self._locked:
            self.races.append(("host waits",))
        self.copies += 1
        there = tensor.clone()
        memory = self._memory[_address(there)] = _Memory(self._current)
        weakref.finalize(there.untyped_storage(), self._freed, _address(there), memory)
        return there

    def _read(self, tensor: Tensor) -> None:
        with torch._C.DisableTorchFunction():
            memory = self._memory.get(_address(tensor))
        if memory is None:
            return
        if not self._current.comes_after(memory.stream.number, memory.made):
            self.races.append(("read too early", self._current.number, memory.stream.number))
        memory.reads[self._current.number] = self._current.work()

    def _freed(self, address: int, memory: _Memory) -> None:
        if self._memory.get(address) is memory:
            del self._memory[address]
        for number, time in memory.reads.items():
            if number not in memory.recorded and not memory.stream.comes_after(number, time):
                self.races.append(("freed too early", memory.stream.number, number))

    def _keep(self, addresses: set[int], tensor: Tensor) -> None:
        addresses.add(_address(tensor))
        weakref.finalize(tensor.untyped_storage(), addresses.discard, _address(tensor))

    def _new(self) -> Stream:
        self._streams.append(Stream(self, len(self._streams)))
        return self._streams[-1]

    @contextmanager
    def _on(self, stream: Stream) -> Generator[None]:
        before, self._current = self._current, stream
        try:
            yield
        finally:
            self._current = before


def _address(tensor: Tensor) -> int:
    with torch._C.DisableTorchFunction():
        return tensor.untyped_storage().data_ptr()
