"""Ranks that attach to an agent: what it learns of their ends, and which of them it ends."""

import secrets
import signal
import socket
import sys
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from subprocess import PIPE, Popen

import pytest

from paceline.guard.deaths import RankEndKind, classify_rank_end, first_to_fail
from paceline.launch.agent.attach import AttachedWorkers
from paceline.protocol.job import NodePlan

RANK = """
import os, socket, sys, time
from paceline.protocol.control import RankExit, Hello, send
from paceline.protocol.status_page import make_status_page
agent = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
agent.connect(b"\\0" + sys.argv[1].encode())
send(agent, Hello(int(sys.argv[2])), (make_status_page(0), os.memfd_create("record")))
exec(sys.argv[3])
"""


@contextmanager
def attached(*acts: str, may_end: bool = False) -> Generator[tuple[AttachedWorkers, list[Popen[bytes]]]]:
    name, listener = secrets.token_hex(8), socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(b"\0" + name.encode())
    listener.listen()
    workers = AttachedWorkers(NodePlan(argv=(), nproc=len(acts), attach=listener.detach(), may_end=may_end))
    ranks = [Popen([sys.executable, "-c", RANK, name, str(n), act], stdin=PIPE) for n, act in enumerate(acts)]
    with ExitStack() as ends:
        ends.callback(workers.close)
        for one in ranks:
            ends.enter_context(one)
            ends.callback(one.kill)
        while not workers.all_here:
            workers.wait(30.0, [])
        yield workers, ranks


def test_a_rank_says_how_it_ends_and_one_that_its_launcher_ends_is_a_victim() -> None:
    leaves = "sys.stdin.read(); send(agent, RankExit(7)); agent.recv(1); os._exit(7)"
    with attached("time.sleep(600)", leaves) as (workers, ranks):
        ranks[1].stdin.close()
        while workers.worker_samples()[1].code is None:
            workers.wait(30.0, [])
        assert workers.worker_samples()[1].code == 7 and ranks[1].poll() is None  # it waits until that has been heard
        workers.release_departing_ranks()
        assert ranks[1].wait(30) == 7
        ranks[0].send_signal(signal.SIGTERM)
        while (samples := workers.worker_samples())[0].code is None:
            workers.wait(30.0, [])
        assert classify_rank_end(samples[0]) is RankEndKind.VICTIM and first_to_fail(samples) == samples[1]


@pytest.mark.parametrize("may_end", [False, True])
def test_ranks_are_ended_only_if_the_plan_allows_it(*, may_end: bool) -> None:
    with attached("time.sleep(600)", may_end=may_end) as (workers, ranks):
        workers.stop(0.0)
        workers.kill_sessions()
        assert bool(workers.left) is not may_end and ranks[0].poll() == (-signal.SIGKILL if may_end else None)
