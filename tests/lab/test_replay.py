"""`paceline replay` finds planted faults and reproduces the bits of a step. tests/soak_replay.py has more."""

import shutil
from collections.abc import Collection
from pathlib import Path

import msgspec
import pytest
from tests import warm
from tests.errors import ended_with, raises
from tests.lab.loop_to_replay import BAD as BAD_LABEL
from tests.lab.tasks_to_replay import BAD
from tests.run_script import run_script
from tests.soak_replay import LOOP, TASKS, digest_of, hashes, logged_loss, replayed

from paceline.checkpoint.manager import Checkpoints
from paceline.data.plan import BatchPlan
from paceline.lab.replay import LoggedStep, ReplayResult, read_logged_step
from paceline.runs.checkpoint_format import encode_manifest, read_manifest
from paceline.runs.events import Started, Step

RANKS, STEPS, EVERY = 3, 12, 4
STEP_1 = BatchPlan(110, 32, RANKS).global_indices(0, 0).tolist()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory):
    """Trains a task with a fault, or a session, on two ranks of three virtual ranks, and returns its folder."""
    folder = tmp_path_factory.mktemp("runs")

    def run_dir(fault: str, strategy: str = "exact", *more: object) -> Path:
        run_dir = folder / "-".join(map(str, (fault, strategy, *more))).replace("/", "_")
        if run_dir.exists():
            return run_dir
        if fault in ("session", "unseeded"):
            flags = ["--unseeded"] if fault == "unseeded" else []
            done = run_script(2, LOOP, "--run", run_dir, "--strategy", strategy, *flags, *more, cwd=folder)
        else:
            settings = [
                "--run-dir", run_dir, "--strategy", strategy, "--virtual-ranks", RANKS, "--global-batch", 32,
                "--last-batch", "drop", "--lr", 0.05, "--steps", STEPS, "--checkpoint-every", EVERY, "--device", "cpu",
                "--keep-checkpoints", 9, "--task-arg", f"fault={fault}", *more,
            ]  # fmt: skip
            done = run_script(2, "-m", "paceline", "train", f"{TASKS}:planted", *settings, cwd=folder)
        assert (done.returncode == 0) == (fault not in ("sample", "layer")), done.stderr
        return run_dir

    return run_dir


def copied(run_dir: Path, folder: Path, *, torch: str = "", damaged: Collection[int] = ()) -> Path:
    """A copy of a run, as if it was made with another torch, or some of its checkpoints were damaged."""
    copy = shutil.copytree(run_dir, folder / "copy")
    for step, path in Checkpoints(copy / "checkpoints").entries():
        if torch:
            manifest = read_manifest(path, trust=False)
            definition = manifest.definition | {"hardware": manifest.definition["hardware"] | {"torch": torch}}
            changed = msgspec.structs.replace(manifest, definition=definition)
            (path / "manifest.json").write_bytes(encode_manifest(changed))
        if step in damaged:
            shard = next(path.glob("shard-*"))
            shard.write_bytes(shard.read_bytes()[:-8])
    return copy


def step_with(sample: int) -> tuple[int, int]:
    """The last step that has this sample, and its virtual rank."""
    plan = BatchPlan(110, 32, RANKS, seed=0, last_batch="drop")
    parts = [(n, v) for n in range(STEPS) for v in range(RANKS) if sample in plan.indices(*divmod(n, 3), v)]
    return parts[-1][0] + 1, parts[-1][1]


@pytest.mark.parametrize("strategy", ["exact", "zero"])
def test_a_step_of_two_ranks_has_the_same_bits_on_one(runs, strategy: str) -> None:
    run_dir = runs("label", strategy)
    before = hashes(run_dir)
    code, output, result = replayed(run_dir, 7, "--check")  # an epoch, with a checkpoint, has ended after step 6
    assert (code, result["start"], result["reasons"]) == (0, 6, []), output
    assert result["loss"].hex() == logged_loss(run_dir, 7).hex()
    assert (result["checkpoint"], result["digest"]) == (2 * EVERY, digest_of(run_dir, 2 * EVERY))
    assert hashes(run_dir) == before


def test_a_wrong_label_has_the_worst_loss_and_can_be_left_out(runs) -> None:
    run_dir, (step, virtual_rank) = runs("label"), step_with(BAD)
    _, output, result = replayed(run_dir, step)
    worst, *others = result["samples"]
    assert (worst["index"], worst["virtual_rank"]) == (BAD, virtual_rank), output
    assert [*result["layers"]] == ["0", "1", "4"]
    code, _, without = replayed(run_dir, step, "--without", BAD)
    assert code == 0 and len(without["samples"]) == len(others)
    assert without["loss"] < result["loss"]
    mean = sum(sample["loss"] for sample in without["samples"]) / len(others)
    assert without["loss"] == pytest.approx(mean, rel=1e-6)


def test_a_damaged_sample_is_the_first_value_that_is_not_finite(runs) -> None:
    last = max((int(e.step) for e in _steps(runs("sample"))), default=0)  # the run has failed in the next one
    code, output, result = replayed(runs("sample"), last + 1, "--find-nonfinite")
    assert code == 0, output
    assert result["samples"][0]["loss"] is None
    found = result["nonfinite"]
    assert (found["module"], found["samples"], found["cause"]) == ("0", [BAD], "input")


