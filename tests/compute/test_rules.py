"""Which modules a rule means."""

import copy

import pytest
import torch
from tests.compute.models import Model
from tests.errors import raises
from torch import nn

from paceline.compute.rules import around_forward, matching


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
    assert list(matching(Model(), rule, flag="--x")) == names


@pytest.mark.parametrize("rule", ["block.*", "blocks", "blocks.*,Atention", ""])
def test_a_pattern_that_matches_nothing_is_refused_with_what_there_is(rule):
    with raises("no-such-module", rule=rule) as e:
        matching(Model(depth=9), rule, flag="--x")
    assert e.value.fields["shown"].startswith("blocks.0 (Block), ") and "and 44 more" in e.value.fields["shown"]


def test_a_changed_forward_changes_nothing_else_of_a_module():
    plain, model = nn.Sequential(nn.Linear(3, 2)), nn.Sequential(nn.Linear(3, 2))
    model.load_state_dict(plain.state_dict())
    seen = []
    around_forward(model[0], lambda forward, args, kwargs: seen.append(args) or forward(*args, **kwargs))
    x = torch.randn(5, 3)
    assert torch.equal(model(x), plain(x)) and seen[0] == (x,)
    assert list(model.state_dict()) == list(plain.state_dict())
    assert isinstance(model[0], nn.Linear) and type(model[0]).__name__ == "Linear" and type(plain[0]) is nn.Linear


def test_a_copy_of_a_module_computes_with_its_own_weights():
    """As nn.DataParallel makes one for each GPU: of the class, and of a copy of the instance's dictionary."""
    module = nn.Linear(3, 2)
    around_forward(module, lambda forward, args, kwargs: forward(*args, **kwargs))
    for other in (copy.deepcopy(module), module._replicate_for_data_parallel()):
        other.weight, other.bias = nn.Parameter(torch.zeros(2, 3)), nn.Parameter(torch.ones(2))
        assert torch.equal(other(torch.randn(1, 3)), torch.ones(1, 2))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")  # DeprecationWarning until torch 2.13, then FutureWarning
def test_a_forward_that_is_not_the_classs_is_refused():
    model = nn.Linear(2, 2)
    model.forward = lambda x: x
    for odd in (model, torch.jit.script(nn.Linear(2, 2))):
        with raises("forward-cannot-change"):
            around_forward(odd, lambda forward, args, kwargs: None)
