"""Which steps are written down in detail, and what is in them."""

import time
from itertools import pairwise
from typing import Any

import pytest
import torch

from paceline.protocol.evidence import Op, Phase
from paceline.protocol.status_page import RECORDS, StatusPage, make_status_page
from paceline.rank.world import World
from paceline.strategies.single import Single
from paceline.train.records import (
    NUM_LAST_TRACED_STEPS,
    StepTraces,
    count_tensor_bytes,
    is_traced_step,
    memory_breakdown,
)
from paceline.train.step_record import PhaseClock, StepRecord

ALL_REDUCE = Op("shared", 1, "all_reduce", "gradients", "[10, 3] [4]", "float32")
NO_RESULT: Any = None
WORLD = World(0, 1, 0, 1, torch.device("cpu"), "gloo")


def test_every_doubling_has_about_as_many_steps_in_detail() -> None:
    assert [step for step in range(1, 64) if not is_traced_step(step)] == []
    counts = [sum(map(is_traced_step, range(2**bits, 2 ** (bits + 1)))) for bits in range(6, 14)]
    assert set(counts) == {32}


def test_a_call_is_known_with_its_begin_and_how_long_it_took() -> None:
    page, clock = StatusPage(make_status_page(0)), time.monotonic_ns
    for _ in range(RECORDS + 10):  # the ring has gone round
        page.end_op(page.begin_op(ALL_REDUCE))
    since = clock()
    number, began = page.begin_op(ALL_REDUCE), clock()
    time.sleep(0.02)
    page.end_op(number)
    until = clock()
    page.begin_op(ALL_REDUCE)  # not over
    (first, second) = page.calls_since(since)
    assert since <= first[0] <= began
    assert 0.02 <= first[1] <= (until - since) / 1e9
    assert (second[1], second[2].done, first[2].done) == (-1.0, False, True)
    assert page.calls_since(clock()) == []


def _stepped(clock: PhaseClock, page: StatusPage, step: int) -> StepRecord:
    clock.start()
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        page.enter(phase)
    page.end_op(page.begin_op(ALL_REDUCE))
    page.enter(Phase.OPTIMIZER)
    return StepRecord(step, NO_RESULT, 0.1, [], clock.take(), clock.starts)


def test_phases_follow_each_other_without_a_gap_and_calls_lie_in_them() -> None:
    page = StatusPage(make_status_page(0))
    traces, clock = StepTraces(page), PhaseClock(page)
    found: list[Any] = [one for step in (1, 2) for one in traces.take_due(_stepped(clock, page, step), ())]
    assert [one.step for one in found] == [1, 2]
    for one in found:
        assert [name for name, _, _ in one.phases] == ["data", "forward", "backward", "optimizer"]
        for (_, at, lasts), (_, after, _) in pairwise(one.phases):
            assert abs(at + lasts - after) < 1e-6
        [(name, at, lasts, size)] = one.calls  # not those of the step before
        assert (name, size) == ("gradients", 34 * 4)
        assert one.phases[2][1] <= at + 1e-6 and at + lasts <= one.phases[3][1] + 1e-6


def test_the_last_steps_are_always_in_detail() -> None:
    page = StatusPage(make_status_page(0))
    traces, clock = StepTraces(page), PhaseClock(page)
    for step in range(2**12 + 1, 2**12 + 40):
        assert traces.take_due(_stepped(clock, page, step), ()) == []
    assert [one.step for one in traces.take_remaining()] == [*range(2**12 + 40 - NUM_LAST_TRACED_STEPS, 2**12 + 40)]
    assert traces.take_remaining() == []


def test_anatomy_counts_what_a_rank_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "unused")  # an optimizer's step sets it
    model = torch.nn.Linear(10, 3)
    replica = Single(model, torch.optim.AdamW, WORLD)
    model(torch.ones(2, 10)).sum().backward()
    replica.optimizer.step()
    found = memory_breakdown([replica])
    assert found.parameters == [("weight", [3, 10], 120), ("bias", [3], 12)]
    steps = 2 * 4  # AdamW's own counters
    assert (found.weight_bytes, found.gradient_bytes, found.optimizer_bytes) == (132, 132, 264 + steps)


def test_sizes_are_read_from_the_guards_words() -> None:
    assert count_tensor_bytes("[10, 3] [4]", "float32") == 136
    assert count_tensor_bytes("[7]", "bfloat16, float64") == 56  # the widest: an upper bound
    assert (count_tensor_bytes("", "float32"), count_tensor_bytes("[]", "float64")) == (0, 8)
    assert count_tensor_bytes("[10]", "bfloat16") == 20
    assert count_tensor_bytes("[12, 3", "float32") == 144
    assert count_tensor_bytes("[12, x]", "float32") == 0
