"""All ranks of a script stop after the same step, whoever gets the signal; a stop never takes longer than the grace."""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.launch.agent.nodes_harness import several
from tests.launch.launch_fixture import launch as launch
from tests.launch.launch_harness import Launch, wait_until

from paceline.protocol.control import BOOTSTRAP

STOPS = """
from paceline.rank.guard import HangGuard
from paceline.rank.stops import StepStops
stops = StepStops(HangGuard.of_process().page, ("worker.py",))
def step(number):  # ranks without collectives, as far apart as they can be
    time.sleep(0.002 * (1 + 2 * rank))
    if number == 20: ready()
    if stops.end_step():
        (folder / f"last-{rank}").write_text(str(number))
        stops.exit_saved("here")
stops.begin()
(folder / f"pid-{rank}").write_text(str(os.getpid()))
"""
TRAIN = f"{STOPS}for number in range(1, 100_000): step(number)\n"


@pytest.fixture
def script(launch, tmp_path: Path) -> Callable[..., Launch]:
    def begin(code: str, **settings: object) -> Launch:
        argv = [sys.executable, "-P", "-m", BOOTSTRAP, str(tmp_path / "attempt-0" / "worker.py")]
        return launch(code, plain_store=True, argv=argv, nproc=2, **settings)

    return begin


def last_steps(folder: Path) -> set[int]:
    files = [*folder.rglob("last-*")]
    assert len(files) == 2
    return {int(file.read_text()) for file in files}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_ranks_stop_after_one_step(script, number: signal.Signals) -> None:
    one = script(TRAIN)
    one.wait_ready(2)
    one.process.send_signal(number)
    assert one.finish() == 75 and len(last_steps(one.folder)) == 1


def test_a_signal_to_one_rank_stops_all(script) -> None:
    one = script(TRAIN)
    one.wait_ready(2)
    os.kill(int((one.folder / "pid-1").read_text()), signal.SIGTERM)
    assert one.finish() == 75 and len(last_steps(one.folder)) == 1


@pytest.mark.sample(3)
def test_ranks_of_two_nodes_stop_after_one_step(tmp_path: Path) -> None:
    argv = (sys.executable, "-P", "-m", BOOTSTRAP, str(tmp_path / "worker.py"))
    with several(tmp_path, TRAIN, nproc=1, plain_store=True, argv=argv, grace_period_seconds=20.0) as run:
        run.start(0, 1)
        for rank in range(2):
            run.wait_for(f"ready-{rank}")
        run.agents[1].send_signal(signal.SIGTERM)
        assert {*run.codes()} == {75} and len(last_steps(tmp_path)) == 1


def test_a_rank_without_a_further_step_ends_with_the_grace(script) -> None:
    waits = "while not stops._page.get_request('stop_asked'): time.sleep(0.01)\n(folder / 'asked').touch()\nforever()"
    ends = f"if rank:\n    {waits.replace(chr(10), chr(10) + '    ')}\nwhile True: step(0)"
    one = script(f"{STOPS}for number in range(1, 21): step(number)\n{ends}", grace_period_seconds=3600.0)
    one.wait_ready(2)
    one.process.send_signal(signal.SIGTERM)
    wait_until((one.folder / "asked").exists, "the first signal has arrived")
    one.process.send_signal(signal.SIGINT)  # ends the grace
    assert one.finish() == 143 and not (one.folder / "last-1").exists()


def test_a_rank_that_has_ended_delays_no_other(script) -> None:
    """The other one still has its last step to end, which is not the chosen one: it ends by itself."""
    code = "ready()\nif rank == 0: time.sleep(1.0); step(1)"
    one = script(f"{STOPS}{code}", grace_period_seconds=60.0)
    one.wait_ready(2)
    one.process.send_signal(signal.SIGTERM)
    assert one.finish() in (0, 75)


def test_a_script_that_handles_a_stop_signal_gets_it(script) -> None:
    handles = "signal.signal(15, lambda *_: (ready(), sys.exit(7)))\n"
    one = script(f"{handles}{STOPS.replace('stops.begin()', 'assert not stops.can_begin')}ready()\nwhile True: step(0)")
    one.wait_ready(2)
    one.process.send_signal(signal.SIGTERM)
    assert one.finish() != 75
