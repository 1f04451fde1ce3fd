"""The sentence at the end of `compare`: from made-up rows whose answer is plain."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.rendered import rendered

from paceline.lab.compare import Row, Spread, advise
from paceline.lab.measurement import Memory

MB = 1_000_000


def row(strategy: str, rate: float, state_mb: int = 100, ranks: int = 2) -> Row:
    memory = Memory(state_mb * MB // 4, state_mb * MB // 4, state_mb * MB // 2, 20 * MB, 5 * MB, (state_mb + 20) * MB)
    same = Spread(rate, rate, rate)
    return Row(f"{strategy}-b8", strategy, ranks, 1, 8, 16, same, same, 1.0, 1.0, 1.0, 0.0, memory, "")


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
    told = advise(found, alone, room)
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
    told = advise(found, alone, room)
    assert told.endswith(".")
    assert "\n" not in told
    assert any(one.strategy in told for one in found) or "one process" in told or "Nothing" in told
