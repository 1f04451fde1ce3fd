"""Stops all ranks of an unmodified script after the same step, and resumes the script.

A framework's hook (rank/frameworks/) reports each step after which the script can save and end:

    stops.begin()                    # from now on, a stop request takes effect after a step
    if stops.end_step(): ...         # all ranks get True for the same step: save, then
    stops.exit_saved(folder, step)   # record the stop, and end with exit code 75

A rank that is asked to stop waits after its next step until the coordinator has chosen the last step
(launch/agent/cluster.py). Without a request, a step costs a few memory accesses and no message.

The record of a stop lies beside the checkpoints. It makes the same command resume, and is removed when the command has
succeeded.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, Self

import msgspec

from paceline.errors import ExitCode, UsageError
from paceline.protocol.status_page import StatusPage
from paceline.rank.imports import when_imported
from paceline.runs import reading, writing
from paceline.runs.console import say

FRAMEWORKS = {  # module that is imported -> module with its hook
    "transformers.trainer": "paceline.rank.frameworks.trainer",
}
RECORD = "paceline-stopped.json"
SLURM_JOB = "SLURM_JOB_ID"
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
WAIT_SECONDS = 0.01


class StopRecord(msgspec.Struct, frozen=True):
    """Where a command was stopped."""

    argv: tuple[str, ...]
    step: int
    world_size: int


class StepStops:
    """The stops of this process: see the module's docstring."""

    def __init__(self, page: StatusPage, arguments: Sequence[str]) -> None:
        """`arguments`: the script and its arguments."""
        self._page, self._argv = page, tuple(arguments)
        self._pid, self._steps, self._fence = os.getpid(), 0, threading.Lock()
        self._begun = False
        self._folders: dict[Path, None] = {}  # with a record of this command

    def watch_frameworks(self) -> Self:
        """Stop and resume the frameworks that the script imports."""
        for name, module in FRAMEWORKS.items():
            when_imported(name, partial(self._install, module))
        return self

    def _install(self, module: str, *, late: bool) -> None:
        del late
        importlib.import_module(module).install(self)

    # ---- the step ----

    def begin(self) -> None:
        """From now on, let a stop request take effect after a step. Does nothing if the script handles SIGTERM."""
        if self._begun or threading.current_thread() is not threading.main_thread():
            return
        if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
            return
        self._begun = True
        for number in SIGNALS:
            if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):  # others are the script's
                signal.signal(number, self._on_signal)
        self._page.put_stops("stops_by_step", 1)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """Report the first signal to the agent. The second one ends the process, as does the first in a child."""
        if os.getpid() == self._pid and not self._page.asked("stop_signal"):
            self._page.put_stops("stop_signal", number)
            self._page.put_stops("stop_asked", 1)
            return
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    def end_step(self) -> bool:
        """Count a step after which the script can save and end; return whether it must. Waits for the agents' choice.

        The wait ends, because the agent ends this process when the grace period is over.
        """
        self._steps += 1
        self._page.put_stops("steps_ended", self._steps)
        with self._fence:  # the processor must not read the request before the number is visible to the agent
            pass
        while self._page.asked("stop_asked") and not self._page.asked("stop_step"):
            time.sleep(WAIT_SECONDS)
        return 0 < self._page.asked("stop_step") <= self._steps

    def exit_saved(self, folder: Path, step: int) -> NoReturn:
        """End this rank after it has saved. Rank 0 records the stop in `folder`, which has the checkpoint."""
        if os.environ["RANK"] == "0":
            record = StopRecord(self._argv, step, int(os.environ["WORLD_SIZE"]))
            writing.replace(folder / RECORD, msgspec.json.encode(record), sync=True)
        self.say(f"stopped after step {step}, and saved it in {folder}; the same command resumes")
        raise SystemExit(int(ExitCode.SAVED))

    # ---- the next start ----

    def stopped_in(self, folder: Path) -> StopRecord | None:
        """The record in this folder of a stop of the same command, equal on all ranks; None if there is none.

        Raises:
            UsageError: the nodes do not share the folder.
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
            self._folders[folder] = None
        return record

    def succeed(self) -> None:
        """Remove the records of this command, which has succeeded."""
        for folder in self._folders if os.environ["RANK"] == "0" else ():
            with suppress(OSError):
                writing.remove(folder / RECORD)

    def say(self, text: str) -> None:
        """Print a message of rank 0."""
        if os.environ["RANK"] == "0":
            say(f"paceline: {text}")

    def warn(self, reason: str) -> None:
        """Report at the start that a stop loses the progress, if the run has a time limit and is queued again."""
        if SLURM_JOB in os.environ:
            self.say(f"a stop at the time limit loses the progress of this script: {reason}")
