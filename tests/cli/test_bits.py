"""A seeded sample of tests/soak_bits.py: the same bits on every world size, after a kill, after a resume."""

import random
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from tests.ended import start_steps
from tests.run_script import run_script
from tests.small_mnist import write_mnist
from tests.soak_bits import KILLED, Lab, bits, last_step, workers_killed

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(720), pytest.mark.sample(2)]  # 5 to 15 s on 2 idle cores

SMALL: Mapping[str, object] = {**KILLED, "steps": 30, "strategy": "exact"}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_mnist(tmp_path_factory.mktemp("data") / "mnist", train=101)


@pytest.fixture
def lab(tmp_path: Path, data: Path) -> Iterator[Lab]:
    with Lab(tmp_path / "run", data) as one:
        yield one


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory, data: Path) -> str:
    """The bits of one rank that nobody disturbs."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in SMALL.items()]
    words = ("-m", "paceline", "train", "mnist-cnn", f"--data-dir={data}", f"--run-dir={folder}", *flags)
    done = run_script(1, *words, cwd=folder.parent)
    assert done.returncode == 0, done.stdout + done.stderr
    return bits(folder)


@pytest.mark.slow
def test_a_killed_worker_costs_no_bit(lab: Lab, expected: str) -> None:
    settings = {**SMALL, "nproc": 2, "max_restarts": 3, "snapshot_every": 3}
    result = workers_killed(lab, settings, random.Random(1), "one")
    assert start_steps(lab.folder)[-1] > 0, result.told
    assert (result.code, result.digest, result.faults) == (0, expected, []), lab.log.read_text()


@pytest.mark.slow
def test_a_run_asked_to_stop_costs_no_bit_on_another_world_size(lab: Lab, expected: str) -> None:
    """Also where no checkpoints were asked for: the one that is written now is the only one."""
    lab.start("mnist-cnn", {**SMALL, "nproc": 1})
    assert lab.wait_for(lambda: last_step(lab.folder) >= 6), lab.log.read_text()
    assert lab.finish(signal.SIGTERM) == 75, lab.log.read_text()
    goes_on(lab, 2, expected)


def goes_on(lab: Lab, nproc: int, expected: str) -> None:
    lab.start("", {"resume": "auto", "nproc": nproc})
    assert lab.finish() == 0, lab.log.read_text()
    assert start_steps(lab.folder)[-1] > 0
    assert bits(lab.folder) == expected
    assert list(lab.faults()) == []
