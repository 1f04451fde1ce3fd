"""Assert which error was raised by its code and fields, not by its text."""

import re
import subprocess
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import pytest

from paceline.errors import PacelineError, UsageError

SHOWN = re.compile(r"\[([a-z0-9]+(?:-[a-z0-9]+)*)\]$", re.MULTILINE)


@contextmanager
def raises(
    code: str, *, raised: type[PacelineError] = UsageError, **fields: Any
) -> Generator[pytest.ExceptionInfo[PacelineError]]:
    """As pytest.raises: an error of that `code`, with these fields (`setting`: the option that is wrong)."""
    with pytest.raises(raised) as caught:
        yield caught
    check(caught.value, code, **fields)


def check(error: PacelineError, code: str, **fields: Any) -> None:
    """Assert the code of an error, and some of its fields."""
    assert error.code == code, str(error)
    found = {**error.fields, "setting": error.wrong_setting_name}
    assert {name: found.get(name) for name in fields} == fields, str(error)


def ended_with(done: subprocess.CompletedProcess[str], code: str, *, exit_code: int = 2) -> None:
    """Assert that a command has ended with this error, printed once."""
    assert (done.returncode, codes(done.stderr)) == (exit_code, [code]), done.stdout + done.stderr


def codes(text: str) -> list[str]:
    """The codes that a command has printed at the ends of lines."""
    return SHOWN.findall(text)
