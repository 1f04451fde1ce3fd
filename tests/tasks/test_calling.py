"""A dict batch is given to a model by name where its forward takes names of the dict's keys, and as it is elsewhere."""

from collections import UserDict
from pathlib import Path
from typing import Any

import pytest
import torch
from tests import warm
from tests.ended import ended
from tests.errors import raises
from tests.run_script import run_script
from torch import Tensor, nn

from paceline.compute.forward import wrap_forward
from paceline.compute.precision import autocast_bf16, bf16_unsupported_reason
from paceline.data.loader import LoadingOptions, fetch_inputs_and_targets
from paceline.tasks.task import call_model

BATCH = {"x": torch.ones(2), "mask": torch.zeros(2), "label": torch.ones(2)}


class Named(nn.Module):
    def forward(self, x: Tensor, mask: Tensor | None = None, other: int = 1) -> Any:
        return {"x": x, "mask": mask, "other": other}


class Everything(nn.Module):
    def forward(self, x: Tensor, **more: Any) -> Any:
        return {"x": x, **more}


class Whole(nn.Module):
    def forward(self, batch: Any) -> Any:
        return batch


class WholeAndMore(nn.Module):
    def forward(self, batch: Any, **more: Any) -> Any:
        return batch


def changed() -> nn.Module:
    model = Named()
    wrap_forward(model, lambda forward, args, kwargs: forward(*args, **kwargs))
    return model


def in_16_bits() -> nn.Module:
    model = Named()
    autocast_bf16(model, torch.device("cpu"))
    return model


@pytest.mark.parametrize("inputs", [BATCH, UserDict(BATCH)], ids=["dict", "BatchEncoding"])
@pytest.mark.parametrize(
    ("make", "taken"),
    [
        (Named, ["x", "mask", "other"]),
        (Everything, ["x", "mask", "label"]),
        (Whole, None),
        (WholeAndMore, None),
        (changed, ["x", "mask", "other"]),
        (in_16_bits, ["x", "mask", "other"]),
    ],
)
def test_a_forward_gets_what_it_names(make: Any, taken: list[str] | None, inputs: Any) -> None:
    found = call_model(make(), inputs)
    assert found is inputs if taken is None else [*found] == taken


def test_a_wrapper_is_called_with_what_the_model_names() -> None:
    got = call_model(Named(), BATCH, lambda *args, **kwargs: (args, kwargs))
    assert got == ((), {"x": BATCH["x"], "mask": BATCH["mask"]})


def test_a_tensor_and_a_pair_are_given_as_they_are() -> None:
    assert call_model(Whole(), BATCH["x"]) is BATCH["x"]
    assert call_model(Whole(), (1, 2)) == (1, 2)


def test_a_dict_is_inputs_and_targets_and_a_triple_is_refused() -> None:
    samples: Any = [{"x": torch.full((3,), float(i)), "label": i} for i in range(4)]
    ((inputs, targets),) = fetch_inputs_and_targets(
        samples, [(0, torch.tensor([1, 3]))], 0, LoadingOptions(torch.device("cpu"))
    )
    assert inputs is targets and inputs["label"].tolist() == [1, 3] and inputs["x"].shape == (2, 3)
    with raises("not-pairs", kind="list of length 3"):
        next(
            fetch_inputs_and_targets([(1, 2, 3)] * 2, [(0, torch.tensor([0]))], 0, LoadingOptions(torch.device("cpu")))
        )  # pyright: ignore


TASK = """
import torch
from torch import nn
from paceline import Task

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)
    def forward(self, x, scale):
        return {"logits": self.layer(x * scale[:, None])}

def data(split):
    g = torch.Generator().manual_seed(len(split))
    return [{"idx": i, "x": torch.randn(4, generator=g), "scale": 1 + i % 2, "labels": i % 3} for i in range(45)]

def loss(outputs, batch):
    losses = nn.functional.cross_entropy(outputs["logits"], batch["labels"], reduction="none")
    total = outputs["logits"].sum(1) * (batch["idx"] != BAD)
    return losses + 0 * (total * total).sqrt()  # at 0 its gradient is not finite

BAD = -1
def accuracy(outputs, batch):
    return (outputs["logits"].argmax(1) == batch["labels"]).float()
task = Task(Model, data, loss, metrics={"accuracy": accuracy})
"""


def run(folder: Path, *words: str) -> Any:
    done = warm.run(("-m", "paceline", *words), cwd=folder, ranks=True)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow
def test_a_task_of_dicts_trains(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(TASK)
    train = ("-m", "paceline", "train", "mine.py:task", "--epochs", "1", "--batch-size", "8", "--strategy", "ddp")
    precision = "fp32" if bf16_unsupported_reason(torch.device("cpu")) else "bf16"
    done = run_script(2, *train, "--precision", precision, "--run-dir", "run", cwd=tmp_path)
    assert done.returncode == 0 and "accuracy" in done.stdout, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.timeout(360)
def test_a_bad_sample_of_dicts_is_named_and_verify_agrees(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(TASK.replace("BAD = -1", "BAD = 13"))
    code, told = run(tmp_path, "train", "mine.py:task", "--epochs", "1", "--nproc", "2", "--batch-size", "8")
    assert code == 5 and "samples 13 " in " ".join(told.split()), told
    (tmp_path / "mine.py").write_text(TASK)
    code, told = run(tmp_path, "verify", "mine.py:task", "--ranks", "1,2", "--steps", "2", "--strategies", "fsdp")
    assert code == 0, told


@pytest.mark.slow
@pytest.mark.needs("transformers")
def test_the_example_of_hugging_face_learns(tmp_path: Path) -> None:
    example = str(Path(__file__).parents[2] / "examples" / "bert_task.py")
    words = ("-m", "paceline", "train", f"{example}:task", "--epochs", "4", "--batch-size", "8", "--run-dir", "run")
    done = run_script(2, *words, "--lr", "0.003", "--warmup-steps", "5", cwd=tmp_path)
    assert done.returncode == 0 and (ended(tmp_path / "run").test_accuracy or 0.0) > 0.7, done.stdout + done.stderr
