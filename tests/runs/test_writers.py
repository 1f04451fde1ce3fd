"""Files of records stay small: old records are thinned or merged, new ones complete, and no error ends a run."""

import random
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.runs import writers as event_writer
from paceline.runs import writing
from paceline.runs.events import Checkpointed, Notice, RolledBack, Started, Step, read_events
from paceline.runs.machine import ClockOffset, NodeUtilization, decode_record, node_log_files, node_log_name
from paceline.runs.reading import read_lines
from paceline.runs.writers import EventWriter, SizeLimitedWriter, merge_consecutive_steps


def use(at: int) -> NodeUtilization:
    return NodeUtilization(float(at), "n1", 2, 0.5, 1 << 30, 2 << 30)


def times(path: Path) -> list[float]:
    return [record.unix_time for line in read_lines(path) if (record := decode_record(line)) is not None]


def test_a_long_run_stays_small_the_newest_whole_and_the_oldest_still_there(tmp_path: Path) -> None:
    path = tmp_path / node_log_name(0)
    writer = SizeLimitedWriter(path, limit_bytes=20_000)
    for second in range(5000):
        writer.write(use(second))
    writer.close()
    kept = times(path)
    assert path.stat().st_size <= 20_000
    assert kept[0] < 500  # of ten times as many records as there is room for, some of the first
    assert kept == sorted(set(kept))
    newest = [t for t in kept if t >= kept[-1] - 50]
    assert newest == [kept[-1] - 50 + second for second in range(51)]


def test_a_torn_line_costs_itself_alone(tmp_path: Path) -> None:
    path = tmp_path / node_log_name(3)
    path.write_bytes(msgspec.json.encode(use(1)) + b'\n{"kind":"mach')
    writer = SizeLimitedWriter(path)
    writer.write(use(2))
    writer.write(ClockOffset(3.0, 1, 0.5, 0.001))
    writer.close()
    assert times(path) == [1.0, 2.0, 3.0]
    assert node_log_files(tmp_path) == {3: path}


def test_a_write_that_fails_is_said_once_and_raises_nothing(tmp_path: Path) -> None:
    said: list[str] = []
    (tmp_path / node_log_name(0)).mkdir()
    writer = SizeLimitedWriter(tmp_path / node_log_name(0), warn=said.append)
    for second in range(3):
        writer.write(use(second))
    assert len(said) == 1
    assert writer.failed


