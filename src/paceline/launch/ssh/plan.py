"""Hosts reached by the user's own OpenSSH client: a session and an agent on each; the working folder by his rsync."""

import shlex
import subprocess
from collections.abc import Sequence
from contextlib import suppress

from msgspec.structs import replace

from paceline.errors import UsageError
from paceline.launch.plan import Command, Plan, node_plan
from paceline.protocol.job import Host, JobSpec, labels, plain_name

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

EXCLUDED = (".git", ".venv", "/runs", "__pycache__")  # `/runs`: that of the folder itself only
SYNC_SECONDS = 3600.0
WORDS_OF_AN_ERROR = 2  # lines of rsync's, which says the reason first


def ssh(job: JobSpec) -> Plan:
    """The plan for `job.hosts`. Pure: nothing is looked up or started.

    Nothing of the user's but the path of Python is on a command line, where every user of the host could read it; the
    rest (the command, its environment, the secret) goes through the sessions' stdin.

    Raises:
        UsageError: when hosts and nodes contradict each other.
    """
    if not job.hosts:
        raise UsageError(code="ssh-without-hosts")
    if not min(job.min_nodes, job.nodes) <= len(job.hosts) <= job.nodes:
        raise UsageError(code="nodes-and-hosts-differ", value=job.nodes, count=len(job.hosts))
    job = replace(job, silence_seconds=SILENCE_SECONDS)
    head = (plain_name(job.hosts[0]),)  # its addresses are added when it has announced them
    return Plan(
        # -P: see launch.plan.local
        agents=sessions(job.ssh, job.hosts, job.python, "-P", "-m", "paceline.launch.agent", "--announce"),
        nodes=tuple(node_plan(job, node, nproc=host.slots or 0, head=head) for node, host in enumerate(job.hosts)),
    )


def sessions(ssh: Sequence[str], hosts: tuple[Host, ...], python: str, *words: str) -> tuple[Command, ...]:
    """A session to each host that runs `python` with these words; they are quoted for any shell."""
    remote = "exec " + shlex.join([python, *words])  # exec: no shell stays between the session and the program
    return tuple(
        Command(label, (*client(ssh, host), "--", destination(host), remote))
        for label, host in zip(labels(hosts), hosts, strict=True)
    )


def client(command: Sequence[str], host: Host) -> tuple[str, ...]:
    """The ssh client's words up to the `--` before the host."""
    port = () if host.port is None else ("-p", str(host.port))
    return (*command, *OPTIONS, *port)


def destination(host: Host) -> str:
    """What ssh calls the host: IPv6 addresses without brackets."""
    user, at, _ = host.name.rpartition("@")
    return f"{user}{at}{plain_name(host)}"


def rsync_commands(job: JobSpec) -> list[Command]:
    """One rsync for each host, from the working folder here to that of the same path there.

    Without --delete: other files of the hosts are not removed.

    Raises:
        UsageError: if there is no full path of a working folder.
    """
    if not job.cwd.startswith("/"):
        raise UsageError(code="sync-relative-folder", value=job.cwd)
    folder = job.cwd.rstrip("/") + "/"
    rsync = ("rsync", "-a", "--protect-args", *(f"--exclude={name}" for name in EXCLUDED))  # no shell sees the paths
    return [
        Command(label, (*rsync, "-e", shlex.join(client(job.ssh, host)), "--", folder, f"{host.name}:{folder}"))
        for label, host in zip(labels(job.hosts), job.hosts, strict=True)
    ]


def sync(commands: Sequence[Command]) -> None:
    """Run them all at once.

    Raises:
        UsageError: when rsync is missing here, or has failed; every host with its reason.
    """
    started: list[tuple[Command, subprocess.Popen[str]]] = []
    wrong: list[str] = []
    try:
        for command in commands:
            process = subprocess.Popen(
                command.argv,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                encoding="utf-8",
                errors="replace",
            )
            started.append((command, process))
        for command, process in started:
            _, words = process.communicate(timeout=SYNC_SECONDS)
            if process.returncode:
                lines = [line for line in words.splitlines() if line.strip()] or [f"exit code {process.returncode}"]
                wrong.append(f"{command.name}: {' / '.join(lines[:WORDS_OF_AN_ERROR])}")
    except FileNotFoundError as error:
        raise UsageError(code="no-rsync") from error
    except subprocess.TimeoutExpired as error:
        raise UsageError(code="sync-timed-out", seconds=SYNC_SECONDS) from error
    finally:
        for _, process in started:
            with suppress(ProcessLookupError):
                process.terminate()
            process.wait()
            if process.stderr is not None:
                process.stderr.close()
    if wrong:
        raise UsageError(code="sync-failed", wrong="\n  ".join(wrong))
