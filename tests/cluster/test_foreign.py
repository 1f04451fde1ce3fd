"""Workers that others have started (srun, mpirun) find each other on real hosts, and refuse what cannot be right."""

import os
import shutil
import sys
from pathlib import Path

import pytest
from tests.cluster.conftest import HINT
from tests.cluster.lab import Lab
from tests.cluster.slurm import Slurm
from tests.cluster.ssh import SshHosts

from paceline.rank.environment import translate_slurm_mpi_variables

MEETS = """
import os, sys
os.environ["GLOO_SOCKET_IFNAME"] = "eth0" if os.uname().nodename in ("n1", "n2", "n3", "n4") else "lo"
from paceline.rank.attach import report_error
from paceline.rank.attach import exit_worker
from paceline.rank.world import World, process_group
try:
    world = World.from_env(device="cpu")
    with process_group(world, timeout_seconds=40, meeting_seconds=40):
        import torch, torch.distributed as dist
        total = torch.tensor([float(world.rank)])
        dist.all_reduce(total)
        line = f"rank {world.rank} of {world.size}, {world.local_rank} of {world.local_size}, sum {total.item():g}"
        sys.stdout.write(line + "\\n")
except Exception as error:
    exit_worker(report_error(error))
exit_worker(0)
"""
FOUR = [f"rank {rank} of 4, {rank % 2} of 2, sum 6" for rank in range(4)]


@pytest.fixture
def meets(tmp_path: Path) -> Path:
    script = tmp_path / "meets.py"
    script.write_text(MEETS)
    return script


@pytest.mark.slow
def test_bare_srun_makes_one_world_of_two_nodes(slurm: Slurm, meets: Path) -> None:
    done = slurm.run("srun", "-N2", "-n4", "--ntasks-per-node=2", "-l", sys.executable, meets, timeout=165)
    assert done.returncode == 0, done.stderr
    assert sorted(line.partition(": ")[2] for line in done.stdout.splitlines()) == FOUR


@pytest.mark.slow
def test_a_rank_that_the_batch_script_exported_is_refused(slurm: Slurm, meets: Path) -> None:
    env = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "n1"}
    done = slurm.run(
        "srun", "-K1", "-N2", "-n2", sys.executable, meets, env={**env, "MASTER_PORT": "29500"}, timeout=165
    )  # fmt: skip
    assert done.returncode and "RANK was exported" in done.stderr


def environments(slurm: Slurm, folder: Path, *options: str) -> list[dict[str, str]]:
    """What the tasks of a step see."""
    done = slurm.run("srun", *options, "bash", "-c", f'env -0 > "{folder}/env-$SLURM_PROCID"', timeout=90)
    assert done.returncode == 0, done.stderr
    texts = [path.read_text() for path in sorted(folder.glob("env-*"))]
    return [dict(line.split("=", 1) for line in text.split("\0") if "=" in line) for text in texts]


def test_uneven_tasks_are_counted_on_their_own_node(slurm: Slurm, tmp_path: Path) -> None:
    worlds = [translate_slurm_mpi_variables(env) for env in environments(slurm, tmp_path, "-N2", "-n3", "-m", "block")]
    assert [world["RANK"] for world in worlds] == ["0", "1", "2"]
    assert sorted(world["LOCAL_WORLD_SIZE"] for world in worlds) == ["1", "2", "2"]
    assert len({(world["MASTER_ADDR"], world["MASTER_PORT"]) for world in worlds}) == 1


def test_a_gpu_per_task_is_each_tasks_own(slurm: Slurm, tmp_path: Path) -> None:
    each = environments(slurm, tmp_path, "-N1", "-n2", "--gpus-per-task=1")
    assert [env["CUDA_VISIBLE_DEVICES"] for env in each] in (["0", "1"], ["1", "0"])
    shared = environments(slurm, tmp_path, "-N1", "-n2", "--gres=gpu:2")
    assert all("," in env["CUDA_VISIBLE_DEVICES"] for env in shared)


def test_the_shell_of_a_batch_job_is_no_rank(slurm: Slurm, tmp_path: Path) -> None:
    job = slurm.run("sbatch", "--parsable", "-N2", "-n4", "-o", tmp_path / "out", f"--wrap=env -0 > {tmp_path}/env-0")
    assert slurm.wait(job.stdout.strip()) == "COMPLETED"
    text = (tmp_path / "env-0").read_text()
    env = dict(line.split("=", 1) for line in text.split("\0") if "=" in line)
    assert env["SLURM_NTASKS"] == "4" and translate_slurm_mpi_variables(env) == {}


MPIRUN = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


def mpirun(lab: Lab, ssh_hosts: SshHosts, hosts: str, *words: object):
    if shutil.which("mpirun") is None:
        pytest.skip(f"needs mpirun: {HINT}")
    nics = [word for kind in ("btl", "oob") for word in ("--mca", f"{kind}_tcp_if_include", "eth0")]
    return lab.run(
        "n1", "mpirun", "--oversubscribe", "--mca", "plm_rsh_agent", ssh_hosts.command, *nics, "--host", hosts, *words,
        env={**os.environ, **MPIRUN}, timeout=165,
    )  # fmt: skip


@pytest.mark.slow
def test_mpirun_on_two_hosts(lab: Lab, ssh_hosts: SshHosts, meets: Path) -> None:
    done = mpirun(lab, ssh_hosts, "n1:2,n2:2", "-x", f"MASTER_ADDR={lab.address('n1')}", sys.executable, meets)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == FOUR


@pytest.mark.slow
def test_mpirun_on_two_hosts_without_an_address_is_refused_with_the_option(
    lab: Lab, ssh_hosts: SshHosts, meets: Path
) -> None:
    done = mpirun(lab, ssh_hosts, "n1:1,n2:1", sys.executable, meets)
    assert done.returncode == 2 and "-x MASTER_ADDR=" in done.stderr


@pytest.mark.slow
def test_a_rank_that_is_kept_away_by_a_firewall_says_so(lab: Lab, meets: Path) -> None:
    lab.deny("n1", "n2")
    env = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "n1"}
    text = meets.read_text().replace("meeting_seconds=40", "meeting_seconds=4")
    meets.write_text(text)
    done = lab.run("n2", sys.executable, meets, env={**os.environ, **env, "MASTER_PORT": "29500"}, timeout=165)
    assert done.returncode == 1
    assert "n1:29500" in done.stderr and "firewall" in done.stderr
