"""What goes wrong silently in a script is said, with rank, step and line, and ends it. Real agents and ranks."""

import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.launch.launch_harness import Launch, survivors
from tests.silent.soak_silent import planted

from paceline.errors import ExitCode
from paceline.guard.report import read_diagnosis
from paceline.protocol.evidence import DiagnosisKind
from paceline.runs.attempt import read_notices

pytestmark = pytest.mark.sample(3)

PRELOADED = Path(__file__).parents[1] / "launch" / "agent" / "preloaded.py"
SCRIPT = Path(__file__).with_name("ddp.py")
Run = Callable[..., Launch]


@pytest.fixture
def run(launch: Run) -> Run:
    """Starts three ranks of the script, of which rank 1 does what is said."""

    def begin(*faults: str, steps: int = 60, script: Path = SCRIPT, **settings: object) -> Launch:
        argv = [sys.executable, "-P", str(PRELOADED), str(script), "; ".join(faults) or "none", str(steps)]
        return launch("", argv=argv, plain_store=True, preload=True, **settings)

    return begin


@pytest.mark.ranks
def test_each_kind_of_silent_fault_is_told_with_rank_and_step_and_only_told_where_that_is_wished(run: Run) -> None:
    one = run(
        "an exception in forward, swallowed", "two sums swapped", "a bit flips", "slow data", "nan in one batch",
        steps=120, on_drift="warn",
    )  # fmt: skip
    assert one.finish() == ExitCode.DONE, one.stderr
    said = [*read_notices(one.folder)]
    found = {noted.kind: noted for noted in said}
    parts = {
        "swallowed": ("rank 1 ", "RuntimeError", "ddp.py:"), "mismatch": ("rank 1 ", "all_reduce [] ", "ddp.py:"),
        "diverged": ("rank 1 ", "2.weight"), "not finite": ("rank 1:", "ddp.py:", "batch 76 "),
        "slow": ("rank 1 ", "data"),
    }  # fmt: skip
    assert found.keys() == parts.keys() and len(said) == 5
    for kind, noted in found.items():
        assert all(part in noted.words for part in parts[kind]) and noted.words in one.stderr
    assert found["not finite"].step == 76
    assert "rank 0:" not in found["not finite"].words and "rank 2:" not in found["not finite"].words


@pytest.mark.ranks
def test_a_batch_that_is_nan_in_the_closure_of_a_step_is_told_as_one_before_it(run: Run) -> None:
    one = run("nan in a closure", steps=10_000)
    assert one.finish() == ExitCode.NOT_FINITE, one.stderr
    told = read_diagnosis(one.folder / "diagnosis-1").diagnosis
    assert (told.kind, told.causes, told.step) == (DiagnosisKind.NOT_FINITE, (1,), 12)
    line = next(n for n, text in enumerate(SCRIPT.read_text().splitlines(), 1) if text.endswith("# told: loss"))
    assert f"ddp.py:{line} in closure, batch 12 " in one.stderr


@pytest.mark.ranks
def test_replicas_that_drift_end_the_run_with_its_exit_code_and_a_page(run: Run) -> None:
    one = run("steps twice", steps=10_000)
    assert one.finish() == ExitCode.DIVERGED, one.stderr
    told = read_diagnosis(one.folder / "diagnosis-1").diagnosis
    assert told.causes == (1,) and 13 <= told.step < 200
    assert "CAUSE: rank 1" in one.stderr and "Traceback" not in one.stderr
    assert not survivors(one.mark)


@pytest.mark.slow
@pytest.mark.ranks
def test_the_same_is_told_of_gradients_averaged_by_hand_in_a_run_of_a_second(run: Run) -> None:
    one = run(script=SCRIPT.with_name("by_hand.py"), on_drift="warn")
    assert one.finish() == ExitCode.DONE, one.stderr
    said = [*read_notices(one.folder)]
    drifted = [noted for noted in said if noted.kind == "diverged"]
    (loss,) = (noted.words for noted in said if noted.kind == "swallowed")
    assert drifted[0].step == 50
    assert re.search(r"rank 1 \w+ 75 .*ranks 0, 2 \w+ 76 ", " ".join(noted.words for noted in drifted))
    assert "rank 1 " in loss and "by_hand.py:" in loss and "step 30)" in loss


