"""Models that are legal torch, and easily trained, saved or resumed wrongly without a word; in a world of one."""

from functools import partial

import pytest
import torch
from tests.errors import raises
from tests.worlds import world as world
from torch import nn
from torch.optim import SGD, AdamW

from paceline import BatchPlan, LoadingOptions, load_steps, train_step
from paceline.checkpoint.state import TensorShard
from paceline.data.arrays import ArrayDataset
from paceline.errors import TrainingError
from paceline.strategies import STRATEGIES
from paceline.tasks.task import Task
from paceline.train.prepare import make_model

CPU = torch.device("cpu")
DATA = ArrayDataset(torch.arange(36.0).reshape(12, 3) / 36, torch.arange(12.0) / 6)
MANY = [name for name in STRATEGIES if name != "dp"]


def loss(outputs, targets):
    return (outputs.sum(1) - targets).square()


def train(replica, start, stop):
    replica.model.train()
    plan = BatchPlan(len(DATA), 6)
    for step in load_steps(DATA, plan, range(1), LoadingOptions(CPU), start=start, stop=stop):
        train_step(replica, step, loss)


class Kept:
    """A state as a checkpoint gives it back: copies, contiguous, on the CPU."""

    def __init__(self, held: list[TensorShard]) -> None:
        self.whole = {h.name: h.tensor.clone(memory_format=torch.contiguous_format).reshape(h.full_shape) for h in held}

    def names(self, prefix):
        return [name for name in self.whole if name.startswith(prefix)]

    def shape(self, name):
        return self.whole[name].shape

    def tensor(self, name, start=0, stop=None):
        whole = self.whole.get(name)
        if whole is None or (start == 0 and stop is None):
            return None if whole is None else whole.clone()
        return whole.reshape(-1)[start:stop].clone()


class Transposed(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.arange(6.0).reshape(2, 3).t() / 6)  # (3, 2), column after column

    def forward(self, x):
        return x @ self.weight


@pytest.mark.parametrize("name", MANY)
@pytest.mark.parametrize(
    "optimizer", [partial(AdamW, lr=0.1, fused=True), partial(SGD, lr=0.1, momentum=0.9, fused=True)]
)
def test_a_resumed_optimizer_finds_the_elements_of_a_parameter_that_is_not_contiguous(world, name, optimizer):
    straight = STRATEGIES[name](Transposed(), optimizer, world)
    train(straight, 0, 3)
    kept = Kept(straight.state())
    train(straight, 3, 6)
    resumed = STRATEGIES[name](Transposed(), optimizer, world)
    resumed.load(kept)
    train(resumed, 3, 6)
    assert torch.equal(resumed.model.weight, straight.model.weight)


class Counting(nn.Module):
    """Counts its forwards in a buffer that another module reads under a name of its own."""

    def __init__(self):
        super().__init__()
        self.layer, self.reader = nn.Linear(3, 1), nn.Module()
        self.register_buffer("seen", torch.zeros(()))
        self.reader.register_buffer("seen", self.seen)

    def forward(self, x):
        self.seen.add_(1.0)
        return self.layer(x) + 0.0 * self.reader.seen


def test_a_buffer_that_two_modules_share_stays_one(world):
    model = Counting()
    train(STRATEGIES["single"](model, partial(SGD, lr=0.1), world), 0, 4)
    assert model.reader.seen is model.seen
    assert float(model.reader.seen) == 4.0


class Late(nn.Module):
    """Makes its buffer when it first needs it."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 1)
        self.register_buffer("mean", None)

    def forward(self, x):
        if self.mean is None:
            self.mean = x.detach().mean(0)
        return self.layer(x)


def test_a_buffer_made_in_the_first_forward_is_refused_then(world):
    with raises("buffer-made-in-first-forward", raised=TrainingError, name="mean"):
        train(STRATEGIES["single"](Late(), partial(SGD, lr=0.1), world), 0, 1)


class Widening(nn.Module):
    """Its buffer becomes float64 in the first forward."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 1)
        self.register_buffer("total", torch.zeros(3))

    def forward(self, x):
        self.total = self.total.double() + x.detach().sum(0)
        return self.layer(x)


def test_a_buffer_that_changes_its_type_is_an_error_in_the_first_step(world):
    replica = STRATEGIES["single"](Widening(), partial(SGD, lr=0.1), world)
    with raises("buffer-changes-shape", leaf="total"):
        train(replica, 0, 2)


@pytest.mark.parametrize("name", MANY)
def test_an_optimizer_of_foreign_parameters_is_refused(world, name):
    temperature = nn.Parameter(torch.ones(()))
    with raises("foreign-parameter", shape=()):
        STRATEGIES[name](nn.Linear(3, 1), lambda p: SGD([*p, temperature], lr=0.1), world)


def test_zero_refuses_parameters_that_share_their_memory(world):
    model = nn.ParameterDict({"all": torch.zeros(4)})
    model["part"] = nn.Parameter(model["all"].data[:2])
    with pytest.raises(ValueError, match="shares its memory"):
        STRATEGIES["zero"](model, partial(SGD, lr=0.1), world)


def test_a_model_with_extra_state_is_refused_before_it_trains(world):
    class Extra(nn.Linear):
        def get_extra_state(self):
            return {"calls": 3}

        def set_extra_state(self, state):
            pass

    task = Task(lambda: Extra(3, 1), lambda split: DATA, loss)
    with raises("extra-state", odd="_extra_state"):
        make_model(task, 0, world)
