"""The FLOPs of models are those counted by hand, the count changes nothing, and a peak is measured once."""

import json
import random
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.compute.models import Model
from torch import Tensor, nn

from paceline.compute import flops
from paceline.compute.compiling import use_cuda_graphs
from paceline.compute.flops import FlopCounter, Utilization, can_count_flops, count_tokens, measure_tflops, peak_tflops
from paceline.compute.forward import checkpoint_activations
from paceline.compute.precision import autocast_bf16
from paceline.rank.world import World
from paceline.tasks.mnist import ResNet18

CPU = torch.device("cpu")
WORLD = World(0, 2, 0, 2, CPU, "gloo")


def counted(model: nn.Module, inputs: Tensor, targets: Tensor | None = None) -> FlopCounter:
    count = FlopCounter()
    with count.count_flops(len(inputs)):
        outputs = model(inputs)
        losses = outputs.square() if targets is None else F.cross_entropy(outputs.flatten(0, -2), targets.flatten())
        losses.mean().backward()
        count.mark_backward_end()
    return count


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.qkv, self.out, self.heads = nn.Linear(width, 3 * width), nn.Linear(width, width), heads
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(2, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=2))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(x)


class GPT(nn.Module):
    def __init__(self, vocabulary: int = 50, width: int = 32, depth: int = 3, heads: int = 4) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(vocabulary, width), nn.Linear(width, vocabulary, bias=False)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.blocks(self.embedding(tokens)))


def test_an_mlp_counts_as_by_hand() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10))
    # forward, weights and inputs of each layer: 2 each; the first layer's inputs need no gradient
    assert counted(model, torch.randn(16, 28, 28)).per_sample == 2 * 2 * 784 * 128 + 3 * 2 * 128 * 10


@pytest.mark.parametrize("fused", [True, False])
def test_a_gpt_counts_as_papers_do(fused: bool) -> None:
    depth, width, vocabulary, length = 3, 32, 50, 24
    tokens = torch.randint(vocabulary, (2, length))
    kernels = [torch.nn.attention.SDPBackend.FLASH_ATTENTION if fused else torch.nn.attention.SDPBackend.MATH]
    with torch.nn.attention.sdpa_kernel(kernels):
        found = counted(GPT(vocabulary, width, depth), tokens, tokens).per_sample
    of_weights = 6 * (12 * width**2 * depth + width * vocabulary)
    assert found == pytest.approx(length * (of_weights + 12 * depth * width * length), rel=0.01)


def test_resnet18_counts_as_by_hand() -> None:
    sides, widths, forward = [7, 4, 2, 1], [64, 128, 256, 512], 0  # of the four stages, for images of 28 x 28
    stem = 14 * 14 * 7 * 7 * 64
    for stage, (side, width) in enumerate(zip(sides, widths, strict=True)):
        before = widths[max(0, stage - 1)]
        first = before * width * 9 + (before * width if stage else 0)  # and the shortcut's 1 x 1 convolution
        forward += side**2 * (first + 3 * width * width * 9)
    expected = 2 * (3 * (forward + 512 * 10) + 2 * stem)
    assert counted(ResNet18(channels=1, num_classes=10), torch.randn(2, 1, 28, 28)).per_sample == expected


def test_groups_of_a_convolution_count_once() -> None:
    forward = 2 * 8 * 9 * 6 * 6
    assert counted(nn.Conv2d(8, 8, 3, groups=8), torch.randn(2, 8, 8, 8)).per_sample == 2 * forward


def test_a_forward_that_backward_repeats_does_not_count() -> None:
    plain, again = Model(), Model()
    checkpoint_activations(again, "blocks.*")
    x = torch.randn(8, 8)
    assert counted(plain, x).flops == counted(again, x).flops > 0


def trained(*, counts: bool) -> tuple[list[Tensor], list[float]]:
    """Weights, buffers and gradients after a backward, and the next number of each random stream."""
    torch.manual_seed(0), random.seed(0), np.random.seed(0)
    model, count, x = Model(), FlopCounter(), torch.randn(64, 8)
    with count.count_flops(64) if counts else nullcontext():
        model(x).square().mean().backward()
        count.mark_backward_end()
    assert (count.flops > 0) == counts
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return [*model.state_dict().values(), *gradients], [float(torch.rand(1)), random.random(), np.random.rand()]


def test_a_count_changes_no_bit_and_draws_nothing() -> None:
    ours, plain = trained(counts=True), trained(counts=False)
    assert all(torch.equal(a, b) for a, b in zip(ours[0], plain[0], strict=True)) and ours[1] == plain[1]


def test_what_follows_the_last_backward_does_not_count_and_an_error_leaves_no_count() -> None:
    a, count = torch.randn(4, 4, requires_grad=True), FlopCounter()
    with count.count_flops(1):
        (a @ a).sum().backward()
        count.mark_backward_end()
        a.detach() @ a.detach()  # an optimizer's
    assert count.per_sample == 3 * 2 * 4**3
    assert not count.is_active

    failed = FlopCounter()
    with pytest.raises(RuntimeError), failed.count_flops(1):
        a @ torch.ones(5)
    assert failed.per_sample == 0


