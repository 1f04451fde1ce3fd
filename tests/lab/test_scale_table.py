"""The one sentence of each line: what most of the loss is, who is to blame, and nothing where little is lost."""

from __future__ import annotations

from dataclasses import replace

from tests.lab.made_up import Rank, lockstep
from tests.rendered import rendered

from paceline.lab.scale import COMPUTE, WAITING, At, Lost, Machine, Runs, loss_sentence, lost_of, parts_of
from paceline.view.step_parts import Run

ROOMY, NARROW = Machine(64, 1, 1_000_000), Machine(2, 2, 1_000_000)
ALONE = lockstep([Rank()])


def weak(run: Run, machine: Machine = ROOMY) -> Lost:
    """What a run of made-up ranks loses against one of them alone."""
    at = At(run.world_size, 64)
    runs: Runs = {At(1, 64): [ALONE] * 3, at: [run] * 3}
    [lost] = lost_of(runs, parts_of(runs, {}), machine, "weak", 64)
    return lost


def test_the_sentence_names_rank_and_phase_of_whom_all_wait_for() -> None:
    late = weak(lockstep([Rank(), Rank(), replace(Rank(), data=0.05)]))
    assert (late.shares[0].cause, late.slowest, late.slow_phase) == (WAITING, 2, "data")
    rendered(loss_sentence(late))


def test_the_sentence_says_that_another_rank_is_late_each_time() -> None:
    late = weak(lockstep([Rank(data=0.0001, forward=0.004, backward=0.006, jitter=5.0)] * 4, steps=200))
    assert (late.shares[0].cause, late.slowest) == (WAITING, None)
    rendered(loss_sentence(late))


def test_too_many_threads_are_named_beside_the_slower_compute_that_they_cause() -> None:
    slow = lockstep([Rank(forward=0.02, backward=0.04)] * 2, exchange=0.001)
    crowded, alone = weak(slow, NARROW), weak(slow)
    assert crowded.shares[0].cause == alone.shares[0].cause == COMPUTE
    assert crowded.crowd == 2 and alone.crowd <= 1
    rendered(map(loss_sentence, (crowded, alone)))


def test_what_is_hardly_lost_is_not_blamed_on_anybody() -> None:
    rendered(loss_sentence(weak(lockstep([Rank()] * 2, exchange=0.0001))))
