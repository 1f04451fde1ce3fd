"""One function for each fault; for program.py and task.py, beside which this file is copied.

A plain user's file: torch and nothing of paceline. A comment `FAULT: name` marks the line that is to blame.
The variables FAULT, FAULT_RANKS, FAULT_STEP and FAULT_FOLDER say which fault, of whom, when, and in which folder the
moment is written down: struck-<rank>, in seconds of CLOCK_MONOTONIC.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

FEATURES, CLASSES, BATCH = 32, 10, 16
FOR_EVER_SECONDS, LATE_SECONDS = 3600.0, 8.0
CLONE_VFORK = 0x4000


class NoMoreBatches(Exception):  # noqa: N818 - no error
    """The data have come to their end."""


@dataclass(frozen=True)
class Plan:
    """Which fault strikes whom, and when."""

    name: str
    ranks: tuple[int, ...]
    step: int
    folder: Path

    @classmethod
    def from_env(cls) -> Plan:
        """As the variables say; a fault without a name never strikes."""
        get = os.environ.get
        ranks = tuple(int(rank) for rank in get("FAULT_RANKS", "").split(",") if rank)
        return cls(get("FAULT", ""), ranks, int(get("FAULT_STEP", "0")), Path(get("FAULT_FOLDER", ".")))

    def hits(self, *names: str) -> bool:
        """Whether this rank is to have one of these faults at all."""
        return self.name in names and int(os.environ.get("RANK", "0")) in self.ranks

    def strike(self) -> None:
        """Write down that the fault strikes now, the first time."""
        path = self.folder / f"struck-{os.environ.get('RANK', '0')}"
        with contextlib.suppress(FileExistsError), path.open("x") as file:
            file.write(str(time.monotonic()))


@dataclass(frozen=True)
class State:
    """What the faults of program.py reach."""

    plan: Plan
    step: int
    rank: int
    model: nn.Module

    def now(self) -> bool:
        """Whether the fault strikes this rank in this step."""
        return self.plan.hits(self.plan.name) and self.step == self.plan.step


def sample(plan: Plan, index: int) -> tuple[Tensor, Tensor]:
    """A vector and its class, the same in every process, unless this rank's data differ."""
    seed = index + (1_000_000 if plan.hits("data-differs") else 0)
    values = torch.randn(FEATURES, generator=torch.Generator().manual_seed(seed))
    return values, torch.tensor(index % CLASSES)


# ---- a rank ends -------------------------------------------------------------------------------------------------


def killed(state: State) -> None:
    """As the kernel's OOM killer does."""
    os.kill(os.getpid(), signal.SIGKILL)


def segfault(state: State) -> None:
    """As a wrong pointer in C."""
    ctypes.string_at(0)


def raises(state: State) -> None:
    """Any error of the user's code."""
    raise ValueError("bad sample 4711")  # FAULT: raises


def raises_and_cleans_up(state: State) -> None:
    """The culprit is the last to end."""
    try:
        raise ValueError("bad sample 4711")  # FAULT: raises-and-cleans-up
    finally:
        dist.destroy_process_group()
        time.sleep(3)


def out_of_memory(state: State) -> None:
    """The allocator refuses."""
    torch.empty(1 << 50)  # FAULT: out-of-memory


def oom_killed(state: State) -> None:
    """The kernel does not wait to be asked."""
    held: list[bytes] = []
    while True:
        held.append(b"x" * (64 << 20))


