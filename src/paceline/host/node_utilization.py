"""Records the use of this machine and of its GPUs once a second, in machine-<node>.jsonl in the run folder.

The log and each query to a GPU driver run in threads, because a driver may never answer. An error in the log ends the
log with a warning, and the run continues. Without torch.
"""

import os
import signal
import threading
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from paceline.host.cgroup import free_memory, memory_limit, quota_used_seconds, usable_cores
from paceline.host.gpus import call_with_nvml, count_ecc_errors, gpu_handles, query_nvml_or_default
from paceline.host.procfs import PROC, read_process
from paceline.protocol.control import STOP_SIGNALS
from paceline.runs.console import print_to_stderr
from paceline.runs.machine import GpuUtilization, NodeUtilization, RankUtilization, node_log_name
from paceline.runs.writers import SizeLimitedWriter

IDLE_FIELDS = (3, 4)  # of a line of /proc/stat: idle, iowait
# user nice system idle iowait irq softirq; not steal (other machines) and guest (in user already)
NUM_CPU_TIME_FIELDS = 7
LOOPBACK = "lo"
SAMPLE_INTERVAL_SECONDS = 1.0
END_SECONDS = 0.5  # to complete the current sample
STALE_SECONDS = 5.0  # older answers are outdated
CLOCK_SM, CORE_SENSOR = 1, 0  # NVML_CLOCK_SM, NVML_TEMPERATURE_GPU
NVIDIA_DEVICE_FILE = Path("/dev/nvidiactl")
THROTTLE_REASONS = {  # NVML's bits for the reasons of lower clocks
    0x20: "slowed down by its temperature",
    0x40: "slowed down by its temperature, by the hardware",
    0x80: "slowed down by the power supply",
    0x04: "at its power limit",
}


class _MachineCounters(NamedTuple):
    seconds: float  # monotonic
    busy_seconds: float  # of all cores available to this process
    received_bytes: int
    sent_bytes: int


class NodeUtilizationReader:
    def __init__(self) -> None:
        self.gpus = GpuReader()
        self._host, self._cores = os.uname().nodename, usable_cores()
        self._own = {f"cpu{core}" for core in os.sched_getaffinity(0)}
        self._before = self._count()
        self._cpu_before: dict[int, tuple[float, float]] = {}  # pid -> its CPU seconds, and the time of the reading

    def sample(self, pids: Mapping[int, int]) -> NodeUtilization:
        before, now = self._before, self._count()
        self._before, seconds = now, max(now.seconds - before.seconds, 1e-3)
        uses = {rank: use for rank, pid in pids.items() if (use := self.sample_process(pid)) is not None}
        self._cpu_before = {pid: self._cpu_before[pid] for pid in pids.values() if pid in self._cpu_before}
        total = memory_limit()
        return NodeUtilization(
            unix_time=round(time.time(), 3), host=self._host, cores=self._cores,
            cores_busy=round(min(self._cores, max(0.0, now.busy_seconds - before.busy_seconds) / seconds), 3),
            memory_bytes=max(0, total - (free_memory() or 0)), memory_total_bytes=total,
            sent_bytes=round(max(0, now.sent_bytes - before.sent_bytes) / seconds),
            received_bytes=round(max(0, now.received_bytes - before.received_bytes) / seconds), ranks=uses,
            gpus=self.gpus.latest().gpus,
        )  # fmt: skip

    def sample_process(self, pid: int) -> RankUtilization | None:
        process = read_process(pid)
        if process is None or not process.runs:
            return None
        now = time.monotonic()
        cpu_before, time_before = self._cpu_before.get(pid, (process.cpu_seconds, 0.0))
        self._cpu_before[pid] = process.cpu_seconds, now
        cores = max(0.0, process.cpu_seconds - cpu_before) / max(now - time_before, 1e-3)
        return RankUtilization(round(cores, 3), _resident_bytes(pid))

    def _count(self) -> _MachineCounters:
        received, sent = _network()
        quota = quota_used_seconds()
        return _MachineCounters(time.monotonic(), _busy_seconds(self._own) if quota is None else quota, received, sent)


