"""A run that stands still is ended, and the guilty rank is named. Real agents, real gloo ranks, real faults."""

import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.launch.launch_harness import Launch, survivors, wait_until

from paceline.errors import ExitCode
from paceline.guard.report import DiagnosisRecord, read_diagnosis
from paceline.launch.agent.cluster import Generation, RemoteNodes
from paceline.launch.agent.monitor import Monitor
from paceline.launch.agent.workers import Workers
from paceline.protocol.control import StopSignals, signal_wakeup
from paceline.protocol.evidence import DiagnosisKind, RankSample
from paceline.protocol.job import NodePlan, NodeRanks

pytestmark = pytest.mark.sample(3)

WINDOW_SECONDS = 3
PRELOADED = Path(__file__).with_name("preloaded.py")
HEAD = """
import os, signal, sys, time
from pathlib import Path
import torch, torch.distributed as dist
torch.set_num_threads(1)
from paceline.protocol.control import WorkerSpec
spec = WorkerSpec.from_environment()
folder, generation = Path(spec.attempt_dir), spec.generation
dist.init_process_group("gloo")
rank, batch = dist.get_rank(), torch.ones(8)
(folder / f"ready-{rank}").touch()
"""
LOOP = """
for step in range(STEPS):
    if step == 5 and rank == 1:
        FAULT  # the fault
    dist.all_reduce(batch)
    time.sleep(0.02)
"""

Run = Callable[..., Launch]


@pytest.fixture
def run(launch: Run, tmp_path: Path) -> Run:
    """Starts three ranks, of which rank 1 does `fault` before its sixth collective; or all do `body`."""

    def begin(fault: str = "", *, body: str = "", before: str = "", steps: int = 400, **settings: object) -> Launch:
        script = tmp_path / "job.py"
        body = body or LOOP.replace("STEPS", str(steps)).replace("FAULT", fault)
        script.write_text(f"import os, time\n{before}{HEAD}{body}")
        argv = [sys.executable, "-P", str(PRELOADED), str(script)]
        settings = {"hang_timeout": str(WINDOW_SECONDS), "preload": True, **settings}
        return launch("", argv=argv, plain_store=True, **settings)

    return begin


def line_of_fault(folder: Path) -> int:
    lines = (folder.parent / "job.py").read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if "# the fault" in line)


def diagnosis(one: Launch, number: int = 1) -> DiagnosisRecord:
    return read_diagnosis(one.folder / f"diagnosis-{number}")


def page(one: Launch) -> list[str]:
    """The headline and what stands below it."""
    lines = one.stderr.splitlines()
    first = next((n for n, line in enumerate(lines) if "CAUSE" in line or "DISAGREE" in line), None)
    assert first is not None, one.stderr
    return lines[first : first + 15]


@pytest.mark.parametrize(
    ("fault", "kind", "words"),
    [
        ("time.sleep(600)", DiagnosisKind.BEHIND, "state S"),
        pytest.param(
            "os.kill(os.getpid(), signal.SIGSTOP)", DiagnosisKind.STOPPED, "stopped by a signal", marks=pytest.mark.slow
        ),
        ("import re; re.match(r'(a+)+$', 'a' * 60 + 'b')", DiagnosisKind.BEHIND, "does not answer"),
    ],
    ids=["sleeps", "frozen", "holds the lock"],
)
def test_who_does_not_come_is_named_with_its_line_and_all_is_ended(
    run: Run, fault: str, kind: DiagnosisKind, words: str
) -> None:
    one = run(fault)
    assert one.finish() == ExitCode.STALLED
    told, lines = diagnosis(one), page(one)
    assert (told.diagnosis.kind, told.diagnosis.causes) == (kind, (1,))
    assert re.search(r" \d+\.\d s \(world 3\)\. CAUSE: rank 1 \(\S+, pid \d+\)$", lines[0])
    assert (words in lines[1] and f"job.py:{line_of_fault(one.folder)}" in lines[1]) or kind is DiagnosisKind.STOPPED
    assert "ranks 0, 2 wait" in one.stderr
    assert told.waited_seconds >= WINDOW_SECONDS
    assert not survivors(one.mark)
    assert one.stderr.count("CAUSE") == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "call"),
    [("dist.barrier()", "barrier #6"), ("dist.all_reduce(torch.ones(3))", "all_reduce #6 [3] ")],
    ids=["another kind", "one too many"],
)
def test_who_calls_something_else_is_named_also_where_gloo_ends_an_innocent_rank(
    run: Run, fault: str, call: str
) -> None:
    one = run(fault)
    assert one.finish() == ExitCode.MISMATCH
    assert diagnosis(one).diagnosis.causes == (1,)
    assert f"rank 1 called {call}" in one.stderr
    op = diagnosis(one).diagnosis.op
    assert op is not None and (op.seq, op.kind, op.shape) == (6, "all_reduce", "[8]")


