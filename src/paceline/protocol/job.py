"""The specification of a job. The launcher makes the `JobSpec`, and each agent receives a `NodePlan`.

A rank reads torchrun's variables and a `WorkerSpec` (control.py). It does not receive the `JobSpec`, because that
contains the secret of the job.
"""

from __future__ import annotations

import hashlib
import math
import re
import sys
from enum import IntEnum
from typing import Literal

import msgspec

from paceline.errors import UsageError
from paceline.protocol.control import FIRST_PORT, GRACE_SECONDS, PORTS

GAP_FACTOR = 5.0
WARM_UP_STEPS = 5
EXPLICIT_FACTOR, EXPLICIT_FLOOR_SECONDS = 4.0, 60.0
SUSPENSION_GAP_SECONDS = 5.0  # after a longer gap between samples, the agent was suspended, and perhaps its workers
MAX_SECONDS = 7 * 24 * 3600.0
EVENT_SECONDS = 10.0  # for one command of --on-event
JOIN_SECONDS = 300.0  # the time for which the agents of several nodes wait for each other
GRACE_PERIOD_SECONDS = 30.0  # time to end the step and save; schedulers also wait so between SIGTERM and SIGKILL
NUM_PORTS = 8
CORES_PER_GPU_RANK = 8  # cores per rank with a GPU, which prepares batches and launches kernels


class TimeoutStage(IntEnum):
    """The stage that sets the window. If ranks are in several stages, the largest value counts."""

    STEP = 1
    DATA = 2
    WARM_UP = 3
    LONG = 4  # init, the first step, evaluate, checkpoint, close
    USER = 5


WINDOW_BOUNDS_SECONDS = {  # floor and cap in seconds
    TimeoutStage.STEP: (10.0, 300.0),
    TimeoutStage.DATA: (30.0, 300.0),
    TimeoutStage.WARM_UP: (300.0, 1800.0),
    TimeoutStage.LONG: (300.0, 1800.0),
    TimeoutStage.USER: (300.0, 1800.0),
}
# share their longest gap, because times shift between phases
STEP_STAGES = (TimeoutStage.STEP, TimeoutStage.DATA, TimeoutStage.WARM_UP)


class HangTimeout(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """The setting --hang-timeout: `seconds` is None if paceline measures the window itself."""

    seconds: float | None = None
    off: bool = False

    @classmethod
    def parse(cls, text: str) -> HangTimeout:
        """Parse the value of `--hang-timeout`: auto, off, or seconds such as 30, 7.5 or 30s."""
        value = text.strip().lower()
        if value in ("auto", "off"):
            return cls(off=True) if value == "off" else AUTO
        match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) ?s?", value)
        if match is None or not 0 < float(match[1]) <= MAX_SECONDS:
            raise UsageError(code="hang-timeout-invalid", value=text)
        return cls(float(match[1]))

    def window_seconds(self, stage: TimeoutStage, largest_gap_seconds: float = 0.0) -> float:
        """The longest time without progress, in seconds, given the longest gap of this stage so far."""
        if self.off:
            return math.inf
        if self.seconds is not None:
            is_long = stage is TimeoutStage.LONG
            return max(EXPLICIT_FLOOR_SECONDS, EXPLICIT_FACTOR * self.seconds) if is_long else self.seconds
        floor, cap = WINDOW_BOUNDS_SECONDS[stage]
        return min(max(GAP_FACTOR * largest_gap_seconds, floor), cap)


AUTO = HangTimeout()  # one object, so that a plan omits it as the default


