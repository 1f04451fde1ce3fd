import json
import shlex
import subprocess
import sys
from pathlib import Path

import msgspec
from tests.errors import raises

from paceline.launch.by_hand import format_commands, plan_by_hand
from paceline.launch.plan import format_plan, parse_hosts
from paceline.protocol.job import Host, JobSpec, NodePlan

GOLDEN = """\
# node 0: n1
PACELINE_RUN_ID=5f OMP_NUM_THREADS=2 DATA='/my data' /env/bin/python -m torch.distributed.run --nnodes=2 --node-rank=0 \
--nproc-per-node=2 --master-addr=n1 --master-port=29500 --no-python /env/bin/python -P -m paceline train --config \
/runs/a/submit-1/config.toml

# node 1: n2
PACELINE_RUN_ID=5f OMP_NUM_THREADS=2 DATA='/my data' /env/bin/python -m torch.distributed.run --nnodes=2 --node-rank=1 \
--nproc-per-node=3 --master-addr=n1 --master-port=29500 --no-python /env/bin/python -P -m paceline train --config \
/runs/a/submit-1/config.toml

# Run each line in the folder /work, on all nodes within 300 s.
# Set HF_TOKEN on each node first. It looks secret, so it is not printed.
# All nodes must reach node 0 at port 29500, and each other at ports that gloo or NCCL choose.
# All nodes need the same folders at the same paths, and the same versions of Python, torch and paceline.
"""


def job(**settings: object) -> JobSpec:
    told = {
        "argv": ("/env/bin/python", "-P", "-m", "paceline", "train", "--config", "/runs/a/submit-1/config.toml"),
        "nproc": 2,
        "run_id": "5f",
        "threads": 2,
        "python": "/env/bin/python",
        "nodes": 2,
        "min_nodes": 2,
        "submit_dir": "/runs/a/submit-1",
    }
    return JobSpec(**{**told, **settings})  # type: ignore[arg-type]


def test_the_printed_text() -> None:
    hosts = (Host("me@n1"), Host("n2", 2222, 3))
    env = {"DATA": "/my data", "HF_TOKEN": "hunter2"}
    assert format_commands(plan_by_hand(job(hosts=hosts, port=29500, cwd="/work", env=env))) == GOLDEN


def test_without_hosts_the_place_of_node_0_is_marked() -> None:
    plan = plan_by_hand(job())
    assert all("--master-addr=NODE0" in command.argv for command in plan.manual_commands)
    assert "NODE0" in plan.notes[0]
    assert format_commands(plan) == format_commands(
        plan_by_hand(job())
    )  # no port or id that changes from one print to the next


def test_our_own_agent_reads_a_private_plan(tmp_path: Path) -> None:
    plan = plan_by_hand(job(torchrun=False, hosts=parse_hosts("n1,n2"), secret="ab" * 32, min_nodes=1, max_restarts=2))
    agent = "/env/bin/python -P -m paceline.launch.agent --plan /runs/a/submit-1/plan.json"
    lines = format_commands(plan).splitlines()
    assert lines[1] == f"{agent} --node 0 --node0 n1" and lines[4] == f"{agent} --node 1 --node0 n1"
    told = msgspec.json.decode(plan.files["plan.json"], type=NodePlan)
    assert (told.node, told.nodes, told.min_nodes, told.node0, told.secret) == (-1, 2, 1, ("n1",), "ab" * 32)
    assert told.max_restarts == 2 and told.silence_seconds == 0 and len(told.node0_ports) == 8
    assert "abab" not in format_commands(plan) and "abab" not in format_plan(plan)
    assert json.loads(plan.files["plan.json"])["hosts"] == [{"name": "n1"}, {"name": "n2"}]


def test_what_torchrun_cannot_do_is_refused_or_said() -> None:
    with raises("torchrun-nodes-fixed", least=1, nodes=2):
        plan_by_hand(job(min_nodes=1))
    with raises("nodes-and-hosts-differ", value=2, count=3):
        plan_by_hand(job(hosts=parse_hosts("n1,n2,n3")))
    assert "--agent paceline" in format_commands(plan_by_hand(job(max_restarts=1)))


def test_modules_and_environments_are_said_before(tmp_path: Path) -> None:
    text = format_commands(plan_by_hand(job(modules=("cuda/12",), activate="conda:my env")))
    assert "cuda/12 && conda activate 'my env'" in text
    assert "&& source /x/activate" in format_commands(plan_by_hand(job(modules=("a",), activate="/x/activate")))


def test_a_line_can_be_pasted_whatever_is_in_it(tmp_path: Path) -> None:
    stub = tmp_path / "it's python"
    stub.write_text(f"#!{sys.executable}\nimport os, sys\nprint([os.environ['X'], *sys.argv[1:]])\n")
    stub.chmod(0o755)
    hostile = "a b'; echo $HOME `id`\n\\"
    line = format_commands(
        plan_by_hand(job(python=str(stub), env={"X": hostile}, argv=("python", "my script.py", hostile)))
    )
    command = line.split("\n", 1)[1].split("\n\n# node 1")[0]
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=10, check=True)
    words = eval(done.stdout)
    assert words[0] == hostile and words[-2:] == ["my script.py", hostile]


def test_the_description_is_what_will_be_typed() -> None:
    text = format_commands(plan_by_hand(job(hosts=parse_hosts("n1,n2"), port=1)))
    assert shlex.split(text.splitlines()[1])[:2] == ["PACELINE_RUN_ID=5f", "OMP_NUM_THREADS=2"]
    assert "--node-rank=1" in text and "at port 1," in text
