"""The side of the starter: brings processes to the gate, lets them go so many steps, hears how long they took."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import IO, Any, TypeVar

import msgspec
import psutil

from race.gate import Go, Hello, Report
from race.quiet import foreign_share, look

HERE = Path(__file__).resolve().parent
START_SECONDS = 300.0
LAP_SECONDS = 900.0  # far more than a lap on a busy machine needs, but not for ever
END_SECONDS = 20.0
Said = TypeVar("Said", Hello, Report)


@dataclass(frozen=True)
class Launch:
    """A command that starts one or more ranks."""

    argv: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    host: str = ""
    """where, if not here"""


@dataclass(frozen=True)
class Contender:
    """Who takes part. `samples` are those of one step, over all its ranks."""

    name: str
    launches: Sequence[Launch]
    ranks: int
    samples: int
    exact: bool = True
    """whether its loss must be everybody's to the last digits"""
    compared: bool = True
    """whether it trains what all train together, and its loss can be seen"""


@dataclass(frozen=True)
class Lap:
    """So many steps of one contender. Times are of one step; CPU time and memory of the rank that had most."""

    ms: float
    user_ms: float
    system_ms: float
    peak_mb: float
    peak_gpu_mb: float
    loss: float
    foreign: float
    """share of the processors that others had meanwhile"""
    p10_ms: float = 0.0
    """the 10th percentile of its steps, and of their processor time in the main thread: of the fastest rank"""
    p10_cpu_ms: float = 0.0


class LostError(Exception):
    """A contender's processes do not go on; its last lines."""


Popen = Callable[[Launch, Mapping[str, str], IO[bytes]], "subprocess.Popen[Any]"]


def popen_here(launch: Launch, env: Mapping[str, str], log: IO[bytes]) -> subprocess.Popen[Any]:
    """Start a command on this machine."""
    return subprocess.Popen(
        launch.argv, env={**os.environ, **env}, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
    )


class Lane:
    """A contender that runs: its processes, and a line to each rank. Files go into `folder`, which must be new."""

    def __init__(self, contender: Contender, folder: Path, popen: Popen = popen_here) -> None:
        self.contender = contender
        folder.mkdir()
        self._log, path = folder / "log", folder / "socket"
        self._door = socket.socket(socket.AF_UNIX)
        self._door.bind(str(path))
        self._door.listen(contender.ranks)
        self._ranks: list[socket.socket] = []
        self.versions: dict[str, str] = {}
        self.threads = 0  # of each rank
        self._processes: list[subprocess.Popen[Any]] = []
        found_at = os.pathsep.join(filter(None, [str(HERE.parent), os.environ.get("PYTHONPATH")]))
        shared = {"RACE_SOCKET": str(path), "RACE_FOLDER": str(folder), "PYTHONPATH": found_at}
        with self._log.open("wb") as log:
            for launch in contender.launches:
                argv = [word.format(**shared) for word in launch.argv]
                one = Launch(argv, launch.env, launch.host)
                self._processes.append(popen(one, {**shared, **launch.env}, log))

    def ready(self) -> None:
        """Return when all ranks stand at the gate.

        Raises:
            LostError: if they do not come.
        """
        deadline = time.monotonic() + START_SECONDS
        self._door.settimeout(1.0)
        while len(self._ranks) < self.contender.ranks:
            if any(process.poll() is not None for process in self._processes) or time.monotonic() > deadline:
                raise self._lost("did not come to the gate")
            with contextlib.suppress(TimeoutError):
                rank, _ = self._door.accept()
                rank.settimeout(LAP_SECONDS)
                self._ranks.append(rank)
                hello = self._heard(rank, Hello)
                self.versions |= hello.versions
                self.threads = hello.threads

    def lap(self, steps: int, *, dropout: bool = True) -> Lap:
        """Let all ranks take so many steps, and return when they stand again.

        Raises:
            LostError: if they do not.
        """
        before = look()
        for rank in self._ranks:
            rank.sendall(msgspec.json.encode(Go(steps, dropout)) + b"\n")
        reports = [self._heard(rank, Report) for rank in self._ranks]
        own = sum(report.user_seconds + report.system_seconds for report in reports)
        seconds = max(r.ended_seconds for r in reports) - min(r.began_seconds for r in reports)
        return Lap(
            ms=1000 * seconds / steps,
            user_ms=1000 * max(r.user_seconds for r in reports) / steps,
            system_ms=1000 * max(r.system_seconds for r in reports) / steps,
            peak_mb=max(r.peak_bytes for r in reports) / 1e6,
            peak_gpu_mb=max(r.peak_gpu_bytes for r in reports) / 1e6,
            loss=fmean(r.loss for r in reports),
            foreign=foreign_share(before, look(), own),
            p10_ms=1000 * min(r.p10_seconds for r in reports),
            p10_cpu_ms=1000 * min(r.p10_cpu_seconds for r in reports),
        )

    def close(self) -> None:
        """End all processes: ranks end by themselves when their line is cut."""
        for one in (self._door, *self._ranks):
            one.close()
        deadline = time.monotonic() + END_SECONDS
        for process in self._processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
                _, left = psutil.wait_procs(family, max(0.1, deadline - time.monotonic()))
                for one in left:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        one.kill()
            process.wait()

    def _heard(self, rank: socket.socket, kind: type[Said]) -> Said:
        said = b""
        while not said.endswith(b"\n"):
            try:
                said += (got := rank.recv(65536))
            except OSError as error:
                raise self._lost(str(error)) from error
            if not got:
                raise self._lost("has ended")
        return msgspec.json.decode(said, type=kind)

    def _lost(self, what: str) -> LostError:
        return LostError(f"{self.contender.name} {what}:\n{self._log.read_text(errors='replace')[-2000:]}")