def too_many_files(state: State) -> None:
    """A leak of descriptors."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
    _ = [open(os.devnull) for _ in range(300)]  # noqa: SIM115, PTH123 # FAULT: too-many-files


def exits_early(state: State) -> None:
    """Without a word."""
    sys.exit(0)


def fewer_batches(state: State) -> None:
    """Uneven data."""
    raise NoMoreBatches


def fewer_batches_then_barrier(state: State) -> None:
    """Uneven data, and a script that waits for the others at its end."""
    dist.barrier()  # FAULT: fewer-batches-then-barrier
    raise NoMoreBatches


def launcher_killed(state: State) -> None:
    """Whoever started this rank is gone without a chance to end it."""
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(FOR_EVER_SECONDS)


# ---- a rank stands still -----------------------------------------------------------------------------------------


def frozen(state: State) -> None:
    """A debugger, or a scheduler that suspends."""
    os.kill(os.getpid(), signal.SIGSTOP)


def short_stop(state: State) -> None:
    """Shorter than any window: no fault."""
    subprocess.Popen(["sh", "-c", f"sleep 3; kill -CONT {os.getpid()}"])
    os.kill(os.getpid(), signal.SIGSTOP)


def uninterruptible(state: State) -> None:
    """State D: the kernel waits until the child that was made with CLONE_VFORK ends, as it waits for a dead disk."""
    libc = ctypes.CDLL(None)
    stack = ctypes.create_string_buffer(1 << 16)
    top = ctypes.c_void_p(ctypes.addressof(stack) + (1 << 16) - 64)
    pause, how = ctypes.cast(libc.pause, ctypes.c_void_p), CLONE_VFORK | signal.SIGCHLD
    libc.clone(pause, top, how, None)  # FAULT: uninterruptible


def sleeps(state: State) -> None:
    """Waits for what does not come."""
    time.sleep(FOR_EVER_SECONDS)  # FAULT: sleeps, two-ranks-sleep


def reads_for_ever(state: State) -> None:
    """A server that does not answer."""
    os.read(os.pipe()[0], 1)  # FAULT: reads-for-ever


def spins(state: State) -> None:
    """An endless loop."""
    while True:  # FAULT: spins
        pass  # FAULT: spins


def holds_the_gil(state: State) -> None:
    """A regular expression that backtracks for years: no other thread of this process runs meanwhile."""
    re.match(r"(a+)+$", "a" * 64 + "b")  # FAULT: holds-the-gil


def recv_without_send(state: State) -> None:
    """A message that nobody sends."""
    dist.recv(torch.zeros(1), src=0)  # FAULT: recv-without-send


# ---- collectives that do not fit ---------------------------------------------------------------------------------


def extra_collective(state: State) -> None:
    """One more than the others."""
    dist.all_reduce(torch.ones(3))  # FAULT: extra-collective


def unused_parameters(state: State) -> None:
    """A branch that depends on the data."""
    vars(state.model.module)["skips"] = True


def other_collective(totals: Tensor) -> None:
    """Stands in for the reduction of the totals, as all of this kind."""
    dist.broadcast(totals, src=1)  # FAULT: other-collective


def other_shape(totals: Tensor) -> None:
    """7 numbers instead of 5."""
    dist.all_reduce(torch.zeros(7))  # FAULT: other-shape, other-shape-of-two


def other_dtype(totals: Tensor) -> None:
    """float64 instead of float32."""
    dist.all_reduce(totals.double())  # FAULT: other-dtype


# ---- nobody sees it ----------------------------------------------------------------------------------------------


def flip_a_bit(model: nn.Module) -> None:
    """In the first weight: one bit of its exponent."""
    with torch.no_grad():
        weight = next(model.parameters()).view(-1)[:1]
        weight.copy_((weight.view(torch.int32) ^ (1 << 23)).view(torch.float32))


def replica_flip(state: State) -> None:
    """A bit of the first weight."""
    flip_a_bit(state.model)


_AT_STEP: tuple[Callable[[State], None], ...] = (
    killed, segfault, raises, raises_and_cleans_up, out_of_memory, oom_killed, too_many_files, exits_early,
    fewer_batches, fewer_batches_then_barrier, launcher_killed, frozen, short_stop, uninterruptible, sleeps,
    reads_for_ever, spins, holds_the_gil, recv_without_send, extra_collective, unused_parameters, replica_flip,
)  # fmt: skip
AT_STEP = {strike.__name__.replace("_", "-"): strike for strike in _AT_STEP} | {"two-ranks-sleep": sleeps}
_REDUCTIONS: tuple[Callable[[Tensor], None], ...] = (other_collective, other_shape, other_dtype)
REDUCTIONS = {one.__name__.replace("_", "-"): one for one in _REDUCTIONS} | {"other-shape-of-two": other_shape}