def test_the_freed_ranks_have_time_to_save_and_the_guilty_one_has_none(run: Run) -> None:
    one = run(
        body="""
signal.signal(signal.SIGTERM, lambda *_: (folder / f"asked-{rank}").touch())
try:
    if rank == 1:
        while True: time.sleep(1)
    dist.all_reduce(batch)
except RuntimeError:
    time.sleep(2)
    (folder / f"saved-{rank}").touch()
    raise
""",
        grace_seconds=0.5,
    )
    assert one.finish() == ExitCode.STALLED
    assert {path.name for path in one.folder.glob("saved-*")} == {"saved-0", "saved-2"}
    assert {path.name for path in one.folder.glob("asked-*")} == {"asked-1"}
    assert "Traceback" not in one.stderr  # those of the unblocked ranks are in files


@pytest.mark.slow
@pytest.mark.parametrize(
    "waits",
    ["dist.all_reduce(batch)", "dist.all_reduce(batch, async_op=True).wait()", "model(batch).sum().backward()"],
    ids=["in a call", "for a work", "in DDP's backward"],
)
def test_a_freed_rank_that_goes_nowhere_is_not_waited_for_to_the_end_of_the_grace(run: Run, waits: str) -> None:
    one = run(
        body=f"""
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 1))
try:
    if rank == 1: time.sleep(600)
    {waits}
except RuntimeError:
    time.sleep(600)
""",
        grace_period_seconds=600.0,
    )
    assert one.finish() == ExitCode.STALLED


@pytest.mark.slow
def test_a_rank_that_leaves_is_told_although_the_others_hang(run: Run) -> None:
    """Its connections stay open in a process that it has left behind: the others notice nothing."""
    one = run("if os.fork(): os._exit(0)\n        time.sleep(600)", hang_timeout="60")
    assert one.finish() == ExitCode.FAILED  # within 30 s, half of the window
    assert diagnosis(one).diagnosis.kind is DiagnosisKind.LEFT
    assert diagnosis(one).diagnosis.causes == (1,)


def test_a_killed_rank_is_told_as_before_without_any_window_and_with_its_last_collective(run: Run) -> None:
    one = run("os.kill(os.getpid(), signal.SIGKILL)", hang_timeout="60")
    assert one.finish() == 137  # within 30 s, half of the window
    assert one.diagnosis[0].startswith("rank 1 (")
    assert "all_reduce #5 [8] float32" in one.stderr and "job.py:" in one.stderr
    assert not list(one.folder.glob("diagnosis-*"))


@pytest.mark.slow
def test_a_stall_is_worth_a_restart(run: Run) -> None:
    one = run("time.sleep(600) if generation == 0 else None", max_restarts=3, steps=30)
    assert one.finish() == ExitCode.DONE
    assert "restart 1 of 3" in one.stderr


@pytest.mark.slow
def test_a_pause_shorter_than_the_window_is_warned_of_and_nothing_more(run: Run) -> None:
    one = run("time.sleep(2.4)", steps=20)
    assert one.finish() == ExitCode.DONE
    assert "wait for rank 1" in one.stderr and "CAUSE" not in one.stderr


@pytest.mark.slow
def test_ranks_that_are_busy_by_themselves_for_long_are_left_alone(run: Run) -> None:
    one = run(body="dist.all_reduce(batch)\ntime.sleep(2.5 * 3)\ndist.all_reduce(batch)")
    assert one.finish() == ExitCode.DONE, one.stderr
    assert "CAUSE" not in one.stderr and "wait" not in one.stderr


