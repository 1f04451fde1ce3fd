"""Whatever users write into a loop is right, or refused in words: never silently wrong."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests import warm
from tests.run_script import run_script
from tests.sessions import wrong

import paceline
from paceline.errors import UsageError
from paceline.sessions.wording import as_keywords, savable

TOLD = {
    "torchs_own_backward": "Use s.backward(loss)",
    "no_backward": "drawn without s.backward(loss)",
    "batches_counted_by_bodies": "count batches by s.batch",
    "scheduler_not_prepared": "s.prepare(model, optimizer, scheduler)",
    "closure": "Twice may call it several times",
    "lbfgs": "LBFGS",
    "two_backwards_under_exact": "more=True",
    "other_weights_in_one_step": "different weights, 2 and 5",
    "step_before_the_last_backward": "comes without it",
    "into_a_model_that_has_stepped": "only=optimizer",
    "left_in_the_middle_of_a_step": "middle of the step at epoch 1, batch 1",
    "two_loops_at_once": "s.loader(StackDataset(labelled, unlabelled)",
    "evaluation_before_the_last_micro_batch": "`if s.last:`",
    "evaluated_with_the_buffers_of_one": "with s.evaluating()",
    "clipped_where_gradients_are_cut": "s.clip_grad_norm(max_norm)",
    "nothing_to_train": "nothing to train",
    "a_model_too_late": "before the loop",
    "not_a_loss": "not a float",
    "outside_a_loop": "into the body of a loop",
    "a_stream_to_be_shuffled": "only a stream itself can shuffle",
    "a_stream_to_be_padded": "Choose: keep, drop",
    "a_stream_in_four_processes": "read by one process, and num_workers=4",
    "a_stream_without_shards": "has no num_shards",
    "a_stream_of_few_shards": "has 1 shards, and each of 2 virtual ranks needs one",
    "split_for_nobody_knows_how_many": "session(virtual_ranks=...) says how many",
    "samples_that_are_split": "only a stream is split",
    "no_data": "not a int",
    "an_empty_stream": "gives nothing in epoch 1",
    "an_iterator_in_two_epochs": "gives nothing in epoch 2: it is empty, or an iterator",
    "a_state_that_cannot_be_saved": "a Tensor in the state of a stream",
    "the_length_of_a_stream": "has no length",
    "a_stream_read_twice_at_once": "this stream is being read",
    "worker_init": "cannot take over worker_init_fn",
    "batches_out_of_order": "cannot take over in_order=False",
    "whole_batches": "cannot take over batch_size=None",
    "processes_that_should_stay": "NOTE: persistent_workers=True",
    "said_twice": "says that already",
    "no_batch_size": "one of global_batch= and batch_size=",
    "not_finite": "the loss is not finite at epoch 1, batch 1; rank 0: among samples",
    "not_finite_for_one_sample": "the loss is not finite at epoch 1, batch 2; rank 0: samples 5. The parameters",
    "not_finite_in_a_gradient": "of all 2 parameters is not finite at epoch 1, batch 1; each loss is finite",
    "another_strategy": "Choose from: single",
    "blocks_for_another_strategy": "fsdp_wrap='Block') is for strategy='fsdp'",
    "blocks_that_are_not_there": "fsdp_wrap Block: no module matches 'Block'",
    "cut_and_copied": "cannot be copied",
    "cut_and_called_outside_a_loop": "with s.evaluating()",
    "cut_and_torchs_own_backward": "Use s.backward(loss)",
    "cut_and_a_gradient_penalty": "for a gradient penalty say",
    "cut_after_its_parameters_were_taken": ".grad on a parameter from before s.prepare",
    "cut_after_its_parameters_were_looked_at": "lerp_.Scalar on a parameter from before s.prepare",
    "cut_and_used_outside_of_its_block": "session(fsdp_wrap='Block')",
    "not_cleared_where_gradients_are_cut": "Call optimizer.zero_grad() in each step",
    "not_cleared_where_the_model_is_cut": "NOTE: optimizer.step() without zero_grad()",
    "resume_without_a_folder": "needs the folder",
    "a_folder_that_is_used": "the folder used is not empty",
    "begun": "enough",
    "gone_on_with_another_batch": "global_batch: 4 in the checkpoint, 6 now",
    "another_device": "unknown device 'tpu'",
    "a_buffer_made_in_the_first_forward": "mean was None and was made in the first forward",
    "not_cleared": "NOTE: optimizer.step() without zero_grad() since the last: the gradients of older",
    "cleared_in_other_ways": "nothing",
    "evaluated_in_training_mode": "NOTE: a model is evaluated in training mode",
}


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    file = tmp_path_factory.mktemp("wrong") / "told.json"
    done = warm.run((wrong.__file__, str(file)), cwd=file.parent)
    assert done.returncode == 0, done.stderr
    return json.loads(file.read_text())


@pytest.mark.parametrize("name", wrong.CASES)
def test_what_is_wrong_is_refused_in_words(told: dict[str, str], name: str) -> None:
    assert TOLD[name] in told[name]
    assert " --" not in told[name] and told[name].count("NOTE") < 2


SHARED = ("observe", "store", "disk", "data", "collectives", "strategies", "checkpoint", "train")
FLAG = re.compile(r"(?<![\w-])--(?!nproc|nodes|port|stall-after|max-restarts)[a-z]")


def test_what_shared_parts_say_of_flags_is_put_into_keywords() -> None:
    root = Path(str(paceline.__file__)).parent
    modules = [root / "definition.py", *(path for name in SHARED for path in root.glob(f"{name}/*.py"))]
    trees = [ast.parse(path.read_text()) for path in modules]
    words = [n.value for t in trees for n in ast.walk(t) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    flags = [text for text in words if FLAG.search(text)]
    assert len(flags) > 20
    assert [text for text in flags if FLAG.search(as_keywords(text))] == []
    assert as_keywords("go on: --resume auto. Or take fewer --num-workers 0; --port is the launcher's") == (
        "go on: session('...', resume=True). Or take fewer num_workers=0; --port is the launcher's"
    )


SCRIPT = "import paceline\ns = paceline.session()\ns.loader([1, 2])\n"


def test_it_says_what_leaves_such_a_step_out(told: dict[str, str]) -> None:
    assert told["not_finite"].endswith('session(not_finite="skip") leaves such steps out.')


@pytest.mark.parametrize("launcher", ["python", "paceline"])
def test_it_ends_with_code_2_and_is_said_once_without_a_traceback(tmp_path: Path, launcher: str) -> None:
    (tmp_path / "mine.py").write_text(SCRIPT)
    words = ("mine.py",) if launcher == "python" else ("-m", "paceline", "launch", "--nproc", "2", "--", "mine.py")
    done = subprocess.run((sys.executable, *words), cwd=tmp_path, capture_output=True, text=True, timeout=50)
    assert (done.returncode, done.stderr.count("needs one of")) == (2, 1), done.stdout + done.stderr
    assert "Traceback" not in done.stderr + done.stdout


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
    found = savable(right, strict=True)
    assert found == right and found["seen"] is not right["seen"]
    with pytest.raises(UsageError, match=r"s\.saved\['odd'\] cannot be saved, a "):
        savable({**right, "odd": value}, strict=True)
    assert savable({**right, "odd": value}, strict=False) == right


def test_what_cannot_be_saved_is_named_and_the_rest_is_saved(tmp_path: Path) -> None:
    kept = LATE.replace("loss.backward() if number == 2 else ", "").replace(
        "        loss =", "        s.saved |= {'best': 0.5, 'model': model} if number == 2 else {}\n        loss ="
    )
    (tmp_path / "mine.py").write_text(kept)
    done = run_script(1, "mine.py", cwd=tmp_path)
    assert done.returncode == 2 and "s.saved['model'] cannot be saved" in done.stderr, done.stdout + done.stderr
    manifest = next((tmp_path / "run" / "checkpoints" / "step-00000003").glob("*.json")).read_text()
    assert '"best"' in manifest and '"model"' not in manifest.split('"saved"')[1].split("}")[0]


@pytest.mark.parametrize("launcher", ["python", "paceline"])
def test_an_error_of_use_after_some_steps_has_code_2_and_the_steps_are_saved(tmp_path: Path, launcher: str) -> None:
    (tmp_path / "mine.py").write_text(LATE)
    words = ("mine.py",) if launcher == "python" else ("-m", "paceline", "launch", "--nproc", "2", "--", "mine.py")
    done = subprocess.run((sys.executable, *words), cwd=tmp_path, capture_output=True, text=True, timeout=50)
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
def test_an_error_of_use_has_code_2_on_each_rank_and_an_error_of_the_users_own_stays_it() -> None:
    first, second = paceline.run(refused, 2)
    assert first == [("UsageError", 2), ("UsageError", 2), ("FileNotFoundError", 1), ("FileNotFoundError", 1)]
    assert second == [("ToldElsewhere", code) for code in (2, 2, 1, 1)]
