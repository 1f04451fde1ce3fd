"""torch.compile: a compiler that is not there is told at once, what torch cannot compile in our words."""

import os
import subprocess
import sys

import pytest
import torch
from tests.errors import raises
from torch import nn

from paceline.compute.compiling import compile_model, lacks_compiler

CPU = torch.device("cpu")


@pytest.mark.parametrize("hidden", ["CXX", "PATH"])
def test_a_missing_compiler_is_refused_with_what_to_install(monkeypatch, hidden):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv(hidden, "/nowhere")
    with raises("compile-not-possible", setting="compile") as caught:
        compile_model(nn.Linear(2, 2), CPU)
    assert "C++" in caught.value.fields["why"] and "apt install g++" in caught.value.fields["why"]


def test_a_compiler_that_is_named_is_looked_for(monkeypatch):
    monkeypatch.setenv("CXX", sys.executable)  # any program
    assert lacks_compiler(CPU) == ""


SCRIPT = """
import sys, torch
from torch import nn
from paceline.compute.compiling import compile_model
from paceline.errors import TrainingError

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
x = torch.randn(6, 4)
with torch.no_grad():
    wanted = model(x)
names = list(model.state_dict())
compile_model(model, torch.device("cpu"))
assert torch.allclose(model(x), wanted, atol=1e-6) and list(model.state_dict()) == names
model(x).sum().backward()
assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= 1

class Broken(nn.Module):
    def forward(self, x):
        return x.reshape(7, 7)  # six elements have no such shape

broken = Broken()
compile_model(broken, torch.device("cpu"))
try:
    broken(torch.ones(6))
except TrainingError as error:
    assert "torch cannot compile this model" in str(error) and "Leave out --compile" in str(error), error
    print("told")
"""


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # of what torch.compile imports
def test_what_is_compiled_is_a_frame_of_ours_since_torch_skips_its_own(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    model = nn.Sequential(nn.Linear(2, 2))
    assert "/torch/nn/" in model.forward.__code__.co_filename
    compile_model(model, CPU)
    assert "/torch/" not in model.forward.__code__.co_filename


@pytest.mark.soak  # 10 s of a compiler
@pytest.mark.timeout(240)
@pytest.mark.needs("g++")
def test_a_compiled_model_computes_the_same_under_the_same_names_and_its_errors_are_told(tmp_path):
    env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    run = subprocess.run([sys.executable, "-c", SCRIPT], env=env, capture_output=True, text=True, timeout=200)
    assert run.stdout == "told\n", run.stderr
