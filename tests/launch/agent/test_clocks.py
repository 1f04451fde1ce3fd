"""The head knows by how much other nodes' clocks are ahead, and never by more than it says that it may be wrong."""

import math
import random
from collections.abc import Callable, Iterator

import pytest

from paceline.launch.agent.channel import CLOCK_RECORD_SECONDS, ClockBounds

BEAT_SECONDS = 2.0


def exchange(
    bounds: ClockBounds, ahead: Callable[[float], float], to_head: Callable[[], float], to_node: Callable[[], float]
) -> Iterator[float]:
    """Beats in both directions for ever, their times as two real clocks would show them: the truth after each."""
    now = 100.0
    while True:
        bounds.narrow(now + (way := to_head()), least_seconds=ahead(now) - way)
        bounds.narrow(now + (way := to_node()), most_seconds=way + ahead(now + way))
        yield ahead(now + way)
        now += BEAT_SECONDS


def steady(seconds: float) -> Callable[[], float]:
    return lambda: seconds


def jittery(least: float, most: float) -> Callable[[], float]:
    dice = random.Random(7)
    return lambda: least + dice.expovariate(1.0) * (most - least) / 3


@pytest.mark.parametrize("ahead", [0.0, 60.0, -60.0, 1e9])
def test_the_sign_is_that_of_a_clock_that_shows_more(ahead: float) -> None:
    bounds = ClockBounds()
    next(exchange(bounds, lambda _: ahead, steady(0.25), steady(0.25)))
    assert bounds.ahead_seconds == pytest.approx(ahead)
    assert bounds.error_seconds == pytest.approx(0.25)


def test_nothing_is_said_before_both_directions_were_heard() -> None:
    bounds = ClockBounds()
    bounds.narrow(1.0, least_seconds=3.0)
    bounds.narrow(2.0, least_seconds=3.1)
    assert math.isinf(bounds.error_seconds) and bounds.due_record(1, 2.0) is None
    bounds.narrow(3.0, most_seconds=3.2)
    record = bounds.due_record(1, 3.0)
    assert record is not None and record.node == 1
    assert record.ahead_seconds == pytest.approx(3.15, abs=0.001)
    assert record.error_seconds == pytest.approx(0.05, abs=0.001)


@pytest.mark.parametrize(
    ("to_head", "to_node"),
    [
        (jittery(0.0002, 0.05), jittery(0.0002, 0.05)),
        (jittery(0.0002, 0.001), jittery(0.02, 0.2)),  # one way is slow: the middle is off, by what the error says
        (jittery(0.02, 0.2), jittery(0.0002, 0.001)),
    ],
)
@pytest.mark.parametrize("drift", [0.0, 8e-5, -8e-5])
def test_the_truth_stays_within_the_error_while_delays_vary_and_clocks_part(
    to_head: Callable[[], float], to_node: Callable[[], float], drift: float
) -> None:
    bounds, errors = ClockBounds(), list[float]()
    beats = exchange(bounds, lambda now: -1.5 + drift * now, to_head, to_node)
    for _ in range(1800):  # an hour
        truth = next(beats)
        assert abs(bounds.ahead_seconds - truth) <= bounds.error_seconds + 1e-9
        errors.append(bounds.error_seconds)
    assert max(errors) < 1.0  # never taken for a clock that was set
    assert sorted(errors)[900] < 0.03  # the quickest of many count, not the usual


@pytest.mark.parametrize("jump", [5.0, -5.0])
def test_a_clock_that_is_set_is_noticed_and_written_down(jump: float) -> None:
    bounds = ClockBounds()
    beats = exchange(bounds, lambda now: jump * (now > 160.0), steady(0.001), steady(0.001))
    for _ in range(28):
        next(beats)
    assert bounds.due_record(1, 150.0) is not None
    for _ in range(6):
        next(beats)
    record = bounds.due_record(1, 170.0)
    assert record is not None
    assert record.ahead_seconds == pytest.approx(jump, abs=0.002) and record.error_seconds < 0.002


def test_what_is_known_better_is_written_at_once_and_the_same_once_a_minute() -> None:
    bounds = ClockBounds()
    bounds.narrow(0.0, least_seconds=-0.4, most_seconds=0.4)
    assert bounds.due_record(1, 0.0) is not None
    bounds.narrow(1.0, least_seconds=-0.3)
    assert bounds.due_record(1, 1.0) is None
    bounds.narrow(2.0, least_seconds=-0.1, most_seconds=0.1)
    assert bounds.due_record(1, 2.0) is not None
    assert bounds.due_record(1, 2.0 + CLOCK_RECORD_SECONDS - 1.0) is None
    assert bounds.due_record(1, 2.0 + CLOCK_RECORD_SECONDS) is not None
    assert bounds.due_record(1, 2.0 + CLOCK_RECORD_SECONDS) is None
