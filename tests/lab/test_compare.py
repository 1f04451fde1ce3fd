"""`paceline compare`: ratios, quartiles, which bits a strategy has, and the recommendation."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from tests.rendered import rendered

from paceline.lab.compare import (
    Quartiles,
    StrategyRow,
    describe_bit_equality,
    make_strategy_rows,
    quartiles,
    strategy_advice,
)
from paceline.lab.measurement import Candidate, Measurement, MemoryUse


def chunk(name: str, seconds: float, digest: str = "a", world_size: int = 2) -> Measurement:
    strategy, _, batch = name.partition("-b")
    candidate = Candidate(name, strategy, int(batch), 1)
    return Measurement(candidate, world_size, 64, 640, seconds, 2 * seconds, 0.5, 2.0, digest, 1000)


def test_a_ratio_is_that_within_a_round_whatever_the_machine_does_meanwhile() -> None:
    rounds = [
        [chunk("single-b32", 2.0 * slow, world_size=1), chunk("ddp-b32", 1.0 * slow), chunk("exact-b32", 1.25 * slow)]
        for slow in (1.0, 3.0, 10.0)
    ]
    rows = {row.strategy: row for row in make_strategy_rows(rounds, "single-b32", 10)}
    assert (rows["ddp"].ratio.low, rows["ddp"].ratio.median, rows["ddp"].ratio.high) == (2.0, 2.0, 2.0)
    assert rows["exact"].ratio.median == pytest.approx(1.6)
    assert rows["ddp"].rate.median == pytest.approx(640 / 3)
    assert rows["ddp"].rate.low < rows["ddp"].rate.median < rows["ddp"].rate.high
    assert rows["ddp"].cpu_ms == pytest.approx(600)


def test_mfu_is_the_median_of_rounds_that_all_know_it() -> None:
    uses = [{"mfu": 0.25, "tokens_per_second": 10.0}, {"mfu": 0.75}]
    rounds = [[replace(chunk("ddp-b8", 1.0), use=use, mfu_words="how")] for use in uses]
    (row,) = make_strategy_rows(rounds, "single-b8", 10)
    assert (row.mfu, row.tokens_per_second, row.mfu_words) == (0.5, None, "how")


def test_a_strategy_that_failed_in_a_later_round_keeps_what_it_did_before() -> None:
    rounds = [[chunk("single-b8", 1.0, world_size=1), chunk("ddp-b8", 1.0)], [chunk("single-b8", 1.0, world_size=1)]]
    assert [row.strategy for row in make_strategy_rows(rounds, "single-b8", 10)] == ["single", "ddp"]


def test_the_reference_is_no_row_but_the_yardstick_of_bits() -> None:
    rounds = [[chunk("reference-b8", 1.0, "r", 1), chunk("single-b8", 1.0, "s", 1), chunk("exact-b8", 1.0, "r")]]
    rows = make_strategy_rows(rounds, "single-b8", 10)
    assert [(row.strategy, row.bits) for row in rows] == [("single", "-"), ("exact", "every world size")]


@pytest.mark.parametrize(
    ("name", "digests", "reference", "told"),
    [
        ("exact-b8", ["r", "r"], "r", "every world size"),
        ("exact-b8", ["r", "x"], "r", "BROKEN: differs from one process"),
        ("exact-b8", ["r"], None, "every world size"),
        ("ddp-b8", ["r", "r"], "r", "one process's, here"),
        ("ddp-b8", ["d", "d"], "r", "this world size, here"),
        ("ddp-b8", ["d", "e"], "r", "rounding differs"),
        ("ddp-b8", ["d"], "r", "rounding differs"),  # once is no repetition
    ],
)
def test_bits_are_told_by_promise_and_by_what_came_out(name, digests, reference, told) -> None:
    assert describe_bit_equality(chunk(name, 1.0), digests, reference) == told


@given(st.lists(st.floats(0.1, 1e6), min_size=1))
def test_quartiles_are_in_order_and_within_what_was_measured(values) -> None:
    found = quartiles(values)
    slack = 1e-9 * max(values)
    assert min(values) - slack <= found.low <= found.median + slack <= found.high + 2 * slack <= max(values) + 3 * slack


MB = 1_000_000


def row(strategy: str, rate: float, state_mb: int = 100, ranks: int = 2) -> StrategyRow:
    memory = MemoryUse(
        state_mb * MB // 4, state_mb * MB // 4, state_mb * MB // 2, 20 * MB, 5 * MB, (state_mb + 20) * MB
    )
    same = Quartiles(rate, rate, rate)
    return StrategyRow(f"{strategy}-b8", strategy, ranks, 1, 8, 16, same, same, 1.0, 1.0, 1.0, 0.0, memory, "")


ALONE = row("single", 1000, ranks=1)


CASES = {
    "exact is nearly the fastest": (
        [row("ddp", 2000), row("exact", 1900), row("zero", 1850, 60)], ALONE, 1000 * MB, "exact",
    ),
    "exact is slow": ([row("ddp", 2000), row("exact", 1500)], ALONE, None, "ddp"),
    "only shares fit": (
        [row("ddp", 2000), row("exact", 1900), row("zero", 1500, 60), row("fsdp", 1600, 40)], None, 100 * MB, "fsdp",
    ),
    "nothing fits": ([row("ddp", 2000), row("fsdp", 1600, 40)], None, 50 * MB, "fsdp"),
    "more processes bring nothing": ([row("ddp", 1020), row("exact", 900)], ALONE, None, "one process"),
    "all strategies failed": ([], ALONE, None, "one process"),
    "all failed": ([], None, None, "Nothing"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_what_is_advised(case: str) -> None:
    found, alone, room, advised = CASES[case]
    told = strategy_advice(found, alone, room)
    named = re.search("ddp|exact|zero|fsdp|one process|Nothing", told)
    assert named is not None and named[0] == advised
    rendered(told)


rows = st.builds(
    row, st.sampled_from(["ddp", "exact", "zero", "fsdp", "manual"]), st.floats(1, 1e6), st.integers(1, 10_000)
)


@given(
    st.lists(rows, max_size=6),
    st.none() | st.builds(row, st.just("single"), st.floats(1, 1e6)),
    st.none() | st.integers(1, 10**10),
)
def test_it_is_always_one_sentence_that_names_something_measured(found, alone, room) -> None:
    told = strategy_advice(found, alone, room)
    assert told.endswith(".")
    assert "\n" not in told
    assert any(one.strategy in told for one in found) or "one process" in told or "Nothing" in told
