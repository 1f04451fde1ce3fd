"""What a thousand nodes must not cost their head: in counts, on 100 nodes. `make bench-thousand` takes the times."""

import os
import resource
import select
import signal
import socket
import time
from collections import Counter
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Thread

import pytest
from msgspec.structs import replace
from tests.guard.test_guard_judge import BEFORE, WAITS, op, rank

from paceline.guard.detectors import StallAlarm
from paceline.guard.judge import diagnose
from paceline.guard.report import MAX_RANK_FILES, select_ranks_to_record
from paceline.guard.waits import build_wait_for_graph, group_ranks_by_waits, reachable_ranks
from paceline.host.facts import gather_facts
from paceline.host.procfs import raise_open_file_limit
from paceline.launch.agent.channel import (
    MAX_HANDSHAKES,
    Hello,
    Link,
    Listener,
    NodeHeartbeat,
    authenticate_to_coordinator,
    connect_to_coordinator,
)
from paceline.launch.agent.cluster import Generation, RemoteNodes
from paceline.launch.agent.joining import MAX_ALL_PAIRS_NODES, nodes_to_probe
from paceline.launch.agent.monitor import Monitor
from paceline.launch.agent.workers import Workers
from paceline.launch.plan import Command
from paceline.launch.ssh.sessions import Sessions
from paceline.protocol.control import StopSignals, signal_wakeup
from paceline.protocol.evidence import Diagnosis, DiagnosisKind, RankSample
from paceline.protocol.job import NodePlan, NodeRanks

SECRET = "5e" * 32
NODES = 100


@contextmanager
def crew_of(nodes: int) -> Generator[tuple[RemoteNodes, list[Link]]]:
    """A head's cluster, and the other ends of its links."""
    plan = NodePlan(("true",), nproc=1, nodes=nodes, node0_ports=(0,), secret=SECRET)
    with signal_wakeup(()) as wakeup:
        cluster, facts, links = RemoteNodes(plan, StopSignals(wakeup, lifeline=False)), gather_facts(), list[Link]()

        def come() -> None:
            for node in range(1, nodes):
                link = connect_to_coordinator("127.0.0.1", cluster.port, bytes.fromhex(SECRET))
                link.send(Hello(node, nodes, 1, 0, replace(facts, host=f"n{node}"), (node,)))
                links.append(link)

        thread = Thread(target=come)
        thread.start()
        deadline = time.monotonic() + 60.0
        while len(cluster.members) < nodes - 1 and time.monotonic() < deadline:
            cluster.wait_for_events(0.2)
        thread.join()
        try:
            yield cluster, links
        finally:
            for link in links:
                link.end("the test is over")
            cluster.end(0)


def beat(node: int, step: int, code: int | None = None) -> NodeHeartbeat:
    return NodeHeartbeat(0, (RankSample(node, f"n{node}", 1, node, code, step=step),))


def test_only_links_that_have_said_something_are_read_and_signs_of_life_wake_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read: Counter[Link] = Counter()
    receive = Link.receive
    with crew_of(NODES) as (cluster, links):
        assert len(cluster.present_nodes) == NODES - 1
        cluster.wait_for_events(0.1)
        monkeypatch.setattr(Link, "receive", lambda link: (read.update([link]), receive(link))[1])
        monkeypatch.setattr("paceline.launch.agent.channel.BEAT_SECONDS", 3600.0)  # else all are looked at, once a beat
        links[6].send(beat(7, 1))  # that its worker has not ended was not known before
        cluster.wait_for_events(20.0)
        for step in (2, 3, 4):
            links[6].send(beat(7, step))
            begun = time.monotonic()
            cluster.wait_for_events(0.15)
            assert time.monotonic() - begun >= 0.15  # nobody was woken
            assert [one.step for one in cluster.members[7].worker_samples()] == [step]  # and yet it was taken in
        links[6].send(beat(7, 5, code=1))
        begun = time.monotonic()
        cluster.wait_for_events(60.0)
        assert time.monotonic() - begun < 30.0 and cluster.members[7].worker_samples()[0].code == 1
        assert set(read) == {cluster.members[7].link} and read.total() <= 8


def test_connections_of_a_node_that_was_silent_get_as_long_again_to_recover_before_the_network_is_blamed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("paceline.launch.agent.monitor.why_nodes_unreachable", lambda *_: [])
    plan = NodePlan(("true",), nproc=1, ranks=NodeRanks(world_size=3))
    waiting = [rank(n, BEFORE, WAITS) for n in range(3)]
    with crew_of(3) as (cluster, _):
        guarding = Monitor(Generation(plan, Workers(plan, 0, 0), cluster))
        judged = guarding._stall(waiting, StallAlarm("stall", 12.0, 10.0))
        assert judged is not None and judged.diagnosis.kind is DiagnosisKind.NETWORK
        cluster.wait_for_events(0.0)
        assert cluster.settled_seconds == 0.0
        cluster.members[2].link.heard_seconds -= 10.0
        cluster._beat_seconds = 0.0
        cluster.wait_for_events(0.0)
        assert 10.0 < cluster.settled_seconds - time.monotonic() < 20.0
        assert guarding._stall(waiting, StallAlarm("stall", 12.0, 10.0)) is None


