"""The hang guard over several nodes: agents on this machine, each with workers of its own, as one run."""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from tests.launch.agent.nodes_harness import Nodes, several

from paceline.errors import ExitCode
from paceline.guard.report import DiagnosisRecord, read_diagnosis
from paceline.protocol.evidence import DiagnosisKind

RANKS = """
import torch, torch.distributed as dist
from paceline.rank.guard import HangGuard
torch.set_num_threads(1)
dist.init_process_group("gloo")
batch = torch.ones(8)
for step in range(400):
    if step == 5 and rank == 2:
        FAULT
    try:
        dist.all_reduce(batch)
    except RuntimeError:
        time.sleep(1)  # the others may have been freed a little earlier
        (folder / f"word-{rank}").write_text(HangGuard.of_process().release_reason())
        raise
    time.sleep(0.02)
"""


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Any]:
    """Starts two nodes with two ranks each, of which rank 2, on node 1, does `fault`."""
    with ExitStack() as stack:

        def begin(fault: str, **settings: Any) -> Nodes:
            code = RANKS.replace("FAULT", fault)
            return stack.enter_context(
                several(tmp_path, code, plain_store=True, hang_timeout="3", preload=True, **settings)
            )

        yield begin


def diagnosis(nodes: Nodes) -> DiagnosisRecord:
    (folder,) = nodes.run_dir.glob("attempt-1/diagnosis-1")
    return read_diagnosis(folder)


@pytest.mark.slow
def test_a_rank_that_hangs_on_another_node_is_named_by_the_head_and_all_nodes_end_alike(run) -> None:
    nodes = run("time.sleep(600)")
    nodes.start(0, 1)
    assert nodes.codes(50) == [ExitCode.STALLED] * 2, nodes.said(0)
    told = diagnosis(nodes)
    assert (told.diagnosis.kind, told.diagnosis.causes) == (DiagnosisKind.BEHIND, (2,))
    assert [(rank.rank, rank.node, bool(rank.stacks or rank.native)) for rank in told.evidence] == [
        (0, 0, True),
        (1, 0, True),
        (2, 1, True),
        (3, 1, True),
    ]
    assert nodes.said(0).count("CAUSE: rank 2 (") == 1
    assert "CAUSE" not in nodes.said(1)
    for rank in (0, 1, 3):
        word = json.loads((nodes.run_dir / "attempt-1" / f"word-{rank}").read_text())
        assert (word["kind"], word["exit_code"], word["causes"]) == ("BEHIND", ExitCode.STALLED, [2])


@pytest.mark.slow
def test_who_calls_something_else_on_another_node_is_named_where_gloo_aborts_a_rank(run) -> None:
    nodes = run("dist.all_reduce(torch.ones(3))", nodes=3, nproc=1)
    nodes.start(0, 1, 2)
    assert nodes.codes(50) == [ExitCode.MISMATCH] * 3, nodes.said(0)
    assert diagnosis(nodes).diagnosis.causes == (2,)
    assert diagnosis(nodes).waited_seconds == 0  # a rank had died


@pytest.mark.slow
def test_a_frozen_agent_does_not_make_its_ranks_guilty(run) -> None:
    """Nothing is heard of its ranks for a while: that is no standstill."""
    nodes = run("import psutil; me = psutil.Process(os.getppid()); me.suspend(); time.sleep(6); me.resume()")
    nodes.start(0, 1)
    assert nodes.codes(50) == [ExitCode.DONE] * 2, nodes.said(0)
