"""The plan that a launcher hands to an agent: one line of JSON on its stdin, or a private file."""

from typing import Literal

import msgspec

from paceline.contract.windows import AUTO, Windows

GRACE_SECONDS = 3.0  # with the sweep after it still inside the 5 s in which nothing may be left
JOIN_SECONDS = 300.0  # how long the agents of several nodes wait for each other
STOP_GRACE_SECONDS = 30.0  # a step to its end and a checkpoint; also what schedulers leave between SIGTERM and SIGKILL


class Shared(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What is the same on all nodes: set once, for the job, and part of the plan of each agent.

    `argv` is the command of one worker, the same for every rank. `threads` is every rank's OMP_NUM_THREADS; 0: the
    node's cores shared among its workers.
    """

    argv: tuple[str, ...]
    nproc: int  # on each node; a host may have a number of its own, which is then in the plan of its node
    run_id: str = ""
    threads: int = 1
    grace_seconds: float = GRACE_SECONDS  # between asking a worker to stop and killing it, when the run has failed
    stop_grace_seconds: float = STOP_GRACE_SECONDS  # the same when the run is ordered to stop: time to save
    max_restarts: int = 0
    min_nproc: int = 0  # restart with fewer ranks, but never fewer than these; 0: as many as nproc
    stall_after: Windows = AUTO
    collectives: Literal["torch", "shared"] = "torch"  # shared: DDP's gradients in a script go through shared memory
    on_drift: Literal["stop", "warn"] = "stop"  # where a script's results are wrong, without any error
    nodes: int = 1
    min_nodes: int = 1  # fewer than `nodes`: the run goes on when nodes are lost, with at least these
    secret: str = ""  # 64 hex digits: by it the agents of one job know each other
    join_seconds: float = JOIN_SECONDS
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

    @property
    def term_grace_seconds(self) -> float:
        """How long scripts have after the stop grace, once they have been sent SIGTERM as well."""
        return self.grace_seconds if self.plain_store else 0.0

    @property
    def elastic(self) -> bool:
        """Whether hosts may come and go."""
        return self.min_nodes < self.nodes


class NodePlan(Shared, frozen=True):
    """The plan of one agent: one line of JSON on its stdin, or a private file; never its argv, so that no list of
    processes shows it. `nproc` is this node's; folders, where there are any, mean what they mean in `Job`.
    """

    first_rank: int = 0  # of several nodes: given by node 0's agent when all have come, as are the next two
    world_size: int = 0
    master_addr: str = "127.0.0.1"
    node: int = 0  # -1: the environment (SLURM_NODEID) or the command line says
    port: int = 0  # where the ranks of one node meet
    attempt_dir: str = ""
    run_dir: str = ""
    head: tuple[str, ...] = ()  # names or addresses of node 0, the best first
    head_ports: tuple[int, ...] = ()  # node 0's agent listens on the first of these that is free
    names: tuple[str, ...] = ()  # the nodes' names by number, for people; empty where nobody knows them yet
    group_rank: int = 0  # this node's place among those that take part; given, as the interface, when all have come
    groups: int = 1  # how many nodes take part; given, as are the restarts after a failure so far
    restarts: int = 0
    stdin: int = -1  # the launcher's standard input, for scripts
    interface: str = ""  # the network interface by which the other nodes are reached
    keep_open: tuple[int, ...] = ()  # descriptors that every worker inherits, as its agent has: a lock, say
    attach: int = -1  # the socket at which ranks attach that another launcher started; -1: the agent starts its workers
    may_end: bool = True  # False: ranks that have attached are never ended
    silence_seconds: float = 0.0  # the lifeline carries a sign of life at least so often; 0: none, only its end counts
