"""Which modules are gathered one at a time."""

import pytest
import torch
from tests.errors import raises
from torch import nn

from paceline.compute.blocks import check_parameter_dtypes, find_blocks


class Transformer(nn.Module):
    """Its head is the embedding's own weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.position = nn.Embedding(7, 4), nn.Parameter(torch.zeros(5, 4))
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2))
        self.parts = nn.ModuleDict({"norm": nn.LayerNorm(4), "free": nn.Tanh()})
        self.stack = nn.Sequential(nn.Linear(4, 4), nn.ModuleList([nn.Linear(2, 2)]))
        self.head = nn.Linear(4, 7, bias=False)


def chosen(model: nn.Module, rule: str | None = None) -> list[str]:
    return [*find_blocks(model, rule, flag="--fsdp-wrap")]


class Around(nn.Module):
    """As peft wraps a model: two modules deep, and the forward of the one between is not called."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.base_model = nn.Module()
        self.base_model.model = model


class Layer(nn.Module):
    """Holds a list of its own, of experts."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(width, 2), nn.ModuleList(nn.Linear(width, width) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Gated(Layer):
    pass


def test_by_default_the_blocks_are_the_repeated_layers() -> None:
    assert chosen(Transformer()) == ["blocks.0", "blocks.1"]
    assert chosen(Around(Transformer())) == [f"base_model.model.{name}" for name in ("blocks.0", "blocks.1")]
    assert chosen(nn.Sequential(nn.Linear(4, 8), nn.Sequential(Layer(), Layer()))) == ["1.0", "1.1"]  # no experts
    assert chosen(nn.Sequential(nn.Linear(4, 8), nn.ModuleDict({"a": Layer(), "b": Layer()}))) == ["1.a", "1.b"]


def test_a_list_may_hold_layers_of_several_classes_if_each_occurs_again() -> None:
    mixed = nn.ModuleDict({"layers": nn.ModuleList([Layer(), Gated(), Layer(), Gated()]), "head": nn.Linear(8, 2)})
    assert chosen(mixed) == [f"layers.{number}" for number in range(4)]


def test_several_large_lists_count_and_small_ones_do_not() -> None:
    towers = nn.ModuleDict({name: nn.ModuleList(Layer() for _ in range(3)) for name in ("encoder", "decoder")})
    towers["heads"] = nn.ModuleList(nn.Linear(8, 1) for _ in range(2))
    assert chosen(towers) == [f"{tower}.{number}" for tower in ("encoder", "decoder") for number in range(3)]


def test_stages_that_grow_are_cut_at_their_own_layers() -> None:
    stages = nn.ModuleList(nn.Sequential(*(Layer(width) for _ in range(2))) for width in (2, 4, 16))
    assert chosen(stages) == ["2.0", "2.1"]
    assert chosen(nn.ModuleList(nn.Sequential(*(Layer() for _ in range(2))) for _ in range(3))) == ["0", "1", "2"]


class Plain(nn.Module):
    """Without repeated layers, but for two small heads."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.act, self.second = nn.Linear(4, 80), nn.Tanh(), nn.Linear(80, 4)
        self.parts = nn.ModuleDict({"norm": nn.LayerNorm(4), "free": nn.Tanh()})
        self.heads = nn.ModuleList(nn.Linear(4, 1) for _ in range(2))


def test_without_repeated_layers_the_blocks_are_the_children_of_the_model_that_is_wrapped() -> None:
    found = ["parts.norm", "heads.0", "heads.1", "first", "second"]
    assert chosen(Plain()) == found
    assert chosen(Around(Plain())) == [f"base_model.model.{name}" for name in found]


def test_a_child_that_shares_a_parameter_with_another_is_no_block() -> None:
    model = Plain()
    model.second.bias = model.parts["norm"].bias  # pyright: ignore
    assert {"second", "parts.norm"} & {*chosen(model)} == set()
    layers = Transformer()
    layers.blocks[0][0].weight = layers.blocks[1][0].weight  # pyright: ignore[reportIndexIssue]
    assert {"blocks.0", "blocks.1"} & {*chosen(layers)} == set()


def test_a_rule_that_takes_shared_parameters_apart_is_refused() -> None:
    model = Transformer()
    model.head.weight = model.embedding.weight
    with raises("block-shares-parameter", rule="head", name="head", shared="embedding.weight"):
        chosen(model, "head")


@pytest.mark.parametrize(("rule", "code"), [("block?", "no-such-module"), ("Tanh", "blocks-without-parameters")])
def test_a_rule_that_cuts_nothing_is_refused(rule: str, code: str) -> None:
    with raises(code, setting="fsdp_wrap", rule=rule):
        chosen(Transformer(), rule)


def test_types_may_differ_between_blocks_but_not_within_one() -> None:
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2).double()})
    check_parameter_dtypes(model, {"a": model["a"], "b": model["b"]})
    with raises("block-of-several-types", types="a.weight is float32, b.weight is float64"):
        check_parameter_dtypes(model, {})
    model["b"].requires_grad_(False)  # what is not trained does not travel back
    check_parameter_dtypes(model, {})
