"""What `status`, `logs` and `cancel` make of what a run has left, and of real processes that hold it."""

import fcntl
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.errors import raises

from paceline.cli import live, logs, status
from paceline.cli import run_state as run_state_module
from paceline.cli.run_state import find_run, run_state
from paceline.errors import TrainingError
from paceline.host.cleanup import Roster
from paceline.host.procfs import read_process
from paceline.launch.plan import SubmitRecord, make_submit_dir, write_submit_record
from paceline.protocol.evidence import Failure
from paceline.runs import events
from paceline.runs.attempt import AttemptEnd, write_attempt_end
from paceline.runs.events import Evaluated, FlopsCounted, Started, Step
from paceline.runs.folder import create_attempt_dir
from paceline.runs.summary import StatusReport, Summary, write_summary
from paceline.runs.writers import EventWriter


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run of which two steps are done, and nothing runs."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs" / "mnist-cnn-1"
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text("[run]\nepochs = 2\n")
    create_attempt_dir(folder)
    with EventWriter(folder / "events-0.jsonl") as writer:
        writer.write(Started(1, 0, 2, "n1", 1, "cpu", 0.0, steps_per_epoch=10))
        for step in (1, 2, 3):
            writer.write(Step(step, 0, 1.0, 64, 1e-3, 0.1, 0.0, unix_time=float(step)))
    return folder


