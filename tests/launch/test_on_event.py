"""--on-event: the events of a run as JSON, in order; a command never changes how the run ends."""

import signal
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from tests.errors import raises
from tests.launch.launch_harness import Launch

from paceline.cli.jobs import make_job_spec
from paceline.config.settings import ClusterConfig
from paceline.guard.report import RunEvent
from paceline.launch.agent.coordinator import EVENT_LOG, will_requeue
from paceline.launch.slurm.plan import plan_slurm
from paceline.protocol.evidence import DiagnosisKind
from paceline.protocol.job import JobSpec, NodePlan

KILLED_ONCE = "if rank == 1 and generation == 0: os.kill(os.getpid(), 9)\ntime.sleep(0.5)"


def read(folder: Path) -> list[RunEvent]:
    return [msgspec.json.decode(line, type=RunEvent) for line in (folder / "events").read_text().splitlines()]


def test_the_events_of_a_run_that_restarts(tmp_path: Path, launch: Callable[..., Launch]) -> None:
    # the command of the first event is slow: the later ones wait for it
    slow = f"mkdir {tmp_path}/first && sleep 0.5; cat >> {tmp_path}/events"
    run = launch(KILLED_ONCE, nproc=2, max_restarts=1, name="mine", on_event=slow)
    assert run.finish() == 0, run.stderr
    events = read(tmp_path)
    assert [(event.kind, event.generation, event.exit) for event in events] == [
        ("diagnosis", 0, None),
        ("restart", 1, None),
        ("end", 1, 0),
    ]
    told = events[0].diagnosis
    assert told is not None and (told.kind, told.failed) == (DiagnosisKind.DIED, 1)
    assert events[0].report in run.stderr
    assert {(event.name, event.attempt_dir) for event in events} == {("mine", str(run.folder))}


@pytest.mark.sample(2)
def test_a_command_that_hangs_is_killed(launch: Callable[..., Launch]) -> None:
    """Also after a stop, when the launcher waits for the agent for a limited time. The fixture looks for processes."""
    run = launch("ready()\ntime.sleep(60)", nproc=1, on_event="sleep 300 & sleep 300", grace_period_seconds=1.0)
    run.wait_ready(1)
    run.process.send_signal(signal.SIGTERM)
    assert run.finish() == 128 + signal.SIGTERM, run.stderr
    assert run.stderr.count("--on-event") == 1 and "killed after" in run.stderr


def test_a_command_that_fails_is_reported_once(launch: Callable[..., Launch]) -> None:
    run = launch("fail(ValueError(), 7)", nproc=1, on_event="echo no; exit 5")
    assert run.finish() == 7, run.stderr
    assert (run.folder / EVENT_LOG).read_text() == "no\nno\n"
    assert run.stderr.count("--on-event") == 1 and "exit code 5" in run.stderr


@pytest.mark.parametrize(
    ("signals", "preempted", "is_requeued"),
    [
        ((signal.SIGUSR1,), False, True),
        ((signal.SIGTERM,), True, True),
        ((signal.SIGTERM,), False, False),
        ((signal.SIGUSR1, signal.SIGTERM), False, False),
        ((signal.SIGUSR2,), True, False),
        ((), True, False),
    ],
)
def test_when_slurm_queues_the_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, signals: tuple[int, ...], preempted: bool, is_requeued: bool
) -> None:
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(f"#!/bin/sh\necho JobId=$4 PreemptTime={'2026-01-01' if preempted else 'None'} Nodes=1\n")
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    plan = plan_slurm(JobSpec(("true",), 1, submit_dir=str(tmp_path), run_dir=str(tmp_path))).files["plan.json"]
    assert will_requeue(msgspec.json.decode(plan, type=NodePlan), signals) is is_requeued
    assert not will_requeue(NodePlan(("true",), 1), signals)


@pytest.mark.parametrize("cluster", [ClusterConfig(on_event=" "), ClusterConfig(on="print", nodes="2", on_event="cat")])
def test_a_command_that_nothing_would_run(cluster: ClusterConfig) -> None:
    with raises("on-event-not-run", value=cluster.on_event):
        make_job_spec(cluster, 1)
