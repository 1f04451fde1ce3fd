"""All ranks on this machine: one agent, one node, the loopback address."""

from __future__ import annotations

from paceline.contract.node_plan import NodePlan
from paceline.launch.job import Command, Job, Plan


def local(job: Job) -> Plan:
    """The plan for one node. Pure: nothing is looked up, bound or started."""
    node = NodePlan(
        argv=job.argv,
        nproc=job.nproc,
        first_rank=0,
        world_size=job.nproc,
        node=0,
        master_addr="127.0.0.1",  # not the host's name: it may resolve to an interface that others reach
        port=job.port,
        threads=job.threads,
        run_id=job.run_id,
        attempt_dir=str(job.attempt_dir or ""),
        grace_seconds=job.grace_seconds,
        stop_grace_seconds=job.stop_grace_seconds,
        max_restarts=job.max_restarts,
        min_nproc=job.min_nproc,
        stall_after=job.stall_after,
        run_dir=str(job.run_dir or ""),
        cwd=job.cwd,
        env=dict(job.env),
        modules=job.modules,
        activate=job.activate,
        plain_store=job.plain_store,
        detached=job.detached,
        show=job.show,
        preload=job.preload,
    )
    # -P: without it python -m puts the working directory first on sys.path, and a user's random.py or select.py there
    # would take the place of the standard library's in the agent
    return Plan(agents=(Command("agent 0", (job.python, "-P", "-m", "paceline.agent")),), nodes=(node,))
