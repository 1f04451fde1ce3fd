"""When is a run said to stand still? The clock is a number here: `StallDetector` never looks at one itself."""

from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.errors import raises

from paceline.guard.detectors import StallAlarm, StallDetector
from paceline.protocol.evidence import Phase, RankSample
from paceline.protocol.job import HangTimeout


def rank(number: int, still_seconds: float, phase: Phase, step: int, *, waiting: bool, stepped: bool) -> RankSample:
    spent = tuple(float(stepped and one is Phase.OPTIMIZER) for one in Phase)
    return RankSample(
        number, "n1", 7, step=step, phase=phase, phase_seconds=spent, still_seconds=still_seconds, waiting=waiting
    )


def ranks(
    still_seconds: float, *, step: int = 50, phases: Iterable[Phase] = (Phase.SYNC, Phase.FORWARD), waiting: bool = True
) -> list[RankSample]:
    """The last of `phases` is that of the rank for which the others wait."""
    phases = list(phases)
    return [
        rank(n, still_seconds, phase, step, waiting=waiting and n < len(phases) - 1, stepped=step > 0)
        for n, phase in enumerate(phases)
    ]


class Clock:
    """Calls a pace every half second, as an agent does."""

    def __init__(self, text: str = "auto") -> None:
        self.pace, self.now = StallDetector(HangTimeout.parse(text)), 0.0

    def steps(self, count: int, gap_seconds: float, **settings: object) -> None:
        """Make so many healthy steps, each of which takes so long."""
        for step in range(count):
            assert self.stand(gap_seconds, step=step, warned=True, **settings) is None

    def stand(self, seconds: float, *, warned: bool = False, **settings: object) -> tuple[StallAlarm, float] | None:
        """Stand still; the first alarm, and after how long. `warned`: warnings are no matter."""
        began = self.now
        while self.now < began + seconds:
            alarm = self.pace.update(self.now, ranks(self.now - began, **settings))  # type: ignore[arg-type]
            if alarm is not None and not (warned and alarm.kind == "warn"):
                return alarm, self.now - began
            self.now += 0.5
        return None


def first_stall(clock: Clock, **settings: object) -> float:
    """After how many seconds a run that does not move any more is said to stand still."""
    found = clock.stand(10000.0, warned=True, **settings)
    assert found is not None
    return found[1]


@pytest.mark.parametrize(
    ("text", "seconds", "off"),
    [("auto", None, False), ("off", None, True), ("30", 30.0, False), ("7.5", 7.5, False), ("30s", 30.0, False),
     (" 5 ", 5.0, False), ("AUTO", None, False)],
)  # fmt: skip
def test_what_a_user_may_say(text: str, seconds: float | None, off: bool) -> None:
    assert HangTimeout.parse(text) == HangTimeout(seconds, off)


@pytest.mark.parametrize("text", ["0", "-3", "abc", "nan", "inf", "", "1e9", "5m", "0.0", "99999999", "٣", "5 5"])
def test_what_a_user_may_not_say_is_answered_with_the_choices(text: str) -> None:
    with raises("hang-timeout-invalid", value=text):
        HangTimeout.parse(text)


LONG = (Phase.INIT, Phase.EVALUATE, Phase.CHECKPOINT, Phase.CLOSE)
NOBODY_WAITS = {"phases": (Phase.FORWARD, Phase.OPTIMIZER), "waiting": False}
SCRIPT = {"phases": (Phase.USER, Phase.USER), "step": 0}
# name -> (--hang-timeout, how many steps of how many seconds go well, how all stand then, when that is an alarm)
WINDOWS = {
    "five times the longest gap": ("auto", (20, 4.0), {"step": 20}, 20.0),
    "at least ten seconds": ("auto", (20, 0.5), {"step": 20}, 10.0),
    "at most 300 seconds": ("auto", (12, 90.0), {"step": 20}, 300.0),
    "the first step may compile": ("auto", (0, 0.0), {"step": 0}, 300.0),
    "the first step, with a number": ("5", (0, 0.0), {"step": 0}, 60.0),
    "steps of 20 ms, of which three are over when the agent first looks": ("5", (0, 0.0), {"step": 3}, 5.0),
    "a script, which reports no phases": ("auto", (0, 0.0), SCRIPT, 300.0),
    "a script, with a number": ("5", (0, 0.0), SCRIPT, 5.0),
    "a kernel without end": ("auto", (9, 1.0), NOBODY_WAITS, 300.0),
    "a kernel without end, with a number": ("5", (9, 1.0), NOBODY_WAITS, 60.0),
    "data of one rank": ("5", (5, 1.0), {"phases": (Phase.DATA,), "waiting": False}, 5.0),
    "data has a higher floor": ("auto", (20, 0.5), {"phases": (Phase.SYNC, Phase.DATA)}, 30.0),
} | {
    f"{phase.word}, {text}": (text, (20, 0.5), {"phases": (Phase.SYNC, phase)}, seconds)
    for phase in LONG
    for text, seconds in (("auto", 300.0), ("5", 60.0), ("30", 120.0))
}


