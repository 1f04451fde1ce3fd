"""Events: what is written is read, whatever else stands in the file."""

from pathlib import Path

import pytest

from paceline.errors import UsageError
from paceline.observe.events import Evaluated, EventWriter, Samples, Step, read_events
from paceline.observe.folder import create_attempt_dir, create_run_dir
from paceline.observe.summary import Summary, read_summary, write_summary

EVENTS = [
    Step(1, 0, 2.5, 64, 1e-3, 0.1, 0.01, 1.5e9),
    Samples(1, 0, 2, 0, [5, 3]),
    Evaluated(1, {"loss": 2.0, "accuracy": 0.5}, 0.2),
]


def test_round_trip_and_foreign_lines(tmp_path):
    path = tmp_path / "events-0.jsonl"
    with EventWriter(path) as writer:
        writer.write(EVENTS[0])
    with path.open("a") as file:
        file.write('{"kind":"from the future","x":1}\nno json at all\n{"kind":"step","step":"x"}\n')
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


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_an_error():
    with EventWriter(Path("/dev/full")) as writer, pytest.raises(OSError, match="No space left"):
        writer.write(EVENTS[0])


def test_run_folders_are_never_shared(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first, second = (create_run_dir(None, "a/b:c") for _ in range(2))
    assert first != second
    assert first.parent == tmp_path / "runs"
    assert first.stat().st_mode & 0o077 == 0
    assert create_attempt_dir(first) == (1, first / "attempt-1")
    assert create_attempt_dir(first) == (2, first / "attempt-2")
    assert create_run_dir(first, "x") == first  # two starts that never came to a first step
    (first / "events-0.jsonl").touch()
    with pytest.raises(UsageError, match="never written over"):
        create_run_dir(first, "x")
    assert create_run_dir(tmp_path / "new", "x") == tmp_path / "new"


def test_a_run_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot be written"):
        create_run_dir(tmp_path / "file" / "run", "x")


def test_summaries(tmp_path):
    assert read_summary(tmp_path) is None
    write_summary(tmp_path, Summary(task="t", exit=0, steps=3))
    assert read_summary(tmp_path) == Summary(task="t", exit=0, steps=3)
    assert [p.name for p in tmp_path.iterdir()] == ["summary.json"]
