"""What this process is granted: by Slurm, where it does not bind tasks; and how much memory is left."""

import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from paceline.host import cgroup

MIB = 1 << 20
SLURM_VARIABLES = ("SLURM_CPUS_ON_NODE", "SLURM_STEP_NUM_TASKS", "SLURM_CPUS_PER_TASK")


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without limits: its files `own`, `meminfo` and the folder `fs` replace those of the kernel."""
    for name in SLURM_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for constant, name in (("CGROUP_ROOT", "fs"), ("OWN_CGROUP_FILE", "own"), ("MEMINFO_FILE", "meminfo")):
        monkeypatch.setattr(cgroup, constant, tmp_path / name)
    (tmp_path / "fs").mkdir()
    return tmp_path


def write_group(machine: Path, group: str, files: Mapping[str, object]) -> None:
    (machine / "own").write_text(group + "\n")
    for name, content in files.items():
        (machine / "fs" / name).parent.mkdir(parents=True, exist_ok=True)
        (machine / "fs" / name).write_text(f"{content}\n")


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
def test_slurms_grant_counts_where_it_is_smaller(
    machine: Path, monkeypatch: pytest.MonkeyPatch, env: dict[str, str], cores: int | None
) -> None:
    everything = cgroup.usable_cores()
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert cgroup.usable_cores() == (cores or everything)


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
    machine: Path, group: str, files: dict[str, object], free_mib: int
) -> None:
    (machine / "meminfo").write_text(f"MemTotal: 9999999 kB\nMemAvailable:   {1000 << 10} kB\n")
    write_group(machine, group, files)
    assert cgroup.free_memory() == free_mib * MIB


@pytest.mark.usefixtures("machine")
def test_a_kernel_that_says_nothing_of_memory() -> None:
    assert cgroup.free_memory() is None


def test_threads_per_rank() -> None:
    assert [cgroup.threads_per_rank(cores, nproc) for cores, nproc in ((8, 2), (2, 4), (7, 2))] == [4, 1, 3]


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
def test_usable_cores(machine: Path, group: str, files: dict[str, str], quota: int | None) -> None:
    write_group(machine, group, files)
    allowed = len(os.sched_getaffinity(0))
    assert cgroup.usable_cores() == (allowed if quota is None else min(allowed, quota))


def test_oom_kills_are_counted_from_the_cgroup(machine: Path) -> None:
    write_group(machine, "4:memory:/a\n0::/", {"memory/a/memory.usage_in_bytes": 0})
    assert cgroup.oom_kills() is None
    write_group(machine, "4:memory:/a", {"memory/a/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 3"})
    assert cgroup.oom_kills() == 3


def test_in_a_container_its_own_quota_and_limit_count(machine: Path) -> None:
    (machine / "meminfo").write_text("MemTotal: 4096 kB\n")
    write_group(machine, "0::/a/b", {"a/b/cgroup.type": "domain"})
    assert cgroup.quota_used_seconds() is None
    assert cgroup.memory_limit() == 4 << 20
    quota = {"a/cpu.max": "150000 100000", "a/cpu.stat": "usage_usec 2500000\nuser_usec 1"}
    write_group(machine, "0::/a/b", {**quota, "a/b/memory.max": 1 << 20})
    assert cgroup.quota_used_seconds() == 2.5
    assert cgroup.memory_limit() == 1 << 20
    # version 1, each controller mounted for itself
    quota = {"cpu/a/cpu.cfs_quota_us": "100000", "cpu/a/cpu.cfs_period_us": "100000"}
    write_group(machine, "2:cpuacct:/a\n1:cpu:/a", {**quota, "cpuacct/a/cpuacct.usage": "7000000000"})
    assert cgroup.quota_used_seconds() == 7.0