@pytest.mark.ranks
@pytest.mark.parametrize("how", ["by DDP", "by hand", "by hand, asynchronously"])
def test_a_collective_that_fails_at_the_end_of_a_run_and_is_swallowed_ends_it_with_an_exit_code(
    how: str, run: Run
) -> None:
    script = SCRIPT.with_name("skipped.py")
    line = next(n for n, text in enumerate(script.read_text().splitlines(), 1) if text.endswith(f"# swallowed: {how}"))
    one = run(how, script=script)
    assert one.finish() == ExitCode.MISMATCH, one.stderr
    told = read_diagnosis(one.folder / "diagnosis-1").diagnosis
    assert (told.kind, told.causes, told.step) == (DiagnosisKind.SWALLOWED, (1,), 39)
    assert all(any(f"rank {rank} swallowed" in words for words in told.sentences) for rank in (0, 2))
    assert f"skipped.py:{line}" in told.sentences[0]
    assert any(words.startswith("rank 1 skipped a batch") and "step 25" in words for words in told.sentences)
    assert "Traceback" not in one.stderr and not survivors(one.mark)


@pytest.mark.ranks
def test_ranks_that_form_a_group_again_after_an_error_of_a_collective_end_with_0(run: Run, tmp_path: Path) -> None:
    one = run(str(tmp_path / "store"), script=SCRIPT.with_name("formed_again.py"), nproc=2)
    assert one.finish() == ExitCode.DONE, one.stderr
    assert one.stderr == "" and not [*read_notices(one.folder)]


@pytest.mark.ranks
@pytest.mark.parametrize(
    "what", ["a probe before", "a probe now and then", "a look ahead", "new optimizers beside probes"]
)
def test_what_a_rank_trains_for_itself_is_no_step_of_the_others_training(what: str, run: Run) -> None:
    one = run(what, script=SCRIPT.with_name("own_business.py"))
    assert one.finish() == ExitCode.DONE, one.stderr
    assert one.stderr == "" and not [*read_notices(one.folder)]


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("what", ["alone", "a new optimizer alone", "without DDP"])
def test_ranks_that_all_go_on_alone_after_a_training_are_told_once_and_not_stopped(what: str, run: Run) -> None:
    one = run(what, script=SCRIPT.with_name("own_business.py"))
    assert one.finish() == ExitCode.DONE, one.stderr
    (told,) = read_notices(one.folder)
    assert told.kind == "left" and told.step == 60


@pytest.mark.ranks
@pytest.mark.parametrize("what", ["past DDP by mistake", "one step more"])
def test_a_rank_that_alone_goes_past_ddp_or_steps_once_more_is_found(what: str, run: Run) -> None:
    one = run(what, script=SCRIPT.with_name("own_business.py"))
    assert one.finish() == ExitCode.DIVERGED, one.stderr
    assert read_diagnosis(one.folder / "diagnosis-1").diagnosis.causes == (1,)


@pytest.mark.ranks
def test_off_leaves_nothing_of_it(run: Run) -> None:
    one = run("nan in one batch", steps=20, hang_timeout="off")
    assert one.finish() == ExitCode.DONE
    assert one.stderr == "" and not [*read_notices(one.folder)]


# ---- a sample of soak_silent.py: an Accelerate and a Trainer script -------------------------------------------------

STEPS = 60


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.needs("accelerate")
def test_with_accelerate_the_rank_the_users_line_and_the_batch_of_a_nan_are_named() -> None:
    row = planted("accelerated", "nan in one batch", STEPS, ranks=2, fork=True)
    assert row.well and row.line == "yes", row
    assert ", batch 12 " in row.told


@pytest.mark.ranks
@pytest.mark.needs("transformers")
def test_with_the_trainer_the_rank_and_the_users_line_of_two_exchanged_sums_are_named() -> None:
    row = planted("trainer", "two sums swapped", STEPS, ranks=2, fork=True)
    assert row.code == 4 and row.line == "yes", row
