"""Ranks meet their own job only, and say whom they wait for: real processes on real ports."""

import os
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress

import pytest
from tests import warm
from tests.errors import codes, ended_with
from tests.rank.guard_ranks import rank_environment

from paceline.host.tcp import why_unreachable

pytestmark = [pytest.mark.ranks, pytest.mark.sample(2)]

RANK = """
import sys
import paceline.rank.rendezvous as meeting
meeting.FIRST_NOTICE_SECONDS = meeting.NOTICE_INTERVAL_SECONDS = 0.5  # 10 s and 30 s for people
from paceline.rank.attach import exit_worker, report_error
from paceline.rank.world import World, process_group
try:
    with process_group(World.from_env(device="cpu"), timeout_seconds=20, meeting_seconds=float(sys.argv[1])):
        import torch
        import torch.distributed as dist
        total = torch.ones(1)
        dist.all_reduce(total)
        print("met", int(total.item()), flush=True)
        if len(sys.argv) > 2:
            input()
except Exception as error:
    exit_worker(report_error(error))
exit_worker(0)
"""


@pytest.fixture
def port() -> Iterator[int]:
    with closing(socket.socket()) as held:  # bound, never listening: nobody is given it, and rank 0 may have it
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("", 0))
        yield held.getsockname()[1]


@pytest.fixture
def start() -> Iterator[object]:
    with ExitStack() as stack:
        yield lambda *args, **settings: stack.enter_context(running(*args, **settings))


@contextmanager
def running(
    rank: int, size: int, port: int, *, seconds: float = 20, stays: bool = False, env: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[str]]:
    own = {**os.environ, **rank_environment(rank, size, port), **(env or {})}
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    process = warm.Popen(["-c", RANK, seconds, *["stays"] * stays], rank=rank, env=own, text=True, **pipes)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def end(process: subprocess.Popen[str], seconds: float = 40) -> tuple[int, str, str]:
    done = result(process, seconds)
    return done.returncode, done.stdout, done.stderr


def result(process: subprocess.Popen[str], seconds: float = 40) -> subprocess.CompletedProcess[str]:
    out, err = process.communicate("\n", timeout=seconds)
    return subprocess.CompletedProcess([], process.returncode, out, err)


def test_the_ranks_of_one_job_meet_in_silence(start, port) -> None:
    ranks = [start(rank, 3, port, env={"PACELINE_RUN_ID": "one"}) for rank in range(3)]
    assert [end(process)[:2] for process in ranks] == [(0, "met 3\n")] * 3


def test_a_missing_rank_is_named_by_one_rank_until_all_give_up_at_the_stated_time(start, port) -> None:
    ranks = [start(rank, 4, port, seconds=4) for rank in (0, 2)]
    began = time.monotonic()
    first, second = [result(process) for process in ranks]
    ended_with(first, "ranks-did-not-meet", exit_code=1)
    assert second.returncode == 1  # its error may be the lost connection to rank 0
    assert first.stdout == "" and "paceline: after" in first.stderr
    assert "2 of 4 ranks" in first.stderr and f"127.0.0.1:{port}: rank 1, 3" in first.stderr
    assert "paceline: after" not in second.stderr or "cannot reach" in second.stderr  # rank 0 prints the message
    assert time.monotonic() - began < 20


def test_nobody_listening_is_said_with_the_reason_instead_of_minutes_of_silence(start, port) -> None:
    done = result(start(1, 2, port, seconds=3))
    ended_with(done, "ranks-did-not-meet", exit_code=1)
    assert f"127.0.0.1:{port}: refused" in done.stderr
    assert done.stderr.count("paceline: after") >= 2 and "[c10d]" not in done.stderr


def test_a_name_that_does_not_resolve_is_said(start, port) -> None:
    done = result(start(1, 2, port, seconds=2, env={"MASTER_ADDR": "n1.invalid"}))
    ended_with(done, "ranks-did-not-meet", exit_code=1)
    assert "n1.invalid: " in done.stderr


