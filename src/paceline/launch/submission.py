"""How a run was started, and where it is found again: RUN/submit-K/submitted.json, private like all of the run.

RUN/submit-1/     of each start on other machines, numbered from 1
    config.toml       the workers' settings
    plan.json         what the agents are sent, the job's secret included
    job.sbatch        for Slurm: the batch script; slurm-<job>.out is what it and the agents said
    submitted.json    this file's Submission
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import msgspec

from paceline.config.choices import LauncherName
from paceline.disk import writing
from paceline.disk.reading import decode, names
from paceline.errors import TrainingError, UsageError
from paceline.observe.folder import MOST_STARTS, attempt_number

SUBMITTED = "submitted.json"
MAX_LOOKED_AT, MAX_BYTES = 10, 1 << 18


class Submission(msgspec.Struct, frozen=True):
    """One start of a run. `started_at` is Unix time; hosts are as `ssh` calls them, node 0 first."""

    on: LauncherName
    started_at: float
    nodes: int = 1
    hosts: tuple[str, ...] = ()
    ssh: tuple[str, ...] = ()  # the command that was used, for people; never run again
    slurm_job: Annotated[str, msgspec.Meta(pattern=r"\A[0-9]{0,12}\Z")] = ""  # empty: run inside an allocation
    command: tuple[str, ...] = ()  # as it was typed
    cwd: str = ""


def next_submit_dir(run_dir: Path) -> Path:
    """Make the folder of a run's next start.

    Raises:
        UsageError: if it cannot be made.
    """
    try:
        writing.make_folder(run_dir, exist_ok=True)
        while True:
            number = 1 + max((submit_number(Path(name)) for name in names(run_dir)), default=0)
            if number > MOST_STARTS:
                raise UsageError(code="submit-out-of-range", run_dir=run_dir, number=number - 1)
            try:
                writing.make_folder(run_dir / f"submit-{number}")
            except FileExistsError:  # another launcher was faster
                continue
            return run_dir / f"submit-{number}"
    except OSError as error:
        raise UsageError(code="run-dir-not-writable", folder=run_dir, strerror=error.strerror) from None


def submit_number(folder: Path) -> int:
    """Which start a folder belongs to; 0 if its name does not say."""
    return attempt_number(folder, "submit")


def write_files(submit_dir: Path, files: Mapping[str, str]) -> None:
    """Write a plan's files, each whole or not at all, readable by their owner only.

    Raises:
        TrainingError: if the disk is full, say.
    """
    for name, text in files.items():
        try:
            writing.replace(submit_dir / name, text.encode(), sync=True)
        except OSError as error:
            raise TrainingError(code="settings-not-written", path=submit_dir / name, strerror=error.strerror) from None


def write_submission(submit_dir: Path, submission: Submission) -> None:
    """Write it down, whole or not at all.

    Raises:
        TrainingError: if the disk is full, say.
    """
    write_files(submit_dir, {SUBMITTED: msgspec.json.format(msgspec.json.encode(submission)).decode() + "\n"})


def last_submission(run_dir: Path) -> tuple[Path, Submission | None]:
    """The newest start that was written down, with its folder; the run's own and None where all starts were here."""
    folders = [run_dir / name for name in names(run_dir) if submit_number(Path(name))]
    for folder in sorted(folders, key=submit_number, reverse=True)[:MAX_LOOKED_AT]:
        try:
            return folder, decode(folder / SUBMITTED, Submission, limit_bytes=MAX_BYTES)
        except OSError:  # it was refused before it started
            continue
    return run_dir, None
