"""Where a model can be cut, where it is best cut, and that its stages compute what it computes."""

import random
from collections import deque
from collections.abc import Callable
from itertools import product
from typing import get_args

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.errors import raises
from torch import Tensor, nn

from paceline.errors import TrainingError
from paceline.parallel.partition import LayerChain, LayerCost, choose_split_points, profile_chain
from paceline.parallel.pipeline import ModelStage, Schedule, SplitPoint, _ShapesOnly, idle_fractions, stage_schedule
from paceline.seeding import generator_states, restore_generator_states, seed_generators

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def compiler(monkeypatch, tmp_path) -> None:
    """torch computes some shapes in Python, which imports its compiler, which sets this unless it is set."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))


def chain(*seconds: float, trained: int = 1) -> LayerChain:
    layers = tuple(LayerCost(one, 4, 0, trained) for one in seconds)
    return LayerChain(tuple(SplitPoint(f"m{n}", (), ()) for n in range(1, len(seconds))), layers, {}, False)


# ---- the schedule ------------------------------------------------------------------------------------------------


@given(st.sampled_from(get_args(Schedule)), st.integers(1, 5), st.integers(1, 9))
def test_every_micro_batch_goes_forward_and_then_backward_once(schedule, stages, count):
    for stage in range(stages):
        order = stage_schedule(schedule, stage, stages, count)
        assert sorted(order) == sorted(product((False, True), range(count)))
        assert all(order.index((True, n)) < order.index((False, n)) for n in range(count))
        # gradients add up in one order on all stages
        assert [n for forward, n in order if not forward] == [*range(count)]
        kept = max(sum(1 if forward else -1 for forward, _ in order[:at]) for at in range(1, len(order) + 1))
        assert kept == (count if schedule == "gpipe" else min(count, stages - stage))


@given(st.integers(1, 5), st.integers(1, 9))
def test_equal_stages_wait_for_the_share_that_gpipe_has_told(stages, count):
    waits = idle_fractions([3.0] * stages, count)
    assert waits == pytest.approx([(stages - 1) / (count + stages - 1)] * stages)


# ---- where to cut ------------------------------------------------------------------------------------------------


def test_the_slowest_stage_is_as_fast_as_it_can_be():
    assert choose_split_points(chain(1, 1, 1, 3), 2) == [2]
    assert choose_split_points(chain(3, 1, 1, 1, 3), 3) == [0, 3]
    assert choose_split_points(chain(1, 2, 3, 4), 2, ["m1"]) == [0]


def test_what_cannot_be_cut_so_is_refused_in_words():
    with raises("too-many-stages", value=3, most=2, shown="m1"):
        choose_split_points(chain(1, 1), 3)
    with raises("stage-cannot-begin", value="other", shown="m1"):
        choose_split_points(chain(1, 1), 2, ["other"])
    with raises("too-many-stages", most=1):  # nothing in it is trained
        choose_split_points(chain(1, 1, trained=0), 2)


class Around(nn.Module):
    """Goes around its second layer with what the first gives: there it cannot be cut."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.second, self.third = nn.Embedding(8, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.drop, self.unused = nn.Dropout(0.5), nn.Linear(2, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        mask = torch.arange(x.shape[1], device=x.device) < 3  # made beside what flows
        x = x + self.second(x)
        x = self.drop(self.third(x)) * mask.unsqueeze(-1)
        return nn.functional.linear(x, self.embedding.weight)  # tied


def watched(model: nn.Module, inputs: Tensor) -> LayerChain:
    return profile_chain(model, lambda: model(inputs), inputs, lambda outputs: outputs.square().sum())


def test_a_model_is_cut_only_where_all_that_is_used_later_goes_in():
    tokens = torch.randint(8, (2, 4))
    found = watched(Around(), tokens)
    assert [point.module for point in found.points] == ["third", "drop"]
    assert found.users["embedding.weight"] == (0, 2)  # before the first cut, and behind the last
    assert found.users["third.weight"] == (1,)
    assert found.users["unused.weight"] == (0,)
    assert found.draws


# ---- stages ------------------------------------------------------------------------------------------------------


def in_stages(
    make: Callable[[], nn.Module], inputs: Tensor, at: str
) -> tuple[list[nn.Module], list[ModelStage], deque]:
    whole = make()
    found = watched(whole, inputs)
    (point,) = [one for one in found.points if one.module == at]
    sent: deque[Tensor] = deque()
    models = [make() for _ in range(2)]
    for model in models:
        model.load_state_dict(whole.state_dict())
    first = ModelStage(models[0], None, point, CPU, take=lambda like: like, send=sent.append, draws=found.draws)
    second = ModelStage(models[1], point, None, CPU, take=lambda _: sent.popleft(), send=sent.append, draws=found.draws)
    second.skip([models[1].get_submodule(name) for name in point.before])
    return models, [first, second], sent


def test_two_stages_compute_and_draw_what_the_model_does():
    tokens = torch.randint(8, (3, 4))
    models, (first, second), sent = in_stages(Around, tokens, "third")
    whole = Around()
    whole.load_state_dict(models[0].state_dict())
    seed_generators(5)
    want = whole(tokens)
    want.square().sum().backward()
    seed_generators(5)
    flow = first.forward(lambda: models[0](tokens))
    seed_generators(6)  # the second stage's streams are elsewhere
    run = second.forward(lambda: models[1](tokens))
    assert not sent
    assert torch.equal(run.result, want)
    run.result.square().sum().backward()
    torch.autograd.backward(flow.sent, run.gradients)
    for name, parameter in whole.named_parameters():
        own = [g for model in models if (g := model.get_parameter(name).grad) is not None]
        assert (sum(own) - parameter.grad).abs().max() < 1e-12 if own else parameter.grad is None
    assert models[1].second.weight.grad is None  # was not computed


class Going(nn.Module):
    """May go another way than it was seen to."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(4, 4) for _ in range(3))
        self.way = ""

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        if self.way == "left out":
            return self.third(y)
        return self.third(self.second(y)) + (y if self.way == "past" else 0)


@pytest.mark.parametrize(("way", "words"), [("left out", "did not call second"), ("past", "meta|a different path")])
def test_another_way_through_the_model_is_an_error_and_no_number(way, words):
    models, (first, second), _ = in_stages(Going, torch.randn(2, 4), "second")
    for model in models:
        model.way = way
    with pytest.raises((TrainingError, RuntimeError), match=words):
        first.forward(lambda: models[0](torch.randn(2, 4)))
        second.forward(lambda: models[1](torch.randn(2, 4)))


def test_random_streams_travel_as_bytes():
    seed_generators(3)
    random.gauss()
    numpy.random.randn()
    there = generator_states(CPU)
    want = random.gauss(), random.random(), numpy.random.randn(3).tolist(), torch.rand(2).tolist()
    seed_generators(4)
    restore_generator_states(there, CPU)
    assert want == (random.gauss(), random.random(), numpy.random.randn(3).tolist(), torch.rand(2).tolist())


def test_a_count_of_batches_that_is_a_mere_shape_weighs_something() -> None:
    with _ShapesOnly(torch.device("cpu")):  # batch norm's cumulative average divides by it
        assert nn.BatchNorm1d(3, momentum=None).to("meta")(torch.empty(4, 3, device="meta")).shape == (4, 3)
