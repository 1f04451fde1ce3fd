from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec

from paceline.launch.plan import format_plan, node_plan, plan_local
from paceline.protocol.job import Allocation, HangTimeout, Host, JobSpec, NodePlan

GOLDEN = """\
# agent 0
/usr/bin/python3 -P -m paceline.launch.agent <<'PLAN'
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
    plan = plan_local(job)
    assert format_plan(plan) == GOLDEN
    assert msgspec.json.decode(msgspec.json.encode(plan.nodes[0]), type=NodePlan) == plan.nodes[0]


def test_an_agent_receives_the_job_as_it_is_and_the_facts_of_its_node() -> None:
    job = JobSpec(
        ("x",), 2, "5f", 1, ssh=("ssh", "-v"), hang_timeout=HangTimeout.parse("6"), nodes=7, min_nodes=6, port=29500,
        env={"A": "B"}, hosts=(Host("n1"), Host("n2", 2222, 3)), slurm=Allocation(minutes=5), grace_period_seconds=2.0,
    )  # fmt: skip
    for node, nproc in ((0, 2), (1, 3)):
        plan = node_plan(job, node, nproc=job.hosts[node].slots or 0, node0=("n1",))
        received = msgspec.json.decode(msgspec.json.encode(plan), type=NodePlan)
        assert received == plan and (received.node, received.nproc, received.node0) == (node, nproc, ("n1",))
        of_the_job = {name: getattr(received, name) for name in JobSpec.__struct_fields__}
        assert JobSpec(**{**of_the_job, "nproc": job.nproc}) == job


def test_a_port_is_the_ranks_on_one_node_and_the_head_agents_on_several() -> None:
    alone, several = (node_plan(JobSpec(("x",), 2, port=29500, nodes=nodes)) for nodes in (1, 2))
    assert (alone.ranks.master_port, alone.node0_ports) == (29500, ())
    assert (several.ranks.master_port, several.node0_ports) == (0, (29500,))


def test_the_room_imports_nothing_heavy() -> None:
    room = Path(sys.modules["paceline.launch.plan"].__file__ or "").parent
    files = [path.relative_to(room).with_suffix("") for path in room.rglob("*.py")]
    light = [path for path in files if path.name not in ("__init__", "store_proxy")]  # the latter: several hosts only
    imports = ", ".join(f"paceline.launch.{'.'.join(path.parts)}" for path in light)
    heavy = "{'torch', 'numpy', 'rich', 'psutil', 'asyncio'}"
    code = f"import sys, {imports}; sys.exit(str({heavy} & set(sys.modules) or ''))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=90, check=False)
    assert done.stderr.strip() == ""
