"""GPUs by drivers that do not answer everything: which are held back, how many there are, and what they are."""

import os
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
from tests.errors import raises
from tests.rendered import rendered

from paceline.cli import train
from paceline.cli.options import check_enough_gpus, resolve_auto_nproc, usable_gpus
from paceline.guard.report import format_report
from paceline.host import gpus
from paceline.host import node_utilization as gpu_trouble
from paceline.host.gpus import count_gpus, cpu_cores_near_gpu, list_gpus, select_mig_instance
from paceline.host.node_utilization import find_gpu_problems, query_gpu_problems
from paceline.protocol.evidence import Diagnosis, DiagnosisKind, Evidence


class Driver:
    """Four GPUs, each a dictionary; asked for what is not in it, or about a lost one, it raises."""

    NVMLError = pynvml.NVMLError
    NVML_MEMORY_ERROR_TYPE_UNCORRECTED = pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED
    NVML_VOLATILE_ECC = pynvml.NVML_VOLATILE_ECC

    def __init__(self, *gpus: dict[str, Any]) -> None:
        self._gpus = gpus

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802 - the library's
        return len(self._gpus)

    def __getattr__(self, name: str) -> Any:
        def ask(gpu: Any, *kind: int) -> Any:
            told = self._gpus[gpu] if isinstance(gpu, int) else gpu
            if name == "nvmlDeviceGetHandleByIndex" and told:
                return told
            if name not in told:
                raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
            return told[name]

        return ask


def running(*pids: int) -> dict[str, Any]:
    return {"nvmlDeviceGetComputeRunningProcesses": [SimpleNamespace(pid=pid) for pid in pids]}


HOT = running(11) | {
    "nvmlDeviceGetCurrentClocksThrottleReasons": pynvml.nvmlClocksThrottleReasonSwThermalSlowdown,
    "nvmlDeviceGetClockInfo": 405, "nvmlDeviceGetMaxClockInfo": 1980, "nvmlDeviceGetTemperature": 91,
}  # fmt: skip
SHARED = running(12, 4711) | {"nvmlDeviceGetTotalEccErrors": 3, "nvmlDeviceGetCurrentClocksThrottleReasons": 1}
HEALTHY = running(13) | {"nvmlDeviceGetTotalEccErrors": 0, "nvmlDeviceGetCurrentClocksThrottleReasons": 1}  # idle


def test_each_cause_is_told_of_its_process_and_a_lost_gpu_hides_nothing() -> None:
    found = find_gpu_problems([11, 12, 13, 14], Driver({}, HOT, SHARED, HEALTHY))
    assert found.keys() == {11, 12}
    rendered(found[pid] for pid in (11, 12))


def test_the_bits_are_the_drivers() -> None:
    assert set(gpu_trouble.THROTTLE_REASONS) == {
        pynvml.nvmlClocksThrottleReasonSwThermalSlowdown, pynvml.nvmlClocksThrottleReasonHwThermalSlowdown,
        pynvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown, pynvml.nvmlClocksThrottleReasonSwPowerCap,
    }  # fmt: skip
    assert (pynvml.NVML_CLOCK_SM, pynvml.NVML_TEMPERATURE_GPU) == (1, 0)


def test_without_a_driver_nobody_is_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setattr(gpu_trouble, "NVIDIA_DEVICE_FILE", tmp_path / "none")
    monkeypatch.setattr(gpu_trouble.threading, "Thread", None)  # would fail if it were begun
    assert query_gpu_problems([1]) == {}


def test_who_waits_for_the_driver_has_its_answer_and_nobody_waits_for_ever(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    driver: Any = Driver(HOT)
    entered, never = threading.Event(), threading.Event()
    driver.nvmlInit = lambda: never.wait(0.2)  # it takes its time
    driver.nvmlShutdown = lambda: None
    monkeypatch.setattr(gpu_trouble, "NVIDIA_DEVICE_FILE", tmp_path)
    monkeypatch.setitem(sys.modules, "pynvml", driver)
    assert query_gpu_problems([11], wait_seconds=50).keys() == {11}

    def hang() -> None:
        entered.set()
        never.wait()

    driver.nvmlInit = hang
    try:
        assert query_gpu_problems([11], wait_seconds=0.05) == {}
        assert entered.wait(50)
    finally:
        never.set()


def test_a_diagnosis_says_it() -> None:
    ranks = [Evidence(0, "n1", 1), Evidence(1, "n1", 2, gpu="GPU 1: hot")]
    shown = format_report(Diagnosis(DiagnosisKind.BEHIND, (1,)), ranks, waited_seconds=9, folder="", run="")
    assert "rank 1's GPU 1: hot" in shown


# ---- counted and described ------------------------------------------------------------------------------------------

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
    assert count_gpus() == usable_gpus("cuda") == resolve_auto_nproc("auto") == 2


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
    check_enough_gpus("--nproc 8", 8, usable_gpus("cuda"))
    with raises("gpus-uncountable"):
        resolve_auto_nproc("cuda")


def test_ranks_may_share_a_gpu_over_gloo_only() -> None:
    check_enough_gpus("--nproc 2", 2, 1, "gloo")
    with raises("too-few-gpus", nproc=2, gpus=1, processes="1 process"):
        check_enough_gpus("--nproc 2", 2, 1, "auto")


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
    assert cpu_cores_near_gpu("1234") == cpu_cores_near_gpu("77") == cpu_cores_near_gpu("") == set()
    (bare / "0000:3b:00.0").mkdir()
    (bare / "0000:3b:00.0" / "local_cpulist").write_text("0-2,8,10-11\n")
    assert cpu_cores_near_gpu("1234") == {0, 1, 2, 8, 10, 11}


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
