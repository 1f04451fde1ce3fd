"""torch's compiler: not imported by optimizers, at hand when somebody compiles, and no bit differs."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests import warm

ROOT = Path(__file__).parents[2]

OPTIMIZERS = """
import sys, torch
from torch import nn, optim
from paceline.compute.postponed import PLAIN_STEP, TORCH_STEP, postpone_compiler

class Own(optim.SGD):
    def step(self, closure=None):
        return super().step(closure)

def trained(kind, **settings):
    torch.manual_seed(0)
    model = nn.Linear(6, 4)
    optimizer = kind([model.weight] if kind is optim.Muon else model.parameters(), lr=0.1, **settings)
    optimizer.register_step_post_hook(lambda *_: None)
    schedule = optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(3, 6)).square().sum()
        loss.backward()
        assert torch.is_grad_enabled()
        return loss
    for _ in range(3):
        if kind is optim.LBFGS:
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()
        schedule.step()
    assert torch.is_grad_enabled()
    optimizer.load_state_dict(optimizer.state_dict())
    return [p.detach().clone() for p in model.parameters()]

def all_trained():
    kinds = [Own, optim.SGD, optim.AdamW, optim.Adadelta, optim.RMSprop, optim.LBFGS, optim.Muon, optim.Adafactor]
    return [trained(kind) for kind in kinds] + [trained(optim.AdamW, fused=True), trained(optim.SGD, momentum=0.9)]

def step_code():
    function = optim.SGD.step
    while function.__code__ not in (PLAIN_STEP, TORCH_STEP):
        function = function.__wrapped__
    return function.__code__

postpone_compiler()
postpone_compiler()  # twice is once
without = all_trained()
assert "torch._dynamo" not in sys.modules and step_code() is PLAIN_STEP
import importlib.util
assert importlib.util.find_spec("torch._dynamo") is not None  # who only asks for it does not import it
compiled = torch.compile(nn.Linear(6, 4), backend="eager", fullgraph=True)
compiled(torch.ones(3, 6)).sum().backward()
assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
assert step_code() is TORCH_STEP and not vars(optim.Optimizer.add_param_group.__wrapped__)  # all is torch's again
for ours, theirs in zip(without, all_trained(), strict=True):
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
model = nn.Linear(6, 4)
optimizer = optim.SGD(model.parameters(), lr=0.1)
model(torch.ones(3, 6)).sum().backward()
wanted = [p.detach().add(p.grad, alpha=-0.1) for p in model.parameters()]
torch.compile(optimizer.step, backend="eager")()
assert all(torch.equal(a, b) for a, b in zip(wanted, model.parameters(), strict=True))
assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 1
"""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_no_optimizer_of_torch_imports_the_compiler_and_what_compiles_finds_torch_as_it_came():
    run = subprocess.run([sys.executable, "-c", OPTIMIZERS], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr


TASK = """
import os, sys
from pathlib import Path
import torch
from torch import nn
from paceline import Task
from paceline.data.arrays import ArrayDataset

def loss(outputs, targets):  # after the last step, in the evaluation, too
    told = Path(__file__).parent / ("told-" + os.environ.get("RANK", "alone"))
    slow = ("torch._dynamo", "torch.distributed.tensor", "paceline.launch")
    told.write_text(" ".join(name for name in slow if name in sys.modules))
    return (outputs.flatten() - targets).square()

def data(split):
    x = torch.randn(96, 5, generator=torch.Generator().manual_seed(len(split)))
    return ArrayDataset(x, x.sum(1))

task = Task(lambda: nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1)), data, loss)
"""


@pytest.mark.parametrize(("strategy", "optimizer"), [("bucketed", "sgd"), ("exact", "adamw"), ("zero", "sgd")])
def test_a_whole_training_does_without_the_compiler_and_dtensor_and_gets_the_same_bits(strategy, optimizer, tmp_path):
    (tmp_path / "mine.py").write_text(TASK)
    train = ["-m", "paceline", "train", "mine.py:task", "--device", "cpu", "--steps", "4", "--global-batch", "16"]
    train += ["--optimizer", optimizer, "--virtual-ranks", "2"]
    # started as a user's are: what a test's agents fork from has imported it
    words = [*train, "--nproc", "2", "--strategy", strategy, "--run-dir", "a"]
    workers = warm.run(words, cwd=tmp_path, torch=False, agents=False)
    assert workers.returncode == 0, workers.stderr
    assert [(tmp_path / f"told-{rank}").read_text() for rank in range(2)] == ["", ""]
    # forked from what has imported it
    alone = warm.run([*train, "--strategy", "exact", "--run-dir", "b"], cwd=tmp_path)
    assert alone.returncode == 0, alone.stderr
    assert (tmp_path / "told-alone").read_text() == "torch._dynamo torch.distributed.tensor paceline.launch"
    assert digest(tmp_path / "a") == digest(tmp_path / "b")


def digest(run_dir: Path) -> str:
    """Of the weights at the end."""
    return json.loads((run_dir / "summary.json").read_text())["weights_sha256"]
