"""A task's own optimizer and schedule, and `--optimizer module:name`: torch's own results, resumed to the same bits."""

import importlib.util
import json
import shutil
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors.torch import load_file
from tests.cli.test_bad_input import WITHOUT_TORCH
from tests.ended import digest, start_steps
from tests.errors import ended_with, raises
from torch import Tensor

from paceline.config.settings import OptimizerConfig
from paceline.runs.events import Step, read_events
from paceline.seeding import derive_seed, fork_rng_with_seed
from paceline.train.optimizer import configured_optimizer_maker, make_lr_schedule

TASK = """
import os
import torch
from torch import nn
from torch.optim import LBFGS, SGD, AdamW, Muon
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, ReduceLROnPlateau
from paceline import ArrayDataset, Task

def data(split):
    inputs = torch.linspace(-1, 1, 36, dtype=torch.float64).reshape(12, 3)
    return ArrayDataset(inputs, inputs.sum(1).square())

def model():
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()

def loss(outputs, targets):
    return (outputs[:, 0] - targets).square()

def groups(model):
    decay = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim == 1]
    most = float(os.environ.get("DECAY", 0.5))
    return AdamW([{"params": decay, "weight_decay": most}, {"params": rest, "weight_decay": 0.0, "lr": 0.02}], lr=0.01)

def one_cycle(optimizer, steps):
    return OneCycleLR(optimizer, max_lr=[0.1, 0.2], total_steps=steps)

def task(make_optimizer=None, make_schedule=None):
    return Task(model, data, loss, make_optimizer=make_optimizer, make_schedule=make_schedule)

def muon(model):
    matrices, rest = ([p for p in model.parameters() if (p.ndim == 2) == wanted] for wanted in (True, False))
    return [Muon(matrices, lr=0.02), AdamW(rest, lr=0.01)]

plain = task()
several = task(muon, lambda optimizer, steps: LambdaLR(optimizer, lambda step: 1 / (1 + step)))
twice = task(lambda model: [SGD(model.parameters(), lr=1), AdamW(model.parameters())])
one_muon = task(lambda model: [Muon(model.parameters())])
own = task(groups, one_cycle)
kept = task(groups)
scheduled = task(None, lambda optimizer, steps: LambdaLR(optimizer, lambda step: 1 / (1 + step)))
lbfgs = task(lambda model: LBFGS(model.parameters()))
nothing = task(lambda model: None)
plateau = task(groups, lambda optimizer, steps: ReduceLROnPlateau(optimizer))
unsaved = task(lambda model: SGD([{"params": model.parameters(), "odd": object()}], lr=1))

def slow_sgd(parameters, lr):
    return SGD(parameters, lr=lr / 2)

def no_lr(parameters):
    return SGD(parameters, lr=1)

def sgd(parameters, lr):
    return SGD(parameters, lr=lr)

not_callable = 3
"""


WHOLE = "--global-batch 12"  # all samples in each step


@pytest.fixture
def train(paceline, tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(TASK)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "unused")  # torch sets it where an optimizer steps in this process

    def run(words: str, **more):
        return paceline("train", *words.split(), **more)

    return run


