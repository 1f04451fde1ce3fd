"""What can a rank still save when another one stands still and never answers? The whole state, if it holds it.

The guard has broken up the collective in which this rank waited. Its parameters are those after the last complete
step, its buffers are put back. Nothing here may be a collective: the guilty rank would not come. So the lowest rank
that is not guilty writes all by itself, and where a part of the state is on other ranks only, nothing is published.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import torch

from paceline.checkpoint.shard import fill, layout
from paceline.errors import TrainingError
from paceline.store.manifest import ShardFile
from paceline.store.store import Checkpoints, Claim, write_file
from paceline.strategies.base import Replica
from paceline.train.resume import Content
from paceline.train.saving import manifest_of


class Word(msgspec.Struct, frozen=True):
    """What the agent says when it frees a rank, as far as it matters here."""

    guilty: tuple[int, ...] | None = None


def is_writer(word: str, rank: int, world_size: int) -> bool:
    """Whether the rank is the one that saves, as the agent's `word` to all freed ranks lets all of them know."""
    try:
        guilty = msgspec.json.decode(word, type=Word).guilty
    except msgspec.MsgspecError:
        return False
    if guilty is None:
        return False
    return rank == min(set(range(world_size)) - {*guilty}, default=None)


def save_alone(
    replica: Replica,
    step: int,
    content: Content,
    checkpoints: Checkpoints,
    claim: Claim,
    *,
    keep: int,
    say: Callable[[str], None],
) -> Path:
    """Write and publish the state after `step`; the folder. No collective.

    Raises:
        TrainingError: if a part of the state is on other ranks only, or a newer generation has taken over.
        OSError: if it cannot be written.
    """
    held, world = replica.state(), replica.world
    elsewhere = next((f" (as {one.name} is on this one)" for one in held if not one.replicated), None)
    if replica.sharded and elsewhere is None:  # of a small model a rank may hold no share at all
        elsewhere = ""
    if elsewhere is not None and world.size > 1:
        raise TrainingError(f"parts of the state are on the other ranks only{elsewhere}")
    part, places = layout(held)
    buffer = torch.empty(places.total_bytes, dtype=torch.uint8)
    meta = {"step": step, "rank": 0, "world_size": 1, "samples_seen": content.samples_seen}
    fill(buffer, part, places, meta)
    folder = checkpoints.begin_alone(step, claim, world.rank)
    name = "shard-0-of-1.safetensors"
    size, sha256 = write_file(folder / name, [buffer.numpy().data])
    files = (ShardFile(name, size, sha256, places.pieces),)
    return checkpoints.commit(folder, manifest_of(step, content, claim, replica.virtual_ranks, files), keep, say)
