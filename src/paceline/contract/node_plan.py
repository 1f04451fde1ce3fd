"""What a launcher tells an agent: one line of JSON on its stdin, or a private file."""

from __future__ import annotations

from typing import Literal

import msgspec

GRACE_SECONDS = 3.0  # with the sweep after it still inside the 5 s in which nothing may be left
JOIN_SECONDS = 300.0  # how long the agents of several nodes wait for each other
RANK_0: Literal["rank 0"] = "rank 0"  # one object: omit_defaults compares by identity
STOP_GRACE_SECONDS = 30.0  # a step to its end and a checkpoint; also what schedulers leave between SIGTERM and SIGKILL


class NodePlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What one agent is told: one line of JSON on its stdin, or a private file; never its argv, so that no list of
    processes shows it. Every field means what it means in `Job`.
    """

    argv: tuple[str, ...]
    nproc: int
    first_rank: int = 0  # of several nodes: given by node 0's agent when all have come, as are the next two
    world_size: int = 0
    master_addr: str = "127.0.0.1"
    node: int = 0  # -1: the environment (SLURM_NODEID) or the command line says
    port: int = 0
    threads: int = 1
    run_id: str = ""
    attempt_dir: str = ""
    grace_seconds: float = GRACE_SECONDS
    stop_grace_seconds: float = STOP_GRACE_SECONDS
    max_restarts: int = 0
    min_nproc: int = 0
    stall_after: str = "auto"
    nodes: int = 1
    min_nodes: int = 1
    head: tuple[str, ...] = ()  # names or addresses of node 0, the best first
    head_ports: tuple[int, ...] = ()  # node 0's agent listens on the first of these that is free
    secret: str = ""
    join_seconds: float = JOIN_SECONDS
    run_dir: str = ""
    cwd: str = ""
    env: dict[str, str] = {}
    modules: tuple[str, ...] = ()
    activate: str = ""
    plain_store: bool = False
    detached: bool = False
    show: Literal["rank 0", "all"] = RANK_0
    names: tuple[str, ...] = ()  # the nodes' names by number, for people; empty where nobody knows them yet
    group_rank: int = 0  # this node's place among those that take part; given, as the interface, when all have come
    interface: str = ""  # the network interface by which the other nodes are reached
    preload: bool = False
    keep_open: tuple[int, ...] = ()  # descriptors that every worker inherits, as its agent has: a lock, say
    silence_seconds: float = 0.0  # the lifeline carries a sign of life at least so often; 0: none, only its end counts
