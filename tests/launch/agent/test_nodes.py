"""Several nodes as one run: the agents are real, and meet over TCP on this machine's loopback."""

import json
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
from tests.errors import codes
from tests.launch.agent.nodes_harness import Nodes, several

from paceline.protocol.job import Host
from paceline.runs.machine import ClockOffset, decode_record

pytestmark = pytest.mark.sample(3)


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Callable[..., Nodes]]:
    """Makes runs of several nodes, each in a folder of its own."""
    with ExitStack() as stack:

        def make(code: str, **settings: Any) -> Nodes:
            folder = tmp_path / f"n{len([*tmp_path.iterdir()])}"
            folder.mkdir()
            return stack.enter_context(several(folder, code, **settings))

        yield make


def survivors(run: Nodes) -> list[int]:
    """Workers that still run, of any attempt."""
    mark = str(run.folder / "worker.py")
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        if mark in (process.info["cmdline"] or []) and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(process.pid)
    return found


def test_ranks_are_given_in_the_order_of_nodes_and_all_meet_at_node_0(nodes) -> None:
    names = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK MASTER_ADDR MASTER_PORT GLOO_SOCKET_IFNAME"
    run = nodes(
        f"import json; (folder / f'env-{{rank}}').write_text(json.dumps([os.environ[n] for n in {names.split()!r}]))",
        nodes=3,
        nproc=2,
    )
    run.start(2, 0, 1)
    assert run.codes() == [0, 0, 0]
    told = [json.loads((run.run_dir / "attempt-1" / f"env-{rank}").read_text()) for rank in range(6)]
    ports = [told[rank][6] for rank in (0, 2, 4)]  # each of its own agent, which brings its workers to the store
    assert told == [
        [str(rank), "6", str(rank % 2), "2", str(rank // 2), "127.0.0.1", ports[rank // 2], "lo"] for rank in range(6)
    ]


def test_a_failure_on_any_node_is_the_exit_code_of_all_and_told_once(nodes) -> None:
    run = nodes("if rank == 3: fail(ValueError('bad'), 7)\nforever()")
    run.start(0, 1)
    assert run.codes() == [7, 7]
    assert "rank 3 (" in run.said(0) and "ValueError: bad" in run.said(0)
    assert run.said(1) == ""
    assert not survivors(run)


def test_who_only_lost_its_peers_is_not_named_even_if_the_head_sees_it_first(nodes) -> None:
    run = nodes(
        "if rank == 0: time.sleep(0.5); fail(DistNetworkError('connection closed by peer'))\n"
        "if rank == 2: time.sleep(0.8); fail(KeyError('culprit'), cleanup=1.0)\n"
        "forever()"
    )
    run.start(0, 1)
    assert run.codes() == [1, 1]
    assert "rank 2 (" in run.said(0) and "KeyError" in run.said(0)


@pytest.mark.parametrize("ordered", [(0,), (1,), (0, 1)], ids=["node 0", "node 1", "both, as srun does"])
def test_an_order_to_any_agents_is_one_and_stops_all_in_good_order(nodes, ordered: tuple[int, ...]) -> None:
    run = nodes("def later(*_): time.sleep(1.0); sys.exit(75)\nsignal.signal(signal.SIGTERM, later)\nforever()")
    run.start(0, 1)
    for rank in range(4):
        run.wait_for(f"ready-{rank}")
    for number in ordered:
        run.agents[number].send_signal(signal.SIGUSR1)
    assert run.codes() == [75, 75]


def test_a_second_order_ends_all_at_once(nodes) -> None:
    run = nodes("signal.signal(signal.SIGTERM, signal.SIG_IGN)\nforever()")
    run.start(0, 1)
    run.wait_for("ready-3")
    run.agents[1].send_signal(signal.SIGTERM)
    time.sleep(0.5)
    begun = time.monotonic()
    run.agents[1].send_signal(signal.SIGTERM)
    assert run.codes() == [143, 143]
    assert time.monotonic() - begun < 25.0  # not the 30 s of the grace
    assert not survivors(run)


@pytest.mark.parametrize("ordered", [False, True], ids=["alone", "and srun tells the others to end"])
def test_a_killed_agent_takes_its_node_with_it_and_is_named(nodes, *, ordered: bool) -> None:
    run = nodes("forever()")
    run.start(0, 1)
    run.wait_for("ready-3")
    run.agents[1].kill()
    if ordered:
        run.agents[0].send_signal(signal.SIGTERM)
    assert run.codes() == [1, -signal.SIGKILL]
    assert "node 1 (" in run.said(0) and "is lost" in run.said(0)
    if not ordered:
        assert "ranks 2, 3" in run.said(0) and "--nodes 2" in run.said(0).splitlines()[-1]
    assert not survivors(run)


def test_without_node_0_the_others_end_and_say_how_to_go_on(nodes) -> None:
    run = nodes("forever()", nodes=3, nproc=1)
    run.start(0, 1, 2)
    run.wait_for("ready-2")
    run.agents[0].kill()
    assert run.codes(20.0) == [-signal.SIGKILL, 1, 1]
    for number in (1, 2):
        assert f"node {number} (" in run.said(number) and "has lost node 0" in run.said(number)
        assert run.said(number).rstrip().endswith(f" auto --run-dir {run.run_dir}")
    assert not survivors(run)


def test_min_nodes_lets_the_run_go_on_without_a_lost_node(nodes) -> None:
    run = nodes(
        "world = int(os.environ['WORLD_SIZE'])\n(folder / f'world-{world}-{rank}-{generation}').touch()\n"
        "if world == 4: sys.exit(0)\nforever()",
        nodes=3,
        nproc=2,
        min_nodes=2,
    )
    run.start(0, 1, 2)
    run.wait_for("world-6-5-0")
    run.agents[1].kill()
    assert run.codes() == [0, -signal.SIGKILL, 0]
    made = sorted(path.name for path in (run.run_dir / "attempt-1").glob("world-4-*"))
    assert made == [f"world-4-{rank}-1" for rank in range(4)]
    assert "4 ranks on 2 nodes" in run.said(0)


def test_a_killed_worker_is_restarted_on_all_nodes_together(nodes) -> None:
    run = nodes(
        "(folder / f'generation-{generation}-{rank}').touch()\n"
        "if generation == 1: sys.exit(0)\n"
        "if rank == 3: ready(); time.sleep(0.3); os.kill(os.getpid(), 9)\nforever()",
        max_restarts=1,
    )
    run.start(0, 1)
    assert run.codes() == [0, 0]
    assert len(list((run.run_dir / "attempt-1").glob("generation-1-*"))) == 4
    assert "rank 3 (" in run.said(0) and "restart 1 of 1: 4 ranks" in run.said(0)


@pytest.mark.parametrize("then", ["pass", "raise UsageError('no such folder here')"], ids=["starts", "cannot"])
def test_a_stop_while_another_node_is_still_starting_ends_all_in_good_order(nodes, then: str) -> None:
    slow = f"""
import runpy, sys, time
from paceline.errors import UsageError
from paceline.launch.agent.workers import Workers
at_once = Workers.start
def late(*arguments):
    time.sleep(2)
    {then}
    return at_once(*arguments)
Workers.start = late
del sys.argv[1:5]  # python -P -m paceline.launch.agent
runpy.run_module("paceline.launch.agent", run_name="__main__")
"""
    run = nodes("forever()")
    run.start(1, through=(sys.executable, "-c", slow))
    run.start(0)
    run.wait_for("ready-0")
    begun = time.monotonic()
    run.agents[0].send_signal(signal.SIGTERM)
    assert run.codes() == [143, 143], run.said(0) + run.said(1)
    assert time.monotonic() - begun < 25.0  # not the 30 s of the grace
    assert run.said(0).splitlines()[-1] == "stopped by SIGTERM" and run.said(1) == ""
    assert not survivors(run)


@pytest.mark.soak
def test_a_frozen_node_is_lost_after_15_s(nodes) -> None:
    run = nodes("forever()")
    run.start(0, 1)
    run.wait_for("ready-3")
    begun = time.monotonic()
    run.agents[1].send_signal(signal.SIGSTOP)
    try:
        assert run.agents[0].wait(30) == 1
        assert 13.0 < time.monotonic() - begun < 25.0
        assert re.search("for 1[56] s", run.said(0))
    finally:
        run.agents[1].send_signal(signal.SIGCONT)
    assert run.agents[1].wait(20) == 1
    assert not survivors(run)


# ---- coming together -----------------------------------------------------------------------------------------------


def test_a_missing_node_is_named_and_not_waited_for_for_ever(nodes) -> None:
    run = nodes("forever()", nodes=3, nproc=1, join_seconds=2.0, hosts=tuple(map(Host, ("n1", "n2", "n3"))))
    run.start(0, 1)
    assert run.codes() == [1, 1]
    assert codes(run.said(0)) == ["nodes-missing"] and "node 2 (n3)" in run.said(0)


def test_without_a_head_a_node_says_where_it_looks_and_why_it_fails(nodes) -> None:
    run = nodes("forever()", join_seconds=1.5)
    run.start(1)
    assert run.codes() == [1]
    assert codes(run.said(1)) == ["node-0-not-found"] and "127.0.0.1" in run.said(1) and "refused" in run.said(1)


def test_two_jobs_on_the_same_ports_both_work(nodes) -> None:
    ports = tuple(range(26500, 26508))
    both = [nodes("time.sleep(0.5)", node0_ports=ports) for _ in range(2)]
    for run in both:
        run.start(1, 0)
    assert [run.codes() for run in both] == [[0, 0], [0, 0]]


@pytest.mark.slow
def test_two_jobs_with_the_same_requested_port_one_is_refused_clearly(nodes) -> None:
    first, second = (nodes("forever()", node0_ports=(26600,), join_seconds=3.0) for _ in range(2))
    first.start(0, 1)
    first.wait_for("ready-3")
    second.start(0, 1)
    assert second.codes() == [2, 1]
    assert codes(second.said(0)) == ["ports-in-use"] and "26600" in second.said(0)
    assert codes(second.said(1)) == ["node-0-not-found"] and "secret" in second.said(1)
    assert [agent.poll() for agent in first.agents.values()] == [None, None]


def test_the_same_number_twice_or_another_number_of_nodes_is_refused(nodes) -> None:
    run = nodes("forever()", nodes=3)
    run.start(0, 1)
    other = json.loads(run.plan_file.read_bytes())
    wrong = run.folder / "wrong.json"
    wrong.write_bytes(msgspec.json.encode({**other, "nodes": 4}))
    time.sleep(1.0)
    run.start(3, plan_file=wrong)
    assert run.codes() == [2, 2, 2]
    assert codes(run.said(0)) == ["node-not-accepted"] and "node 3 (" in run.said(0)


@pytest.mark.needs("faketime")
def test_a_clock_that_is_a_minute_behind_is_told_and_does_no_harm(nodes) -> None:
    run = nodes(
        "import contextlib\nlog = folder.parent / 'machine-0.jsonl'\n"
        "while not (log.exists() and b'\"clock\"' in log.read_bytes()):\n"
        "    with contextlib.suppress(OSError): time.sleep(0.05)  # of faketime's, now and then\n"
        "(folder / f'world-{os.environ[\"WORLD_SIZE\"]}-{rank}').touch()"
    )
    run.start(0)
    run.start(1, through=("env", "FAKETIME_DONT_FAKE_MONOTONIC=1", "faketime", "-f", "-60s"))
    assert run.codes() == [0, 0], run.said(0) + run.said(1)
    assert re.search(r" clock is -(59\.[5-9]|60\.[0-5]) s ", run.said(0)), run.said(0)
    assert len(list((run.run_dir / "attempt-1").glob("world-4-*"))) == 4
    records = map(decode_record, (run.run_dir / "machine-0.jsonl").read_bytes().splitlines())
    clocks = [record for record in records if isinstance(record, ClockOffset)]
    assert clocks and {one.node for one in clocks} == {1}
    assert all(abs(one.ahead_seconds + 60.0) <= one.error_seconds < 1.0 for one in clocks), clocks


@pytest.mark.slow
def test_a_run_folder_that_another_run_holds_is_refused(nodes) -> None:
    first = nodes("forever()")
    first.start(0, 1)
    first.wait_for("ready-3")
    second = nodes("forever()", run_dir=str(first.run_dir), join_seconds=15.0)
    second.start(0)
    assert second.codes() == [2]
    assert codes(second.said(0)) == ["run-is-active"]
