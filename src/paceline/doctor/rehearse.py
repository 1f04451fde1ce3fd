"""Starts this host's ranks of the rehearsal (proofs.rehearsal, the only part with torch), and ends them."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO

import msgspec

from paceline.contract.birth import WorkerBirth
from paceline.doctor.messages import Rehearse, Rehearsed

WORKER = "paceline.proofs.rehearsal"
STDIN = 0
MAX_OUTPUT_BYTES = 1 << 16


def rehearse_here(request: Rehearse) -> Rehearsed:
    """What rank 0 measured, if it is one of this host's; returns when all of this host's ranks have ended.

    They are killed when the time is up, one of them fails, or the launcher is gone.
    """
    if request.cwd and not Path(request.cwd).is_dir():
        return Rehearsed(why=f"the working folder {request.cwd} does not exist here")
    ranks: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryFile() as errors:  # a pipe that nobody reads would fill
        try:
            for local_rank in range(request.workers):
                ranks.append(_start(request, local_rank, errors.fileno()))
            if why := _wait(ranks, request.seconds):
                return Rehearsed(why=f"{why}: {_last_line(errors)}".removesuffix(": "))
            assert ranks[0].stdout is not None
            return msgspec.json.decode(ranks[0].stdout.read(MAX_OUTPUT_BYTES), type=Rehearsed)
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
                assert rank.stdout is not None
                rank.stdout.close()


def _start(request: Rehearse, local_rank: int, errors: int) -> subprocess.Popen[bytes]:
    env = {
        **os.environ,
        "RANK": str(request.first_rank + local_rank),
        "WORLD_SIZE": str(request.world_size),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(request.workers),
        "MASTER_ADDR": request.address,
        "MASTER_PORT": str(request.port),
        "OMP_NUM_THREADS": str(request.threads),
        **WorkerBirth(agent_pid=os.getpid()).variable(),  # it dies with us
    }
    if request.interface:
        env |= {"GLOO_SOCKET_IFNAME": request.interface, "NCCL_SOCKET_IFNAME": request.interface}
    process = subprocess.Popen(
        (sys.executable, "-P", "-m", WORKER),
        env=env,
        cwd=request.cwd or None,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=errors,
    )
    assert process.stdin is not None
    process.stdin.write(msgspec.json.encode(request))
    process.stdin.close()
    return process


def _wait(ranks: Sequence[subprocess.Popen[bytes]], seconds: float) -> str:
    """Wait for all to end well; why not, otherwise. Nothing else can come on stdin meanwhile but its end."""
    deadline = time.monotonic() + seconds
    while True:
        codes = [rank.poll() for rank in ranks]
        for code in codes:
            if code:
                return f"a rank was killed by signal {-code}" if code < 0 else f"a rank ended with exit code {code}"
        if None not in codes:
            return ""
        if time.monotonic() > deadline:
            return f"the rehearsal has not ended within {seconds:.0f} s"
        if select.select([STDIN], [], [], 0.05)[0]:
            return "the launcher is gone"


def _last_line(errors: IO[bytes]) -> str:
    errors.seek(max(0, errors.seek(0, os.SEEK_END) - MAX_OUTPUT_BYTES))
    lines = errors.read().decode(errors="replace").strip().splitlines()
    return lines[-1].strip()[:300] if lines else ""
