"""The fence: one file that names the newest claim on a run's checkpoints. Only its holder may publish.

After a restart a process of the generation before may still be alive, frozen or cut off from its agent. When it wakes
up in the middle of its checkpoint, the fence stops it. The file is read and changed only under its lock.
"""

import contextlib
import fcntl
import os
import re
from collections.abc import Generator
from pathlib import Path
from typing import NamedTuple

from paceline.disk import writing
from paceline.errors import TrainingError

LOCK_SECONDS = 30.0  # it is held for a few renames; longer means that its holder is frozen


class Fenced(TrainingError):  # noqa: N818 - a state, not a fault
    """A newer generation has taken over; what this one was about to publish is not published."""


class Claim(NamedTuple):
    """The right to publish; a later claim is greater."""

    attempt: int
    generation: int

    def __str__(self) -> str:
        return f"attempt {self.attempt}, generation {self.generation}"


def take(path: Path, claim: Claim) -> None:
    """Make `claim` the newest one; repeating it is no error.

    Raises:
        TrainingError: a newer one is there, or another process does not let go of the fence.
        OSError: it cannot be written, or the file system has no locks.
    """
    with _locked(path, make=True) as descriptor:
        newest = _read(descriptor)
        if newest is not None and claim < newest:
            raise TrainingError(code="fence-taken-over", newest=newest, claim=claim)
        _write(descriptor, claim)


@contextlib.contextmanager
def holding(path: Path, claim: Claim) -> Generator[None]:
    """Within it nobody else can take over.

    Raises:
        Fenced: if somebody has.
        TrainingError: if another process does not let go of the fence.
    """
    if not path.exists():
        raise Fenced(f"{path} is gone, so that nobody may publish; this checkpoint is not published")
    with _locked(path) as descriptor:
        newest = _read(descriptor)
        if newest != claim:
            words = "a newer generation has taken over; this checkpoint is not published"
            raise Fenced(f"{words} (we are {claim}, the newest is {newest})")
        yield


@contextlib.contextmanager
def _locked(path: Path, *, make: bool = False) -> Generator[int]:
    """The fence's descriptor, while no other process has it."""
    descriptor = writing.keep(path, make=make)
    try:
        if not writing.lock(descriptor, LOCK_SECONDS):
            raise TrainingError(code="fence-locked", path=path)
        try:
            yield descriptor
        finally:
            # Closing is not enough: a child forked meanwhile (a loader's worker) has the same open file.
            fcntl.flock(descriptor, fcntl.LOCK_UN)
    finally:
        os.close(descriptor)


def _read(descriptor: int) -> Claim | None:
    text = os.pread(descriptor, 100, 0)
    if not text.strip(b"\0"):  # new, or its first write was lost with the power
        return None
    match = re.fullmatch(rb"([0-9]{20}) ([0-9]{20})\n", text)
    if not match:
        raise TrainingError(code="fence-damaged", value=text)
    return Claim(int(match[1]), int(match[2]))


def _write(descriptor: int, claim: Claim) -> None:
    """Put a claim into a locked fence, in one write of always the same length: a crash cannot tear it."""
    line = f"{claim.attempt:020d} {claim.generation:020d}\n".encode()
    written = os.pwrite(descriptor, line, 0)
    if written != len(line):
        raise OSError(f"only {written} of {len(line)} bytes were written")
    os.fsync(descriptor)
