"""Where the time went: made-up runs whose answer is known, and laws that hold for all of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.lab.made_up import Rank, lockstep

from paceline.lab.scale import COMPUTE, DATA, EXCHANGE, REST, SMALLER, WAITING, Share, lost_shares
from paceline.view.step_parts import Run, backward_per_forward, take_apart

BASE = lockstep([Rank()])
RATIO = backward_per_forward(BASE)


def weak(run: Run) -> list[Share]:
    return lost_shares(take_apart(BASE), take_apart(run, RATIO))


def explained(shares: list[Share]) -> float:
    return sum(share.percent for share in shares if share.cause != REST)


AFTER, WITHIN = [False], [False, True]  # where ranks wait: after backward, within it


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize(
    ("change", "phase", "waits_within"),
    [
        ({"data": 0.021}, "data", WITHIN),
        ({"forward": 0.02, "backward": 0.04, "optimizer": 0.004}, "backward", WITHIN),  # niced
        ({"forward": 0.03}, "forward", AFTER),  # elsewhere a forward tells how long a backward takes
        ({"between": 0.02}, "between", WITHIN),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_one_slow_rank_is_what_the_others_wait_for(change, phase, waits_within, ranks) -> None:
    slow = ranks - 1
    everybody = [Rank(jitter=0.02)] * slow + [replace(Rank(jitter=0.02), **change)]
    for in_backward in waits_within:
        run = lockstep(everybody, exchange=0.002, in_backward=in_backward)
        shares, parts = weak(run), take_apart(run, RATIO)
        assert shares[0].cause == WAITING
        assert (parts.slowest, parts.slow_phase) == (slow, phase)
        assert explained(shares) == pytest.approx(100, abs=5)


@pytest.mark.parametrize("in_backward", [False, True])
def test_an_exchange_that_takes_long_is_communication_wherever_it_is_waited_for(in_backward) -> None:
    run = lockstep([Rank(jitter=0.02)] * 2, exchange=0.02, in_backward=in_backward)
    shares = weak(run)
    assert shares[0].cause == EXCHANGE
    assert shares[0].seconds == pytest.approx(0.02, rel=0.05)
    assert explained(shares) == pytest.approx(100, abs=5)


def test_ranks_that_are_all_slower_are_slower_compute() -> None:
    slow = Rank(forward=0.016, backward=0.032, optimizer=0.0032)  # too many threads, say
    shares = weak(lockstep([slow] * 4, exchange=0.001))
    assert shares[0].cause == COMPUTE
    assert shares[0].percent > 80
    assert weak(lockstep([Rank(data=0.02)] * 2))[0].cause == DATA


def test_ranks_that_are_slow_in_turn_blame_nobody() -> None:
    run = lockstep([Rank(jitter=1.0)] * 4, steps=200)
    assert take_apart(run).slowest is None
    assert weak(run)[0].cause in (WAITING, COMPUTE)


def test_strong_scaling_tells_smaller_batches_from_slower_compute() -> None:
    """4 times fewer samples in half of the time: the rest is what a small batch costs, whoever computes it."""
    whole = take_apart(lockstep([Rank(data=0.004, forward=0.04, backward=0.08, optimizer=0.002)]))
    small = take_apart(lockstep([Rank(data=0.001, forward=0.02, backward=0.04, optimizer=0.002)]))
    run = take_apart(lockstep([Rank(data=0.001, forward=0.02, backward=0.04, optimizer=0.002)] * 4, exchange=0.003))
    shares = {share.cause: share for share in lost_shares(whole, run, 4, small)}
    assert shares[SMALLER].seconds == pytest.approx(0.0621 - 0.1221 / 4)
    assert shares[COMPUTE].seconds == pytest.approx(0, abs=1e-9)
    assert shares[EXCHANGE].seconds == pytest.approx(0.003)
    unknown = {share.cause: share for share in lost_shares(whole, run, 4)}
    assert SMALLER not in unknown
    assert unknown[COMPUTE].seconds == pytest.approx(shares[SMALLER].seconds)


seconds = st.floats(1e-4, 0.1)
ranks = st.builds(Rank, data=seconds, forward=seconds, backward=seconds, optimizer=seconds, jitter=st.floats(0, 0.5))


@given(st.lists(ranks, min_size=1, max_size=5), st.floats(0, 0.1), st.booleans(), st.floats(0, 0.05))
def test_all_shares_together_are_all_that_is_lost(everybody, exchange, in_backward, hidden) -> None:
    run = lockstep(everybody, exchange=exchange, in_backward=in_backward, steps=8, hidden=hidden)
    base = take_apart(lockstep([Rank()], steps=8))
    for parts in (take_apart(run), take_apart(run, RATIO)):
        for shares, ideal in ((lost_shares(base, parts), base.step), (lost_shares(base, parts, 3), base.step / 3)):
            lost = parts.step - ideal
            assert sum(share.seconds for share in shares) == pytest.approx(lost, abs=1e-9)
            if abs(lost) > 1e-6:
                assert sum(share.percent for share in shares) == pytest.approx(100, abs=1e-3)
            assert shares == sorted(shares, key=lambda share: -share.seconds)


@given(st.lists(ranks, min_size=2, max_size=5), st.floats(0, 0.1))
def test_what_is_waited_for_is_the_exchange_or_the_slowest_and_never_less_than_nothing(everybody, exchange) -> None:
    run = lockstep(everybody, exchange=exchange, steps=8)
    parts = take_apart(run)
    assert parts.exchange == pytest.approx(exchange, abs=1e-9)
    assert parts.waiting >= -1e-12
    assert parts.step - parts.busy - parts.exchange == pytest.approx(0, abs=1e-9)
    assert parts.step >= parts.data + parts.compute - 1e-9
