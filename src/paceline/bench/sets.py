"""How is a set of processes started for a measurement, and what did it leave? One order, one agent, one folder."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from paceline.bench.spec import CHUNKS, RUNNING, Candidate, Chunk, Failed, Order
from paceline.contract.failure import Failure
from paceline.errors import ExitCode
from paceline.launch.job import Job
from paceline.launch.local import local
from paceline.launch.supervise import run

WORKER = "paceline.proofs.bench.worker"
ORDER, CONFIG = "order.json", "config.toml"
QUIET = {"KINETO_LOG_LEVEL": "99"}  # the profiler's own words, several lines for each start of it
LAST_CHARS = 300


@dataclass(frozen=True)
class Ended:
    """What a set of processes has measured before it ended, and with which exit code."""

    code: int
    chunks: Sequence[Chunk]
    running: Candidate | None
    """what it was at, if it failed"""
    reason: str


def measure(order: Order, settings: str, nproc: int) -> Ended:
    """Start `nproc` workers on `order`, wait for their end, read what they measured.

    Args:
        order: its folder must not exist.
        settings: the training's, as TOML.
        nproc: how many processes.
    """
    folder = Path(order.folder)
    attempt = folder / "attempt"
    attempt.mkdir(parents=True)
    (folder / CONFIG).write_text(settings)
    (folder / ORDER).write_bytes(msgspec.json.encode(order))
    job = Job(
        argv=(sys.executable, "-P", "-m", WORKER, str(folder)),
        nproc=nproc,
        attempt_dir=attempt,
        run_id=secrets.token_hex(8),
        threads=max(candidate.threads for candidate in order.candidates),
        env=QUIET,
    )
    code = run(local(job), attempt)
    chunks = read_chunks(folder)
    if code == 0:
        return Ended(code, chunks, None, "")
    running = folder / RUNNING
    at = msgspec.json.decode(running.read_bytes(), type=Candidate) if running.is_file() else None
    return Ended(code, chunks, at, _reason(attempt, code))


def read_chunks(folder: Path) -> list[Chunk]:
    """What rank 0 has written down."""
    path = folder / CHUNKS
    lines = path.read_bytes().splitlines() if path.is_file() else []
    return [msgspec.json.decode(line, type=Chunk) for line in lines if line.endswith(b"}")]


def failed(at: Candidate, ended: Ended, world_size: int) -> Failed:
    """What is told of the candidate that ended the set."""
    return Failed(at.name, at.strategy, world_size, at.batch_size, ended.reason)


def _reason(attempt: Path, code: int) -> str:
    """The first failure's last line, in one line."""
    found: list[Failure] = []
    for path in sorted(attempt.glob("error-*.json")):
        found.append(msgspec.json.decode(path.read_bytes(), type=Failure))
    own = [failure for failure in found if not failure.victim] or found
    if own:
        first = min(own, key=lambda failure: failure.monotonic_seconds)
        words = first.message.strip().splitlines() or [first.type]
        who = "" if first.exit_code == ExitCode.USAGE else f"rank {first.rank}: {first.type}: "
        return f"{who}{words[0]}"[:LAST_CHARS]
    return f"its processes ended with code {code}" + (" (killed; out of memory?)" if code == 137 else "")
