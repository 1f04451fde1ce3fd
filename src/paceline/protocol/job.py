"""A job, resolved once: the launcher makes the `JobSpec`, and each agent receives it with the facts of its node.

    JobSpec      what to run, on which hosts, and how they are reached: the same for all nodes
    NodePlan     the spec, and the facts of one node: one line of JSON on its agent's stdin, or a private file
    NodeRanks    the ranks of the node in one start of the workers, which node 0's agent assigns

A rank reads torchrun's variables and a `WorkerSpec` (control.py). It does not receive the spec, which contains
the secret of the job and whose environment variables it has already.
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
JUMP_SECONDS = 5.0  # an agent that was not asked for so long was suspended, and perhaps its workers with it
MAX_SECONDS = 7 * 24 * 3600.0
JOIN_SECONDS = 300.0  # how long the agents of several nodes wait for each other
STOP_GRACE_SECONDS = 30.0  # a step to its end and a checkpoint; also what schedulers leave between SIGTERM and SIGKILL
NUM_PORTS = 8
GPU_CORES = 8  # of a rank with a GPU: it prepares batches, and launches kernels without a pause


class Stage(IntEnum):
    """The stage that sets the window; if ranks are in several stages, the last one in this list."""

    STEP = 1
    DATA = 2
    WARM_UP = 3
    LONG = 4  # init, the first step, evaluate, checkpoint, close
    USER = 5


LEARNED = {  # floor and cap in seconds
    Stage.STEP: (10.0, 300.0),
    Stage.DATA: (30.0, 300.0),
    Stage.WARM_UP: (300.0, 1800.0),
    Stage.LONG: (300.0, 1800.0),
    Stage.USER: (300.0, 1800.0),
}
OF_STEPS = (Stage.STEP, Stage.DATA, Stage.WARM_UP)  # learn together: a phase that was short may be long the next time


class Windows(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """The setting --stall-after: `seconds` is None if paceline measures the window itself."""

    seconds: float | None = None
    off: bool = False

    @classmethod
    def parse(cls, text: str) -> Windows:
        """What `--stall-after TEXT` means: auto, off, or seconds such as 30, 7.5 or 30s.

        Raises:
            UsageError: names the choices.
        """
        word = text.strip().lower()
        if word in ("auto", "off"):
            return cls(off=True) if word == "off" else AUTO
        match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) ?s?", word)
        if match is None or not 0 < float(match[1]) <= MAX_SECONDS:
            raise UsageError(code="stall-after-invalid", value=text)
        return cls(float(match[1]))

    def of(self, stage: Stage, largest_gap_seconds: float = 0.0) -> float:
        """The longest time without progress, in seconds, given the longest gap of this stage so far."""
        if self.off:
            return math.inf
        if self.seconds is not None:
            return max(EXPLICIT_FLOOR_SECONDS, EXPLICIT_FACTOR * self.seconds) if stage is Stage.LONG else self.seconds
        floor, cap = LEARNED[stage]
        return min(max(GAP_FACTOR * largest_gap_seconds, floor), cap)


AUTO = Windows()  # one object, which a plan leaves out as its default


class Host(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One machine to run on: what `ssh` calls it, which port its sshd has, how many workers it takes."""

    name: str
    port: int | None = None  # None: what the user's ssh configuration says
    slots: int | None = None  # None: as many as --nproc says


def plain_name(host: Host) -> str:
    """What other machines call it: without the user, and an IPv6 address without brackets."""
    return host.name.rpartition("@")[2].strip("[]")


def labels(hosts: tuple[Host, ...]) -> tuple[str, ...]:
    """The names for people: the plain names, with the port if two are equal."""
    names = [plain_name(host) for host in hosts]
    return tuple(
        f"{name}:{host.port}" if host.port and names.count(name) > 1 else name
        for name, host in zip(names, hosts, strict=True)
    )


