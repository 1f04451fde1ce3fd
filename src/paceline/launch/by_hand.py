"""Commands for users who start each node themselves: one command per node, of torchrun or of paceline's agent."""

import shlex
from collections.abc import Iterator

from paceline.errors import UsageError
from paceline.launch.plan import Command, Plan, format_command, format_plan_file, node_plan
from paceline.protocol.control import BOOTSTRAP, RUN_ID, SECRET_NAME
from paceline.protocol.job import JobSpec, address_without_user, host_labels, node0_ports

PLAN_FILE = "plan.json"
NODE0_PLACEHOLDER = "NODE0"  # placeholder for the unknown name of node 0


def plan_by_hand(job: JobSpec) -> Plan:
    """The plan with one command for each node, which the user types there. Pure: it looks up and starts nothing.

    The commands use torchrun's static rendezvous. Each node has a fixed number, and the agents end when node 0 is lost.
    With c10d, clocks that differed by 20 s made a run of half the nodes.
    """
    if job.hosts and len(job.hosts) != job.nodes:
        raise UsageError(code="nodes-and-hosts-differ", value=job.nodes, count=len(job.hosts))
    if "\n" in job.cwd:
        raise UsageError(code="line-break-in-folder", cwd=job.cwd)
    if not job.torchrun:
        return _agents(job)
    if job.min_nodes < job.nodes:
        raise UsageError(code="torchrun-nodes-fixed", least=job.min_nodes, nodes=job.nodes)
    public_env = {name: value for name, value in job.env.items() if not SECRET_NAME.search(name)}
    env = {RUN_ID: job.run_id, "OMP_NUM_THREADS": str(job.threads or 1), **public_env}
    commands = tuple(Command(name, _torchrun(job, node, nproc), env) for node, (name, nproc) in enumerate(_nodes(job)))
    return Plan(manual_commands=commands, notes=tuple(_notes(job)))


def format_commands(plan: Plan) -> str:
    lines: list[str] = []
    for command in plan.manual_commands:
        lines += [f"# {command.name}", format_command(command), ""]
    return "\n".join([*lines, *(f"# {note}" for note in plan.notes)]) + "\n"


def _agents(job: JobSpec) -> Plan:
    node0, nodes = _node0(job), _nodes(job)
    if len({nproc for _, nproc in nodes}) > 1:
        raise UsageError(code="slots-differ")
    plan = node_plan(job, node=-1, nproc=nodes[0][1], node0=() if node0 == NODE0_PLACEHOLDER else (node0,))
    agent = (job.python, "-P", "-m", "paceline.launch.agent", "--plan", f"{job.submit_dir}/{PLAN_FILE}")
    commands = tuple(Command(name, (*agent, "--node", str(n), "--node0", node0)) for n, (name, _) in enumerate(nodes))
    return Plan(manual_commands=commands, files={PLAN_FILE: format_plan_file(plan)}, notes=tuple(_notes(job)))


def _torchrun(job: JobSpec, node: int, nproc: int) -> tuple[str, ...]:
    # torchrun expects the script itself: it adds its own Python, and it cannot start our bootstrap
    worker = job.argv[job.argv.index(BOOTSTRAP) + 1 :] if BOOTSTRAP in job.argv else ("--no-python", *job.argv)
    return (
        *(job.python, "-m", "torch.distributed.run"),
        f"--nnodes={job.nodes}",
        f"--node-rank={node}",
        f"--nproc-per-node={nproc}",
        f"--master-addr={_node0(job)}",
        f"--master-port={node0_ports(job)[0]}",
        *worker,
    )


def _nodes(job: JobSpec) -> list[tuple[str, int]]:
    if not job.hosts:
        return [(f"node {node}", job.nproc) for node in range(job.nodes)]
    names = host_labels(job.hosts)
    return [(f"node {k}: {names[k]}", host.slots or job.nproc) for k, host in enumerate(job.hosts)]


def _node0(job: JobSpec) -> str:
    return address_without_user(job.hosts[0]) if job.hosts else NODE0_PLACEHOLDER


def _notes(job: JobSpec) -> Iterator[str]:
    ports = node0_ports(job)[:1] if job.torchrun else node0_ports(job)
    if not job.hosts:
        yield f"Replace {NODE0_PLACEHOLDER} by a name or an address of node 0 that all other nodes can reach."
    if job.cwd:
        yield f"Run each line in the folder {shlex.quote(job.cwd)}, on all nodes within {job.join_seconds:.0f} s."
    if job.modules or job.activate:
        yield f"First, on each node: {' && '.join(_preparations(job))}"
    secret = [name for name in job.env if SECRET_NAME.search(name)]
    if secret and job.torchrun:
        yield f"Set {', '.join(secret)} on each node first. It looks secret, so it is not printed."
    node_0_ports = f"port {ports[0]}" if len(ports) == 1 else f"one of the ports {', '.join(map(str, ports))}"
    yield f"All nodes must reach node 0 at {node_0_ports}, and each other at ports that gloo or NCCL choose."
    yield "All nodes need the same folders at the same paths, and the same versions of Python, torch and paceline."
    if job.torchrun and not job.threads:
        yield "OMP_NUM_THREADS=1 works on any node; the number of cores per worker is faster."
    if job.torchrun and job.max_restarts:
        yield "torchrun does not restart a failed run: --max-restarts needs --agent paceline."
    if not job.torchrun:
        yield f"{PLAN_FILE} contains the secret of this run: only you may read it."


def _preparations(job: JobSpec) -> Iterator[str]:
    for module in job.modules:
        yield f"module load {shlex.quote(module)}"
    tool, colon, name = job.activate.partition(":")
    if colon and tool == "conda":
        yield f"conda activate {shlex.quote(name)}"
    elif job.activate:
        yield f"source {shlex.quote(job.activate)}"
