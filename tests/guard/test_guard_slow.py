"""Who slows a run down: from made-up times of phases to one sentence, or none."""

from collections.abc import Callable, Sequence
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.rendered import rendered

from paceline.guard.detectors import (
    Straggler,
    StragglerDetector,
    find_slow_network,
    find_slow_rank,
    find_slow_script_rank,
    median_without,
)
from paceline.protocol.evidence import Phase, RankSample

HOSTS = {0: "n1", 1: "n2", 2: "n3", 3: "n4"}


def times(**seconds: float) -> tuple[float, ...]:
    return tuple(seconds.get(phase.word, 0.0) for phase in Phase)


HEALTHY = times(data=0.01, forward=0.04, backward=0.05, optimizer=0.01, sync=0.01)


class Ranks:
    """Ranks that take steps, each of them as long as is said."""

    def __init__(self, ranks: int, step: int = 0, *, of_script: bool = False) -> None:
        self.step, self.of_script, self.spent = step, of_script, {rank: times() for rank in range(ranks)}
        self.queued: dict[int, float] = {}  # what each waits for a core in a step

    def said(self, slowness: StragglerDetector, per_step: Sequence[tuple[float, ...]], steps: int = 100) -> list[str]:
        """What is said while all take so many steps."""
        words: list[str] = []
        for _ in range(steps):
            self.step += 1
            for rank, more in enumerate(per_step):
                self.spent[rank] = tuple(a + b for a, b in zip(self.spent[rank], more, strict=True))
            words.append(slowness.update(self.samples()))
        return [sentence for sentence in words if sentence]

    def samples(self, phase: Phase = Phase.SYNC) -> list[RankSample]:
        return [
            RankSample(rank, HOSTS[rank], 7, step=self.step, phase=phase, phase_seconds=spent, script=self.of_script,
                   queued_seconds=self.step * self.queued.get(rank, 0.0))
            for rank, spent in self.spent.items()
        ]  # fmt: skip


def test_a_rank_whose_data_comes_late_is_named_with_host_and_phase() -> None:
    waiting = times(data=0.01, forward=0.04, backward=0.05, optimizer=0.01, sync=0.51)
    late = times(data=0.52, forward=0.04, backward=0.05, optimizer=0.01)
    found = find_slow_rank({0: waiting, 1: late, 2: waiting}, HOSTS)
    own_code = find_slow_script_rank({0: script(waits=0.5), 1: script(own=0.5)}, HOSTS)
    assert found is not None and (found.rank, found.phase) == (1, Phase.DATA) and own_code is not None
    rendered([found.warning_text, own_code.warning_text])


def test_a_late_rank_is_named_where_the_others_wait_within_their_backward_pass() -> None:
    """DDP waits for its buckets there: all ranks seem to work equally long."""
    waiting = times(data=0.01, forward=0.04, backward=0.56, optimizer=0.01)
    late = times(data=0.52, forward=0.04, backward=0.05, optimizer=0.01)
    for of_ranks in ([waiting, late], [waiting, late, waiting]):
        assert slow_of(*of_ranks, judge=find_slow_rank) == (1, 0.57, 0.06, Phase.DATA)


def test_equal_ranks_and_differences_of_milliseconds_are_not_told() -> None:
    a_little = times(data=0.02, forward=0.04, backward=0.06, optimizer=0.01)  # 1.18 times the others
    fast, noisy = times(forward=0.001, backward=0.001), times(forward=0.004, backward=0.004)  # 4 times, of nothing
    assert find_slow_rank({0: HEALTHY, 1: HEALTHY, 2: HEALTHY}, HOSTS) is None
    assert find_slow_rank({0: HEALTHY, 1: a_little, 2: HEALTHY}, HOSTS) is None
    assert find_slow_rank({0: fast, 1: noisy, 2: fast}, HOSTS) is None


def test_where_everybody_waits_it_is_the_network() -> None:
    waits = times(forward=0.05, backward=0.05, sync=0.4)
    found = find_slow_network({0: waits, 1: times(forward=0.05, backward=0.05, sync=0.3)})
    assert found is not None and found[1] == 0.3
    rendered(found[0])
    assert find_slow_network({0: waits, 1: times(forward=0.05, backward=0.05, sync=0.05)}) is None
    assert find_slow_network({0: times(sync=0.02), 1: times(sync=0.02)}) is None