def test_without_a_name_it_is_the_newest_run_and_only_to_look_at(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    older = run.parent / "z"
    (older / "attempt-1").mkdir(parents=True)
    (run.parent / "no run").mkdir()
    os.utime(older, (1.0, 1.0))
    assert status.main(["--json"]) == 0
    assert msgspec.json.decode(capsys.readouterr().out)["run_dir"] == str(run)
    for arguments in ([], [""]):
        with raises("not-a-run-folder" if arguments else "missing-argument"):
            live.cancel(arguments)


AGENT = """
import fcntl, os, signal, sys, time
lock = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
fcntl.flock(lock, fcntl.LOCK_EX)
told = []
signal.signal(signal.SIGTERM, lambda number, frame: told.append(number))
print("up", flush=True)
while not told: time.sleep(0.02)
ended = time.monotonic() + 1.5
while len(told) < 2 and time.monotonic() < ended: time.sleep(0.02)
sys.exit(75 if len(told) == 1 else 143)
"""


@pytest.fixture
def agent(run: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that holds the run as its agent does, and wrote itself down."""
    words = (sys.executable, "-c", AGENT, str(run / ".lock"))
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "up\n"
    write_roster(run, process.pid)
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def write_roster(run: Path, pid: int, host: str = os.uname().nodename, **changes: Any) -> None:
    found = read_process(pid)
    roster = Roster(host, pid, (), **{"agent_started": found.start_ticks if found else 0, **changes})
    (run / "attempt-1" / "agent-0.json").write_bytes(msgspec.json.encode(roster))


def failure(rank: int, message: str, *, victim: bool = False, seconds: float = 0.0) -> bytes:
    return msgspec.json.encode(Failure(rank, "n1", 9, 1, "ValueError", message, "", victim, seconds))


# ---- which run -------------------------------------------------------------------------------------------------------


def test_a_run_is_found_by_its_folder_or_the_beginning_of_its_name(run: Path) -> None:
    assert find_run("mnist") == find_run("runs/mnist-cnn-1") == find_run(str(run)) == run
    (run.parent / "mnist-cnn-12").mkdir()
    assert find_run("mnist-cnn-1") == run  # a whole name is not only a beginning
    with raises("run-ambiguous", value="mnist", count=2, allowed=["mnist-cnn-1", "mnist-cnn-12"]):
        find_run("mnist")
    with raises("unknown-name", kind="run", meant=" Did you mean 'mnist-cnn-1'?"):
        find_run("mnst-cnn-1")
    with raises("not-a-run-folder"):
        find_run("mnist-cnn-12")


# ---- states ----------------------------------------------------------------------------------------------------------


def test_a_held_run_is_running_with_its_speed_and_a_let_go_one_is_lost(run: Path, agent: subprocess.Popen[str]) -> None:
    found = run_state(run)
    assert (found.state, found.step, found.total_steps, found.samples_per_second) == ("running", 3, 20, 64.0)
    assert (found.on, found.hosts, found.attempts) == ("local", (os.uname().nodename,), 1)
    agent.kill()
    agent.wait()
    assert run_state(run).state == "lost"
    assert run_state(run).samples_per_second is None


def test_a_running_run_has_the_use_that_its_newest_start_makes_of_its_devices(
    run: Path, agent: subprocess.Popen[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with EventWriter(run / "events-0.jsonl") as writer:
        for start, devices in ((1, 2), (2, 4)):
            writer.write(Started(start, 0, devices, "n1", 1, "cpu", 4.0, start_step=3, steps_per_epoch=10))
            writer.write(FlopsCounted(1e9, devices, 0.032))
        for step in (4, 5):
            used = {"consumed": 16, "tokens": 160, "phase_seconds": {"forward": 0.5}}
            writer.write(Step(step, 0, 1.0, 64, 1e-3, 0.5, 0.0, unix_time=float(step + 1), **used))
    found = run_state(run)
    assert (found.samples_per_second, found.tokens_per_second, found.mfu) == (64.0, 640.0, 0.5)
    assert 0 < (found.goodput or 0) < 1
    assert status.main([str(run)]) == 0
    assert "640 tokens/s, MFU 50.0%, goodput" in capsys.readouterr().out


def test_the_speed_and_the_metrics_are_those_of_the_last_events_only(
    run: Path, agent: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with EventWriter(run / "events-0.jsonl") as writer:
        writer.write(Evaluated(3, {"accuracy": 0.5}, 1.0))
        for step in range(4, 7):
            writer.write(Step(step, 0, 1.0, 64, 1e-3, 0.1, 0.0, unix_time=1000.0 + step))
    newest = (run / "events-0.jsonl").read_bytes().splitlines(keepends=True)[-3:]
    monkeypatch.setattr(events, "TAIL_BYTES", len(b"".join(newest)))
    found = run_state(run)
    assert (found.step, found.total_steps, found.samples_per_second, found.metrics) == (6, 20, 64.0, {})


def test_a_run_without_an_agent_runs_while_it_is_held_and_is_not_cancelled_from_here(
    run: Path, agent: subprocess.Popen[str]
) -> None:
    (run / "attempt-1" / "agent-0.json").unlink()
    (run / ".lock").write_text("pid 4711 on n1")
    assert run_state(run).state == "running"
    with raises("cannot-stop-from-here", raised=TrainingError) as caught:
        live.cancel([str(run)])
    assert "pid 4711 on n1" in str(caught.value)
    agent.kill()
    agent.wait()
    assert run_state(run).state == "lost"


def test_looking_at_a_run_does_not_take_it(run: Path) -> None:
    (run / ".lock").touch()
    run_state(run)
    with (run / ".lock").open("r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with (run / ".lock").open("r+") as second, pytest.raises(BlockingIOError):
            fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)


@pytest.mark.parametrize(("code", "state"), [(0, "done"), (75, "saved"), (137, "failed")])
def test_a_summary_says_how_a_run_has_ended(run: Path, code: int, state: str) -> None:
    write_summary(run, Summary(task="t", exit=code))
    found = run_state(run)
    assert found.state == state and ("exit code 137" in found.words) == (code == 137)


@pytest.mark.parametrize(("code", "state"), [(0, "done"), (7, "failed: exit code 7: rank 0 (")])
def test_any_script_has_ended_as_its_agent_says(
    tmp_path: Path, code: int, state: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """It writes no summary of its own, and is not gone on with by `paceline train`."""
    script = tmp_path / "script.py"
    script.write_text(f"import os; os._exit({code})\n")
    launched = (sys.executable, "-m", "paceline", "launch", "--run-dir", str(tmp_path / "run"), "--", str(script))
    assert subprocess.run(launched, capture_output=True, timeout=180).returncode == code
    assert status.main([str(tmp_path / "run")]) == 0
    shown = capsys.readouterr().out
    assert f"state     {state}" in shown and "paceline train" not in shown


def test_what_the_agent_judged_is_shown_and_no_record_is_judged_again(run: Path) -> None:
    attempt = run / "attempt-1"
    (attempt / "error-0.json").write_bytes(failure(0, "Connection closed by peer", victim=True, seconds=1.0))
    found = run_state(run)
    assert (found.state, found.words.endswith("attempt-1/error-0.json")) == ("failed", True)  # without a diagnosis
    write_attempt_end(attempt, ended := AttemptEnd(1, "rank 1 (n1): ValueError: no such file"))
    found = run_state(run)
    assert (found.state, found.words) == ("failed", f"exit code 1: {ended.words}")


def test_an_agent_counts_only_on_its_host_and_if_it_holds_the_run(run: Path) -> None:
    write_roster(run, os.getpid(), agent_started=1)  # its number was given to another process
    assert run_state(run).state == "lost"
    write_roster(run, os.getpid(), host="n7")
    found = run_state(run)
    assert (found.state, "n7" in found.words) == ("unknown", True)
    write_roster(run, os.getpid())
    assert run_state(run).state == "lost"  # the right process, but it does not hold the run
    with (run / ".lock").open("w"):  # a file system that does not tell of locks
        assert run_state(run).state == "running"


def test_a_run_of_slurm_on_a_machine_without_slurm_is_unknown(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_submit_record(make_submit_dir(run), SubmitRecord(on="slurm", started_at=1.0, slurm_job="12"))
    monkeypatch.setenv("PATH", "/nowhere")
    found = run_state(run, ("ssh",))
    assert (found.state, found.slurm_job) == ("unknown", "12") and "no command scontrol" in found.words
    assert "Slurm job 12" in run_state(run).words


def test_an_agent_on_another_host_is_asked_and_told_by_the_users_ssh(
    run: Path, agent: subprocess.Popen[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, body in (
        ("uname", "echo n2"),
        ("ssh", f'while [ "$1" != -- ]; do shift; done; [ "$2" = n2 ] && PATH={tmp_path}:$PATH && eval "$3"'),
    ):
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    # a file system that does not tell of locks on other hosts
    monkeypatch.setattr(run_state_module, "is_locked", lambda _: False)
    write_roster(run, agent.pid, host="n2")
    words = (str(tmp_path / "ssh"), "-F", "my config")
    submission = SubmitRecord(on="ssh", started_at=1.0, hosts=("n2",), ssh=words)
    write_submit_record(make_submit_dir(run), submission)
    access, flag = words, ["--ssh", shlex.join(words)]
    assert run_state(run, access).state == "running"
    found = run_state(run, ("/no/ssh",))  # what stands written down is told, and not run
    assert found.state == "unknown" and f"started with --ssh {shlex.join(words)!r}" in found.words
    with raises("agent-of-another-run"):
        write_roster(run, os.getpid(), host="n2")
        live.cancel([str(run), *flag])
    write_roster(run, agent.pid, host="n2")
    assert live.cancel([str(run), *flag]) == 0
    assert agent.wait(5) == 75
    assert run_state(run, access).state == "lost"  # it has left no summary
    (tmp_path / "ssh").write_text("#!/bin/sh\nexit 255\n")
    assert run_state(run, access).state == "unknown"


def test_a_process_that_does_not_hold_the_run_is_left_alone(
    run: Path, agent: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    bystander = subprocess.Popen(["sleep", "60"])
    try:
        write_roster(run, bystander.pid)  # and the run is locked: somebody works on it
        with raises("cannot-stop-from-here", raised=TrainingError):
            live.cancel([str(run)])
        # it ended just now, and its number was given away
        monkeypatch.setattr(run_state_module, "is_agent_alive", lambda *_: True)
        with raises("agent-of-another-run", agent_pid=bystander.pid):
            live.cancel([str(run)])
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


# ---- what a person sees ----------------------------------------------------------------------------------------------


def test_status_is_one_screen_and_the_same_for_programs(
    run: Path, agent: subprocess.Popen[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert status.main([str(run)]) == 0
    shown = capsys.readouterr().out
    assert "state     running\n" in shown and "step      3 of 20, 64 samples/s\n" in shown
    assert "saved     nothing yet\n" in shown and f"paceline cancel {run}\n" in shown
    assert status.main([str(run), "--json"]) == 0
    assert msgspec.json.decode(capsys.readouterr().out, type=StatusReport) == run_state(run)


def test_nothing_that_a_run_wrote_steers_the_terminal(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_attempt_end(run / "attempt-1", AttemptEnd(1, "\x1b[2J\x9b1m\x07gone"))
    (run / "attempt-1" / "rank-0.log").write_bytes(b"\x1b]0;title\x07text\r\n\xff\n")
    assert status.main([str(run)]) == logs.main([str(run)]) == 0
    shown = capsys.readouterr().out
    assert "gone" in shown and "text\n" in shown and not {"\x1b", "\x07", "\x9b", "\r"} & {*shown}


def test_logs_shows_the_rank_the_start_and_the_lines_that_are_asked_for(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "attempt-1" / "rank-1.log").write_text("old\n")
    (create_attempt_dir(run)[1] / "rank-1.log").write_text("a\nb\nc\n")
    for words, shown in (([], "a\nb\nc\n"), (["--lines", "2"], "b\nc\n"), (["--attempt", "1"], "old\n")):
        assert logs.main([str(run), "--rank", "1", *words]) == 0
        assert capsys.readouterr().out == shown
    with raises("no-output", value="rank 2", allowed="1"):
        logs.main([str(run), "--rank", "2"])
    with raises("no-such-attempt", value=3, allowed=["1", "2"]):
        logs.main([str(run), "--attempt", "3"])


@pytest.mark.slow
def test_following_goes_over_to_the_next_start_and_ends_with_the_run(run: Path, agent: subprocess.Popen[str]) -> None:
    (run / "attempt-1" / "rank-0.log").write_text("one\n")
    words = (sys.executable, "-m", "paceline", "logs", str(run), "--follow")
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as following:
        assert following.stdout is not None and following.stdout.readline() == "one\n"
        with (run / "attempt-1" / "rank-0.log").open("a") as file:
            file.write("two\nlast word")
        assert following.stdout.readline() == "two\n"
        (create_attempt_dir(run)[1] / "rank-0.log").write_text("three\nfo")
        assert following.stdout.readline() == "last word\n"
        assert following.stdout.readline() == "three\n"
        agent.send_signal(signal.SIGTERM)
        agent.wait(5)
        assert following.stdout.read() == "fo\n"
        assert following.wait(10) == 0


# ---- cancel ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("words", "code"), [([], 75), (["--now"], 143)])
def test_cancel_tells_the_agent_and_waits_for_its_end(
    run: Path, agent: subprocess.Popen[str], words: list[str], code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "checkpoints" / "step-00000002").mkdir(parents=True)
    began = time.monotonic()
    assert live.cancel([str(run), *words]) == 0
    assert agent.poll() == code and time.monotonic() - began < 20
    output = capsys.readouterr().out
    assert "step 2;" in output and "--resume auto" in output


def test_what_has_ended_is_not_cancelled(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_summary(run, Summary(task="t", exit=0))
    assert live.cancel([str(run)]) == 0
    assert "the run is done" in capsys.readouterr().err
