"""Hosts come and go while a run is on its way: real agents, and workers that hear that they are to save and end."""

import json
import os
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from tests.errors import codes, raises
from tests.launch.agent.nodes_harness import Nodes, several

from paceline.host.facts import gather_facts
from paceline.launch.agent import joining
from paceline.launch.agent.channel import Hello, ReachabilityReply, StartReply
from paceline.launch.agent.cluster import RemoteNode
from paceline.launch.agent.joining import JoinQueue, check_compatible
from paceline.protocol.job import Host, NodePlan
from paceline.runs.attempt import read_nodes

# rank 0 hears it, as of a training; that the others end with it is in a training what the vote in the totals does
STEPS = """
from paceline.protocol.control import WorkerSpec
from paceline.protocol.status_page import StatusPage
box, world = StatusPage.from_descriptor(WorkerSpec.from_environment().page), os.environ["WORLD_SIZE"]
(folder / f"world-{world}-rank-{rank}-generation-{generation}").touch()
if (folder / "broken").exists() and rank >= 4:
    fail(ValueError("other data here"), 2)
step = 0
while not (folder / "enough").exists():
    step += 1
    if not (folder / "broken").exists():
        box.set_step(step)
    if rank == 0 and box.get_request("regroups"):
        (folder / f"saved-{generation}").touch()
    if (folder / f"saved-{generation}").exists():
        sys.exit(75)
    time.sleep(0.02)
"""

OTHER_TORCH = """
import runpy, sys
from msgspec.structs import replace
import paceline.launch.agent.follower as follower
facts = follower.gather_facts()
follower.gather_facts = lambda: replace(facts, packages={**facts.packages, "torch": "1.0"})
del sys.argv[1:5]  # python -P -m paceline.launch.agent
runpy.run_module("paceline.launch.agent", run_name="__main__")
"""


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Nodes]:
    """Two nodes of a run for one to three, in its first steps."""
    with several(tmp_path, STEPS, nodes=3, min_nodes=1, hosts=(Host("a"), Host("b")), join_seconds=20.0) as run:
        run.start(1, 0)
        run.wait_for("world-4-rank-3-generation-0")
        yield run


def invitation(run: Nodes) -> Path:
    return run.run_dir / "attempt-1" / "join.json"


def joins(run: Nodes, number: int, **changes: object) -> None:
    """What `paceline join` starts; `number` is only this test's name for it."""
    plan = json.loads(invitation(run).read_bytes()) | changes
    file = run.folder / f"join-{number}.json"
    file.write_bytes(msgspec.json.encode(plan))
    file.chmod(0o600)
    run.start(number, plan_file=file, instead=("--join",))


def nodes_line(run: Nodes) -> str:
    found = read_nodes(run.run_dir / "attempt-1")
    assert found is not None
    return found.format_line


def end(run: Nodes, *numbers: int) -> None:
    """End the run; these agents, which are in it, end well."""
    (run.run_dir / "attempt-1" / "enough").touch()
    assert [run.agents[number].wait(20) for number in numbers] == [0] * len(numbers), run.said(0)
    assert not invitation(run).exists()


def test_a_lost_node_comes_back_a_new_one_joins_and_leaves_again(run: Nodes) -> None:
    assert invitation(run).stat().st_mode & 0o777 == 0o600
    run.agents[1].kill()
    run.wait_for("world-2-rank-1-generation-1")
    run.start(1)
    run.wait_for("world-4-rank-3-generation-2")
    assert "4 ranks on 2 nodes" in run.said(0)
    joins(run, 2)
    run.wait_for("world-6-rank-5-generation-3")
    assert nodes_line(run).startswith("3 in (--nodes 1:3)") and "node 2 (" in run.said(2)
    run.agents[2].send_signal(signal.SIGINT)  # only this one leaves
    run.wait_for("world-4-rank-3-generation-4")
    assert run.agents[2].wait(10) == 0
    assert "left: " in nodes_line(run)
    end(run, 0, 1)


