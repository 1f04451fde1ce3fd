"""`paceline hang`: the diagnosis of a stall again, and that of a run that still runs, asked of its agent."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from paceline.cli import live, main
from paceline.guard.judge import diagnose
from paceline.guard.report import write_diagnosis
from paceline.protocol.evidence import Evidence, Frame, Op, Stack
from paceline.report.run import read_run
from paceline.runs.folder import create_attempt_dir

OP = Op("0", 7, "all_reduce", "bucket 0", "[4]", "float32", "train.py:97 in step")


def evidence(causes: int, still_seconds: float = 12.0) -> list[Evidence]:
    found: list[Evidence] = []
    for n in range(3):
        stuck = n == causes
        frame = Frame("train.py", 88, "load_batch") if stuck else Frame("torch/distributed/x.py", 1, "all_reduce")
        found.append(
            Evidence(n, "n1", 100 + n, state="S", step=5, answered=True, still_seconds=still_seconds,
                     ops=() if stuck else (OP,), groups={"0": (0, 1, 2)}, stacks=(Stack("main", (frame,)),))
        )  # fmt: skip
    return found


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run of one start, of which nothing runs."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs" / "demo-1"
    folder.mkdir(parents=True)
    create_attempt_dir(folder)
    return folder


def stalled(run: Path, causes: int, number: int = 1) -> None:
    seen = evidence(causes)
    write_diagnosis(run / "attempt-1" / f"diagnosis-{number}", diagnose(seen), seen, waited_seconds=12.0)


AGENT = """
import fcntl, json, os, re, shutil, sys, time
from pathlib import Path
import msgspec
from paceline.protocol.evidence import Evidence
from paceline.guard.judge import diagnose
from paceline.guard.report import write_diagnosis
lock = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
fcntl.flock(lock, fcntl.LOCK_EX)
attempt, answers = Path(sys.argv[2]), sys.argv[3] == "answers"
seen = msgspec.json.decode(sys.argv[4], type=list[Evidence])
print("up", flush=True)
while True:
    for question in attempt.glob("ask-*") if answers else ():
        print(oct(question.stat().st_mode & 0o777), flush=True)
        nonce = re.fullmatch(r"ask-[0-9]+-([0-9a-f]+)", question.name)[1]
        question.unlink()
        waited = min(one.still_seconds for one in seen)
        write_diagnosis(attempt / f"diagnosis-live-{nonce}", diagnose(seen), seen, waited_seconds=waited)
    time.sleep(0.05)
