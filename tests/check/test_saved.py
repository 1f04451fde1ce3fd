"""`--check` compares a checkpoint with memory, bit for bit, and finds what is not in it."""

import pickle
import random
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from paceline.protocol.facts import ORDER, CheckpointDiff, ScriptFacts
from paceline.rank.check.saved import SavedStateRecorder, hash_nested


class Training:
    """A model with batch norm, after a step, and what a framework saves of it."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 1)
        self.accelerator = SimpleNamespace(
            sync_gradients=True,
            is_main_process=True,
            _models=[self.model],
            _dataloaders=[],
            distributed_type="MULTI_CPU",
        )
        self.step()

    def step(self) -> None:
        self.model(torch.randn(8, 4)).sum().backward()
        self.optimizer.step()
        self.schedule.step()

    def save(self, folder: Path) -> None:
        folder.mkdir()
        save_file(self.model.state_dict(), folder / "model.safetensors")
        torch.save(self.optimizer.state_dict(), folder / "optimizer.bin")
        torch.save(self.schedule.state_dict(), folder / "scheduler.bin")
        states = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
        torch.save(dict(zip(("random", "numpy", "torch"), states, strict=True)), folder / "random_states_0.pkl")


class Planted:  # creates a file when it is unpickled
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Callable[[Training, Path], CheckpointDiff]:
    """What the watch records when `save_state` of Accelerate has written this folder."""
    accelerator = type("Accelerator", (), {"save_state": lambda _, folder: folder})
    monkeypatch.setitem(sys.modules, "accelerate.accelerator", SimpleNamespace(Accelerator=accelerator))
    facts = ScriptFacts(rank=0, world=2, local_world=2, host="h", cores=2)
    schedules: dict[int, tuple[Any, str, str]] = {}
    watch = SavedStateRecorder(facts, schedules)

    def save(training: Training, folder: Path) -> CheckpointDiff:
        watch.on_step_end(training.optimizer)
        schedules[0] = training.schedule, "", ""
        instance: Any = accelerator()
        vars(instance).update(vars(training.accelerator))
        instance.save_state(folder)
        return facts.saved_states[-1]

    return save


def test_a_whole_state_has_all_parts(seen: Any, tmp_path: Path) -> None:
    training = Training()
    training.save(tmp_path / "state")
    state = seen(training, tmp_path / "state")
    assert (state.name, state.missing, state.random, state.parts) == ("state", [], [], 11)


@pytest.mark.parametrize(
    ("file", "missing"), [("optimizer.bin", ["the optimizer AdamW"]), ("scheduler.bin", ["the schedule StepLR"])]
)
def test_a_part_that_is_not_saved_is_missing(seen: Any, tmp_path: Path, file: str, missing: list[str]) -> None:
    training = Training()
    training.save(tmp_path / "state")
    (tmp_path / "state" / file).unlink()
    state = seen(training, tmp_path / "state")
    assert (state.missing, state.random) == (missing, [])


@pytest.mark.parametrize("name", ["0.weight", "1.running_mean"])
def test_one_other_bit_of_a_tensor_is_found(seen: Any, tmp_path: Path, name: str) -> None:
    training = Training()
    training.save(tmp_path / "state")
    with torch.no_grad():
        training.model.state_dict()[name].view(-1).view(torch.int32)[0] ^= 1
    assert seen(training, tmp_path / "state").missing == [f"{name} of the model"]


def test_a_pickle_that_another_user_could_have_written_is_not_loaded(seen: Any, tmp_path: Path) -> None:
    training = Training()
    training.save(tmp_path / "state")
    (tmp_path / "state" / "planted.pkl").write_bytes(pickle.dumps(Planted(tmp_path / "executed")))
    (tmp_path / "state" / "planted.pkl").chmod(0o666)
    state = seen(training, tmp_path / "state")
    assert (state.parts, state.missing) == (0, []) and not (tmp_path / "executed").exists()


def test_an_older_checkpoint_is_not_the_present_state(seen: Any, tmp_path: Path) -> None:
    training = Training()
    training.save(tmp_path / "state")
    training.step()
    state = seen(training, tmp_path / "state")
    assert {"the optimizer AdamW", "the schedule StepLR", "1.running_mean of the model"} <= {*state.missing}
    assert state.random == ["torch"]


def test_adapters_need_not_have_their_base(seen: Any, tmp_path: Path) -> None:
    training = Training()
    training.save(tmp_path / "state")
    training.model[0].requires_grad_(False).weight.add_(1)
    training.model.peft_config = {}
    assert seen(training, tmp_path / "state").missing == []


def test_other_ranks_look_for_their_random_states_only(seen: Any, tmp_path: Path) -> None:
    training = Training()
    training.accelerator.is_main_process = False
    training.save(tmp_path / "state")
    (tmp_path / "state" / "optimizer.bin").write_bytes(b"partial")
    state = seen(training, tmp_path / "state")
    assert (state.missing, state.random, state.parts) == ([], [], 0)


def test_an_open_window_and_sharded_parameters_are_noted_and_not_compared(seen: Any, tmp_path: Path) -> None:
    training = Training()
    training.accelerator.sync_gradients = False
    training.model[0].weight.device_mesh = "mesh"
    training.save(tmp_path / "state")
    state = seen(training, tmp_path / "state")
    assert state.open_window and (state.parts, state.missing) == (0, [])


def test_a_loader_s_generator_that_is_not_saved_is_noted(seen: Any, tmp_path: Path) -> None:
    training = Training()
    loader: Any = SimpleNamespace(synchronized_generator=torch.Generator())
    training.accelerator._dataloaders.append(loader)
    training.save(tmp_path / "state")
    assert seen(training, tmp_path / "state").random == [ORDER]


def test_digests_depend_on_content_alone() -> None:
    found = set[str]()
    hash_nested({"b": [torch.ones(2), (1, 2)], "a": {"c": numpy.arange(3)}}, found)
    for part in (
        torch.ones(2),
        [1, 2],
        {"c": numpy.arange(3)},
        {"a": {"c": numpy.arange(3)}, "b": [torch.ones(2), [1, 2]]},
    ):
        assert hash_nested(part, set()) in found
    for other in (torch.ones(2, dtype=torch.float64), torch.ones(1, 2), [2, 1], {"c": numpy.arange(3.0)}, True):
        assert hash_nested(other, set()) not in found
