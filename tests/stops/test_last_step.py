"""All ranks of a script stop after the same step, whoever gets the signal; a stop never takes longer than the grace."""

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests import warm
from tests.launch.agent.nodes_harness import several
from tests.launch.launch_fixture import launch as launch
from tests.launch.launch_harness import Launch, wait_until
from tests.stops.soak_stops import SCRIPTS, Stop, batches, finished, stopped

from paceline.protocol.control import BOOTSTRAP

STOPS = """
from paceline.rank.guard import HangGuard
from paceline.rank.stops import StepStopHandler
stops = StepStopHandler(HangGuard.of_process().page, ("worker.py",))
def step(number):  # ranks without collectives, as far apart as they can be
    time.sleep(0.002 * (1 + 2 * rank))
    if number == 20: ready()
    if stops.end_step():
        (folder / f"last-{rank}").write_text(str(number))
        stops.exit_saved("here")
stops.install_handlers()
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
    stops = STOPS.replace("stops.install_handlers()", "assert not stops.can_install_handlers")
    one = script(f"{handles}{stops}ready()\nwhile True: step(0)")
    one.wait_ready(2)
    one.process.send_signal(signal.SIGTERM)
    assert one.finish() != 75


# ---- a sample of soak-stops -----------------------------------------------------------------------------------------

RECORD = Path(__file__).parents[2] / "benchmarks" / "results" / "stops.json"
MODULES = {"trainer": "transformers", "accelerated": "accelerate"}  # no extra has Lightning: `make soak-stops` runs it


@pytest.mark.ranks
@pytest.mark.sample(3)
@pytest.mark.parametrize("script", [pytest.param(name, marks=pytest.mark.needs(MODULES[name])) for name in MODULES])
def test_the_same_command_resumes_to_the_same_weights(script: str, tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    whole.mkdir(), cut.mkdir()
    code, reached = stopped(script, Stop("save", 2, who="rank 1, SIGTERM"), cut, warm.with_ranks)
    assert code == 75 and not [moment for moment in reached if moment.startswith("digest")]
    records = [*cut.rglob("paceline-stopped.json")]
    assert len(records) == (script != "accelerated")
    assert finished(script, cut, warm.with_ranks) == finished(script, whole, warm.with_ranks)
    assert not [*cut.rglob("paceline-stopped.json")]
    assert batches(script, cut) == batches(script, whole)


@pytest.mark.ranks
@pytest.mark.sample(5)
@pytest.mark.needs("transformers")
@pytest.mark.parametrize(
    ("kind", "number"),
    [
        ("twice", 5),  # the second training does not resume from the first
        ("patient", 9),  # in the middle of the patience of early stopping
        ("best", 7),  # at the end of an epoch, where an evaluation decides about the checkpoint
        ("unsaved", 4),
        ("steps", 4),
    ],
)
def test_trainer_resumes_with_its_settings(kind: str, number: int, tmp_path: Path) -> None:
    whole, cut, script = tmp_path / "whole", tmp_path / "cut", f"trainer {kind}"
    whole.mkdir(), cut.mkdir()
    code, _ = stopped(script, Stop("step", number, who="rank 1, SIGTERM"), cut, warm.with_ranks)
    assert code == 75
    assert finished(script, cut, warm.with_ranks) == finished(script, whole, warm.with_ranks)
    assert batches(script, cut) == batches(script, whole)


@pytest.mark.ranks
@pytest.mark.sample(2)
@pytest.mark.parametrize(("option", "is_hooked"), [("--hang-timeout=60", True), ("--check", False)])
def test_a_check_does_not_resume_what_was_stopped(option: str, is_hooked: bool, tmp_path: Path) -> None:
    (tmp_path / "transformers").mkdir()
    module = "import torch\nclass Trainer:\n    def train(self): ...\n    def _save_checkpoint(self): ...\n"
    (tmp_path / "transformers" / "trainer.py").write_text(module)
    code = "from transformers.trainer import Trainer\nprint('hooked', hasattr(Trainer.train, '__wrapped__'))\n"
    (tmp_path / "script.py").write_text(code)
    run = warm.run(("-m", "paceline", "launch", "--nproc=2", option, "script.py"), ranks=True, cwd=tmp_path)
    assert f"hooked {is_hooked}" in run.stdout, run.stderr


def test_each_repeat_of_the_record_is_right() -> None:
    record = json.loads(RECORD.read_text())
    assert all(one["right"] for one in record["repeats"].values())
    assert {one["script"] for one in record["repeats"].values()} == {*SCRIPTS}
