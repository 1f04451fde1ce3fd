"""Whoever is killed, 5 s later nothing is left: not a worker, not what it had started."""

import fcntl
import json
import os
import signal
import sys
from pathlib import Path

import pytest
from tests.launch.launch_harness import carriers, survivors, wait_until

pytestmark = pytest.mark.sample(2)

# each rank is hard to end in its own way, and has a child of its own
STUBBORN = """
grandchild()
if rank == 0:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    forever()
if rank == 1:
    ready()
    os.kill(os.getpid(), signal.SIGSTOP)
if rank == 2:
    ready()
    re.match(r"(a+)+$", "a" * 60 + "b")  # busy in C for ages: no Python signal handler runs
if rank == 3:
    forever()
"""


def stubborn(launch, **settings):
    one = launch(STUBBORN, nproc=4, **settings)
    one.wait_ready(4)
    assert len(carriers(one.mark)) >= 1 + 1 + 4 + 4  # launcher, agent, workers, their children
    return one


def cleanup_pid(one) -> int:
    """The agent's fork: the other process with the agent's command line."""
    (pid,) = (p for p, words in carriers(one.mark).items() if "paceline.launch.agent" in words and p != one.agent_pid)
    return pid


def test_without_a_janitor_the_launcher_sweeps(launch) -> None:
    one = stubborn(launch)
    for pid in (cleanup_pid(one), one.agent_pid):
        os.kill(pid, signal.SIGKILL)
    assert not survivors(one.mark)
    assert one.finish() == 137


def test_without_anybody_the_kernel_ends_the_workers(launch) -> None:
    one = launch(STUBBORN.replace("grandchild()", ""), nproc=4)
    one.wait_ready(4)
    pids = [cleanup_pid(one), one.process.pid, one.agent_pid]
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    assert not survivors(one.mark)
    one.finish()


@pytest.mark.parametrize("killed", ["launcher", "agent", "both"])
def test_kill_minus_9(launch, killed: str) -> None:
    one = stubborn(launch)
    agent_pid = one.agent_pid
    for who, pid in (("launcher", one.process.pid), ("agent", agent_pid)):
        if killed in (who, "both"):
            os.kill(pid, signal.SIGKILL)
    left = survivors(one.mark)
    assert not left
    assert one.finish() == 137
    if killed == "agent":
        assert f"(pid {agent_pid})" in one.stderr and "SIGKILL" in one.stderr


def test_ctrl_c(launch) -> None:
    one = stubborn(launch)  # with the grace that users get
    one.process.send_signal(signal.SIGINT)
    assert not survivors(one.mark)
    assert one.finish() == 128 + signal.SIGINT


def test_a_stopped_agent_does_not_keep_the_launcher(launch) -> None:
    one = stubborn(launch, grace_seconds=0.5)
    os.kill(one.agent_pid, signal.SIGSTOP)
    one.process.send_signal(signal.SIGTERM)
    assert not survivors(one.mark)
    assert one.finish() == 128 + signal.SIGTERM


def test_failure_among_the_stubborn(launch) -> None:
    worker = STUBBORN.replace("if rank == 3:\n    forever()", "if rank == 3:\n    fail(ValueError('bad'))")
    one = launch(worker, nproc=4, grace_seconds=0.5)
    assert one.finish() == 1
    assert one.diagnosis[0].startswith("rank 3 (")


@pytest.mark.slow
@pytest.mark.parametrize("killed", ["launcher", "launcher and agent"])
def test_kill_minus_9_after_a_restart(launch, killed: str) -> None:
    """Without the agent the cleanup process kills, by the new roster."""
    first = "if generation == 0:\n    os.kill(os.getpid(), 9) if rank == 1 else time.sleep(600)\n"
    one = launch(first + STUBBORN, nproc=4, max_restarts=1)
    one.wait_ready(4)  # of generation 1: the first one never is
    pids = [one.process.pid] if killed == "launcher" else [one.process.pid, one.agent_pid]
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    assert not survivors(one.mark)
    one.finish()


