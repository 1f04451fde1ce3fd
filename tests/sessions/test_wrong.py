"""Whatever users write into a loop is right, or refused in words: never silently wrong."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests import warm
from tests.errors import raises
from tests.launch.launch_fixture import forked as forked
from tests.run_script import run_script
from tests.sessions import wrong

import paceline
from paceline.sessions.state import copy_json_values

TOLD = {
    "torchs_own_backward": ("torch-backward", "s.backward(loss)"),
    "no_backward": ("no-backward", ""),
    "batches_counted_by_bodies": ("bodies-differ", ""),
    "scheduler_not_prepared": ("learning-rate-in-step", ""),
    "closure": ("closure-called-several-times", "Twice"),
    "lbfgs": ("optimizer-needs-closure", ""),
    "two_backwards_under_exact": ("two-backwards", ""),
    "other_weights_in_one_step": ("weights-differ", " 2 and 5"),
    "step_before_the_last_backward": ("step-before-last-backward", ""),
    "into_a_model_that_has_stepped": ("backward-after-step", ""),
    "left_in_the_middle_of_a_step": ("loop-left-in-step", "epoch 1, batch 1"),
    "two_loops_at_once": ("two-loops-at-once", ""),
    "evaluation_before_the_last_micro_batch": ("evaluation-inside-step", ""),
    "evaluated_with_the_buffers_of_one": ("evaluated-with-buffers-of-one", ""),
    "clipped_where_gradients_are_cut": ("sharded-gradient-used", "s.clip_grad_norm(max_norm)"),
    "nothing_to_train": ("nothing-to-train", ""),
    "a_model_too_late": ("prepared-too-late", ""),
    "not_a_loss": ("loss-not-a-tensor", "float"),
    "a_model_that_was_not_prepared": ("model-not-prepared", ""),
    "one_of_two_models": ("model-not-named", " 2 prepared models"),
    "outside_a_loop": ("backward-outside-loop", ""),
    "a_stream_to_be_shuffled": ("stream-shuffled", ""),
    "a_stream_to_be_padded": ("stream-padded", ""),
    "a_stream_in_four_processes": ("stream-in-processes", "num_workers=4"),
    "a_stream_without_shards": ("stream-without-shards", ""),
    "a_stream_of_few_shards": ("too-few-shards", " 1 shards"),
    "split_for_nobody_knows_how_many": ("split-without-virtual-ranks", ""),
    "samples_that_are_split": ("samples-split", ""),
    "no_data": ("not-data", "int"),
    "an_empty_stream": ("stream-gives-nothing", "epoch 1"),
    "an_iterator_in_two_epochs": ("stream-gives-nothing", "epoch 2"),
    "a_state_that_cannot_be_saved": ("state-not-plain", "Tensor"),
    "the_length_of_a_stream": ("", "has no length"),
    "a_stream_read_twice_at_once": ("stream-read-twice", ""),
    "an_iteration_of_its_own": ("loader-not-taken-over", "__iter__ of a OwnIteration"),
    "a_stream_that_each_process_reads": ("stream-repeated-by-processes", "2 loader processes"),
    "a_generator_of_its_own": ("samples-change", "OwnGenerator"),
    "batches_out_of_order": ("loader-not-taken-over", "in_order=False"),
    "whole_batches": ("loader-not-taken-over", "batch_size=None"),
    "said_twice": ("said-twice", "global_batch="),
    "no_batch_size": ("no-batch-size", ""),
    "not_finite": ("not-finite", "epoch 1, batch 1; rank 0: among samples"),
    "not_finite_for_one_sample": ("not-finite", "epoch 1, batch 2; rank 0: samples 5"),
    "not_finite_in_a_gradient": ("not-finite", "all 2 parameters"),
    "an_optimizer_as_scheduler": ("optimizer-as-scheduler", ""),
    "another_strategy": ("unknown-name", "'fdsp'"),
    "blocks_for_another_strategy": ("argument-of-another-strategy", "fsdp_wrap='Block'"),
    "blocks_that_are_not_there": ("no-such-module", "fsdp_wrap Block: "),
    "cut_and_copied": ("sharded-model-copied", ""),
    "cut_and_called_outside_a_loop": ("sharded-model-outside-loop", "with s.evaluating()"),
    "cut_and_torchs_own_backward": ("torch-backward", "s.backward(loss)"),
    "cut_and_a_gradient_penalty": ("torch-backward", "gradient penalty"),
    "cut_after_its_parameters_were_taken": ("replaced-parameter-used", ".grad"),
    "cut_after_its_parameters_were_looked_at": ("replaced-parameter-used", "lerp_.Scalar"),
    "cut_and_used_outside_of_its_block": ("sharded-weights-used", "session(fsdp_wrap='Block')"),
    "not_cleared_where_gradients_are_cut": ("gradients-not-cleared", ""),
    "not_cleared_where_the_model_is_cut": ("", "without zero_grad()"),
    "zeroed_where_gradients_are_cut": ("", "nothing"),
    "zeroed_by_the_model_where_gradients_are_cut": ("sharded-gradient-used", "optimizer.zero_grad()"),
    "zeroed_where_the_model_is_cut": ("", "nothing"),
    "resume_without_a_folder": ("session-resume-without-folder", ""),
    "a_folder_that_is_used": ("run-dir-not-empty", "folder used"),
    "begun": ("", "enough"),
    "gone_on_with_another_batch": ("another-run-for-good", "global_batch: 4"),
    "another_device": ("unknown-name", "'tpu'"),
    "a_buffer_made_in_the_first_forward": ("buffer-made-in-first-forward", "mean"),
    "not_cleared": ("", "NOTE: optimizer.step() was called twice without zero_grad(): the gradients of older"),
    "cleared_in_other_ways": ("", "nothing"),
    "evaluated_in_training_mode": ("", "NOTE: a model is evaluated in training mode"),
}
"""the code of each case, and what its text names"""


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, str]]:
    file = tmp_path_factory.mktemp("wrong") / "told.json"
    done = warm.run((wrong.__file__, str(file)), cwd=file.parent)
    assert done.returncode == 0, done.stderr
    return json.loads(file.read_text())


@pytest.mark.parametrize("name", wrong.CASES)
def test_what_is_wrong_is_refused_in_words(told: dict[str, tuple[str, str]], name: str) -> None:
    (code, words), (found, text) = TOLD[name], told[name]
    assert found == code and words in text
    assert " --" not in text and text.count("NOTE") < 2


def run_mine(launcher: str, folder: Path) -> subprocess.CompletedProcess[str]:
    if launcher == "python":  # which calls sys.excepthook
        return subprocess.run((sys.executable, "mine.py"), cwd=folder, capture_output=True, text=True, timeout=150)
    return warm.run(("-m", "paceline", "launch", "--nproc", "2", "--", "mine.py"), ranks=True, cwd=folder)


SCRIPT = "import paceline\ns = paceline.session()\ns.loader(3, global_batch=2)\n"


def test_the_error_names_the_argument_that_skips_the_step(told: dict[str, tuple[str, str]]) -> None:
    assert '(not_finite="skip")' in told["not_finite"][1]


@pytest.mark.parametrize("launcher", [pytest.param("python", marks=pytest.mark.slow), "paceline"])
def test_it_ends_with_code_2_and_is_said_once_without_a_traceback(tmp_path: Path, launcher: str) -> None:
    (tmp_path / "mine.py").write_text(SCRIPT)
    done = run_mine(launcher, tmp_path)
    assert (done.returncode, done.stderr.count("[not-data]")) == (2, 1), done.stdout + done.stderr
    assert "Traceback" not in done.stderr + done.stdout
    assert "mine.py:3: " in done.stderr
    records = [json.loads(path.read_text()) for path in tmp_path.rglob("error-*.json")]
    assert {(one["code"], one["fields"]["kind"]) for one in records} == ({("not-data", "int")} if records else set())
    assert bool(records) == (launcher == "paceline")


LATE = """
import torch, paceline
from torch import nn

