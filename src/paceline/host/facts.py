"""The facts of a machine, and the rules that check whether machines are compatible.

Collecting facts takes a tenth of a second. An agent sends them before it receives its plan, and doctor requests them
from every host. The rules are tables over facts, without I/O: `compare_hosts`.
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
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from paceline.host.cgroup import usable_cores
from paceline.host.gpus import Gpu, list_gpus
from paceline.host.tcp import resolve_addresses

PACKAGES = ("paceline", "torch", "numpy", "msgspec", "safetensors", "nvidia-nccl-cu12", "nvidia-nccl-cu13")
UNLIMITED = -1
RESOLVE_SECONDS = 1.0  # so that a name server that is down does not delay a start
NETWORK_INTERFACES_FOLDER = Path("/sys/class/net")
SOURCE_ROOT = Path(__file__).parents[1]
RECOMMENDED_OPEN_FILES = 4096  # open files: sockets to every other rank, loader workers, shards of checkpoints
MIN_OPEN_FILES = 256  # not sufficient for torch and one loader
SMALL_SHM_BYTES = 64 << 20  # Docker's default, which a few batches of loader workers fill
# versions must be equal on all hosts
PACKAGES_WITH_EQUAL_VERSIONS = ("paceline", "torch", "nvidia-nccl-cu12", "nvidia-nccl-cu13")

Severity = Literal["error", "warning"]


class Address(msgspec.Struct, frozen=True):
    interface: str
    address: str
    prefix: int


class ResourceLimit(msgspec.Struct, frozen=True):
    soft: int
    hard: int


class NodeFacts(msgspec.Struct, frozen=True):
    host: str
    pid: int
    python: str
    executable: str
    platform: str
    packages: dict[str, str]  # installed packages and their versions
    source: str  # digest of paceline's source code
    cwd: str
    addresses: tuple[Address, ...]  # of interfaces that are up, without loopback and link-local ones; IPv4 first
    down: tuple[Address, ...]  # of interfaces that are down or have no cable
    own_addresses: tuple[str, ...]  # the addresses of the host's name; empty if it does not resolve
    cores: int  # available to this process
    memory: int
    shm_size: int
    shm_free: int
    nofile: ResourceLimit
    memlock: ResourceLimit
    gpus: tuple[Gpu, ...]
    wall_seconds: float
    monotonic_seconds: float


def gather_facts() -> NodeFacts:
    import psutil  # every agent imports this module, but an agent of a single node collects no facts

    host = os.uname().nodename
    up, down = _addresses()
    shm_size, shm_free = _shared_memory()
    return NodeFacts(
        host=host, pid=os.getpid(), python=platform.python_version(), executable=sys.executable,
        platform=f"{platform.system()} {platform.machine()}", packages=dict(_versions()),
        source=source_digest(SOURCE_ROOT), cwd=str(Path.cwd()), addresses=up, down=down,
        own_addresses=resolve_host(host), cores=usable_cores(), memory=psutil.virtual_memory().total,
        shm_size=shm_size, shm_free=shm_free, nofile=_limit(resource.RLIMIT_NOFILE),
        memlock=_limit(resource.RLIMIT_MEMLOCK), gpus=list_gpus(), wall_seconds=time.time(),
        monotonic_seconds=time.monotonic(),
    )  # fmt: skip


def source_digest(root: Path) -> str:
    """A digest of all Python files under `root`, which differs between machines with different code."""
    sha = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        try:
            content = path.read_bytes()
        except OSError:  # a temporary file of an editor
            continue
        sha.update(f"{path.relative_to(root)}\0{len(content)}\0".encode())
        sha.update(content)
    return sha.hexdigest()[:12]


def resolve_host(name: str, seconds: float = RESOLVE_SECONDS) -> tuple[str, ...]:
    """The addresses of `name`, in the resolver's order; none if it is unknown or no name server answers in time."""
    addresses: list[str] = []

    def look_up() -> None:
        addresses.extend(address for _, address in resolve_addresses([name]))

    # the resolver has no time limit, and a daemon thread does not keep the process alive
    thread = threading.Thread(target=look_up, daemon=True)
    thread.start()
    thread.join(seconds)
    return tuple(addresses)


