"""`--init-from`: weights by name from a file or a run, on every strategy; a resumed run does not load them again."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.cli.test_bad_input import WITHOUT_TORCH
from tests.errors import ended_with, raises
from tests.run_ranks import run_ranks
from torch import nn
from torch.optim import SGD

from paceline.rank.world import World
from paceline.strategies import STRATEGIES
from paceline.train.weights import load_initial_weights, read_weights

TASK = """
import os
import torch
from torch import nn
from paceline import ArrayDataset, Task

def data(split):
    return ArrayDataset(torch.arange(24.0).reshape(12, 2) / 24, torch.zeros(12))

def model():
    return nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Linear(4, int(os.environ.get("HEAD", 1))))

task = Task(model, data, lambda outputs, targets: (outputs.sum(1) - targets).square())
"""


@pytest.fixture(autouse=True)
def cache(monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "unused")  # torch sets it where an optimizer is made


def model(head: int = 1) -> nn.Module:
    net = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Linear(4, head))
    net.register_parameter("scale", nn.Parameter(torch.ones(3)))
    return net


def other() -> dict[str, torch.Tensor]:
    """What another model of that shape has learned."""
    return {name: torch.full_like(value, index + 2) for index, (name, value) in enumerate(model().state_dict().items())}


ALONE = World.from_env({}, device="cpu")


def begun(
    net: nn.Module, path: Path, strategy: str = "single", world: World = ALONE
) -> tuple[dict[str, torch.Tensor], list[str]]:
    lines: list[str] = []
    replica = STRATEGIES[strategy](net, lambda p: SGD(p, lr=0.1), world)
    load_initial_weights(replica, path, trust=False, report=lines.append)
    return {name: value.clone() for name, value in replica.weights().items()}, lines


@pytest.mark.parametrize("kind", ["safetensors", "pt", "nested"])
def test_a_file_is_taken_by_name(tmp_path, kind):
    path = tmp_path / ("w.safetensors" if kind == "safetensors" else "w.pt")
    if kind == "safetensors":
        save_file(other(), path)
    else:
        torch.save({"state_dict": other()} if kind == "nested" else other(), path)
    found, lines = begun(model(), path)
    assert all(torch.equal(found[name], value) for name, value in other().items())
    [line] = lines
    assert " 10 " in line and str(path) in line


def test_what_does_not_fit_is_told_and_left_as_initialised(tmp_path):
    path, net = tmp_path / "w.safetensors", model(head=3)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    weights = {name: value.half() if value.is_floating_point() else value for name, value in other().items()}
    del weights["scale"]
    save_file(weights | {"lm_head": torch.zeros(1)}, path)
    found, lines = begun(net, path)
    assert found["0.weight"].dtype == torch.float32 and torch.equal(found["0.weight"], other()["0.weight"])
    assert all(torch.equal(found[name], before[name]) for name in ("2.weight", "2.bias", "scale"))
    first, shapes, missing, unused = lines
    assert " 7 " in first and " 10 " in first and str(path) in first
    assert "2.bias (3,) here, (1,) there" in shapes and "2.weight (3, 4) here, (1, 4) there" in shapes
    assert missing.endswith(": scale") and unused.endswith(": lm_head")


def test_each_virtual_rank_has_its_own_buffers(tmp_path):
    save_file(other(), tmp_path / "w.safetensors")
    replica = STRATEGIES["single"](model(), lambda p: SGD(p, lr=0.1), ALONE, virtual_ranks=3)
    load_initial_weights(replica, tmp_path / "w.safetensors", trust=False, report=print)
    first, *others = (shard.tensor for shard in replica.state() if shard.name.endswith("running_mean"))
    first.add_(1)  # as the forward of the first virtual rank does
    assert len(others) == 2
    assert all(torch.equal(buffer, other()["1.running_mean"]) for buffer in others)


def test_a_tied_weight_is_found_by_either_name(tmp_path):
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(2, 2, bias=False)
            self.b = nn.Linear(2, 2, bias=False)
            self.b.weight = self.a.weight

    save_file({"b.weight": torch.full((2, 2), 7.0)}, tmp_path / "w.safetensors")
    found, lines = begun(Tied(), tmp_path / "w.safetensors")
    assert found["a.weight"][0, 0] == 7 and len(lines) == 1


@pytest.mark.parametrize(
    ("weights", "code", "told"),
    [
        ({"module.0.weight": torch.ones(4, 2)}, "init-from-does-not-fit", "module.0.weight; "),
        ({"0.weight": torch.ones(9, 9)}, "init-from-does-not-fit", "0.weight (4, 2) here, (9, 9) there"),
        ({"epoch": 3, "model": {}}, "init-from-no-state-dict", "epoch, model"),
        (model, "init-from-unreadable", ""),  # a pickle that runs code
    ],
)
def test_what_is_no_state_of_this_model_is_refused(tmp_path, weights, code, told):
    torch.save(weights, tmp_path / "w.pt")
    with raises(code) as caught:
        begun(model(), tmp_path / "w.pt")
    assert told in str(caught.value)


def test_a_folder_without_a_run_and_a_file_that_is_not_there_are_told(paceline, tmp_path):
    (tmp_path / "mine.py").write_text(TASK)
    run = paceline("train", "mine.py:task", "--init-from", "nowhere", "--nproc", 2, command=("-c", WITHOUT_TORCH))
    ended_with(run, "init-from-not-found")
    (tmp_path / "some").mkdir()
    with raises("init-from-no-weights"):
        read_weights(tmp_path / "some", trust=False, report=print)
    (tmp_path / "some/x").touch()
    run = paceline("train", "mine.py:task", "--init-from", "some", "--nproc", 2, command=("-c", WITHOUT_TORCH))
    ended_with(run, "not-a-run")


def on_strategy(rank: int, world_size: int, strategy: str, path: str) -> bool:
    torch.manual_seed(rank)
    world = World(rank, world_size, rank, world_size, torch.device("cpu"), "gloo")
    found, _ = begun(model(), Path(path), strategy, world)
    return all(torch.equal(found[name], value) for name, value in other().items())


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("strategy", ["bucketed", "zero", "fsdp"])
def test_every_rank_of_every_strategy_begins_with_them(tmp_path, strategy):
    save_file(other(), tmp_path / "w.safetensors")
    assert run_ranks(on_strategy, 2, tmp_path, strategy, str(tmp_path / "w.safetensors")) == [True, True]


@pytest.mark.slow
@pytest.mark.ranks
def test_from_a_run_resumed_without_loading_again(paceline, tmp_path):
    (tmp_path / "mine.py").write_text(TASK)
    words = ("train", "mine.py:task", "--global-batch", 6, "--virtual-ranks", 2, "--steps", 4)
    first = paceline(*words, "--run-dir", "first")
    assert first.returncode == 0, first.stderr
    final = load_file(tmp_path / "first/model.safetensors")
    (tmp_path / "first/model.safetensors").rename(tmp_path / "final")
    of_checkpoint = read_weights(tmp_path / "first", trust=False, report=print)
    assert of_checkpoint.keys() == final.keys()
    assert all(torch.allclose(of_checkpoint[name], value) for name, value in final.items())
    (tmp_path / "final").rename(tmp_path / "first/model.safetensors")
    again = paceline(*words, "--run-dir", "tuned", "--init-from", "first", "--lr", 1e-30, "--checkpoint-every", 2)
    assert again.returncode == 0, again.stderr
    assert re.search("loaded 9 .* 9 ", again.stdout)
    tuned = load_file(tmp_path / "tuned/model.safetensors")
    assert torch.equal(tuned["0.weight"], final["0.weight"])
    shutil.rmtree(tmp_path / "first")
    resumed = paceline("train", "--resume", "auto", "--run-dir", "tuned", "--steps", 6, "--allow-change", "steps")
    assert resumed.returncode == 0, resumed.stderr
    assert "loaded " not in resumed.stdout
    newest = json.loads(max((tmp_path / "tuned/checkpoints").glob("step-*/manifest.json")).read_text())
    definition = newest["manifest"]["definition"]
    assert definition["init_from"] == str(tmp_path / "first") and len(definition["init_sha256"]) == 64
    refused = paceline("train", "--resume", "auto", "--run-dir", "tuned", "--init-from", "tuned")
    ended_with(refused, "another-run-for-good")
