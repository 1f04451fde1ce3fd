"""The errors of paceline, and the exit code of each.

    PacelineError            1  the run failed
    |-- UsageError           2  wrong use: paceline trained and overwrote nothing
    |-- TrainingError        *  training cannot continue: a full disk (1), ranks that called different
    |   |                       collectives (4), a loss that is not finite (5), replicas that differ (6)
    |   `-- StallError       *  the guard unblocked this rank: a different rank hangs (3) or called other operations (4)
    `-- ReportedByPeer        *  another rank reports the error; this rank ends with the same code

A process killed by signal n ends with 128 + n. docs/exit-codes.md has the table for users.

An error has a `code` and fields. Its text is in messages/, one file per package. A front end renders it:

    {value}           a field; a list is joined
    {--epochs}        an option: --epochs on the command line, epochs in a session
    {--resume auto}   an option with a value
    {--device=value}  an option with the value of a field
    {setting}         the option that the field `setting` names

The table [session] of a file has the texts for sessions. An error without a code has only a text.
"""

import difflib
import tomllib
from collections.abc import Callable, Iterable, Sequence
from enum import IntEnum
from functools import cache
from pathlib import Path
from typing import Any


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


MESSAGES = Path(__file__).with_name("messages")
Write = Callable[[str, Any], str]
"""(name of an option, its value or None) -> how a front end writes it"""


@cache
def texts() -> dict[str, Any]:
    """The texts of all errors, by code; those for sessions in the table `session`."""
    found: dict[str, Any] = {"session": {}}
    for path in sorted(MESSAGES.glob("*.toml")):
        table = tomllib.loads(path.read_text())
        found["session"] |= table.pop("session", {})
        found |= table
    return found


def flag(name: str, value: Any = None) -> str:
    """An option as the command line has it."""
    return f"--{name.replace('_', '-')}" if value is None else f"--{name.replace('_', '-')} {value}"


class _Fields(dict[str, Any]):
    """The fields of an error, for str.format: what begins with -- is an option, written as its front end does."""

    def __init__(self, fields: dict[str, Any], write: Write) -> None:
        super().__init__(fields)
        self.write, self.options = write, list[str]()

    def __getitem__(self, key: str) -> Any:
        if key == "setting":
            key = f"--{super().__getitem__(key)}"
        if not key.startswith("--"):
            value = super().__getitem__(key)
            return ", ".join(map(str, value)) if isinstance(value, list) else value
        option, _, value = key.lstrip("-").partition(" ")
        name, _, field = option.partition("=")
        self.options.append(name.replace("-", "_"))
        return self.write(self.options[-1], self[field] if field else value or None)


class PacelineError(Exception):
    """The base of every error that paceline prints without a traceback."""

    exit_code: ExitCode = ExitCode.FAILED
    code: str = ""
    """identifies the error, in kebab-case"""
    write: Write = staticmethod(flag)
    """how the front end that shows this error writes an option"""
    front_end: str = ""
    before: str = ""
    after: str = ""

    def __init__(self, text: str = "", *, code: str = "", **fields: Any) -> None:
        """Takes a code and fields (`value`: the wrong value, `allowed`: the valid choices), or a text.

        A text with a code was rendered by another process.
        """
        super().__init__(text or code)
        self.code, self.fields = code, fields

    def __str__(self) -> str:
        return f"{self.before}{self._rendered()[0]}{self.after}"

    def _rendered(self) -> tuple[str, list[str]]:
        text = super().__str__()
        if not self.code or text != self.code:
            return text, []
        fields, known = _Fields(self.fields, self.write), texts()
        text = known.get(self.front_end, {}).get(self.code) or known[self.code]
        return text.format_map(fields), fields.options

    @property
    def setting(self) -> str:
        """The wrong option: the first one in the text, as in the settings (global_batch)."""
        return next(iter(self._rendered()[1]), "")

    @property
    def shown(self) -> str:
        """The message with its code, for a terminal or a log."""
        return f"{self} [{self.code}]" if self.code else str(self)


class UsageError(PacelineError):
    """Wrong use. The text states the request, the facts, and what to do."""

    exit_code = ExitCode.USAGE

    @classmethod
    def of(cls, error: PacelineError, *, before: str = "", after: str = "") -> "UsageError":
        """`error` as wrong use, with a text `before` or `after` it."""
        if not error.code:
            return cls(f"{before}{error}{after}")
        found = cls(code=error.code, **error.fields)
        found.before, found.after = before + error.before, error.after + after
        return found


class TrainingError(PacelineError):
    """Training cannot continue. The text has the step and the rank."""

    def __init__(self, text: str = "", exit_code: ExitCode | None = None, **fields: Any) -> None:
        super().__init__(text, **fields)
        self.exit_code = type(self).exit_code if exit_code is None else exit_code


class StallError(TrainingError):
    """The guard ended the collective in which this rank waited for a rank that did not enter it."""

    exit_code = ExitCode.STALLED


class ReportedByPeer(PacelineError):  # noqa: N818 - no error to anybody
    """Another rank reports the error. This rank ends silently with the same exit code."""

    def __init__(self, message: str, exit_code: ExitCode) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def unknown(kind: str, asked: str, choices: Iterable[str], *, more: str = "") -> UsageError:
    """The error for a name that does not exist: the nearest valid one first, then all of them, then `more`."""
    choices = list(choices)
    near = difflib.get_close_matches(asked, choices, n=1)
    meant = f" Did you mean {near[0]!r}?" if near else ""
    return UsageError(code="unknown-name", kind=kind, value=asked, meant=meant, allowed=choices, more=more)


def first_few(words: Sequence[str], most: int, separator: str = ", ") -> str:
    """The first `most` of `words`, and how many more there are."""
    more = f" and {len(words) - most} more" if len(words) > most else ""
    return separator.join(words[:most]) + more


def plural(number: int, one: str, many: str | None = None) -> str:
    """1 step, 2 steps; `many` where it does not end with s."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"
