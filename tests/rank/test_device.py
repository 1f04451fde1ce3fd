"""Which device is taken, and what is said where it is not the one that the machine has."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.errors import raises
from torch.distributed import HashStore

from paceline.rank import world
from paceline.rank.world import chosen_backend, chosen_device, device_words, overlooked

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
        ("", "auto", CPU), ("cuda", "cpu", CPU), ("mps", "auto", CPU), ("cuda", "auto", torch.device("cuda", 1)),
        ("cuda", "cuda", torch.device("cuda", 1)), ("xpu", "auto", torch.device("xpu", 1)),
        ("xpu", "xpu", torch.device("xpu", 1)),
    ],
)  # fmt: skip
def test_the_accelerator_that_torch_has_is_taken_unless_another_is_asked_for(
    has: Torch, kind: str, asked: str, taken: torch.device
) -> None:
    has(kind, 2)
    assert chosen_device(asked, 1, 2, "auto") == taken


@pytest.mark.parametrize(
    ("kind", "asked", "code", "fields"),
    [
        ("xpu", "cuda", "device-not-here", {"value": "cuda", "usable": "xpu"}),
        ("", "cuda", "device-not-here", {"value": "cuda", "usable": "cpu"}),
        ("mps", "mps", "", {}),
        ("", "tpu", "device-unknown", {"value": "tpu"}),
    ],
)
def test_a_device_that_is_not_there_is_refused_with_what_is(
    has: Torch, kind: str, asked: str, code: str, fields: dict[str, str]
) -> None:
    has(kind, 1)
    with raises(code, **fields):
        chosen_device(asked, 0, 1, "auto")


def test_several_ranks_share_a_gpu_over_gloo_only(has: Torch) -> None:
    has("cuda", 2)
    assert [chosen_device("auto", i, 4, "gloo").index for i in range(4)] == [0, 1, 0, 1]
    with raises("processes-without-gpu", processes=4, count=2, most="2 processes"):
        chosen_device("auto", 0, 4, "auto")


def test_a_wrapper_may_show_each_rank_another_gpu(has: Torch, monkeypatch: pytest.MonkeyPatch) -> None:
    has("cuda", 1)
    with raises("processes-without-gpu", processes=4, count=1):
        chosen_device("auto", 3, 4, "auto")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    assert chosen_device("auto", 3, 4, "auto") == torch.device("cuda", 0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")  # both: then one of them does not work
    with raises("processes-without-gpu", processes=4, count=1):
        chosen_device("auto", 3, 4, "auto")


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_two_ranks_on_one_gpu_are_found_when_they_meet(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], backend: str
) -> None:
    """All call it cuda:0; only its UUID tells."""
    store, gpu = HashStore(), torch.device("cuda", 0)

    def meets(rank: int, uuid: str) -> None:
        monkeypatch.setattr(world, "identity", lambda _: uuid)
        world.check_placement(rank, 4, gpu, backend, store)

    for rank, uuid in ((0, "a"), (1, "b"), (2, ""), (3, "")):
        meets(rank, uuid)
    assert capsys.readouterr().err == ""
    if backend == "nccl":
        with raises("gpu-shared", first="1", second=2, gpu="b (cuda:0)", backend="nccl"):
            meets(2, "b")
    else:
        meets(2, "b")
        assert "ranks 1 and 2 compute on one GPU, b (cuda:0): they take turns" in capsys.readouterr().err


def test_a_rank_goes_to_the_cores_beside_its_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    gone: list[set[int]] = []
    monkeypatch.setattr(world, "identity", lambda _: "a")
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1, 2, 3})
    monkeypatch.setattr("os.sched_setaffinity", lambda _, cores: gone.append(cores))
    for near in ({2, 3, 4, 5}, {0, 1, 2, 3, 4}, {8, 9}, set[int]()):  # the last three: nothing is better
        monkeypatch.setattr(world, "cores_near", lambda _, near=near: near)
        world.go_near(torch.device("cuda", 0))
    assert gone == [{2, 3}]


def test_each_kind_of_device_has_its_backend() -> None:
    assert chosen_backend("auto", CPU) == chosen_backend("gloo", torch.device("cuda", 0)) == "gloo"
    with raises("backend-not-built", value="xccl"):
        chosen_backend("auto", torch.device("xpu", 0))
    assert device_words(CPU) == "cpu"


def test_a_run_on_the_cpu_says_which_gpus_it_leaves_idle_and_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has: Torch
) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    assert overlooked(tmp_path) == ""
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert "was built without CUDA and ROCm, but the machine has 2 NVIDIA GPUs" in overlooked(tmp_path)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert "torch sees no GPU, but the machine has 2 NVIDIA GPUs" in overlooked(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # as asked
    assert overlooked(tmp_path) == ""
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", "6.4")  # NVIDIA's are not for this torch
    assert overlooked(tmp_path) == ""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    (tmp_path / "kfd").touch()
    assert "torch sees no GPU, but the machine has AMD GPUs" in overlooked(tmp_path)
    monkeypatch.setattr(torch.version, "hip", None)
    for path in tmp_path.iterdir():
        path.unlink()
    has("mps", 1)
    assert "does not train on mps" in overlooked(tmp_path)
