"""What `--check` puts into a worker: cut epochs, and callbacks of several who wait for one module."""

from __future__ import annotations

import math
import random
import sys
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset

from paceline.contract.facts import OWN_GENERATORS, Pass, ScriptFacts
from paceline.worker.imports import when_imported
from paceline.worker.probes.generators import Generators
from paceline.worker.probes.graphs import divided_by_world
from paceline.worker.probes.loading import Cut, LoaderWatch, seen_loader
from paceline.worker.probes.noting import length_of, padded_more
from paceline.worker.probes.seeing import StepWatch


class Stream(IterableDataset[int]):
    """Nothing."""

    def __iter__(self) -> Iterator[int]:
        return iter(())


def test_a_cut_epoch_has_its_first_batches_and_its_last_and_knows_all_indices() -> None:
    seen = Pass()
    drawn = [*Cut(iter([[0, 1], [2, 3], [4, 5], [6]]), 4, 2, seen)]
    assert drawn == [[0, 1], [6]]
    assert seen.indices == [*range(7)]
    assert seen.drawn == 7


def test_a_sampler_that_ends_early_ends_the_epoch() -> None:
    assert [*Cut(iter([[0], [1]]), 5, 3, Pass())] == [[0], [1]]
    assert [*Cut(iter([[0], [1], [2]]), 5, 3, Pass())] == [[0], [1], [2]]


def test_a_loader_that_is_dropped_in_its_own_loop_is_seen_to_the_end() -> None:
    facts = ScriptFacts(0, 2, 2, "n1", cores=2)
    watch, loader = LoaderWatch(facts), DataLoader(Stream())
    batches = SimpleNamespace(of_loader=weakref.ref(loader))
    watch.epoch_begins(batches)
    del loader  # as in `for batch in DataLoader(data):`
    watch.batch_given(batches, torch.ones(2))
    watch.epoch_ended(batches)
    assert (facts.loaders[0].passes[0].sizes, facts.loaders[0].passes[0].ended) == ([2], True)


