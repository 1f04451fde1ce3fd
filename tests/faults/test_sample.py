"""A few real faults, drawn by a seed: rank, class and exit code are right, nothing is left. `make soak-faults`: all."""

import os
import random
from pathlib import Path

import pytest
from benchmarks.faults.catalogue import FAULTS
from benchmarks.faults.fault import Fault, Needs, Way
from benchmarks.faults.run import run_fault
from tests import warm

SEED = int(os.environ.get("FAULTS_SEED", "0"))
STALL_SECONDS = "5"
POSSIBLE = [fault for fault in FAULTS.values() if fault.needs is Needs.NOTHING and not fault.setup and fault.single]


def drawn() -> list[Fault]:
    """Two that are told at once, one that stands still, one of the trainer."""
    dice = random.Random(SEED)
    hangs = [fault for fault in POSSIBLE if 3 in fault.codes and fault.way is Way.SCRIPT and 1 not in fault.codes]
    sudden = [fault for fault in POSSIBLE if fault.fast]
    trainer = [fault for fault in POSSIBLE if fault.way is Way.TASK and 3 not in fault.codes]
    return [*dice.sample(sudden, 2), *dice.sample(hangs, 1), *dice.sample(trainer, 1)]


@pytest.mark.slow
@pytest.mark.sample(3)
@pytest.mark.ranks
@pytest.mark.parametrize("fault", drawn(), ids=lambda fault: fault.name)
def test_the_guilty_rank_is_named_and_nothing_is_left(tmp_path: Path, fault: Fault) -> None:
    score = run_fault(fault, "paceline", tmp_path / "case", hang_timeout=STALL_SECONDS, popen=warm.with_ranks)
    assert score.right_rank and score.right_line is not False and score.right_end and score.right_code, score
    assert not score.processes_left and not score.files_left, score
