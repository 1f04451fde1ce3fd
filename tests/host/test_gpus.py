"""GPUs counted and described by drivers that do not answer everything, and by the kernel alone."""

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
from tests.errors import raises
from tests.host.test_gpu_trouble import Driver, running

from paceline.cli import train
from paceline.cli.options import check_gpus, nproc_auto, usable_gpus
from paceline.host import gpus
from paceline.host.gpus import cores_near, count_gpus, list_gpus, select_mig_instance

VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
H100 = running(7) | {
    "nvmlDeviceGetName": "H100",
    "nvmlDeviceGetMemoryInfo": SimpleNamespace(total=80 << 30, used=1 << 30),
    "nvmlDeviceGetTotalEccErrors": 2,
}
UNIFIED = {"nvmlDeviceGetName": "GB10"}  # its memory is the CPU's: every other question is "not supported"
LOST: dict[str, Any] = {}


class Machine(Driver):
    """With a driver that is there."""

    NVML_P2P_CAPS_INDEX_NVLINK = pynvml.NVML_P2P_CAPS_INDEX_NVLINK

    def nvmlInit(self) -> None:  # noqa: N802 - the library's
        """Nothing to do."""

    nvmlShutdown = nvmlInit  # noqa: N815

    def nvmlSystemGetDriverVersion(self) -> str:  # noqa: N802
        return "580"


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine without GPUs and variables, whose folders of the kernel are made up."""
    for name in VISIBLE:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(gpus, "DEV", tmp_path)
    monkeypatch.setattr(gpus, "KFD", tmp_path / "nodes")
    return tmp_path


def driver(monkeypatch: pytest.MonkeyPatch, *found: dict[str, Any]) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", Machine(*found))


def amd(folder: Path, *ids: int) -> None:
    (folder / "kfd").touch()
    for node, number in enumerate(ids):
        (folder / "nodes" / str(node)).mkdir(parents=True)
        (folder / "nodes" / str(node) / "gpu_id").write_text(f"{number}\n")


def test_a_lost_gpu_and_one_that_does_not_say_its_memory_hide_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    driver(monkeypatch, H100, LOST, UNIFIED)
    first, lost, unified = list_gpus()
    assert (first.name, first.memory, first.processes, first.ecc_errors) == ("H100", 80 << 30, (7,), 2)
    assert lost.lost == "GPU is lost" and lost.index == 1
    assert (unified.name, unified.memory, unified.lost, unified.index) == ("GB10", 0, "", 2)
    assert unified.links == ("?", "?", "-")
    assert count_gpus() == 3
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,2")
    assert count_gpus() == usable_gpus("cuda") == nproc_auto("auto") == 2


def test_amds_gpus_are_counted_by_the_kernel(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver(monkeypatch)
    with raises("no-cuda"):
        usable_gpus("cuda")
    amd(bare, 0, 51234, 51235)  # a CPU and two GPUs
    assert count_gpus() == usable_gpus("cuda") == 2
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "1")
    assert count_gpus() == 1


def test_what_only_the_workers_can_count_is_not_refused(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver(monkeypatch)
    amd(bare)  # a container that shows no nodes
    assert usable_gpus("cuda") is usable_gpus("auto") is usable_gpus("xpu") is None
    check_gpus("--nproc 8", 8, usable_gpus("cuda"))
    with raises("gpus-uncountable"):
        nproc_auto("cuda")


def test_ranks_may_share_a_gpu_over_gloo_only() -> None:
    check_gpus("--nproc 2", 2, 1, "gloo")
    with raises("too-few-gpus", nproc=2, gpus=1, processes="1 process"):
        check_gpus("--nproc 2", 2, 1, "auto")


def cut(*parts: str) -> dict[str, Any]:
    """A GPU in MIG mode; its second place is free."""
    places = {0: parts[0], 2: parts[1]}

    def part(_: Any, number: int) -> dict[str, Any]:
        if number not in places:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return {"nvmlDeviceGetUUID": places[number]}

    return {"nvmlDeviceGetMigMode": [1, 1], "nvmlDeviceGetMaxMigDeviceCount": 7, "part": part}


class Cut(Machine):
    """Whose parts are asked for by number."""

    def nvmlDeviceGetMigDeviceHandleByIndex(self, gpu: Any, number: int) -> Any:  # noqa: N802
        return gpu["part"](gpu, number)


def test_the_parts_of_a_gpu_count_as_gpus_and_each_rank_is_shown_its_own(
    bare: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (bare / "nvidiactl").touch()
    monkeypatch.setitem(sys.modules, "pynvml", Cut(cut("MIG-a", "MIG-b"), cut("MIG-c", "MIG-d")))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-d")  # so that it is put back
    select_mig_instance(0, 1)
    assert count_gpus() == 1 and os.environ["CUDA_VISIBLE_DEVICES"] == "MIG-d"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert count_gpus() == 4
    select_mig_instance(2, 4)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "MIG-c"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-b, MIG-d")
    select_mig_instance(1, 2)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "MIG-d"
    monkeypatch.setitem(sys.modules, "pynvml", Cut(H100, LOST))  # whole ones
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    select_mig_instance(1, 2)
    assert count_gpus() == 2 and "CUDA_VISIBLE_DEVICES" not in os.environ


def test_the_cores_beside_a_gpu_are_those_of_its_numa_node(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Found(Machine):
        def nvmlDeviceGetHandleByUUID(self, uuid: str) -> Any:  # noqa: N802
            if uuid != "GPU-1234":
                raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
            return {"nvmlDeviceGetPciInfo": SimpleNamespace(busId="00000000:3B:00.0")}

    monkeypatch.setitem(sys.modules, "pynvml", Found())
    monkeypatch.setattr(gpus, "PCI_DEVICES_FOLDER", bare)
    assert cores_near("1234") == cores_near("77") == cores_near("") == set()
    (bare / "0000:3b:00.0").mkdir()
    (bare / "0000:3b:00.0" / "local_cpulist").write_text("0-2,8,10-11\n")
    assert cores_near("1234") == {0, 1, 2, 8, 10, 11}


@pytest.mark.parametrize(
    ("words", "count", "lines"),
    [([], 2, 1), (["--strategy", "dp"], 2, 0), (["--device", "cpu"], 2, 0), ([], 1, 0), (["--nproc", "auto"], 2, 0)],
)
def test_train_says_how_to_use_all_gpus(
    bare: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    words: list[str],
    count: int,
    lines: int,
) -> None:
    driver(monkeypatch, *[H100] * count)
    monkeypatch.setattr(train, "_train_here", lambda config: (Path(), 0))
    monkeypatch.setattr(train, "_launch", lambda job, config: (Path(), 0))
    assert train.main(["mnist-cnn", *words]) == 0
    assert capfd.readouterr().err.count("--nproc auto") == lines
