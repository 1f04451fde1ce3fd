"""The processes of this machine, read from /proc: their states, their sessions, and the process at a port."""

import ctypes
import os
import resource
import signal
import socket
import struct
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
PR_SET_PDEATHSIG = 1
LISTENING = "0A"  # the kernel's number for TCP_LISTEN in /proc/net/tcp
GUARD_THREAD = "paceline-guard"
APART = (GUARD_THREAD, "gloo_tcp_loop", "pt_tcpstore_uv", "pt_tcpstore")
"""threads that never sleep for long, and wake only threads that wait for other ranks"""


READING: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "x86_64": ((0, 19), (23, 270)),
    "aarch64": ((63, 65), (72,)),
}
"""the numbers of the system calls read and readv; select and pselect6, in which readline waits"""


@dataclass(frozen=True)
class Process:
    """One line of /proc/PID/stat. `start` is in clock ticks since boot: with the pid it names one process for ever."""

    pid: int
    state: str  # R S D T Z ...
    parent: int
    session: int
    start: int
    cpu_seconds: float = 0.0  # used so far, by all its threads

    @property
    def runs(self) -> bool:
        """Whether it is more than a zombie."""
        return self.state not in "ZX"


def read_process(pid: int) -> Process | None:
    """The process now, or None when there is none (or no /proc, as on macOS)."""
    try:
        text = (PROC / str(pid) / "stat").read_text(errors="replace")
    except OSError:
        return None
    # The command's name is in parentheses and may hold spaces and parentheses: split after the last one.
    fields = text.rpartition(")")[2].split()
    cpu_seconds = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return Process(pid, fields[0], int(fields[1]), int(fields[3]), int(fields[19]), cpu_seconds)


def queued_seconds(pid: int) -> float:
    """How long its main thread has been ready to run without a free core; 0 if unknown."""
    try:
        return int((PROC / str(pid) / "schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0


def sleep_number(pid: int) -> int:
    """The number of the sleep in which the main thread is, by the kernel's count; -1 if it is in none, or unknown.

    A sleep ends at a time, as in `time.sleep`, or is a stop by a signal: not a wait for a file, a socket, a child. A
    wait for a thread counts as well, if all threads wait for a thread (for a queue that no thread fills any more), and
    no child could wake them through shared memory.
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
            if int(task.name) == pid or (task / "comm").read_text(errors="replace").strip() in APART:
                continue
            _, waits_in, more = _thread(pid, int(task.name))
            if "futex" not in waits_in:
                return -1
            number += more
    except (OSError, LookupError, ValueError):
        return -1
    return number


def reads_input(pid: int) -> bool:
    """Whether its main thread waits for standard input, or for one of its threads that does."""
    read, select = READING.get(os.uname().machine, ((), ()))

    def waits(task: str) -> bool:
        number, *arguments = (PROC / str(pid) / "task" / task / "syscall").read_text().split()
        if not arguments or not number.isdecimal():  # "running", or no system call
            return False
        first = int(arguments[0], 16)  # a descriptor; or the highest of those that are looked at, plus 1
        return (int(number) in read and first == 0) or (int(number) in select and first == 1)

    try:
        if waits(str(pid)):
            return True
        wakes = "futex" in (PROC / str(pid) / "wchan").read_text(errors="replace")
        return wakes and any(waits(task.name) for task in (PROC / str(pid) / "task").iterdir())
    except (OSError, ValueError):
        return False


def _thread(pid: int, task: int) -> tuple[str, str, int]:
    """Its state, the kernel's function in which it waits, and how often it has begun to wait."""
    folder = PROC / str(pid) / "task" / str(task)
    status = (folder / "status").read_text(errors="replace")
    words = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    waits_in = (folder / "wchan").read_text(errors="replace")
    return words["State"].split()[0], waits_in, int(words["voluntary_ctxt_switches"])


def processes() -> Iterator[Process]:
    """Every process of this machine that we can see."""
    for folder in PROC.iterdir() if PROC.is_dir() else ():
        if folder.name.isdecimal() and (process := read_process(int(folder.name))) is not None:
            yield process


def open_files(pid: int | str = "self") -> dict[int, str]:
    """What the descriptors of a process are: paths, `socket:[inode]`, `/memfd:name (deleted)`.

    Raises:
        OSError: it is another user's, or gone.
    """
    found: dict[int, str] = {}
    for name in os.listdir(PROC / str(pid) / "fd"):  # noqa: PTH208 - names only
        with suppress(OSError):  # closed again, as the listing's own
            found[int(name)] = os.readlink(PROC / str(pid) / "fd" / name)  # noqa: PTH115 - no file behind it
    return found


def tcp_connections(table: str) -> list[list[str]]:
    """The rows of /proc/net/tcp or tcp6, split into words; none if there is no such table."""
    with suppress(OSError):
        return [row.split() for row in (PROC / "net" / table).read_text().splitlines()[1:]]
    return []


def proc_net_address(address: str, port: int) -> str:
    """An IPv4 address and port as /proc/net/tcp writes them."""
    (number,) = struct.unpack("=I", socket.inet_aton(address))
    return f"{number:08X}:{port:04X}"


def tcp_owner(own: tuple[str, int], other: tuple[str, int]) -> int | None:
    """The user id of the process at the end `own` of this IPv4 connection on this machine; None if unknown."""
    ends = proc_net_address(*own), proc_net_address(*other)
    return next((int(row[7]) for row in tcp_connections("tcp") if (row[1], row[2]) == ends), None)


def port_holder(port: int) -> str | None:
    """`pid 4711 (python server.py)` for the process that listens on the port; None if /proc does not show it."""
    rows = [*tcp_connections("tcp"), *tcp_connections("tcp6")]
    its = [row for row in rows if row[3] == LISTENING and int(row[1].rpartition(":")[2], 16) == port]
    wanted = {f"socket:[{row[9]}]" for row in its}
    for process in processes() if wanted else ():
        try:
            links = open_files(process.pid).values()
            words = (PROC / str(process.pid) / "cmdline").read_bytes().decode(errors="replace").split("\0")
        except OSError:  # another user's, or just ended
            continue
        if wanted.intersection(links):
            # Two words say which program it is; further ones may hold passwords.
            return f"pid {process.pid} ({' '.join(words[:2]).strip()[:80]})"
    return None


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process as soon as its parent is gone; end at once if it is gone already.

    Not inherited by children: every DataLoader worker calls it too, in its `worker_init_fn`. The kernel means the
    *thread* that forked, so fork from threads that live as long as the process. Without prctl (not Linux) only the
    check is left.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:  # it died before prctl: the signal will never come
        os._exit(128 + signal.SIGKILL)


def allow_files(count: int) -> None:
    """Raise the limit of this process to `count` open files, if that is allowed: a shell's is 1024 mostly."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count if hard == resource.RLIM_INFINITY else min(count, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
