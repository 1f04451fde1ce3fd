"""What is exported from a saved state is the model's state_dict at the end of a run that ends there, bit for bit."""

from functools import partial

import pytest
import torch
from tests.cli.tasks_to_export import Odd, loss
from tests.strategies.test_odd_models import MANY, Kept
from tests.worlds import world as world
from torch import nn
from torch.optim import AdamW

from paceline import BatchPlan, LoadingOptions, load_steps, train_step
from paceline.checkpoint.export import state_dict_from_source, state_dict_names_by_saved_name
from paceline.data.arrays import ArrayDataset
from paceline.runs.checkpoint_format import DamagedCheckpoint
from paceline.strategies import STRATEGIES

V = 5
DATA = ArrayDataset(torch.arange(24 * 4).reshape(24, 4) * 7 % 9, torch.arange(24) % 9)


@pytest.mark.parametrize(
    "name", [name if name in ("zero", "fsdp") else pytest.param(name, marks=pytest.mark.slow) for name in MANY]
)
def test_it_is_what_the_run_would_write_under_every_strategy(world, name):
    model = Odd().double()  # in which the order of additions shows
    replica = STRATEGIES[name](model, partial(AdamW, lr=0.1), world, virtual_ranks=V)
    replica.model.train()
    names = state_dict_names_by_saved_name(replica.model)
    plan = BatchPlan(len(DATA), 12, virtual_ranks=V)
    for step in load_steps(DATA, plan, range(V), LoadingOptions(torch.device("cpu")), start=0, stop=4):
        train_step(replica, step, loss)
    with replica.use_merged_buffers():
        wanted = {name: tensor.clone() for name, tensor in replica.weights().items()}
    found = state_dict_from_source(Kept(replica.state()), names, V)
    assert found.keys() == wanted.keys() == Odd().state_dict().keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert all(found[name].dtype == wanted[name].dtype for name in wanted)


def test_names_are_noted_where_the_state_dict_has_others():
    model = nn.ModuleDict({"odd": Odd(), "plain": nn.Linear(2, 2)})
    model["again"] = model["plain"]
    assert state_dict_names_by_saved_name(model) == {
        "odd.embedding.weight": ["odd.embedding.weight", "odd.head.weight"],
        "odd.table": [],
        "plain.weight": ["plain.weight", "again.weight"],
        "plain.bias": ["plain.bias", "again.bias"],
    }


def test_what_a_model_puts_into_its_state_dict_and_nobody_saves_is_told():
    model = nn.Linear(2, 2)
    model.register_state_dict_post_hook(lambda module, state, prefix, _: state.update({"norm": torch.ones(1)}))
    with pytest.raises(DamagedCheckpoint, match="norm of the model's state_dict is not a parameter or buffer"):
        state_dict_from_source(Kept([]), state_dict_names_by_saved_name(model), 1)