def test_all_who_wait_for_a_module_are_called_in_their_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "waited_for.py").write_text("ready = True\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    heard: list[tuple[str, bool, bool]] = []

    def first(*, late: bool) -> None:
        heard.append(("first", late, sys.modules["waited_for"].ready))

    def second(*, late: bool) -> None:
        heard.append(("second", late, sys.modules["waited_for"].ready))

    for then in (first, second, first):
        when_imported("waited_for", then)
    __import__("waited_for")
    assert heard == [("first", False, True), ("second", False, True)]
    when_imported("waited_for", second)
    assert heard[2:] == [("second", True, True)]
    del sys.modules["waited_for"]


def test_a_head_that_ddp_does_not_know_leaves_the_old_one_unused() -> None:
    facts, body, old = ScriptFacts(0, 2, 2, "n1", cores=2), torch.nn.Linear(2, 2), torch.nn.Linear(2, 3)
    new = torch.nn.Linear(2, 4)
    seeing = StepWatch(facts, LoaderWatch(facts))
    own = [*body.parameters(), *old.parameters()]
    inner = torch.nn.Sequential(body, new)  # the script has put its own head in place of the old one
    ddp = SimpleNamespace(module=inner, _module_parameters=own, find_unused_parameters=True, training=True)
    seeing.replica_made(ddp)
    seeing.forward_ended(ddp, inner(torch.ones(1, 2)))
    inner(torch.ones(1, 2)).sum().backward()
    seeing.step_begins(SimpleNamespace(param_groups=[{"params": [*inner.parameters()]}]))
    assert (facts.replicas[0].looked, facts.replicas[0].unused) == (1, 2)
    assert facts.steps[0].strangers == 2


class Towers(torch.nn.Module):
    """A model with a method beside its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = torch.nn.Linear(2, 2)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.tower(x)


def test_a_method_of_a_replica_s_model_is_called_past_it_at_the_line_outside_of_the_model() -> None:
    facts, model = ScriptFacts(0, 2, 2, "n1", cores=2), Towers()
    seeing = StepWatch(facts, LoaderWatch(facts))
    ddp = SimpleNamespace(module=model, _module_parameters=[*model.parameters()], find_unused_parameters=False)
    seeing.replica_made(ddp)
    hook = torch.nn.modules.module.register_module_forward_pre_hook(seeing._called)
    try:
        with torch.no_grad():
            model.encode(torch.ones(1, 2))
        model.eval()
        model.encode(torch.ones(1, 2))
        assert facts.replicas[0].past_site == "", "nothing is trained"
        model.train()
        model.encode(torch.ones(1, 2))
    finally:
        hook.remove()
    assert " in test_a_method_of" in facts.replicas[0].past_site, "the caller's line, not the model's"


def clipping_by(seeing: StepWatch, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """torch's clip_grad_norm_, as it is once what it is made of is watched."""
    name = "torch.nn.utils.clip_grad._clip_grads_with_norm_"
    monkeypatch.setattr(name, seeing.clipping(torch.nn.utils.clip_grads_with_norm_))
    return torch.nn.utils.clip_grad_norm_


def test_what_is_clipped_is_told_of_the_optimizer_that_steps_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = ScriptFacts(0, 2, 2, "n1", cores=2)
    seeing = StepWatch(facts, LoaderWatch(facts))
    clip = clipping_by(seeing, monkeypatch)
    weights = [torch.nn.Parameter(torch.zeros(2)) for _ in range(3)]
    optimizers = [SimpleNamespace(param_groups=[{"params": [weight]}]) for weight in weights]
    gradients = [torch.tensor([3.0, 4.0]) for _ in weights]
    for weight, gradient in zip(weights, gradients, strict=True):
        weight.grad = gradient
    for clipped, stepping in ((0, 0), (0, 1), (2, 2)):  # a GAN's clip of another network is not the step's
        clip(iter([weights[clipped]]), max_norm=2.0)
        seeing.step_begins(optimizers[stepping])
        seeing.step_ended(optimizers[stepping])
    told = [(round(step.norm, 3), step.limit) for step in facts.steps]
    assert told == [(5.0, 2.0), (0.0, 0.0), (5.0, 2.0)]
    assert float(gradients[0].norm()) < 2.1


def test_gradients_that_are_scaled_after_the_last_backward_are_seen_to_be_whatever_is_clipped_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    facts = ScriptFacts(0, 2, 2, "n1", cores=2)
    seeing = StepWatch(facts, LoaderWatch(facts))
    clip, weight = clipping_by(seeing, monkeypatch), torch.nn.Parameter(torch.zeros(3))
    optimizer = SimpleNamespace(param_groups=[{"params": [weight]}])
    seeing.replica_made(
        SimpleNamespace(module=torch.nn.Identity(), _module_parameters=[], find_unused_parameters=False)
    )
    for factor in (1.0, 0.25, 0.5):
        weight.grad = torch.tensor([3.0, -4.0, 1.0])
        seeing.backward_ended()
        weight.grad.mul_(factor)
        clip([weight], max_norm=1.0)
        seeing.step_begins(optimizer)
        seeing.step_ended(optimizer)
    assert [round(step.scaled, 6) for step in facts.steps] == [1.0, 0.25, 0.5]


def test_gradients_that_are_not_finite_are_facts_that_can_be_read_again() -> None:
    facts = ScriptFacts(0, 2, 2, "n1", cores=2)
    loading = LoaderWatch(facts)
    seeing, weight = StepWatch(facts, loading), torch.nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    seeing.replica_made(
        SimpleNamespace(module=torch.nn.Identity(), _module_parameters=[], find_unused_parameters=False)
    )
    for value in (1.0, math.nan, math.inf, 1.0):
        weight.grad = torch.full((3,), value)
        seeing.backward_ended()
        seeing.step_begins(optimizer)
        seeing.step_ended(optimizer)
    assert msgspec.json.decode(msgspec.json.encode(facts), type=ScriptFacts).steps == facts.steps


def windows(how: str, *, optimizers: int = 1) -> list[tuple[int, int]]:
    """Sixteen batches of one epoch, a step after every fourth: backwards of each step, and how many of them are lost.

    No loader is needed: the batches are counted.
    """
    facts = ScriptFacts(0, 2, 2, "n1", cores=2)
    loading = LoaderWatch(facts)
    seeing, model = StepWatch(facts, loading), torch.nn.Linear(2, 1)
    stepping = [torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(optimizers)]

    def backward(size: float = 1.0) -> None:
        seeing.backward_begins(loss := size * model(torch.ones(1, 2)).sum())
        loss.backward()
        seeing.backward_ended()

    def step(optimizer: Any) -> None:
        seeing.step_begins(optimizer)
        optimizer.step()
        seeing.step_ended(optimizer)

    for number in range(1, 17):
        loading.given += 1
        if how in ("each", "to zeros") or (how in ("first", "zero loss") and number % 4 == 1):
            stepping[0].zero_grad(set_to_none=how != "to zeros")
        if how == "of the model":
            model.zero_grad()
        if how == "by hand":
            for parameter in model.parameters():
                parameter.grad = None
        if how == "adversarial":
            backward()
            stepping[0].zero_grad()
        if how == "in turn":  # a GAN
            for optimizer in stepping:
                optimizer.zero_grad()
                backward()
                step(optimizer)
            continue
        backward(0.0 if how == "zero loss" and number % 4 == 1 else 1.0)
        if how in ("every", "adversarial"):
            step(stepping[0])
            stepping[0].zero_grad()
        elif number % 4 == 0:
            step(stepping[0])
            if how == "after":
                stepping[0].zero_grad()
    return [(one.backwards, one.lost) for one in facts.steps]


@pytest.mark.parametrize("how", ["each", "to zeros", "of the model", "by hand"])
def test_gradients_that_are_cleared_before_the_step_are_seen_however_they_are_cleared(how: str) -> None:
    assert windows(how)[1:] == [(4, 3)] * 3  # the optimizer may be unknown until its first step


@pytest.mark.parametrize("how", ["first", "after", "every", "never", "adversarial", "zero loss", "in turn"])
def test_gradients_that_are_cleared_rightly_or_on_purpose_are_not_lost(how: str) -> None:
    assert {lost for _, lost in windows(how, optimizers=1 + (how == "in turn"))} == {0}


def test_a_batch_of_another_loader_or_epoch_begins_anew() -> None:
    facts = ScriptFacts(0, 2, 2, "n1", cores=2)
    loading = LoaderWatch(facts)
    seeing, model = StepWatch(facts, loading), torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(Stream())
    for _ in range(3):  # an epoch ends within a window: what is left over is the business of another rule
        batches = SimpleNamespace(of_loader=weakref.ref(loader))
        loading.epoch_begins(batches)
        optimizer.zero_grad()
        for number in range(3):
            loading.batch_given(batches, torch.ones(2))
            loss = model(torch.ones(1, 2)).sum()
            seeing.backward_begins(loss)
            loss.backward()
            seeing.backward_ended()
            if number == 1:
                seeing.step_begins(optimizer)
                optimizer.step()
                seeing.step_ended(optimizer)
                optimizer.zero_grad()
    assert [one.lost for one in facts.steps] == [0, 0, 0]


@pytest.mark.parametrize("name", ["numpy", "old numpy", "random", "torch"])
def test_a_generator_of_a_script_s_own_counts_if_it_draws_for_each_sample(name: str) -> None:
    draws: dict[str, Any] = {
        "numpy": numpy.random.default_rng(1).random,
        "old numpy": numpy.random.RandomState(1).random_sample,
        "random": random.Random(1).random,
        "torch": partial(torch.rand, 1, generator=torch.Generator().manual_seed(1)),
    }
    draw, generators = draws[name], Generators()
    draw()
    assert generators.used(8) == {}, "a number for all of eight samples"
    for _ in range(7):
        draw()
    torch.rand(8)
    assert {*generators.used(8)} == {OWN_GENERATORS, "torch"}
    assert generators.used(8) == generators.used(8) and Generators().used(8) == {}


def test_who_shuffles_is_the_sampler_within_a_batch_sampler_that_was_given() -> None:
    data: Any = [*range(8)]
    dealt = DistributedSampler(data, num_replicas=2, rank=0, shuffle=True)
    loaders = [
        DataLoader(data, batch_sampler=BatchSampler(dealt, 2, False)),
        DataLoader(data),
        DataLoader(data, 2, True),
    ]
    told = [seen_loader(loader) for loader in loaders]
    assert [one.shuffles for one in told] == [True, False, True]
    assert told[0].sampler == "DistributedSampler"


def test_a_score_is_asked_of_one_more_column_of_padding_where_there_is_padding() -> None:
    labels = numpy.array([[1, 2, -100], [0, 1, 2]])
    told = SimpleNamespace(label_ids=labels, predictions=numpy.zeros((2, 3, 4)), inputs=None, losses=None)
    more = padded_more(told)
    assert more.label_ids.tolist() == [[1, 2, -100, -100], [0, 1, 2, -100]]
    assert more.predictions.shape == (2, 4, 4) and (more.predictions[:, 3] == -100).all()
    told.label_ids = abs(labels)
    assert padded_more(told) is None


class Args:
    batch = 64


def called_with(*args: Any, **kwargs: Any) -> str:
    return divided_by_world(sys._getframe(1), "batch_size", 1)


def test_a_batch_size_that_the_world_divides_is_known_by_the_lines_that_made_it() -> None:
    world, half, args = 2, 2, Args()
    own = args.batch // world
    size = max(1, own)
    told = [called_with(None, batch_size=size), called_with(None, int(args.batch / world))]
    args.batch = args.batch // world
    several_lines = called_with(
        None,
        batch_size=args.batch,
    )
    assert [*told, several_lines] == ["args.batch // world", "args.batch / world", "args.batch // world"]
    size = 64 // half
    told = [called_with(None, size), called_with(None, 64 // half), called_with(None), called_with(world, 8)]
    assert told == [""] * 4
    assert divided_by_world(None, "batch_size", 1) == ""


def test_a_schedule_is_as_long_as_until_it_is_constant() -> None:
    def cosine(step: int) -> float:
        return step / 10 if step < 10 else 0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, (step - 10) / 490)))

    assert length_of(SimpleNamespace(lr_lambdas=[cosine])) == 500
    assert length_of(SimpleNamespace(T_max=70)) == 70
    assert length_of(SimpleNamespace()) == -1
