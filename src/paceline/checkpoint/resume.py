"""Locks the folder of a run, and finds the state to resume from: a snapshot in memory, or the newest checkpoint."""

import math
import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from paceline.checkpoint.manager import Checkpoints, MessageCallback
from paceline.checkpoint.memory_snapshots import broadcast_snapshot, inherited_memory_files, newest_snapshot
from paceline.checkpoint.shards import ShardFileSource
from paceline.checkpoint.state import LockedRun, ResumePoint, TrainerState
from paceline.collectives.control import all_gather_object, error_on_one_rank, raise_on_all_ranks
from paceline.errors import UsageError
from paceline.protocol.control import WorkerSpec, has_separate_folder, request_transfer, restart_count
from paceline.rank.guard import HangGuard
from paceline.rank.world import World
from paceline.runs import folder as run_folder
from paceline.runs.checkpoint_format import DamagedCheckpoint, Manifest


def find_newest_state(
    checkpoints: Checkpoints, world: World, report: MessageCallback, *, memory: bool
) -> ResumePoint | None:
    """The newest state, on disk or (if `memory`) in memory (a collective).

    If a snapshot is the newest state, hosts without it receive it. `report`, errors: see `find_newest_checkpoint`.
    """
    local = newest_snapshot(inherited_memory_files()) if memory else None
    mine = None if local is None else [local.meta.generation, local.meta.step]
    ages = all_gather_object(mine, world) if memory else []
    known_ages = [age for age in ages if age is not None]
    # on a single host, all ranks must see the same snapshots: otherwise one of them has files of a different run
    is_usable = bool(known_ages) and (world.local_size < world.size or all(age == known_ages[0] for age in ages))
    age: list[int] | None = max(known_ages) if is_usable else None
    on_disk = find_newest_checkpoint(checkpoints, world, report, after=-1 if age is None else age[1])
    if on_disk is not None or age is None:
        return on_disk
    snapshot = local if ages[world.rank] == age else None
    if any(other != age for other in ages):
        snapshot = broadcast_snapshot(ages.index(age), snapshot, world)
    assert snapshot is not None
    step, content = snapshot.meta.step, msgspec.convert(snapshot.meta.content, TrainerState)
    files = frozenset(snapshot.memory_file_descriptors)
    return ResumePoint(step, content, snapshot.source, f"the snapshot of step {step}", files)


def find_newest_checkpoint(
    checkpoints: Checkpoints, world: World, report: MessageCallback, *, after: int = -1, before: float = math.inf
) -> ResumePoint | None:
    """The newest intact checkpoint between two steps (a collective). The ranks split the work of hashing.

    For each newer, damaged checkpoint, rank 0 calls `report` with the damage.
    """
    tick = HangGuard.of_process().page.tick
    candidates = [str(path) for step, path in checkpoints.entries() if after < step < before]
    paths: list[str] = all_gather_object(candidates, world)[0]
    complaints: list[str] = []
    for path in map(Path, paths):
        fetch_failure = request_transfer("fetch", path, tick) if world.local_rank == 0 else ""
        fetch_failure = "; ".join(filter(None, all_gather_object(fetch_failure, world)))
        manifest, damage = (None, fetch_failure) if fetch_failure else _check_portion(checkpoints, path, world)
        damages = list(filter(None, all_gather_object(damage, world)))
        if manifest is not None and not damages:
            evaluated = int(manifest.scalars.get("evaluated", 0))
            loop: dict[str, Any] = manifest.scalars.get("loop", {})
            content = TrainerState(manifest.samples_seen, manifest.metrics, manifest.definition, evaluated, loop)
            return ResumePoint(manifest.step, content, ShardFileSource.from_checkpoint(path, manifest), str(path))
        complaints.append(f"{path.name} cannot be used: {damages[0]}")
        if world.rank == 0:
            report(complaints[-1])
    if paths and after < 0:
        first, folder = "\n".join(complaints[:3]), checkpoints.root
        error = UsageError(code="no-whole-checkpoint", count=len(paths), folder=folder, complaints=first)
        raise error_on_one_rank(error, world)
    return None


def _check_portion(checkpoints: Checkpoints, path: Path, world: World) -> tuple[Manifest | None, str]:
    """The manifest, or the damage. This rank hashes its portion of the files."""
    try:
        files = checkpoints.check(path, files=()).files
        return checkpoints.check(path, files=[file.name for file in files][world.rank :: world.size]), ""
    except DamagedCheckpoint as error:
        return None, str(error)


@contextmanager
def lock_run_folder(
    world: World, asked: Path | None, name: str, *, prepared: Path | None = None, resume: bool, restart: bool = False,
    trust: bool = False,
) -> Generator[LockedRun]:  # fmt: skip
    """Lock the run folder. The folder, attempt and generation are the same on all ranks (a collective).

    `asked` is the folder; None: a new one under runs/, whose name begins with `name`. `prepared` is set if the agent
    has already created and locked it. It may contain a run with `resume`, or if the run is restarted. `restart` moves
    the checkpoints and weights of that run aside. With `trust` other users may own the folder or write to it.
    """
    generation, spec = restart_count(), WorkerSpec.from_environment()
    launched_dir = Path(spec.attempt_dir).resolve() if spec is not None and spec.attempt_dir else None
    is_restarted = generation > 0 and asked is not None  # by torchrun or by the agent
    notices: list[str] = []
    location: dict[str, Any] = {"folder": "", "attempt": 0}
    attempt_dir, lock = None, None
    try:
        with raise_on_all_ranks(world):
            if world.rank == 0:
                folder = prepared or run_folder.set_up_run_dir(asked, name, resume=resume or is_restarted, trust=trust)
                if launched_dir is not None and (prepared is not None or launched_dir.parent == folder):
                    attempt_dir = launched_dir  # the agent has locked the folder and created the attempt
                else:
                    lock = run_folder.lock_run_dir(folder)
                    if restart and not is_restarted:
                        run_folder.archive_checkpoints(folder)
                    if generation and not is_restarted:
                        notices.append(
                            "restarted by torchrun in a new folder, at step 0. To resume, name the run folder"
                        )
                    attempt_dir = run_folder.create_attempt_dir(folder, launched_dir)[1]
                # resolve it here: other hosts may have different symbolic links
                location = {"folder": str(folder.resolve()), "attempt": run_folder.attempt_number(attempt_dir)}
        location = all_gather_object(location, world)[0]
        path = Path(location["folder"]).resolve()
        if world.local_size < world.size:
            with raise_on_all_ranks(world):
                # this node may also have the folder of an earlier run on its own disk
                if not has_separate_folder(path) and not (path / f"attempt-{location['attempt']}").is_dir():
                    raise UsageError(code="run-dir-not-visible", host=os.uname().nodename, run_dir=path)
        yield LockedRun(path, location["attempt"], generation, attempt_dir, notices=notices)
    finally:
        if lock is not None:
            os.close(lock)


def find_resume_point(
    location: LockedRun, world: World, *, resume: bool, trust: bool, restart: bool = False
) -> ResumePoint | None:
    """The state to resume from, if any (a collective). With `restart`, a finished run may start again."""
    if not resume and not location.generation:
        return None
    checkpoints = Checkpoints(location.folder / run_folder.CHECKPOINTS, trust=trust)
    origin = find_newest_state(checkpoints, world, location.notices.append, memory=location.generation > 0)
    if origin is None and not restart:
        with raise_on_all_ranks(world):
            run_folder.check_not_finished(location.folder)
        location.notices.append(f"found no checkpoint in {location.folder}: training starts at step 0")
    return origin
