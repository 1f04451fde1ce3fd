"""The world comes from the environment, whole or not at all; its device is the one that the machine has."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tests.errors import raises
from tests.rendered import rendered
from torch.distributed import HashStore

from paceline.rank import world
from paceline.rank.world import World, device_name, explain_missing_gpus, process_group, resolve_backend, resolve_device

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
    with pytest.raises(ZeroDivisionError), process_group(world):
        assert dist.get_world_size() == 1
        raise ZeroDivisionError
    assert not dist.is_initialized()
    with process_group(world):  # and can be joined again
        with raises("process-group-exists"), process_group(world):  # not inside itself: a session in a Task
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


CPU = torch.device("cpu")
Torch = Callable[[str, int], None]


@pytest.fixture
def has(monkeypatch: pytest.MonkeyPatch) -> Torch:
    """Let torch have so many devices of a kind; "" for none."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def has(kind: str, count: int) -> None:
        found = torch.device(kind) if kind else None
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: found)
        monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count if kind == "cuda" else 0)

    return has


@pytest.mark.parametrize(
    ("kind", "asked", "taken"),
    [
        ("", "auto", CPU), ("cuda", "cpu", CPU), ("cuda", "auto", torch.device("cuda", 1)),
        ("cuda", "cuda", torch.device("cuda", 1)), ("xpu", "auto", torch.device("xpu", 1)),
        ("xpu", "xpu", torch.device("xpu", 1)),
    ],
)  # fmt: skip
def test_the_accelerator_that_torch_has_is_taken_unless_another_is_asked_for(
    has: Torch, kind: str, asked: str, taken: torch.device
) -> None:
    has(kind, 2)
    assert resolve_device(asked, 1, 2, "auto") == taken


@pytest.mark.parametrize(
    ("kind", "asked", "code", "fields"),
    [
        ("xpu", "cuda", "device-not-here", {"value": "cuda", "usable": "xpu"}),
        ("", "cuda", "device-not-here", {"value": "cuda", "usable": "cpu"}),
        ("", "mps", "device-unknown", {"value": "mps"}),
        ("", "tpu", "device-unknown", {"value": "tpu"}),
    ],
)
def test_a_device_that_is_not_there_is_refused_with_what_is(
    has: Torch, kind: str, asked: str, code: str, fields: dict[str, str]
) -> None:
    has(kind, 1)
    with raises(code, **fields):
        resolve_device(asked, 0, 1, "auto")


def test_several_ranks_share_a_gpu_over_gloo_only(has: Torch) -> None:
    has("cuda", 2)
    assert [resolve_device("auto", i, 4, "gloo").index for i in range(4)] == [0, 1, 0, 1]
    with raises("processes-without-gpu", processes=4, count=2, most="2 processes"):
        resolve_device("auto", 0, 4, "auto")


def test_a_wrapper_may_show_each_rank_another_gpu(has: Torch, monkeypatch: pytest.MonkeyPatch) -> None:
    has("cuda", 1)
    with raises("processes-without-gpu", processes=4, count=1):
        resolve_device("auto", 3, 4, "auto")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    assert resolve_device("auto", 3, 4, "auto") == torch.device("cuda", 0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")  # both: then one of them does not work
    with raises("processes-without-gpu", processes=4, count=1):
        resolve_device("auto", 3, 4, "auto")


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_two_ranks_on_one_gpu_are_found_when_they_meet(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], backend: str
) -> None:
    """All call it cuda:0; only its UUID tells."""
    store, gpu = HashStore(), torch.device("cuda", 0)

    def meets(rank: int, uuid: str) -> None:
        monkeypatch.setattr(world, "device_uuid", lambda _: uuid)
        world.check_gpu_placement(rank, 4, gpu, backend, store)

    for rank, uuid in ((0, "a"), (1, "b"), (2, ""), (3, "")):
        meets(rank, uuid)
    assert capsys.readouterr().err == ""
    if backend == "nccl":
        with raises("gpu-shared", first="1", second=2, gpu="b (cuda:0)", backend="nccl"):
            meets(2, "b")
    else:
        meets(2, "b")
        warning = capsys.readouterr().err
        assert "ranks 1 and 2" in warning and "b (cuda:0)" in warning


def test_a_rank_goes_to_the_cores_beside_its_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    gone: list[set[int]] = []
    monkeypatch.setattr(world, "device_uuid", lambda _: "a")
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1, 2, 3})
    monkeypatch.setattr("os.sched_setaffinity", lambda _, cores: gone.append(cores))
    for near in ({2, 3, 4, 5}, {0, 1, 2, 3, 4}, {8, 9}, set[int]()):  # the last three: nothing is better
        monkeypatch.setattr(world, "cpu_cores_near_gpu", lambda _, near=near: near)
        world.set_cpu_affinity(torch.device("cuda", 0))
    assert gone == [{2, 3}]


def test_each_kind_of_device_has_its_backend() -> None:
    assert resolve_backend("auto", CPU) == resolve_backend("gloo", torch.device("cuda", 0)) == "gloo"
    with raises("backend-not-built", value="xccl"):
        resolve_backend("auto", torch.device("xpu", 0))
    assert device_name(CPU) == "cpu"


def test_a_run_on_the_cpu_says_which_gpus_it_leaves_idle_and_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.version, "cuda", None)
    assert explain_missing_gpus(tmp_path) == ""
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    without_cuda = explain_missing_gpus(tmp_path).replace(torch.__version__, "VERSION")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    unseen = explain_missing_gpus(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # as asked
    assert explain_missing_gpus(tmp_path) == ""
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", "6.4")  # NVIDIA's are not for this torch
    assert explain_missing_gpus(tmp_path) == ""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    (tmp_path / "kfd").touch()
    rendered([without_cuda, unseen, explain_missing_gpus(tmp_path)])
