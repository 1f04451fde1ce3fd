"""The arithmetic of MFU and tokens per second; goodput over starts, repeated steps and rollbacks."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from paceline.runs import utilization
from paceline.runs.events import Event, RolledBack, Started, Step
from paceline.runs.summary import StatusReport, Summary
from paceline.runs.utilization import format_flops, goodput, speed_texts, throughput_and_mfu
from paceline.runs.writers import EventWriter


def started(attempt: int, at: float, step: int = 0) -> Started:
    return Started(attempt, 0, 1, "n1", 1, "cpu", at, start_step=step)


def step(number: int, at: float, seconds: float = 1.0) -> Step:
    phases = {"data": 0.25 * seconds, "forward": 0.75 * seconds, "user": 9.0}
    return Step(number, 0, 1.0, 64, 0.1, seconds + 9.0, 0.0, at, phase_seconds=phases)


def run(folder: Path, *events: Event) -> Path:
    with EventWriter(folder / "events-0.jsonl") as writer:
        for event in events:
            writer.write(event)
    return folder


def test_mfu_is_flops_per_second_by_the_peak_of_all_devices() -> None:
    assert throughput_and_mfu(100.0, 512.0, 1e9, 0.1, 4) == {
        "samples_per_second": 100.0, "tokens_per_second": 51_200.0, "flops_per_second": 1e11, "mfu": 0.25
    }  # fmt: skip
    assert throughput_and_mfu(100.0, 0.0, 0.0, 0.1, 4) == {"samples_per_second": 100.0}
    assert throughput_and_mfu(100.0, 0.0, 1e9, 0.0, 4).keys() == {"samples_per_second", "flops_per_second"}
    assert throughput_and_mfu(None, 1.0, 1e9, 0.1, 4) == {}


def test_only_what_is_known_is_shown() -> None:
    assert speed_texts(Summary("t", 0, tokens_per_second=12345.0, mfu=0.382)) == ["12,345 tokens/s", "MFU 38.2%"]
    assert speed_texts(StatusReport(run_dir="run", state="running", goodput=0.5)) == ["goodput 50.0%"]
    assert speed_texts(SimpleNamespace(mfu=0.5)) == ["MFU 50.0%"]


@pytest.mark.parametrize(
    ("flops", "words"), [(0, "0 FLOP"), (-5, "-5 FLOP"), (999, "999 FLOP"), (1.234e9, "1.23 GFLOP")]
)
def test_flops_have_units(flops: float, words: str) -> None:
    assert format_flops(flops) == words


def test_goodput_is_the_time_of_steps_since_the_first_start(tmp_path: Path) -> None:
    assert goodput(run(tmp_path, started(1, 100.0), step(1, 102.0), step(2, 104.0))) == 0.5
    assert goodput(tmp_path, until=108.0) == 0.25


def test_steps_that_a_later_start_repeats_count_once(tmp_path: Path) -> None:
    first = [started(1, 100.0), step(1, 101.0), step(2, 102.0), step(3, 103.0), step(4, 104.0)]
    again = [started(2, 109.0, step=2), step(3, 110.0), step(4, 111.0), step(5, 112.0)]
    assert goodput(run(tmp_path, *first, *again), until=120.0) == 5 / 20


def test_steps_that_were_undone_do_not_count(tmp_path: Path) -> None:
    events = [started(1, 100.0), step(1, 101.0), step(2, 102.0), RolledBack(2, 1), step(2, 104.0)]
    assert goodput(run(tmp_path, *events)) == 2 / 4


def test_a_run_without_steps_or_with_too_many_has_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert goodput(tmp_path) is None and goodput(tmp_path / "none") is None
    assert goodput(run(tmp_path, started(1, 100.0))) is None
    run(tmp_path, step(1, 101.0))
    assert goodput(tmp_path) == 1.0
    monkeypatch.setattr(utilization, "MOST_EVENT_BYTES", 10)
    assert goodput(tmp_path) is None
