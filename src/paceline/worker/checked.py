"""`python -m paceline.worker.checked SCRIPT ARGS`: a script as a worker under `launch --check`; see `worker.bootstrap`.

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

from paceline.contract.birth import WorkerBirth
from paceline.contract.facts import ScriptFacts, facts_file
from paceline.disk import writing
from paceline.worker import bootstrap
from paceline.worker.imports import when_imported
from paceline.worker.probes.hooks import Events, Hooks
from paceline.worker.probes.loading import LoaderWatch
from paceline.worker.probes.noting import SideWatch
from paceline.worker.probes.seeing import StepWatch

EVERY_SECONDS = 2.0  # so often facts are written down: a script may be killed


class Writing(Events):
    """Writes the facts down, now and then and at the end."""

    def __init__(self, facts: ScriptFacts, folder: Path) -> None:
        self._facts, self._path, self._pid = facts, folder / facts_file(facts.rank), os.getpid()
        self._last = 0.0

    def step_ended(self, optimizer: Any) -> None:
        """Now and then."""
        if time.monotonic() - self._last > EVERY_SECONDS:
            self.write()

    def write(self) -> None:
        """As they are."""
        with suppress(OSError):  # a full disk: the script's own words say more of it
            writing.replace(self._path, msgspec.json.encode(self._facts))
        self._last = time.monotonic()


def watch(folder: Path) -> None:
    """See what this process does from now on."""
    facts = ScriptFacts(
        rank=int(os.environ["RANK"]),
        world=int(os.environ["WORLD_SIZE"]),
        local_world=int(os.environ["LOCAL_WORLD_SIZE"]),
        host=socket.gethostname(),
        cores=len(os.sched_getaffinity(0)),
    )
    pid, loading, noting = os.getpid(), LoaderWatch(facts), SideWatch(facts, str(folder))
    seeing, written = StepWatch(facts, loading), Writing(facts, folder)

    def complain(error: BaseException) -> None:
        print(f"paceline: --check does not see everything: {error!r}", file=sys.stderr)

    def torch_is_there(*, late: bool) -> None:
        try:
            for part in (loading, seeing, noting):
                part.install()
        except Exception as error:  # a torch with other names
            complain(error)

    def ended() -> None:
        if os.getpid() != pid:
            return
        facts.ended = True
        for part in (noting, loading):
            try:
                part.finish()
            except Exception as error:
                complain(error)
        written.write()

    atexit.register(ended)
    noting.begin()
    when_imported("torch", torch_is_there)
    hooks = Hooks(complain)
    for listener in (loading, noting, seeing, written):
        hooks.listen(listener)
    hooks.install()


def main(arguments: list[str]) -> NoReturn:
    """Run `arguments` as `worker.bootstrap` does."""
    birth = WorkerBirth.here()
    if birth is not None and birth.attempt_dir:
        watch(Path(birth.attempt_dir))
    bootstrap.main(arguments)


if __name__ == "__main__":
    main(sys.argv[1:])
