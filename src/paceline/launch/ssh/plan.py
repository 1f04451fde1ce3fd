"""Hosts reached by the user's own OpenSSH client: one session and one agent on each."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from paceline.errors import UsageError
from paceline.launch.hosts import labels, plain_name
from paceline.launch.job import Command, Host, Job, Plan
from paceline.launch.node_plans import node_plan

SILENCE_SECONDS = 30.0  # an agent that hears nothing for so long ends its workers: the network is cut
CONNECT_SECONDS = 10

# No terminal: what the agent and we send each other must pass unchanged. No prompt: nobody could answer in N sessions.
# None of the user's own forwardings and commands, which may be for people; and no master for other sessions, which
# would live on after this one (one that runs already is used).
OPTIONS = (
    "-T",
    "-x",
    *("-o", "BatchMode=yes"),
    *("-o", f"ConnectTimeout={CONNECT_SECONDS}"),
    *("-o", "ServerAliveInterval=5"),
    *("-o", "ServerAliveCountMax=3"),
    *("-o", "ControlMaster=no"),
    *("-o", "ClearAllForwardings=yes"),
    *("-o", "RemoteCommand=none"),
)


def ssh(job: Job) -> Plan:
    """The plan for `job.hosts`. Pure: nothing is looked up or started.

    Nothing of the user's but the path of Python is on a command line, where every user of the host could read it; the
    rest (the command, its environment, the secret) goes through the sessions' stdin.

    Raises:
        UsageError: when hosts and nodes contradict each other.
    """
    if not job.hosts:
        raise UsageError("--on ssh needs --hosts: name[:port],name,... or a file with one `name[:port]` on each line")
    if job.nodes != len(job.hosts):
        raise UsageError(f"--nodes {job.nodes} with {len(job.hosts)} hosts: leave --nodes out, or give as many hosts")
    remote = agent_command(job.python)
    head = (plain_name(job.hosts[0]),)  # its addresses are added when it has announced them
    return Plan(
        agents=tuple(
            Command(label, (*client(job.ssh, host), "--", destination(host), remote))
            for label, host in zip(labels(job.hosts), job.hosts, strict=True)
        ),
        nodes=tuple(
            node_plan(job, node=node, nproc=host.slots or job.nproc, head=head, silence_seconds=SILENCE_SECONDS)
            for node, host in enumerate(job.hosts)
        ),
    )


def agent_command(python: str) -> str:
    """The line for the remote shell, whatever shell that is: words in single quotes mean themselves in all of them."""
    # exec: no shell stays between the session and the agent. -P: see local.py
    return "exec " + shlex.join([python, "-P", "-m", "paceline.agent", "--announce"])


def client(command: Sequence[str], host: Host) -> tuple[str, ...]:
    """The ssh client's words up to the `--` before the host."""
    port = () if host.port is None else ("-p", str(host.port))
    return (*command, *OPTIONS, *port)


def destination(host: Host) -> str:
    """What ssh calls the host: IPv6 addresses without brackets."""
    user, at, _ = host.name.rpartition("@")
    return f"{user}{at}{plain_name(host)}"
