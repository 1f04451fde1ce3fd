"""The one sentence of each line: what most of the loss is, who is to blame, and nothing where little is lost."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.bench.made_up import Rank, lockstep

from paceline.bench.fit import hold_out
from paceline.bench.model import Machine
from paceline.bench.runs import At, Run, Runs
from paceline.bench.scale import Lost, held_words, loss_sentence, lost_of, parts_of, usual

ROOMY, NARROW = Machine(64, 1, 1_000_000), Machine(2, 2, 1_000_000)
ALONE = lockstep([Rank()])


def weak(run: Run, machine: Machine = ROOMY) -> Lost:
    """What a run of made-up ranks loses against one of them alone."""
    at = At(run.world_size, 64)
    runs: Runs = {At(1, 64): [ALONE] * 3, at: [run] * 3}
    [lost] = lost_of(runs, parts_of(runs, {}), machine, "weak", 64)
    return lost


def test_the_sentence_names_rank_and_phase_of_whom_all_wait_for() -> None:
    late = lockstep([Rank(), Rank(), replace(Rank(), data=0.05)])
    assert loss_sentence(weak(late)).endswith("to waiting for the slowest rank (rank 2, in its data)")


def test_the_sentence_says_that_another_rank_is_late_each_time() -> None:
    late_in_turn = [Rank(data=0.0001, forward=0.004, backward=0.006, jitter=5.0)] * 4
    assert loss_sentence(weak(lockstep(late_in_turn, steps=200))).endswith("(another one each time)")


def test_too_many_threads_are_named_beside_the_slower_compute_that_they_cause() -> None:
    slow = lockstep([Rank(forward=0.02, backward=0.04)] * 2, exchange=0.001)
    assert loss_sentence(weak(slow, NARROW)).endswith("to slower compute (2 threads for each core)")
    assert loss_sentence(weak(slow)).endswith("to slower compute")


def test_what_is_hardly_lost_is_not_blamed_on_anybody() -> None:
    assert "nothing to speak of is lost" in loss_sentence(weak(lockstep([Rank()] * 2, exchange=0.0001)))


def test_what_disturbs_a_step_now_and_then_does_not_change_the_prediction() -> None:
    def run(ranks: int, slow: int) -> Run:
        calm, disturbed = (lockstep([Rank(forward=f)] * ranks, exchange=0.005, steps=20) for f in (0.01, 0.2))
        return replace(calm, steps=[*disturbed.steps[:slow], *calm.steps[slow:]])

    runs: Runs = {At(ranks, 64): [run(ranks, 3 * ranks), run(ranks, 0)] for ranks in (1, 2, 3, 4)}
    calm: Runs = {At(ranks, 64): [run(ranks, 0)] for ranks in (1, 2, 3, 4)}
    held = hold_out(parts_of(usual(runs), {}), ROOMY)
    assert [one.predicted_seconds for one in held] == [
        pytest.approx(one.predicted_seconds) for one in hold_out(parts_of(usual(calm), {}), ROOMY)
    ]


def test_each_number_of_ranks_is_said_to_be_predicted_without_it() -> None:
    def run(ranks: int) -> Run:
        return lockstep([Rank()] * ranks, exchange=0.01 if ranks > 1 else 0.0)

    runs: Runs = {At(ranks, 64): [run(ranks)] * 3 for ranks in (1, 2, 3, 4)}
    held = hold_out(parts_of(runs, {}), ROOMY)
    assert [one.at.ranks for one in held] == [2, 3, 4]
    assert all(abs(one.error) < 0.02 for one in held)
    assert held_words(held[-1]).startswith("model, fitted without 4 ranks: predicts 43.1 ms")
