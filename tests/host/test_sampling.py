"""What a machine does, second by second: read from /proc, from control groups, and from a stand-in for a GPU driver."""

import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
from tests.host.test_gpus import HOT, Driver

from paceline.host import node_utilization as sampling
from paceline.host.node_utilization import (
    THROTTLE_REASONS,
    GpuReader,
    NodeUtilizationLogger,
    NodeUtilizationReader,
    read_gpus,
)
from paceline.runs.machine import NodeUtilization, decode_record


def test_a_sample_says_what_the_machine_and_its_ranks_use() -> None:
    sampler = NodeUtilizationReader()
    sampler.sample({0: os.getpid(), 1: 2**22 + 1})
    found = sampler.sample({0: os.getpid(), 1: 2**22 + 1})
    assert 0 <= found.cores_busy <= found.cores
    assert 0 < found.memory_bytes < found.memory_total_bytes
    assert [*found.ranks] == [0]  # the other one has ended
    assert found.ranks[0].memory_bytes > 1 << 20


def test_rates_are_differences_and_the_loopback_does_not_count(tmp_path: Path, monkeypatch) -> None:
    def counted(busy: int, sent: int) -> None:
        core = f"{busy} 0 0 1000 0 0 0 500 0 0"  # stolen by other guests: not ours
        (tmp_path / "stat").write_text(f"cpu  0 0\ncpu0 {core}\ncpu1 {core}\ncpu77 {core}\n")
        zeros = " ".join(["0"] * 7)
        (tmp_path / "net" / "dev").write_text(
            f"a\nb\n    lo: 999 {zeros} {sent * 9} {zeros}\n  eth0: 50 {zeros} {sent} {zeros}\n"
        )

    (tmp_path / "net").mkdir()
    now = iter((100.0, 102.0))
    monkeypatch.setattr(sampling, "PROC", tmp_path)
    monkeypatch.setattr(sampling, "quota_used_seconds", lambda: None)
    monkeypatch.setattr(sampling, "usable_cores", lambda: 2)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(sampling.time, "monotonic", lambda: next(now))
    counted(0, 1000)
    sampler = NodeUtilizationReader()
    counted(os.sysconf("SC_CLK_TCK"), 5000)
    found = sampler.sample({})
    assert found.cores_busy == 1.0  # two cores for one second each, of two seconds; the third core is not ours
    assert (found.sent_bytes, found.received_bytes) == (2000, 0)


def test_a_gpu_is_told_with_what_the_driver_knows_and_a_lost_one_hides_nothing() -> None:
    process = SimpleNamespace(pid=11, usedGpuMemory=5 << 20)
    hot: dict[str, Any] = HOT | {
        "nvmlDeviceGetName": "H200", "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=97),
        "nvmlDeviceGetMemoryInfo": SimpleNamespace(used=1 << 30, total=2 << 30), "nvmlDeviceGetPowerUsage": 612_340,
        "nvmlDeviceGetComputeRunningProcesses": [process, process],
    }  # fmt: skip
    found = read_gpus(Driver({}, hot, {"nvmlDeviceGetName": "silent"}))
    lost, known, silent = found.gpus
    assert "does not answer" in lost.held_back
    assert (known.busy, known.watts, known.degrees, known.mhz, known.most_mhz) == (0.97, 612.3, 91.0, 405.0, 1980.0)
    assert known.held_back == THROTTLE_REASONS[pynvml.nvmlClocksThrottleReasonSwThermalSlowdown]
    assert (silent.busy, silent.memory_bytes, silent.held_back) == (None, None, "")
    assert found.memory_bytes_by_pid == {11: 10 << 20}


def test_a_driver_that_never_answers_is_asked_once_and_waited_for_by_nobody(monkeypatch) -> None:
    asked, answer = [], threading.Event()

    def init() -> None:
        asked.append(1)
        answer.wait()

    monkeypatch.setattr(pynvml, "nvmlInit", init)
    reader = GpuReader()
    reader.here = True
    try:
        for _ in range(3):
            assert reader.latest(wait_seconds=0.01).gpus == ()
        assert asked == [1]
    finally:
        monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", lambda: 0)
        answer.set()


def test_the_log_of_a_node_has_its_ranks_and_its_end_ends_it(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("paceline.host.node_utilization.SAMPLE_INTERVAL_SECONDS", 0.01)
    log = NodeUtilizationLogger(tmp_path, 4, {2: os.getpid()})
    while not (tmp_path / "machine-4.jsonl").exists():
        threading.Event().wait(0.01)
    log.close()
    first = decode_record((tmp_path / "machine-4.jsonl").read_bytes().splitlines()[0])
    assert isinstance(first, NodeUtilization)
    assert [*first.ranks] == [2]
    assert "paceline-machine" not in [thread.name for thread in threading.enumerate()]


def test_a_kernel_that_says_nothing_is_no_reason_to_fail(tmp_path: Path, monkeypatch, capfd) -> None:
    monkeypatch.setattr("paceline.host.node_utilization.NodeUtilizationReader", lambda: 1 / 0)
    log = NodeUtilizationLogger(tmp_path, 0, {})
    log._thread.join()
    log.close()
    assert "does not record" in capfd.readouterr().err


@pytest.mark.parametrize("name", ["stat", "net/dev"])
def test_a_missing_file_of_proc_counts_as_nothing(tmp_path: Path, monkeypatch, name: str) -> None:
    monkeypatch.setattr(sampling, "PROC", tmp_path)
    assert NodeUtilizationReader().sample({0: os.getpid()}).sent_bytes == 0
    assert not (tmp_path / name).exists()
