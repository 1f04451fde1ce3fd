"""The kernel's limits for this process and their use: cores, memory, and processes killed for memory."""

import os
import re
from collections.abc import Mapping
from pathlib import Path

CGROUP_ROOT = Path("/sys/fs/cgroup")
OWN_CGROUP_FILE = Path("/proc/self/cgroup")
MEMINFO_FILE = Path("/proc/meminfo")


def usable_cores(root: Path = CGROUP_ROOT, own: Path = OWN_CGROUP_FILE, env: Mapping[str, str] = os.environ) -> int:
    """The number of cores for this process, at least 1: its CPU affinity, limited by a container's quota and by Slurm.

    os.cpu_count() counts all cores of the machine: in a container with 2 of 64 cores, 32 times too many threads.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    # the quotas of ancestors also apply, so the smallest one counts
    quotas = [quota for folder in _folders("cpu", root, own) if (quota := _quota(folder)) is not None]
    # Slurm's grant also applies on clusters that do not bind tasks to cores; with several tasks, that of this task
    task = "SLURM_CPUS_PER_TASK" if env.get("SLURM_STEP_NUM_TASKS", "1") != "1" else "SLURM_CPUS_ON_NODE"
    granted = env.get(task, "")
    slurm = [float(granted)] if granted.isdecimal() else []
    return max(1, int(min([float(cores), *quotas, *slurm])))


def quota_used_seconds(root: Path = CGROUP_ROOT, own: Path = OWN_CGROUP_FILE) -> float | None:
    """CPU seconds used so far by all processes under our tightest quota; None if there is no quota."""
    folders = _folders("cpu", root, own)
    quotas = [(quota, index) for index, folder in enumerate(folders) if (quota := _quota(folder)) is not None]
    if not quotas:
        return None
    index = min(quotas)[1]
    if used := re.search(r"^usage_usec ([0-9]+)$", _read(folders[index] / "cpu.stat"), re.MULTILINE):
        return int(used[1]) / 1e6
    accounts = _folders("cpuacct", root, own)  # version 1 has a separate controller, often in the same folder
    used = _read(accounts[index] / "cpuacct.usage").strip() if len(accounts) == len(folders) else ""
    return int(used) / 1e9 if used.isdecimal() else None


def memory_limit(root: Path = CGROUP_ROOT, own: Path = OWN_CGROUP_FILE, memory: Path = MEMINFO_FILE) -> int:
    """Bytes of memory of this machine, or the limit of the container if that is less; 0 if unknown."""
    match = re.search(r"^MemTotal:\s*([0-9]+) kB", _read(memory), re.MULTILINE)
    limits = [int(match[1]) << 10] if match else []
    names = ("memory.max", "memory.limit_in_bytes")
    texts = [_read(folder / name).strip() for folder in _folders("memory", root, own) for name in names]
    return min([*limits, *(int(text) for text in texts if text.isdecimal())], default=0)


def free_memory(root: Path = CGROUP_ROOT, own: Path = OWN_CGROUP_FILE, memory: Path = MEMINFO_FILE) -> int | None:
    """The bytes that this process may still allocate before the kernel kills for memory; None if unknown.

    This is the available memory of the machine, or of the container if that is less. File pages, which the kernel frees
    on demand, count as free.
    """
    match = re.search(r"^MemAvailable:\s*([0-9]+) kB", _read(memory), re.MULTILINE)
    free = [int(match[1]) << 10] if match else []
    for folder in _folders("memory", root, own):
        for limit, used, files in (
            ("memory.max", "memory.current", "inactive_file"),  # version 2
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            numbers = [_read(folder / name).strip() for name in (limit, used)]
            if all(number.isdecimal() for number in numbers):
                cached = re.search(rf"^{files} ([0-9]+)$", _read(folder / "memory.stat"), re.MULTILINE)
                free.append(int(numbers[0]) - int(numbers[1]) + (int(cached[1]) if cached else 0))
    return max(0, min(free)) if free else None


def oom_kills(root: Path = CGROUP_ROOT, own: Path = OWN_CGROUP_FILE) -> int | None:
    for folder in _folders("memory", root, own):
        for name in ("memory.events", "memory.oom_control"):  # version 2, version 1
            for line in _read(folder / name).splitlines():
                if line.startswith("oom_kill "):
                    return int(line.split()[1])
    return None


def _quota(folder: Path) -> float | None:
    fields = _read(folder / "cpu.max").split()  # version 2: "max 100000" or "150000 100000" (microseconds)
    if not fields:
        fields = [_read(folder / "cpu.cfs_quota_us").strip(), _read(folder / "cpu.cfs_period_us").strip()]
    if len(fields) != 2 or not fields[0].isdigit() or not fields[1].isdigit():  # "max", -1 or no such file: no quota
        return None
    return int(fields[0]) / int(fields[1])


def _folders(controller: str, root: Path, own_cgroup: Path) -> list[Path]:
    """The visible folders of this process's cgroup and of its ancestors, innermost first.

    In a container the path may be that of the host, which is not mounted here. The ancestors then end at the mount.
    """
    folders: list[Path] = []
    for line in _read(own_cgroup).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            mounts = [root / "unified", root]
        elif controller in controllers.split(","):
            mounts = [root / controller, root / controllers]
        else:
            continue
        inside = Path(path.lstrip("/"))
        for mount in mounts:
            if mount.is_dir():
                folders += [mount / part for part in (inside, *inside.parents) if (mount / part).is_dir()]
                break
    return folders


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def threads_per_rank(cores: int, nproc: int) -> int:
    """The cores divided by the number of ranks, at least one. More threads than cores make ranks slower."""
    return max(1, cores // nproc)