def test_a_link_that_has_got_a_closed_ones_descriptor_is_heard() -> None:
    with crew_of(3) as (cluster, links):
        links[0].end("powered off")
        deadline = time.monotonic() + 20.0
        while not cluster.members[1].lost and time.monotonic() < deadline:
            cluster.wait_for_events(0.2)
        assert [member.hello.node for member in cluster.present_nodes] == [2]
        links[1].send(beat(2, 9))
        cluster.wait_for_events(20.0)
        assert cluster.members[2].worker_samples()[0].step == 9


def test_an_agent_waits_for_descriptors_that_select_does_not_know() -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with signal_wakeup(()) as wakeup:
        resource.setrlimit(resource.RLIMIT_NOFILE, (512, limits[1]))
        raise_open_file_limit(1500)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == min(1500, limits[1])
        reader, writer = os.pipe()
        high = 1400
        os.dup2(reader, high)
        with pytest.raises(ValueError, match="out of range"):
            select.select([high], [], [], 0.0)
        os.write(writer, b"x")
        pipe = os.fdopen(high, "rb")
        assert StopSignals(wakeup, lifeline=False).wait(20.0, [pipe]) is False
        pipe.close()
        os.close(reader)
        os.close(writer)
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.parametrize("count", [2, 3, MAX_ALL_PAIRS_NODES, MAX_ALL_PAIRS_NODES + 1, 100, 1000])
def test_each_node_tries_few_others_and_no_split_of_the_nodes_goes_unseen(count: int) -> None:
    tries = {node: nodes_to_probe(node, count) for node in range(count)}
    assert all(node not in others and len(others) == len({*others}) for node, others in tries.items())
    if count <= MAX_ALL_PAIRS_NODES:
        assert all(len(others) == count - 1 for others in tries.values())
    assert all(len(others) <= 2 * (count - 1).bit_length() or count <= MAX_ALL_PAIRS_NODES for others in tries.values())
    assert min(Counter(other for others in tries.values() for other in others).values()) >= min(count - 1, 8)
    assert reachable_ranks([0], tries) == {*range(count)}


def test_strangers_who_hold_the_door_do_not_keep_a_node_out() -> None:
    door = Listener((0,), bytes.fromhex(SECRET))
    strangers = [socket.create_connection(("127.0.0.1", door.port)) for _ in range(MAX_HANDSHAKES + 20)]
    assert door.take_new_links() == [] and door.take_new_links() == []
    assert len(door.sockets()) <= 1 + MAX_HANDSHAKES
    near = socket.create_connection(("127.0.0.1", door.port))
    with ThreadPoolExecutor(1) as pool:
        node = pool.submit(authenticate_to_coordinator, near, bytes.fromhex(SECRET))
        while not node.done():
            door.take_new_links()
            time.sleep(0.005)
        node.result().end("the test is over")
    door.close()
    for one in strangers:
        one.close()


def test_ranks_that_wait_for_the_same_share_one_list_of_those() -> None:
    ranks = [rank(n, BEFORE, *([WAITS] if n % 2 else []), groups={"0": ()}) for n in range(400)]
    graph = build_wait_for_graph(ranks)
    assert len(group_ranks_by_waits(graph)) == 2
    diagnosis = diagnose(ranks)
    assert diagnosis.causes == tuple(range(0, 400, 2))
    apart = diagnose([rank(n, BEFORE, op(9, shape="[4]") if n % 2 else WAITS, groups={"0": ()}) for n in range(400)])
    assert apart.kind is DiagnosisKind.MISMATCH and [len(party) for party in apart.tie] == [200, 200]


def test_of_thousands_of_ranks_a_diagnosis_keeps_the_blamed_and_one_of_each_kind() -> None:
    odd, causes = 700, 1999
    ranks = [rank(n, BEFORE, *([] if n == causes else [WAITS]), state="R" if n == odd else "S") for n in range(2000)]
    kept = [one.rank for one in select_ranks_to_record(Diagnosis(DiagnosisKind.BEHIND, (causes,)), ranks)]
    assert len(kept) == MAX_RANK_FILES and {0, odd, causes} <= {*kept} and kept == sorted(kept)
    assert len(select_ranks_to_record(Diagnosis(DiagnosisKind.UNKNOWN), ranks[:MAX_RANK_FILES])) == MAX_RANK_FILES


def test_ssh_sessions_log_in_a_few_at_a_time_and_all_of_them_in_the_end(tmp_path: Path) -> None:
    client = "touch in-$0; ls | grep -c in- > seen-$0; sleep 0.1; rm in-$0; echo here; exec cat > /dev/null"
    commands = [Command(f"n{node}", ("sh", "-c", f"cd {tmp_path}; {client}", str(node))) for node in range(20)]
    with signal_wakeup((signal.SIGCHLD,)) as wakeup:
        every = Sessions(commands, wakeup, fan_out=4)
        try:
            deadline = time.monotonic() + 60.0
            while not all(one.answered for one in every.all) and time.monotonic() < deadline:
                every.wait_for_output(1.0)
            assert all(one.answered for one in every.all)
        finally:
            every.close()
    seen = [int((tmp_path / f"seen-{node}").read_text()) for node in range(20)]
    assert 1 <= max(seen) <= 4, seen
