"""Finds the state that a training goes on from: a snapshot in memory, or the newest checkpoint that is whole."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from paceline.checkpoint.shard import ShardFiles
from paceline.checkpoint.snapshot import inherited, newest
from paceline.errors import UsageError
from paceline.store.store import Checkpoints, Damaged
from paceline.sums import gather_words, told_once
from paceline.worker.world import World

Report = Callable[[str], None]


class Content(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The rest of a state, beside its tensors."""

    samples_seen: int
    metrics: dict[str, float]
    definition: dict[str, Any]
    evaluated: int = 0
    """the step that the metrics are of"""
    loop: dict[str, Any] = {}
    """where a loop of the user's own is, and the numbers of its optimizers and schedulers"""
    names: list[dict[str, list[str]]] = []
    """of each model: see `state_names`"""


@dataclass(frozen=True)
class Origin:
    """The state that a training goes on from."""

    step: int
    content: Content
    source: ShardFiles
    where: str
    """in words"""
    files: frozenset[int] = field(default_factory=frozenset[int])
    """the memory files that it lies in"""


def from_memory(world: World) -> Origin | None:
    """The newest snapshot that earlier workers have left on this node, if all ranks see the same (a collective)."""
    found = newest(inherited())
    steps = gather_words(None if found is None else found.step, world)
    if found is None or any(step != steps[0] for step in steps):
        return None
    content = msgspec.convert(found.content, Content)
    return Origin(found.step, content, found.source, f"the snapshot of step {found.step}", found.files)


def from_disk(checkpoints: Checkpoints, world: World, report: Report, *, after: Origin | None = None) -> Origin | None:
    """The newest checkpoint of which every byte is right (a collective); the ranks share the hashing.

    Only one after the state at hand, `after`, is of interest. `report` is called on rank 0 with each newer one that is
    not whole, and why.

    Raises:
        UsageError: on rank 0, if there are checkpoints, but none is whole; ToldElsewhere on the others.
    """
    there = [str(path) for step, path in checkpoints.entries() if after is None or step > after.step]
    paths: list[str] = gather_words(there, world)[0]
    complaints: list[str] = []
    for path in map(Path, paths):
        complaint = next((words for words in gather_words(_checked(checkpoints, path, world), world) if words), None)
        if complaint is None:
            manifest = checkpoints.check(path, files=())
            evaluated = int(manifest.scalars.get("evaluated", 0))
            loop: dict[str, Any] = manifest.scalars.get("loop", {})
            content = Content(manifest.samples_seen, manifest.metrics, manifest.definition, evaluated, loop)
            source = ShardFiles([(path / file.name, file.pieces) for file in manifest.files])
            return Origin(manifest.step, content, source, str(path))
        complaints.append(f"{path.name} cannot be used: {complaint}")
        if world.rank == 0:
            report(complaints[-1])
    if paths and after is None:
        error = UsageError(
            f"none of the {len(paths)} checkpoints in {checkpoints.root} is whole: `paceline checkpoint verify` says "
            "what is wrong with each. --fresh begins again at step 0 and moves them aside.\n"
            + "\n".join(complaints[:3])
        )
        raise told_once(error, world)
    return None


def _checked(checkpoints: Checkpoints, path: Path, world: World) -> str | None:
    """What is wrong with this rank's share of the files."""
    try:
        manifest = checkpoints.check(path, files=())
        mine = [file.name for file in manifest.files][world.rank :: world.size]
        checkpoints.check(path, files=mine)
    except Damaged as error:
        return str(error)
    return None
