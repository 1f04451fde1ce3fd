"""The modules that a rule names; a changed forward; and that computing again keeps less and changes no bit."""

import copy
import random

import numpy as np
import pytest
import torch
from tests.compute.models import Model
from tests.errors import raises
from torch import nn

from paceline.compute.forward import (
    MAX_COPIED_BUFFER_BYTES,
    checkpoint_activations,
    find_matching_modules,
    wrap_forward,
)
from paceline.compute.precision import autocast_bf16


@pytest.mark.parametrize(
    ("rule", "names"),
    [
        ("blocks.*", ["blocks.0", "blocks.1", "blocks.2"]),  # not what is inside of them
        ("Block", ["blocks.0", "blocks.1", "blocks.2"]),
        ("blocks.1", ["blocks.1"]),
        ("head, blocks.2", ["blocks.2", "head"]),
        ("*.inner", ["blocks.0.inner", "blocks.1.inner", "blocks.2.inner"]),
        ("*.inner,blocks.0", ["blocks.0", "blocks.1.inner", "blocks.2.inner"]),
    ],
)
def test_a_rule_means_names_and_classes_the_outermost_only(rule, names):
    assert list(find_matching_modules(Model(), rule, flag="--x")) == names


@pytest.mark.parametrize("rule", ["block.*", "blocks", "blocks.*,Atention", ""])
def test_a_pattern_that_matches_nothing_is_refused_with_what_there_is(rule):
    with raises("no-such-module", rule=rule) as e:
        find_matching_modules(Model(depth=9), rule, flag="--x")
    assert e.value.fields["shown"].startswith("blocks.0 (Block), ") and "and 44 more" in e.value.fields["shown"]


def test_a_changed_forward_changes_nothing_else_of_a_module():
    plain, model = nn.Sequential(nn.Linear(3, 2)), nn.Sequential(nn.Linear(3, 2))
    model.load_state_dict(plain.state_dict())
    seen = []
    wrap_forward(model[0], lambda forward, args, kwargs: seen.append(args) or forward(*args, **kwargs))
    x = torch.randn(5, 3)
    assert torch.equal(model(x), plain(x)) and seen[0] == (x,)
    assert list(model.state_dict()) == list(plain.state_dict())
    assert isinstance(model[0], nn.Linear) and type(model[0]).__name__ == "Linear" and type(plain[0]) is nn.Linear


def test_a_copy_of_a_module_computes_with_its_own_weights():
    """As nn.DataParallel makes one for each GPU: of the class, and of a copy of the instance's dictionary."""
    module = nn.Linear(3, 2)
    wrap_forward(module, lambda forward, args, kwargs: forward(*args, **kwargs))
    for other in (copy.deepcopy(module), module._replicate_for_data_parallel()):
        other.weight, other.bias = nn.Parameter(torch.zeros(2, 3)), nn.Parameter(torch.ones(2))
        assert torch.equal(other(torch.randn(1, 3)), torch.ones(1, 2))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")  # DeprecationWarning until torch 2.13, then FutureWarning
def test_a_forward_that_is_not_the_classs_is_refused():
    model = nn.Linear(2, 2)
    model.forward = lambda x: x
    for odd in (model, torch.jit.script(nn.Linear(2, 2))):
        with raises("forward-cannot-change"):
            wrap_forward(odd, lambda forward, args, kwargs: None)


# ---- activation checkpointing --------------------------------------------------------------------------------------


CPU = torch.device("cpu")


def trained(
    rule: str | None, *, bf16: bool = False, steps: int = 3
) -> tuple[dict[str, torch.Tensor], list[object], int]:
    """The state after some steps, the next numbers of all streams, and the bytes kept for the last backward."""
    torch.manual_seed(0), random.seed(0), np.random.seed(0)
    model = Model()
    if rule is not None:
        checkpoint_activations(model, rule)
    if bf16:
        autocast_bf16(model, CPU)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    kept: dict[int, int] = {}
    for _ in range(steps):
        x, y = torch.randn(64, 8), torch.randn(64, 2)
        kept.clear()

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict(), [torch.rand(1).item(), random.random(), np.random.rand()], sum(kept.values())


@pytest.mark.sample(2)
@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("rule", ["blocks.*", "blocks.1,head", "*.inner"])
def test_no_bit_changes_of_weights_buffers_and_random_streams(rule, bf16):
    plain, streams, _ = trained(None, bf16=bf16)
    again, streams_again, _ = trained(rule, bf16=bf16)
    assert streams_again == streams
    assert list(again) == list(plain)
    for name, tensor in plain.items():
        assert torch.equal(again[name], tensor), name


def test_fewer_bytes_are_kept_for_backward():
    _, _, plain = trained(None)
    _, _, again = trained("blocks.*")
    assert again < plain / 3  # a block keeps its input, an eighth of what is inside


class Table(nn.Module):
    """A large buffer, written in forward or not."""

    def __init__(self, writes: bool) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(MAX_COPIED_BUFFER_BYTES // 4 + 1))
        self.linear, self.writes = nn.Linear(2, 2), writes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.writes:
            self.table[0] += 1
        return self.linear(x) + self.table[0]


def test_a_large_buffer_that_forward_writes_is_refused_and_one_that_it_only_reads_is_not():
    for writes in (False, True):
        model = nn.Sequential(Table(writes))
        assert checkpoint_activations(model, "Table") == ["0"]
        if writes:
            with raises("recompute-large-buffer", name="0", leaf="table"):
                model(torch.ones(1, 2))
        else:
            model(torch.ones(1, 2)).sum().backward()


class Caching(nn.Module):
    """As Hugging Face's models: each forward adds to a cache, if it is used."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.cached = nn.Linear(4, 4), list[torch.Tensor]()

    def get_input_embeddings(self) -> None: ...

    def forward(self, x: torch.Tensor, use_cache: bool | None = None) -> torch.Tensor:
        if use_cache is not False:
            self.cached.append(x)
        return self.inner(x)


def test_a_cache_of_keys_and_values_is_used_in_no_training_forward() -> None:
    model = Caching()
    checkpoint_activations(model, "inner")
    model(torch.ones(2, 4)).sum().backward()
    assert model.cached == []
    with torch.no_grad():
        model(torch.ones(2, 4))
    assert len(model.cached) == 1