def test_an_operation_without_a_formula_or_with_odd_arguments_counts_as_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    count = FlopCounter()
    with count.count_flops(1):
        a = torch.ones(3, 3).cumsum(0)
        count._formulas = {torch.ops.aten.mm: lambda *_, **__: 1 // 0}
        assert float((a @ a).sum()) > 0
        count.mark_backward_end()
    assert count.per_sample == 0


def test_the_precision_of_most_operations_is_known() -> None:
    model = nn.Linear(8, 8)
    autocast_bf16(model, CPU)
    assert counted(model, torch.randn(4, 8)).dtype == torch.bfloat16


def test_compiled_and_recorded_models_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(2, 2)
    monkeypatch.setitem(flops.sys.modules, "torch._dynamo.eval_frame", SimpleNamespace(cached_backends={1: False}))
    assert can_count_flops([model])
    monkeypatch.setitem(flops.sys.modules, "torch._dynamo.eval_frame", SimpleNamespace(cached_backends={1: print}))
    assert not can_count_flops([model])
    monkeypatch.delitem(flops.sys.modules, "torch._dynamo.eval_frame")
    assert can_count_flops([model])
    recorded = nn.Linear(2, 2)
    use_cuda_graphs(recorded, torch.device("cuda"))
    several = SimpleNamespace(device_ids=[0, 1])
    assert not can_count_flops([recorded]) and not can_count_flops([several])  # type: ignore[list-item]


IDS = torch.zeros(3, 5, dtype=torch.int64)


@pytest.mark.parametrize(
    ("batch", "tokens"),
    [
        (IDS, 15), (IDS.int(), 15), ((IDS, IDS), 15), ([(IDS,), 1], 15), ({"input_ids": IDS, "labels": IDS}, 15),
        (SimpleNamespace(input_ids=IDS), 15), (IDS.float(), 0), (IDS.byte(), 0), (IDS[0], 0), (IDS[None], 0),
        ({"x": IDS}, 0), ((), 0), (None, 0), ("text", 0), ((torch.zeros(3, 5), IDS), 0),
    ],
)  # fmt: skip
def test_tokens_are_those_of_the_first_input(batch: Any, tokens: int) -> None:
    assert count_tokens(batch) == tokens


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[], list[Any]]:
    """A machine on which peaks are measured: the calls, each of which finds 0.5 TFLOP/s."""
    calls: list[Any] = []
    monkeypatch.setattr(flops, "BUSY_MACHINE_VARIABLES", set[str]())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(flops, "measure_tflops", lambda *asked: calls.append(asked) or 0.5)
    return lambda: calls


def test_a_peak_is_measured_once_for_each_number_of_threads_and_type(quiet: Any, tmp_path: Path) -> None:
    assert peak_tflops(CPU, torch.float32, measure=False) == 0 and quiet() == []
    for _ in range(2):
        assert peak_tflops(CPU, torch.float32, measure=True) == 0.5
    assert peak_tflops(CPU, torch.float32, measure=False) == 0.5 and len(quiet()) == 1
    assert peak_tflops(CPU, torch.bfloat16, measure=True) == 0.5 and len(quiet()) == 2
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        assert peak_tflops(CPU, torch.float32, measure=False) == 0
    finally:
        torch.set_num_threads(threads)
    assert len(json.loads((tmp_path / "paceline" / "peaks.json").read_text())) == 2


@pytest.mark.parametrize("name", sorted(flops.BUSY_MACHINE_VARIABLES))
def test_a_busy_machine_measures_none(quiet: Any, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(flops, "BUSY_MACHINE_VARIABLES", {name})
    monkeypatch.setenv(name, "1")
    assert peak_tflops(CPU, torch.float32, measure=True) == 0 and quiet() == []


def test_a_peak_that_a_run_has_exceeded_is_measured_again(quiet: Any, tmp_path: Path) -> None:
    cache, count = tmp_path / "paceline" / "peaks.json", counted(nn.Linear(50, 100), torch.randn(4, 50))
    assert peak_tflops(CPU, torch.float32, measure=True) == 0.5
    cache.write_text(cache.read_text().replace("0.5", "0.001"))  # of a busy machine
    use = Utilization(WORLD, None, count)
    assert use.peak_tflops(measure=True, samples_per_second=0.9 * 2 * 1e9 / count.per_sample) == 0.001
    assert use.peak_tflops(measure=True, samples_per_second=1.1 * 2 * 1e9 / count.per_sample) == 0.5
    assert len(quiet()) == 2 and "0.5" in cache.read_text()


def test_a_cache_that_cannot_be_used_is_no_error(quiet: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "paceline").write_text("no folder")
    assert peak_tflops(CPU, torch.float32, measure=True) == 0.5
    (tmp_path / "paceline").unlink()
    (tmp_path / "paceline").mkdir()
    (tmp_path / "paceline" / "peaks.json").write_text("{")
    assert peak_tflops(CPU, torch.float32, measure=True) == 0.5
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.delenv("HOME")
    assert peak_tflops(CPU, torch.float32, measure=True) == 0.5


def test_a_measurement_finds_a_speed_and_draws_no_random_number() -> None:
    before = torch.get_rng_state()
    assert 1e-5 < measure_tflops(CPU, torch.float32) < 1e3
    assert torch.equal(torch.get_rng_state(), before)


def test_a_given_peak_is_taken_and_zero_means_none(quiet: Any) -> None:
    count = counted(nn.Linear(50, 100), torch.randn(4, 50))  # 20,000 FLOPs
    given = Utilization(WORLD, 1e-6, count)
    given.tokens, given.samples = 12, 4
    assert given.throughput_metrics(10.0) == {
        "samples_per_second": 10.0, "tokens_per_second": 30.0, "flops_per_second": 2e5, "mfu": pytest.approx(0.1)
    }  # fmt: skip
    none = Utilization(WORLD, 0, count)
    assert none.peak_tflops(measure=True) == 0 and quiet() == []
    assert "mfu" not in none.throughput_metrics(10.0) and given.throughput_metrics(None) == {}
    measured = Utilization(WORLD, None, count)
    assert measured.peak_tflops() == 0 and measured.peak_tflops(measure=True) == measured.peak_tflops() == 0.5
    assert Utilization(WORLD).peak_tflops(measure=True) == 0 and len(quiet()) == 1  # nothing was counted
