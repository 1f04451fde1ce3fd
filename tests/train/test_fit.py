"""How long a step spends in each phase: by a clock that is set by hand, and in a real step's record."""

import time
from pathlib import Path

import pytest
from tests import warm

from paceline.protocol.evidence import Phase
from paceline.protocol.status_page import StatusPage, make_status_page
from paceline.runs.events import Step, read_events
from paceline.train.step_record import PhaseClock


def test_phases_add_up_and_what_follows_a_take_counts_for_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0]
    monkeypatch.setattr(time, "monotonic_ns", lambda: now[0])
    monkeypatch.setattr(time, "monotonic", lambda: now[0] / 1e9)
    page = StatusPage(make_status_page(0))
    clock = PhaseClock(page)

    def pass_(seconds: int) -> None:
        now[0] += seconds * 10**9

    pass_(100)  # before the first step
    clock.start()
    pass_(1)
    for seconds, phase in enumerate((Phase.FORWARD, Phase.BACKWARD, Phase.FORWARD, Phase.SYNC), 2):
        page.enter(phase)
        pass_(seconds)
    assert clock.take() == {"data": 1, "forward": 6, "backward": 3, "sync": 5}
    page.enter(Phase.EVALUATE)
    pass_(100)
    assert clock.take() == {}
    clock.start()
    pass_(7)
    assert clock.take() == {"data": 7}


def test_an_event_of_an_older_paceline_is_read_without_phases(tmp_path: Path) -> None:
    numbers = '"step":1,"epoch":0,"loss":1.0,"samples":8,"lr":0.1,"seconds":1.0,"data_seconds":0.1,"unix_time":1.0'
    (tmp_path / "events-0.jsonl").write_text('{"kind":"step",' + numbers + "}\n")
    [event] = read_events(tmp_path / "events-0.jsonl")
    assert isinstance(event, Step)
    assert event.phase_seconds == {}


@pytest.mark.ranks
def test_the_phases_of_every_step_of_a_training_are_its_seconds(tmp_path: Path) -> None:
    task = Path(__file__).parents[1] / "lab" / "tasks_to_measure.py"
    done = warm.run(["-m", "paceline", "train", f"{task}:small", "--steps", 6, "--run-dir", tmp_path / "r"])
    assert done.returncode == 0, done.stderr
    steps = [event for event in read_events(tmp_path / "r" / "events-0.jsonl") if isinstance(event, Step)]
    assert len(steps) == 6
    for step in steps:
        assert set(step.phase_seconds) == {"data", "forward", "backward", "sync", "optimizer"}
        assert sum(step.phase_seconds.values()) == pytest.approx(step.seconds, rel=0.05, abs=2e-3)
        assert step.phase_seconds["data"] == pytest.approx(step.data_seconds, rel=0.05, abs=2e-3)
