"""The program on a host answers what it is asked, refuses everything else, and ends with its stdin."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HOST = [sys.executable, "-P", "-m", "paceline.lab.doctor.host"]
TOKEN = "ab" * 16


def ask(*requests: dict[str, Any] | bytes) -> list[Any]:
    lines = b"".join(one if isinstance(one, bytes) else json.dumps(one).encode() + b"\n" for one in requests)
    done = subprocess.run(HOST, input=lines, capture_output=True, timeout=30)
    assert (done.returncode, done.stderr) == (0, b"")
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_what_is_no_request_is_refused_and_the_next_one_answered() -> None:
    lines = [
        b"\n",
        b"null\n",
        b"not json\n",
        b'{"type": "Run", "argv": ["id"]}\n',
        b'{"type": "AskTime", "extra": 1}\n',
        b'{"type": "Examine", "token": 7, "folder": "/tmp"}\n',
        b"\xff\xfe\n",
    ]
    answers = ask(*(one for line in lines for one in (line, {"type": "AskTime"})), b'{"type": "AskTime"}')  # cut off
    assert ["refused" in answer for answer in answers] == [True, False] * len(lines) + [True]
    assert all("wall_seconds" in answer for answer in answers[1::2])


def test_a_line_without_an_end_is_refused_before_it_fills_the_memory() -> None:
    answers = ask(b"x" * (3 << 20) + b"\n")
    assert len(answers) == 3  # piece by piece
    assert "more than 1048576 bytes" in answers[0]["refused"]


@pytest.mark.parametrize("token", ["../../../tmp/x", "a/b", "", "A" * 32, "ab" * 16 + "\n"])
def test_a_probe_file_is_named_by_hex_digits_only(tmp_path: Path, token: str) -> None:
    where = {"folder": str(tmp_path), "token": token}
    answers = ask(*({"type": "Probe", "act": act, **where} for act in ("write", "read", "remove")))
    assert ["32 hex digits" in answer["refused"] for answer in answers] == [True] * 3
    assert list(tmp_path.iterdir()) == []


def test_a_probe_is_written_seen_and_removed(tmp_path: Path) -> None:
    where = {"folder": str(tmp_path / "not" / "there" / "yet"), "token": TOKEN}
    acts = ("read", "write", "read", "write", "remove", "read")
    answers = ask(*({"type": "Probe", "act": act, **where} for act in acts))
    assert [not answer["error"] for answer in answers] == [False, True, True, False, True, False]  # never written over
    assert list(tmp_path.iterdir()) == []


def test_room_is_that_of_the_parent_that_is_there(tmp_path: Path) -> None:
    (answer,) = ask({"type": "Examine", "folder": str(tmp_path / "a" / "b"), "token": TOKEN})
    status = os.statvfs(tmp_path)
    assert answer["disk_path"] == str(tmp_path)
    assert answer["disk_size"] == status.f_blocks * status.f_frsize
    assert answer["facts"]["host"] == os.uname().nodename
