"""The facts of this machine: what it is, and what it gives a run. Gathered in a tenth of a second; `compare` judges.

An agent announces them before it is sent its plan, and doctor asks every host for them.
"""

import hashlib
import importlib.metadata
import ipaddress
import os
import platform
import resource
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from paceline.host.cgroup import usable_cores
from paceline.host.gpus import Gpu, gpus_here
from paceline.host.reach import candidates

PACKAGES = ("paceline", "torch", "numpy", "msgspec", "safetensors", "nvidia-nccl-cu12", "nvidia-nccl-cu13")
UNLIMITED = -1
RESOLVE_SECONDS = 1.0  # a name server that is down must not hold up a start
NETWORKS = Path("/sys/class/net")
SOURCE_ROOT = Path(__file__).parents[1]


class Address(msgspec.Struct, frozen=True):
    """One address of a network interface; `prefix` is the number of bits its network has."""

    interface: str
    address: str
    prefix: int


class Limit(msgspec.Struct, frozen=True):
    """A limit of this process; -1 is none."""

    soft: int
    hard: int


class Facts(msgspec.Struct, frozen=True):
    """One machine as a process on it sees it. Sizes are in bytes."""

    host: str
    pid: int
    python: str
    executable: str
    platform: str
    packages: dict[str, str]  # those that are installed
    source: str  # digest of paceline's own code
    cwd: str
    addresses: tuple[Address, ...]  # of interfaces that are up, without loopback and link-local ones; IPv4 first
    down: tuple[Address, ...]  # of interfaces that are down, or have no cable
    own_addresses: tuple[str, ...]  # what the host's own name resolves to; empty: to nothing
    cores: int  # that this process may use
    memory: int
    shm_size: int
    shm_free: int
    nofile: Limit
    memlock: Limit
    gpus: tuple[Gpu, ...]
    wall_seconds: float
    monotonic_seconds: float


def gather() -> Facts:
    """The facts of this machine, now."""
    import psutil  # not with this module: every agent has it, and one of a single node asks for no facts

    host = os.uname().nodename
    up, down = _addresses()
    shm_size, shm_free = _shared_memory()
    return Facts(
        host=host,
        pid=os.getpid(),
        python=platform.python_version(),
        executable=sys.executable,
        platform=f"{platform.system()} {platform.machine()}",
        packages=dict(_versions()),
        source=source_digest(SOURCE_ROOT),
        cwd=str(Path.cwd()),
        addresses=up,
        down=down,
        own_addresses=resolve(host),
        cores=usable_cores(),
        memory=psutil.virtual_memory().total,
        shm_size=shm_size,
        shm_free=shm_free,
        nofile=_limit(resource.RLIMIT_NOFILE),
        memlock=_limit(resource.RLIMIT_MEMLOCK),
        gpus=gpus_here(),
        wall_seconds=time.time(),
        monotonic_seconds=time.monotonic(),
    )


def source_digest(root: Path) -> str:
    """A digest of all Python files under `root`: machines with different code have different ones."""
    sha = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        try:
            content = path.read_bytes()
        except OSError:  # an editor's file, gone again
            continue
        sha.update(f"{path.relative_to(root)}\0{len(content)}\0".encode())
        sha.update(content)
    return sha.hexdigest()[:12]


def resolve(name: str, seconds: float = RESOLVE_SECONDS) -> tuple[str, ...]:
    """The addresses of `name`, in the resolver's order; none where it is unknown, or nobody answers in time."""
    found: list[str] = []

    def look() -> None:
        found.extend(address for _, address in candidates([name]))

    # the resolver takes no time limit of its own, and a daemon thread lets the process end
    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    thread.join(seconds)
    return tuple(found)


def _versions() -> Iterator[tuple[str, str]]:
    for name in PACKAGES:
        try:
            yield name, importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue


def _addresses() -> tuple[tuple[Address, ...], tuple[Address, ...]]:
    """Those of interfaces that are up, and of those that are not."""
    import psutil

    stats = psutil.net_if_stats()
    up: list[Address] = []
    down: list[Address] = []
    for interface, entries in psutil.net_if_addrs().items():
        for entry in entries:
            if entry.family not in (socket.AF_INET, socket.AF_INET6):
                continue
            address = ipaddress.ip_address(entry.address.partition("%")[0])
            if address.is_loopback or address.is_link_local:
                continue
            mask = int(ipaddress.ip_address(entry.netmask)) if entry.netmask else (1 << address.max_prefixlen) - 1
            alive = interface in stats and stats[interface].isup
            if not alive and (NETWORKS / interface / "bridge").is_dir():
                continue  # Docker's, with no container on it: no pulled cable
            (up if alive else down).append(Address(interface, str(address), prefix=mask.bit_count()))
    up.sort(key=lambda one: ":" in one.address)  # stable: IPv4 first, else in the kernel's order
    return tuple(up), tuple(down)


def _shared_memory() -> tuple[int, int]:
    """Size and free bytes of /dev/shm; nothing where there is none."""
    try:
        status = os.statvfs("/dev/shm")
    except OSError:
        return 0, 0
    return status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize


def _limit(kind: int) -> Limit:
    soft, hard = (UNLIMITED if value == resource.RLIM_INFINITY else value for value in resource.getrlimit(kind))
    return Limit(soft, hard)