class Host(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    name: str
    port: int | None = None  # None: the port of the user's ssh configuration
    slots: int | None = None  # None: the number of --nproc


def address_without_user(host: Host) -> str:
    return host.name.rpartition("@")[2].strip("[]")


def host_labels(hosts: tuple[Host, ...]) -> tuple[str, ...]:
    names = [address_without_user(host) for host in hosts]
    return tuple(
        f"{name}:{host.port}" if host.port and names.count(name) > 1 else name
        for name, host in zip(names, hosts, strict=True)
    )


class AllocationRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    minutes: int | None = None
    partition: str = ""
    gpus_per_node: int = 0
    cpus_per_rank: int = 1
    save_seconds: int = 120  # the run saves and requeues this long before the time limit; 0: never
    options: tuple[str, ...] = ()  # other options of sbatch, key=value


class JobSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The command, the number of nodes, and their addresses.

    `argv` is the command of one worker, equal for all ranks. `threads` is OMP_NUM_THREADS of every rank; 0: the cores
    of the node divided by its workers. `attempt_dir` is an existing folder of this attempt (logs, failure records). On
    several nodes, node 0's agent makes it inside `run_dir`. `port` is the port of the rendezvous: of the ranks on one
    node, or of the agents of several nodes; 0 for any free port.
    """

    argv: tuple[str, ...]
    nproc: int  # workers on each node; in a NodePlan, workers of this node
    run_id: str = ""
    threads: int = 1
    grace_seconds: float = GRACE_SECONDS  # between a stop request to a worker and its kill, after a failure
    grace_period_seconds: float = GRACE_PERIOD_SECONDS  # the same after an order to stop the run: time to save
    max_restarts: int = 0
    min_nproc: int = 0  # lower limit if a restart uses fewer ranks; 0: nproc
    hang_timeout: HangTimeout = AUTO
    collectives: Literal["torch", "shared"] = "torch"  # shared: DDP in a script reduces through shared memory
    on_drift: Literal["stop", "warn"] = "stop"  # the action if results of a script are wrong without an error
    nodes: int = 1
    min_nodes: int = 1  # below `nodes`: the run continues with at least this number after nodes are lost
    secret: str = ""  # 64 hex digits, with which the agents of a job authenticate each other
    join_seconds: float = JOIN_SECONDS
    port: int = 0
    silence_seconds: float = 0.0  # maximum time between heartbeats on the lifeline; 0: no heartbeats
    attempt_dir: str = ""
    run_dir: str = ""
    cwd: str = ""  # the working folder on every node; empty: that of the agent
    env: dict[str, str] = {}
    modules: tuple[str, ...] = ()
    activate: str = ""  # a script to source, or conda:NAME
    plain_store: bool = False  # the workers open the port of the store themselves, as scripts for torchrun do
    detached: bool = False
    show: Literal["rank 0", "all"] = "rank 0"  # the ranks whose output appears on the screen
    rdzv_id: str = ""  # torchrun's name of the job, for scripts; empty: `run_id`
    role: str = "default"  # torchrun's role of the ranks, for scripts
    stdin_rank: int = -1  # the rank of a script that has standard input; -1: all
    on_event: str = ""  # a shell command that node 0's agent runs for each event, with JSON on its standard input
    balance: str = ""  # the relative speeds of ranks or nodes, such as 3:1, or auto
    preload: bool = False  # workers may be forked from a preloader: only our command, without CUDA
    hosts: tuple[Host, ...] = ()  # for ssh, node 0 first; for print, if known
    # for launchers; agents do not use them
    name: str = "run"  # Slurm's job name
    queues_again: bool = False  # the batch script queues the job again after the time limit or a preemption
    submit_dir: str = ""  # a private folder in the run folder, with plan.json, job.sbatch, config.toml
    python: str = sys.executable  # on every node
    ssh: tuple[str, ...] = ("ssh",)  # the user's ssh command
    slurm: AllocationRequest = AllocationRequest()
    torchrun: bool = True  # of print: torchrun's commands, or our agent's

    @property
    def term_grace_seconds(self) -> float:
        """The time for scripts after the stop grace, when the agent has also sent SIGTERM."""
        return self.grace_seconds if self.plain_store else 0.0

    @property
    def event_wait_seconds(self) -> float:
        """The time for which the end of the run may wait for the command of the last event and an earlier one."""
        return 2 * EVENT_SECONDS if self.on_event else 0.0

    @property
    def elastic(self) -> bool:
        return self.min_nodes < self.nodes

    @property
    def fixed_nodes(self) -> int:
        """The number of several nodes of which the run cannot lose one; 0 if it can, or has one node."""
        return 0 if self.elastic or self.nodes == 1 else self.nodes


def node0_ports(job: JobSpec) -> tuple[int, ...]:
    """The ports on which node 0's agent may listen: the given port, or several, equal on all nodes of the run."""
    if job.port:
        return (job.port,)
    digest = hashlib.sha256(job.run_id.encode()).digest()
    offset = int.from_bytes(digest[:4]) % PORTS
    stride = 2 * (int.from_bytes(digest[4:8]) % 2000) + 1
    return tuple(FIRST_PORT + (offset + k * stride) % PORTS for k in range(NUM_PORTS))


class NodeRanks(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The ranks of one node in one start of the workers, as torchrun's variables describe them."""

    first: int = 0
    world_size: int = 0
    group_rank: int = 0  # index of the node among the participating nodes
    groups: int = 1  # number of participating nodes
    restarts: int = 0  # number of restarts after a failure
    speeds: tuple[float, ...] = ()  # of all ranks; empty: equal
    master_port: int = 0  # port of the ranks' rendezvous; 0: any free port


class NodePlan(JobSpec, frozen=True):
    """The job with the data of one node, for its agent. It is never on a command line, which would show the secret."""

    node: int = 0  # -1: from the environment (SLURM_NODEID) or the command line
    ranks: NodeRanks = NodeRanks()  # on several nodes, node 0's agent assigns them when all nodes have joined
    master_addr: str = "127.0.0.1"
    node0: tuple[str, ...] = ()  # names or addresses of node 0, the best first
    node0_ports: tuple[int, ...] = ()  # node 0's agent listens on the first free port of these
    interface: str = ""  # the network interface towards the other nodes; set when all nodes have joined
    stdin: int = -1  # the launcher's standard input, for scripts
    keep_open: tuple[int, ...] = ()  # descriptors that every worker inherits from its agent, for example a lock
    attach: int = -1  # the socket for ranks that a different launcher started; -1: the agent starts its workers
    devices: tuple[int, ...] = ()  # index of the device of each local rank, after an exclusion; empty: the local rank
    may_end: bool = True  # False: the agent never ends ranks that have attached
