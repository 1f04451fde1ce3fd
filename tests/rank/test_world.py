"""The world comes from the environment, whole or not at all."""

import pytest
import torch
import torch.distributed as dist
from tests.errors import raises

from paceline.rank.world import World, joined

FULL = {
    "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1",
}  # fmt: skip


def test_no_variables_are_a_world_of_one():
    world = World.from_env({}, device="cpu")
    assert (world.rank, world.size, world.local_rank, world.local_size, world.backend) == (0, 1, 0, 1, "gloo")


def test_torchruns_variables():
    world = World.from_env(FULL, device="cpu")
    assert (world.rank, world.size, world.local_rank, world.local_size) == (3, 4, 1, 2)


@pytest.mark.parametrize("missing", FULL)
def test_a_partly_set_environment_is_an_error_that_names_what_is_missing(missing):
    with raises("variables-missing", missing=[missing]):
        World.from_env({k: v for k, v in FULL.items() if k != missing}, device="cpu")


@pytest.mark.parametrize("wrong", [{"RANK": "4"}, {"LOCAL_RANK": "2"}, {"LOCAL_WORLD_SIZE": "5"}, {"WORLD_SIZE": "x"}])
def test_contradictions_are_errors(wrong):
    with raises("variable-not-a-number" if "x" in wrong.values() else "variables-contradict"):
        World.from_env({**FULL, **wrong}, device="cpu")


@pytest.mark.parametrize(("backend", "code"), [("mpi", "backend-not-built"), ("carrier-pigeon", "backend-unknown")])
def test_backends_that_are_not_there(backend, code):
    if backend == "mpi" and dist.is_mpi_available():
        pytest.skip("this torch has MPI")
    with raises(code, value=backend):
        World.from_env({}, device="cpu", backend=backend)


def test_the_device_is_the_one_of_the_local_rank(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert World.from_env(FULL, backend="gloo").device == torch.device(
        "cuda", 1
    )  # rank 3 of two nodes with two GPUs each


def test_the_group_is_torn_down_also_on_an_error():
    world = World.from_env({}, device="cpu")
    with pytest.raises(ZeroDivisionError), joined(world):
        assert dist.get_world_size() == 1
        raise ZeroDivisionError
    assert not dist.is_initialized()
    with joined(world):  # and can be joined again
        with raises("process-group-exists"), joined(world):  # not inside itself: a session in a Task
            pass
        assert dist.is_initialized()


STEP = {
    "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_NODEID": "1",
    "SLURM_NTASKS": "4", "SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_STEP_NODELIST": "n[1-2]",
}  # fmt: skip


def test_a_slurm_tasks_world_and_its_one_gpu_is_device_0(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    world = World.from_env(STEP, backend="gloo")
    assert (world.rank, world.size, world.local_rank, world.local_size) == (3, 4, 1, 2)
    assert world.device == torch.device("cuda", 0)
