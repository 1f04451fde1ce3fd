"""The promise of bits is refused where it cannot be kept, and costs nobody else anything."""

import json
import os
import shutil

import pytest
import torch
from tests.errors import raises

from paceline.errors import PacelineError, TrainingError, UsageError
from paceline.train import determinism
from paceline.train.determinism import convert_missing_kernel_error, hardware_facts, use_deterministic_kernels

CPU = torch.device("cpu")


@pytest.fixture(scope="module", autouse=True)
def imported():
    """What torch imports for it changes the environment once, and outlives a test."""
    before = os.environ.get("CUBLAS_WORKSPACE_CONFIG")
    with use_deterministic_kernels():
        pass
    if before is None:
        del os.environ["CUBLAS_WORKSPACE_CONFIG"]


@pytest.fixture(autouse=True)
def workspace(monkeypatch):
    """The variable stays set on purpose: cuBLAS reads it once in a process."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")


def flags() -> tuple[bool, ...]:
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,
        torch.backends.cudnn.benchmark,
    )


def scattered() -> None:
    """Which of the two values stays is anybody's guess."""
    torch.zeros(4).put_(torch.tensor([1, 1]), torch.tensor([1.0, 2.0]))


@pytest.fixture
def unusual():
    """Every flag other than torch's default, and put back after the test."""
    before = flags()
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.benchmark = True
    yield flags()
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])
    torch.backends.cudnn.benchmark = before[3]


@pytest.mark.parametrize("error", [None, ValueError, KeyboardInterrupt])
def test_torchs_flags_are_as_before_also_after_an_error(unusual, error):
    assert unusual == (True, True, True, True)
    for before in (unusual, flags()):
        if error is None:
            with use_deterministic_kernels():
                assert flags() == (True, False, False, False)
        else:
            with pytest.raises(error), use_deterministic_kernels():
                raise error
        assert flags() == before


def test_an_operation_without_a_deterministic_kernel_is_named_with_what_to_do():
    before = flags()
    with raises("no-deterministic-kernel", raised=TrainingError, operation="put_"), use_deterministic_kernels():
        scattered()
    assert flags() == before
    scattered()  # allowed again
    with (
        raises("no-deterministic-kernel", operation="put_"),
        use_deterministic_kernels(),
        convert_missing_kernel_error(UsageError),
    ):
        scattered()


def test_other_errors_are_left_as_they_are():
    with pytest.raises(RuntimeError, match=r"^4711$") as caught, use_deterministic_kernels():
        raise RuntimeError("4711")
    assert not isinstance(caught.value, PacelineError)


def test_a_users_own_workspace_setting_stays(monkeypatch):
    with use_deterministic_kernels():
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    with use_deterministic_kernels():
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"


def test_what_bits_hold_for_is_plain_json_and_the_same_each_time():
    held = hardware_facts(CPU)
    assert json.loads(json.dumps(held)) == held == hardware_facts(CPU)
    assert held["torch"] == torch.__version__
    assert isinstance(held["processor"], str) and held["processor"]
    assert held["capability"] == torch.backends.cpu.get_cpu_capability()


def test_on_a_gpu_they_hold_for_its_model_driver_and_libraries(monkeypatch, tmp_path):
    torch.backends.cuda.matmul.allow_tf32, before = False, torch.backends.cuda.matmul.allow_tf32
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91002)
    monkeypatch.setattr(determinism.dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 9))
    monkeypatch.setattr(determinism, "version", {"nvidia-cublas": "13.1.0"}.__getitem__)
    monkeypatch.setattr(determinism, "PackageNotFoundError", KeyError)
    held = hardware_facts(torch.device("cuda", 0))
    assert {"CUDA 13.0", "cuDNN 91002", "NCCL 2.28.9", "cuBLAS 13.1.0"} <= {*held["libraries"]}
    assert (held["processor"], held["capability"]) == ("NVIDIA H100", "9.0")
    assert held["float32"].startswith("fp32 ") and " tf32 " in held["float32"]  # the defaults of torch differ
    assert json.loads(json.dumps(held)) == held
    torch.backends.cuda.matmul.allow_tf32 = before
    (tmp_path / "version").write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06  Sun Jul 27\n")
    monkeypatch.setattr(determinism, "DRIVERS", (tmp_path / "none", tmp_path / "version"))
    assert hardware_facts(torch.device("cuda", 0))["driver"] == "580.65.06"


TASK = """
import torch
from torch import nn
from paceline import ArrayDataset, Task

def loss(outputs, targets):
    target = torch.zeros(len(targets)).put_(torch.zeros(2, dtype=torch.long), torch.ones(2))
    return (outputs[:, 0] - target).square()

def data(split):
    return ArrayDataset(torch.arange(16.0).reshape(16, 1), torch.zeros(16))

task = Task(lambda: nn.Linear(1, 1), data, loss)
"""


@pytest.mark.slow
def test_a_task_that_cannot_keep_the_promise_is_refused_before_its_first_step(paceline, tmp_path):
    (tmp_path / "mine.py").write_text(TASK)
    run = paceline("train", "mine.py:task", "--strategy", "exact", "--steps", 2, "--run-dir", "exact")
    assert run.returncode == 2 and "[no-deterministic-kernel]" in run.stderr, run.stderr
    assert "put_ " in run.stderr and "Traceback" not in run.stderr
    assert not list((tmp_path / "exact").glob("events-*"))
    run = paceline("train", "mine.py:task", "--strategy", "bucketed", "--steps", 2, "--run-dir", "bucketed")
    assert run.returncode == 0, run.stderr


PLAIN = TASK.replace("target = torch", "target = targets  # torch")


@pytest.mark.slow
def test_bits_are_promised_only_if_all_steps_were_exact(paceline, tmp_path):
    (tmp_path / "mine.py").write_text(PLAIN)
    for begun, promised in (("exact", True), ("bucketed", False)):
        run = paceline("train", "mine.py:task", "--strategy", begun, "--batch-size", 4, "--steps", 6,
                       "--run-dir", begun, "--checkpoint-every", 2)  # fmt: skip
        assert run.returncode == 0, run.stderr
        checkpoints = tmp_path / begun / "checkpoints"
        for lost in ((4, 6), (6,)):  # the second time it goes on from a checkpoint of its first, exact like itself
            for step in lost:
                shutil.rmtree(checkpoints / f"step-0000000{step}")
            run = paceline("train", "--resume", "auto", "--run-dir", begun, "--strategy", "exact")
            assert run.returncode == 0, run.stderr
            assert ("1 to 1 processes" in run.stdout) == promised
            summary = json.loads((tmp_path / begun / "summary.json").read_text())
            assert ("bits_hold_for" in summary) == promised