def test_a_link_is_not_written_through(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_text("")
    (tmp_path / node_log_name(0)).symlink_to(tmp_path / "elsewhere")
    said: list[str] = []
    SizeLimitedWriter(tmp_path / node_log_name(0), warn=said.append).write(use(1))
    assert said
    assert [*read_lines(tmp_path / "elsewhere")] == []


def step(number: int, seconds: float = 0.1, **others) -> Step:
    known = {"epoch": number // 100, "loss": 1.0 / number, "samples": 64, "lr": 0.1, "data_seconds": 0.01}
    known |= {"unix_time": 1e9 + number, "consumed": 32, "fingerprint": f"{(number * 0x9E3779B97F4A7C15) % 2**64:016x}"}
    known |= {"share": (0, 1)}
    return Step(number, seconds=seconds, phase_seconds={"forward": 0.05}, **{**known, **others})


def lines(*events) -> list[bytes]:
    return [msgspec.json.encode(event) for event in events]


def found(kept: list[bytes]) -> list:
    return [msgspec.json.decode(line, type=Step | Notice | Started | RolledBack) for line in kept]


def covered(steps: list[Step]) -> list[int]:
    return [n for one in steps for n in range(one.step - one.steps + 1, one.step + 1)]


def test_two_become_one_that_stands_for_both():
    (one,) = found(merge_consecutive_steps(lines(step(1), step(2))))
    assert (one.step, one.steps, one.samples, one.consumed) == (2, 2, 128, 64)
    assert one.loss == pytest.approx(0.75) and one.seconds == pytest.approx(0.2)
    assert one.phase_seconds == {"forward": 0.1} and one.fingerprint == f"{(3 * 0x9E3779B97F4A7C15) % 2**64:016x}"
    (again,) = found(merge_consecutive_steps(lines(one, step(3))))
    assert (again.steps, again.samples) == (3, 192) and again.loss == pytest.approx((1 + 1 / 2 + 1 / 3) / 3)


BORDERS = {
    "an epoch": [step(99), step(100)],
    "a share": [step(1), step(2, share=(0, 2))],
    "a gap": [step(1), step(3)],
    "a notice": [step(1), Notice("hello"), step(2)],
    "left out": [step(1), step(2, skipped=True)],
    "slow": [*map(step, range(1, 30, 2)), step(31), step(32, seconds=9.0)],
}


@pytest.mark.parametrize("name", BORDERS)
def test_what_somebody_may_ask_for_stays(name):
    assert merge_consecutive_steps(lines(*BORDERS[name])) == lines(*BORDERS[name])


def test_a_step_to_which_the_run_went_back_ends_its_record():
    kept = found(merge_consecutive_steps(lines(step(2), step(3), step(4), step(5)), lines(RolledBack(9, 3))))
    assert [(one.step, one.steps) for one in kept] == [(3, 2), (5, 2)]
    shifted = found(merge_consecutive_steps(lines(step(3), step(4), step(5)), lines(RolledBack(9, 3))))
    assert [(one.step, one.steps) for one in shifted] == [(3, 1), (5, 2)]


def test_steps_of_an_earlier_start_stay_as_they_are():
    old, again = lines(step(1), step(2), step(3)), lines(Started(2, 0, 1, "h", 1, "cpu", 0.0, start_step=2))
    assert merge_consecutive_steps(old, again) == old
    assert merge_consecutive_steps([*old, *again, *lines(step(3), step(4))])[:-1] == [*old, *again]


@given(seed=st.integers(0, 10**6))
def test_nothing_is_lost_and_nothing_counted_twice(seed):
    draw = random.Random(seed)
    events, number = [], 0
    while number < 200:
        number += 1
        events.append(step(number, seconds=draw.choice([0.1, 0.1, 0.2, 3.0]), skipped=draw.random() < 0.02))
        if draw.random() < 0.05:
            events.append(Notice("between"))
    for _ in range(4):
        before = len(events)
        events = found(merge_consecutive_steps(lines(*events)))
        steps = [one for one in events if isinstance(one, Step)]
        assert covered(steps) == [*range(1, 201)] and sum(one.samples for one in steps) == 64 * 200
        assert len(events) <= before
    assert len(events) < 120


def test_a_file_stays_below_its_limit_and_its_newer_half_whole(tmp_path: Path):
    path = tmp_path / "events-0.jsonl"
    with EventWriter(path, limit_bytes=20_000) as writer:
        for number in range(1, 2001):
            writer.write(step(number, epoch=0))
            assert path.stat().st_size <= 20_000
    steps = list(read_events(path))
    assert covered(steps) == [*range(1, 2001)] and max(one.steps for one in steps) >= 64
    assert all(one.steps == 1 for one in steps[-20:])


def test_a_file_full_of_what_is_no_step_grows_on(tmp_path: Path, monkeypatch):
    path, thinned = tmp_path / "events-0.jsonl", []
    whole = event_writer.merge_consecutive_steps
    monkeypatch.setattr(event_writer, "merge_consecutive_steps", lambda *told: thinned.append(1) or whole(*told))
    with EventWriter(path, limit_bytes=5_000) as writer:
        for number in range(1000):
            writer.write(Checkpointed(number, "", 0.0, 0.0, 0))
    assert len(list(read_events(path))) == 1000 and len(thinned) < 30


def test_a_disk_without_room_for_a_second_file_ends_nothing(tmp_path: Path, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    path = tmp_path / "events-0.jsonl"
    with EventWriter(path, limit_bytes=5_000) as writer:
        monkeypatch.setattr(writing, "replace_file", full)
        for number in range(1, 101):
            writer.write(step(number))
    assert covered(list(read_events(path))) == [*range(1, 101)]
