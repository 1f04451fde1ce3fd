"""Schedules, throughput, losses, weights on disk: what needs one process."""

import errno

import pytest
import torch
from safetensors.torch import load_model
from tests.errors import raises
from torch import nn

from paceline import ArrayDataset, Task
from paceline.data.loader import LoadingOptions
from paceline.runs.progress import WARMUP_STEPS, ThroughputMeter
from paceline.train.optimizer import Schedule, scaled_lr
from paceline.train.prepare import try_loss_on_first_samples
from paceline.train.step import compute_losses_and_weights
from paceline.train.weights import save, save_with_fallback_folders


def test_schedules_warm_up_and_fall():
    for shape, middle in (("cosine", 0.5), ("linear", 0.5), ("constant", 1.0)):
        schedule = Schedule(1.0, total_steps=110, warmup_steps=10, shape=shape)
        assert [schedule.lr(s) for s in (0, 4, 9)] == [0.1, 0.5, 1.0]
        assert schedule.lr(10) == 1.0
        assert schedule.lr(60) == pytest.approx(middle)
        assert 0 <= schedule.lr(109) <= (1.0 if shape == "constant" else 0.02)


def test_learning_rate_scaling():
    assert scaled_lr(0.1, "linear", 512, 128) == pytest.approx(0.4)
    assert scaled_lr(0.1, "sqrt", 512, 128) == pytest.approx(0.2)
    assert scaled_lr(0.1, "none", 512, 128) == 0.1


def test_the_share_of_waiting_leaves_out_the_first_steps_unless_there_are_few():
    waiting = ThroughputMeter()
    assert waiting.data_fraction() is None
    for _ in range(WARMUP_STEPS):
        waiting.count_step(1, 9.0, 10.0)
    assert waiting.data_fraction() == 0.9
    for _ in range(WARMUP_STEPS + 1):
        waiting.count_step(1, 1.0, 10.0)
    assert waiting.data_fraction() == pytest.approx(0.1)


def test_throughput_leaves_out_the_warm_up_and_pauses():
    now = 0.0
    meter = ThroughputMeter(clock=lambda: now)
    for step in range(WARMUP_STEPS + 10):
        now += 100.0 if step < WARMUP_STEPS else 0.5  # a slow start
        meter.count_step(10)
        assert (meter.recent_rate() is None) == (step < WARMUP_STEPS)
    assert meter.recent_rate() == meter.overall_rate() == pytest.approx(20)
    now += 1000.0  # an evaluation
    meter.exclude_pause(1000.0)
    now += 0.5
    meter.count_step(10)
    assert meter.overall_rate() == pytest.approx(20)


def test_losses_must_be_one_per_sample():
    outputs, targets = torch.zeros(4, 3), torch.zeros(4, dtype=torch.long)
    with raises("loss-of-batch", shape=()):
        compute_losses_and_weights(nn.functional.cross_entropy, outputs, targets)
    with raises("loss-of-batch", shape=(12,), samples=4):
        compute_losses_and_weights(lambda o, t: o.flatten(), outputs, targets)
    with raises("loss-weights-shape", weights=(4,)):
        compute_losses_and_weights(lambda o, t: (o, torch.ones(4)), outputs, targets)
    losses, weights = compute_losses_and_weights(lambda o, t: (o, torch.ones(4, 3)), outputs, targets)
    assert losses.shape == weights.shape == (4, 3)


def test_losses_in_half_precision_are_added_up_in_float32():
    outputs, targets = torch.ones(257, dtype=torch.bfloat16), torch.zeros(257)
    losses, weights = compute_losses_and_weights(lambda o, t: (o, torch.ones_like(o)), outputs, targets)
    assert weights is not None
    assert losses.sum() == weights.sum() == 257  # 256 in bfloat16


def test_saving_is_whole_or_not_at_all(tmp_path, monkeypatch):
    model, path = nn.Linear(2, 2), tmp_path / "model.safetensors"
    save(model.state_dict(), path)
    before = path.read_bytes()

    def full(tensors: dict[str, torch.Tensor], name: str, metadata: dict[str, str]) -> None:
        with open(name, "wb") as file:  # noqa: PTH123
            file.write(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("paceline.train.weights.save_file", full)
    with pytest.raises(OSError, match="No space left"):
        save(nn.Linear(2, 2).state_dict(), path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["model.safetensors"]


def test_weights_that_lie_in_one_flat_tensor_are_saved(tmp_path):
    model, flat = nn.Linear(2, 2), torch.arange(6.0)
    model.weight.data, model.bias.data = flat[:4].view(2, 2), flat[4:]
    save(model.state_dict(), tmp_path / "model.safetensors")
    other = nn.Linear(2, 2)
    load_model(other, tmp_path / "model.safetensors")
    assert torch.equal(other.weight, model.weight)
    assert torch.equal(other.bias, model.bias)


def test_tied_weights_are_saved(tmp_path):
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5, bias=False))
    model[1].weight = model[0].weight
    save(model.state_dict(), tmp_path / "model.safetensors")
    assert (tmp_path / "model.safetensors").stat().st_size < 5 * 4 * 4 + 400


def test_rescued_weights_lie_somewhere_else(tmp_path, monkeypatch):
    run_dir = tmp_path / "runs" / "a-run"  # does not exist: cannot be written
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    told = save_with_fallback_folders(nn.Linear(1, 1).state_dict(), run_dir)
    assert (tmp_path / "cwd" / "a-run-rescued.safetensors").is_file()
    assert "rescued to" in told


def test_weights_that_cannot_be_rescued_are_said_to_be_lost(tmp_path, monkeypatch):
    def full(model: nn.Module, path: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("paceline.train.weights.save", full)
    assert "LOST" in save_with_fallback_folders(nn.Linear(1, 1).state_dict(), tmp_path)


class MadeLate(nn.Linear):
    """A buffer that the first forward makes, and one that every forward counts in."""

    def __init__(self, *, late: bool) -> None:
        super().__init__(3, 2)
        self.late = late
        self.register_buffer("mean", None)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += len(x)
        if self.late and self.mean is None:
            self.mean = x.mean(0)
        return super().forward(x)


def test_what_is_tried_before_step_1_leaves_no_trace_in_buffers() -> None:
    data = ArrayDataset(torch.ones(4, 3), torch.zeros(4, dtype=torch.int64))
    task = Task(
        lambda: MadeLate(late=True), lambda _: data, lambda o, t: nn.functional.cross_entropy(o, t, reduction="none")
    )
    loading = LoadingOptions(torch.device("cpu"), 0, None)
    with raises("buffer-made-in-forward", name="mean"):
        try_loss_on_first_samples(task, MadeLate(late=True), data, loading)
    model = MadeLate(late=False)
    try_loss_on_first_samples(task, model, data, loading)
    assert float(model.seen) == 0
