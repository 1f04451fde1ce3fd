"""Sets up what some faults need before they can strike: a small disk, a taken port, a damaged checkpoint."""

import os
import shlex
import socket
import subprocess
import threading
import time
import uuid
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from paceline.host.cleanup import has_environment_mark, kill_sessions
from paceline.host.procfs import PROC, processes

FAULTS_MARK = "PACELINE_FAULTS_MARK"  # processes that a planted fault starts inherit it, so they can be found and ended
CGROUPS = Path("/sys/fs/cgroup")
CGROUP_BYTES = 3 << 30
SHM_SIZE, DISK_SIZE = "8k", "400k"
# Never where everybody would lose /dev/shm, whatever becomes of `unshare`: $1 is the machine's own namespace.
SMALL = """
[ "$(readlink /proc/self/ns/mnt)" != "$1" ] || { echo "not in a mount namespace of its own" >&2; exit 70; }
mount -t tmpfs -o mode=1777,size="$2" tmpfs "$3" && shift 3 && exec "$@"
"""
SETTLE_SECONDS = 2.0  # what is just ending is not left behind
LAST_LINES_SECONDS = 0.05  # longer only if what is left behind holds the pipe open
SHM = Path("/dev/shm")
Popen = Callable[..., subprocess.Popen[bytes]]


@dataclass(frozen=True)
class Setup:
    """How the surroundings change the commands."""

    before: tuple[str, ...] = ()  # words before the command
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    port: int = 0
    words: tuple[str, ...] = ()  # further ones of `paceline train`
    strikes: bool = False  # these surroundings are the fault


@contextmanager
def surroundings(name: str, folder: Path, first: tuple[str, ...], env: Mapping[str, str]) -> Generator[Setup]:
    """The surroundings called `name`, for one run in `folder`; `first` and `env` start a run that goes well."""
    if name == "":
        yield Setup()
    elif name == "small shm":
        yield Setup(_mounted(SHM_SIZE, "/dev/shm"), strikes=True)
    elif name == "small disk":
        disk = folder / "disk"
        disk.mkdir()
        yield Setup(_mounted(DISK_SIZE, str(disk)), {"FAULT_CHECKPOINTS": str(disk)}, strikes=True)
    elif name == "two versions":
        for version in ("old", "new"):
            (folder / "versions" / version).mkdir(parents=True)
            (folder / "versions" / version / "helper.py").write_text(f"VERSION = {version!r}\n")
        yield Setup()
    elif name == "taken port":
        with socket.create_server(("", 0)) as taken:
            yield Setup(port=taken.getsockname()[1], strikes=True)
    elif name == "cgroup":
        with _cgroup(folder.name) as before:
            yield Setup(before)
    else:
        yield _damaged(name, folder, first, env)


def _mounted(size: str, where: str) -> tuple[str, ...]:
    """Words before a command that give it, alone on this machine, a file system of this size."""
    here = os.readlink("/proc/self/ns/mnt")  # noqa: PTH115 - no path
    return ("unshare", "--mount", "sh", "-c", SMALL, "sh", here, size, where)


@contextmanager
def _cgroup(name: str) -> Generator[tuple[str, ...]]:
    """Words before a command that let it use no more than CGROUP_BYTES."""
    old = (CGROUPS / "memory").is_dir()
    where = (CGROUPS / "memory" if old else CGROUPS) / f"paceline-faults-{os.getpid()}-{name}"
    where.mkdir()
    try:
        (where / ("memory.limit_in_bytes" if old else "memory.max")).write_text(str(CGROUP_BYTES))
        enter = shlex.quote(str(where / ("tasks" if old else "cgroup.procs")))
        yield ("sh", "-c", f'echo $$ > {enter} && exec "$@"', "sh")
    finally:
        where.rmdir()