@pytest.fixture
def mine(tmp_path) -> ModuleType:
    """The tasks, in this process."""
    (tmp_path / "mine.py").write_text(TASK)
    spec = importlib.util.spec_from_file_location("mine_own", tmp_path / "mine.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def learned(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def rates(folder: Path) -> list[float]:
    return [event.lr for event in read_events(folder / "events-0.jsonl") if isinstance(event, Step)]


def definition(folder: Path) -> dict:
    newest = max((folder / "checkpoints").glob("step-*/manifest.json"))
    return json.loads(newest.read_text())["manifest"]["definition"]


def by_hand(mine: ModuleType, make_optimizer, make_schedule, steps: int = 6) -> tuple[dict[str, Tensor], list[float]]:
    """The weights and learning rates that torch alone comes to, from the weights that the run began with."""
    with fork_rng_with_seed(derive_seed(0, "model"), torch.device("cpu")):
        model = mine.model()
    data, optimizer = mine.data("train"), make_optimizer(model)
    schedule, seen = make_schedule(optimizer, steps), []
    for _ in range(steps):
        optimizer.zero_grad()
        mine.loss(model(data.inputs), data.targets).mean().backward()
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return model.state_dict(), seen


def assert_close(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.allclose(found[name], value, rtol=1e-12, atol=1e-14), name


def test_groups_and_a_schedule_come_to_what_torch_alone_comes_to(train, mine, tmp_path):
    run = train(f"mine.py:own --steps 6 {WHOLE} --run-dir run")
    assert run.returncode == 0, run.stderr
    weights, expected = by_hand(mine, mine.groups, mine.one_cycle)
    assert_close(learned(tmp_path / "run"), weights)
    assert rates(tmp_path / "run") == expected
    defined = definition(tmp_path / "run")
    assert [group["weight_decay"] for group in defined["make_optimizer"]["groups"]] == [0.5, 0.0]
    schedule = defined["make_schedule"]
    assert schedule["class"].endswith(".OneCycleLR") and schedule["total_steps"] == 6


def test_without_a_schedule_the_rates_stay_as_the_groups_have_them(mine):
    optimizer = mine.groups(mine.model())
    rates = make_lr_schedule(OptimizerConfig(), 1e-3, mine.kept, optimizer, 6)
    assert [rates.set_lr(optimizer, step) for step in (0, 5)] == [0.01, 0.01]
    assert [group["lr"] for group in optimizer.param_groups] == [0.01, 0.02]


def test_a_schedule_alone_takes_the_flags_of_the_optimizer(mine):
    wish = OptimizerConfig(optimizer="sgd", lr=0.5)
    optimizer = configured_optimizer_maker(wish, 0.25, mine.scheduled, mine.model())(mine.model().parameters())
    rates = make_lr_schedule(wish, 0.25, mine.scheduled, optimizer, 6)
    assert rates.set_lr(optimizer, 0) == 0.25  # after lr scaling
    optimizer.step()
    assert rates.set_lr(optimizer, 1) == 0.125


@pytest.mark.parametrize(
    ("name", "wish", "code", "value"),
    [
        ("own", {"lr": 0.1}, "optimizer-option-unused", 0.1),
        ("kept", {"weight_decay": 0.1}, "optimizer-option-unused", 0.1),
        ("kept", {"optimizer": "torch.optim:RMSprop"}, "optimizer-option-unused", "torch.optim:RMSprop"),
        ("kept", {"schedule": "linear"}, "optimizer-option-unused", "linear"),
        ("scheduled", {"warmup_steps": 3}, "optimizer-option-unused", 3),
        ("lbfgs", {}, "optimizer-needs-closure", None),
        ("nothing", {}, "not-an-optimizer", "NoneType"),
        ("twice", {}, "parameters-trained-twice", None),
        ("plateau", {}, "not-a-scheduler", "ReduceLROnPlateau"),
        ("unsaved", {}, "state-not-plain", "object"),
        ("plain", {"optimizer": "mine.py:slow_sgd"}, "optimizer-sets-lr", "mine.py:slow_sgd"),
        ("plain", {"optimizer": "mine.py:no_lr"}, "optimizer-without-lr", "mine.py:no_lr"),
        ("plain", {"weight_decay": 0.1, "optimizer": "mine.py:sgd"}, "optimizer-option-unused", 0.1),
        ("plain", {"momentum": 0.5, "optimizer": "torch.optim:RMSprop"}, "optimizer-option-unused", 0.5),
        ("plain", {"optimizer": "mine.py:not_callable"}, "optimizer-not-found", "mine.py:not_callable"),
    ],
)
def test_what_has_no_meaning_is_refused(mine, monkeypatch, name, wish, code, value):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "unused")  # torch sets it where an optimizer is made
    monkeypatch.setattr("paceline.tasks.finding.import_object", lambda name: getattr(
        mine if name.startswith("mine") else torch.optim, name.partition(":")[2]))  # fmt: skip
    task, model, settings = getattr(mine, name), mine.model(), OptimizerConfig(**wish)
    with raises(code) as caught:
        optimizer = configured_optimizer_maker(settings, settings.lr, task, model)(model.parameters())
        make_lr_schedule(settings, settings.lr, task, optimizer, 6)
    fields = caught.value.fields
    assert fields.get("value", fields.get("kind")) == value
    if code == "optimizer-option-unused":
        assert fields["setting"] == f"--{next(iter(wish)).replace('_', '-')}"


@pytest.mark.parametrize(
    ("name", "code", "told"),
    [
        ("torch.optim:RMSProp", "unknown-name", "Did you mean 'RMSprop'?"),
        ("mine.py:sdg", "unknown-name", "Did you mean 'sgd'?"),
        ("adam", "unknown-name", "Did you mean 'adamw'?"),
        ("torch.optimm:Adam", "no-such-module-file", "'torch.optimm'"),
    ],
)
def test_an_optimizer_that_is_not_there_is_told_without_torch(train, name, code, told):
    run = train(f"mine.py:plain --optimizer {name} --nproc 2", command=("-c", WITHOUT_TORCH))
    ended_with(run, code)
    assert told in " ".join(run.stderr.split())


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.timeout(540)
@pytest.mark.parametrize(
    ("task", "more"),
    [
        pytest.param("own", "", id="own"),
        pytest.param("several", "", id="several"),
        pytest.param("plain", "--optimizer torch.optim:RMSprop", id="RMSprop", marks=pytest.mark.soak),
    ],
)
def test_one_result_on_any_number_of_ranks_also_resumed(train, tmp_path, task, more):
    words = f"mine.py:{task} {more} --global-batch 5 --virtual-ranks 3 --steps 7"
    found = set()
    for strategy, nproc in (("zero", 1), ("exact", 3)):
        run = train(f"{words} --strategy {strategy} --run-dir {strategy}{nproc} --checkpoint-every 2", ranks=nproc)
        assert run.returncode == 0, run.stderr
        found.add(digest(tmp_path / f"{strategy}{nproc}"))
    assert len(found) == 1
    broken = tmp_path / "exact3"
    for later in ("step-00000006", "step-00000007"):
        shutil.rmtree(broken / "checkpoints" / later, ignore_errors=True)
    (broken / "model.safetensors").unlink()
    run = train("--resume auto --run-dir exact3", ranks=2)
    assert run.returncode == 0, run.stderr
    assert start_steps(broken)[-1] > 0
    assert digest(broken) in found
    run = train(f"{words} --strategy fsdp --run-dir fsdp", ranks=2)
    assert run.returncode == 0, run.stderr
    assert_close(learned(tmp_path / "fsdp"), learned(broken))


@pytest.mark.slow
@pytest.mark.ranks
def test_other_groups_are_refused_on_resume(train, tmp_path):
    run = train(f"mine.py:own {WHOLE} --steps 4 --nproc 1 --run-dir run --rehearse-preemption 2")
    assert run.returncode == 0, run.stderr
    (tmp_path / "run/model.safetensors").unlink()
    for newest in (tmp_path / "run/checkpoints").glob("step-00000004"):
        shutil.rmtree(newest)
    run = train("--resume auto --run-dir run", env={"DECAY": "0.25"}, ranks=1)
    assert run.returncode == 2, run.stderr
    assert "make_optimizer" in run.stderr and "0.25" in run.stderr
