"""If a rank is missing, the others notice it soon, name it, and are reported as waiting for it."""

import signal
import time
from pathlib import Path

import pytest
from tests.rank.guard_ranks import TORCH, Rank, ranks, wait

from paceline.guard.detectors import is_waiting, ranks_to_interrupt
from paceline.guard.judge import diagnose
from paceline.protocol import status_page
from paceline.protocol.evidence import DiagnosisKind, Evidence

pytestmark = pytest.mark.ranks

WAITS = f"""{TORCH}
from paceline.collectives.shm_collectives import barrier
from paceline.collectives.communicator import make_communicator
from paceline.rank.guard import HangGuard
memory = make_communicator().memory
barrier(memory)
ready()
while rank == WHO and not (folder / "go").exists():
    time.sleep(0.01)  # FAULT
try:
    barrier(memory)
except RuntimeError as error:
    (folder / f"noticing-{{rank}}").write_text(str(time.monotonic()))
    (folder / f"noticing-{{rank}}").rename(folder / f"noticed-{{rank}}")
    raise
"""
IN_TIME_SECONDS = 10.0  # a tenth of a second is meant; machines are busy


def script(who: int) -> str:
    return WAITS.replace("WHO", str(who))


def test_a_killed_rank_is_noticed_and_named_by_all(tmp_path: Path) -> None:
    with ranks(script(1), 3, tmp_path) as everybody:
        for one in everybody:
            one.wait_ready()
        time.sleep(0.2)
        everybody[1].process.kill()
        everybody[1].process.wait()
        began = time.monotonic()
        for rank in (0, 2):
            one = everybody[rank]
            wait((tmp_path / f"noticed-{rank}").exists, one.output())
            assert float((tmp_path / f"noticed-{rank}").read_text()) - began < IN_TIME_SECONDS
            assert one.process.wait(20) == 1
            failure = one.failure()
            assert failure is not None and failure.victim
            first = f"rank 1 (pid {everybody[1].process.pid})"
            assert "barrier" in failure.message and (first in failure.message or "has left" in failure.message)


LEFT = f"""{TORCH}
from paceline.collectives.shm_collectives import barrier
from paceline.collectives.communicator import make_communicator
memory = make_communicator().memory
barrier(memory)
barrier(memory)
if rank == 1:
    dist.destroy_process_group()  # as whoever raises does on the way out
    ready()
    time.sleep(600)
else:
    while not (folder / "ready-1").exists(): time.sleep(0.01)
    barrier(memory)
"""


def test_a_rank_that_has_taken_its_group_down_is_not_waited_for(tmp_path: Path) -> None:
    with ranks(LEFT, 2, tmp_path) as (waiting, gone):
        assert waiting.process.wait(30) == 1
        assert gone.process.poll() is None
        failure = waiting.failure()
        assert failure is not None and failure.victim
        assert f"rank 1 (pid {gone.process.pid}) has left" in failure.message


@pytest.mark.slow
def test_a_rank_that_is_late_is_waited_for_until_the_time_limit(tmp_path: Path) -> None:
    with ranks(script(1), 2, tmp_path) as everybody:
        for one in everybody:
            one.wait_ready()
        time.sleep(1.0)
        assert everybody[0].process.poll() is None
        (tmp_path / "go").touch()
        assert [one.process.wait(20) for one in everybody] == [0, 0]


@pytest.mark.slow
def test_the_time_limit_is_that_of_the_process_group(tmp_path: Path) -> None:
    limited = script(1).replace('("gloo")', '("gloo", timeout=__import__("datetime").timedelta(seconds=2))')
    assert limited != script(1)
    with ranks(limited, 2, tmp_path) as (one, late):
        assert one.process.wait(40) == 1
        failure = one.failure()
        assert failure is not None and failure.victim
        assert "timed out" in failure.message and f"rank 1 (pid {late.process.pid})" in failure.message


def evidence_of(one: Rank) -> Evidence:
    answer = one.ask(seconds=20)
    assert answer is not None
    number, ops, groups = one.number, answer.ops, answer.groups
    return Evidence(number, "h", number, state="S", answered=True, ops=ops, groups=groups, stacks=answer.stacks)


