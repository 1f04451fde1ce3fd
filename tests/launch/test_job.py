from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from paceline.contract.job import Allocation, Host, JobSpec, NodePlan
from paceline.contract.windows import Windows
from paceline.host.cgroup import oom_kills, threads_per_rank, usable_cores
from paceline.launch.plan import describe, local, node_plan

GOLDEN = """\
# agent 0
/usr/bin/python3 -P -m paceline.agent <<'PLAN'
{
  "argv": [
    "python",
    "-m",
    "paceline",
    "train",
    "it's"
  ],
  "nproc": 2,
  "run_id": "5f",
  "threads": 4,
  "port": 29500,
  "attempt_dir": "/runs/a/attempt-0",
  "python": "/usr/bin/python3",
  "ranks": {
    "master_port": 29500
  }
}
PLAN
"""


def test_local_plan() -> None:
    job = JobSpec(
        ("python", "-m", "paceline", "train", "it's"),
        nproc=2,
        run_id="5f",
        threads=4,
        attempt_dir="/runs/a/attempt-0",
        port=29500,
        python="/usr/bin/python3",
    )
    plan = local(job)
    assert describe(plan) == GOLDEN
    assert msgspec.json.decode(msgspec.json.encode(plan.nodes[0]), type=NodePlan) == plan.nodes[0]


def test_an_agent_receives_the_job_as_it_is_and_the_facts_of_its_node() -> None:
    job = JobSpec(
        ("x",), 2, "5f", 1, stop_grace_seconds=2.0, stall_after=Windows.parse("6"), nodes=7, min_nodes=6, port=29500,
        env={"A": "B"}, hosts=(Host("n1"), Host("n2", 2222, 3)), slurm=Allocation(minutes=5), ssh=("ssh", "-v"),
    )  # fmt: skip
    for node, nproc in ((0, 2), (1, 3)):
        plan = node_plan(job, node, nproc=job.hosts[node].slots or 0, head=("n1",))
        received = msgspec.json.decode(msgspec.json.encode(plan), type=NodePlan)
        assert received == plan and (received.node, received.nproc, received.head) == (node, nproc, ("n1",))
        of_the_job = {name: getattr(received, name) for name in JobSpec.__struct_fields__}
        assert JobSpec(**{**of_the_job, "nproc": job.nproc}) == job


def test_a_port_is_the_ranks_on_one_node_and_the_head_agents_on_several() -> None:
    alone, several = (node_plan(JobSpec(("x",), 2, port=29500, nodes=nodes)) for nodes in (1, 2))
    assert (alone.ranks.master_port, alone.head_ports) == (29500, ())
    assert (several.ranks.master_port, several.head_ports) == (0, (29500,))


@pytest.mark.parametrize(("cores", "nproc", "threads"), [(8, 2, 4), (2, 4, 1), (7, 2, 3)])
def test_threads_per_rank(cores: int, nproc: int, threads: int) -> None:
    assert threads_per_rank(cores, nproc) == threads


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


def test_the_room_imports_nothing_heavy() -> None:
    room = Path(sys.modules["paceline.launch.plan"].__file__ or "").parent
    files = [path.relative_to(room).with_suffix("") for path in room.rglob("*.py")]
    light = [path for path in files if path.name != "__init__"]
    imports = ", ".join(f"paceline.launch.{'.'.join(path.parts)}" for path in light)
    heavy = "{'torch', 'numpy', 'rich', 'psutil', 'asyncio'}"
    code = f"import sys, {imports}; sys.exit(str({heavy} & set(sys.modules) or ''))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=False)
    assert done.stderr.strip() == ""
