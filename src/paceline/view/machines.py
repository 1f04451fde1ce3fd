"""What a machine does now, and who does it: for `paceline monitor`, which prints it, also over ssh."""

import os
import pwd
import time
from contextlib import suppress
from pathlib import Path

import msgspec

from paceline.contract.variables import RUN_ID
from paceline.host.procfs import PROC, processes
from paceline.host.sampling import Sampler
from paceline.observe.machine import MachineUse

TOP = 8
GPU_SECONDS = 3.0  # for the driver's first answer


class ProcessUse(msgspec.Struct, frozen=True, omit_defaults=True):
    """One of the processes that use the most."""

    pid: int
    user: str
    words: str  # the program, and what it runs; further arguments may hold passwords
    cores: float
    memory_bytes: int
    gpu_bytes: int = 0
    run: str = ""  # the paceline run that it is a rank of: its id, and its rank


class MachineNow(msgspec.Struct, frozen=True):
    """A machine, and what runs there; or why nothing is known of it."""

    name: str
    use: MachineUse | None = None
    processes: tuple[ProcessUse, ...] = ()
    failure: str = ""


class Monitor:
    """Looks at this machine, again and again; rates are those since the last look."""

    def __init__(self) -> None:
        self._sampler = Sampler()
        self._sampler.gpus.latest(GPU_SECONDS)
        self._before: dict[int, tuple[int, float]] = {}  # pid -> its start, and its seconds so far
        self._seconds = time.monotonic()
        self._look()

    def look(self) -> MachineNow:
        """The machine now, with the processes that use most of it."""
        use = self._sampler.sample({})
        return MachineNow(use.host, use, self._look())

    def _look(self) -> tuple[ProcessUse, ...]:
        now, gpu = time.monotonic(), self._sampler.gpus.latest().memory_of
        seconds, self._seconds = max(now - self._seconds, 1e-3), now
        before, self._before = self._before, {}
        rates: list[tuple[float, int]] = []
        for one in processes():
            self._before[one.pid] = one.start, one.cpu_seconds
            start, used = before.get(one.pid, (one.start, one.cpu_seconds))
            rates.append(((one.cpu_seconds - used) / seconds if start == one.start else 0.0, one.pid))
        top = sorted(rates, key=lambda rate: (-gpu.get(rate[1], 0), -rate[0]))[:TOP]
        return tuple(_process(pid, cores, gpu.get(pid, 0)) for cores, pid in top if cores >= 0.01 or pid in gpu)


def _process(pid: int, cores: float, gpu_bytes: int) -> ProcessUse:
    folder = PROC / str(pid)
    words, user, memory, run = "", "?", 0, ""
    with suppress(OSError, ValueError, IndexError):
        words = _program(_words(folder / "cmdline"))
        words = words or (folder / "comm").read_text(errors="replace").strip()
        memory = int((folder / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        uid = folder.stat().st_uid
        user = str(uid)
        with suppress(KeyError):
            user = pwd.getpwuid(uid).pw_name
    with suppress(OSError):  # another user's environment is not for us
        env = {word.partition("=")[0]: word.partition("=")[2] for word in _words(folder / "environ")}
        if RUN_ID in env and "RANK" in env:
            run = f"{env[RUN_ID]} rank {env['RANK']}"[:100]
    return ProcessUse(pid, user, words, round(max(0.0, cores), 2), memory, gpu_bytes, run)


def _program(words: list[str]) -> str:
    """The program, and its script or module: the first argument that is no option."""
    options = words[1:4]
    what = "-c" if "-c" in options else next((word for word in options if not word.startswith("-")), "")
    return f"{Path(words[0]).name} {what}".strip()[:200]


def _words(path: Path) -> list[str]:
    return path.read_bytes().decode(errors="replace").rstrip("\0").split("\0")
