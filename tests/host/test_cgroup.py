"""What this process is granted: by Slurm, where it does not bind tasks; and how much memory is left."""

import os
from pathlib import Path

import pytest

from paceline.host.cgroup import free_memory, oom_kills, threads_per_rank, usable_cores

MIB = 1 << 20


@pytest.mark.parametrize(
    ("env", "cores"),
    [
        ({}, None),
        ({"SLURM_CPUS_ON_NODE": "1"}, 1),  # an agent, or a batch script: all that the job has on this node
        ({"SLURM_CPUS_ON_NODE": "1", "SLURM_STEP_NUM_TASKS": "1"}, 1),
        ({"SLURM_CPUS_ON_NODE": "64", "SLURM_STEP_NUM_TASKS": "4", "SLURM_CPUS_PER_TASK": "1"}, 1),  # a rank of four
        ({"SLURM_CPUS_ON_NODE": "1", "SLURM_STEP_NUM_TASKS": "4"}, None),  # nobody has said how many are its own
        ({"SLURM_CPUS_ON_NODE": "1(x2)"}, None),
    ],
)
def test_slurms_grant_counts_where_it_is_smaller(tmp_path: Path, env: dict[str, str], cores: int | None) -> None:
    everything = usable_cores(tmp_path, tmp_path / "none", {})
    assert usable_cores(tmp_path, tmp_path / "none", env) == (cores or everything)


@pytest.mark.parametrize(
    ("group", "files", "free_mib"),
    [
        ("0::/", {}, 1000),  # what the machine has
        ("0::/a", {"a/memory.max": 600 * MIB, "a/memory.current": 500 * MIB}, 100),
        ("0::/a", {"a/memory.max": 600 * MIB, "a/memory.current": 500 * MIB,
                   "a/memory.stat": f"inactive_file {300 * MIB}"}, 400),  # file pages count as free
        ("0::/a/b", {"a/memory.max": 600 * MIB, "a/memory.current": 599 * MIB, "a/b/memory.max": "max"}, 1),
        ("0::/a", {"a/memory.max": "max", "a/memory.current": 5 * MIB}, 1000),
        ("0::/a", {"a/memory.max": 100 * MIB, "a/memory.current": 101 * MIB}, 0),
        ("3:memory:/a", {"memory/a/memory.limit_in_bytes": 300 * MIB,
                         "memory/a/memory.usage_in_bytes": 100 * MIB}, 200),
    ],
)  # fmt: skip
def test_free_memory_is_the_machines_or_what_a_containers_limit_leaves(
    tmp_path: Path, group: str, files: dict[str, object], free_mib: int
) -> None:
    own, machine, root = tmp_path / "own", tmp_path / "meminfo", tmp_path / "fs"
    own.write_text(group + "\n")
    machine.write_text(f"MemTotal: 9999999 kB\nMemAvailable:   {1000 << 10} kB\n")
    root.mkdir()
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{content}\n")
    assert free_memory(root, own, machine) == free_mib * MIB


def test_a_kernel_that_says_nothing_of_memory(tmp_path: Path) -> None:
    assert free_memory(tmp_path, tmp_path / "none", tmp_path / "none") is None


def test_threads_per_rank() -> None:
    assert [threads_per_rank(cores, nproc) for cores, nproc in ((8, 2), (2, 4), (7, 2))] == [4, 1, 3]


@pytest.mark.parametrize(
    ("group", "files", "quota"),
    [
        ("0::/", {"cpu.max": "100000 100000"}, 1),
        ("0::/", {"cpu.max": "50000 100000"}, 1),  # half a core is still one worker thread
        ("0::/", {"cpu.max": "max 100000"}, None),
        ("0::/a/b", {"a/b/cpu.max": "max 100000", "a/cpu.max": "100000 100000"}, 1),  # an ancestor's quota holds too
        ("4:cpu,cpuacct:/", {"cpu/cpu.cfs_quota_us": "100000", "cpu/cpu.cfs_period_us": "100000"}, 1),
        ("4:cpu,cpuacct:/", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
        ("4:cpu:/docker/77", {"cpu/cpu.cfs_quota_us": "100000", "cpu/cpu.cfs_period_us": "100000"}, 1),  # not mounted
        ("9:name=systemd:/", {}, None),
    ],
)
def test_usable_cores(tmp_path: Path, group: str, files: dict[str, str], quota: int | None) -> None:
    own, root = tmp_path / "cgroup", tmp_path / "fs"
    own.write_text(group + "\n")
    root.mkdir()
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text + "\n")
    allowed = len(os.sched_getaffinity(0))
    assert usable_cores(root, own) == (allowed if quota is None else min(allowed, quota))


def test_oom_kills_are_counted_from_the_cgroup(tmp_path: Path) -> None:
    own = tmp_path / "cgroup"
    own.write_text("4:memory:/a\n0::/\n")
    (tmp_path / "memory/a").mkdir(parents=True)
    assert oom_kills(tmp_path, own) is None
    (tmp_path / "memory/a/memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 3\n")
    assert oom_kills(tmp_path, own) == 3
