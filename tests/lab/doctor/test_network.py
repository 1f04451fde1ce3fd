"""How an attempt to connect ends is told rightly, and the listener is for those who know the token."""

from __future__ import annotations

import errno
import json
import secrets
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from paceline.lab.doctor.host import ERRORS, KNOCK_SECONDS, MAX_VISITORS, NO_ANSWER, STRANGER, try_targets
from paceline.lab.doctor.messages import Link, Target

TOKEN = secrets.token_hex(16)


@pytest.fixture
def port() -> Iterator[int]:
    """Where a host's program listens, in its own process."""
    with subprocess.Popen(
        [sys.executable, "-P", "-m", "paceline.lab.doctor.host"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as host:
        assert host.stdin and host.stdout
        host.stdin.write(json.dumps({"type": "Examine", "token": TOKEN, "folder": "/"}).encode() + b"\n")
        host.stdin.flush()
        yield json.loads(host.stdout.readline())["port"]
        host.stdin.close()
        assert host.wait(5) == 0


def test_who_knows_the_token_gets_through_and_is_measured(port: int) -> None:
    target = Target("127.0.0.1", port, TOKEN)
    near, far = try_targets((target, Target("::1", port, TOKEN)), 2.0, 0.1).links
    assert near.error == far.error == ""
    assert 0 < near.round_trip_seconds < 5
    assert near.bytes_per_second > 1e6
    assert try_targets((target,), 2.0).links[0].bytes_per_second == 0


def test_who_does_not_know_the_token_gets_no_byte(port: int) -> None:
    with socket.create_connection(("127.0.0.1", port), timeout=5) as stranger:
        stranger.sendall(b"0" * len(TOKEN))
        assert stranger.recv(1) == b""


def test_who_answers_with_another_token_is_a_stranger() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=_answer_wrongly, args=(server,))
        thread.start()
        assert try_targets((Target("127.0.0.1", server.getsockname()[1], TOKEN),), 2.0).links == (Link(STRANGER),)
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
    assert try_targets((Target("127.0.0.1", closed, TOKEN),), 2.0).links == (Link(ERRORS[errno.ECONNREFUSED]),)


def test_a_server_that_is_silent_is_given_up_in_time() -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=1) as server:
        assert try_targets((Target("127.0.0.1", server.getsockname()[1], TOKEN),), 0.3).links == (Link(NO_ANSWER),)


def test_strangers_do_not_use_up_the_places(port: int) -> None:
    for _ in range(MAX_VISITORS + 10):
        with socket.create_connection(("127.0.0.1", port), timeout=5) as stranger:
            stranger.sendall(b"GET / HTTP/1.0\r\n\r\n" + b"x" * 32)
    assert try_targets((Target("127.0.0.1", port, TOKEN),), 5.0).links[0].error == ""


@pytest.mark.slow
def test_silent_strangers_are_sent_away(port: int) -> None:
    with ExitStack() as stack:
        for _ in range(MAX_VISITORS):
            stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=5))
        assert try_targets((Target("127.0.0.1", port, TOKEN),), KNOCK_SECONDS + 5).links[0].error == ""
