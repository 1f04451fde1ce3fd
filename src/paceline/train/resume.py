"""Where a run writes, and the state that it goes on from: a snapshot in memory, or the newest whole checkpoint."""

import os
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from paceline.checkpoint.shard import ShardFiles
from paceline.checkpoint.snapshot import inherited, newest, snapshot_of
from paceline.checkpoint.state import Held
from paceline.collectives.control import gather_words, together, told_once
from paceline.contract.birth import WorkerBirth, restarts
from paceline.errors import UsageError
from paceline.observe import folder as run_folder
from paceline.stepping.trainee import Trainee
from paceline.store.store import Checkpoints, Damaged, Report
from paceline.worker.world import World


@dataclass(frozen=True)
class Place:
    """Where a run writes, which start of it this is, and what defines it."""

    folder: Path
    attempt: int
    generation: int
    attempt_dir: Path | None
    """on rank 0"""
    definition: dict[str, Any] = field(default_factory=dict[str, Any])
    notices: list[str] = field(default_factory=list[str])
    """what the user must be told before the first step"""


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


class Remembered:
    """The newest snapshot that earlier workers have left in the memory of their hosts."""

    def __init__(self, world: World) -> None:
        """A collective."""
        self._world, self._mine = world, newest(inherited())
        self._ages = gather_words(None if self._mine is None else self._mine.age, world)
        there = [age for age in self._ages if age is not None]
        # on one host all ranks see the same, or one has lost its way
        told = bool(there) and (world.local_size < world.size or all(age == there[0] for age in self._ages))
        self._newest: list[int] | None = max(there) if told else None

    @property
    def step(self) -> int:
        """Of the state; -1: there is none."""
        return -1 if self._newest is None else self._newest[1]

    def origin(self) -> Origin | None:
        """The state; hosts that have none, or an older one, are sent it (a collective)."""
        if self._newest is None:
            return None
        found = self._mine if self._ages[self._world.rank] == self._newest else None
        if any(age != self._newest for age in self._ages):
            found = snapshot_of(self._ages.index(self._newest), found, self._world)
        assert found is not None
        content = msgspec.convert(found.content, Content)
        return Origin(found.step, content, found.source, f"the snapshot of step {found.step}", frozenset(found.files))


def newest_origin(checkpoints: Checkpoints, world: World, report: Report, *, memory: bool) -> Origin | None:
    """The newest state, in `memory` or on disk (a collective); `report` as in `from_disk`.

    Raises:
        UsageError: as `from_disk`.
    """
    kept = Remembered(world) if memory else None
    on_disk = from_disk(checkpoints, world, report, after=-1 if kept is None else kept.step)
    return kept.origin() if on_disk is None and kept is not None else on_disk


def from_disk(checkpoints: Checkpoints, world: World, report: Report, *, after: int = -1) -> Origin | None:
    """The newest checkpoint of which every byte is right (a collective); the ranks share the hashing.

    Only one `after` the step of the state at hand (-1: there is none) is of interest. `report` is called on rank 0
    with each newer one that is not whole, and why.

    Raises:
        UsageError: on rank 0, if there are checkpoints, but none is whole; ToldElsewhere on the others.
    """
    there = [str(path) for step, path in checkpoints.entries() if step > after]
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
    if paths and after < 0:
        error = UsageError(
            code="no-whole-checkpoint", count=len(paths), folder=checkpoints.root, complaints="\n".join(complaints[:3])
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


@contextmanager
def placed(
    world: World,
    asked: Path | None,
    name: str,
    *,
    prepared: Path | None = None,
    resume: bool,
    fresh: bool = False,
    trust: bool = False,
) -> Generator[Place]:
    """The locked run folder, and the attempt and generation of the run that this is; the same on all ranks.

    Args:
        world: this rank's place.
        asked: the folder; None: a new one under runs/.
        name: what a new one is called after.
        prepared: the folder, where our agent has made and locked it already.
        resume: whether it may hold a run; one that was restarted may always.
        fresh: whether what that run has saved is moved aside.
        trust: whether it may be one that others own or could have written.

    Raises:
        UsageError: on one rank, as `open_run_dir` and `lock_run_dir`; ToldElsewhere on the others.
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
        yield Place(Path(told["folder"]).resolve(), told["attempt"], generation, attempt_dir, notices=notices)
    finally:
        if lock is not None:
            os.close(lock)


def origin_of(place: Place, world: World, *, resume: bool, trust: bool, fresh: bool = False) -> Origin | None:
    """The state to go on from, if any (a collective); `fresh`: a run that is finished may begin again.

    Raises:
        UsageError: on one rank: no state that is there can be trusted, or the run is finished.
    """
    if not resume and not place.generation:
        return None
    checkpoints = Checkpoints(place.folder / run_folder.CHECKPOINTS, trust=trust)
    origin = newest_origin(checkpoints, world, place.notices.append, memory=place.generation > 0)
    if origin is None and not fresh:
        with together(world):
            run_folder.check_not_finished(place.folder)
        if place.attempt > 1:
            place.notices.append("there is no checkpoint: it begins again at step 0")
    return origin


@dataclass(frozen=True)
class Holder:
    """All models of a training, as one state to be saved."""

    parts: Sequence[Trainee]
    world: World
    virtual_ranks: int
    others: Callable[[], list[Held]] = list
    """gives the tensors of what is saved beside models, the same on all ranks"""

    @property
    def sharded(self) -> bool:
        """Whether a rank holds a share only of any of them."""
        return any(part.replica.sharded for part in self.parts)

    def state(self) -> list[Held]:
        """All tensors of all models, and the others."""
        return [*(held for part in self.parts for held in part.state()), *self.others()]
