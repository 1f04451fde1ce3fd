"""The errors of paceline as a tree, and the exit code that each ends the process with.

    PacelineError            1  the run failed
    |-- UsageError           2  wrong use: nothing was trained, nothing was written over
    |-- TrainingError        *  training cannot go on: a disk that is full (1), ranks that called different
    |   |                       collectives (4), a loss that is not finite (5), replicas that differ (6)
    |   `-- StallError       *  the guard has freed this rank: another one stood still (3) or went another way (4)
    `-- ToldElsewhere        *  another rank reports what happened; this one only ends, with the same code

A process killed by signal n ends with 128 + n. docs/exit-codes.md holds the table for users.
"""

import difflib
from collections.abc import Iterable, Sequence
from enum import IntEnum


class ExitCode(IntEnum):
    """The exit codes of every paceline command."""

    DONE = 0
    FAILED = 1
    USAGE = 2
    STALLED = 3  # a rank stood still; the guard has named it and ended the run
    MISMATCH = 4  # ranks called different collectives, wait for each other in a circle, or swallowed one's error
    NOT_FINITE = 5  # NaN or infinity in a loss or a gradient
    DIVERGED = 6  # replicas that must be equal are not
    SAVED = 75  # sysexits.h EX_TEMPFAIL: stopped in good order, start it again to go on


class PacelineError(Exception):
    """The base of every error that the user sees as words instead of a traceback."""

    exit_code: ExitCode = ExitCode.FAILED


class UsageError(PacelineError):
    """Wrong use, found before the first step: says what was asked, what is true, and what to do."""

    exit_code = ExitCode.USAGE


class TrainingError(PacelineError):
    """Training cannot go on; says at which step and on which rank."""

    def __init__(self, message: str, exit_code: ExitCode = ExitCode.FAILED) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class StallError(TrainingError):
    """This rank is innocent: the guard broke up the collective in which it waited for a rank that never came."""

    def __init__(self, message: str, exit_code: ExitCode = ExitCode.STALLED) -> None:
        super().__init__(message, exit_code)


class ToldElsewhere(PacelineError):  # noqa: N818 - no error to anybody
    """Another rank reports what happened; this one ends silently, with the same exit code."""

    def __init__(self, message: str, exit_code: ExitCode) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def unknown(kind: str, asked: str, choices: Iterable[str]) -> UsageError:
    """The error for a name that does not exist: the nearest valid one first, then all of them."""
    choices = list(choices)
    near = difflib.get_close_matches(asked, choices, n=1)
    meant = f" Did you mean {near[0]!r}?" if near else ""
    return UsageError(f"unknown {kind} {asked!r}.{meant} Choose from: {', '.join(choices)}")


def first_few(words: Sequence[str], most: int, separator: str = ", ") -> str:
    """The first `most` of `words`, and how many more there are."""
    more = f" and {len(words) - most} more" if len(words) > most else ""
    return separator.join(words[:most]) + more


def plural(number: int, one: str, many: str | None = None) -> str:
    """1 step, 2 steps; `many` where it does not end with s."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"
