"""bf16: what is computed in it, what stays float32, and where it is refused."""

import time

import pytest
import torch
from tests.compute.models import Convolutions
from tests.errors import raises
from torch import nn

from paceline.compute.precision import (
    autocast_bf16,
    autocast_fp16,
    set_float32_mode,
    tf32_unsupported_reason,
    time_alternatives,
)
from paceline.train.compute_settings import check_precision

CPU = torch.device("cpu")


@pytest.mark.parametrize(("convert", "dtype"), [(autocast_bf16, torch.bfloat16), (autocast_fp16, torch.float16)])
def test_forward_computes_in_half_precision_channels_last_and_gives_float32(convert, dtype):
    model, seen = Convolutions(), []
    convert(model, CPU)
    model.body[3].register_forward_hook(lambda _module, inputs, output: seen.append((inputs[0], output)))
    output = model(torch.randn(4, 1, 12, 12))
    inputs, inner = seen[0]
    assert inner.dtype == dtype and output.dtype == torch.float32
    assert inputs.is_contiguous(memory_format=torch.channels_last) and not inputs.is_contiguous()


def test_weights_gradients_and_their_layout_stay_as_they_are():
    model = Convolutions()
    autocast_bf16(model, CPU)
    model(torch.randn(4, 1, 12, 12)).sum().backward()
    for parameter in model.parameters():
        assert parameter.dtype == parameter.grad.dtype == torch.float32
        assert parameter.is_contiguous() and parameter.grad.is_contiguous()


def test_its_gradients_are_those_of_fp32_up_to_the_roundings_of_bf16():
    torch.manual_seed(0)
    plain = Convolutions()
    fast = Convolutions()
    fast.load_state_dict(plain.state_dict())
    autocast_bf16(fast, CPU)
    x, y = torch.randn(16, 1, 12, 12), torch.randint(3, (16,))
    for model in (plain, fast):
        nn.functional.cross_entropy(model(x), y).backward()
    differ = []
    for a, b in zip(plain.parameters(), fast.parameters(), strict=True):
        scale = float(a.grad.abs().max())
        differ.append(float((a.grad - b.grad).abs().max()) / max(scale, 1e-3))
    assert 1e-4 < max(differ) < 0.1  # fp32's roundings are below, wrong gradients above


def test_nested_outputs_keep_their_kind():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(2, 2)

        def forward(self, batch, *, extra):
            return {"a": [self.linear(batch["x"])], "b": (extra, 3)}

    model = Two()
    autocast_bf16(model, CPU)
    found = model({"x": torch.ones(1, 2)}, extra=torch.ones(1, dtype=torch.int64))
    assert found["a"][0].dtype == torch.float32 and found["b"][1] == 3 and found["b"][0].dtype == torch.int64


def test_the_shortest_time_of_each_counts_and_the_first_try_does_not():
    turns = []

    def step(name, seconds):
        time.sleep(10 * seconds if name not in turns else seconds)  # the first is slow: kernels are chosen
        turns.append(name)

    found = time_alternatives({"slow": lambda: step("slow", 0.04), "fast": lambda: step("fast", 0.001)}, CPU)
    assert 0.001 < found["fast"] < found["slow"] < 0.4
    assert turns[:4] == ["slow", "fast"] * 2 and turns.count("slow") == turns.count("fast")


@pytest.fixture
def tf32_put_back():
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


@pytest.mark.parametrize("convert", [autocast_bf16, autocast_fp16])
def test_on_a_gpu_weights_have_the_format_of_inputs(convert):
    model = Convolutions().to("meta")  # no CPU
    convert(model, torch.device("meta"))
    weights = [m.weight for m in model.modules() if isinstance(m, nn.Conv2d)]
    assert weights and all(w.is_contiguous(memory_format=torch.channels_last) for w in weights)


@pytest.mark.usefixtures("tf32_put_back")
def test_tf32_is_on_for_matrix_products_and_convolutions_or_for_neither():
    for precision, taken in (("tf32", "tf32"), ("fp32", "none"), ("bf16", "none")):
        set_float32_mode(precision, torch.device("cuda", 0))
        assert torch.backends.cuda.matmul.fp32_precision in (taken, "ieee")
        assert torch.backends.cudnn.conv.fp32_precision == torch.backends.cudnn.rnn.fp32_precision == taken
        set_float32_mode("tf32" if precision == "fp32" else "fp32", CPU)  # the CPU's float32 is left alone
    assert (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32) == (False, False)
    assert "compute capability 8.0" in tf32_unsupported_reason(CPU)
    with raises("precision-not-there", value="tf32"):
        check_precision("tf32", CPU)
