"""How does a process get into a host's namespaces, so that Popen's pid, signals and exit code are that very process's?

`nsenter --pid` would fork: a signal sent to it never reaches the command, a killed command looks like exit code 137.
Here the *parent* says in which pid namespace its next child is born (setns concerns children only), and nsenter enters
the other namespaces and execs. So `popen(...).send_signal(SIGINT)` means what it means for a local process.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
from collections.abc import Generator, Iterator, Mapping
from pathlib import Path
from typing import Any

CLONE_NEWPID = 0x20000000


def popen(
    pid: int, *argv: str, cwd: str | Path | None = None, env: Mapping[str, str] | None = None, **options: Any
) -> subprocess.Popen[Any]:
    """Start a command in all namespaces of process `pid`, in a session of its own; stdin is empty unless given.

    `cwd` is a path there, this process's own by default. The other options are Popen's.
    """
    spaces = ("--net", "--uts", "--ipc", "--mount", "--cgroup")
    enter = ["nsenter", "--target", str(pid), *spaces, f"--wdns={cwd or Path.cwd()}", "--", *argv]
    options.setdefault("stdin", subprocess.DEVNULL)
    options.setdefault("start_new_session", True)
    with children_in(pid):
        return subprocess.Popen(enter, env=env, **options)


def run(pid: int, *argv: str, timeout: float = 180, **options: Any) -> subprocess.CompletedProcess[str]:
    """Like subprocess.run with captured text, in the namespaces of process `pid`. TimeoutExpired kills its group."""
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **options}
    given = options.pop("input", None)
    if given is not None:
        options["stdin"] = subprocess.PIPE
    with popen(pid, *argv, **options) as process:
        try:
            out, err = process.communicate(given, timeout)
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            raise
    return subprocess.CompletedProcess(argv, process.returncode, out, err)


def checked(done: subprocess.CompletedProcess[str]) -> str:
    """What the command printed; RuntimeError with all its words if it failed."""
    if done.returncode:
        raise RuntimeError(f"{done.args}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def members(pid: int) -> Iterator[int]:
    """All processes that share the pid namespace of process `pid`, itself too; none when it has ended."""
    with contextlib.suppress(OSError):
        space = os.readlink(f"/proc/{pid}/ns/pid")  # noqa: PTH115 - a few hundred times: fast
        for name in os.listdir("/proc"):  # noqa: PTH208
            if name.isdigit():
                with contextlib.suppress(OSError):
                    if os.readlink(f"/proc/{name}/ns/pid") == space:  # noqa: PTH115
                        yield int(name)


def is_alive(pid: int) -> bool:
    """Whether the process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


@contextlib.contextmanager
def children_in(pid: int) -> Generator[None]:
    """Children that this thread starts meanwhile are born in the pid namespace of process `pid`."""
    own = os.open("/proc/self/ns/pid", os.O_RDONLY)
    try:
        theirs = os.open(f"/proc/{pid}/ns/pid", os.O_RDONLY)
        try:
            _setns(theirs)
        finally:
            os.close(theirs)
        try:
            yield
        finally:
            _setns(own)
    finally:
        os.close(own)


def _setns(fd: int) -> None:  # os.setns is Python 3.12's
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(fd, CLONE_NEWPID):
        error = ctypes.get_errno()
        raise OSError(error, f"setns: {os.strerror(error)}")
