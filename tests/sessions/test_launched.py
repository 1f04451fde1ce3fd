"""A session with a folder of its own under `paceline launch`: from both folders a user finds what failed first."""

import subprocess
from pathlib import Path

import pytest
from tests import warm
from tests.errors import ended_with

from paceline.cli import logs, status
from paceline.cli.live import _newest_diagnosis
from paceline.cli.run_state import list_attempt_dirs, run_folder_locked_by_agent, run_state
from paceline.errors import ExitCode
from paceline.report.outcome import root_failures
from paceline.report.page import repeat_command
from paceline.report.run import read_run
from paceline.runs.attempt import AttemptEnd, write_attempt_end
from paceline.runs.folder import LAUNCH_FILE, create_attempt_dir, resolve_launch_attempt_dir
from paceline.runs.reading import read_toml
from paceline.runs.summary import Summary, write_summary

pytestmark = pytest.mark.sample(2)

SCRIPT = """
import sys, torch, paceline

def check(s):
    if s.step == 3 and s.rank == 1 and sys.argv[2:]:
        raise ValueError("bad sample 4711")

with paceline.session(sys.argv[1], keep_checkpoints=2) as s:
    model, optimizer = s.prepare(torch.nn.Linear(2, 1), lambda p: torch.optim.SGD(p, lr=0.1))
    for epoch in s.epochs(2):
        for x in s.loader(torch.arange(16.0).reshape(8, 2) / 16, global_batch=2):
            check(s)
            optimizer.zero_grad()
            s.backward(model(x).mean())
            optimizer.step()
"""


def launch(folder: Path, *words: str, script: str = SCRIPT, name: str = "mine.py") -> subprocess.CompletedProcess[str]:
    (folder / name).write_text(script)
    command = ("-m", "paceline", "launch", "--nproc", "2", "--run-dir", "launched", "--", name, *words)
    return warm.run(command, cwd=folder, ranks=True)


