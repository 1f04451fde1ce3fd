"""All ranks on this machine: one agent, one node, the loopback address."""

from paceline.contract.node_plan import NodePlan
from paceline.launch.job import Command, Job, Plan, for_node


def local(job: Job) -> Plan:
    """The plan for one node. Pure: nothing is looked up, bound or started."""
    node = NodePlan(
        **for_node(job, job.nproc),
        world_size=job.nproc,
        master_addr="127.0.0.1",  # not the host's name: it may resolve to an interface that others reach
        port=job.port,
    )
    # -P: without it python -m puts the working directory first on sys.path, and a user's random.py or select.py there
    # would take the place of the standard library's in the agent
    return Plan(agents=(Command("agent 0", (job.python, "-P", "-m", "paceline.agent")),), nodes=(node,))
