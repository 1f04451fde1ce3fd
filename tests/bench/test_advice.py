"""The sentence at the end of `compare`: from made-up rows whose answer is plain."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from paceline.bench.advice import advise
from paceline.bench.compare import Row, Spread
from paceline.bench.spec import Memory

MB = 1_000_000


def row(strategy: str, rate: float, state_mb: int = 100, ranks: int = 2) -> Row:
    memory = Memory(state_mb * MB // 4, state_mb * MB // 4, state_mb * MB // 2, 20 * MB, 5 * MB, (state_mb + 20) * MB)
    same = Spread(rate, rate, rate)
    return Row(f"{strategy}-b8", strategy, ranks, 1, 8, 16, same, same, 1.0, 1.0, 1.0, 0.0, memory, "")


ALONE = row("single", 1000, ranks=1)


def test_where_it_fits_and_exact_is_nearly_the_fastest_exact_is_advised() -> None:
    told = advise([row("ddp", 2000), row("exact", 1900), row("zero", 1850, 60)], ALONE, 1000 * MB)
    assert told == (
        "Use exact: it fits on one device (120 MB of 1.0 GB), has the same bits at every world size, and is 0.95 times "
        "the fastest, ddp (2,000 samples/s), at 1,900 samples/s, 1.90 times one process."
    )


def test_where_exact_is_slow_the_fastest_is_advised() -> None:
    told = advise([row("ddp", 2000), row("exact", 1500)], ALONE, None)
    assert told.startswith("Use ddp: it fits on one device (120 MB) and is the fastest, at 2,000 samples/s, 2.00 times")


def test_where_only_shares_fit_those_who_share_are_advised() -> None:
    rows = [row("ddp", 2000), row("exact", 1900), row("zero", 1500, 60), row("fsdp", 1600, 40)]
    told = advise(rows, None, 100 * MB)
    assert told.startswith(
        "Use fsdp: only strategies that share out the training's state fit into the 100 MB of a rank"
    )
    assert "60 MB, at 1,600 samples/s" in told


def test_where_nothing_fits_the_least_is_advised_with_what_helps() -> None:
    told = advise([row("ddp", 2000), row("fsdp", 1600, 40)], None, 50 * MB)
    assert told.startswith("Use fsdp: nothing fits into the 50 MB of a rank; it needs least, 60 MB")


def test_more_processes_that_bring_nothing_are_not_advised() -> None:
    told = advise([row("ddp", 1020), row("exact", 900)], ALONE, None)
    assert told.startswith(
        "Train on one process: it reaches 1,000 samples/s on 1 thread; the fastest of 2 processes, ddp"
    )


def test_where_all_failed_that_is_said() -> None:
    assert "none of the strategies could be measured" in advise([], ALONE, None)
    assert advise([], None, None).startswith("Nothing could be measured")


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
