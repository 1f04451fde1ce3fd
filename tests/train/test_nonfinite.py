"""A number that is not finite changes nothing, and is traced to its rank, parameter and samples."""

import math
from collections.abc import Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.errors import codes, raises
from tests.run_ranks import run_ranks
from tests.worlds import world as world
from tests.worlds import worlds
from torch import Tensor, nn

from paceline import BatchPlan, LoadingOptions, World, load_steps, train_step
from paceline.checkpoint.shards import hash_tensors
from paceline.collectives import control as finite
from paceline.collectives.control import are_finite, resolve_deferred, scale_and_check_gradients
from paceline.data.arrays import ArrayDataset
from paceline.data.plan import virtual_ranks_of
from paceline.errors import PacelineError, TrainingError
from paceline.stepping.nonfinite import NonFiniteCause, SkippedSteps
from paceline.strategies import STRATEGIES, Strategy

CPU = torch.device("cpu")
MANY = ("manual", "bucketed", "ddp", "exact", "zero", "fsdp")
BAD = (3, 17)  # whose output is exactly 0, where the root has no slope


def scaled(gradients: list[torch.Tensor], factor: torch.Tensor) -> bool:
    parameters: Any = [SimpleNamespace(grad=gradient) for gradient in gradients]
    return resolve_deferred(scale_and_check_gradients(parameters, factor, CPU))


def dataset() -> ArrayDataset:
    inputs = torch.randn(24, 4, generator=torch.Generator().manual_seed(1))
    inputs[[*BAD]] = 0
    return ArrayDataset(inputs, inputs.sum(1))