@pytest.mark.parametrize("name", WINDOWS)
def test_how_long_a_run_may_stand_still(name: str) -> None:
    text, (count, gap_seconds), settings, seconds = WINDOWS[name]
    clock = Clock(text)
    clock.steps(count, gap_seconds)
    assert first_stall(clock, **settings) == pytest.approx(seconds, abs=1.0)


def test_who_looks_seldom_takes_the_time_between_two_looks_for_no_gap() -> None:
    """The head of a thousand nodes looks every three seconds at ranks that all move."""
    clock = Clock()
    for look in range(40):
        assert clock.pace.update(clock.now, ranks(0.1, step=look)) is None
        clock.now += 3.0
    found = clock.stand(100.0, warned=True)
    assert found is not None and found[0].window_seconds == 10.0


def test_a_warning_comes_once_at_half_of_the_window_and_the_alarm_again_after_each_further_one() -> None:
    clock = Clock("8")
    clock.steps(3, 1.0)
    alarms: list[tuple[str, float]] = []
    began = clock.now
    while clock.now < began + 25:
        if alarm := clock.pace.update(clock.now, ranks(clock.now - began)):
            alarms.append((alarm.kind, clock.now - began))
        clock.now += 0.5
    assert alarms == [("warn", 4.0), ("stall", 8.0), ("stall", 16.0), ("stall", 24.0)]


def test_every_standstill_is_warned_of_by_itself() -> None:
    clock = Clock("8")
    clock.steps(3, 1.0)
    for _ in range(2):
        found = clock.stand(6.0)
        assert found is not None and found[0].kind == "warn"
        clock.now += 0.5


def test_a_long_phase_that_has_once_taken_longer_gets_five_times_that() -> None:
    clock = Clock()
    clock.steps(20, 0.5)
    assert clock.stand(100.0, phases=(Phase.SYNC, Phase.EVALUATE)) is None
    clock.steps(2, 0.5)
    assert first_stall(clock, phases=(Phase.SYNC, Phase.EVALUATE)) == pytest.approx(500.0, abs=2.0)


def test_the_first_step_of_a_resumed_run_may_compile_too() -> None:
    pace = StallDetector(HangTimeout.parse("5"))
    for second in range(50):
        waits = rank(0, float(second), Phase.SYNC, 1000, waiting=True, stepped=False)
        compiles = rank(1, float(second), Phase.BACKWARD, 1000, waiting=False, stepped=False)
        assert pace.update(float(second), [waits, compiles]) in (None, StallAlarm("warn", 30.0, 60.0))


def test_a_script_in_which_nobody_waits_is_left_alone() -> None:
    assert Clock("5").stand(500.0, phases=(Phase.USER, Phase.USER), waiting=False) is None


def test_one_rank_that_moves_is_enough() -> None:
    pace = StallDetector(HangTimeout.parse("5"))
    for second in range(100):
        moving = [
            rank(0, float(second), Phase.SYNC, 9, waiting=True, stepped=True),
            rank(1, 0.2, Phase.FORWARD, 9, waiting=False, stepped=True),
        ]
        assert pace.update(float(second), moving) is None


def test_off_says_nothing() -> None:
    assert Clock("off").stand(100000.0 / 50) is None


def test_who_was_suspended_begins_to_count_anew() -> None:
    clock = Clock("8")
    clock.steps(3, 1.0)
    assert clock.stand(3.0) is None
    suspended_seconds = 3600.0
    clock.now += suspended_seconds
    began = clock.now
    while clock.now < began + 3.5:  # ages that count the sleep, too
        assert clock.pace.update(clock.now, ranks(clock.now - began + suspended_seconds)) is None
        clock.now += 0.5


def test_a_number_shorter_than_a_healthy_step_is_said_once() -> None:
    clock = Clock("5")
    clock.steps(5, 1.0)
    assert clock.pace.notice == ""
    for _ in range(2):
        assert clock.stand(7.0, phases=(Phase.FORWARD, Phase.FORWARD), waiting=False) is None
    clock.steps(1, 1.0)
    assert "--hang-timeout 5 " in clock.pace.notice
    clock.pace.notice = ""
    assert clock.stand(7.0, phases=(Phase.FORWARD, Phase.FORWARD), waiting=False) is None
    clock.steps(1, 1.0)
    assert clock.pace.notice == ""


@settings(max_examples=100, derandomize=True, deadline=None)
@given(st.lists(st.floats(0.5, 40.0), min_size=8, max_size=40))
def test_no_alarm_while_no_gap_is_five_times_as_long_as_those_before(gaps: list[float]) -> None:
    clock = Clock()
    largest = 0.0
    for step, gap in enumerate(gaps):
        if step >= 5 and gap >= 5 * max(largest - 0.5, 2.0):  # what is seen of a gap is rounded down
            continue
        assert clock.stand(gap, step=step, warned=True) is None
        largest = max(largest, gap if step else 0.0)


@pytest.mark.parametrize("gap_seconds", [20.0, 59.0])
def test_a_run_of_slow_steps_is_not_taken_for_a_fast_one_when_its_first_steps_are_over(gap_seconds: float) -> None:
    clock = Clock()
    clock.steps(12, gap_seconds, phases=(Phase.FORWARD, Phase.SYNC))
    assert first_stall(clock, step=12, phases=(Phase.SYNC, Phase.DATA)) == pytest.approx(5 * gap_seconds, abs=3.0)
