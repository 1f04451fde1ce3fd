"""What a single line says, of each kind that is known."""

from __future__ import annotations

import math
from typing import Any

import pytest

from paceline.report.analysis import EXAMPLES, Reading, read_line

BAR = "40/100 [00:04<00:06,"
CLASSIC = {"samples": (3, 2560), "loss": 0.12}
LINES: list[tuple[str, str, dict[str, Any]]] = [
    ("Train Epoch: 3 [2560/60000 (4%)]\tLoss: 0.12", "classic", CLASSIC),
    ("Train Epoch: 3 [2560/60000] Loss: 0.120000", "classic", CLASSIC),  # seed 003
    ("1: Train Epoch: 3 [2560/60000] Loss: 0.12", "classic", {"rank": "1", **CLASSIC}),
    ("[default2]:[rank2]: Train Epoch: 3 [2560/60000] Loss: .12", "classic", {"rank": "2", **CLASSIC}),
    ("4: [default2]:Train Epoch: 3 [2560/60000] Loss: .12", "classic", {"rank": "4.2", **CLASSIC}),
    ("[rank 3] Train Epoch: 3 [2560/60000] Loss: 1.2e-1", "classic", {"rank": "3", **CLASSIC}),
    ("Test set: Average loss: 0.0300, Accuracy: 9876/10000 (99%)", "key and value", {"test loss": 0.03}),
    ("{'loss': 0.5, 'learning_rate': 5e-05, 'epoch': 1.2}", "Hugging Face Trainer", {"loss": 0.5}),
    (
        "{'eval_loss': 0.4, 'eval_accuracy': 0.9, 'eval_samples_per_second': 100.0, 'epoch': 1.0}",
        "Hugging Face Trainer", {"test loss": 0.4},
    ),
    (
        "{'train_runtime': 10.1, 'train_samples_per_second': 99.0, 'train_loss': 0.3, 'epoch': 3.0}",
        "Hugging Face Trainer", {"samples/s": 99},
    ),
    (
        f"Epoch 3:  40%|####      | {BAR}  9.52it/s, v_num=0, train_loss=0.12]", "progress bar",
        {"steps/s": 9.52, "loss": 0.12},
    ),
    (f" 40%|####  | {BAR} 2.00s/it]", "progress bar", {"steps/s": 0.5}),
    ("epoch=3 step=40 loss=nan", "key and value", {"loss": math.nan}),
    (
        "2026-01-31 13:05:01,500 INFO: step 10/100 loss 0.5 Throughput: 1,234.5 samples/s", "key and value",
        {"loss": 0.5, "samples/s": 1234.5},
    ),
    ("step 7: 1,234 images/s", "key and value", {"samples/s": 1234}),
    ('{"step": 7, "loss": 0.25}', "key and value", {"loss": 0.25}),
    ("Epoch [1/5], Step [100/600], Loss: 0.25", "key and value", {"loss": 0.25}),
    ("[0-7] val_loss: 0.3 val_acc: 93%", "key and value", {"rank": "0-7", "test loss": 0.3}),
    ("loss tensor(0.5, device='cuda:0', grad_fn=<NllLossBackward0>)", "key and value", {"loss": 0.5}),
    ("MASTER_PORT: 29900", "", {}),
    ("lossy compression of 3 epochs", "", {}),
    ("[rank1]: torch.OutOfMemoryError: CUDA out of memory.", "", {"rank": "1"}),
]  # fmt: skip


@pytest.mark.parametrize(("line", "kind", "says"), LINES, ids=[line[:40] for line, _, _ in LINES])
def test_a_line_says_this_and_nothing_else(line: str, kind: str, says: dict[str, Any]) -> None:
    rank, samples = says.get("rank", ""), says.get("samples")
    values = {name: value for name, value in says.items() if name not in ("rank", "samples")}
    assert read_line(line) == Reading(kind, rank, pytest.approx(values, nan_ok=True), samples)  # pyright: ignore


def test_the_examples_that_people_are_shown_are_known() -> None:
    for kind, example in EXAMPLES.items():
        assert read_line(example).format == kind


@pytest.mark.parametrize(
    "line",
    [
        "1%|" * 4000,
        "9" * 9000,
        "1: " * 4000,
        "loss: 1e999, acc: " + "9" * 400,
        "loss: " + "1," * 4000,
        "[" * 9000,
        "\x00\ud800 loss: 1",
    ],
)
def test_a_hostile_line_is_read_without_an_error(line: str) -> None:
    read_line(line)
