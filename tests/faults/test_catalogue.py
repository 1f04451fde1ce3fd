"""Can every fault of the catalogue strike, with a truth that can be checked? What does the command refuse and write?"""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks.faults.catalogue import FAULTS
from benchmarks.faults.fault import Fate, Fault, Needs, Way
from benchmarks.faults.run import MARKER, USERS, marked_lines, run_fault
from tests import warm

from paceline.protocol.evidence import DiagnosisKind

ALL = list(FAULTS.values())
SOURCES = {path.name: path.read_text() for path in USERS.glob("*.py")}


def marked(name: str) -> list[str]:
    return [path.name for path in USERS.glob("*.py") if marked_lines(path, name)]


def test_every_class_of_the_judge_has_a_name_here() -> None:
    assert {kind.name for kind in DiagnosisKind} <= {*Fate.__members__}


@pytest.mark.parametrize("fault", ALL, ids=lambda fault: fault.name)
def test_the_truth_of_a_fault_is_one_that_can_be_checked(fault: Fault) -> None:
    assert fault.ends and fault.codes
    assert all(0 <= rank < fault.world for rank in fault.ranks)
    assert not (fault.single and (len(fault.causes) != 1 or fault.tie))
    assert not (fault.silent and fault.causes)
    assert not fault.words or not fault.causes


@pytest.mark.parametrize("fault", [fault for fault in ALL if fault.line], ids=lambda fault: fault.name)
def test_the_line_to_blame_is_marked_where_the_fault_strikes(fault: Fault) -> None:
    where = marked(fault.name)
    assert where
    assert fault.way is not Way.TASK or {"task.py", "strikes.py"} & {*where}


def test_every_marker_is_of_a_fault_that_there_is() -> None:
    names = {
        name for text in SOURCES.values() for match in MARKER.finditer(text) for name in match["names"].split(", ")
    }
    assert names - {"name`"} <= set(FAULTS)  # the docstring explains what a marker is


@pytest.mark.parametrize("fault", ALL, ids=lambda fault: fault.name)
def test_the_program_knows_every_fault_that_does_not_come_from_outside(fault: Fault) -> None:
    from_outside = fault.setup or fault.way is Way.HOSTS or fault.name == "nothing"
    name = f'"{fault.name}"'
    by_function = f"\ndef {fault.name.replace('-', '_')}("  # strikes.py makes the names of its functions
    wanted = ["task.py"] if fault.way is Way.TASK else []
    for file in [*wanted, *(["program.py"] if fault.beside else [])]:
        text = SOURCES[file] + (SOURCES["strikes.py"] + SOURCES["late_strikes.py"] if file == "program.py" else "")
        assert from_outside or name in text or by_function in text, f"{file} does nothing for {fault.name}"


# ---- python -m benchmarks.faults ------------------------------------------------------------------------------------

ROOT = Path(__file__).parents[2]


@pytest.fixture
def faults(tmp_path):
    """Run `python -m benchmarks.faults ARGUMENTS`, as in a clone."""

    def run(*arguments: str, env: dict[str, str] | None = None):
        words = (sys.executable, "-m", "benchmarks.faults", *arguments)
        env = {**os.environ, "PYTHONPATH": str(ROOT), **(env or {})}
        return subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)

    return run


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("slepps",), "Did you mean 'sleeps'"),
        (("--repeat", "0"), "--repeat must be at least 1"),
        (("--out", "scores.txt"), "--out must end in .md or .json"),
        (("--out", "nowhere/scores.md"), "does not exist"),
        (("--hang-timeout", "soon"), "--hang-timeout must be"),
    ],
)
def test_wrong_use_is_refused_before_anything_is_started(faults, arguments, words):
    done = faults(*arguments)
    assert done.returncode == 2 and words in done.stderr


def test_what_needs_hosts_is_left_out_with_the_reason(faults):
    done = faults("network-cut")
    assert done.returncode == 0 and "network-cut: " in done.stderr and "make soak-faults" in done.stderr


@pytest.mark.slow
@pytest.mark.ranks
def test_the_scores_are_written_and_the_folders_of_good_runs_removed(faults, tmp_path):
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    done = faults("killed", "--out", "scores.json", env={"TMPDIR": str(temporary)})
    assert done.returncode == 0, done.stderr
    (score,) = json.loads((tmp_path / "scores.json").read_text())
    assert score["fault"] == "killed" and score["right_rank"] and score["code"] == 137
    assert "| killed | 1 | yes |" in (tmp_path / "scores.md").read_text()
    assert not list(temporary.iterdir())


# ---- a few real faults, drawn by a seed -----------------------------------------------------------------------------

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