def test_it_is_said_once_and_again_only_when_it_has_become_half_as_bad_again() -> None:
    slow = times(data=0.3, forward=0.04, backward=0.05, optimizer=0.01)
    ranks, slowness = Ranks(2), StragglerDetector(HOSTS)
    assert len(ranks.said(slowness, [HEALTHY, slow])) == 1
    assert not ranks.said(slowness, [HEALTHY, tuple(1.2 * seconds for seconds in slow)])
    assert len(ranks.said(slowness, [HEALTHY, tuple(2.0 * seconds for seconds in slow)])) == 1


def test_the_first_steps_of_a_start_do_not_count() -> None:
    ranks, slowness = Ranks(2, step=1000), StragglerDetector(HOSTS)
    slowness.update(ranks.samples(Phase.INIT))
    assert not ranks.said(slowness, [HEALTHY, times(data=30.0)], steps=5)  # compiles
    assert not ranks.said(slowness, [HEALTHY, HEALTHY])


def test_scripts_which_say_no_phases_are_not_judged() -> None:
    ranks, slowness = Ranks(2), StragglerDetector(HOSTS)
    for _ in range(100):
        ranks.said(StragglerDetector(HOSTS), [HEALTHY, times(data=1.0)], steps=1)
        assert slowness.update(ranks.samples(Phase.USER)) == ""


def test_one_rank_alone_is_never_slow() -> None:
    assert not Ranks(1).said(StragglerDetector(HOSTS), [times(data=1.0)])


def script(*, own: float = 0.0, data: float = 0.01, waits: float = 0.0, sync: float = 0.0) -> tuple[float, ...]:
    return times(user=0.01 + own, data=data, forward=0.02, backward=0.04 + waits, sync=sync)


def slow_of(*per_step: tuple[float, ...], judge: Callable[..., Straggler | None] = find_slow_script_rank) -> object:
    """The slow rank, its own time, the others' time, the phase."""
    found = judge(dict(enumerate(per_step)), HOSTS)
    return found and (
        found.rank,
        pytest.approx(found.seconds_per_step),
        pytest.approx(found.median_seconds_per_step),
        found.phase,
    )


def test_a_slow_rank_of_a_script_is_named_where_the_others_wait_for_it_as_long() -> None:
    expected = (1, 0.54, 0.04, Phase.USER)
    assert slow_of(script(waits=0.5), script(own=0.5), script(waits=0.5)) == expected
    assert slow_of(script(sync=0.5), script(own=0.5), script(sync=0.5)) == expected
    assert slow_of(script(waits=0.5), script(data=0.51)) == (1, 0.54, 0.04, Phase.DATA)
    quick, slow = times(user=0.005, backward=0.02), times(user=0.018, backward=0.007)
    assert slow_of(quick, slow) == (1, 0.018, 0.005, Phase.USER)
    assert not slow_of(script(waits=0.013), script(own=0.013))


def test_a_rank_of_a_script_is_slow_only_if_it_is_so_in_three_looks_in_a_row() -> None:
    usual, slow, waits = script(), script(own=0.2), script(waits=0.2)
    ranks, slowness = Ranks(3, of_script=True), StragglerDetector(HOSTS)
    ranks.said(slowness, [usual] * 3, steps=56)
    assert not ranks.said(slowness, [waits, slow, waits], steps=15)
    assert not ranks.said(slowness, [slow, waits, waits], steps=15)  # a different rank
    assert not ranks.said(slowness, [usual] * 3, steps=60)
    assert len(ranks.said(slowness, [waits, slow, waits], steps=60)) == 1
    assert slowness.rank == 1


def test_a_rank_that_waits_for_a_core_is_slow_only_if_it_does_so_for_long() -> None:
    slow, waits = script(own=0.2), script(waits=0.2)
    ranks, slowness = Ranks(3, of_script=True), StragglerDetector(HOSTS)
    ranks.queued = {1: 0.2}
    assert not ranks.said(slowness, [waits, slow, waits], steps=80)
    assert len(ranks.said(slowness, [waits, slow, waits], steps=20)) == 1
    ranks, slowness = Ranks(3, of_script=True), StragglerDetector(HOSTS)
    ranks.queued = dict.fromkeys(range(3), 0.2)  # the others as long: that is not why
    assert len(ranks.said(slowness, [waits, slow, waits], steps=45)) == 1


def test_who_waits_in_its_own_code_is_not_called_slow() -> None:
    """The two that are quick wait in `work.wait()`, say, where nobody sees it."""
    assert not slow_of(script(own=0.5), script(own=0.01), script(own=0.5))
    assert not slow_of(script(), script(), script())


@given(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=9), st.integers(0, 8))
def test_the_median_of_the_others_is_found_in_all_that_are_sorted_once(values: list[float], number: int) -> None:
    number %= len(values)
    others = values[:number] + values[number + 1 :]
    assert median_without(sorted(values), values[number]) == median(others)
