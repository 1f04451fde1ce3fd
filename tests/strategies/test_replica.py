"""What all strategies share, in a world of one."""

import copy

import pytest
import torch
from tests.errors import raises
from tests.worlds import world as world
from torch import nn
from torch.optim import SGD

from paceline import BatchPlan, LoadingOptions, World, evaluate, fit, load_steps, train_step
from paceline.config.strategies import MULTI_PROCESS_STRATEGIES, STRATEGY_INFO
from paceline.data.arrays import ArrayDataset
from paceline.strategies import STRATEGIES
from paceline.train.optimizer import Schedule

CPU = torch.device("cpu")
DATA = ArrayDataset(torch.arange(12.0).reshape(12, 1) / 12, torch.arange(12.0) / 6)


def loss(outputs, targets):
    return (outputs[:, 0] - targets).square()


def steps(data=DATA, *, batch=6, stop=4, virtual_ranks=1):
    plan = BatchPlan(len(data), batch, virtual_ranks)
    return list(load_steps(data, plan, range(virtual_ranks), LoadingOptions(CPU), start=0, stop=stop))


def sgd(parameters):
    return SGD(parameters, lr=0.1)


@pytest.mark.parametrize("name", STRATEGIES)
def test_the_step_is_the_gradient_of_the_global_mean(world, name):
    plain = nn.Linear(1, 1)
    replica = STRATEGIES[name](copy.deepcopy(plain), sgd, world)
    (step,) = steps(batch=12, stop=1)
    mean = loss(plain(DATA.inputs), DATA.targets).mean()
    wanted = torch.autograd.grad(mean, list(plain.parameters()))
    result = train_step(replica, step, loss)
    assert result.loss == pytest.approx(float(mean.detach()), rel=1e-6)
    assert replica.sharded == STRATEGY_INFO[name].sharded
    weights = replica.weights()
    for (n, p), g in zip(plain.named_parameters(), wanted, strict=True):
        torch.testing.assert_close(weights[n], p.detach() - 0.1 * g)


def test_unfreezing_later_is_an_error_instead_of_a_silent_difference(world):
    model = nn.Sequential(nn.Linear(1, 4), nn.Linear(4, 1))
    model[0].requires_grad_(False)
    replica = STRATEGIES["manual"](model, sgd, world)
    first, second, *_ = steps()
    frozen = model[0].weight.clone()
    train_step(replica, first, loss)
    assert torch.equal(model[0].weight, frozen)
    model[0].requires_grad_(True)
    with raises("unfrozen-later", name="0.weight"):
        train_step(replica, second, loss)


def test_weights_that_sum_to_zero_are_an_error(world):
    replica = STRATEGIES["single"](nn.Linear(1, 1), sgd, world)
    with raises("loss-weights-zero"):
        train_step(replica, steps()[0], lambda o, t: (loss(o, t), torch.zeros_like(t)))


def test_buffers_belong_to_virtual_ranks_and_are_merged_to_look_at(world):
    model = nn.Sequential(nn.BatchNorm1d(1, momentum=1.0), nn.Linear(1, 1))
    replica = STRATEGIES["single"](model, sgd, world, virtual_ranks=2)
    (step,) = steps(batch=12, stop=1, virtual_ranks=2)
    replica.model.train()
    train_step(replica, step, loss)
    means = [float(b.inputs.mean()) for b in step]
    assert means[0] != means[1]
    last = float(model[0].running_mean)
    with replica.use_merged_buffers():
        assert float(model[0].running_mean) == pytest.approx(sum(means) / 2)
        assert int(model[0].num_batches_tracked) == 1
    assert float(model[0].running_mean) == last  # looking has not changed the training


def test_dropout_draws_the_runs_own_numbers_and_leaves_the_global_stream_alone(world):
    def losses_of_a_run(global_seed: int) -> list[float]:
        torch.manual_seed(5)
        model = nn.Sequential(nn.Linear(1, 8), nn.Dropout(0.5), nn.Linear(8, 1))
        replica = STRATEGIES["single"](model, sgd, world)
        torch.manual_seed(global_seed)
        losses = [train_step(replica, step, loss).loss for step in steps()]
        after = torch.rand(1)
        torch.manual_seed(global_seed)
        assert torch.equal(after, torch.rand(1))
        return losses

    assert losses_of_a_run(1) == losses_of_a_run(2)


def test_evaluation_counts_each_sample_once_and_restores_the_modes(world):
    model = nn.Sequential(nn.Linear(1, 1), nn.Dropout(0.5))
    replica = STRATEGIES["single"](model, sgd, world)
    model[1].eval()
    scores = evaluate(replica, DATA, loss, {"one": lambda o, t: torch.ones(len(t))}, LoadingOptions(CPU), batch_size=5)
    assert scores["one"] == 1.0
    assert scores["loss"] == pytest.approx(float(loss(model[0](DATA.inputs), DATA.targets).detach().mean()))
    assert (model.training, model[0].training, model[1].training) == (True, True, False)


def test_fit_follows_the_schedule_and_numbers_steps_over_the_run(world):
    replica = STRATEGIES["single"](nn.Linear(1, 1), sgd, world)
    schedule = Schedule(0.4, total_steps=4, warmup_steps=2, shape="constant")
    records = list(fit(replica, steps(), loss, schedule))
    assert [r.step for r in records] == [1, 2, 3, 4]
    assert [r.lr for r in records] == [0.2, 0.4, 0.4, 0.4]
    assert replica.optimizer.param_groups[0]["lr"] == 0.4
    assert all(0 <= r.data_seconds <= r.seconds for r in records)


@pytest.mark.parametrize("name", ["single", "dp"])
def test_strategies_of_one_process_refuse_several(name):
    world = World(0, 2, 0, 2, CPU, "gloo")
    with raises("strategy-of-one-process", value=name, processes=2, allowed=[*MULTI_PROCESS_STRATEGIES]):
        STRATEGIES[name](nn.Linear(1, 1), sgd, world)
