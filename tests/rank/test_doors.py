"""Nobody but ranks gets in where ranks met: real sockets, and real neighbours who were faster."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing

import pytest

from paceline.rank import guard

NEIGHBOUR = """
import os, socket, sys
os.setgroups([]); os.setgid(65432); os.setuid(65432)
one = socket.socket()
one.connect(('127.0.0.1', int(sys.argv[1])))
print('in', flush=True)
sys.stdin.read()
"""


@pytest.fixture
def listening() -> Iterator[socket.socket]:
    with closing(socket.socket()) as one:
        one.bind(("127.0.0.1", 0))
        one.listen()
        yield one


def connects(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), 0.5):
            return True
    except OSError:
        return False


@pytest.mark.parametrize("way", ["signatures", "filter"])
def test_a_door_is_shut_to_new_ones_and_who_is_in_stays(listening: socket.socket, monkeypatch, way) -> None:
    if os.geteuid() != 0 and way == "filter":
        pytest.skip("needs root: newer kernels let nobody else filter")
    monkeypatch.setattr(guard, *(("_filter", lambda _: False) if way == "signatures" else ("sign", lambda *_: False)))
    port = listening.getsockname()[1]
    with socket.create_connection(("127.0.0.1", port)) as early:
        assert guard.shut([listening.fileno(), early.fileno()])
        inside, _ = listening.accept()
        with inside:
            assert not connects(port)
            early.sendall(b"word")
            assert inside.recv(10) == b"word"
            inside.sendall(b"back")
            assert early.recv(10) == b"back"


def test_what_cannot_be_shut_is_said(listening: socket.socket, monkeypatch) -> None:
    for way in ("sign", "_filter"):
        monkeypatch.setattr(guard, way, lambda *_: False)
    assert not guard.shut([listening.fileno()])
    assert guard.shut([]) and connects(listening.getsockname()[1])


def test_ones_own_connections_are_no_strangers(listening: socket.socket) -> None:
    with socket.create_connection(listening.getsockname()) as one:
        other, _ = listening.accept()
        with other:
            assert guard.strangers([listening.fileno(), one.fileno(), other.fileno()]) == []


@pytest.mark.root
def test_a_neighbour_who_was_faster_than_a_rank_is_found(listening: socket.socket) -> None:
    words = (sys.executable, "-S", "-c", NEIGHBOUR, str(listening.getsockname()[1]))
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as neighbour:
        assert neighbour.stdout is not None and neighbour.stdout.readline() == "in\n"
        stranger, _ = listening.accept()
        with stranger:
            assert guard.strangers([listening.fileno(), stranger.fileno()]) == ["65432"]
        neighbour.communicate("")
