"""Small checkpoints whose content follows from the step, so that a mixture of two is detected."""

import hashlib
import json
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from paceline.checkpoint.manager import Checkpoints
from paceline.runs.checkpoint_format import FORMAT_VERSION, Manifest, Piece, ShardFile
from paceline.runs.writing import write_new_file

SIZE = 3000  # elements of one shard, a byte each
HEADER = 128  # bytes before them, which say so


def shard_name(rank: int, world: int) -> str:
    return f"shard-{rank}-of-{world}.safetensors"


def header(size: int, **changes: Any) -> bytes:
    entry = {"dtype": "U8", "shape": [size], "data_offsets": [0, size], **changes}
    return (HEADER - 8).to_bytes(8, "little") + json.dumps({"w": entry}).encode().ljust(HEADER - 8)


def shard_bytes(step: int, rank: int, size: int = SIZE) -> bytes:
    return header(size) + random.Random(f"{step} {rank}").randbytes(size)


def chunks(data: bytes) -> Iterator[bytes]:
    yield data[:10]
    yield data[10 : len(data) // 2]
    yield data[len(data) // 2 :]


def manifest_of(
    step: int, files: list[tuple[str, int, str]], attempt: int = 1, generation: int = 0, **more: Any
) -> Manifest:
    whole = sum(size - HEADER for _, size, _ in files)
    shards: list[ShardFile] = []
    start = 0
    for name, size, sha256 in files:
        stop = start + size - HEADER
        piece = Piece(key="w", name="model/w", dtype="U8", shape=(whole,), start=start, stop=stop)
        shards.append(ShardFile(name=name, bytes=size, sha256=sha256, pieces=(piece,)))
        start = stop
    settings: dict[str, Any] = {
        "format": FORMAT_VERSION, "step": step, "attempt": attempt, "generation": generation, "world_size": len(files),
        "virtual_ranks": len(files), "definition": {"task": "toy", "lr": 0.1}, "metrics": {"loss": 1.0 / (1 + step)},
        "samples_seen": 64 * step, "scalars": {"step": step, "betas": [0.9, 0.999]}, "files": tuple(shards),
    }  # fmt: skip
    return Manifest(**{**settings, **more})


def write_shards(tmp: Path, step: int, world: int, size: int = SIZE) -> list[tuple[str, int, str]]:
    names = [shard_name(rank, world) for rank in range(world)]
    return [
        (name, *write_new_file(tmp / name, chunks(shard_bytes(step, rank, size)))) for rank, name in enumerate(names)
    ]


def save(checkpoints: Checkpoints, step: int, *, world: int = 2, keep: int = 2, size: int = SIZE) -> Path:
    tmp = checkpoints.begin(step)
    return checkpoints.commit(tmp, manifest_of(step, write_shards(tmp, step, world, size)), keep)


def saved(root: Path, *steps: int, world: int = 2) -> Checkpoints:
    checkpoints = Checkpoints(root)
    checkpoints.claim_publishing(1, 0)
    for step in steps:
        save(checkpoints, step, world=world, keep=len(steps) + 2)
    return checkpoints


def newest(root: Path) -> tuple[int | None, list[str]]:
    """The step that a new process would resume from, with all files checked, and its reports."""
    told: list[str] = []
    found = Checkpoints(root).newest_valid(told.append)
    if found is None:
        return None, told
    path, manifest = found
    for rank, file in enumerate(manifest.files):
        data = (path / file.name).read_bytes()
        assert data == shard_bytes(manifest.step, rank, len(data) - HEADER), f"{path.name}/{file.name}: another step"
    return manifest.step, told


def steps_in(root: Path) -> list[int]:
    return [entry.step for entry in Checkpoints(root).entries()]


def leftovers(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir() if path.name.startswith((".tmp", ".trash")))


def sealed(inner: object, sha256: str | None = None) -> bytes:
    """A manifest.json with any content and a matching hash, as an attacker could write it."""
    raw = msgspec.json.encode(inner)
    return b'{"manifest":%b,"sha256":%b}' % (raw, json.dumps(sha256 or hashlib.sha256(raw).hexdigest()).encode())


def start_writer(root: Path, attempt: int, generation: int, steps: int) -> subprocess.Popen[str]:
    """A process that saves `steps` checkpoints, and prints a line for each."""
    script = Path(__file__).with_name("writer.py")
    command = [sys.executable, str(script), *map(str, (root, attempt, generation, steps))]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
