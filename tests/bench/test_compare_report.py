"""From chunks to rows: ratios within a round, quartiles over rounds, and whose bits a strategy has."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from paceline.bench.compare import bits_of, compared_rows, spread
from paceline.bench.spec import Measurement


def chunk(name: str, seconds: float, digest: str = "a", world_size: int = 2) -> Measurement:
    strategy, _, batch = name.partition("-b")
    return Measurement(name, strategy, world_size, int(batch), 1, 64, 640, seconds, 2 * seconds, 0.5, 2.0, digest, 1000)


def test_a_ratio_is_that_within_a_round_whatever_the_machine_does_meanwhile() -> None:
    rounds = [
        [chunk("single-b32", 2.0 * slow, world_size=1), chunk("ddp-b32", 1.0 * slow), chunk("exact-b32", 1.25 * slow)]
        for slow in (1.0, 3.0, 10.0)
    ]
    rows = {row.strategy: row for row in compared_rows(rounds, "single-b32", 10)}
    assert (rows["ddp"].ratio.low, rows["ddp"].ratio.median, rows["ddp"].ratio.high) == (2.0, 2.0, 2.0)
    assert rows["exact"].ratio.median == pytest.approx(1.6)
    assert rows["ddp"].rate.median == pytest.approx(640 / 3)
    assert rows["ddp"].rate.low < rows["ddp"].rate.median < rows["ddp"].rate.high
    assert rows["ddp"].cpu_ms == pytest.approx(600)


def test_mfu_is_the_median_of_rounds_that_all_know_it() -> None:
    uses = [{"mfu": 0.25, "tokens_per_second": 10.0}, {"mfu": 0.75}]
    rounds = [[replace(chunk("ddp-b8", 1.0), use=use, mfu_words="how")] for use in uses]
    (row,) = compared_rows(rounds, "single-b8", 10)
    assert (row.mfu, row.tokens_per_second, row.mfu_words) == (0.5, None, "how")


def test_a_strategy_that_failed_in_a_later_round_keeps_what_it_did_before() -> None:
    rounds = [[chunk("single-b8", 1.0, world_size=1), chunk("ddp-b8", 1.0)], [chunk("single-b8", 1.0, world_size=1)]]
    assert [row.strategy for row in compared_rows(rounds, "single-b8", 10)] == ["single", "ddp"]


def test_the_reference_is_no_row_but_the_yardstick_of_bits() -> None:
    rounds = [[chunk("reference-b8", 1.0, "r", 1), chunk("single-b8", 1.0, "s", 1), chunk("exact-b8", 1.0, "r")]]
    rows = compared_rows(rounds, "single-b8", 10)
    assert [(row.strategy, row.bits) for row in rows] == [("single", "-"), ("exact", "every world size")]


@pytest.mark.parametrize(
    ("name", "digests", "reference", "told"),
    [
        ("exact-b8", ["r", "r"], "r", "every world size"),
        ("exact-b8", ["r", "x"], "r", "BROKEN: not one process's"),
        ("exact-b8", ["r"], None, "every world size"),
        ("ddp-b8", ["r", "r"], "r", "one process's, here"),
        ("ddp-b8", ["d", "d"], "r", "this world size, here"),
        ("ddp-b8", ["d", "e"], "r", "rounding differs"),
        ("ddp-b8", ["d"], "r", "rounding differs"),  # once is no repetition
    ],
)
def test_bits_are_told_by_promise_and_by_what_came_out(name, digests, reference, told) -> None:
    assert bits_of(chunk(name, 1.0), digests, reference) == told


@given(st.lists(st.floats(0.1, 1e6), min_size=1))
def test_quartiles_are_in_order_and_within_what_was_measured(values) -> None:
    found = spread(values)
    slack = 1e-9 * max(values)
    assert min(values) - slack <= found.low <= found.median + slack <= found.high + 2 * slack <= max(values) + 3 * slack
