"""The kernel's limits for this process and their use: cores, memory, and processes killed for memory."""

import os
import re
from collections.abc import Iterator
from pathlib import Path

CGROUP_ROOT = Path("/sys/fs/cgroup")
OWN_CGROUP_FILE = Path("/proc/self/cgroup")
MEMINFO_FILE = Path("/proc/meminfo")


def usable_cores() -> int:
    """The number of cores for this process, at least 1: its CPU affinity, limited by a container's quota and by Slurm.

    os.cpu_count() counts all cores of the machine: in a container with 2 of 64 cores, 32 times too many threads.
    """
    # Slurm's grant also applies on clusters that do not bind tasks to cores; with several tasks, that of this task
    task = "SLURM_CPUS_PER_TASK" if os.environ.get("SLURM_STEP_NUM_TASKS", "1") != "1" else "SLURM_CPUS_ON_NODE"
    granted = os.environ.get(task, "")
    slurm = [int(granted)] if granted.isdecimal() else []
    # the quotas of ancestors also apply, so the smallest one counts
    return max(1, int(min([len(os.sched_getaffinity(0)), *slurm, *(quota for quota, _ in _quotas())])))


def quota_used_seconds() -> float | None:
    """CPU seconds used so far by all processes under our tightest quota; None if there is no quota."""
    index = min(_quotas(), default=(0.0, -1))[1]
    if index < 0:
        return None
    folders = _folders("cpu")
    if used := re.search(r"^usage_usec ([0-9]+)$", _read(folders[index] / "cpu.stat"), re.MULTILINE):
        return int(used[1]) / 1e6
    accounts = _folders("cpuacct")  # version 1 has a separate controller, often in the same folder
    used = _read(accounts[index] / "cpuacct.usage") if len(accounts) == len(folders) else ""
    return int(used) / 1e9 if used.isdecimal() else None


def memory_limit() -> int:
    """Bytes of memory of this machine, or the limit of the container if that is less; 0 if unknown."""
    names = ("memory.max", "memory.limit_in_bytes")
    limits = [_read(folder / name) for folder in _folders("memory") for name in names]
    return min([*_meminfo("MemTotal"), *(int(limit) for limit in limits if limit.isdecimal())], default=0)


def free_memory() -> int | None:
    """The bytes that this process may still allocate before the kernel kills for memory; None if unknown.

    This is the available memory of the machine, or of the container if that is less. File pages, which the kernel frees
    on demand, count as free.
    """
    free = _meminfo("MemAvailable")
    for folder in _folders("memory"):
        for limit, used, files in (
            ("memory.max", "memory.current", "inactive_file"),  # version 2
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            numbers = [_read(folder / name) for name in (limit, used)]
            if all(number.isdecimal() for number in numbers):
                cached = re.search(rf"^{files} ([0-9]+)$", _read(folder / "memory.stat"), re.MULTILINE)
                free.append(int(numbers[0]) - int(numbers[1]) + (int(cached[1]) if cached else 0))
    return max(0, min(free)) if free else None


def oom_kills() -> int | None:
    for folder in _folders("memory"):
        for name in ("memory.events", "memory.oom_control"):  # version 2, version 1
            if match := re.search(r"^oom_kill ([0-9]+)$", _read(folder / name), re.MULTILINE):
                return int(match[1])
    return None


def _meminfo(name: str) -> list[int]:
    match = re.search(rf"^{name}:\s*([0-9]+) kB", _read(MEMINFO_FILE), re.MULTILINE)
    return [int(match[1]) << 10] if match else []


def _quotas() -> Iterator[tuple[float, int]]:
    """The CPU quotas of this process in cores, each with the index of its folder."""
    for index, folder in enumerate(_folders("cpu")):
        fields = _read(folder / "cpu.max").split()  # version 2: "max 100000" or "150000 100000" (microseconds)
        fields = fields or [_read(folder / f"cpu.cfs_{name}_us") for name in ("quota", "period")]
        if len(fields) == 2 and all(field.isdecimal() for field in fields):  # "max" or -1: no quota
            yield int(fields[0]) / int(fields[1]), index


def _folders(controller: str) -> list[Path]:
    """The visible folders of this process's cgroup and of its ancestors, innermost first.

    In a container the path may be that of the host, which is not mounted here. The ancestors then end at the mount.
    """
    folders: list[Path] = []
    for line in _read(OWN_CGROUP_FILE).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            mounts = [CGROUP_ROOT / "unified", CGROUP_ROOT]
        elif controller in controllers.split(","):
            mounts = [CGROUP_ROOT / controller, CGROUP_ROOT / controllers]
        else:
            continue
        inside = Path(path.lstrip("/"))
        mount = next((mount for mount in mounts if mount.is_dir()), None)
        folders += [mount / part for part in (inside, *inside.parents) if (mount / part).is_dir()] if mount else []
    return folders


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def threads_per_rank(cores: int, nproc: int) -> int:
    """The cores divided by the number of ranks, at least one. More threads than cores make ranks slower."""
    return max(1, cores // nproc)
