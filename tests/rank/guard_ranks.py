"""Ranks as an agent starts them, each with a box, running a script of a test; the test plays the agent.

They are forked from a process with torch, as the product's workers are, or `started`: each imports torch for itself.
"""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from tests import warm
from tests.run_script import free_port

from paceline.launch.agent.workers import read_failure_record
from paceline.protocol import status_page
from paceline.protocol.control import WorkerSpec
from paceline.protocol.evidence import Failure, Op, WorkerAnswer
from paceline.rank import bootstrap
from paceline.rank.preload import _wrap_torch_collectives

OUTERMOST = re.compile(r"<frozen runpy>|warm\.py\", line [0-9]+ in <module>")
HEAD = """
import os, sys, time
from pathlib import Path
from paceline.protocol.control import WorkerSpec
spec = WorkerSpec.from_environment()
rank, folder = int(os.environ["RANK"]), Path(spec.attempt_dir)
def ready(): (folder / f"ready-{rank}").touch()
"""
TORCH = """
import torch, torch.distributed as dist
torch.set_num_threads(1)
dist.init_process_group("gloo")
"""


@dataclass(frozen=True)
class Rank:
    """One worker, and what its agent holds of it."""

    process: subprocess.Popen[bytes]
    page: int
    record: int
    folder: Path
    number: int

    def wait_ready(self) -> None:
        """Until the script has called ready()."""
        wait(lambda: (self.folder / f"ready-{self.number}").exists(), f"{self.output()}: not ready")

    def output(self) -> str:
        return (self.folder / f"output-{self.number}").read_text(errors="replace")

    def ask(self, question: int = 1, *, seconds: float = 3.0) -> WorkerAnswer | None:
        """Its answer, if one comes within `seconds`."""
        status_page.set_counter(self.page, "asked", question)
        deadline = time.monotonic() + seconds
        while status_page.read_counters(self.page).answered < question:
            if time.monotonic() > deadline:
                return None
            time.sleep(0.01)
        return msgspec.json.decode(status_page.read_answer(self.page), type=WorkerAnswer)

    def native(self) -> str:
        """Its stacks as faulthandler writes them."""
        assert status_page.handles_signal(self.process.pid)
        os.ftruncate(self.page, status_page.PAGE_BYTES)
        os.kill(self.process.pid, status_page.STACK_SIGNAL)
        wait(lambda: OUTERMOST.search(status_page.read_faulthandler_text(self.page)), "no stacks")
        return status_page.read_faulthandler_text(self.page)

    def release_from_wait(self) -> None:
        """As the agent does, once it waits in a collective."""
        wait(lambda: status_page.read_counters(self.page).waiting, "not waiting")
        status_page.release_from_collective(self.page, b"{}")

    def failure(self) -> Failure | None:
        """What it has written down about its end."""
        return read_failure_record(self.record)

    def line(self, mark: str) -> int:
        """The number of the script's line that holds `mark`."""
        lines = (self.folder / "script.py").read_text().splitlines()
        return next(number for number, line in enumerate(lines, 1) if mark in line)


def wait(until: Callable[[], object], words: str, seconds: float = 90.0) -> None:
    """Until it is so, or fail."""
    deadline = time.monotonic() + seconds
    while not until():
        assert time.monotonic() < deadline, words
        time.sleep(0.02)


@contextmanager
def ranks(
    script: str, world_size: int, folder: Path, *, guarded: bool = True, started: bool = False, **env: str
) -> Generator[list[Rank]]:
    """Run `script` (HEAD comes before it) as ranks; they are killed at the end."""
    (folder / "script.py").write_text(HEAD + script)
    running, port = list[Rank](), free_port()
    try:
        for rank in range(world_size):
            own = {**os.environ, **rank_environment(rank, world_size, port), **env}
            running.append(_start(folder, rank, own, guarded=guarded, started=started))
        yield running
    finally:
        for one in running:
            one.process.send_signal(signal.SIGCONT)
            one.process.kill()
            one.process.wait()
            os.close(one.page)
            os.close(one.record)


def rank_environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    """Torchrun's variables for a rank of one node."""
    numbers = {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": world_size}
    numbers |= {"MASTER_PORT": port, "OMP_NUM_THREADS": 1, "TORCH_FR_BUFFER_SIZE": 256}
    return {name: str(number) for name, number in numbers.items()} | {
        "MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo",
    }  # fmt: skip


def _start(folder: Path, rank: int, env: dict[str, str], *, guarded: bool, started: bool) -> Rank:
    memory, record = status_page.make_status_page(rank), os.memfd_create("record")
    spec = WorkerSpec(os.getpid(), str(folder), record=record, page=memory, guarded=guarded)
    with (folder / f"output-{rank}").open("wb") as output:
        streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": subprocess.STDOUT}
        more = {"env": env | spec.to_environment(), "pass_fds": [memory, record], **streams}
        script = str(folder / "script.py")
        if started:
            process = subprocess.Popen([sys.executable, "-P", "-m", bootstrap.__name__, script], **more)
        else:
            process = warm.call(f"{__name__}:worker", script, rank=rank, **more)
    return Rank(process, memory, record, folder, rank)


def worker(script: str) -> None:
    """What a forked rank does: as a preloader's fork, then as its command."""
    _wrap_torch_collectives()
    bootstrap.main([script])


def calls(ops: tuple[Op, ...] | list[Op]) -> list[str]:
    """Collectives and messages in short: `3 all_reduce bucket 0 [5]`."""
    return [" ".join(f"{op.seq} {op.kind} {op.name} {op.shape}".split()) for op in ops]
