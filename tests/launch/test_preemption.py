"""Exit code 75: the workers have saved their state and want to be started again some other time."""

import signal
import time
from typing import Any

import pytest
from tests.launch.launch_harness import wait_until

pytestmark = pytest.mark.sample(2)

# ends with the code that stands at its rank's place, when it is asked to stop
OBEDIENT = "signal.signal(signal.SIGTERM, lambda *_: sys.exit({codes}[rank]))\nforever()"
DEAF = "signal.signal(signal.SIGTERM, signal.SIG_IGN); forever()"


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("codes", "expected", "told"),
    [
        ([75, 75], 75, ""),
        ([0, 75], 75, ""),
        ([75, 0], 75, ""),
        ([0, 0], 0, ""),
        ([75, 1], 143, "stopped by SIGTERM\n"),
        ([1, 75], 143, "stopped by SIGTERM\n"),
    ],
)
def test_asked_to_stop(launch, codes: list[int], expected: int, told: str) -> None:
    one = launch(OBEDIENT.format(codes=codes), nproc=2, max_restarts=3)
    one.wait_ready(2)
    one.process.send_signal(signal.SIGTERM)
    assert one.finish() == expected
    assert one.stderr == told


@pytest.mark.slow
def test_a_save_may_take_longer_than_the_grace_of_a_failure(launch) -> None:
    one = launch(
        "def save(*_): (folder / 'asked').open('a').write('.'); time.sleep(1.8); sys.exit(75)\n"
        "signal.signal(signal.SIGTERM, save)\nforever()",
        nproc=1,
        grace_seconds=0.1,
    )
    one.wait_ready(1)
    one.process.send_signal(signal.SIGUSR1)
    assert one.finish() == 75
    assert one.stderr == "" and (one.folder / "asked").read_text() == "."


def test_one_request_that_comes_as_two_signals_is_one(launch) -> None:
    """As timeout(1) sends it: to the launcher, and once more to its whole group."""
    one = launch("signal.signal(signal.SIGTERM, lambda *_: (time.sleep(0.5), sys.exit(75)))\nforever()", nproc=1)
    one.wait_ready(1)
    one.process.send_signal(signal.SIGTERM)
    time.sleep(0.01)
    one.process.send_signal(signal.SIGINT)
    assert one.finish() == 75


@pytest.mark.parametrize(
    ("deaf", "code", "grace"),
    [
        (0, 1, {"grace_seconds": 0.2, "grace_period_seconds": 3600.0}),  # who failed to save ends the wait for others
        (1, 75, {"grace_period_seconds": 0.5}),
    ],
)
def test_a_worker_that_does_not_save_in_time_or_for_nothing_is_ended(launch, deaf: int, code: int, grace: Any) -> None:
    one = launch(
        f"if rank == {deaf}: {DEAF}\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit({code})); forever()",
        nproc=2,
        **grace,
    )
    one.wait_ready(2)
    one.process.send_signal(signal.SIGTERM)
    assert one.finish() == 143
    assert one.stderr == "stopped by SIGTERM\n"  # by the agent: the launcher has not had to end it


OBEYS = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(75)); forever()"
LATE = {"grace_period_seconds": 0.3}
# name -> (the workers, the settings, the exit code, the beginning of the report)
NOT_ASKED = {
    "all save": ("time.sleep(0.6 * rank); sys.exit(75)", {}, 75, ""),  # srun signals the workers, not their agent
    "rank 0 saves, another ends": ("time.sleep(0.6 * rank); sys.exit([75, 0][rank])", {}, 75, ""),
    "rank 0 ends, another saves": ("time.sleep(0.6 * rank); sys.exit([0, 75][rank])", {}, 75, ""),
    "who goes on after rank 0 has saved is ended": (
        f"if rank == 0: sys.exit(75)\n{DEAF}", {"grace_seconds": 0.2, **LATE}, 75, "",
    ),
    "without rank 0 nothing is saved": (
        f"if rank == 2: sys.exit(75)\n{DEAF}", {"nproc": 3, "grace_seconds": 0.2, **LATE}, 1, "rank 0, 1 still ran 0.3",
    ),
    "who is late is asked before it is ended": (f"if rank == 1: sys.exit(75)\n{OBEYS}", LATE, 75, ""),
}  # fmt: skip


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", NOT_ASKED)
def test_saved_without_being_asked_by_us(launch, name: str) -> None:
    worker, settings, code, report = NOT_ASKED[name]
    one = launch(worker, **{"nproc": 2, "max_restarts": 3, **settings})
    assert one.finish() == code
    assert one.stderr.partition(" s after")[0] == report


def test_a_failure_after_another_has_saved_is_told_and_not_retried(launch) -> None:
    one = launch("if rank == 0: sys.exit(75)\ntime.sleep(0.3); os.kill(os.getpid(), 9)", nproc=2, max_restarts=3)
    assert one.finish() == 137
    assert one.diagnosis[0].startswith("rank 1 (")
    assert one.stderr.splitlines()[-1].startswith("not restarted: ")


def test_saved_while_a_failed_generation_was_stopped_is_no_reason_to_end(launch) -> None:
    """Survivors that are stopped for a restart save and end with 75, as they would for anybody."""
    one = launch(
        "signal.signal(signal.SIGTERM, lambda *_: ((folder / 'asked').touch(), sys.exit(75)))\nready()\n"
        "if generation: sys.exit(0)\n"
        "while len(list(folder.glob('ready-*'))) < 2: time.sleep(0.01)\n"
        "os.kill(os.getpid(), 9) if rank == 1 else forever()",
        nproc=2,
        max_restarts=1,
    )
    assert one.finish() == 0, one.stderr
    wait_until((one.folder / "asked").exists, "the survivor was asked", 0.1)
