"""A worker of ours: what its main returns or raises is how the process ends, and is said once."""

from __future__ import annotations

import subprocess
import sys

import pytest

WORKER = """
import atexit, sys
from paceline.errors import UsageError
from paceline.rank.attach import run_worker

def main(arguments):
    atexit.register(print, "tidied up")
    print("worked on", arguments)
    if arguments == ["refused"]:
        raise UsageError("there is no such thing")
    if arguments == ["broken"]:
        raise ValueError("bad sample 4711")
    return int(arguments[0])

run_worker(main)
"""


@pytest.mark.parametrize(
    ("argument", "code", "first", "last"),
    [
        ("0", 0, "", ""),
        ("75", 75, "", ""),
        ("refused", 2, "paceline: there is no such thing", "paceline: there is no such thing"),
        ("broken", 1, "Traceback (most recent call last):", "ValueError: bad sample 4711"),
    ],
)
def test_a_worker_ends_as_its_main_does_with_all_that_it_has_said(
    argument: str, code: int, first: str, last: str
) -> None:
    run = subprocess.run([sys.executable, "-c", WORKER, argument], capture_output=True, text=True, timeout=50)
    assert run.returncode == code, run.stderr
    assert run.stdout == f"worked on ['{argument}']\ntidied up\n"
    said = run.stderr.splitlines() or [""]
    assert (said[0], said[-1]) == (first, last)
