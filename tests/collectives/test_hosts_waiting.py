"""If a rank of a different host is missing, the error names it, and no rank waits forever."""

import sys
import time
from pathlib import Path

import pytest
from tests.launch.launch_harness import kill_all, start, survivors
from tests.rank.guard_ranks import HEAD, TORCH, ranks, wait

from paceline.errors import ExitCode
from paceline.guard.report import read_diagnosis
from paceline.protocol.evidence import DiagnosisKind
from paceline.rank.bootstrap import worker_command

pytestmark = [pytest.mark.ranks, pytest.mark.slow]  # soak: what `test_a_run_on_two_hosts...` sees from outside

HANGS = f"""{TORCH}
from paceline.collectives import shared_memory as handshake
handshake.node_key = lambda: str(rank // 2)
from paceline.collectives.buckets import group_into_buckets, trainable_parameters
from paceline.collectives.hosts import HierarchicalBucketReducer, make_leaf_order_plan
from paceline.collectives.reducer import Reducer
from paceline.collectives.communicator import make_communicator
from paceline.collectives.shm_communicator import node_topology
from paceline.collectives.sum_tree import LeafPartition
model = torch.nn.Sequential(torch.nn.Linear(300, 300), torch.nn.Linear(300, 300))
hosts, partition = node_topology(make_communicator()), LeafPartition.one_leaf_per_rank(4, rank)
buckets = group_into_buckets(trainable_parameters(model), 1000)
sums = Reducer(partition, HierarchicalBucketReducer(buckets, hosts, make_leaf_order_plan(partition, 2)))
def late(gradient):
    if rank == 3 and number == 5:
        time.sleep(600)  # FAULT
model[0].bias.register_hook(late)
for number in range(100):
    sums.begin_backward(rank, is_last=True)
    model(torch.ones(1, 300)).sum().backward()
    sums.end_backward()
    sums.finish(4.0)
"""
STEPS = f"""{TORCH}
from paceline.collectives import shared_memory as handshake
handshake.node_key = lambda: str(rank // 2)
from paceline.collectives.reducer import make_reducer
from paceline.collectives.sum_tree import LeafPartition
model = torch.nn.Linear(300, 300)
sums = make_reducer(model, LeafPartition.one_leaf_per_rank(4, rank), in_order=True)
def step():
    sums.begin_backward(rank, is_last=True)
    model(torch.ones(1, 300)).sum().backward()
    sums.end_backward()
    sums.finish(4.0)
step()
ready()
while rank == 3 and not (folder / "go").exists():
    time.sleep(0.01)  # FAULT
try:
    step()
except RuntimeError:
    (folder / f"noticing-{{rank}}").write_text(str(time.monotonic()))
    (folder / f"noticing-{{rank}}").rename(folder / f"noticed-{{rank}}")
    dist.destroy_process_group()  # as whoever raises does on the way out
    if rank == 2 and not (folder / "end").exists():
        time.sleep(600)
    raise
"""
IN_TIME_SECONDS = 10.0


def test_a_killed_rank_of_another_host_is_noticed_by_all(tmp_path: Path) -> None:
    with ranks(STEPS, 4, tmp_path) as everybody:
        for one in everybody:
            one.wait_ready()
        time.sleep(0.5)
        everybody[3].process.kill()
        everybody[3].process.wait()
        began = time.monotonic()
        for rank, one in enumerate(everybody[:3]):
            wait((tmp_path / f"noticed-{rank}").exists, one.output())
            assert float((tmp_path / f"noticed-{rank}").read_text()) - began < IN_TIME_SECONDS
        for one in everybody[:2]:  # though rank 2, which the other host is connected with, does not end
            assert one.process.wait(20) == 1
            failure = one.failure()
            assert failure is not None and failure.victim, failure


@pytest.mark.soak
def test_the_time_limit_between_hosts_is_that_of_the_process_group(tmp_path: Path) -> None:
    """Rank 1 waits for rank 3, which stays alive and connected. All others have ended."""
    limited = STEPS.replace('("gloo")', '("gloo", timeout=__import__("datetime").timedelta(seconds=2))')
    assert limited != STEPS
    with ranks(limited, 4, tmp_path) as everybody:
        assert everybody[1].process.wait(40) == 1
        failure = everybody[1].failure()
        assert failure is not None and failure.victim and "imed out" in failure.message, failure


def test_a_run_on_two_hosts_that_stands_still_ends_with_the_rank_and_its_line(tmp_path: Path) -> None:
    """During a backward, after one bucket has been sent."""
    script = tmp_path / "job.py"
    script.write_text(HEAD + HANGS)
    argv = list(worker_command([str(script)], sys.executable))
    (folder := tmp_path / "attempt").mkdir()
    one = start(folder, "", argv=argv, nproc=4, plain_store=True, hang_timeout="3")
    try:
        assert one.finish() == ExitCode.STALLED, one.stderr
        told = read_diagnosis(folder / "diagnosis-1")
        line = next(n for n, text in enumerate(script.read_text().splitlines(), 1) if "# FAULT" in text)
        assert (told.diagnosis.kind, told.diagnosis.causes) == (DiagnosisKind.BEHIND, (3,)), one.stderr
        assert told.diagnosis.site == f"job.py:{line} in late"
        # the other host waits over gloo for rank 3, and rank 2 waits for it in memory
        assert (op := told.diagnosis.op) is not None
        assert (op.kind, op.seq, op.name) == ("all_reduce", 23, "bucket 2")
        (ops,) = (evidence.ops for evidence in told.evidence if evidence.rank == 2)
        assert ("reduce_scatter", 28, "bucket 2", False) in {(op.kind, op.seq, op.name, op.done) for op in ops}
        assert not survivors(one.mark)
    finally:
        kill_all(one.mark)