def test_a_layer_that_divides_by_zero_is_named(runs) -> None:
    last = max((int(e.step) for e in _steps(runs("layer"))), default=0)
    _, output, result = replayed(runs("layer"), last + 1, "--find-nonfinite")
    found = result["nonfinite"]
    assert (found["module"], found["kind"], found["cause"], len(found["samples"])) == ("3", "Divides", "", 1), output


def test_the_debugger_has_batch_model_and_optimizer_and_its_draws_change_nothing(runs, tmp_path: Path) -> None:
    typed = tmp_path / "typed"
    typed.write_text(
        "p batch.work.virtual_rank, len(batch.inputs), type(optimizer).__name__\np model[3](batch.inputs).sum()\n"
        + "c\n" * RANKS
    )
    with typed.open() as stdin:
        done = warm.run(["-m", "paceline", "replay", runs("label"), "--step", 5, "--pdb"], cwd=tmp_path, stdin=stdin)
    assert done.returncode == 0, done.stderr
    assert "(0, 11, 'AdamW')" in done.stdout
    assert done.stdout.count("-> ") == RANKS


def test_another_strategy_states_the_expected_difference_and_a_wrong_log_is_a_failure(runs, tmp_path: Path) -> None:
    code, output, result = replayed(runs("label", "bucketed"), 6)
    assert (code, result["expected"], len(result["reasons"])) == (0, 1e-5, 1), output
    copy = shutil.copytree(runs("label"), tmp_path / "copy")
    for path in copy.glob("events-*.jsonl"):
        path.write_text(path.read_text().replace(repr(logged_loss(copy, 6)), repr(logged_loss(copy, 6) * (1 + 1e-15))))
    code, output, result = replayed(copy, 6)
    assert (code, result["logged"] == result["loss"]) == (1, False), output


def test_a_session_is_repeated_by_its_script(runs) -> None:
    run_dir = runs("session")
    before, arguments = hashes(run_dir), [LOOP, "--", "--run", run_dir]
    for step in (7, 2):  # from a checkpoint, and from the start
        code, output, result = replayed(run_dir, step, "--check", *arguments)
        assert (code, result["reasons"]) == (0, []), output
        assert result["loss"].hex() == logged_loss(run_dir, step).hex()
        assert result["digest"] == digest_of(run_dir, result["checkpoint"])
        assert len(result["samples"]) == 32
        if any(sample["index"] == BAD_LABEL for sample in result["samples"]) and step == 7:
            assert result["samples"][0]["index"] == BAD_LABEL
    assert hashes(run_dir) == before


@pytest.mark.parametrize(("fault", "strategy"), [("label", "bucketed"), ("session", "fsdp")])
def test_a_state_whose_bits_are_not_guaranteed_is_not_compared(runs, fault: str, strategy: str) -> None:
    run_dir = runs(fault, strategy)
    arguments = [LOOP, "--", "--run", run_dir, "--strategy", strategy] if fault == "session" else []
    done = warm.run(["-m", "paceline", "replay", run_dir, "--step", 7, "--check", *arguments], cwd=run_dir.parent)
    ended_with(done, "replay-check-not-guaranteed")
    assert "--check" in done.stderr  # not the argument of a session
    code, output, result = replayed(run_dir, 8, *arguments)
    assert (code, result["start"], result["checkpoint"]) == (0, 6, None), output


@pytest.mark.parametrize("fault", ["label", "session"])
def test_a_run_of_another_torch_states_it_with_and_without_a_checkpoint_before(
    runs, fault: str, tmp_path: Path
) -> None:
    copy = copied(runs(fault), tmp_path, torch="2.0.0")
    arguments = [LOOP, "--", "--run", copy] if fault == "session" else []
    for step in (2, 8):
        code, output, result = replayed(copy, step, *arguments)
        assert (code, result["expected"], result["checkpoint"]) == (0, 1e-5, None), output
        assert ["2.0.0" in reason for reason in result["reasons"]] == [True]
    done = warm.run(["-m", "paceline", "replay", copy, "--step", 2, "--check", *arguments], cwd=tmp_path)
    ended_with(done, "replay-check-not-guaranteed")


def test_damaged_checkpoints_are_passed_over(runs, tmp_path: Path) -> None:
    copy = copied(runs("label"), tmp_path, damaged=(3, 4, 6, 8))
    code, output, result = replayed(copy, 7, "--check")
    assert (code, result["start"], result["checkpoint"]) == (0, 0, 9), output
    assert result["loss"].hex() == logged_loss(copy, 7).hex()
    code, output, result = replayed(copy, 6)
    assert (code, result["checkpoint"]) == (0, None), output


def test_all_optimizers_of_a_session_are_compared(runs) -> None:
    run_dir = runs("session", "exact", "--two-optimizers")
    code, output, result = replayed(run_dir, 7, "--check", LOOP, "--", "--run", run_dir, "--two-optimizers")
    assert (code, result["checkpoint"], result["differing"]) == (0, 8, []), output