def _versions() -> Iterator[tuple[str, str]]:
    for name in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            yield name, importlib.metadata.version(name)


def _addresses() -> tuple[tuple[Address, ...], tuple[Address, ...]]:
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
            if not alive and (NETWORK_INTERFACES_FOLDER / interface / "bridge").is_dir():
                continue  # a bridge of Docker without a container, not an unplugged cable
            (up if alive else down).append(Address(interface, str(address), prefix=mask.bit_count()))
    up.sort(key=lambda a: ":" in a.address)  # stable: IPv4 first, else in the kernel's order
    return tuple(up), tuple(down)


def _shared_memory() -> tuple[int, int]:
    try:
        status = os.statvfs("/dev/shm")
    except OSError:
        return 0, 0
    return status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize


def _limit(number: int) -> ResourceLimit:
    soft, hard = (UNLIMITED if value == resource.RLIM_INFINITY else value for value in resource.getrlimit(number))
    return ResourceLimit(soft, hard)


# ---- compatibility of machines ----


class NodeProblem(msgspec.Struct, frozen=True):
    """A problem, its host, and the remedy. With an error, no run may start."""

    severity: Severity
    host: str
    what: str
    remedy: str


@dataclass(frozen=True)
class Node:
    name: str
    facts: NodeFacts
    workers: int
    threads: int  # per worker


@dataclass(frozen=True)
class NodeRule:
    """One row of the table of rules: each of the `facts` of a node for which `is_wrong` is true gives a finding."""

    check: str
    severity: Severity
    select_facts: Callable[[Any], Iterable[Any]]
    is_wrong: Callable[[Any], object]
    describe_problem: Callable[[Any], str]
    remedy: Callable[[Any], str] | str

    def findings(self, node: Node) -> Iterator[NodeProblem]:
        for fact in self.select_facts(node):
            if self.is_wrong(fact):
                remedy = self.remedy if isinstance(self.remedy, str) else self.remedy(fact)
                yield NodeProblem(self.severity, node.name, self.describe_problem(fact), remedy)


def node_as_tuple(node: Node) -> tuple[Node]:
    return (node,)


def open_file_limit(node: Node) -> tuple[int]:
    hard = node.facts.nofile.hard
    return (RECOMMENDED_OPEN_FILES if hard == UNLIMITED else hard,)


def _fewer(node: Node) -> str:
    cores = node.facts.cores
    fewer = f"--threads-per-rank {cores // node.workers}" if cores >= node.workers else f"--nproc {cores}"
    return f"use {fewer}, or have more cores granted (Slurm: --cpus-per-rank)"


NODE_RULES: tuple[NodeRule, ...] = (
    NodeRule("resources", "warning", node_as_tuple, lambda n: n.workers * n.threads > n.facts.cores,
         lambda n: f"{n.workers} workers x {n.threads} threads = {n.workers * n.threads} on {n.facts.cores} available "
         "cores", _fewer),
    NodeRule("resources", "error", open_file_limit, lambda files: files < MIN_OPEN_FILES,
         "a process may open at most {} files (ulimit -Hn)".format,
         f"raise it to {RECOMMENDED_OPEN_FILES} or more in /etc/security/limits.conf"),
    NodeRule("resources", "warning", open_file_limit, lambda files: MIN_OPEN_FILES <= files < RECOMMENDED_OPEN_FILES,
         "a process may open at most {} files (ulimit -Hn)".format,
         f"raise it to {RECOMMENDED_OPEN_FILES} or more in /etc/security/limits.conf"),
    NodeRule("resources", "warning", lambda n: (n.facts,),
         lambda f: f.shm_size < SMALL_SHM_BYTES or f.shm_free < SMALL_SHM_BYTES // 2,
         lambda f: f"/dev/shm has {_mib(f.shm_free)} free of {_mib(f.shm_size)}: loader workers pass batches in it",
         "mount a larger one, or delete files in it; Docker: --shm-size=1g"),
    NodeRule("resources", "warning", lambda n: (n.facts,),
         lambda f: f.gpus and f.memlock.soft != UNLIMITED and f.memlock.soft < 64 << 20,
         lambda f: f"only {f.memlock.soft >> 10} KiB of memory may be locked, which InfiniBand needs",
         "set memlock to unlimited in /etc/security/limits.conf"),
)  # fmt: skip

