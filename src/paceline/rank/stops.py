"""Stops all ranks of an unmodified script after the same step, and resumes the script.

The hook of a framework (rank/framework_stops.py) reports each step after which the script can save and end:

    training = stops.register_training(folder)  # None: it could not resume. It resumes from `training.stopped`
    stops.install_handlers()                    # from now on, a stop request takes effect after a step
    if stops.end_step(): ...                    # all ranks get True for the same step: save, then
    training.record_saved_step(step)            # the same command will resume
    stops.exit_saved("in ...")                  # end with exit code 75

After a stop request, a rank waits after its next step until the coordinator has chosen the last step
(launch/agent/cluster.py). Without a request, a step costs a few memory accesses and no message.

The record of a stop is in the folder of the checkpoints. It makes the same command resume, and only from checkpoints
that have the name of the training in the record: another program may save to the same folder. The command removes the
record when it succeeds, or when it begins a second training in the folder.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import threading
import time
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import msgspec

from paceline.errors import ExitCode, UsageError
from paceline.protocol.control import WorkerSpec
from paceline.protocol.status_page import StatusPage
from paceline.rank.environment import launcher_job_id
from paceline.rank.imports import when_imported
from paceline.rank.probes import ScriptListener, short_hash
from paceline.runs import reading, writing
from paceline.runs.console import print_to_stderr
from paceline.runs.owners import UnreadableFileError

HOOKS = "paceline.rank.framework_stops"
FRAMEWORKS = {  # module that is imported -> function of HOOKS
    "transformers.trainer": "patch_hf_trainer",
    "accelerate.accelerator": "patch_accelerate",
    "lightning.pytorch.trainer.trainer": "patch_lightning_trainer",
    "pytorch_lightning.trainer.trainer": "patch_lightning_trainer",
}
RECORD = "paceline-stopped.json"
SLURM_JOB = "SLURM_JOB_ID"
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
WAIT_SECONDS = 0.01


class ResumeRecord(msgspec.Struct, frozen=True):
    argv: tuple[str, ...]
    step: int
    world_size: int
    files: tuple[str, ...] = ()  # files in the folder of the record that only a resume needs
    script: str = ""  # a digest of the script
    training: str = ""  # the name of the training, which its checkpoints have


class StepStopHandler:
    def __init__(self, page: StatusPage, arguments: Sequence[str]) -> None:
        """`arguments`: the script and its arguments."""
        self._page, self.argv = page, tuple(arguments)
        if self.argv and self.argv[0] != "-m":
            self.argv = (str(Path(self.argv[0]).resolve()), *self.argv[1:])
        self.rank, self._pid = int(os.environ.get("RANK", "0")), os.getpid()
        self._steps, self._fence = 0, threading.Lock()
        self.begun = self._warned = False
        self._trainings: dict[Path, ResumeRecordFile] = {}  # by folder

    def watch_frameworks(self) -> None:
        for module, hook in FRAMEWORKS.items():
            when_imported(module, partial(self._install, module, hook))

    def _install(self, module: str, hook: str) -> None:
        with self.report_hook_error():
            getattr(importlib.import_module(HOOKS), hook)(self, module)

    @contextmanager
    def report_hook_error(self) -> Generator[None]:
        try:
            yield
        except Exception as error:  # a version with different names
            self.say(f"warning: stop requests end this script without a checkpoint: {error!r}")

    # ---- the step ----

    @property
    def can_install_handlers(self) -> bool:
        """Whether stop requests can take effect after a step: not if the script handles a stop signal itself."""
        handlers = {signal.getsignal(number) for number in SIGNALS}
        is_main = threading.current_thread() is threading.main_thread()
        return self.begun or (is_main and handlers <= {signal.SIG_DFL, signal.SIG_IGN, signal.default_int_handler})

    def install_handlers(self) -> None:
        self.begun = True
        for number in SIGNALS:  # at each call: Lightning restores the previous handlers after a training
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._on_signal)
        self._page.set_stop_counter("stops_by_step", 1)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """Report the first signal to the agent. The second one ends the process, as does the first in a child."""
        if os.getpid() == self._pid and not self._page.get_request("stop_signal"):
            self._page.set_stop_counter("stop_signal", number)
            self._page.set_stop_counter("stop_asked", 1)
            return
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    def end_step(self) -> bool:
        """Count a step after which the script can save and end; return whether it must.

        It waits until the coordinator has chosen the last step. If the coordinator cannot choose one, the agent ends
        this process when the grace period is over.
        """
        self._steps += 1
        self._page.set_stop_counter("steps_ended", self._steps)
        with self._fence:  # the processor must not read the request before the number is visible to the agent
            pass
        while self._page.get_request("stop_asked") and not self._page.get_request("stop_step"):
            time.sleep(WAIT_SECONDS)
        return 0 < self._page.get_request("stop_step") <= self._steps

    def exit_saved(self, where: str, resumes: str = "the same command resumes") -> NoReturn:
        self.say(f"stopped and saved {where}; {resumes}")
        raise SystemExit(int(ExitCode.SAVED))

    def register_training(self, folder: Path) -> ResumeRecordFile | None:
        """The training that begins and saves in this folder. None if this command has trained in it before.

        A later training could not resume: the same command begins with the first one, which saves in this folder again.
        """
        if (first := self._trainings.get(folder)) is not None:
            first.forget()
            self.warn(f"it trains in {folder} more than once, and only its first training there resumes")
            return None
        self._trainings[folder] = ResumeRecordFile(self, folder)
        return self._trainings[folder]

    def remove_resume_records(self) -> None:
        for training in self._trainings.values():
            training.forget()

    def say(self, text: str) -> None:
        if self.rank == 0:
            print_to_stderr(f"paceline: {text}")

    def warn(self, reason: str) -> None:
        """Report once that a stop loses the progress, if the run has a time limit and is queued again."""
        if SLURM_JOB in os.environ and not self._warned:
            self._warned = True
            self.say(f"warning: a stop at the time limit loses the progress of this script: {reason}")


class ResumeRecordFile:
    """The first training of this command in a folder, and the stop from which it resumes."""

    def __init__(self, stops: StepStopHandler, folder: Path) -> None:
        self.folder, self._stops, self._script = folder, stops, short_hash(read_main_script())
        self.stopped = self._find()
        spec = WorkerSpec.from_environment()
        start = (launcher_job_id(os.environ), spec.attempt_dir, spec.generation) if spec is not None else ()
        self.name = self.stopped.training if self.stopped is not None else short_hash(repr(start).encode())

    def _find(self) -> ResumeRecord | None:
        try:
            record = reading.read_json(self.folder / RECORD, ResumeRecord, ours=True)
        except FileNotFoundError:
            return None
        except UnreadableFileError as error:
            self._stops.say(f"warning: not resumed: {error}")
            return None
        if record.argv != self._stops.argv:
            self._stops.say(f"{self.folder} has the checkpoint of another command, which was stopped: not resumed")
            return None
        if record.script != self._script:
            raise UsageError(code="stopped-script-changed", file=self.folder / RECORD, step=record.step)
        if record.world_size != (world_size := int(os.environ["WORLD_SIZE"])):
            before = f"stopped with {record.world_size} ranks, resumes with {world_size}"
            self._stops.say(f"warning: {before}: the global batch and the result are different")
        return record

    def check_same_checkpoint(self, chosen: object) -> None:
        """Check that all nodes have found the same checkpoint. Call it on all ranks, which have a process group."""
        if os.environ["WORLD_SIZE"] != os.environ["LOCAL_WORLD_SIZE"]:
            distributed: Any = sys.modules["torch.distributed"]
            choices: list[Any] = [None] * distributed.get_world_size()
            distributed.all_gather_object(choices, chosen)
            if any(other != chosen for other in choices):
                raise UsageError(code="stop-record-not-shared", folder=self.folder)

    def record_saved_step(self, step: int, files: Sequence[str] = ()) -> None:
        """Record that all ranks have saved this step in the folder, to resume. `files`: see ResumeRecord."""
        if self._stops.rank == 0:
            before = reading.read_json_if_readable(self.folder / RECORD, ResumeRecord)
            world_size = int(os.environ["WORLD_SIZE"])
            record = ResumeRecord(self._stops.argv, step, world_size, tuple(files), self._script, self.name)
            writing.replace_file(self.folder / RECORD, msgspec.json.encode(record), sync=True)
            _remove(self.folder, {*before.files} - {*files} if before is not None else ())

    def forget(self) -> None:
        """Remove the record from which this training has resumed, and its files."""
        if self._stops.rank == 0 and self.stopped is not None:
            _remove(self.folder, (RECORD, *self.stopped.files))


class UnresumableScriptWarner(ScriptListener):
    """Warns at the first step of a script that paceline cannot stop and resume, and that handles no stop signal."""

    def __init__(self, stops: StepStopHandler) -> None:
        self._stops, self._looks = stops, True

    def on_step_end(self, optimizer: Any) -> None:
        if self._looks and not self._stops.begun and self._stops.can_install_handlers:
            self._stops.warn(
                "paceline stops and resumes Trainer, Lightning, scripts with save_state and load_state of Accelerate, "
                "and paceline.session"
            )
        self._looks = False

    def on_session_begin(self) -> None:
        self._looks = False


def read_main_script() -> bytes:
    with suppress(OSError):
        return Path(getattr(sys.modules["__main__"], "__file__", None) or "").read_bytes()
    return b""


def _remove(folder: Path, names: Iterable[str]) -> None:
    for name in names:
        with suppress(OSError):
            writing.remove(folder / Path(name).name)
