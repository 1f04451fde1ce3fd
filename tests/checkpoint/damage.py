"""Damage by disks, copies and people: one random damage to a checkpoint, or to the writing of one."""

import os
import random
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

from tests.checkpoint.checkpoint_harness import SIZE, leftovers, newest, shard_bytes, shard_name

from paceline.checkpoint.manager import Checkpoints
from paceline.runs.writing import write_new_file


def damage(checkpoint: Path, rng: random.Random) -> tuple[str, str]:
    """Damage one file of `checkpoint`. Returns the file's name and the kind of damage."""
    path = rng.choice(sorted(checkpoint.iterdir()))
    before = path.read_bytes()
    while True:
        kind, after = _damaged(before, rng)
        if after != before:
            break
    if after is None:
        path.unlink()
    else:
        path.write_bytes(after)
    return path.name, kind


def _damaged(data: bytes, rng: random.Random) -> tuple[str, bytes | None]:
    start = rng.randrange(len(data))
    stop = min(len(data), start + rng.choice((1, 16, 512)))
    kinds = {
        "truncated": data[:start],
        "emptied": b"",
        "bit flipped": data[:start] + bytes([data[start] ^ 1 << rng.randrange(8)]) + data[start + 1 :],
        "zeroed": data[:start] + bytes(stop - start) + data[stop:],
        "overwritten": data[:start] + rng.randbytes(stop - start) + data[stop:],
        "cut out": data[:start] + data[stop:],
        "inserted": data[:start] + rng.randbytes(stop - start) + data[start:],
        "blank added": data + b"\n",
        "removed": None,
    }
    kind = rng.choice(sorted(kinds))
    return f"{kind} at {start} to {stop} of {len(data)}", kinds[kind]


def trial(template: Path, folder: Path, seed: str) -> str | None:
    """Damage the newest checkpoint (step 2) of a copy of `template`. Returns the broken law, if any."""
    shutil.copytree(template, folder)
    try:
        name, kind = damage(folder / "step-00000002", random.Random(seed))
        told: list[str] = []
        found = Checkpoints(folder).newest_valid(told.append)
        if found is None or found[1].step != 1:
            return f"seed {seed}: {name} {kind}: step {found and found[1].step} is accepted"
        if len(told) != 1 or name not in told[0] or "step-00000002" not in told[0]:
            return f"seed {seed}: {name} {kind}: told is {told}"
        return None
    finally:
        shutil.rmtree(folder)


def kill_trial(template: Path, folder: Path, seed: str) -> str | None:
    """Kill the writer of step 3 after a random number of bytes. Returns the broken law, if any."""
    shutil.copytree(template, folder)
    try:
        left = random.Random(seed).randrange(2 * SIZE)
        pid = os.fork()
        if pid == 0:
            _write_until_killed(folder, left)
        _, status = os.waitpid(pid, 0)
        if os.WTERMSIG(status) != signal.SIGKILL:
            return f"seed {seed}: the writer ended with {status} before byte {left}"
        found, told = newest(folder)
        if found != 2 or told:
            return f"seed {seed}: killed at byte {left}: step {found} is resumed, told is {told}"
        Checkpoints(folder).claim_publishing(3, 0)
        return f"seed {seed}: {leftovers(folder)} stay" if leftovers(folder) else None
    finally:
        shutil.rmtree(folder)


def _write_until_killed(folder: Path, left: int) -> None:
    checkpoints = Checkpoints(folder)
    checkpoints.claim_publishing(2, 0)
    tmp = checkpoints.begin(3)
    for rank in range(2):
        write_new_file(tmp / shard_name(rank, 2), _until(shard_bytes(3, rank), left))
        left -= SIZE
    os._exit(1)


def _until(data: bytes, left: int) -> Iterator[bytes]:
    yield data[: max(0, left)]
    if left < len(data):
        os.kill(os.getpid(), signal.SIGKILL)