@pytest.fixture(scope="module")
def failed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder with both run folders, and what the launcher has printed."""
    folder = tmp_path_factory.mktemp("failed")
    done = launch(folder, "own", "fails")
    assert done.returncode == 1, done.stdout + done.stderr
    return folder, done.stderr


@pytest.mark.ranks
@pytest.mark.parametrize("name", ["own", "launched"])
def test_both_folders_lead_to_the_rank_that_failed_first(
    failed: tuple[Path, str], name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = failed[0] / name
    found = run_state(run)
    assert found.state == "failed" and found.words.startswith("exit code 1: rank 1 ("), found
    assert "ValueError: bad sample 4711" in found.words
    assert [(rank.partition(" (")[0], words) for rank, words in root_failures(read_run(run))] == [
        ("rank 1", "bad sample 4711")
    ]
    assert logs.main([str(run), "--rank", "1", "--grep", "4711"]) == status.main([str(run)]) == 0
    assert capsys.readouterr().out.count("bad sample 4711") >= 2
    assert run_folder_locked_by_agent(run) == failed[0] / "launched"


@pytest.mark.ranks
def test_the_report_on_the_first_failure_stands_last_and_its_victim_takes_one_line(failed: tuple[Path, str]) -> None:
    log = failed[0] / "launched" / "attempt-1" / "rank-0.log"
    lines = failed[1].splitlines()
    (victim,) = [number for number, line in enumerate(lines) if str(log) in line and line.startswith("[rank 0] ")]
    assert not [line for line in lines if line.startswith("[rank 0] Traceback") or "closed by peer" in line]
    headline = max(number for number, line in enumerate(lines) if line.startswith("rank 1 (") and " failed: " in line)
    assert headline > victim and "ValueError: bad sample 4711" in lines[headline + 1 :]
    assert "Traceback" in log.read_text() and "closed by peer" in log.read_text()


@pytest.mark.ranks
def test_its_settings_are_those_of_the_loop_only(failed: tuple[Path, str]) -> None:
    found = read_toml(failed[0] / "own" / "config.toml")
    assert found.pop("data") == {"virtual_ranks": 2, "global_batch": 2, "accumulation": 1, "last_batch": "keep"}
    assert found.pop("run") == {"seed": 0, "epochs": 2}
    assert found.pop("checkpoint") == {"keep_checkpoints": 2, "check_replicas_every": 100}
    assert found.pop("guard") == {"not_finite": "stop", "on_audit": "stop"}
    assert {*found.pop("launch")} == {"device", "backend", "timeout"}
    assert found == {"task": "mine.py", "strategy": "bucketed"}
    assert "paceline train" not in repeat_command(read_run(failed[0] / "own"))


@pytest.mark.ranks
def test_a_session_in_the_folder_of_its_launch_uses_the_same_attempt(tmp_path: Path) -> None:
    done = launch(tmp_path, "launched")
    assert done.returncode == 0, done.stdout + done.stderr
    run = tmp_path / "launched"
    assert [path.name for path in list_attempt_dirs(run)] == ["attempt-1"] and not (
        run / "attempt-1" / LAUNCH_FILE
    ).exists()
    assert run_state(run).state == "done" and (run / "model.safetensors").is_file()


@pytest.mark.ranks
def test_a_session_that_resumes_starts_again_in_the_folder_of_its_launch(tmp_path: Path) -> None:
    resumes, run = SCRIPT.replace("keep_checkpoints=2", "keep_checkpoints=2, resume=True"), tmp_path / "launched"
    assert launch(tmp_path, "launched", "fails", script=resumes).returncode == ExitCode.FAILED
    done = launch(tmp_path, "launched", script=resumes)
    assert done.returncode == ExitCode.DONE, done.stdout + done.stderr
    found = run_state(run)
    assert (found.state, found.step, found.attempts) == ("done", 8, 2)
    weights = (run / "model.safetensors").read_bytes()
    # the same script without resume=True, another script, and a script without a session: each is a different run
    assert launch(tmp_path, "launched").returncode == ExitCode.USAGE
    for name, script in (("other.py", resumes), ("plain.py", "print('started')")):
        ended_with(launch(tmp_path, "launched", script=script, name=name), "run-dir-holds-run")
    assert len(list_attempt_dirs(run)) == 3
    assert (run / "model.safetensors").read_bytes() == weights and run_state(run).state == "done"


def test_reports_of_hangs_are_those_of_the_launch(tmp_path: Path) -> None:
    (tmp_path / "launched" / "attempt-3" / "diagnosis-1").mkdir(parents=True)
    (tmp_path / "launched" / "attempt-3" / "diagnosis-1" / "diagnosis.json").touch()
    (tmp_path / "own").mkdir()
    create_attempt_dir(tmp_path / "own", tmp_path / "launched" / "attempt-3")
    assert list_attempt_dirs(tmp_path / "own") == [tmp_path / "launched" / "attempt-3"]
    assert _newest_diagnosis(tmp_path / "own") == tmp_path / "launched" / "attempt-3" / "diagnosis-1"


@pytest.mark.parametrize(("summary", "launch", "told"), [(1, 137, 137), (0, 1, 0), (1, 0, 1)])
def test_the_code_is_that_of_the_launch_if_both_have_failed(
    tmp_path: Path, summary: int, launch: int, told: int
) -> None:
    (tmp_path / "launched" / "attempt-1").mkdir(parents=True)
    write_attempt_end(tmp_path / "launched" / "attempt-1", AttemptEnd(launch, "rank 1 was killed" if launch else ""))
    (tmp_path / "own").mkdir()
    create_attempt_dir(tmp_path / "own", tmp_path / "launched" / "attempt-1")
    write_summary(tmp_path / "own", Summary("mine.py", summary, failure="connection closed"))
    found = run_state(tmp_path / "own")
    assert (found.state, f"exit code {told}: " in found.words) == (("failed", True) if told else ("done", False))
    assert ("rank 1 was killed" in found.words) == (told == 137)


@pytest.mark.parametrize("text", ["attempt-1", "/", "/nowhere/attempt-1", "\0", "x" * 20_000, "{file}", b"\xff"])
def test_what_is_no_attempt_is_not_followed(tmp_path: Path, text: str | bytes) -> None:
    _, attempt = create_attempt_dir(tmp_path)
    (tmp_path / "attempt-2").touch()
    told = text.replace("{file}", str(tmp_path / "attempt-2")).encode() if isinstance(text, str) else text
    (attempt / LAUNCH_FILE).write_bytes(told)
    assert resolve_launch_attempt_dir(attempt) == attempt
