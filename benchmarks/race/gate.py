"""The side of a rank: a hook on its model lets so many steps pass, then holds the training until the next word.

    gate = Gate()
    model = gate.hold(model)            # before its forward, a training stands here
    loss = gate.hear(loss)              # notes the losses of the last step

So the loop around them stays what its framework's tutorial says. The words come over a Unix socket ($RACE_SOCKET); a
training whose starter is gone ends at once.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import psutil
import torch
from torch import Tensor, nn

TICK_SECONDS = 1.0


class Hello(msgspec.Struct, frozen=True):
    """A rank stands at the gate for the first time."""

    rank: int
    versions: dict[str, str]
    threads: int


class Go(msgspec.Struct, frozen=True):
    """Take so many steps. Without dropout, losses can be compared between frameworks: each draws its own numbers."""

    steps: int
    dropout: bool = True


class Report(msgspec.Struct, frozen=True):
    """What a rank has to say when it has taken them. Times are of one clock for all processes of a machine."""

    rank: int
    began_seconds: float
    ended_seconds: float
    user_seconds: float
    system_seconds: float
    loss: float
    """the mean of the last step's, of this rank's samples"""
    peak_bytes: int
    """of resident memory since the process began"""
    peak_gpu_bytes: int = 0
    p10_seconds: float = 0.0
    """the 10th percentile of its steps: of those that nobody has interrupted"""
    p10_cpu_seconds: float = 0.0
    """the same of the processor time of its main thread"""


class Gate:
    """See the module's words. `tick` is called once a second while the training stands."""

    def __init__(self, env: Mapping[str, str] = os.environ, tick: Callable[[], object] = lambda: None) -> None:
        self._path, self._rank = env["RACE_SOCKET"], int(env.get("RACE_RANK") or env.get("RANK") or 0)
        self._tick = tick
        self._socket: socket.socket | None = None
        self._steps_left = 0
        self._steps: list[tuple[float, float]] = []  # (clock, processor time of this thread) at the start of each
        self._began, self._cpu = 0.0, (0.0, 0.0)
        self._losses: Tensor | None = None
        self._dropout: list[tuple[nn.Dropout, float]] = []

    def hold(self, model: nn.Module) -> nn.Module:
        """Let a training of `model` pass one step at a time; evaluation is not held."""
        self.know(model)

        def before(module: nn.Module, _inputs: Any) -> None:
            if module.training:
                self.step()

        model.register_forward_pre_hook(before)
        return model

    def know(self, model: nn.Module) -> nn.Module:
        """For a training that is held elsewhere: only what the starter may switch off."""
        self._dropout = [(m, m.p) for m in model.modules() if isinstance(m, nn.Dropout)]
        return model

    def hear(self, loss: Callable[[Any, Any], Tensor]) -> Callable[[Any, Any], Tensor]:
        """`loss`, whose last value is kept."""

        def heard(outputs: Any, targets: Any) -> Tensor:
            value = loss(outputs, targets)
            self._losses = value.detach()
            return value

        return heard

    def step(self) -> None:
        """A step begins: stand here, if none is left."""
        if self._steps_left == 0:
            go = self._word()
            for module, p in self._dropout:
                module.p = p if go.dropout else 0.0
            self._steps_left = go.steps
            self._cpu, self._began, self._steps = _cpu_seconds(), _now(), []
        self._steps.append((time.perf_counter(), time.thread_time()))
        self._steps_left -= 1

    def _word(self) -> Go:
        try:
            if self._socket is None:
                self._socket = socket.socket(socket.AF_UNIX)
                self._socket.connect(self._path)
                self._socket.settimeout(TICK_SECONDS)
                self._say(Hello(self._rank, _versions(), torch.get_num_threads()))
            else:
                self._say(self._report())
            said = b""
            while not said.endswith(b"\n"):
                try:
                    said += (got := self._socket.recv(4096))
                except TimeoutError:
                    self._tick()
                    continue
                if not got:
                    os._exit(0)  # the race is over; the others of this world end just now, too
            return msgspec.json.decode(said, type=Go)
        except OSError:
            os._exit(0)

    def _report(self) -> Report:
        ended = _now()
        steps = [*self._steps, (time.perf_counter(), time.thread_time())]
        took, used = zip(*[(b[0] - a[0], b[1] - a[1]) for a, b in pairwise(steps)], strict=True)
        user, system = (after - before for after, before in zip(_cpu_seconds(), self._cpu, strict=True))
        loss = float(self._losses.mean()) if self._losses is not None else 0.0
        on_gpu = torch.cuda.is_available() and torch.cuda.is_initialized()
        gpu = torch.cuda.max_memory_allocated() if on_gpu else 0
        return Report(self._rank, self._began, ended, user, system, loss, _peak_bytes(), gpu, _p10(took), _p10(used))

    def _say(self, what: msgspec.Struct) -> None:
        assert self._socket is not None
        self._socket.sendall(msgspec.json.encode(what) + b"\n")


def _p10(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 10]


def _now() -> float:
    """After all that a GPU still has to do."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.monotonic()


def _cpu_seconds() -> tuple[float, float]:
    """User and system time of this process and of those that load data for it."""
    times = os.times()
    user, system = times.user, times.system
    for child in psutil.Process().children(recursive=True):
        try:
            spent = child.cpu_times()
        except psutil.Error:  # it has just ended
            continue
        user, system = user + spent.user, system + spent.system
    return user, system


def _peak_bytes() -> int:
    """Not getrusage: that counts what the process was before it became this program, too."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return 1024 * int(line.split()[1])


def _versions() -> dict[str, str]:
    """Of the frameworks that this process has imported."""
    names = ("torch", "paceline", "accelerate", "lightning_fabric", "ignite")
    return {name: str(sys.modules[name].__version__) for name in names if name in sys.modules}
