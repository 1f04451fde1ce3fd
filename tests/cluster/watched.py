"""How does a fault strike a script under `paceline watchover`, started by torchrun, srun or mpirun?"""

import shutil
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from benchmarks.faults.fault import Fault
from benchmarks.faults.run import PROGRAM, USERS, Score, fault_environment, score
from benchmarks.faults.setups import Ran
from tests.cluster.fault_hosts import Hosts, on_host
from tests.cluster.slurm import Slurm
from tests.cluster.training import FOLLOWER, HEAD, words

WAYS = ("torchrun", "torchrun on two hosts", "srun", "mpirun")
PORT = "29718"
MPIRUN = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
OURS = (sys.executable, "-m", "paceline")


def run_watched(
    fault: Fault, way: str, hosts: Hosts, slurm: Slurm, folder: Path, *, hang_timeout: str = "5", end: bool = True
) -> Score:
    """One run in `folder`, which must not exist. Of two hosts the first has one rank, the other those that are left."""
    folder.mkdir(parents=True)
    for file in USERS.glob("*.py"):
        shutil.copy(file, folder)
    env = {**fault_environment(fault, "paceline", folder), "GLOO_SOCKET_IFNAME": "eth0"}
    own = ["watchover", *words("--hang-timeout", hang_timeout, "--run-dir", folder / "run")]
    own += [*(["--end"] if end else []), PROGRAM]
    try:
        ran = STARTS[way](fault.world, own, hosts, slurm, folder, env)
        ran = replace(ran, processes_left=hosts.left())
    finally:
        hosts.kill_all()
        hosts.lab.restore()
    return replace_score(score(fault, "paceline", ran, folder))


def replace_score(found: Score) -> Score:
    """Without a judgement of the exit code: it is the launcher's."""
    import msgspec

    return msgspec.structs.replace(found, right_code=None)


def torchrun_here(world: int, own: list[str], hosts: Hosts, slurm: Slurm, folder: Path, env: Mapping[str, str]) -> Ran:
    argv = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(world), "-m", "paceline", *own]
    return on_host(hosts, HEAD, argv, folder, {**env, "GLOO_SOCKET_IFNAME": "lo"})


def torchrun_on_two(
    world: int, own: list[str], hosts: Hosts, slurm: Slurm, folder: Path, env: Mapping[str, str]
) -> Ran:
    start = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--master-addr", HEAD]
    each = [[*start, "--master-port", PORT, "--node-rank", str(node), "--nproc-per-node", str(count)]
            for node, count in enumerate((1, world - 1))]  # fmt: skip
    with ThreadPoolExecutor(2) as threads:
        both = [threads.submit(on_host, hosts, host, [*argv, "-m", "paceline", *own], folder, env)
                for host, argv in zip((HEAD, FOLLOWER), each, strict=True)]  # fmt: skip
        first, second = (one.result() for one in both)
    codes = [first.code, second.code]
    return replace(
        first,
        code=None if None in codes else next((code for code in codes if code), 0),
        lines=tuple(sorted([*first.lines, *second.lines])),
        ended_seconds=max(first.ended_seconds, second.ended_seconds),
        files_left=(*first.files_left, *second.files_left),
    )


def srun(world: int, own: list[str], hosts: Hosts, slurm: Slurm, folder: Path, env: Mapping[str, str]) -> Ran:
    where = ["-N2", f"-n{world}", "--overcommit", "-m", "cyclic", f"--nodelist={HEAD},{FOLLOWER}"]
    return on_host(hosts, "n1", ["srun", *where, *OURS, *own], folder, {**env, **slurm.environment})


def mpirun(world: int, own: list[str], hosts: Hosts, slurm: Slurm, folder: Path, env: Mapping[str, str]) -> Ran:
    nics = [word for kind in ("btl", "oob") for word in ("--mca", f"{kind}_tcp_if_include", "eth0")]
    told = [word for name in (*env, "PATH", "PYTHONPATH") for word in ("-x", name)]
    argv = ["mpirun", "--oversubscribe", "--mca", "plm_rsh_agent", hosts.ssh.command, *nics, *told]
    argv += ["-x", f"MASTER_ADDR={hosts.lab.address(HEAD)}", "--host", f"{HEAD}:1,{FOLLOWER}:{world - 1}"]
    return on_host(hosts, HEAD, [*argv, *OURS, *own], folder, {**env, **MPIRUN})


STARTS = {"torchrun": torchrun_here, "torchrun on two hosts": torchrun_on_two, "srun": srun, "mpirun": mpirun}
