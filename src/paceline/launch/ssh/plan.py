"""The plan for hosts over the user's OpenSSH client: one session and one agent for each host. Also rsync commands."""

import shlex
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from msgspec.structs import replace

from paceline.errors import UsageError
from paceline.launch.plan import Command, Plan, node_plan
from paceline.protocol.job import Host, JobSpec, address_without_user, host_labels

SILENCE_SECONDS = 30.0  # an agent without heartbeats for this time ends its workers: the network is down
CONNECT_SECONDS = 10

# No terminal (-T), since it would change the data between the agent and the launcher. No prompts, since the user cannot
# answer them in N sessions. No forwardings and commands from the user's configuration, which may be for interactive
# use. No new master connection, since it would outlive this session (ssh uses an existing one).
SSH_OPTIONS = (
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

RSYNC_EXCLUDES = (".git", ".venv", "/runs", "__pycache__")  # `/runs`: only in the folder itself, not in its subfolders
SYNC_SECONDS = 3600.0
MAX_ERROR_LINES = 2  # of rsync's output, which begins with the reason


def plan_ssh(job: JobSpec) -> Plan:
    """The plan for `job.hosts`. Pure: it looks up and starts nothing.

    Every user of a host can read command lines, so they contain only the path of Python. The command of the workers,
    its environment and the secret are sent through stdin of the sessions.
    """
    job = replace(job, silence_seconds=SILENCE_SECONDS)
    node0 = (address_without_user(job.hosts[0]),)  # its addresses are added once its agent has announced them
    return Plan(
        # -P: see launch.plan.local
        agents=session_commands(job.ssh, job.hosts, job.python, "-P", "-m", "paceline.launch.agent", "--announce"),
        nodes=tuple(node_plan(job, node, nproc=host.slots or 0, node0=node0) for node, host in enumerate(job.hosts)),
    )


def session_commands(ssh: Sequence[str], hosts: tuple[Host, ...], python: str, *arguments: str) -> tuple[Command, ...]:
    remote = "exec " + shlex.join([python, *arguments])  # exec: no shell stays between the session and the program
    return tuple(
        Command(label, (*ssh_client_command(ssh, host), "--", destination(host), remote))
        for label, host in zip(host_labels(hosts), hosts, strict=True)
    )


def ssh_client_command(command: Sequence[str], host: Host) -> tuple[str, ...]:
    """The ssh command with its options, up to the `--` before the host."""
    port = () if host.port is None else ("-p", str(host.port))
    return (*command, *SSH_OPTIONS, *port)


def destination(host: Host) -> str:
    user, at, _ = host.name.rpartition("@")
    return f"{user}{at}{address_without_user(host)}"


def rsync_commands(job: JobSpec) -> list[Command]:
    """One rsync command for each host, to the same path. There is no --delete, so other files on the hosts stay."""
    if not job.cwd.startswith("/"):
        raise UsageError(code="sync-relative-folder", value=job.cwd)
    folder = job.cwd.rstrip("/") + "/"
    # no shell sees the paths
    rsync = ("rsync", "-a", "--protect-args", *(f"--exclude={name}" for name in RSYNC_EXCLUDES))
    return [
        Command(
            label, (*rsync, "-e", shlex.join(ssh_client_command(job.ssh, host)), "--", folder, f"{host.name}:{folder}")
        )
        for label, host in zip(host_labels(job.hosts), job.hosts, strict=True)
    ]


def run_rsync(commands: Sequence[Command]) -> None:
    def run(command: Command) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command.argv, stdin=subprocess.DEVNULL, capture_output=True, encoding="utf-8", errors="replace",
            timeout=SYNC_SECONDS, check=False,
        )  # fmt: skip

    failures: list[str] = []
    try:
        with ThreadPoolExecutor(len(commands)) as pool:
            for command, done in zip(commands, pool.map(run, commands), strict=True):
                if done.returncode:
                    lines = [line for line in done.stderr.splitlines() if line.strip()]
                    reason = " / ".join(lines[:MAX_ERROR_LINES]) or f"exit code {done.returncode}"
                    failures.append(f"{command.name}: {reason}")
    except FileNotFoundError as error:
        raise UsageError(code="no-rsync") from error
    except subprocess.TimeoutExpired as error:
        raise UsageError(code="sync-timed-out", seconds=SYNC_SECONDS) from error
    if failures:
        raise UsageError(code="sync-failed", wrong="\n  ".join(failures))
