"""Which modules are gathered one at a time."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from paceline.compute.blocks import blocks_of, check_types
from paceline.errors import UsageError


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
    return [*blocks_of(model, rule, flag="--fsdp-wrap")]


def test_by_default_a_block_is_a_child_or_an_item_of_a_list_and_inner_ones_come_first() -> None:
    found = chosen(Transformer())
    assert found == ["stack.1.0", "blocks.0", "blocks.1", "parts.norm", "embedding", "stack", "head"]


def test_a_child_that_shares_a_parameter_with_another_is_no_block() -> None:
    model = Transformer()
    model.head.weight = model.embedding.weight
    assert {"embedding", "head"} & {*chosen(model)} == set()
    model.blocks[0][0].weight = model.blocks[1][0].weight  # pyright: ignore[reportIndexIssue]
    assert {"blocks.0", "blocks.1"} & {*chosen(model)} == set()


def test_a_rule_that_takes_shared_parameters_apart_is_refused() -> None:
    model = Transformer()
    model.head.weight = model.embedding.weight
    with pytest.raises(UsageError, match=r"head shares the parameter embedding\.weight with a module outside it"):
        chosen(model, "head")


def test_a_rule_matches_names_and_classes() -> None:
    assert chosen(Transformer(), "blocks.*,Embedding") == ["blocks.0", "blocks.1", "embedding"]


@pytest.mark.parametrize(("rule", "words"), [("block?", "no module matches 'block?'"), ("Tanh", "have no parameters")])
def test_a_rule_that_cuts_nothing_is_refused(rule: str, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        chosen(Transformer(), rule)
    assert words in str(caught.value) and "--fsdp-wrap" in str(caught.value)


def test_types_may_differ_between_blocks_but_not_within_one() -> None:
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2).double()})
    check_types(model, {"a": model["a"], "b": model["b"]})
    with pytest.raises(UsageError, match=r"outside its blocks .*b\.weight is float64"):
        check_types(model, {})
    with pytest.raises(UsageError, match=r"a\.weight is float32, b\.weight is float64"):
        check_types(model, {})
    model["b"].requires_grad_(False)  # what is not trained does not travel back
    check_types(model, {})
