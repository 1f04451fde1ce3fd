"""Events are read as they were written, whatever else the file contains."""

import os
from pathlib import Path

import pytest
from tests.errors import raises

from paceline.runs import writing
from paceline.runs.events import Evaluated, SampleIndices, Started, Step, read_events
from paceline.runs.folder import create_attempt_dir, set_up_run_dir
from paceline.runs.summary import Summary, read_summary, write_summary
from paceline.runs.writers import EventWriter

EVENTS = [
    Step(1, 0, 2.5, 64, 1e-3, 0.1, 0.01, 1.5e9),
    Step(2, 0, 2.5, 64, 1e-3, 0.1, 0.01, 1.5e9, share=(1, 3), consumed=31, fingerprint="1f"),
    SampleIndices(1, 0, 2, 0, [5, 3]),
    Evaluated(1, {"loss": 2.0, "accuracy": 0.5}, 0.2),
]


def test_round_trip_and_foreign_lines(tmp_path):
    path = tmp_path / "events-0.jsonl"
    with EventWriter(path) as writer:
        writer.write(EVENTS[0])
    with path.open("ab") as file:
        file.write(b'{"kind":"from the future","x":1}\nno json at all\n{"kind":"step","step":"x"}\n{"kind":"\xff"}\n')
    with EventWriter(path) as writer:  # appends
        for event in EVENTS[1:]:
            writer.write(event)
    with path.open("a") as file:
        file.write('{"kind":"step","st')  # torn by a kill
    assert list(read_events(path)) == EVENTS


def test_a_record_is_in_the_file_before_write_returns(tmp_path):
    writer = EventWriter(tmp_path / "events-0.jsonl")
    writer.write(EVENTS[0])
    assert list(read_events(tmp_path / "events-0.jsonl")) == EVENTS[:1]
    writer.__exit__(None, None, None)


@pytest.mark.parametrize("torn", [b'{"kind":"step","st', b'{"kind":"notice","text":"\xc3', b"\0\0\0"])
def test_a_line_torn_by_a_kill_does_not_swallow_the_record_after_it(tmp_path, torn):
    path = tmp_path / "events-0.jsonl"
    for event in EVENTS:
        with EventWriter(path) as writer:
            writer.write(event)
        with path.open("ab") as file:
            file.write(torn)
    assert list(read_events(path)) == EVENTS


def test_a_file_that_ends_well_is_continued_as_it_is(tmp_path):
    path = tmp_path / "events-0.jsonl"
    for event in EVENTS:
        with EventWriter(path) as writer:
            writer.write(event)
    assert len(path.read_bytes().splitlines()) == len(EVENTS)


def test_flushed_records_are_handed_to_the_disk(tmp_path, monkeypatch):
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(os.fstat(fd).st_ino))  # losing power is hard to stage
    path = tmp_path / "events-0.jsonl"
    with EventWriter(path) as writer:
        writer.write(EVENTS[0])
        assert synced == []
        writer.flush()
    assert synced == [path.stat().st_ino]


def test_files_of_an_older_paceline_are_read(tmp_path):
    path = tmp_path / "events-0.jsonl"
    path.write_text(
        '{"kind":"started","attempt":1,"rank":0,"world_size":2,"host":"h","pid":7,"device":"cpu","unix_time":1.5}\n'
        '{"kind":"step","step":1,"epoch":0,"loss":2.5,"samples":64,"lr":0.001,"seconds":0.1,"data_seconds":0.01,'
        '"unix_time":1.5e9,"grad_norm":null}\n'
    )
    assert list(read_events(path)) == [Started(1, 0, 2, "h", 7, "cpu", 1.5), EVENTS[0]]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(writing, "open_or_create", lambda path, append: os.open("/dev/full", os.O_RDWR))
    with EventWriter(tmp_path / "events-0.jsonl") as writer, pytest.raises(OSError, match="No space left"):
        writer.write(EVENTS[0])


def test_run_folders_are_never_shared(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first, second = (set_up_run_dir(None, "a/b:c") for _ in range(2))
    assert first != second
    assert first.parent == tmp_path / "runs"
    assert first.stat().st_mode & 0o077 == 0
    assert create_attempt_dir(first) == (1, first / "attempt-1")
    assert create_attempt_dir(first) == (2, first / "attempt-2")
    assert set_up_run_dir(first, "x") == first  # two starts that never came to a first step
    (first / "events-0.jsonl").touch()
    with raises("run-dir-not-empty"):
        set_up_run_dir(first, "x")
    assert set_up_run_dir(tmp_path / "new", "x") == tmp_path / "new"


def test_a_run_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with raises("run-dir-not-writable"):
        set_up_run_dir(tmp_path / "file" / "run", "x")


def test_summaries(tmp_path):
    assert read_summary(tmp_path) is None
    write_summary(tmp_path, Summary(task="t", exit=0, steps=3))
    assert read_summary(tmp_path) == Summary(task="t", exit=0, steps=3)
    assert [p.name for p in tmp_path.iterdir()] == ["summary.json"]