class Network(nn.Module):
    """Without biases; counts in a buffer how often it was called, as batch norm does."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8, bias=False), nn.Linear(8, 1, bias=False)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.last(self.first(x).tanh())


def good(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs[:, 0] - targets).square()


def rooted(outputs: Tensor, targets: Tensor) -> Tensor:
    """Always finite; its gradient is not for an output of 0."""
    return outputs[:, 0].abs().sqrt() + good(outputs, targets)


def with_a_collective(outputs: Tensor, targets: Tensor) -> Tensor:
    dist.all_reduce(outputs.detach().sum())
    return rooted(outputs, targets)


def made(name: str, world: World, virtual_ranks: int) -> Strategy:
    torch.manual_seed(0)
    model = Network()
    return STRATEGIES[name](model, lambda p: torch.optim.AdamW(p, lr=0.1), world, virtual_ranks=virtual_ranks)


def batches(world: World, virtual_ranks: int, *, batch: int = 24) -> list[Any]:
    plan = BatchPlan(24, batch, virtual_ranks)
    share = virtual_ranks_of(virtual_ranks, world.rank, world.size)
    return [*load_steps(dataset(), plan, share, LoadingOptions(CPU), start=0, stop=plan.steps_per_epoch)]


def bits(replica: Strategy) -> str:
    """Of all that this rank holds, buffers and optimizer included."""
    return hash_tensors({held.name: held.tensor for held in replica.state()})


# ---- looking -----------------------------------------------------------------------------------------------------


@given(
    st.sampled_from([torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64]),
    st.lists(st.tuples(st.integers(0, 19), st.sampled_from([float("inf"), -float("inf"), float("nan")])), max_size=4),
)
@settings(deadline=None)
def test_finite_means_that_each_element_is(dtype, bad):
    gradients = [torch.full((10,), 3.0, dtype=dtype) for _ in range(2)]
    for at, value in bad:
        gradients[at // 10][at % 10] = value
    assert are_finite(gradients, CPU).result() == (not bad)


def test_a_sum_that_overflows_is_no_false_alarm():
    assert are_finite([torch.full((100,), 3e38)], CPU).result()
    assert are_finite([], CPU).result()


# ---- one process -------------------------------------------------------------------------------------------------


def test_a_bad_gradient_names_samples_and_parameters_and_changes_nothing(world):
    replica = made("single", world, 2)
    (step,) = batches(world, 2)
    train_step(replica, step, good)  # so that buffers and moments are there
    before = bits(replica)
    with raises("not-finite", raised=TrainingError) as caught:
        train_step(replica, step, rooted)
    words = caught.value.fields["what"]
    assert caught.value.exit_code == 5
    named = {int(i) for i in words.partition("rank 0: samples ")[2].partition(" (")[0].split(", ")}
    assert named == {*BAD}
    assert "all 2 parameters" in words and "epoch 1, step 1" in words and "(their loss is" in words
    assert bits(replica) == before


def test_only_the_parameters_that_are_hit_are_named(world):
    replica = made("single", world, 1)
    (step,) = batches(world, 1)
    replica.model.first.weight.register_hook(lambda g: g * torch.inf)  # pyright: ignore
    with raises("not-finite", raised=TrainingError) as caught:
        train_step(replica, step, good)
    assert " first.weight " in caught.value.fields["what"]


def test_a_step_may_be_left_out_and_the_next_one_counts(world):
    replica, never = made("exact", world, 2), made("exact", world, 2)
    first, second, *_ = batches(world, 2, batch=8)
    for one in (replica, never):
        train_step(one, first, good)
    before = bits(replica)
    for loss in (rooted, lambda o, t: torch.where(t == 0, torch.nan, good(o, t))):
        result = train_step(replica, [b for step in batches(world, 2) for b in step], loss, may_skip=True)
        assert result.skip_cause is not None
        assert {*result.skip_cause.samples} == {*BAD}
        assert result.grad_norm is None
        assert bits(replica) == before
    for one in (replica, never):
        assert train_step(one, second, good).skip_cause is None
    assert bits(replica) == bits(never)


def test_many_bad_samples_do_not_take_for_ever(world, monkeypatch):
    replica = made("single", world, 1)
    passes: list[object] = []
    monkeypatch.setattr("paceline.stepping.nonfinite.MAX_SEARCH_PASSES", 5)
    all_bad = ArrayDataset(torch.zeros(24, 4), torch.zeros(24))
    plan = BatchPlan(24, 24, 1)
    (step,) = load_steps(all_bad, plan, range(1), LoadingOptions(CPU), start=0, stop=1)
    result = train_step(replica, step, rooted, may_skip=True, enter=passes.append)
    assert result.skip_cause is not None
    assert sorted(result.skip_cause.samples) == [*range(24)]
    assert len(passes) < 20
    assert "and 16 more" in result.skip_cause.message


# ---- ranks -------------------------------------------------------------------------------------------------------


def told(replica: Strategy, step: Any, loss: Any) -> str:
    try:
        train_step(replica, step, loss)
    except PacelineError as error:
        return f"{type(error).__name__} {int(error.exit_code)}: {error.message_with_code}"
    return ""


def of_ranks(rank: int, size: int, folder: str) -> dict[str, Any]:
    """Each strategy's words, and the bits of `exact` and `zero` in worlds of 1 and 2 after a step was left out."""
    found: dict[str, Any] = {}
    for number in worlds(rank, [2, 1], folder):
        world = World(rank, number, rank, number, CPU, "gloo")
        for name in ("exact", "zero"):
            replica = made(name, world, 2)
            for step, loss in zip(batches(world, 2, batch=8), (good, rooted, good), strict=True):
                result = train_step(replica, step, loss, may_skip=True)
            with replica.use_merged_buffers():
                found[f"{name} {number}"] = hash_tensors(replica.model.state_dict())
        if number == 2:
            for name in MANY:
                replica = made(name, world, 2)
                (step,) = batches(world, 2)
                found[name] = told(replica, step, rooted)
                result = train_step(replica, step, good)  # what it had begun is over, on all ranks
                assert result.skip_cause is None
            found["collective"] = told(made("exact", world, 2), batches(world, 2)[0], with_a_collective)
    return found