DIFFERENCE_RULES: tuple[tuple[Severity, str, Callable[[NodeFacts], str], str], ...] = (
    ("error", "the platform", lambda f: f.platform, "use nodes with the same platform"),
    ("warning", "the set of GPUs", lambda f: ", ".join(gpu.name for gpu in f.gpus) or "none",
     "the slowest GPU determines the speed: use nodes with the same GPUs"),
    ("warning", "the GPU driver", lambda f: f.gpus[0].driver if f.gpus else "", "install the same driver on all nodes"),
    ("warning", "the number of cores", lambda f: str(f.cores), "the slowest node determines the speed of all"),
)  # fmt: skip


def compare_hosts(hosts: Mapping[str, NodeFacts], workers: Mapping[str, int], threads: int) -> list[NodeProblem]:
    """The findings on one or more hosts, errors first.

    `hosts` are the facts by host name, node 0 first. `workers` is the number of processes on each host, with `threads`
    CPU threads each; 0: the cores divided by the processes.
    """
    nodes = [Node(name, facts, workers[name], max(1, threads)) for name, facts in hosts.items()]
    of_nodes = [finding for node in nodes for rule in NODE_RULES for finding in rule.findings(node)]
    # stable; "error" < "warning"
    return sorted([*find_differences(hosts), *of_nodes], key=lambda finding: finding.severity)


def find_differences(hosts: Mapping[str, NodeFacts]) -> Iterator[NodeProblem]:
    for severity, subject, read, remedy in DIFFERENCE_RULES:
        values = {name: read(facts) for name, facts in hosts.items()}
        yield from _differing(severity, subject, {name: value for name, value in values.items() if value}, remedy)
    python = {name: facts.python for name, facts in hosts.items()}
    minors = {version.rpartition(".")[0] for version in python.values()}
    severity, remedy = "warning", "install the same Python on all nodes, or select one with --python"
    yield from _differing("error" if len(minors) > 1 else severity, "Python", python, remedy)
    different = False
    for package in sorted({package for facts in hosts.values() for package in facts.packages}):
        values = {name: facts.packages.get(package, "missing") for name, facts in hosts.items()}
        common = Counter(value for value in values.values() if value != "missing").most_common(1)[0][0]
        remedy = f"install one version on all nodes: pip install {package}=={common}"
        severity = "error" if package in PACKAGES_WITH_EQUAL_VERSIONS else "warning"
        findings = [*_differing(severity, package, values, remedy)]
        different = different or (package == "paceline" and bool(findings))
        yield from findings
    if not different:  # different versions have different code
        source = {name: facts.source for name, facts in hosts.items()}
        remedy = "install the same paceline on all nodes, or use a folder on a common file system"
        yield from _differing("error", "the code of paceline", source, remedy)


def _differing(severity: Severity, subject: str, values: Mapping[str, str], remedy: str) -> Iterator[NodeProblem]:
    """One finding for each host whose value is not the majority's; one for all if there is no majority."""
    ranked = Counter(values.values()).most_common()
    if len(ranked) < 2:
        return
    common, count = ranked[0]
    if count == ranked[1][1]:
        text = ", ".join(f"{value} on {' and '.join(h for h in values if values[h] == value)}" for value, _ in ranked)
        yield NodeProblem(severity, ", ".join(values), f"{subject} differs: {text}", remedy)
        return
    others = ", ".join(host for host in values if values[host] == common)
    for host, value in values.items():
        if value != common:
            yield NodeProblem(severity, host, f"{subject} is {value}, but {common} on {others}", remedy)


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / (1 << 20):.0f} MiB"