def _resident_bytes(pid: int) -> int:
    with suppress(OSError, ValueError, IndexError):
        return int((PROC / str(pid) / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


def _busy_seconds(cpus: set[str]) -> float:
    ticks = 0
    with suppress(OSError, ValueError):
        for line in (PROC / "stat").read_text().splitlines():
            name, *fields = line.split()
            if name in cpus:
                ticks += sum(int(field) for i, field in enumerate(fields[:NUM_CPU_TIME_FIELDS]) if i not in IDLE_FIELDS)
    return ticks / os.sysconf("SC_CLK_TCK")


def _network() -> tuple[int, int]:
    received = sent = 0
    with suppress(OSError, ValueError, IndexError):
        for line in (PROC / "net" / "dev").read_text().splitlines()[2:]:
            name, _, numbers = line.partition(":")
            if name.strip() != LOOPBACK:
                fields = numbers.split()
                received, sent = received + int(fields[0]), sent + int(fields[8])
    return received, sent


class NodeUtilizationLogger:
    def __init__(self, run_dir: Path, node: int, pids: Mapping[int, int]) -> None:
        self._writer = SizeLimitedWriter(run_dir / node_log_name(node))
        self._pids, self._over = dict(pids), threading.Event()
        self._thread = threading.Thread(target=self._run, name="paceline-machine", daemon=True)
        self._thread.start()

    def write(self, record: msgspec.Struct) -> None:
        self._writer.write(record)

    def close(self) -> None:
        self._over.set()
        self._thread.join(END_SECONDS)
        self._writer.close()

    def _run(self) -> None:
        # signals are for the main thread: it blocks them when its exit code is decided
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        try:
            sampler = NodeUtilizationReader()
            while not self._over.wait(SAMPLE_INTERVAL_SECONDS) and not self._writer.failed:
                self._writer.write(sampler.sample(self._pids))
        except Exception as error:  # for example an unknown format in /proc
            print_to_stderr(f"warning: paceline does not record the use of this node: {type(error).__name__}: {error}")


# ---- GPUs ----


class NodeGpuReading(NamedTuple):
    gpus: tuple[GpuUtilization, ...] = ()
    memory_bytes_by_pid: dict[int, int] = {}  # noqa: RUF012 - never changed


class GpuReader:
    """Queries the driver in a thread, because it may take seconds or never answer. One query at a time."""

    def __init__(self) -> None:
        self._answer, self._answered_seconds = NodeGpuReading(), float("-inf")
        self._thread: threading.Thread | None = None
        self._nvml: Any = None
        self.here = NVIDIA_DEVICE_FILE.exists()  # whether there is a driver

    def latest(self, wait_seconds: float = 0.0) -> NodeGpuReading:
        """Start the next query, wait `wait_seconds` for it, and return the newest answer; empty if it is stale."""
        if not self.here:
            return NodeGpuReading()
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._ask, name="paceline-gpu-use", daemon=True)
            self._thread.start()
        if wait_seconds:
            self._thread.join(wait_seconds)
        is_fresh = time.monotonic() - self._answered_seconds < STALE_SECONDS
        return self._answer if is_fresh else NodeGpuReading()

    def _ask(self) -> None:
        try:
            if self._nvml is None:
                import pynvml

                pynvml.nvmlInit()
                self._nvml = pynvml
            self._answer, self._answered_seconds = read_gpus(self._nvml), time.monotonic()
        except Exception:  # the driver is missing or has a different version
            self._answer = NodeGpuReading()


def read_gpus(nvml: Any) -> NodeGpuReading:
    """The state of all GPUs; `nvml` is an initialised pynvml. A lost GPU does not hide the others."""
    gpus: list[GpuUtilization] = []
    memory_of: dict[int, int] = {}
    for index, handle, lost in gpu_handles(nvml):
        if lost:
            gpus.append(GpuUtilization(index, held_back=f"does not answer: {lost}"))
            continue
        gpus.append(_use(nvml, index, handle))
        with suppress(nvml.NVMLError):
            for process in nvml.nvmlDeviceGetComputeRunningProcesses(handle):
                memory_of[int(process.pid)] = memory_of.get(int(process.pid), 0) + int(process.usedGpuMemory or 0)
    return NodeGpuReading(tuple(gpus), memory_of)


def _use(nvml: Any, index: int, handle: Any) -> GpuUtilization:
    memory = query_nvml_or_default(nvml, lambda: nvml.nvmlDeviceGetMemoryInfo(handle), None)
    return GpuUtilization(
        index=index,
        name=query_nvml_or_default(nvml, lambda: str(nvml.nvmlDeviceGetName(handle)), ""),
        busy=query_nvml_or_default(nvml, lambda: int(nvml.nvmlDeviceGetUtilizationRates(handle).gpu) / 100, None),
        memory_bytes=int(memory.used) if memory is not None else None,
        memory_total_bytes=int(memory.total) if memory is not None else None,
        watts=query_nvml_or_default(nvml, lambda: round(int(nvml.nvmlDeviceGetPowerUsage(handle)) / 1000, 1), None),
        degrees=query_nvml_or_default(nvml, lambda: float(nvml.nvmlDeviceGetTemperature(handle, CORE_SENSOR)), None),
        mhz=query_nvml_or_default(nvml, lambda: float(nvml.nvmlDeviceGetClockInfo(handle, CLOCK_SM)), None),
        most_mhz=query_nvml_or_default(nvml, lambda: float(nvml.nvmlDeviceGetMaxClockInfo(handle, CLOCK_SM)), None),
        held_back=" and ".join(query_nvml_or_default(nvml, lambda: throttle_reasons(nvml, handle), [])),
    )


def query_gpu_problems(pids: Collection[int], *, wait_seconds: float = 0.0) -> dict[int, str]:
    """The problems of the GPUs that these processes use, by pid. If the driver is slow, a thread adds them later."""
    problems: dict[int, str] = {}

    def ask() -> None:
        problems.update(call_with_nvml(lambda nvml: find_gpu_problems(pids, nvml), {}))

    if pids and NVIDIA_DEVICE_FILE.exists():
        thread = threading.Thread(target=ask, name="paceline-gpus", daemon=True)
        thread.start()
        thread.join(wait_seconds)
    return problems


def find_gpu_problems(pids: Collection[int], nvml: Any) -> dict[int, str]:
    problems: dict[int, str] = {}
    for index, gpu, lost in gpu_handles(nvml):
        with suppress(nvml.NVMLError):
            if lost:
                continue
            users = {int(process.pid) for process in nvml.nvmlDeviceGetComputeRunningProcesses(gpu)}
            reasons = query_nvml_or_default(nvml, partial(_slowed, nvml, gpu), [])
            if errors := count_ecc_errors(nvml, gpu):
                reasons = [*reasons, f"{errors:,} uncorrectable memory errors"]
            for pid in users & {*pids}:
                shared = [f"shared with process {', '.join(map(str, sorted(users - {pid})))}"] if users - {pid} else []
                if reasons or shared:
                    problems[pid] = f"GPU {index}: {'; '.join([*reasons, *shared])}"
    return problems


def throttle_reasons(nvml: Any, gpu: Any) -> list[str]:
    reasons = int(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(gpu))
    return [text for bit, text in THROTTLE_REASONS.items() if reasons & bit]


def _slowed(nvml: Any, gpu: Any) -> list[str]:
    if not (reasons := throttle_reasons(nvml, gpu)):
        return []
    now_mhz, max_mhz = nvml.nvmlDeviceGetClockInfo(gpu, CLOCK_SM), nvml.nvmlDeviceGetMaxClockInfo(gpu, CLOCK_SM)
    degrees = nvml.nvmlDeviceGetTemperature(gpu, CORE_SENSOR)
    return [f"{' and '.join(reasons)} ({now_mhz:,} of {max_mhz:,} MHz, {degrees} °C)"]