def test_a_stopped_rank_is_found_by_the_judge_and_the_waiting_one_is_freed(tmp_path: Path) -> None:
    with ranks(script(1), 2, tmp_path) as (waiting, stopped):
        for one in (waiting, stopped):
            one.wait_ready()
        stopped.process.send_signal(signal.SIGSTOP)
        wait(lambda: status_page.read_counters(waiting.page).waiting, "it waits, and says so")
        answer = evidence_of(waiting)
        assert answer.groups["shared"] == (0, 1)
        (last,) = [op for op in answer.ops if op.group == "shared" and not op.done]
        assert (last.kind, last.seq) == ("barrier", 2)
        assert last.site == f"script.py:{waiting.line('    barrier(memory)')} in <module>"
        frozen = [op for op in status_page.read_recent_ops(stopped.page) if op.group == "shared"]
        assert [(op.seq, op.done) for op in frozen] == [(1, True)]
        evidence = [answer, Evidence(1, "h", 2, state="T", ops=tuple(frozen))]
        assert is_waiting(evidence[0])
        diagnosis = diagnose(evidence)
        assert (diagnosis.kind, diagnosis.causes) == (DiagnosisKind.STOPPED, (1,))
        assert ranks_to_interrupt(diagnosis, evidence) == (0,)
        status_page.release_from_collective(waiting.page, b"{}")
        assert waiting.process.wait(20) == 1
        assert "unblocked" in (waiting.failure() or pytest.fail("no record")).message


FSDP = f"""{TORCH}
from functools import partial
from paceline.strategies.fsdp import FSDP
from paceline.rank.world import World
model = torch.nn.Sequential(*[torch.nn.Linear(4, 4) for _ in range(3)])
world = World(rank, 2, rank, 2, torch.device("cpu"), "gloo")
FSDP(model, partial(torch.optim.SGD, lr=0.1), world, wrap="*")
def fault(*_):
    ready()
    if "MODE" == "raises": raise ValueError("a fault")
    time.sleep(600)
if rank == 1: model[1].register_forward_pre_hook(fault, prepend=True)
model(torch.ones(1, 4)).sum().backward()
"""


@pytest.mark.parametrize("mode", ["raises", "sleeps"])
def test_a_rank_that_does_not_enter_a_block_of_fsdp_is_named_and_waited_for_by_nobody(tmp_path: Path, mode: str):
    with ranks(FSDP.replace("MODE", mode), 2, tmp_path) as (waiting, missing):
        missing.wait_ready()
        if mode == "sleeps":
            wait(lambda: status_page.read_counters(waiting.page).waiting, "it waits, and says so")
            evidence = [evidence_of(one) for one in (waiting, missing)]
            diagnosis = diagnose(evidence)
            assert diagnosis.causes == (1,) and ranks_to_interrupt(diagnosis, evidence) == (0,)
            assert diagnosis.op is not None and (diagnosis.op.kind, diagnosis.op.name) == ("all_gather", "block 1")
            assert diagnosis.op.site.startswith("script.py:")
            status_page.release_from_collective(waiting.page, b"{}")
        assert waiting.process.wait(20) == 1
        failure = waiting.failure()
        assert failure is not None and failure.victim and "block 1" in failure.message


BUSY = f"""{TORCH}
from paceline.collectives.communicator import make_communicator
finish = make_communicator().start_float_sum([1.0], "totals of the step")
while not (folder / "go").exists():
    time.sleep(0.01)  # FAULT
finish()
"""


@pytest.mark.slow
def test_totals_that_all_have_begun_are_over_for_the_judge_before_anybody_asks_for_them(tmp_path: Path) -> None:
    """Otherwise a rank that hangs in backward, after it has started the totals, would seem to wait for others."""
    with ranks(BUSY, 2, tmp_path) as (one, _):
        wait(lambda: any(op.name == "totals of the step" for op in status_page.read_recent_ops(one.page)), "begun")
        wait(lambda: all(op.done for op in status_page.read_recent_ops(one.page) if op.group == "shared"), "over")
        (tmp_path / "go").touch()
        assert one.process.wait(20) == 0
