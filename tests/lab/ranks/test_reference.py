"""The reference of `paceline verify` is the plain loop: the mean loss of the global batch, and one plain backward."""

import pytest
import torch
from tests.lab.ranks import tasks_under_test as tasks
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import Subset, default_collate

from paceline.lab.ranks.reference import Reference, pick_gradient_elements
from paceline.lab.ranks.trial import build_float64_model
from paceline.lab.verify import VerifySpec
from paceline.tasks.task import Task

SAMPLES = 17
NOT_LINEAR = {
    "an autograd function": tasks.clamped,
    "an autograd function, with weights": tasks.clamped_tokens,
    "a hook of a module": tasks.module_hook,
    "hooks of parameters": tasks.parameter_hooks,
}


def reference_of(task: Task, virtual_ranks: int, accumulation: int, *, union: bool = False) -> Reference:
    spec = VerifySpec("", {}, [], ["sgd"], virtual_ranks, accumulation, 1, 0, 1e9)
    model = without_dropout(build_float64_model(task, 0, torch.device("cpu")))
    data = Subset(task.make_dataset("train"), range(SAMPLES))
    return Reference(task, model, SGD(model.parameters(), lr=0.1), data, SAMPLES, spec, joins_virtual_ranks=union)


def without_dropout(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def plain(task: Task) -> dict[str, Tensor]:
    """As a single-process script writes it."""
    model = without_dropout(build_float64_model(task, 0, torch.device("cpu")))
    data = task.make_dataset("train")
    inputs, targets = default_collate([data[i] for i in range(SAMPLES)])
    found = task.loss(model(inputs), targets)
    losses, weights = found if isinstance(found, tuple) else (found, torch.ones_like(found))
    ((losses * weights).sum() / weights.sum()).backward()
    return {name: p.grad for name, p in model.named_parameters()}


def furthest(got: dict[str, Tensor], want: dict[str, Tensor]) -> float:
    """The largest difference, as a part of the largest value."""
    assert got.keys() == want.keys()
    return max(float((got[n] - want[n]).abs().max()) for n in want) / max(float(want[n].abs().max()) for n in want)


@pytest.mark.parametrize("virtual_ranks, accumulation", [(1, 1), (3, 2)])
@pytest.mark.parametrize("name", NOT_LINEAR)
def test_hooks_and_functions_see_the_gradients_of_a_single_process_script(
    name: str, virtual_ranks: int, accumulation: int
) -> None:
    reference = reference_of(NOT_LINEAR[name], virtual_ranks, accumulation)
    assert furthest(reference.step(0).gradients, plain(NOT_LINEAR[name])) < 1e-14


@pytest.mark.parametrize("union", [False, True])
def test_a_step_can_be_taken_apart_afterwards_and_nothing_is_changed_by_it(union: bool) -> None:
    one, other = (reference_of(tasks.batchnorm, 3, 2, union=union) for _ in range(2))
    seen = one.step(0)
    parts = one.gradient_parts(4.0)
    assert parts.shape[1] == (2 if union else 6)
    (probes,) = {len(column) for column in parts.T}
    whole = pick_gradient_elements(seen.gradients, dict(one.model.named_parameters()))
    assert len(whole) == probes
    assert float((parts.sum(1) - whole).abs().max()) < 1e-13 * float(whole.abs().max())
    want = other.step(0)
    for got, still in ((seen.parameters, want.parameters), (seen.buffers, want.buffers)):
        assert all(torch.equal(got[name], still[name]) for name in still)
    again, want = one.step(1), other.step(1)
    assert all(torch.equal(again.parameters[name], want.parameters[name]) for name in want.parameters)
    assert all(torch.equal(again.buffers[name], want.buffers[name]) for name in want.buffers)


def test_a_scaled_loss_shows_in_parts_of_a_path_that_is_not_linear_only() -> None:
    for task, same in ((tasks.dropout, True), (tasks.clamped, False), (tasks.parameter_hooks, False)):
        reference = reference_of(task, 3, 2)
        reference.step(0)
        one, many = (reference.gradient_parts(factor).sum(1) for factor in (1.0, 2.0**20))
        assert (float((one - many).abs().max()) <= 1e-9 * float(one.abs().max())) == same