@pytest.mark.slow
def test_importing_for_long_is_no_stall(run: Run) -> None:
    """Ranks that have not met: the one that is late computes, as an import does."""
    slow = "end = time.monotonic() + 8\nwhile os.environ['RANK'] == '1' and time.monotonic() < end: pass\n"
    one = run(body="dist.all_reduce(batch)", before=slow)
    assert one.finish() == ExitCode.DONE, one.stderr
    assert one.stderr == ""


@pytest.mark.slow
def test_a_rank_that_never_comes_to_the_meeting_is_named(run: Run) -> None:
    one = run(body="dist.all_reduce(batch)", before="if os.environ['RANK'] == '1': time.sleep(600)\n")
    assert one.finish() == ExitCode.STALLED
    assert diagnosis(one).diagnosis.causes == (1,), one.stderr
    assert "job.py:2" in one.stderr


@pytest.mark.slow
def test_a_rank_that_has_become_another_program_is_said_to_be_unseen_and_nobody_is_blamed(run: Run) -> None:
    again = "os.execv(sys.executable, [sys.executable, '-c', 'import time; time.sleep(9)'])"
    one = run(again)
    assert one.finish() != ExitCode.STALLED
    assert "warning: " in one.stderr and "rank 1 " in one.stderr and "(exec)" in one.stderr
    assert "CAUSE" not in one.stderr


def test_who_asks_while_it_runs_is_shown_what_every_rank_does(run: Run) -> None:
    one = run(steps=10_000, fault="pass")
    one.wait_ready(3)
    (one.folder / "ask-1-away").symlink_to("/etc/passwd")
    (one.folder / "ask-123-n0nce").touch(mode=0o600)
    wait_until((one.folder / "diagnosis-live-n0nce" / "diagnosis.json").exists, "an answer")
    told = read_diagnosis(one.folder / "diagnosis-live-n0nce")
    assert [(rank.rank, rank.code) for rank in told.evidence] == [(0, None), (1, None), (2, None)]
    assert all(rank.stacks or rank.native for rank in told.evidence)
    assert not (one.folder / "ask-123-n0nce").exists()
    time.sleep(1.5)  # time to answer the link, too, which is nobody's question
    assert not (one.folder / "diagnosis-live-away").exists()
    assert one.process.poll() is None, "it goes on"
    one.process.send_signal(signal.SIGTERM)
    assert one.finish() == 128 + signal.SIGTERM


@pytest.mark.slow
def test_a_worker_that_fills_its_box_with_rubbish_harms_nobody(launch: Run) -> None:
    rubbish = """
import json
memory, end = json.loads(os.environ["PACELINE_WORKER"])["page"], time.monotonic() + 2.5
while time.monotonic() < end:
    os.pwrite(memory, os.urandom(1 << 20), 0)
    os.ftruncate(memory, 100 if time.monotonic_ns() % 3 else 1 << 21)
os._exit(0)
"""
    # no bootstrap: what the worker does to its own watcher by that is not the question here
    one = launch("", argv=[sys.executable, "-c", "import os, time" + rubbish], nproc=2, hang_timeout="1")
    assert one.finish() == ExitCode.DONE, one.stderr
    assert "failed" not in one.stderr


class Broken(Generation):
    """Without any worker; it can be looked at once."""

    looked = 0

    def worker_samples(self) -> list[RankSample]:
        self.looked += 1
        if self.looked > 1:
            raise ValueError("our bug")
        return []


def test_what_goes_wrong_in_the_guard_is_said_once_and_the_run_goes_on(tmp_path: Path, capfd) -> None:
    plan = NodePlan(("true",), nproc=1, ranks=NodeRanks(world_size=1), attempt_dir=str(tmp_path))
    with signal_wakeup(()) as wakeup:
        guarding = Monitor(Broken(plan, Workers(plan, 0, 0), RemoteNodes(plan, StopSignals(wakeup, lifeline=False))))
        (tmp_path / "ask-1-x").touch()
        assert guarding.check() is None
        (line,) = capfd.readouterr().err.splitlines()
        assert line.startswith("warning: ") and line.endswith(": ValueError: our bug")
        (tmp_path / "ask-1-y").touch()
        time.sleep(1.1)
        assert guarding.check() is None and capfd.readouterr().err == ""
        diagnosis = guarding.judge_failure([RankSample(0, "here", 1, code=3)])
        assert (diagnosis.diagnosis.failed, diagnosis.exit_code) == (0, 3)  # from the samples alone