def test_a_run_from_weights_with_an_average_is_repeated_from_its_start(runs) -> None:
    run_dir = runs("label", "exact", "--init-from", runs("label"), "--ema", 0.9)
    code, output, result = replayed(run_dir, 2, "--check")
    assert (code, result["start"], result["checkpoint"], result["differing"]) == (0, 0, 3, []), output


def test_a_step_of_finite_values_has_no_first_one_that_is_not(runs) -> None:
    code, output, result = replayed(runs("label"), 7, "--find-nonfinite")
    assert (code, result["nonfinite"], result["contradiction"]) == (0, None, ""), output


def test_synchronised_batch_norm_has_the_virtual_rank_of_a_sample(runs) -> None:
    run_dir = runs("sample", "bucketed", "--batchnorm", "sync")
    last = max((int(e.step) for e in _steps(run_dir)), default=0)
    _, output, result = replayed(run_dir, last + 1, "--find-nonfinite")
    plan = BatchPlan(110, 32, RANKS, seed=0, last_batch="drop")
    (virtual_rank,) = (v for v in range(RANKS) if BAD in plan.indices(*divmod(last, 3), v))
    found = result["nonfinite"]
    assert (found["virtual_rank"], found["samples"]) == (virtual_rank, [BAD]), output
    done = warm.run(["-m", "paceline", "replay", run_dir, "--step", last + 2], cwd=run_dir.parent)
    ended_with(done, "replay-no-such-step")


@pytest.mark.parametrize(("fault", "more", "code"), [
    ("label", ["--step", 0], "below-one"),
    ("label", ["--step", 1, "--without", ",".join(map(str, STEP_1))], "replay-without-all"),
    ("label", ["--step", STEPS + 1], "replay-no-such-step"),
    ("label", ["--step", 5, "--without", 5000], "replay-sample-not-there"),
    ("label", ["--step", 5, "--without", "x"], "replay-index"),
    ("label", ["--step", 5, "--without", 5, "--check"], "replay-check-without"),
    ("label", ["--step", 5, LOOP], "replay-script-of-task"),
    ("session", ["--step", 5], "replay-needs-script"),
    ("session", ["--step", 5, TASKS], "replay-other-script"),
    ("unseeded", ["--step", 2, LOOP, "--", "--unseeded", "--run", "x"], "replay-unseeded"),
])  # fmt: skip
def test_what_cannot_be_repeated_is_an_error(runs, fault: str, more: list[object], code: str) -> None:
    done = warm.run(["-m", "paceline", "replay", runs(fault), *more], cwd=runs(fault).parent)
    ended_with(done, code)


def test_the_code_of_the_run_must_exist(runs, tmp_path: Path) -> None:
    copy = shutil.copytree(runs("label"), tmp_path / "copy")
    for path in copy.rglob("config.toml"):
        path.write_text(path.read_text().replace(str(TASKS), str(tmp_path / "moved.py")))
    done = warm.run(["-m", "paceline", "replay", copy, "--step", 5], cwd=tmp_path)
    ended_with(done, "no-such-task-file")


def test_the_log_of_a_step_is_that_of_the_last_attempt_and_merged_steps_have_no_loss(tmp_path: Path) -> None:
    def started(attempt: int) -> Started:
        return Started(attempt, 0, 1, "host", 1, "cpu", 0.0)

    def step(number: int, loss: float, steps: int = 1) -> Step:
        return Step(number, 0, loss, 8, 0.1, 0.0, 0.0, 0.0, steps=steps, fingerprint="0f")

    events = [started(1), step(4, 1.0, 4), step(5, 2.0), started(2), step(5, 3.0), step(6, 4.0)]
    (tmp_path / "events-0.jsonl").write_bytes(b"".join(msgspec.json.encode(event) + b"\n" for event in events))
    assert read_logged_step(tmp_path, 5, ended=True) == LoggedStep(2, 1, 3.0, 15)
    assert read_logged_step(tmp_path, 3, ended=True).loss is None
    assert read_logged_step(tmp_path, 7, ended=False).loss is None
    with raises("replay-no-such-step", value=7, last=6):
        read_logged_step(tmp_path, 7, ended=True)
    with raises("replay-no-such-step", value=8, last=6, most=7):
        read_logged_step(tmp_path, 8, ended=False)


def test_a_result_agrees_only_within_the_expected_difference() -> None:
    def result(logged: float | None, loss: float | None, **more) -> bool:
        return ReplayResult(1, 0, logged, loss, **more).agrees

    assert result(1.0, 1.0) and not result(1.0, 1.0 + 1e-15) and not result(1.0, None) and result(None, 1.0)
    assert result(1.0, 1.000001, expected=1e-5) and not result(1.0, 1.0001, expected=1e-5)
    assert not result(1.0, 1.0, differing=["model/x"]) and not result(1.0, 1.0, contradiction="other samples")


def _steps(run_dir: Path) -> list[Step]:
    from paceline.runs.events import read_events

    return [event for event in read_events(run_dir / "events-0.jsonl") if isinstance(event, Step)]
