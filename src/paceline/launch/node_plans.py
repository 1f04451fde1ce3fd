"""The plan of each node, for hosts reached by ssh, by hand or through Slurm."""

from __future__ import annotations

import hashlib

from paceline.contract.node_plan import NodePlan
from paceline.launch.hosts import labels
from paceline.launch.job import Job, for_node

FIRST_PORT, PORTS = 20000, 10000  # below the ports that kernels give to outgoing connections (Linux: from 32768)
NUM_PORTS = 8


def node_plan(job: Job, *, node: int, nproc: int, head: tuple[str, ...], silence_seconds: float = 0.0) -> NodePlan:
    """The plan for one node; `node` is -1 where its agent learns it elsewhere."""
    return NodePlan(
        **for_node(job, nproc),
        node=node,
        port=job.port if job.nodes == 1 else 0,  # of several nodes the head listens at it, and the ranks cannot as well
        head=head,
        head_ports=head_ports(job),
        names=labels(job.hosts),
        silence_seconds=silence_seconds,
    )


def head_ports(job: Job) -> tuple[int, ...]:
    """Where node 0's agent may listen: the port that was asked for; or some, the same for all nodes of the run."""
    if job.port:
        return (job.port,)
    digest = hashlib.sha256(job.run_id.encode()).digest()
    first = int.from_bytes(digest[:4]) % PORTS
    stride = 2 * (int.from_bytes(digest[4:8]) % 2000) + 1
    return tuple(FIRST_PORT + (first + k * stride) % PORTS for k in range(NUM_PORTS))