@pytest.mark.ranks
def test_every_strategy_names_the_ranks_and_leaves_a_step_out_alike_at_every_world_size(tmp_path):
    ranks = run_ranks(of_ranks, 2, tmp_path, str(tmp_path / "meeting"))
    owner = {
        int(i): rank
        for rank in range(2)
        for b in batches(World(rank, 2, rank, 2, CPU, "gloo"), 2)[0]
        for i in b.work.indices
    }
    teller = min(owner[i] for i in BAD)
    for name in MANY:
        assert ranks[teller][name].startswith("TrainingError 5: ") and " all 2 parameters " in ranks[teller][name]
        assert codes(ranks[teller][name]) == ["not-finite"]
        assert ranks[1 - teller][name].startswith("ReportedByPeer 5")
        for sample in BAD:
            assert f"rank {owner[sample]}: samples " in ranks[teller][name] and str(sample) in ranks[teller][name]
    assert codes(ranks[0]["collective"]) == ["not-finite"] and "allreduce" in ranks[0]["collective"]
    for name in ("exact", "zero"):
        assert ranks[0][f"{name} 1"] == ranks[0][f"{name} 2"] == ranks[1][f"{name} 2"]


# ---- what follows ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("steps", "are_too_many"), [([*range(1, 11), 201], False), (range(1, 201, 18), True)])
def test_too_many_are_more_than_ten_of_the_last_two_hundred(steps: Sequence[int], are_too_many: bool):
    skipped = SkippedSteps("skip", World(0, 1, 0, 1, CPU, "gloo"), [].append)
    with raises("too-many-not-finite", raised=TrainingError) if are_too_many else nullcontext():
        for step in steps:
            skipped.record_skip(step, NonFiniteCause("the loss is not finite"))


def test_a_step_goes_back_once_and_is_then_left_out():
    said: list[str] = []
    world = World(0, 1, 0, 1, CPU, "gloo")
    rollback, skip = (SkippedSteps(policy, world, said.append) for policy in ("rollback", "skip"))
    found = NonFiniteCause("the loss is not finite")
    assert [rollback.record_skip(step, found) for step in (7, 7, 9)] == [True, False, True]
    assert not skip.record_skip(7, found)
    assert said[1].startswith("step 7 ") and said[1].endswith(found.message)
    with raises("too-many-not-finite", raised=TrainingError, most=10, steps=200) as caught:
        for step in range(10, 22):
            skip.record_skip(step, found)
    assert caught.value.exit_code == 5


@pytest.mark.parametrize("far", [False, True])  # as on a GPU
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_gradients_are_judged_as_they_are_scaled_and_scaled_as_by_themselves(
    dtype: torch.dtype, far: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(finite, "is_async_device", lambda _: far)
    factor = torch.tensor(1 / 97, dtype=torch.float64)
    gradients = [torch.randn(size, generator=torch.Generator().manual_seed(size)).to(dtype) for size in (3, 1000)]
    wanted = [gradient * factor for gradient in gradients]
    assert scaled(gradients, factor)
    assert all(torch.equal(gradient, other) for gradient, other in zip(gradients, wanted, strict=True))
    for bad in (math.inf, -math.inf, math.nan):
        gradients[1][7] = bad
        assert not scaled(gradients, factor)


@pytest.mark.parametrize("far", [False, True])
def test_gradients_that_overflow_only_as_they_are_scaled_are_not_finite(
    far: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sum of all weights may be below one."""
    monkeypatch.setattr(finite, "is_async_device", lambda _: far)
    assert not scaled([torch.full((3,), 3e38)], torch.tensor(2.0, dtype=torch.float64))
    assert scaled([torch.full((3,), 1e38)], torch.tensor(2.0, dtype=torch.float64))
    assert scaled([], torch.tensor(2.0))
