"""`paceline runs`: what a person and a program see of a folder of runs, whoever has written them."""

import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.errors import raises
from tests.rendered import rendered

from paceline.cli.run_state import run_state
from paceline.cli.status import list_runs
from paceline.runs.attempt import AttemptEnd, write_attempt_end
from paceline.runs.events import Evaluated, Started, Step
from paceline.runs.folder import create_attempt_dir
from paceline.runs.summary import StatusReport, Summary, write_summary
from paceline.runs.writers import EventWriter


def made(folder: Path, seconds: float, summary: Summary | None = None, words: str = "", **scores: float) -> Path:
    """A run of 20 steps of which three are done, written last at this time."""
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text('task = "/home/me/mine.py:task"\nstrategy = "exact"\n[run]\nepochs = 2\n')
    attempt = create_attempt_dir(folder)[1]
    with EventWriter(folder / "events-0.jsonl") as writer:
        writer.write(Started(1, 0, 2, "n1", 1, "cpu", 0.0, steps_per_epoch=10))
        for step in (1, 2, 3):
            writer.write(Step(step, 0, 1.0, 64, 1e-3, 0.1, 0.0, unix_time=float(step)))
        writer.write(Evaluated(3, scores, 0.1))
    os.utime(folder / "events-0.jsonl", (seconds, seconds))
    if summary is not None:
        write_summary(folder, summary)
    if words:
        write_attempt_end(attempt, AttemptEnd(1, words))
    return folder


DONE = Summary("mine.py:task", 0, "zero", 3, steps=20, epochs=2.0, test_metrics={"loss": 0.25, "accuracy": 0.987})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made(tmp_path / "runs" / "broken-off", 1.7e9, accuracy=0.5)
    made(tmp_path / "runs" / "failed", 1.8e9, words="rank 1 (n1): ValueError: no such file")
    made(tmp_path / "runs" / "whole", 1.6e9, DONE)
    made(tmp_path / "runs" / "stopped", 1.5e9, Summary("mine.py:task", 75, steps=7, epochs=0.7))
    (tmp_path / "runs" / "no-run").mkdir()
    (tmp_path / "runs" / "a-file").touch()
    (tmp_path / "runs" / "a-link").symlink_to(tmp_path / "runs" / "whole")
    return tmp_path / "runs"


def shown(folder: Path, capsys: pytest.CaptureFixture[str]) -> list[str]:
    assert list_runs([str(folder)]) == 0
    return [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]


def test_a_person_sees_each_run_in_a_line_the_newest_first_and_why_it_has_failed(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rendered(re.sub(r" 20\d\d-\d\d-\d\d \d\d:\d\d", " WHEN", line) for line in shown(folder, capsys))


def test_a_program_gets_what_status_says_of_each(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert list_runs([str(folder), "--json"]) == 0
    found = msgspec.json.decode(capsys.readouterr().out, type=list[StatusReport])
    assert found == [run_state(folder / name) for name in ("failed", "broken-off", "whole", "stopped")]
    assert (found[2].metrics, found[2].epochs, found[2].world_size) == (DONE.test_metrics, 2.0, 3)


def test_a_metric_that_is_not_finite_does_not_hide_how_a_run_has_ended(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made(folder / "odd", 1.9e9, Summary("t", 0, steps=4, test_metrics={"loss": math.nan}))
    assert shown(folder, capsys)[1].split()[1] == "done" and "loss nan" in shown(folder, capsys)[1]


def test_the_last_start_counts_and_scores_of_the_one_before_are_shown(folder: Path) -> None:
    with EventWriter(folder / "broken-off" / "events-0.jsonl") as writer:
        writer.write(Started(2, 0, 4, "n1", 1, "cpu", 0.0, start_step=2, steps_per_epoch=10))
    found = run_state(folder / "broken-off")
    assert (found.step, found.world_size, found.metrics) == (2, 4, {"accuracy": 0.5})


def test_no_runs_are_told(tmp_path: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert list_runs([str(folder / "no-run")]) == 0
    assert "no runs in" in capsys.readouterr().err
    with raises("no-folder-of-runs"):
        list_runs([str(tmp_path / "nowhere")])
    with raises("run-not-folder-of-runs"):
        list_runs([str(folder / "whole")])


HOSTILE: dict[str, Any] = {
    "summary.json": b'{"task":"\x1b[2J' + b"x" * 100_000 + b'","exit":0,"steps":9223372036854775807,"epochs":1e-300}',
    "config.toml": b"a" + b".a" * 30_000 + b" = 1",
    "events-0.jsonl": b"[" * 1_000_000,
    "attempt-1/ended.json": b'{"exit": 9, "words": "\\u001b]0;title\\u0007\\n\\n' + b"w" * 1_000_000 + b'"}',
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_others_have_written_neither_ends_the_list_nor_steers_the_terminal(
    folder: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "broken-off" / name).write_bytes(HOSTILE[name])
    (folder / "pipe").mkdir()
    os.mkfifo(folder / "pipe" / "config.toml")
    (folder / "pipe" / "checkpoints").touch()  # no folder: its state cannot be told
    (folder / "closed" / "attempt-1" / "events-0.jsonl").mkdir(parents=True)
    assert list_runs([str(folder)]) == list_runs([str(folder), "--json"]) == 0
    out = capsys.readouterr().out
    assert len(out) < 40_000 and not {"\x1b", "\x07"} & {*out}
    assert all(name in out for name in ("whole", "stopped", "failed", "broken-off", "pipe", "closed"))


def test_that_others_could_have_written_a_run_is_told(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "whole").chmod(0o777)
    list_runs([str(folder)])
    warning = capsys.readouterr().err
    assert warning.count("read-only") == 1 and str(folder / "whole") in warning


def test_it_imports_no_torch(folder: Path) -> None:
    look = "import sys; from paceline.cli import main; code = main(); sys.exit(99 if 'torch' in sys.modules else code)"
    done = subprocess.run([sys.executable, "-c", look, "runs", str(folder)], capture_output=True, text=True, timeout=90)
    assert done.returncode == 0 and "broken-off" in done.stdout, done.stderr
