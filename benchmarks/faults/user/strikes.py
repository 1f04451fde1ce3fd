"""What each fault does; for program.py and task.py, beside which this file is copied.

A plain user's file: torch and nothing of paceline. A comment `FAULT: name` marks the line that is to blame.
The variables FAULT, FAULT_RANKS, FAULT_STEP and FAULT_FOLDER say which fault, of whom, when, and in which folder the
moment is written down: struck-<rank>, in seconds of CLOCK_MONOTONIC.
"""

import contextlib
import ctypes
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

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
    def from_env(cls) -> Self:
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


# ---- what takes more than a line ---------------------------------------------------------------------------------


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


def oom_killed(state: State) -> None:
    """The kernel does not wait to be asked."""
    held: list[bytes] = []
    while True:
        held.append(b"x" * (64 << 20))


def too_many_files(state: State) -> None:
    """A leak of descriptors."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
    _ = [open(os.devnull) for _ in range(300)]  # noqa: SIM115, PTH123 # FAULT: too-many-files


def no_more_batches(state: State) -> None:
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


def spins(state: State) -> None:
    """An endless loop."""
    while True:  # FAULT: spins
        pass  # FAULT: spins


def flip_a_bit(model: nn.Module) -> None:
    """In the first weight: one bit of its exponent."""
    with torch.no_grad():
        weight = next(model.parameters()).view(-1)[:1]
        weight.copy_((weight.view(torch.int32) ^ (1 << 23)).view(torch.float32))


def two_sums(plan: Plan, now: bool, groups: Sequence[Any] = ()) -> None:
    """Two sums over ranks of one shape; where the fault strikes `now`, the second one is taken first."""
    first, second = groups or [dist.group.WORLD] * 2
    if now:
        plan.strike()
        dist.all_reduce(torch.ones(4), group=second)  # FAULT: swapped-groups, swapped-collectives
        dist.all_reduce(torch.zeros(4), group=first)  # FAULT: swapped-groups, swapped-collectives
    else:
        dist.all_reduce(torch.zeros(4), group=first)
        dist.all_reduce(torch.ones(4), group=second)


AT_STEP: dict[str, Callable[[State], object]] = {
    "killed": lambda state: os.kill(os.getpid(), signal.SIGKILL),  # as the kernel's OOM killer does
    "segfault": lambda state: ctypes.string_at(0),  # as a wrong pointer in C
    "raises": raises,
    "raises-and-cleans-up": raises_and_cleans_up,
    "out-of-memory": lambda state: torch.empty(1 << 50),  # FAULT: out-of-memory
    "oom-killed": oom_killed,
    "too-many-files": too_many_files,
    "exits-early": lambda state: sys.exit(0),
    "fewer-batches": no_more_batches,
    "fewer-batches-then-barrier": fewer_batches_then_barrier,
    "launcher-killed": launcher_killed,
    "frozen": lambda state: os.kill(os.getpid(), signal.SIGSTOP),  # a debugger, or a scheduler that suspends
    "short-stop": short_stop,
    "uninterruptible": uninterruptible,
    "sleeps": lambda state: time.sleep(FOR_EVER_SECONDS),  # FAULT: sleeps
    "two-ranks-sleep": lambda state: time.sleep(FOR_EVER_SECONDS),  # FAULT: two-ranks-sleep
    "reads-for-ever": lambda state: os.read(os.pipe()[0], 1),  # FAULT: reads-for-ever
    "spins": spins,
    # a regular expression that backtracks for years: no other thread of this process runs meanwhile
    "holds-the-gil": lambda state: re.match(r"(a+)+$", "a" * 64 + "b"),  # FAULT: holds-the-gil
    "recv-without-send": lambda state: dist.recv(torch.zeros(1), src=0),  # FAULT: recv-without-send
    "extra-collective": lambda state: dist.all_reduce(torch.ones(3)),  # FAULT: extra-collective
    "unused-parameters": lambda state: vars(state.model.module).update(skips=True),  # a branch that depends on data
    "replica-flip": lambda state: flip_a_bit(state.model),
}
REDUCTIONS: dict[str, Callable[[Tensor], object]] = {  # in the place of the reduction of the totals, 5 numbers
    "other-collective": lambda totals: dist.broadcast(totals, src=1),  # FAULT: other-collective
    "other-shape": lambda totals: dist.all_reduce(torch.zeros(7)),  # FAULT: other-shape
    "other-shape-of-two": lambda totals: dist.all_reduce(torch.zeros(7)),  # FAULT: other-shape-of-two
    "other-dtype": lambda totals: dist.all_reduce(totals.double()),  # FAULT: other-dtype
}