@pytest.mark.slow
def test_who_may_not_come_in_is_told_why_and_the_run_goes_on(run: Nodes) -> None:
    run.start(1)  # a second one that says it is node 1
    run.start(12, through=(sys.executable, "-c", OTHER_TORCH), number=2)
    joins(run, 13, secret=os.urandom(32).hex(), join_seconds=3.0)
    joins(run, 14, nproc=3)
    assert [run.agents[number].wait(20) for number in (1, 12, 13, 14)] == [1, 2, 1, 2]
    refused = {1: "node-taken", 12: "nodes-incompatible", 13: "node-0-not-found", 14: "joined-with-more-workers"}
    assert {number: codes(run.said(number)) for number in refused} == {n: [code] for n, code in refused.items()}
    assert "torch" in run.said(12) and "1.0" in run.said(12) and "secret" in run.said(13)
    (run.run_dir / "attempt-1" / "broken").touch()
    joins(run, 15)
    assert run.agents[15].wait(20) == 2
    assert "other data here" in run.said(15)
    run.wait_for("world-4-rank-3-generation-2")
    (run.run_dir / "attempt-1" / "broken").unlink()
    joins(run, 16)
    run.wait_for("world-6-rank-5-generation-3")
    joins(run, 17)
    assert run.agents[17].wait(20) == 2
    assert codes(run.said(17)) == ["no-free-node"]
    end(run, 0, 16)


def test_a_run_that_was_not_started_for_more_takes_nobody(tmp_path: Path) -> None:
    with several(tmp_path, STEPS, nodes=2) as run:
        run.start(1, 0)
        run.wait_for("world-4-rank-3-generation-0")
        assert not invitation(run).exists()
        first = run.agents[1]
        run.start(1)
        assert run.agents[1].wait(20) == 2
        assert codes(run.said(1)) == ["run-accepts-no-hosts"]
        run.agents[1] = first
        end(run, 0, 1)


class Deaf:
    """A link that only remembers what was sent."""

    peer_address, ended = "127.0.0.1", ""

    def __init__(self) -> None:
        self.sent: list[object] = []

    def send(self, message: object) -> None:
        self.sent.append(message)


def test_who_cannot_reach_one_that_is_just_lost_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joining, "JOIN_RECHECK_SECONDS", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        nodes = [
            RemoteNode(Hello(number, 4, 1, probe.getsockname()[1], gather_facts()), cast(Any, Deaf()))
            for number in (1, 2, 3)
        ]
        old, off, new = nodes
        here, told = [old, off], list[str]()
        cluster = SimpleNamespace(
            proof="p",
            present_nodes=here,
            members={1: old, 2: off},
            waiting=[new],
            dismiss=lambda *_: told.append("off"),
        )
        newcomers = JoinQueue(NodePlan((), 1, nodes=4, min_nodes=1, attempt_dir=str(tmp_path)), cast(Any, cluster))
        newcomers.check_waiting_nodes()
        new.started, new.reached, old.reached = (
            StartReply(-1),
            ReachabilityReply(("new cannot reach off",)),
            ReachabilityReply(()),
        )
        newcomers.check_waiting_nodes()
        assert not newcomers.ready and not told  # `off` has not answered
        off.reached = ReachabilityReply(())
        newcomers.check_waiting_nodes()
        newcomers.check_waiting_nodes()
        assert not newcomers.ready and not told and new.reached is None  # it is tested again
        off.lost = "powered off"
        here.remove(off)
        new.reached = old.reached = ReachabilityReply(())
        newcomers.check_waiting_nodes()
        assert len(newcomers.ready) == 1 and not told


def test_nodes_that_differ_in_what_makes_results_are_refused_with_both_values() -> None:
    own, plan = gather_facts(), NodePlan(argv=("x",), nproc=1)

    def node(**packages: str) -> Any:
        facts = msgspec.structs.replace(own, packages={**own.packages, **packages})
        hello = SimpleNamespace(facts=facts, nproc=1)
        return cast(Any, SimpleNamespace(name="node 1 (n2)", hello=hello, clock_ahead_seconds=0.0))

    check_compatible(plan, own, [node()])
    with raises("nodes-incompatible") as caught:
        check_compatible(plan, own, [node(torch="1.0")])
    assert "torch" in caught.value.fields["reasons"] and "1.0" in caught.value.fields["reasons"]
