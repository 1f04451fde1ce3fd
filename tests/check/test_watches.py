"""What `--check` puts into a worker: cut epochs, and callbacks of several who wait for one module."""

import importlib
import math
import pickle
import random
import sys
import time
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
from tests.run_ranks import run_ranks
from torch.distributed.tensor import Replicate, Shard
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset

from paceline.protocol.facts import OWN_GENERATORS, LoaderPass, ScriptFacts
from paceline.protocol.status_page import StatusPage
from paceline.rank.check import add_padding_column, lr_schedule_end_step
from paceline.rank.check.loaders import (
    GENERATOR_STATE_SETTERS,
    LoaderRecorder,
    RngSnapshots,
    TruncatedSampler,
    find_division_by_world_size,
    inspect_loader,
    wrap_seed_functions,
)
from paceline.rank.check.steps import FULLY_SHARD_MODULES, MAX_UNJOINED_STEPS, ModelParallelDetector, StepRecorder
from paceline.rank.probes import ScriptHooks


def watching() -> tuple[ScriptFacts, LoaderRecorder, StepRecorder]:
    facts = ScriptFacts(0, 2, 2, "n1", cores=2)
    loading = LoaderRecorder(facts)
    return facts, loading, StepRecorder(facts, loading)


def ddp_of(module: torch.nn.Module, parameters: list[torch.nn.Parameter], **more: Any) -> SimpleNamespace:
    return SimpleNamespace(module=module, _module_parameters=parameters, **({"find_unused_parameters": False} | more))


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(())


def test_a_cut_epoch_has_its_first_batches_and_its_last_and_knows_all_indices() -> None:
    seen = LoaderPass()
    drawn = [*TruncatedSampler(iter([[0, 1], [2, 3], [4, 5], [6]]), 4, 2, seen)]
    assert drawn == [[0, 1], [6]]
    assert seen.indices == [*range(7)]
    assert seen.drawn == 7


def test_a_sampler_that_ends_early_ends_the_epoch() -> None:
    assert [*TruncatedSampler(iter([[0], [1]]), 5, 3, LoaderPass())] == [[0], [1]]
    assert [*TruncatedSampler(iter([[0], [1], [2]]), 5, 3, LoaderPass())] == [[0], [1], [2]]


class Counting:
    """A sampler whose order is another one in each epoch, which it counts after its last index."""

    def __init__(self, batches: int, *, seconds: float = 0.0) -> None:
        self.batches, self.epoch, self.seconds, self.drawn = batches, 0, seconds, 0

    def __iter__(self) -> Iterator[list[int]]:
        for number in range(self.batches):
            time.sleep(self.seconds)
            self.drawn += 1
            yield [self.epoch * 1000 + number]
        self.epoch += 1

    def __len__(self) -> int:
        return self.batches


@pytest.mark.parametrize("kept", [1, 4, 10])
@pytest.mark.parametrize("batches", [10, 12])
def test_a_sampler_is_drawn_to_its_end_however_few_batches_are_loaded(kept: int, batches: int) -> None:
    """Its length may be more or less than what it gives."""
    sampler, passes = Counting(10), [LoaderPass() for _ in range(3)]
    for number, seen in enumerate(passes):
        drawn = [*TruncatedSampler(iter(sampler), batches, min(kept, batches), seen)]
        assert len(drawn) == kept and drawn[-1] == [number * 1000 + 9]
    assert sampler.epoch == 3
    assert [(seen.drawn, seen.cut_off, seen.indices[0]) for seen in passes] == [(10, False, 1000 * n) for n in range(3)]


def test_who_leaves_its_loop_has_drawn_no_more_than_it_took() -> None:
    sampler = Counting(10)
    cut = TruncatedSampler(iter(sampler), 10, 4, LoaderPass())
    for _ in range(3):
        next(cut)
    assert (sampler.drawn, sampler.epoch) == (3, 0)


