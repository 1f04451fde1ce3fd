"""What disks, copies and people do to files: one random damage to a checkpoint."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

from paceline.checkpoint.store import Checkpoints


def damage(checkpoint: Path, rng: random.Random) -> tuple[str, str]:
    """Damage one file of `checkpoint`; the file's name, and what was done."""
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
    """Damage the newest checkpoint (step 2) of a copy of `template`; the law that was broken, if one was."""
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