def _damaged(name: str, folder: Path, first: tuple[str, ...], env: Mapping[str, str]) -> Setup:
    """A run that was done, whose newest checkpoint is then damaged; the next one goes on from there."""
    own = folder / "checkpoints"
    own.mkdir()
    env = {**env, "FAULT_CHECKPOINTS": str(own), "FAULT_STEPS": "20"}
    done = run_command(first, folder, env, limit_seconds=120)
    if done.code != 0:
        raise RuntimeError(f"the run before the fault did not end well:\n{done.text[-2000:]}")
    found = [*own.glob("step-*.pt"), *(folder / "run").glob("checkpoints/step-*/*")]
    newest = sorted({path if path.parent == own else path.parent for path in found})[-1]
    file = newest if newest.is_file() else max(newest.iterdir(), key=lambda path: path.stat().st_size)
    data = bytearray(file.read_bytes())
    middle = len(data) // 2
    if name.startswith("truncated"):
        del data[middle:]
    else:
        data[middle : middle + 4] = bytes(byte ^ 0xFF for byte in data[middle : middle + 4])
    file.chmod(0o600)
    file.write_bytes(data)
    return Setup(
        env={"FAULT_CHECKPOINTS": str(own)}, words=("--resume", "auto", "--allow-change", "steps"), strikes=True
    )


@dataclass(frozen=True)
class Ran:
    """What a command did. Times are of CLOCK_MONOTONIC."""

    code: int | None  # as a shell sees it; None: it was ended at the limit
    lines: tuple[tuple[float, str], ...]  # of stdout and stderr together
    began_seconds: float
    ended_seconds: float
    processes_left: tuple[str, ...]
    files_left: tuple[str, ...]

    @property
    def text(self) -> str:
        """All lines."""
        return "\n".join(line for _, line in self.lines)


def run_command(
    argv: Sequence[str], folder: Path, env: Mapping[str, str], *, limit_seconds: float, popen: Popen = subprocess.Popen
) -> Ran:
    """Run `argv` in `folder`, with an empty TMPDIR of its own; whatever it leaves running is counted and killed.

    `popen` starts it, perhaps on another host.
    """
    temporary, mark = folder / "tmp", uuid.uuid4().hex
    temporary.mkdir(exist_ok=True)
    shared = _names(SHM)
    began = time.monotonic()
    process = popen(
        argv,
        cwd=folder,
        env={**os.environ, **env, FAULTS_MARK: mark, "TMPDIR": str(temporary)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    lines: list[tuple[float, str]] = []
    reader = threading.Thread(target=_read, args=(process, lines), daemon=True)
    reader.start()
    try:
        with suppress(subprocess.TimeoutExpired):
            process.wait(limit_seconds)
        reader.join(LAST_LINES_SECONDS)
        code, ended = process.poll(), time.monotonic()
        left = _left(mark) if code is not None else ()
    finally:
        kill_sessions((), mark, variable=FAULTS_MARK)
        with suppress(ProcessLookupError):
            process.kill()
        process.wait()
        reader.join(SETTLE_SECONDS)
    files = sorted(_names(temporary))  # a folder with all in it counts once
    files += [str(SHM / name) for name in _names(SHM) - shared if not _mapped(name)]
    if code is not None and code < 0:
        code = 128 - code
    return Ran(code, tuple(lines), began, ended, left, tuple(sorted(files)))


def _read(process: subprocess.Popen[bytes], lines: list[tuple[float, str]]) -> None:
    """Each line as it comes, until everybody has closed the pipe."""
    assert process.stdout is not None
    with process.stdout as stream:
        for line in stream:
            lines.append((time.monotonic(), line.decode(errors="replace").removesuffix("\n")))


def _left(mark: str) -> tuple[str, ...]:
    deadline = time.monotonic() + SETTLE_SECONDS
    while (found := _carriers(mark)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return tuple(f"{pid} {words}" for pid, words in sorted(found.items()))


def _carriers(mark: str) -> dict[int, str]:
    """The living processes with this mark in their environment: pid -> command line."""
    found: dict[int, str] = {}
    for process in processes():
        if process.runs and has_environment_mark(process.pid, FAULTS_MARK, mark):
            with suppress(OSError):  # just ended
                words = (PROC / str(process.pid) / "cmdline").read_bytes().replace(b"\0", b" ")
                found[process.pid] = words.decode(errors="replace")[:100].strip()
    return found


def _names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} if folder.is_dir() else set()


def _mapped(name: str) -> bool:
    """Whether a living process uses the file: /dev/shm is everybody's, and ours are all dead by now."""
    for maps in PROC.glob("[0-9]*/maps"):
        with suppress(OSError):
            if f"/dev/shm/{name}" in maps.read_text():
                return True
    return False
