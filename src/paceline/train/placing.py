"""Takes the folder of a run: one rank makes or finds it and holds its lock, and all learn which start this is.

And finds the state there that the run goes on from.
"""

import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from paceline.contract.birth import WorkerBirth, restarts
from paceline.observe import folder as run_folder
from paceline.store.store import Checkpoints
from paceline.sums import gather_words, together
from paceline.train.keeping import Place
from paceline.train.resume import Origin, from_disk, from_memory
from paceline.worker.world import World


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
    restarted = generation > 0 and asked is not None  # by torchrun, or our agent
    notices: list[str] = []
    mine: dict[str, Any] = {"folder": "", "attempt": 0}
    attempt_dir, lock = None, None
    try:
        with together(world):
            if world.rank == 0:
                if prepared is not None:
                    assert birth is not None  # our agent has prepared the folder
                    folder, attempt_dir = prepared, Path(birth.attempt_dir).resolve()
                else:
                    folder = run_folder.open_run_dir(asked, name, resume=resume or restarted, trust=trust)
                    lock = run_folder.lock_run_dir(folder)
                    if fresh and not restarted:
                        run_folder.move_aside(folder)
                    if generation and not restarted:
                        notices.append(
                            "restarted by torchrun, but in a new folder, at step 0: --run-dir names the same"
                        )
                    attempt_dir = run_folder.create_attempt_dir(folder)[1]
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
    origin = from_memory(world) if place.generation else None
    checkpoints = Checkpoints(place.folder / run_folder.CHECKPOINTS, trust=trust)
    origin = from_disk(checkpoints, world, place.notices.append, after=origin) or origin
    if origin is None and not fresh:
        with together(world):
            run_folder.check_not_finished(place.folder)
        if place.attempt > 1:
            place.notices.append("there is no checkpoint: it begins again at step 0")
    return origin