def test_an_endless_sampler_is_drawn_as_long_again_and_then_nothing_is_known_of_its_end() -> None:
    seen, drawn = LoaderPass(), Counting(1 << 60)
    assert len([*TruncatedSampler(iter(drawn), 30, 24, seen)]) == 24
    assert seen.cut_off and drawn.drawn <= 62
    assert (seen.drawn, seen.indices) == (30, [*range(30)])  # indices beyond its length do not belong to the epoch


def test_a_sampler_that_cannot_be_drawn_beyond_its_length_fails_nobody() -> None:
    def draws() -> Iterator[list[int]]:
        yield [0]
        raise ValueError("no more")

    assert [*TruncatedSampler(draws(), 1, 1, seen := LoaderPass())] == [[0]] and seen.cut_off


def test_a_slow_sampler_takes_a_bounded_time_unless_ranks_meet_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    meets = False
    monkeypatch.setattr(StatusPage, "calls_since", lambda _, began_ns: meets)
    slow = Counting(400, seconds=0.005)
    assert len([*TruncatedSampler(iter(slow), 400, 24, seen := LoaderPass(), 0.05)]) == 24
    assert seen.cut_off and slow.drawn < 100 and slow.epoch == 0
    meets = True
    assert len([*TruncatedSampler(iter(slow), 400, 24, seen := LoaderPass(), 0.05)]) == 24
    assert not seen.cut_off and slow.epoch == 1


