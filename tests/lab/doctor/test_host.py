"""The program on a host answers its requests, refuses everything else, measures links, and ends with its stdin."""

import errno
import json
import os
import secrets
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from paceline.lab.doctor.host import (
    ERRORS,
    MAX_CONNECTIONS,
    NO_ANSWER,
    TOKEN_SECONDS,
    WRONG_PROGRAM,
    ConnectTarget,
    LinkMeasurement,
    measure_links,
)

HOST = [sys.executable, "-P", "-m", "paceline.lab.doctor.host"]
TOKEN = secrets.token_hex(16)


def ask(*requests: dict[str, Any] | bytes) -> list[Any]:
    lines = b"".join(one if isinstance(one, bytes) else json.dumps(one).encode() + b"\n" for one in requests)
    done = subprocess.run(HOST, input=lines, capture_output=True, timeout=90)
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
    assert "longer than 1048576 bytes" in answers[0]["refused"]


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


@pytest.fixture
def port() -> Iterator[int]:
    """Where a host's program listens, in its own process."""
    with subprocess.Popen(HOST, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as host:
        assert host.stdin and host.stdout
        host.stdin.write(json.dumps({"type": "Examine", "token": TOKEN, "folder": "/"}).encode() + b"\n")
        host.stdin.flush()
        yield json.loads(host.stdout.readline())["port"]
        host.stdin.close()
        assert host.wait(5) == 0


def test_who_knows_the_token_gets_through_and_is_measured(port: int) -> None:
    target = ConnectTarget("127.0.0.1", port, TOKEN)
    near, far = measure_links((target, ConnectTarget("::1", port, TOKEN)), 2.0, 0.1).links
    assert near.error == far.error == ""
    assert 0 < near.round_trip_seconds < 5
    assert near.bytes_per_second > 1e6
    assert measure_links((target,), 2.0).links[0].bytes_per_second == 0


def test_who_does_not_know_the_token_gets_no_byte(port: int) -> None:
    with socket.create_connection(("127.0.0.1", port), timeout=5) as stranger:
        stranger.sendall(b"0" * len(TOKEN))
        assert stranger.recv(1) == b""


def test_who_answers_with_another_token_is_a_stranger() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=_answer_wrongly, args=(server,))
        thread.start()
        assert measure_links((ConnectTarget("127.0.0.1", server.getsockname()[1], TOKEN),), 2.0).links == (
            LinkMeasurement(WRONG_PROGRAM),
        )
        thread.join()


def _answer_wrongly(server: socket.socket) -> None:
    with server.accept()[0] as connection:
        connection.recv(len(TOKEN), socket.MSG_WAITALL)
        connection.sendall(b"0" * len(TOKEN))
        while data := connection.recv(100):
            connection.sendall(data)


def test_a_closed_port_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        closed = server.getsockname()[1]
    assert measure_links((ConnectTarget("127.0.0.1", closed, TOKEN),), 2.0).links == (
        LinkMeasurement(ERRORS[errno.ECONNREFUSED]),
    )


def test_a_server_that_is_silent_is_given_up_in_time() -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=1) as server:
        assert measure_links((ConnectTarget("127.0.0.1", server.getsockname()[1], TOKEN),), 0.3).links == (
            LinkMeasurement(NO_ANSWER),
        )


def test_strangers_do_not_use_up_the_places(port: int) -> None:
    for _ in range(MAX_CONNECTIONS + 10):
        with socket.create_connection(("127.0.0.1", port), timeout=5) as stranger:
            stranger.sendall(b"GET / HTTP/1.0\r\n\r\n" + b"x" * 32)
    assert measure_links((ConnectTarget("127.0.0.1", port, TOKEN),), 5.0).links[0].error == ""


@pytest.mark.slow
def test_silent_strangers_are_sent_away(port: int) -> None:
    with ExitStack() as stack:
        for _ in range(MAX_CONNECTIONS):
            stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=5))
        assert measure_links((ConnectTarget("127.0.0.1", port, TOKEN),), TOKEN_SECONDS + 5).links[0].error == ""
