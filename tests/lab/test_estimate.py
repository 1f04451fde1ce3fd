"""The estimate for more machines: measured work, and the latency and bytes of a stated link."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paceline.lab.scale import At, Machine, Network, Sent, estimated_step, estimates_of
from paceline.view.step_parts import StepParts

MACHINE = Machine(cores=2, threads=1, weight_bytes=40_000_000)
LINK = Network(12.5e6, 0.05)
MESSAGE = 0.1  # with gloo a message takes the latency twice


def alone(batch: int) -> StepParts:
    return StepParts(0.01 + 1e-4 * batch, 0.0, 0.01 + 1e-4 * batch, 0.0, 0.0)


POINTS = {At(1, 64): alone(64), At(1, 256): alone(256)}
BESIDE = replace(alone(64), step=1.25 * alone(64).step + 0.004, exchange=0.004)


def test_one_rank_each_takes_its_work_and_the_messages_and_bytes_of_a_ring() -> None:
    steps = [estimated_step(POINTS, MACHINE, count, 64, LINK) for count in (1, 2, 4)]
    ring = [0.0, 2 * MESSAGE + 40e6 / 12.5e6, 6 * MESSAGE + 1.5 * 40e6 / 12.5e6]
    assert steps == pytest.approx([alone(64).step + seconds for seconds in ring])
    assert estimated_step(POINTS, replace(MACHINE, over_gloo=False), 2, 64, LINK) == pytest.approx(steps[1] - MESSAGE)


def test_the_work_of_a_batch_that_was_not_measured_lies_on_the_line_through_the_others() -> None:
    assert estimated_step(POINTS, MACHINE, 1, 128, LINK) == pytest.approx(alone(128).step)
    assert estimated_step({At(1, 64): alone(64)}, MACHINE, 1, 128, LINK) == pytest.approx(2 * alone(64).step)


def test_ranks_of_one_machine_slow_each_other_down_and_add_up_there_first() -> None:
    points = {**POINTS, At(2, 64): BESIDE, At(4, 64): replace(BESIDE, step=9.0)}  # 4 ranks take turns: not used
    work = 1.25 * alone(256).step + 0.004
    assert estimated_step(points, MACHINE, 1, 256, LINK) == pytest.approx(work)
    over_network = replace(MACHINE, over_network=True)
    assert estimated_step(points, over_network, 1, 256, LINK) == pytest.approx(alone(256).step)


def test_less_traffic_is_less_time_by_its_bytes_and_messages() -> None:
    rows = estimates_of(POINTS, replace(MACHINE, low_rank_bytes=400_000), 64, None, LINK)
    steps = {row.where.rpartition(", ")[2]: row.step_seconds for row in rows if row.where.startswith("2 machines")}
    work = alone(64).step
    assert steps == pytest.approx({
        "1 rank each": work + 2 * MESSAGE + 40e6 / 12.5e6,
        "--compress bf16": work + 2 * MESSAGE + 20e6 / 12.5e6,
        "--compress int8": work + 2 * MESSAGE + 40e6 * (1 + 4 / 512) / 4 / 12.5e6,
        "--compress powersgd": work + 2 * MESSAGE + 0.4e6 / 12.5e6,
        "--local-steps 16": work + (2 * MESSAGE + 40e6 / 12.5e6) / 16,
    })  # fmt: skip
    few = estimates_of(POINTS, replace(MACHINE, in_parts=True), 64, None, LINK)
    assert not [row for row in few if "--" in row.where]


def test_efficiency_is_against_one_rank_with_the_same_or_the_whole_batch() -> None:
    rows = [row for row in estimates_of(POINTS, MACHINE, 64, 256, LINK) if row.where == "2 machines, 1 rank each"]
    ring = 2 * MESSAGE + 40e6 / 12.5e6
    assert {row.mode: row.at for row in rows} == {"weak": At(2, 64), "strong": At(2, 128)}
    assert {row.mode: row.efficiency for row in rows} == pytest.approx(
        {"weak": alone(64).step / (alone(64).step + ring), "strong": alone(256).step / 2 / (alone(128).step + ring)}
    )
    assert estimated_step(POINTS, MACHINE, 2, 64, LINK, Sent(0.0, 0.0)) == pytest.approx(alone(64).step)
