"""The environment variables of a run, in one table: docs/environment.md is made of it (tools/environment.py).

Not in it: what srun and mpirun tell their tasks (`worker.foreign` turns that into torchrun's words), and what libraries
read by themselves.
"""

import re
from typing import NamedTuple

from paceline.contract.birth import BIRTH

RUN_ID = "PACELINE_RUN_ID"
SHARED_MEMORY = "PACELINE_SHARED_MEMORY"
PRELOAD = "PACELINE_PRELOAD"
AGENT_MARK = "PACELINE_AGENT_MARK"
FAULTS_MARK = "PACELINE_FAULTS_MARK"

# names of variables, and of anything else, whose values are not shown
SECRET_NAME = re.compile("KEY|TOKEN|SECRET|PASS|CREDENTIAL|COOKIE", re.IGNORECASE)


class Variable(NamedTuple):
    """One variable: its name, who sets it, what it says."""

    name: str
    setter: str
    meaning: str


SWITCHES = (
    Variable(SHARED_MEMORY, "you", "`off`: ranks of one host exchange over gloo instead of shared memory"),
    Variable(PRELOAD, "you", "`off`: each worker imports torch for itself, as with `--preload off`"),
    Variable("OMP_NUM_THREADS", "you, or the agent", "threads of each rank; by default its share of the node's cores"),
    Variable("CUDA_VISIBLE_DEVICES", "you", "the GPUs that may be used, counted by `--nproc auto`"),
    Variable("GLOO_SOCKET_IFNAME", "you, or the agent", "the network interface of gloo; on one host the loopback"),
    Variable("NCCL_SOCKET_IFNAME", "you, or the agent", "the network interface of NCCL"),
    Variable("PYTHONUNBUFFERED", "you, or the agent", "1: a killed worker takes no unwritten lines with it"),
    Variable("PYTHONFAULTHANDLER", "you, or the agent", "1: a crashed worker shows its Python stack"),
    Variable("TORCH_FR_BUFFER_SIZE", "you, or the agent", "256: how many collectives torch's flight recorder keeps"),
    Variable("TORCHINDUCTOR_CACHE_DIR", "you, or a rank", "where `--compile` keeps what it has compiled"),
    Variable("CUBLAS_WORKSPACE_CONFIG", "you, or the agent", "CUDA needs it to give the same bits twice"),
    Variable("TORCH_NCCL_ASYNC_ERROR_HANDLING", "you, or the agent", "0 under the hang guard, which ends waits itself"),
    Variable(
        "NCCL_LAUNCH_ORDER_IMPLICIT", "you, or the agent", "1: groups of one GPU start work in the program's order"
    ),
)
TORCHRUN = (
    Variable("RANK", "the launcher", "this process's place among all, from 0"),
    Variable("WORLD_SIZE", "the launcher", "how many ranks there are"),
    Variable("LOCAL_RANK", "the launcher", "its place among those of its node"),
    Variable("LOCAL_WORLD_SIZE", "the launcher", "how many ranks its node has"),
    Variable("GROUP_RANK", "the launcher", "its node's place among the nodes that take part"),
    Variable("GROUP_WORLD_SIZE", "the launcher", "how many nodes take part"),
    Variable("ROLE_NAME", "the launcher", "what `--role` says, else `default`"),
    Variable("ROLE_RANK", "the launcher", "as RANK: all ranks have one role"),
    Variable("ROLE_WORLD_SIZE", "the launcher", "as WORLD_SIZE"),
    Variable("MASTER_ADDR", "the launcher", "the host of rank 0"),
    Variable("MASTER_PORT", "the launcher", "the port at which ranks meet there"),
    Variable("TORCHELASTIC_RUN_ID", "the launcher", "tells jobs apart: what `--rdzv-id` says, else PACELINE_RUN_ID"),
    Variable("TORCHELASTIC_RESTART_COUNT", "the launcher", "how often the run was restarted after a failure"),
    Variable("TORCHELASTIC_MAX_RESTARTS", "the launcher", "what `--max-restarts` says"),
    Variable(
        "TORCHELASTIC_USE_AGENT_STORE", "the launcher", "whether its agent holds the store: True under torchrun alone"
    ),
    Variable("TORCHELASTIC_ERROR_FILE", "the launcher", "where torch's `record` writes the rank's exception"),
)
OURS = (
    Variable(RUN_ID, "the agent, or the commands of `--on print`", "tells jobs apart: ranks of two runs never meet"),
    Variable(BIRTH, "the agent", "all else that it tells a worker, as JSON (`contract/birth.py`), which takes it out"),
    Variable(AGENT_MARK, "the agent", "inherited by whatever a worker starts, so that the agent can find and end it"),
    Variable(FAULTS_MARK, "`python -m benchmarks.faults`", "the same, for what a planted fault starts"),
)
