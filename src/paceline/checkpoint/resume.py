"""Where a run writes, and the state that it resumes from: a snapshot in memory, or the newest intact checkpoint."""

import os
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from paceline.checkpoint.format import Damaged, Manifest
from paceline.checkpoint.manager import Checkpoints, Report
from paceline.checkpoint.shards import ShardFiles
from paceline.checkpoint.snapshots import inherited, newest, snapshot_of
from paceline.collectives.control import gather_words, together, told_once
from paceline.errors import UsageError
from paceline.protocol.control import WorkerBirth, restarts
from paceline.rank.world import World
from paceline.runs import folder as run_folder


@dataclass(frozen=True)
class RunLocation:
    """Where a run writes, the number of this start, and the settings that define the run."""

    folder: Path
    attempt: int
    generation: int
    attempt_dir: Path | None
    """on rank 0"""
    definition: dict[str, Any] = field(default_factory=dict[str, Any])
    notices: list[str] = field(default_factory=list[str])
    """to be printed before the first step"""


class TrainerState(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A state without its tensors."""

    samples_seen: int
    metrics: dict[str, float]
    definition: dict[str, Any]
    evaluated: int = 0
    """the step of the metrics"""
    loop: dict[str, Any] = {}
    """the position of a custom loop, and the numbers of its optimizers and schedulers"""
    names: list[dict[str, list[str]]] = []
    """of each model: see `state_names`"""


@dataclass(frozen=True)
class ResumePoint:
    """The state that a training resumes from."""

    step: int
    content: TrainerState
    source: ShardFiles
    where: str
    """its name in messages"""
    files: frozenset[int] = frozenset()
    """the memory files that hold it"""


def newest_state(checkpoints: Checkpoints, world: World, report: Report, *, memory: bool) -> ResumePoint | None:
    """The newest state, in `memory` or on disk (a collective); `report` as in `newest_on_disk`.

    Hosts without a snapshot, or with an older one, receive the newest one if it is the newest state.

    Raises:
        UsageError: as `newest_on_disk`.
    """
    own = newest(inherited()) if memory else None
    ages = gather_words(None if own is None else [own.meta.generation, own.meta.step], world) if memory else []
    known = [age for age in ages if age is not None]
    # on one host all ranks see the same snapshots, or one of them has none of ours
    is_usable = bool(known) and (world.local_size < world.size or all(age == known[0] for age in ages))
    age: list[int] | None = max(known) if is_usable else None
    on_disk = newest_on_disk(checkpoints, world, report, after=-1 if age is None else age[1])
    if on_disk is not None or age is None:
        return on_disk
    found = own if ages[world.rank] == age else None
    if any(other != age for other in ages):
        found = snapshot_of(ages.index(age), found, world)
    assert found is not None
    step, content = found.meta.step, msgspec.convert(found.meta.content, TrainerState)
    return ResumePoint(step, content, found.source, f"the snapshot of step {step}", frozenset(found.files))


def newest_on_disk(checkpoints: Checkpoints, world: World, report: Report, *, after: int = -1) -> ResumePoint | None:
    """The newest intact checkpoint after step `after` (a collective); the ranks split the hashing.

    `report` is called on rank 0 for each newer one that is damaged, with its damage.

    Raises:
        UsageError: on rank 0, if all checkpoints are damaged and there is no older state (`after` is -1); ReportedByPeer
            on the others.
    """
    there = [str(path) for step, path in checkpoints.entries() if step > after]
    paths: list[str] = gather_words(there, world)[0]
    complaints: list[str] = []
    for path in map(Path, paths):
        manifest, damage = _checked(checkpoints, path, world)
        damages = list(filter(None, gather_words(damage, world)))
        if manifest is not None and not damages:
            evaluated = int(manifest.scalars.get("evaluated", 0))
            loop: dict[str, Any] = manifest.scalars.get("loop", {})
            content = TrainerState(manifest.samples_seen, manifest.metrics, manifest.definition, evaluated, loop)
            return ResumePoint(manifest.step, content, ShardFiles.of(path, manifest), str(path))
        complaints.append(f"{path.name} cannot be used: {damages[0]}")
        if world.rank == 0:
            report(complaints[-1])
    if paths and after < 0:
        first, folder = "\n".join(complaints[:3]), checkpoints.root
        error = UsageError(code="no-whole-checkpoint", count=len(paths), folder=folder, complaints=first)
        raise told_once(error, world)
    return None


def _checked(checkpoints: Checkpoints, path: Path, world: World) -> tuple[Manifest | None, str]:
    """The manifest, or the damage; this rank hashes its portion of the files."""
    try:
        files = checkpoints.check(path, files=()).files
        return checkpoints.check(path, files=[file.name for file in files][world.rank :: world.size]), ""
    except Damaged as error:
        return None, str(error)


@contextmanager
def run_location(
    world: World,
    asked: Path | None,
    name: str,
    *,
    prepared: Path | None = None,
    resume: bool,
    fresh: bool = False,
    trust: bool = False,
) -> Generator[RunLocation]:
    """The locked run folder, and the attempt and generation of this run; the same on all ranks.

    Args:
        world: this rank's place.
        asked: the folder; None: a new one under runs/.
        name: the prefix of a new folder's name.
        prepared: the folder, if our agent has made and locked it already.
        resume: whether it may contain a run. A restarted run may always.
        fresh: whether the checkpoints and weights of that run are moved aside.
        trust: whether other users may own it or could have written it.

    Raises:
        UsageError: on one rank, as `open_run_dir` and `lock_run_dir`; ReportedByPeer on the others.
    """
    generation, birth = restarts(), WorkerBirth.here()
    launched = Path(birth.attempt_dir).resolve() if birth is not None and birth.attempt_dir else None
    restarted = generation > 0 and asked is not None  # by torchrun, or our agent
    notices: list[str] = []
    mine: dict[str, Any] = {"folder": "", "attempt": 0}
    attempt_dir, lock = None, None
    try:
        with together(world):
            if world.rank == 0:
                folder = prepared or run_folder.open_run_dir(asked, name, resume=resume or restarted, trust=trust)
                if launched is not None and (prepared is not None or launched.parent == folder):
                    attempt_dir = launched  # our agent has locked the folder, and made the attempt
                else:
                    lock = run_folder.lock_run_dir(folder)
                    if fresh and not restarted:
                        run_folder.move_aside(folder)
                    if generation and not restarted:
                        notices.append(
                            "restarted by torchrun in a new folder, at step 0. To resume, name the run folder"
                        )
                    attempt_dir = run_folder.create_attempt_dir(folder, launched)[1]
                # resolved here: another host may reach the same folder by other links
                mine = {"folder": str(folder.resolve()), "attempt": run_folder.attempt_number(attempt_dir)}
        told: dict[str, Any] = gather_words(mine, world)[0]
        yield RunLocation(Path(told["folder"]).resolve(), told["attempt"], generation, attempt_dir, notices=notices)
    finally:
        if lock is not None:
            os.close(lock)


def find_resume_point(
    place: RunLocation, world: World, *, resume: bool, trust: bool, fresh: bool = False
) -> ResumePoint | None:
    """The state to resume from, if any (a collective); with `fresh` a finished run may start again.

    Raises:
        UsageError: on one rank: every checkpoint is damaged, or the run is finished.
    """
    if not resume and not place.generation:
        return None
    checkpoints = Checkpoints(place.folder / run_folder.CHECKPOINTS, trust=trust)
    origin = newest_state(checkpoints, world, place.notices.append, memory=place.generation > 0)
    if origin is None and not fresh:
        with together(world):
            run_folder.check_not_finished(place.folder)
        place.notices.append(f"found no checkpoint in {place.folder}: training starts at step 0")
    return origin