class Allocation(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The resources asked of Slurm, except the nodes."""

    minutes: int | None = None
    partition: str = ""
    gpus_per_node: int = 0
    cpus_per_rank: int = 1
    save_seconds: int = 120  # before the time limit: the run saves and queues again; 0: never
    options: tuple[str, ...] = ()  # any other option of sbatch, key=value


class JobSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What to run, on how many nodes, and how they are reached.

    `argv` is the command of one worker, the same for every rank. `threads` is every rank's OMP_NUM_THREADS; 0: the
    node's cores shared among its workers. `attempt_dir` is an existing folder of this attempt alone (logs, failure
    records); on several nodes node 0's agent makes it, inside `run_dir`. `port` is where the ranks of one node, or the
    agents of several, meet; 0 for any free one.
    """

    argv: tuple[str, ...]
    nproc: int  # on each node; in the plan of a node its own number
    run_id: str = ""
    threads: int = 1
    grace_seconds: float = GRACE_SECONDS  # between asking a worker to stop and killing it, when the run has failed
    stop_grace_seconds: float = STOP_GRACE_SECONDS  # the same when the run is ordered to stop: time to save
    max_restarts: int = 0
    min_nproc: int = 0  # restart with fewer ranks, but never fewer than these; 0: as many as nproc
    stall_after: Windows = AUTO
    collectives: Literal["torch", "shared"] = "torch"  # shared: DDP's gradients in a script go through shared memory
    on_drift: Literal["stop", "warn"] = "stop"  # if a script's results are wrong, without any error
    nodes: int = 1
    min_nodes: int = 1  # fewer than `nodes`: the run continues when nodes are lost, with at least these
    secret: str = ""  # 64 hex digits: by it the agents of one job know each other
    join_seconds: float = JOIN_SECONDS
    port: int = 0
    silence_seconds: float = 0.0  # the lifeline carries a sign of life at least so often; 0: none, only its end counts
    attempt_dir: str = ""
    run_dir: str = ""
    cwd: str = ""  # the working folder on every node; empty: the agent's own
    env: dict[str, str] = {}
    modules: tuple[str, ...] = ()
    activate: str = ""  # a script to be sourced, or conda:NAME
    plain_store: bool = False  # the workers open the store's port themselves: any script that torchrun could start
    detached: bool = False
    show: Literal["rank 0", "all"] = "rank 0"  # whose output appears on the screen
    rdzv_id: str = ""  # torchrun's name of the job, for scripts; empty: `run_id`
    role: str = "default"  # torchrun's name of what the ranks do, for scripts
    stdin_rank: int = -1  # which rank of a script has standard input; -1: all
    preload: bool = False  # workers may be forked from one that has imported everything: our own command, no CUDA
    hosts: tuple[Host, ...] = ()  # of ssh, node 0 first; of print, if known
    # for launchers; agents do not use them
    name: str = "run"  # for people: Slurm's job name
    submit_dir: str = ""  # in the run folder: what was started (plan.json, job.sbatch, config.toml), private
    python: str = sys.executable  # on every node
    ssh: tuple[str, ...] = ("ssh",)  # the user's ssh command
    slurm: Allocation = Allocation()
    torchrun: bool = True  # of print: torchrun's commands, or our agent's

    @property
    def term_grace_seconds(self) -> float:
        """How long scripts have after the stop grace, once they have been sent SIGTERM as well."""
        return self.grace_seconds if self.plain_store else 0.0

    @property
    def elastic(self) -> bool:
        """Whether hosts may come and go."""
        return self.min_nodes < self.nodes


def head_ports(job: JobSpec) -> tuple[int, ...]:
    """The ports where node 0's agent may listen: the given port, or several, the same for all nodes of the run."""
    if job.port:
        return (job.port,)
    digest = hashlib.sha256(job.run_id.encode()).digest()
    first = int.from_bytes(digest[:4]) % PORTS
    stride = 2 * (int.from_bytes(digest[4:8]) % 2000) + 1
    return tuple(FIRST_PORT + (first + k * stride) % PORTS for k in range(NUM_PORTS))


class NodeRanks(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The ranks of one node in one start of the workers, as torchrun's variables describe them."""

    first: int = 0
    world_size: int = 0
    group_rank: int = 0  # the node's place among those that take part
    groups: int = 1  # how many nodes take part
    restarts: int = 0  # after a failure
    master_port: int = 0  # where the ranks meet; 0: any free one


class NodePlan(JobSpec, frozen=True):
    """The job, and the facts of one node, for its agent. Never on a command line, so that no list of processes shows
    it.
    """

    node: int = 0  # -1: the environment (SLURM_NODEID) or the command line says
    ranks: NodeRanks = NodeRanks()  # of several nodes: node 0's agent assigns them when all have come
    master_addr: str = "127.0.0.1"
    head: tuple[str, ...] = ()  # names or addresses of node 0, the best first
    head_ports: tuple[int, ...] = ()  # node 0's agent listens on the first of these that is free
    interface: str = ""  # the network interface by which the other nodes are reached; known when all have come
    stdin: int = -1  # the launcher's standard input, for scripts
    keep_open: tuple[int, ...] = ()  # descriptors that every worker inherits, as its agent has: a lock, say
    attach: int = -1  # the socket at which ranks attach that another launcher started; -1: the agent starts its workers
    may_end: bool = True  # False: ranks that have attached are never ended
