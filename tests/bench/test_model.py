"""The model: fitted to runs that follow it, it gives them back, and predicts the ones it has not seen."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.bench.ahead import ahead_of
from paceline.bench.fit import fit_model, hold_out
from paceline.bench.model import PAYLOAD, Machine, Model, Network
from paceline.bench.runs import At
from paceline.bench.shares import StepParts

MACHINE = Machine(cores=16, threads=1, weight_bytes=40_000_000)
numbers = st.floats(1e-5, 1e-2)
models = st.builds(
    Model,
    st.just(MACHINE),
    fixed=numbers,
    per_sample=st.floats(1e-5, 1e-3),
    data_per_sample=st.floats(0, 1e-5),
    contention=st.floats(0, 0.3),
    latency=st.floats(0, 1e-3),
    seconds_per_byte=st.floats(1e-11, 1e-9),
    jitter=st.floats(0, 0.1),
)


def measured(model: Model, ranks: int, batch: int) -> StepParts:
    """A point exactly as the model has it."""
    machine = model.machine
    compute, data = model.compute(ranks, batch), model.data_per_sample * batch
    wait = model.jitter * math.sqrt(2 * math.log(machine.at_once(ranks)))
    exchange = model.exchange(ranks)
    compute, data = compute * model.turns(ranks), data * machine.crowd(ranks)
    busy = (compute / model.turns(ranks) + model.data_per_sample * batch) * (1 + wait) * model.turns(ranks)
    return StepParts(busy + exchange, data, compute, busy - compute - data, exchange)


@given(models, st.sampled_from([MACHINE, Machine(2, 1, 40_000_000), Machine(4, 2, 1_000_000)]))
def test_what_follows_the_model_is_predicted_where_it_was_not_measured(model: Model, machine: Machine) -> None:
    model = replace(model, machine=machine)
    points = {At(ranks, batch): measured(model, ranks, batch) for ranks in (1, 2, 4) for batch in (16, 64)}
    found = fit_model(points, machine)
    # 2 ranks on 2 cores see no contention beyond that of 2: what is not told apart needs no telling there
    for ranks, batch in ((2, 16), (4, 128), (2, 256)):
        assert found.step(ranks, batch) == pytest.approx(measured(model, ranks, batch).step, rel=1e-6)


NAMES = ("fixed", "per_sample", "data_per_sample", "contention", "latency", "seconds_per_byte", "jitter")


@given(models)
def test_the_numbers_are_found_again_where_the_points_tell_them_apart(model: Model) -> None:
    points = {At(ranks, batch): measured(model, ranks, batch) for ranks in (1, 2, 4, 8) for batch in (16, 64)}
    found = fit_model(points, MACHINE)
    for name in NAMES:
        assert getattr(found, name) == pytest.approx(getattr(model, name), rel=1e-3, abs=1e-9), name
    assert found.step(32, 16) == pytest.approx(_beyond(model, 32, 16), rel=1e-3)


def _beyond(model: Model, ranks: int, batch: int) -> float:
    return measured(model, ranks, batch).step


@given(models)
def test_every_number_of_ranks_that_was_held_out_is_predicted_within_a_tenth(model: Model) -> None:
    points = {At(ranks, batch): measured(model, ranks, batch) for ranks in (1, 2, 3, 4) for batch in (16, 64)}
    held = hold_out(points, MACHINE)
    assert [h.at for h in held] == [At(ranks, batch) for ranks in (2, 3, 4) for batch in (16, 64)]
    assert all(abs(h.error) < 1e-6 for h in held)


@given(models, st.floats(0, 1))
def test_three_ranks_on_two_cores_tell_how_they_are_shared_and_four_need_not_know(model: Model, packing: float) -> None:
    machine = Machine(2, 1, 40_000_000)
    model = replace(model, machine=machine, packing=packing)
    points = {At(ranks, batch): measured(model, ranks, batch) for ranks in (1, 2, 3, 4) for batch in (16, 64)}
    assert fit_model(points, machine).packing == pytest.approx(packing, abs=1e-6)
    for held in hold_out(points, machine):
        # nobody can know it who has not seen 3; who has not seen 2 cannot tell chance from contention
        slack = {2: 0.01, 3: 0.75 * 0.5 / 1.5, 4: 1e-6}[held.at.ranks]
        assert abs(held.error) <= slack + 1e-9


@given(models)
def test_a_network_takes_as_long_however_many_ranks_share_a_core(model: Model) -> None:
    machine = Machine(2, 1, 40_000_000, over_network=True)
    model = replace(model, machine=machine)
    assert model.exchange(4) / model.exchange(2) < 3.01  # messages; in memory it would be twice as much
    points = {At(ranks, batch): measured(model, ranks, batch) for ranks in (1, 2, 3, 4) for batch in (16, 64)}
    assert all(abs(h.error) < 1e-6 for h in hold_out(points, machine) if h.at.ranks == 4)
    stated = Network(1 / model.seconds_per_byte / PAYLOAD, model.latency / 2)  # with gloo a message takes it twice
    assert model.step_on_many(4, 16, 4, stated) == pytest.approx(model.step(4, 16))


@given(models)
def test_what_one_rank_alone_spends_on_exchange_is_work(model: Model) -> None:
    points = {At(ranks, batch): measured(model, ranks, batch) for ranks in (1, 2, 3, 4) for batch in (16, 64)}
    share = 0.1 * points[At(1, 16)].compute
    moved = {at: replace(p, compute=p.compute - share, exchange=p.exchange + share) for at, p in points.items()}
    assert fit_model(moved, MACHINE).step(4, 64) == pytest.approx(fit_model(points, MACHINE).step(4, 64))


def test_with_two_numbers_of_ranks_nothing_can_be_held_out() -> None:
    model = Model(MACHINE, 0.001, 1e-4, 0.0, 0.1, 0.0, 1e-10, 0.02)
    assert hold_out({At(1, 64): measured(model, 1, 64), At(2, 64): measured(model, 2, 64)}, MACHINE) == []


@given(st.lists(st.tuples(st.sampled_from([1, 2, 3, 4]), st.sampled_from([8, 64]), st.floats(0, 1)), min_size=1))
def test_no_measurement_however_odd_gives_a_number_below_nothing(drawn) -> None:
    points = {At(r, b): StepParts(5 * s, s / 9, s, s / 5, s / 3) for r, b, s in [(1, 64, 0.1), *drawn]}
    for machine in (MACHINE, Machine(2, 2, 100), Machine(1, 1, 0)):
        found = fit_model(points, machine)
        assert all(getattr(found, name) >= 0 for name in NAMES)
        assert found.step(8, 8) >= 0


def test_more_machines_exchange_over_the_network_that_is_stated() -> None:
    model = Model(MACHINE, 0.0, 1e-3, 0.0, 0.0, 0.0, 0.0, 0.0)
    slow, fast = Network(125e6, 1e-4), Network(12.5e9, 1e-6)
    at_slow, at_fast = (model.step_on_many(8, 64, 2, network) for network in (slow, fast))
    headers = 1538 / 1448  # and gaps, of an Ethernet
    assert at_slow - 0.064 == pytest.approx(2 * 7 / 8 * 40e6 * headers / 125e6 + 2 * 14e-4)
    assert at_fast - 0.064 == pytest.approx(2 * 7 / 8 * 40e6 * headers / 12.5e9 + 2 * 14e-6)


def test_more_threads_than_cores_take_turns() -> None:
    model = Model(Machine(2, 1, 0), 0.0, 1e-3, 0.0, 0.0, 0.0, 0.0, 0.0)
    assert [model.step(ranks, 10) for ranks in (1, 2, 4, 8)] == pytest.approx([0.01, 0.01, 0.02, 0.04])


def test_what_helps_on_a_slow_network_is_predicted_by_its_bytes_and_messages_and_every_row_states_its_range() -> None:
    machine = replace(MACHINE, cores=2, low_rank_bytes=400_000)
    model = Model(machine, 0.01, 1e-4, 0.0, 0.1, 0.0, 1e-9, 0.02)
    points = {At(ranks, 64): measured(model, ranks, 64) for ranks in (1, 2, 4, 8)}
    one, message, link = At(8, 64), 0.1, Network(12.5e6 / PAYLOAD, 0.05)  # a message takes the latency twice
    points[one] = replace(
        points[one], step=1.1 * points[one].step, exchange=points[one].exchange + 0.1 * points[one].step
    )
    rows = ahead_of(points, machine, 64, None, link)
    assert all(row.range_seconds and row.range_seconds[0] < row.step_seconds < row.range_seconds[1] for row in rows)
    steps = {row.where.rpartition(", ")[2]: row.step_seconds for row in rows if row.where.startswith("2 machines with")}
    rest = steps["all is sent"] - (2 * message + 40e6 / 12.5e6)
    assert 0 < rest < 0.1
    assert steps["--compress bf16"] == pytest.approx(rest + 2 * message + 20e6 / 12.5e6)
    assert steps["--compress int8"] == pytest.approx(rest + 2 * message + 40e6 * (1 + 4 / 512) / 4 / 12.5e6)
    assert steps["--compress powersgd"] == pytest.approx(rest + 2 * message + 0.4e6 / 12.5e6)
    # of the 100 ms in which losses and votes travel a step waits for what backward and the optimizer do not hide
    seen = message - 2 / 3 * rest
    assert 0 < seen < message
    assert steps["--local-steps 16"] == pytest.approx(rest + seen + (2 * message + 40e6 / 12.5e6) / 16)
    few = {at: parts for at, parts in points.items() if at.ranks < 4}
    assert all(row.range_seconds is None for row in ahead_of(few, MACHINE, 64, None, link))
    assert "powersgd" not in "".join(row.where for row in ahead_of(few, MACHINE, 64, None, link))
