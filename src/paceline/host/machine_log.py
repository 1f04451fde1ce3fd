"""Writes down once a second what this machine does, in a thread of its own: machine-<node>.jsonl in a run's folder.

It is never the cause of anything: whatever goes wrong in it ends it, with a line, and the run goes on.
"""

import os
import signal
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import msgspec

from paceline.host.cgroup import free_memory, memory_limit, quota_used_seconds, usable_cores
from paceline.host.gpu_use import GpuReader
from paceline.host.procfs import PROC, read_process
from paceline.protocol.control import STOP_SIGNALS
from paceline.runs.console import say
from paceline.runs.machine import MachineUse, RankUse, file_name
from paceline.runs.writers import BoundedWriter

IDLE_FIELDS = (3, 4)  # of a line of /proc/stat: idle, iowait
BUSY_FIELDS = 7  # user nice system idle iowait irq softirq; what follows is others' (steal), or counted already (guest)
LOOPBACK = "lo"
EVERY_SECONDS = 1.0
END_SECONDS = 0.5  # for a sample that is just being taken


class _Counted(NamedTuple):
    """What only grows, at one moment."""

    seconds: float  # monotonic
    busy_seconds: float  # of all cores that are ours
    received_bytes: int
    sent_bytes: int


class Sampler:
    """Takes a sample of this machine whenever it is asked; rates are those since the last time."""

    def __init__(self) -> None:
        self.gpus = GpuReader()
        self._host, self._cores = os.uname().nodename, usable_cores()
        self._limited = quota_used_seconds() is not None
        self._own = {f"cpu{core}" for core in os.sched_getaffinity(0)} if hasattr(os, "sched_getaffinity") else set()
        self._before = self._count()
        self._cpu_before: dict[int, tuple[float, float]] = {}  # pid -> its seconds so far, and when

    def sample(self, pids: Mapping[int, int]) -> MachineUse:
        """The machine now, and the ranks among its processes: rank -> pid."""
        before, now = self._before, self._count()
        self._before, seconds = now, max(now.seconds - before.seconds, 1e-3)
        uses = {rank: use for rank, pid in pids.items() if (use := self.process(pid)) is not None}
        self._cpu_before = {pid: self._cpu_before[pid] for pid in pids.values() if pid in self._cpu_before}
        total = memory_limit()
        return MachineUse(
            unix_time=round(time.time(), 3),
            host=self._host,
            cores=self._cores,
            cores_busy=round(min(self._cores, max(0.0, now.busy_seconds - before.busy_seconds) / seconds), 3),
            memory_bytes=max(0, total - (free_memory() or 0)),
            memory_total_bytes=total,
            sent_bytes=round(max(0, now.sent_bytes - before.sent_bytes) / seconds),
            received_bytes=round(max(0, now.received_bytes - before.received_bytes) / seconds),
            ranks=uses,
            gpus=self.gpus.latest().gpus,
        )

    def process(self, pid: int) -> RankUse | None:
        """One process, its rate since it was last asked for; None if it is gone."""
        found = read_process(pid)
        if found is None or not found.runs:
            return None
        now = time.monotonic()
        used, when = self._cpu_before.get(pid, (found.cpu_seconds, 0.0))
        self._cpu_before[pid] = found.cpu_seconds, now
        cores = max(0.0, found.cpu_seconds - used) / max(now - when, 1e-3)
        return RankUse(round(cores, 3), resident_bytes(pid))

    def _count(self) -> _Counted:
        received, sent = _network()
        quota = quota_used_seconds() if self._limited else None
        return _Counted(time.monotonic(), _busy_seconds(self._own) if quota is None else quota, received, sent)


def resident_bytes(pid: int) -> int:
    """The memory that a process has in use, shared pages included; 0 if it is gone."""
    with suppress(OSError, ValueError, IndexError):
        return int((PROC / str(pid) / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


def _busy_seconds(own: set[str]) -> float:
    """Processor seconds for which our cores have worked so far, for whomever."""
    ticks = 0
    with suppress(OSError, ValueError):
        for line in (PROC / "stat").read_text().splitlines():
            name, *fields = line.split()
            if name in own:
                ticks += sum(int(field) for i, field in enumerate(fields[:BUSY_FIELDS]) if i not in IDLE_FIELDS)
    return ticks / os.sysconf("SC_CLK_TCK")


def _network() -> tuple[int, int]:
    """Bytes received and sent so far, over all interfaces but the loopback."""
    received = sent = 0
    with suppress(OSError, ValueError, IndexError):
        for line in (PROC / "net" / "dev").read_text().splitlines()[2:]:
            name, _, numbers = line.partition(":")
            if name.strip() != LOOPBACK:
                fields = numbers.split()
                received, sent = received + int(fields[0]), sent + int(fields[8])
    return received, sent


class MachineLog:
    """The log of one node, from now on and as long as it is open."""

    def __init__(self, run_dir: Path, node: int, pids: Mapping[int, int]) -> None:
        """`pids` are those of the ranks here: rank -> pid."""
        self._writer = BoundedWriter(run_dir / file_name(node))
        self._pids, self._over = dict(pids), threading.Event()
        self._thread = threading.Thread(target=self._run, name="paceline-machine", daemon=True)
        self._thread.start()

    def write(self, record: msgspec.Struct) -> None:
        """Add a record of the caller's own."""
        self._writer.write(record)

    def close(self) -> None:
        """Write no more."""
        self._over.set()
        self._thread.join(END_SECONDS)
        self._writer.close()

    def _run(self) -> None:
        # signals are for the main thread: it blocks them when its exit code is decided
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        try:
            sampler = Sampler()
            while not self._over.wait(EVERY_SECONDS) and not self._writer.failed:
                self._writer.write(sampler.sample(self._pids))
        except Exception as error:  # a kernel whose /proc is another: nothing is known then, and nothing else happens
            say(f"warning: what this machine does is not recorded: {type(error).__name__}: {error}")