def test_kill_minus_9_of_the_launcher_ends_a_long_grace_period(launch) -> None:
    one = launch(
        "signal.signal(signal.SIGTERM, lambda *_: (folder / 'asked').touch())\nforever()",
        nproc=1,
        grace_period_seconds=3600.0,
    )
    one.wait_ready(1)
    one.process.send_signal(signal.SIGTERM)
    wait_until((one.folder / "asked").exists, "the worker was asked to stop")
    one.process.kill()
    assert not survivors(one.mark)
    one.finish()


def is_free(lock: Path) -> bool:
    with lock.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


def test_a_lock_is_held_as_long_as_any_worker_lives_and_by_nobody_longer(launch, tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    script = tmp_path / "attempt-0" / "worker.py"
    shell = ["sh", "-c", f"{sys.executable} {script}; exit $?"]  # not attached: the kernel does not end it by itself
    one = launch("forever()", nproc=2, argv=shell, lock=str(lock))
    one.wait_ready(2)
    cleanup = cleanup_pid(one)
    os.kill(cleanup, signal.SIGSTOP)
    pids = [one.process.pid, one.agent_pid]
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not {*pids} & {*living(one.mark)}, "launcher and agent are gone")
    assert len(living(one.mark)) > 1 and not is_free(lock)
    for pid in living(one.mark):
        if pid != cleanup:
            os.kill(pid, signal.SIGKILL)
    wait_until(lambda: is_free(lock), "the lock is free", 5.0)
    assert living(one.mark) == [cleanup]
    os.kill(cleanup, signal.SIGCONT)
    one.finish()


def living(mark: str) -> list[int]:
    return [pid for pid, words in carriers(mark).items() if words]


def test_killed_while_starting(launch) -> None:
    """Before any worker has attached itself."""
    one = launch("forever()", nproc=3)
    while not (one.folder / "agent-0.json").exists() and one.process.poll() is None:
        pass
    os.kill(one.process.pid, signal.SIGKILL)
    os.kill(one.agent_pid, signal.SIGKILL)
    assert not survivors(one.mark)
    one.finish()


DAEMON = """
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if rank == 1:
            os.execv(sys.executable, [sys.executable, "-c", "import time; time.sleep(600)"])
        time.sleep(600)
    os._exit(0)
ready()
END
"""


@pytest.mark.parametrize("end", ["pass", "raise ValueError", "forever()"])
def test_a_daemon_in_a_session_of_its_own_ends_with_the_run(launch, end: str) -> None:
    """`forever()`: the agent is killed, and whoever is left sweeps."""
    one = launch(DAEMON.replace("END", end), nproc=2)
    one.wait_ready(2)
    if end == "forever()":
        os.kill(one.agent_pid, signal.SIGKILL)
    one.finish()
    assert not survivors(one.mark)


KEEPS_A_SOCKET = """
from multiprocessing.util import get_temp_dir
(Path(get_temp_dir()) / f'socket-{rank}').touch()
forever()
"""


@pytest.mark.parametrize("killed", ["worker", "agent"])
def test_what_killed_workers_keep_in_temporary_files_goes_with_the_agent(launch, tmp_path: Path, killed: str) -> None:
    """multiprocessing keeps its sockets there, and removes them at an end in peace only."""
    elsewhere = tmp_path / "tmp"
    elsewhere.mkdir()
    one = launch(KEEPS_A_SOCKET, nproc=2, env={"TMPDIR": str(elsewhere)})
    one.wait_ready(2)
    assert len(list(elsewhere.rglob("socket-*"))) == 2
    roster = json.loads((one.folder / "agent-0.json").read_text())
    os.kill(roster["workers"][0]["pid"] if killed == "worker" else roster["agent_pid"], signal.SIGKILL)
    assert one.finish() != 0
    assert not survivors(one.mark)
    wait_until(lambda: not list(elsewhere.iterdir()), "all is removed")
