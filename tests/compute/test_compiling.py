"""torch.compile: a missing compiler is an error at once. CUDA graphs: replayed to the results of the model itself."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.compute.models import Convolutions
from tests.errors import raises
from torch import nn

from paceline.compute import compiling
from paceline.compute.compiling import MAX_GRAPHS, compile_model, missing_compiler_reason, use_cuda_graphs
from paceline.errors import TrainingError
from paceline.launch.agent.workers import worker_environment
from paceline.protocol.job import NodePlan
from paceline.strategies.buffers import ignore_dummy_batch

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
    assert missing_compiler_reason(CPU) == ""


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
@pytest.mark.timeout(720)
@pytest.mark.needs("g++")
def test_a_compiled_model_computes_the_same_under_the_same_names_and_its_errors_are_told(tmp_path):
    env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    run = subprocess.run([sys.executable, "-c", SCRIPT], env=env, capture_output=True, text=True, timeout=600)
    assert run.stdout == "told\n", run.stderr


# ---- the cache -----------------------------------------------------------------------------------------------------

INDUCTOR, TRITON = "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"
CACHED = """
import json
import torch
from torch._dynamo.utils import counters
@torch.compile
def loss(x):
    return torch.nn.functional.gelu(x @ x.T).sum()
loss(torch.ones(3, 3, requires_grad=True)).backward()
print(json.dumps({key: counters["inductor"][f"fxgraph_cache_{key}"] for key in ("hit", "miss")}))
"""


def _caches(generation: int = 0) -> list[str | None]:
    env = worker_environment(NodePlan(("x",), 1), 0, 1, generation)
    return [env.get(INDUCTOR), env.get(TRITON)]


def test_ranks_and_attempts_share_a_private_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(INDUCTOR, raising=False)
    monkeypatch.delenv(TRITON, raising=False)
    inductor, triton = _caches()
    assert inductor is not None and Path(inductor).parents[2] == tmp_path and triton == f"{inductor}/triton"
    assert Path(inductor).stat().st_mode & 0o777 == 0o700 and _caches(generation=1) == [inductor, triton]
    with monkeypatch.context() as other_processor:
        other_processor.setattr(Path, "read_bytes", lambda _: b"flags: fewer\n\n")
        assert _caches()[0] not in (inductor, None)
    Path(inductor).chmod(0o777)  # torch unpickles what others could have written
    assert _caches() == [None, None]
    monkeypatch.setenv(INDUCTOR, "mine")
    assert _caches() == ["mine", None]


@pytest.mark.soak  # 20 s of a compiler
@pytest.mark.timeout(720)
@pytest.mark.needs("g++")
def test_a_second_attempt_compiles_nothing(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(CACHED)
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    env.pop(INDUCTOR, None)
    command = [sys.executable, "-m", "paceline", "launch", "--show", "rank 0", "script.py"]
    shown = [subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True).stdout for _ in range(2)]
    first, second = map(json.loads, shown)  # graphs: of the forward and of the backward
    assert first["hit"] == 0 < first["miss"] and second == {"hit": first["miss"], "miss": 0}


# ---- CUDA graphs ---------------------------------------------------------------------------------------------------


def test_they_are_refused_on_the_cpu():
    with raises("cuda-graphs-on-cpu"):
        use_cuda_graphs(nn.Linear(2, 2), torch.device("cpu"))


def test_no_stand_in_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded: list[int] = []
    monkeypatch.setattr(
        compiling, "_recorded", lambda model, forward, args: (recorded.append(len(args[0])), forward)[1]
    )
    model = nn.Linear(2, 2)
    use_cuda_graphs(model, torch.device("cuda"))
    with ignore_dummy_batch(model, [*model.parameters()]):
        model(torch.ones(1, 2))
    assert recorded == []
    model(torch.ones(3, 2))
    assert recorded == [3]


@pytest.mark.gpu
def test_gradients_accumulate_over_replays_as_over_calls():
    torch.manual_seed(0)
    plain, graphed = Convolutions().cuda(), Convolutions().cuda()
    graphed.load_state_dict(plain.state_dict())
    use_cuda_graphs(graphed, torch.device("cuda"))
    for _ in range(3):
        for model in (plain, graphed):
            model.zero_grad(set_to_none=True)
        for _ in range(2):  # the second replay must not overwrite what the first gave
            x = torch.randn(4, 1, 12, 12, device="cuda")
            for model in (plain, graphed):
                model(x).square().sum().backward()
        for (name, a), b in zip(plain.named_parameters(), graphed.parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-3, atol=1e-4, msg=name)
    for a, b in zip(plain.buffers(), graphed.buffers(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
def test_shapes_that_keep_changing_are_refused():
    model = nn.Linear(2, 2).cuda()
    use_cuda_graphs(model, torch.device("cuda"))
    with raises("cuda-graphs-too-many", raised=TrainingError):
        for size in range(1, MAX_GRAPHS + 2):
            model(torch.ones(size, 2, device="cuda"))