@pytest.mark.sample(4)
@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("drop_last", [False, True])
def test_a_sampler_of_a_loader_counts_its_epochs_as_uncut(num_workers: int, drop_last: bool, tmp_path: Path) -> None:
    for how in ("batches", "samples"):
        whole, cut = (run_ranks(begun, 1, tmp_path, how, num_workers, drop_last, checked) for checked in (False, True))
        assert whole[0][0] == cut[0][0] == 4 and [one // 1000 for one in cut[0][1]] == [0, 1, 2, 3]
        assert whole[0][2] >= 120 and cut[0][2] < 120


def begun(
    rank: int, size: int, how: str, num_workers: int, drop_last: bool, checked: bool
) -> tuple[int, list[int], int]:
    """Four epochs: how many the sampler has counted, what each began with, and how many batches there were."""
    facts, sampler = ScriptFacts(rank, 2, 2, "n1", cores=2), Counting(64)
    if checked:
        ScriptHooks(print).add_listeners(LoaderRecorder(facts)).install()
    data: Any = {1000 * epoch + n: 1000 * epoch + n for epoch in range(4) for n in range(64)}
    given: dict[str, Any] = {"sampler": Flat(sampler), "batch_size": 2, "drop_last": drop_last}
    loader = DataLoader(data, num_workers=num_workers, **({"batch_sampler": sampler} if how == "batches" else given))
    epochs = [[int(x[0]) for x in loader] for _ in range(4)]
    return sampler.epoch, [one[0] for one in epochs], sum(map(len, epochs))


class Flat(Counting):
    """Gives one index at a time."""

    def __init__(self, inner: Counting) -> None:
        super().__init__(inner.batches)
        self.inner = inner

    def __iter__(self) -> Iterator[Any]:
        for (index,) in self.inner:
            yield index


def test_whether_samplers_are_torch_s_own_is_known() -> None:
    data: Any = [*range(8)]
    own = Flat(Counting(8))
    told = [DataLoader(data, 2), DataLoader(data, 2, shuffle=True), DataLoader(data, 2, sampler=own)]  # pyright: ignore[reportArgumentType]
    told += [DataLoader(data, batch_sampler=BatchSampler(own, 2, False)), DataLoader(data, batch_sampler=Counting(4))]  # pyright: ignore[reportArgumentType]
    assert [inspect_loader(loader).plain for loader in told] == [True, True, False, False, False]


def test_a_loader_that_is_dropped_in_its_own_loop_is_seen_to_the_end() -> None:
    (facts, watch, _), loader = watching(), DataLoader(Stream())
    batches = SimpleNamespace(of_loader=weakref.ref(loader))
    watch.on_epoch_begin(batches)
    del loader  # as in `for batch in DataLoader(data):`
    watch.on_batch_received(batches, torch.ones(2))
    watch.on_epoch_end(batches)
    assert (facts.loaders[0].passes[0].sizes, facts.loaders[0].passes[0].ended) == ([2], True)


def test_a_head_that_ddp_does_not_know_leaves_the_old_one_unused() -> None:
    (facts, _, seeing), body, old, new = watching(), *(torch.nn.Linear(2, width) for width in (2, 3, 4))
    own = [*body.parameters(), *old.parameters()]
    inner = torch.nn.Sequential(body, new)  # the script has put its own head in place of the old one
    ddp = ddp_of(inner, own, find_unused_parameters=True, training=True)
    seeing.on_replica_created(ddp)
    seeing.on_forward_end(ddp, inner(torch.ones(1, 2)))
    inner(torch.ones(1, 2)).sum().backward()
    seeing.on_step_begin(SimpleNamespace(param_groups=[{"params": [*inner.parameters()]}]))
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
    (facts, _, seeing), model = watching(), Towers()
    seeing.on_replica_created(ddp_of(model, [*model.parameters()]))
    hook = torch.nn.modules.module.register_module_forward_pre_hook(seeing._on_module_forward)
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
    assert " in test_a_method_" in facts.replicas[0].past_site  # the caller's line, not the model's


def clipping_by(seeing: StepRecorder, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """torch's clip_grad_norm_, as it is once what it is made of is watched."""
    name = "torch.nn.utils.clip_grad._clip_grads_with_norm_"
    monkeypatch.setattr(name, seeing.wrap_clip(torch.nn.utils.clip_grads_with_norm_))
    return torch.nn.utils.clip_grad_norm_


def test_what_is_clipped_is_told_of_the_optimizer_that_steps_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    facts, _, seeing = watching()
    clip = clipping_by(seeing, monkeypatch)
    weights = [torch.nn.Parameter(torch.zeros(2)) for _ in range(3)]
    optimizers = [SimpleNamespace(param_groups=[{"params": [weight]}]) for weight in weights]
    gradients = [torch.tensor([3.0, 4.0]) for _ in weights]
    for weight, gradient in zip(weights, gradients, strict=True):
        weight.grad = gradient
    for clipped, stepping in ((0, 0), (0, 1), (2, 2)):  # a GAN's clip of another network is not the step's
        clip(iter([weights[clipped]]), max_norm=2.0)
        seeing.on_step_begin(optimizers[stepping])
        seeing.on_step_end(optimizers[stepping])
    told = [(round(step.norm, 3), step.limit) for step in facts.steps]
    assert told == [(5.0, 2.0), (0.0, 0.0), (5.0, 2.0)]
    assert float(gradients[0].norm()) < 2.1


def test_gradients_that_are_scaled_after_the_last_backward_are_seen_to_be_whatever_is_clipped_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    facts, _, seeing = watching()
    clip, weight = clipping_by(seeing, monkeypatch), torch.nn.Parameter(torch.zeros(3))
    optimizer = SimpleNamespace(param_groups=[{"params": [weight]}])
    seeing.on_replica_created(ddp_of(torch.nn.Identity(), []))
    for factor in (1.0, 0.25, 0.5):
        weight.grad = torch.tensor([3.0, -4.0, 1.0])
        seeing.on_backward_end()
        weight.grad.mul_(factor)
        clip([weight], max_norm=1.0)
        seeing.on_step_begin(optimizer)
        seeing.on_step_end(optimizer)
    assert [round(step.scaled, 6) for step in facts.steps] == [1.0, 0.25, 0.5]


def test_gradients_that_are_not_finite_are_facts_that_can_be_read_again() -> None:
    (facts, _, seeing), weight = watching(), torch.nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    seeing.on_replica_created(ddp_of(torch.nn.Identity(), []))
    for value in (1.0, math.nan, math.inf, 1.0):
        weight.grad = torch.full((3,), value)
        seeing.on_backward_end()
        seeing.on_step_begin(optimizer)
        seeing.on_step_end(optimizer)
    assert msgspec.json.decode(msgspec.json.encode(facts), type=ScriptFacts).steps == facts.steps


def windows(how: str, *, optimizers: int = 1) -> list[tuple[int, int]]:
    """Sixteen batches of one epoch, a step after every fourth: backwards of each step, and how many of them are lost.

    No loader is needed: the batches are counted.
    """
    (facts, loading, seeing), model = watching(), torch.nn.Linear(2, 1)
    stepping = [torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(optimizers)]

    def backward(size: float = 1.0) -> None:
        seeing.on_backward_begin(loss := size * model(torch.ones(1, 2)).sum())
        loss.backward()
        seeing.on_backward_end()

    def step(optimizer: Any) -> None:
        seeing.on_step_begin(optimizer)
        optimizer.step()
        seeing.on_step_end(optimizer)

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
    (facts, loading, seeing), model = watching(), torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(Stream())
    for _ in range(3):  # an epoch ends within a window: what is left over is the business of another rule
        batches = SimpleNamespace(of_loader=weakref.ref(loader))
        loading.on_epoch_begin(batches)
        optimizer.zero_grad()
        for number in range(3):
            loading.on_batch_received(batches, torch.ones(2))
            loss = model(torch.ones(1, 2)).sum()
            seeing.on_backward_begin(loss)
            loss.backward()
            seeing.on_backward_end()
            if number == 1:
                seeing.on_step_begin(optimizer)
                optimizer.step()
                seeing.on_step_end(optimizer)
                optimizer.zero_grad()
    assert [one.lost for one in facts.steps] == [0, 0, 0]


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", ["numpy", "old numpy", "random", "torch"])
def test_a_generator_of_a_script_s_own_counts_if_it_draws_for_each_sample(name: str) -> None:
    draws: dict[str, Any] = {
        "numpy": numpy.random.default_rng(1).random,
        "old numpy": numpy.random.RandomState(1).random_sample,
        "random": random.Random(1).random,
        "torch": partial(torch.rand, 1, generator=torch.Generator().manual_seed(1)),
    }
    draw, generators = draws[name], RngSnapshots()
    draw()
    assert generators.used_since(8) == {}  # one number for eight samples
    for _ in range(7):
        draw()
    torch.rand(8)
    assert {*generators.used_since(8)} == {OWN_GENERATORS, "torch"}
    assert generators.used_since(8) == generators.used_since(8) and RngSnapshots().used_since(8) == {}


@pytest.mark.parametrize("name", ["torch", "numpy", "random"])
def test_a_generator_that_is_put_into_another_state_has_drawn_nothing_yet(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module, (_, names) in GENERATOR_STATE_SETTERS.items():
        for setter in names:
            monkeypatch.setattr(sys.modules[module], setter, getattr(sys.modules[module], setter))
    wrap_seed_functions()
    draw, state = {
        "torch": (partial(torch.rand, 8), torch.get_rng_state()),
        "numpy": (partial(numpy.random.rand, 8), numpy.random.get_state()),
        "random": (partial(random.sample, range(99), 8), random.getstate()),
    }[name]
    for setter in {
        "torch": [torch.set_rng_state, torch.random.set_rng_state, torch.manual_seed, torch.random.manual_seed],
        "numpy": [numpy.random.set_state, numpy.random.seed],
        "random": [random.setstate, random.seed],
    }[name]:
        draw()
        generators = RngSnapshots()
        setter(5 if "seed" in setter.__name__ else state)
        assert generators.used_since(8) == {}
        from_here = RngSnapshots()
        draw()
        assert [*generators.used_since(8)] == [name] and generators.used_since(8) == from_here.used_since(8)
        assert setter is pickle.loads(pickle.dumps(setter))  # a loader may use it as worker_init_fn


def test_layers_are_split_along_those_dimensions_of_a_mesh_that_fsdp_does_not_have(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    modules = [importlib.import_module(name) for name in FULLY_SHARD_MODULES]
    for module in modules:
        monkeypatch.setattr(module, "fully_shard", lambda *_, **__: None)
    meshes, ranks = ModelParallelDetector(), torch.arange(4).view(2, 2)
    meshes.wrap_fully_shard()

    def parameter(*placements: Any, rank: int) -> Any:
        mesh = SimpleNamespace(mesh=ranks, size=lambda _: 2, get_coordinate=lambda: [*divmod(rank, 2)])
        return SimpleNamespace(device_mesh=mesh, placements=placements)

    both = parameter(Shard(0), Shard(0), rank=1), torch.ones(2)
    assert meshes.model_parallel_position([parameter(Replicate(), Shard(1), rank=1)]) == (2, 1)
    assert meshes.model_parallel_position(both) == (4, 1)
    modules[0].fully_shard(torch.nn.Linear(1, 1), mesh=SimpleNamespace(mesh=ranks[:, 1]))
    assert meshes.model_parallel_position(both) == (2, 1)  # FSDP on one dimension, split layers on the other
    assert meshes.model_parallel_position([parameter(Shard(0), Replicate(), rank=1)]) == (1, 0)
    modules[0].fully_shard(torch.nn.Linear(1, 1), mesh=SimpleNamespace(mesh=ranks))
    assert meshes.model_parallel_position(both) == (1, 0)


def test_who_shuffles_is_the_sampler_within_a_batch_sampler_that_was_given() -> None:
    data: Any = [*range(8)]
    dealt = DistributedSampler(data, num_replicas=2, rank=0, shuffle=True)
    loaders = [
        DataLoader(data, batch_sampler=BatchSampler(dealt, 2, False)),
        DataLoader(data),
        DataLoader(data, 2, True),
    ]
    told = [inspect_loader(loader) for loader in loaders]
    assert [one.shuffles for one in told] == [True, False, True]
    assert told[0].sampler == "DistributedSampler"


def test_a_score_is_asked_of_one_more_column_of_padding_where_there_is_padding() -> None:
    labels = numpy.array([[1, 2, -100], [0, 1, 2]])
    told = SimpleNamespace(label_ids=labels, predictions=numpy.zeros((2, 3, 4)), inputs=None, losses=None)
    more = add_padding_column(told)
    assert more.label_ids.tolist() == [[1, 2, -100, -100], [0, 1, 2, -100]]
    assert more.predictions.shape == (2, 4, 4) and (more.predictions[:, 3] == -100).all()
    told.label_ids = abs(labels)
    assert add_padding_column(told) is None


class Args:
    batch = 64


def called_with(*args: Any, **kwargs: Any) -> str:
    return find_division_by_world_size(sys._getframe(1), "batch_size", 1)


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
    assert find_division_by_world_size(None, "batch_size", 1) == ""


def test_a_schedule_is_as_long_as_until_it_is_constant() -> None:
    def cosine(step: int) -> float:
        return step / 10 if step < 10 else 0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, (step - 10) / 490)))

    assert lr_schedule_end_step(SimpleNamespace(lr_lambdas=[cosine])) == 500
    assert lr_schedule_end_step(SimpleNamespace(T_max=70)) == 70
    assert lr_schedule_end_step(SimpleNamespace()) == -1


def test_of_a_session_steps_are_counted_and_no_gradient_is_looked_at() -> None:
    (facts, _, seeing), model = watching(), torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hooks = ScriptHooks(print).add_listeners(seeing)
    hooks.remove_listeners()  # as when a session begins
    for _ in range(MAX_UNJOINED_STEPS + 1):
        hooks._tell("on_backward_begin", model(torch.ones(1, 2)).sum())
        hooks._tell("on_step_begin", optimizer)
        hooks._tell("on_step_end", optimizer)
    assert facts.session and len(facts.steps) == MAX_UNJOINED_STEPS + 1
    assert {(one.gradients, one.backwards) for one in facts.steps} == {("", 0)}
