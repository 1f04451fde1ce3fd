"""A worker of an agent: its records, its end, and that it reports an error once."""

import os
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from paceline.launch.agent.workers import read_failure_record
from paceline.protocol.control import WorkerSpec
from paceline.protocol.evidence import Failure
from paceline.rank.attach import bind_to_agent, record_failure

Born = Callable[..., WorkerSpec]


@pytest.fixture
def memory() -> Iterator[int]:
    """What the agent gives each worker to write its record into."""
    descriptor = os.memfd_create("record")
    yield descriptor
    os.close(descriptor)


@pytest.fixture
def born(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, memory: int) -> Born:
    """Makes this process a worker, with another spec at each call."""

    def be(**told: object) -> WorkerSpec:
        spec = WorkerSpec(**{"agent_pid": os.getpid(), "attempt_dir": str(tmp_path), "record": memory} | told)  # type: ignore[arg-type]
        monkeypatch.setattr(WorkerSpec, "_here", spec)
        return spec

    return be


@pytest.fixture
def attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, born: Born) -> Path:
    born()
    monkeypatch.setenv("RANK", "3")
    return tmp_path / "error-3.json"


def caught() -> Exception:
    try:
        raise ValueError("bad sample \udcff 4711")
    except ValueError as error:
        return error


def read(path: Path) -> Failure:
    return msgspec.json.decode(path.read_bytes(), type=Failure)


def test_record(attempt: Path) -> None:
    assert record_failure(caught(), 1, traceback=True)
    failure = read(attempt)
    assert (failure.rank, failure.pid, failure.exit_code, failure.type) == (3, os.getpid(), 1, "ValueError")
    assert failure.message == "bad sample \\udcff 4711" and "in caught" in failure.traceback and not failure.victim
    assert stat.S_IMODE(attempt.stat().st_mode) == 0o600
    assert [p.name for p in attempt.parent.iterdir()] == ["error-3.json"]


def test_the_agent_reads_it_from_memory_also_when_the_disk_is_full(attempt: Path, memory: int, born: Born) -> None:
    assert read_failure_record(memory) is None
    born(attempt_dir=str(attempt.parent / "cannot" / "be" / "written"))
    assert record_failure(caught(), 1, traceback=True)
    failure = read_failure_record(memory)
    assert failure is not None and failure.type == "ValueError" and not attempt.exists()


def test_words_have_no_traceback_and_the_caller_may_know_a_victim(attempt: Path) -> None:
    assert record_failure(caught(), 2, traceback=False, victim=True)
    assert read(attempt).traceback == "" and read(attempt).victim


def test_the_first_record_stays(attempt: Path) -> None:
    record_failure(caught(), 1, traceback=True)
    assert record_failure(RuntimeError("teardown"), 1, traceback=True)
    assert read(attempt).type == "ValueError"


def test_without_an_agent_nothing_is_written(attempt: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WorkerSpec, "_here", None)
    assert not record_failure(caught(), 1, traceback=True)
    assert not attempt.exists()
    bind_to_agent()


def test_a_record_that_cannot_be_written_hides_nothing(attempt: Path, born: Born) -> None:
    born(record=99999)  # closed by the script, say
    assert not record_failure(caught(), 1, traceback=True)


LEAVES = """
import atexit, sys, threading, time
from paceline.rank.attach import exit_worker
atexit.register(lambda: print("handler"))
threading.Thread(target=lambda: (time.sleep(0.2), print("thread"))).start()
sys.stdout.write("buffered ")
exit_worker(3)
"""


def test_leaving_waits_for_threads_runs_handlers_and_loses_no_output() -> None:
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    run = subprocess.run([sys.executable, "-c", LEAVES], env=buffered, capture_output=True, text=True, timeout=60)
    assert (run.returncode, run.stdout, run.stderr) == (3, "buffered thread\nhandler\n", "")


WORKER = """
import atexit, sys
from paceline.errors import UsageError
from paceline.rank.attach import run_worker

def main(arguments):
    atexit.register(print, "tidied up")
    print("worked on", arguments)
    if arguments == ["refused"]:
        raise UsageError("there is no such thing")
    if arguments == ["broken"]:
        raise ValueError("bad sample 4711")
    return int(arguments[0])

run_worker(main)
"""


@pytest.mark.parametrize(
    ("argument", "code", "first", "last"),
    [
        ("0", 0, "", ""),
        ("75", 75, "", ""),
        ("refused", 2, "paceline: there is no such thing", "paceline: there is no such thing"),
        ("broken", 1, "Traceback (most recent call last):", "ValueError: bad sample 4711"),
    ],
)
def test_a_worker_ends_as_its_main_does_with_all_that_it_has_said(
    argument: str, code: int, first: str, last: str
) -> None:
    run = subprocess.run([sys.executable, "-c", WORKER, argument], capture_output=True, text=True, timeout=150)
    assert run.returncode == code, run.stderr
    assert run.stdout == f"worked on ['{argument}']\ntidied up\n"
    said = run.stderr.splitlines() or [""]
    assert (said[0], said[-1]) == (first, last)
