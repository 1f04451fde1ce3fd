"""Which errors only say that other ranks are gone."""

import pytest

from paceline.errors import ExitCode, ReportedByPeer
from paceline.protocol.evidence import LOADER_KILLED, is_lost_peer_error

GLOO = "[rank0]: RuntimeError: [../gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:5120\n"


class DistNetworkError(RuntimeError):
    """As torch names it."""


class DistBackendError(RuntimeError):
    """As torch names it."""


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (DistNetworkError("The client socket has failed to connect"), True),
        (DistNetworkError("The server socket has failed to listen on any local network address"), False),
        (RuntimeError(GLOO), True),
        (RuntimeError("Timed out waiting 10000ms for recv operation to complete"), True),
        (DistBackendError("NCCL error: ncclRemoteError"), True),
        (DistBackendError("NCCL error: unhandled cuda error"), False),
        (ReportedByPeer("rank 2 tells", ExitCode.USAGE), True),
        (ValueError("bad sample 4711"), False),
        (ConnectionResetError(104, "Connection reset by peer"), False),  # the user's own download
        (RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed"), False),
    ],
)
def test_victims_by_their_words(error: Exception, expected: bool) -> None:
    assert is_lost_peer_error(error) is expected


def test_victim_behind_another_error() -> None:
    outer, ring = ValueError("epoch 3 failed"), ValueError("ring")
    outer.__cause__ = RuntimeError(GLOO)
    ring.__cause__ = ring
    assert is_lost_peer_error(outer) and not is_lost_peer_error(ring)


@pytest.mark.parametrize(
    ("message", "killed"),
    [
        ("DataLoader worker (pid 4711) is killed by signal: Killed. ", True),
        ("DataLoader worker (pid 4711) is killed by signal: Segmentation fault. ", False),
        ("ValueError: the worker was killed", False),
    ],
)
def test_torchs_message_about_a_killed_loader_worker_is_recognized(message: str, killed: bool) -> None:
    assert bool(LOADER_KILLED.search(message)) is killed
