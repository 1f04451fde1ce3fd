"""The errors of paceline, and the exit code of each.

    PacelineError            1  the run failed
    |-- UsageError           2  wrong use: paceline did not train and overwrote nothing
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
    STALLED = 3  # a rank made no progress; the guard reported it and ended the run
    MISMATCH = 4  # ranks called different collectives, are in a deadlock, or swallowed the error of a collective
    NOT_FINITE = 5  # NaN or infinity in a loss or a gradient
    DIVERGED = 6  # replicas that must be equal are not
    SAVED = 75  # sysexits.h EX_TEMPFAIL: the run saved its state and stopped; start it again to resume


MESSAGES_FOLDER = Path(__file__).with_name("messages")
OptionRenderer = Callable[[str, Any], str]  # renders (name of an option, its value or None) for a front end


@cache
def message_templates() -> dict[str, Any]:
    """The texts of all errors, by code. The table `session` has the texts for sessions."""
    by_code: dict[str, Any] = {"session": {}}
    for path in sorted(MESSAGES_FOLDER.glob("*.toml")):
        table = tomllib.loads(path.read_text())
        by_code["session"] |= table.pop("session", {})
        by_code |= table
    return by_code


def format_option(name: str, value: Any = None) -> str:
    return f"--{name.replace('_', '-')}" if value is None else f"--{name.replace('_', '-')} {value}"


class _Fields(dict[str, Any]):
    """The fields of an error, for str.format. A key that begins with -- is an option, which `write` renders."""

    def __init__(self, fields: dict[str, Any], write: OptionRenderer) -> None:
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
    code: str = ""  # identifies the error, in kebab-case
    render_option: OptionRenderer = staticmethod(format_option)
    """Renders an option for the front end that shows this error."""
    front_end: str = ""
    prefix: str = ""
    suffix: str = ""

    def __init__(self, text: str = "", *, code: str = "", **fields: Any) -> None:
        """Takes a code and fields (`value`: the wrong value, `allowed`: the valid choices), or a text.

        A text with a code was rendered by another process.
        """
        super().__init__(text or code)
        self.code, self.fields = code, fields

    def __str__(self) -> str:
        return f"{self.prefix}{self._rendered()[0]}{self.suffix}"

    def _rendered(self) -> tuple[str, list[str]]:
        text = super().__str__()
        if not self.code or text != self.code:
            return text, []
        fields, templates = _Fields(self.fields, self.render_option), message_templates()
        text = templates.get(self.front_end, {}).get(self.code) or templates[self.code]
        return text.format_map(fields), fields.options

    @property
    def wrong_setting_name(self) -> str:
        """The wrong option: the first one in the text, by its name in the settings (global_batch)."""
        return next(iter(self._rendered()[1]), "")

    @property
    def message_with_code(self) -> str:
        return f"{self} [{self.code}]" if self.code else str(self)


class UsageError(PacelineError):
    """Wrong use. The text states the request, the facts, and what to do."""

    exit_code = ExitCode.USAGE

    @classmethod
    def from_error(cls, error: PacelineError, *, before: str = "", after: str = "") -> "UsageError":
        """Convert `error` to a UsageError, with a text `before` or `after` its message."""
        if not error.code:
            return cls(f"{before}{error}{after}")
        usage_error = cls(code=error.code, **error.fields)
        usage_error.prefix, usage_error.suffix = before + error.prefix, error.suffix + after
        return usage_error


class TrainingError(PacelineError):
    """Training cannot continue. The message contains the step and the rank."""

    def __init__(self, text: str = "", exit_code: ExitCode | None = None, **fields: Any) -> None:
        super().__init__(text, **fields)
        self.exit_code = type(self).exit_code if exit_code is None else exit_code


class StallError(TrainingError):
    """The guard aborted a collective in which this rank waited for a rank that did not enter it."""

    exit_code = ExitCode.STALLED


class FaultyRankError(TrainingError):
    """An audit has named this rank, and the agents start the other ranks again."""


class ReportedByPeer(PacelineError):  # noqa: N818 - this rank reports no error
    """Another rank reports the error. This rank ends silently with the same exit code."""

    def __init__(self, message: str, exit_code: ExitCode) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def unknown_name_error(kind: str, value: str, choices: Iterable[str], *, more: str = "") -> UsageError:
    """The error for a name that does not exist. The message suggests a likely typo, then lists all `choices`."""
    choices = list(choices)
    matches = [x for x in difflib.get_close_matches(value, choices, n=1) if x[:1] == value[:1]]  # gpu is not xpu
    hint = f" Did you mean {matches[0]!r}?" if matches else ""
    return UsageError(code="unknown-name", kind=kind, value=value, meant=hint, allowed=choices, more=more)


def first_few(items: Sequence[str], most: int, separator: str = ", ") -> str:
    suffix = f" and {len(items) - most} more" if len(items) > most else ""
    return separator.join(items[:most]) + suffix


def plural(number: int, singular: str, many: str | None = None) -> str:
    """A number with its noun: 1 step, 2 steps. `many` is the plural if it is irregular."""
    return f"{number:,} {singular if number == 1 else many or singular + 's'}"
