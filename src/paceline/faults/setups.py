"""Sets up what some faults need before they can strike: a small disk, a taken port, a damaged checkpoint."""

import os
import shlex
import socket
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from paceline.faults.command import run_command

CGROUPS = Path("/sys/fs/cgroup")
CGROUP_BYTES = 3 << 30
SHM_SIZE, DISK_SIZE = "8k", "400k"
# Never where everybody would lose /dev/shm, whatever becomes of `unshare`: $1 is the machine's own namespace.
SMALL = """
[ "$(readlink /proc/self/ns/mnt)" != "$1" ] || { echo "not in a mount namespace of its own" >&2; exit 70; }
mount -t tmpfs -o mode=1777,size="$2" tmpfs "$3" && shift 3 && exec "$@"
"""


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
        (folder / "disk").mkdir()
        yield Setup(
            _mounted(DISK_SIZE, str(folder / "disk")), {"FAULT_CHECKPOINTS": str(folder / "disk")}, strikes=True
        )
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