with paceline.session("run") as s:
    model, optimizer = s.prepare(nn.Linear(2, 1), lambda p: torch.optim.SGD(p, lr=0.1))
    for number, (x,) in enumerate(s.loader([(torch.ones(2),)] * 12, global_batch=4)):
        optimizer.zero_grad()
        loss = model(x).mean()
        loss.backward() if number == 2 else s.backward(loss)
        optimizer.step()
"""


@pytest.mark.parametrize(
    "value", [float("nan"), float("inf"), {1: "one"}, (1, 2), {3}, b"x", [0, [{"deep": float("-inf")}]], torch.ones(1)]
)
def test_what_a_file_would_give_back_as_something_else_is_not_saved(value: Any) -> None:
    right = {"best": 0.5, "seen": [1, True, None, "x", {"a": []}]}
    found = copy_json_values(right, strict=True)
    assert found == right and found["seen"] is not right["seen"]
    with raises("saved-not-plain", name="odd"):
        copy_json_values({**right, "odd": value}, strict=True)
    assert copy_json_values({**right, "odd": value}, strict=False) == right


def test_what_cannot_be_saved_is_named_and_the_rest_is_saved(tmp_path: Path) -> None:
    kept = LATE.replace("loss.backward() if number == 2 else ", "").replace(
        "        loss =", "        s.saved |= {'best': 0.5, 'model': model} if number == 2 else {}\n        loss ="
    )
    (tmp_path / "mine.py").write_text(kept)
    done = run_script(1, "mine.py", cwd=tmp_path)
    assert done.returncode == 2 and "[saved-not-plain]" in done.stderr, done.stdout + done.stderr
    manifest = next((tmp_path / "run" / "checkpoints" / "step-00000003").glob("*.json")).read_text()
    assert '"best"' in manifest and '"model"' not in manifest.split('"saved"')[1].split("}")[0]


@pytest.mark.parametrize("launcher", ["python", pytest.param("paceline", marks=pytest.mark.slow)])
def test_an_error_of_use_after_some_steps_has_code_2_and_the_steps_are_saved(tmp_path: Path, launcher: str) -> None:
    (tmp_path / "mine.py").write_text(LATE)
    done = run_mine(launcher, tmp_path)
    assert done.returncode == 2 and "s.backward(loss)" in done.stderr, done.stdout + done.stderr
    assert "Traceback" not in done.stderr + done.stdout
    assert (tmp_path / "run" / "checkpoints" / "step-00000002").is_dir()


def refused() -> list[tuple[str, int]]:
    """What ranks raise, and its exit code, before any step and after some."""
    found: list[tuple[str, int]] = []
    for act in (lambda s: s.gather(torch.ones(2, s.rank + 1)), lambda s: s.main(Path("nowhere").read_text)):
        for number in (0, 8):
            try:
                with paceline.session() as s:
                    model, optimizer = s.prepare(torch.nn.Linear(2, 1), lambda p: torch.optim.SGD(p, lr=0.1))
                    for (x,) in s.loader([(torch.ones(2),)] * number, global_batch=4) if number else ():
                        optimizer.zero_grad()
                        s.backward(model(x).mean())
                        optimizer.step()
                    act(s)
            except Exception as error:
                found.append((type(error).__name__, int(getattr(error, "exit_code", 1))))
    return found


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_an_error_of_use_has_code_2_on_each_rank_and_an_error_of_the_users_own_stays_it() -> None:
    first, second = paceline.run(refused, 2)
    assert first == [("UsageError", 2), ("UsageError", 2), ("FileNotFoundError", 1), ("FileNotFoundError", 1)]
    assert second == [("ReportedByPeer", code) for code in (2, 2, 1, 1)]
