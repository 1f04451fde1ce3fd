"""How does a host start? As the first process of new namespaces, which mounts what is its own and then only reaps."""

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.cluster import cgroups, namespaces

# Without the marker of the test run: what a host or a daemon starts is no child of a test.
ENVIRONMENT = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8"}

# Adopts and reaps orphans, as pid 1 must. Signals other than SIGKILL do not reach a pid 1 without handlers.
INIT = """
import os, signal
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
while signal.sigwait([signal.SIGCHLD]):
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass
"""
INIT_COMMAND = (sys.executable, "-I", "-S", "-c", INIT)

# Its pid as the machine knows it: /proc is still the machine's. A redirected builtin does not fork.
SAY_PID = 'read -r pid rest </proc/self/stat; echo "pid $pid"\n'

BOOT = f"""set -e
{SAY_PID}
folder=$1; host=$2; controllers=$3; shift 3
hostname "$host"
mount -t tmpfs -o mode=755 tmpfs /run; mkdir /run/sshd /run/cgroup
mount --rbind /sys/fs/cgroup /run/cgroup; mount -t sysfs sysfs /sys; mount --move /run/cgroup /sys/fs/cgroup
rmdir /run/cgroup
for controller in $controllers; do
    umount "/sys/fs/cgroup/$controller"  # the same file system twice in one place is refused
    mount -t cgroup -o "$controller" cgroup "/sys/fs/cgroup/$controller"
done
mount -t tmpfs -o mode=1777 tmpfs /dev/shm
mount --bind "$folder/$host-hosts" /etc/hosts; mount --bind "$folder/nsswitch.conf" /etc/nsswitch.conf
mount -t proc proc /proc
echo ready; exec "$@" >/dev/null 2>&1
"""

JOIN = 'for file in $1; do echo 0 >"$file"; done; shift; exec "$@"'  # 0: the writer itself


@dataclass(frozen=True)
class Room:
    """Where all hosts of a lab live. `pid` is its init, `process` what dies with the test run and takes it along."""

    process: subprocess.Popen[str]
    pid: int


def start_room() -> Room:
    """A pid and a network namespace that end when this thread's process ends, however it does."""
    script = f'{SAY_PID} echo ready; exec "$@" >/dev/null 2>&1'
    words = ("setpriv", "--pdeathsig", "KILL", "unshare", "--net", "--pid", "--fork", "--kill-child")
    process = subprocess.Popen(
        [*words, "sh", "-c", script, "init", *INIT_COMMAND],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env=ENVIRONMENT,
    )
    return Room(process, _said(process))


def start_host(room: Room, host: str, folder: Path) -> int:
    """Start a host and return its init's pid. Its parent is the room's init: no child of a test, no leak."""
    tasks = " ".join(str(path / "tasks") for path in cgroups.make(host))
    spaces = ("--net", "--uts", "--ipc", "--mount", "--cgroup", "--pid", "--fork", "--kill-child")
    boot = ("sh", "-c", BOOT, "init", str(folder), host, " ".join(cgroups.controllers()), *INIT_COMMAND)
    with namespaces.children_in(room.pid):
        process = subprocess.Popen(
            ["setsid", "--fork", "sh", "-c", JOIN, "join", tasks, "unshare", *spaces, *boot],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=ENVIRONMENT,
        )
    with process:
        return _said(process)


def in_cgroups(argv: list[str]) -> list[str]:
    """The command, to be started inside a host, as a member of the host's own cgroups: nsenter does not move it."""
    tasks = " ".join(str(cgroups.ROOT / name / "tasks") for name in cgroups.controllers())
    return ["sh", "-c", JOIN, "join", tasks, *argv]


def write_names(folder: Path, host: str, lines: list[str]) -> None:
    """Write a host's /etc/hosts in place: the file is bound into the host. No other source of names, so no waits."""
    (folder / "nsswitch.conf").write_text("passwd: files\ngroup: files\nhosts: files\n")
    (folder / f"{host}-hosts").write_text("\n".join(lines) + "\n")


def _said(process: subprocess.Popen[str]) -> int:
    """The pid that a starting init says; RuntimeError with all its words if it does not get ready."""
    assert process.stdout is not None
    lines: list[str] = []
    for line in process.stdout:
        lines.append(line)
        if line == "ready\n":
            process.stdout.close()
            return int(next(words for words in lines if words.startswith("pid ")).split()[1])
    raise RuntimeError(f"a host did not start:\n{''.join(lines)}")