"""


@pytest.fixture
def agent(run: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts a process that holds the run, and answers questions about it as its head agent does."""
    started: list[subprocess.Popen[str]] = []

    def start(seen: list[Evidence], *, answers: bool = True) -> subprocess.Popen[str]:
        words = [str(run / ".lock"), str(run / "attempt-1"), "answers" if answers else "is silent"]
        argv = [sys.executable, "-c", AGENT, *words, msgspec.json.encode(seen).decode()]
        started.append(subprocess.Popen(argv, stdout=subprocess.PIPE, text=True))
        assert started[-1].stdout is not None and started[-1].stdout.readline() == "up\n"
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def told(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    assert main(["hang", *arguments]) == code
    captured = capsys.readouterr()
    assert "\x1b" not in captured.out  # plain, where nobody looks at a terminal
    return captured.out + captured.err


def test_the_newest_diagnosis_is_shown_with_all_ranks(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number, causes in enumerate((0, 2, 1), start=8):  # 10 comes after 9
        stalled(run, causes, number)
    text = told(capsys, "demo")
    assert "diagnosis-10" in text and "diagnosis-9" not in text
    assert "CAUSE: rank 1 (n1, pid 101)" in text and " 12.0 s at step 5 (world 3)" in text
    assert text.count(" all_reduce #7 ") >= 2 and text.count("train.py:97 ") >= 2 and "train.py:88 " in text
    assert [f"\nrank {n} (n1, pid {100 + n})" in text for n in range(3)] == [True] * 3


def test_programs_get_the_diagnosis_as_json(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stalled(run, 1)
    found = json.loads(told(capsys, str(run), "--json"))
    assert (found["live"], found["record"]["diagnosis"]["causes"]) == (False, [1])
    assert found["diagnosis_dir"] == str(run / "attempt-1" / "diagnosis-1")


def test_a_verdict_of_an_earlier_version_is_shown(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(Path(__file__).with_name("old_run") / "stalled", run, dirs_exist_ok=True)
    found = json.loads(told(capsys, "demo", "--json"))
    assert (found["record"]["diagnosis"]["causes"], found["diagnosis_dir"][-9:]) == ([1], "verdict-1")
    assert [record.diagnosis.causes for record in read_run(run).diagnoses] == [(1,)]  # for `paceline report`


def test_a_run_that_never_stalled_is_said_to_be_so(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "attempt-1" / "ended.json").write_text('{"exit_code": 0}')
    found = json.loads(told(capsys, "demo", "--json"))
    assert (found["record"], found["live"]) == (None, False)
    assert "no stall" in told(capsys, "demo")


def test_a_run_that_hangs_is_judged_now_and_nothing_is_left_of_the_question(
    run: Path, capsys: pytest.CaptureFixture[str], agent: Callable[..., subprocess.Popen[str]]
) -> None:
    stalled(run, 0)  # an earlier one
    process = agent(evidence(2))
    text = told(capsys, "demo")
    assert "12.0 s" in text.splitlines()[0]
    assert "CAUSE: rank 2" in text and "CAUSE: rank 0" not in text
    assert process.stdout is not None and process.stdout.readline() == "0o600\n"
    assert sorted(path.name for path in (run / "attempt-1").iterdir()) == ["diagnosis-1"]


def test_a_run_that_goes_on_well_is_not_called_a_stall(
    run: Path, capsys: pytest.CaptureFixture[str], agent: Callable[..., subprocess.Popen[str]]
) -> None:
    agent(evidence(2, still_seconds=0.2))
    text = told(capsys, "demo")
    assert "0.2 s" in text.splitlines()[0]
    assert "STALL" not in text and "CAUSE" not in text
    assert "train.py:88 " in text


def test_an_agent_that_does_not_answer_is_not_waited_for_for_ever(
    run: Path,
    capsys: pytest.CaptureFixture[str],
    agent: Callable[..., subprocess.Popen[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(live, "ANSWER_TIMEOUT_SECONDS", 0.5)
    agent([], answers=False)
    assert "0.5 s" in told(capsys, "demo")
    stalled(run, 1)
    text = told(capsys, "demo")
    assert "0.5 s" in text.splitlines()[0] and "CAUSE: rank 1" in text
    assert not list((run / "attempt-1").glob("ask-*"))


def test_a_diagnosis_of_another_version_is_wrong_use(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "attempt-1" / "diagnosis-1").mkdir()
    (run / "attempt-1" / "diagnosis-1" / "diagnosis.json").write_text('{"format": "paceline-diagnosis", "version": 9}')
    text = told(capsys, "demo", code=2)
    assert "version 9" in text and "version 1" in text


def test_an_incomplete_diagnosis_does_not_hide_the_one_before(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stalled(run, 1)
    (run / "attempt-1" / "diagnosis-7").mkdir()
    (run / "attempt-2").touch()
    assert "CAUSE: rank 1" in told(capsys, "demo")


@pytest.mark.parametrize("when", [1e300, -1e17])
def test_a_time_that_is_none_is_said_to_be_unknown(run: Path, capsys: pytest.CaptureFixture[str], when: float) -> None:
    stalled(run, 1)
    path = run / "attempt-1" / "diagnosis-1" / "diagnosis.json"
    told_before = msgspec.json.decode(path.read_bytes())
    path.write_bytes(msgspec.json.encode(told_before | {"unix_time": when}))
    assert "unknown time" in told(capsys, "demo").splitlines()[0]


@pytest.mark.parametrize(("asked", "words"), [("nonsense", "unknown run"), (".", "is not a run folder")])
def test_what_is_no_run_is_wrong_use(run: Path, capsys: pytest.CaptureFixture[str], asked: str, words: str) -> None:
    assert words in told(capsys, asked, code=2)


def test_a_run_without_a_start_is_wrong_use(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "attempt-1").rmdir()
    (run / "config.toml").write_text("")
    assert "[not-started]" in told(capsys, "demo", code=2)


@pytest.mark.root
def test_who_may_not_look_into_a_run_is_told_so(run: Path) -> None:
    stalled(run, 1)
    for folder in run.parents:
        if folder.stat().st_uid == os.geteuid() and not folder.stat().st_mode & 0o001:
            folder.chmod(0o711)
    run.chmod(0o700)
    # 65534 is nobody. What it runs is imported before: the interpreter may be in a folder that nobody can read
    program = (
        "import os, sys; from paceline.cli import main; main(['hang', '/']); os.setuid(65534); "
        f"sys.exit(main(['hang', {str(run)!r}]))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd="/", check=False)
    assert done.returncode == 2
    assert "no permission" in done.stderr and "Traceback" not in done.stderr
