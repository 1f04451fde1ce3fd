"""Stops all ranks of an unmodified script after the same step, and resumes the script.

The hook of a framework (rank/frameworks.py) reports each step after which the script can save and end:

    stops.begin()                    # from now on, a stop request takes effect after a step
    if stops.end_step(): ...         # all ranks get True for the same step: save, then
    stops.record(folder, step)       # the same command will resume
    stops.exit_saved("in ...")       # end with exit code 75

After a stop request, a rank waits after its next step until the coordinator has chosen the last step
(launch/agent/cluster.py). Without a request, a step costs a few memory accesses and no message.

The record of a stop is in the folder of the checkpoints. It makes the same command resume. The command removes it when
it succeeds.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, Self

import msgspec

from paceline.errors import ExitCode, UsageError
from paceline.protocol.status_page import StatusPage
from paceline.rank.imports import when_imported
from paceline.rank.probes import ScriptListener
from paceline.runs import reading, writing
from paceline.runs.console import print_to_stderr

HOOKS = "paceline.rank.frameworks"
FRAMEWORKS = {  # module that is imported -> function of HOOKS
    "transformers.trainer": "install_trainer",
    "accelerate.accelerator": "install_accelerate",
    "lightning.pytorch.trainer.trainer": "install_lightning",
    "pytorch_lightning.trainer.trainer": "install_lightning",
}
RECORD = "paceline-stopped.json"
SLURM_JOB = "SLURM_JOB_ID"
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
WAIT_SECONDS = 0.01


class StopRecord(msgspec.Struct, frozen=True):
    """The last step of a stopped command."""

    argv: tuple[str, ...]
    step: int
    world_size: int
    files: tuple[str, ...] = ()  # files in the folder of the record that only a resume needs


class StepStops:
    """The stops of this process: see the module's docstring."""

    def __init__(self, page: StatusPage, arguments: Sequence[str]) -> None:
        """`arguments`: the script and its arguments."""
        self._page, self._argv = page, tuple(arguments)
        self.rank, self._pid = int(os.environ.get("RANK", "0")), os.getpid()
        self._steps, self._fence = 0, threading.Lock()
        self.begun = self._warned = False
        self._found: dict[Path, StopRecord] = {}  # records of this command, by folder

    def watch_frameworks(self) -> Self:
        """Stop and resume the frameworks that the script imports."""
        for module, hook in FRAMEWORKS.items():
            when_imported(module, partial(self._install, module, hook))
        return self

    def _install(self, module: str, hook: str, *, late: bool) -> None:
        del late
        try:
            getattr(importlib.import_module(HOOKS), hook)(self, module)
        except Exception as error:  # a version with different names
            self.say(f"warning: stop requests end this script without a checkpoint: {error!r}")

    # ---- the step ----

    @property
    def can_begin(self) -> bool:
        """Whether stop requests can take effect after a step: not if the script handles a stop signal itself."""
        handlers = {signal.getsignal(number) for number in SIGNALS}
        is_main = threading.current_thread() is threading.main_thread()
        return self.begun or (is_main and handlers <= {signal.SIG_DFL, signal.SIG_IGN, signal.default_int_handler})

    def begin(self) -> None:
        """From now on, let a stop request take effect after a step."""
        if not self.begun:
            self.begun = True
            for number in SIGNALS:
                if signal.getsignal(number) is not signal.SIG_IGN:
                    signal.signal(number, self._on_signal)
            self._page.put_stops("stops_by_step", 1)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """Report the first signal to the agent. The second one ends the process, as does the first in a child."""
        if os.getpid() == self._pid and not self._page.get_request("stop_signal"):
            self._page.put_stops("stop_signal", number)
            self._page.put_stops("stop_asked", 1)
            return
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    def end_step(self) -> bool:
        """Count a step after which the script can save and end; return whether it must.

        It waits until the coordinator has chosen the last step. If the coordinator cannot choose one, the agent ends
        this process when the grace period is over.
        """
        self._steps += 1
        self._page.put_stops("steps_ended", self._steps)
        with self._fence:  # the processor must not read the request before the number is visible to the agent
            pass
        while self._page.get_request("stop_asked") and not self._page.get_request("stop_step"):
            time.sleep(WAIT_SECONDS)
        return 0 < self._page.get_request("stop_step") <= self._steps

    def record(self, folder: Path, step: int, files: Sequence[str] = ()) -> None:
        """Record that this command has saved this step in `folder`, to resume. `files`: see StopRecord."""
        if self.rank == 0:
            before = reading.decode_if_readable(folder / RECORD, StopRecord)
            record = StopRecord(self._argv, step, int(os.environ["WORLD_SIZE"]), tuple(files))
            writing.replace_file(folder / RECORD, msgspec.json.encode(record), sync=True)
            _remove(folder, {*before.files} - {*files} if before is not None else ())

    def exit_saved(self, where: str) -> NoReturn:
        """End this rank after it has saved."""
        self.say(f"stopped and saved {where}; the same command resumes")
        raise SystemExit(int(ExitCode.SAVED))

    # ---- the next start ----

    def stopped_in(self, folder: Path) -> StopRecord | None:
        """The record in this folder of a stop of the same command, equal on all ranks; None if there is none.

        Raises:
            UsageError: the nodes have different folders at this path.
        """
        record: StopRecord | None = None
        with suppress(FileNotFoundError):
            record = reading.decode(folder / RECORD, StopRecord)
        if record is not None and record.argv != self._argv:
            self.say(f"{folder} has the checkpoint of another command, which was stopped: not resumed")
            record = None
        if os.environ["WORLD_SIZE"] != os.environ["LOCAL_WORLD_SIZE"]:
            distributed: Any = sys.modules["torch.distributed"]
            records: list[StopRecord | None] = [None] * distributed.get_world_size()
            distributed.all_gather_object(records, record)
            if any(other != record for other in records):
                raise UsageError(code="stop-record-not-shared", folder=folder)
        if record is not None:
            self._found[folder] = record
        return record

    def succeed(self) -> None:
        """Remove the records of this command, which has succeeded."""
        for folder, record in self._found.items() if self.rank == 0 else ():
            _remove(folder, (RECORD, *record.files))

    def say(self, text: str) -> None:
        """Print a message of rank 0."""
        if self.rank == 0:
            print_to_stderr(f"paceline: {text}")

    def warn(self, reason: str) -> None:
        """Report once that a stop loses the progress, if the run has a time limit and is queued again."""
        if SLURM_JOB in os.environ and not self._warned:
            self._warned = True
            self.say(f"warning: a stop at the time limit loses the progress of this script: {reason}")


class UnsavedSteps(ScriptListener):
    """Warns at the first step of a script that paceline cannot stop and resume, and that handles no stop signal."""

    def __init__(self, stops: StepStops) -> None:
        self._stops, self._looks = stops, True

    def on_step_end(self, optimizer: Any) -> None:
        """Warn, at the first step."""
        if self._looks and not self._stops.begun and self._stops.can_begin:
            self._stops.warn(
                "paceline stops and resumes Trainer, Lightning, scripts with save_state and load_state of Accelerate, "
                "and paceline.session"
            )
        self._looks = False

    def on_session_begin(self) -> None:
        """A session saves and resumes by itself."""
        self._looks = False


def _remove(folder: Path, names: Iterable[str]) -> None:
    for name in names:
        with suppress(OSError):
            writing.remove(folder / Path(name).name)
