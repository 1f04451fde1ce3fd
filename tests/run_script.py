"""Run a Python command as W ranks, as torchrun would, but without its agent: W forks of a process with all imports.

    run_script(2, "loop.py", cwd=folder)                                  # paceline launch --nproc 2 -- loop.py
    run_script(2, "-m", "paceline", "train", "mine.py:task", cwd=folder)  # paceline train mine.py:task --nproc 2

For what the ranks compute, save and refuse. What a launcher or an agent adds to it (the exit code of a run, who is
named and freed, restarts) is tested with these.
"""

import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from tests import warm

from paceline.errors import ExitCode
from paceline.protocol.control import BOOTSTRAP

POLL_SECONDS = 0.02
SAVED = int(ExitCode.SAVED)  # is no failure


def free_port() -> int:
    """A port of the loopback that nobody listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def run_script(
    world_size: int, *arguments: object, cwd: Path, timeout: float = 165.0, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """What `torchrun --nproc-per-node WORLD_SIZE ARGUMENTS` comes to: all ranks' output, by rank.

    The exit code is that of a rank that was killed, as a shell sees it (137), else the highest: victims end with 1.

    Raises:
        subprocess.TimeoutExpired: after that many seconds; what still runs is then killed.
    """
    port = free_port()
    world = {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size), "GLOO_SOCKET_IFNAME": "lo"}
    world |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    # a script as our agent's workers run it: warm.py alone would leave out what Python does at the end of one
    command = arguments if arguments[0] == "-m" else ("-P", "-m", BOOTSTRAP, *arguments)
    ranks: list[warm.Popen] = []
    with tempfile.TemporaryDirectory() as folder:  # files, not pipes: nobody would read them meanwhile
        try:
            for rank in range(world_size):
                own = {**os.environ, **world, **(env or {}), "RANK": str(rank), "LOCAL_RANK": str(rank)}
                with Path(folder, f"out-{rank}").open("wb") as out, Path(folder, f"err-{rank}").open("wb") as err:
                    ranks.append(warm.Popen(command, rank=rank, cwd=cwd, env=own, stdout=out, stderr=err))
            code = _ended(ranks, timeout)
        finally:
            for process in ranks:
                if process.poll() is None:
                    process.kill()
                process.wait()
        out, err = (
            "".join(Path(folder, f"{stream}-{rank}").read_text() for rank in range(world_size))
            for stream in ("out", "err")
        )
    return subprocess.CompletedProcess([*map(str, arguments)], code, out, err)


def _ended(ranks: list[warm.Popen], seconds: float) -> int:
    deadline = time.monotonic() + seconds
    while running := [process for process in ranks if process.poll() is None]:
        if time.monotonic() > deadline:
            raise subprocess.TimeoutExpired(running[0].args, seconds)
        time.sleep(POLL_SECONDS)
    worst = max((process.returncode for process in ranks), key=lambda code: (code < 0, code not in (0, SAVED), code))
    return worst if worst >= 0 else 128 - worst
