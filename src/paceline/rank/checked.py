"""`python -m paceline.rank.checked SCRIPT ARGS`: a script as a worker under `launch --check`; see `rank.bootstrap`.

It runs as ever, with shorter epochs, and what is seen of it is written down. Nothing is judged here.
"""

import atexit
import os
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from paceline.disk import writing
from paceline.protocol.control import WorkerBirth
from paceline.protocol.facts import MAX_STEPS, ScriptFacts, facts_file
from paceline.rank import bootstrap
from paceline.rank.guard import Guard
from paceline.rank.probes.hooks import Events
from paceline.rank.probes.joint import Joint
from paceline.rank.probes.loading import LoaderWatch
from paceline.rank.probes.noting import SideWatch
from paceline.rank.probes.seeing import StepWatch

EVERY_SECONDS = 2.0  # so often facts are written down: a script may be killed


class Writing(Events):
    """Writes the facts down, now and then and at the end."""

    def __init__(self, facts: ScriptFacts, folder: Path) -> None:
        self._facts, self._path, self._pid = facts, folder / facts_file(facts.rank), os.getpid()
        self._last = 0.0

    def step_ended(self, optimizer: Any) -> None:
        if time.monotonic() - self._last > EVERY_SECONDS:
            self.write()

    def write(self) -> None:
        """As they are."""
        with suppress(OSError):  # a full disk: the script's own words say more of it
            writing.replace(self._path, msgspec.json.encode(self._facts))
        self._last = time.monotonic()

    def finish(self, *watches: SideWatch | LoaderWatch) -> None:
        """The last words."""
        if os.getpid() != self._pid:
            return
        self._facts.ended = True
        for one in watches:
            try:
                one.finish()
            except Exception as error:
                print(f"paceline: --check does not see everything: {error!r}", file=sys.stderr)
        self.write()


def watch(folder: Path) -> tuple[Events, ...]:
    """What sees what this process does."""
    facts = ScriptFacts(
        rank=int(os.environ["RANK"]),
        world=int(os.environ["WORLD_SIZE"]),
        local_world=int(os.environ["LOCAL_WORLD_SIZE"]),
        host=socket.gethostname(),
        cores=len(os.sched_getaffinity(0)),
    )
    loading, noting, written = LoaderWatch(facts), SideWatch(facts, str(folder)), Writing(facts, folder)
    atexit.register(written.finish, noting, loading)
    guard = Guard.of_process()
    guard.max_steps, joint = MAX_STEPS, Joint(lambda: guard.box.get("ops"))
    return joint, loading, StepWatch(facts, loading, joint), noting, written


def main(arguments: list[str]) -> NoReturn:
    """Run `arguments` as `rank.bootstrap` does."""
    birth = WorkerBirth.here()
    bootstrap.main(arguments, *(watch(Path(birth.attempt_dir)) if birth is not None and birth.attempt_dir else ()))


if __name__ == "__main__":
    main(sys.argv[1:])