def test_a_port_that_accepts_and_says_nothing_is_no_hang(start) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as mute:
        done = result(start(1, 2, mute.getsockname()[1], seconds=3))
    ended_with(done, "ranks-did-not-meet", exit_code=1)
    assert "no store answers" in done.stderr


@pytest.mark.slow
def test_a_port_of_another_program_is_refused(start) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        rank = start(1, 2, server.getsockname()[1])
        threading.Thread(target=answer, args=(server,), daemon=True).start()
        code, _, err = end(rank)
        server.shutdown(socket.SHUT_RDWR)
    assert code == 2 and codes(err) == ["not-our-store"] and "Ping failed" in err


def answer(server: socket.socket) -> None:
    with suppress(OSError):
        while True:
            with closing(server.accept()[0]) as peer:
                if peer.recv(100):
                    peer.sendall(b"HTTP/1.1 400 Bad Request" + bytes(100))


def test_a_port_that_is_no_number_is_refused(start, port) -> None:
    ended_with(result(start(1, 2, port, env={"MASTER_PORT": "http"})), "master-port-invalid")


def test_two_jobs_on_one_port_are_not_merged_and_the_later_one_is_told(start, port) -> None:
    host = start(0, 2, port, stays=True, env={"PACELINE_RUN_ID": "one"})
    peer = start(1, 2, port, stays=True, env={"PACELINE_RUN_ID": "one"})
    assert host.stdout.readline() == peer.stdout.readline() == "met 2\n"
    strangers = [start(rank, 2, port, env={"PACELINE_RUN_ID": "two"}) for rank in range(2)]
    first, second = [result(process, 15) for process in strangers]
    ended_with(first, "master-port-taken")
    assert f"pid {host.pid} " in first.stderr
    ended_with(second, "another-job-answers")
    assert "one of 2 ranks" in second.stderr and "job two" in second.stderr
    assert [end(process)[0] for process in (host, peer)] == [0, 0]  # and these were not disturbed


def test_a_stranger_does_not_take_the_place_of_a_rank_that_is_still_to_come(start, port) -> None:
    host = start(0, 2, port, env={"PACELINE_RUN_ID": "one"})
    assert end(start(1, 2, port, env={"PACELINE_RUN_ID": "two"}), 15)[0] == 2
    peer = start(1, 2, port, env={"PACELINE_RUN_ID": "one"})
    assert [end(process)[:2] for process in (host, peer)] == [(0, "met 2\n")] * 2


def test_ranks_that_disagree_about_the_size_of_the_world_do_not_meet(start, port) -> None:
    host = start(0, 2, port, seconds=15)
    while why_unreachable("127.0.0.1", port):
        time.sleep(0.1)
    time.sleep(0.5)  # it opens its store first, and speaks then; who speaks second is refused
    code, _, err = end(start(1, 3, port), 15)
    assert code == 2 and "of 2 ranks" in err and "of 3 ranks" in err
    assert end(start(1, 2, port))[0] == 0 == end(host)[0]


def test_two_processes_of_one_rank_are_refused_naming_both(start, port) -> None:
    token = {"PACELINE_RUN_ID": "one"}
    ranks = [start(0, 3, port, env=token), *(start(1, 3, port, env=token) for _ in range(2))]
    began = time.monotonic()
    ends = [end(process) for process in ranks]
    assert [code for code, _, _ in ends] == [2, 2, 2] and time.monotonic() - began < 15  # nobody waits in vain
    for _, _, err in ends:
        assert codes(err) == ["rank-claimed-twice"] and "rank 1 of 3" in err
        assert all(f"{os.uname().nodename} pid {process.pid}" in err for process in ranks[1:])


def test_a_restarted_group_does_not_read_the_dead_ones_places(start, port) -> None:
    host = start(0, 2, port, stays=True)
    assert end(start(1, 2, port))[0] == 0 and host.stdout.readline() == "met 2\n"
    agents_store = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "1"}
    ranks = [start(rank, 2, port, env=agents_store) for rank in range(2)]
    assert [end(process)[:2] for process in ranks] == [(0, "met 2\n")] * 2
    end(host)
