"""The processes of this machine, read from /proc: states, sessions, open files, and connections."""

import ctypes
import os
import resource
import signal
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
PR_SET_PDEATHSIG = 1
GUARD_THREAD = "paceline-guard"
HELPER_THREAD_NAMES = (GUARD_THREAD, "gloo_tcp_loop", "pt_tcpstore_uv", "pt_tcpstore")
"""Threads that never sleep long, and wake only threads that wait for other ranks."""
INPUT_SYSCALL_NUMBERS = {"x86_64": ((0, 19), (23, 270)), "aarch64": ((63, 65), (72,))}
"""The numbers of the system calls read and readv, and of select and pselect6, in which readline waits."""


@dataclass(frozen=True)
class Process:
    """One line of /proc/PID/stat. `start_ticks` is in clock ticks since boot; with the pid it identifies a process."""

    pid: int
    state: str  # R S D T Z ...
    parent: int
    session: int
    start_ticks: int
    cpu_seconds: float = 0.0  # used by all its threads
    wait_status: int = 0  # of a zombie, as from `os.waitpid`

    @property
    def runs(self) -> bool:
        return self.state not in "ZX"


def read_process(pid: int) -> Process | None:
    """The current state of a process; None if it does not exist."""
    try:
        text = (PROC / str(pid) / "stat").read_text(errors="replace")
    except OSError:
        return None
    # The command name is in parentheses and may contain spaces and parentheses.
    fields = text.rpartition(")")[2].split()
    cpu_seconds = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return Process(pid, fields[0], int(fields[1]), int(fields[3]), int(fields[19]), cpu_seconds, int(fields[-1]))


def queued_seconds(pid: int) -> float:
    try:
        return int((PROC / str(pid) / "schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0


def main_thread_sleep_id(pid: int) -> int:
    """The number of the main thread's current sleep, from the kernel's count; -1 if it does not sleep, or if unknown.

    A sleep is a timed one, as in `time.sleep`, or a stop by a signal. A wait for a file, a socket or a child is not a
    sleep. A wait for a thread is a sleep if all threads wait for threads, for example for a queue that no thread fills.
    The process must also have no child, which could wake them through shared memory.
    """
    try:
        state, waits_in, number = _thread(pid, pid)
        if "nanosleep" in waits_in or state in ("T", "t"):
            return number
        if "futex" not in waits_in:
            return -1
        for task in (PROC / str(pid) / "task").iterdir():
            if (task / "children").read_text():
                return -1
            if int(task.name) == pid or (task / "comm").read_text(errors="replace").strip() in HELPER_THREAD_NAMES:
                continue
            _, waits_in, switches = _thread(pid, int(task.name))
            if "futex" not in waits_in:
                return -1
            number += switches
    except (OSError, LookupError, ValueError):
        return -1
    return number


def waits_for_terminal_input(pid: int) -> bool:
    read_calls, select_calls = INPUT_SYSCALL_NUMBERS.get(os.uname().machine, ((), ()))

    def waits(task: str) -> bool:
        number, *arguments = (PROC / str(pid) / "task" / task / "syscall").read_text().split()
        if not arguments or not number.isdecimal():  # "running", or no system call
            return False
        first = int(arguments[0], 16)  # a descriptor; for select the highest one plus 1
        return (int(number) in read_calls and first == 0) or (int(number) in select_calls and first == 1)

    try:
        if waits(str(pid)):
            return True
        wakes = "futex" in (PROC / str(pid) / "wchan").read_text(errors="replace")
        return wakes and any(waits(task.name) for task in (PROC / str(pid) / "task").iterdir())
    except (OSError, ValueError):
        return False


def _thread(pid: int, task: int) -> tuple[str, str, int]:
    """The state of a thread, the kernel function in which it waits, and its number of voluntary context switches."""
    folder = PROC / str(pid) / "task" / str(task)
    status = (folder / "status").read_text(errors="replace")
    fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    waits_in = (folder / "wchan").read_text(errors="replace")
    return fields["State"].split()[0], waits_in, int(fields["voluntary_ctxt_switches"])


def processes() -> Iterator[Process]:
    for folder in PROC.iterdir():
        if folder.name.isdecimal() and (process := read_process(int(folder.name))) is not None:
            yield process


def open_descriptors() -> dict[int, str]:
    """The targets of this process's descriptors: paths, `socket:[inode]`, `/memfd:name (deleted)`."""
    files: dict[int, str] = {}
    for name in os.listdir(PROC / "self" / "fd"):  # noqa: PTH208 - names only
        with suppress(OSError):  # closed meanwhile, as the descriptor of the listing
            files[int(name)] = os.readlink(PROC / "self" / "fd" / name)  # noqa: PTH115 - no file behind it
    return files


def read_tcp_table(table: str) -> list[list[str]]:
    with suppress(OSError):
        return [row.split() for row in (PROC / "net" / table).read_text().splitlines()[1:]]
    return []


def proc_net_address(address: str, port: int) -> str:
    (number,) = struct.unpack("=I", socket.inet_aton(address))
    return f"{number:08X}:{port:04X}"


def tcp_connection_owner_uid(own: tuple[str, int], other: tuple[str, int]) -> int | None:
    """The user id of the process with the end `own` of an IPv4 connection on this machine; None if unknown."""
    ends = proc_net_address(*own), proc_net_address(*other)
    return next((int(row[7]) for row in read_tcp_table("tcp") if (row[1], row[2]) == ends), None)


def describe_port_owner(port: int) -> str | None:
    """`pid 4711 (python server.py)` for the process that listens on the port; None if /proc does not show it."""
    import psutil  # only for an error message: the import takes time

    for connection in psutil.net_connections("tcp"):
        at = connection.laddr
        if connection.status == psutil.CONN_LISTEN and at and at.port == port and connection.pid is not None:
            with suppress(psutil.Error):  # it belongs to a different user, or has just ended
                # two arguments identify the program; further ones may contain passwords
                arguments = psutil.Process(connection.pid).cmdline()[:2]
                return f"pid {connection.pid} ({' '.join(arguments).strip()[:80]})"
    return None


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when its parent ends; end immediately if the parent has already ended.

    Children do not inherit this: every DataLoader worker also calls it, in its `worker_init_fn`. For the kernel, the
    parent is the *thread* that forked. Therefore fork only from threads that live as long as the process.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:  # the parent ended before prctl, so no signal will arrive
        os._exit(128 + signal.SIGKILL)


def raise_open_file_limit(count: int) -> None:
    """Raise the limit of open files of this process to `count`, if allowed. The limit of a shell is usually 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count if hard == resource.RLIM_INFINITY else min(count, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
