"""Whether machines fit together, and each its share of a run: from facts to findings. Pure."""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Literal

import msgspec

from paceline.host.facts import UNLIMITED, Facts

FEW_FILES = 4096  # open files: sockets to every other rank, loader workers, shards of checkpoints
TOO_FEW_FILES = 256  # not even torch and one loader
SMALL_SHM_BYTES = 64 << 20  # Docker's default: a few batches of loader workers fill it
GRAVE_PACKAGES = ("paceline", "torch", "nvidia-nccl-cu12", "nvidia-nccl-cu13")  # they talk with their own kind only


class Finding(msgspec.Struct, frozen=True):
    """Something that is wrong, on which host, and how to fix it. After an error nothing may start."""

    severity: Literal["error", "warning"]
    host: str
    what: str
    remedy: str


def compare_hosts(hosts: Mapping[str, Facts], workers: Mapping[str, int], threads: int) -> list[Finding]:
    """What is wrong with a set of hosts, or with one: errors first.

    `hosts` are the facts of each, by name, node 0 first; `workers` the processes on each, with so many CPU `threads`;
    0: the cores are shared among them.
    """
    found = [*differences(hosts), *shares(hosts, workers, threads)]
    return sorted(found, key=lambda finding: finding.severity)  # stable; "error" < "warning"


def differing(
    severity: Literal["error", "warning"], what: str, values: Mapping[str, str], remedy: str
) -> Iterator[Finding]:
    """One finding for each host whose value is not the majority's; one for all where there is no majority."""
    ranked = Counter(values.values()).most_common()
    if len(ranked) < 2:
        return
    common, count = ranked[0]
    if count == ranked[1][1]:
        told = ", ".join(f"{value} on {' and '.join(h for h in values if values[h] == value)}" for value, _ in ranked)
        yield Finding(severity, ", ".join(values), f"{what} differs: {told}", remedy)
        return
    others = ", ".join(host for host in values if values[host] == common)
    for host, value in values.items():
        if value != common:
            yield Finding(severity, host, f"{what} is {value}, but {common} on {others}", remedy)


def differences(hosts: Mapping[str, Facts]) -> Iterator[Finding]:
    """Where hosts differ, those in the minority."""

    def each(read: str) -> dict[str, str]:
        return {name: str(getattr(one, read)) for name, one in hosts.items()}

    yield from differing("error", "the platform", each("platform"), "use machines of one kind")
    minor = {name: ".".join(one.python.split(".")[:2]) for name, one in hosts.items()}
    if len(set(minor.values())) > 1:
        yield from differing("error", "Python", each("python"), "install the same Python, or choose one by --python")
    else:
        yield from differing("warning", "Python", each("python"), "install the same Python on all hosts")
    different = False
    for package in sorted({package for one in hosts.values() for package in one.packages}):
        values = {name: one.packages.get(package, "missing") for name, one in hosts.items()}
        severity = "error" if package in GRAVE_PACKAGES else "warning"
        common = Counter(value for value in values.values() if value != "missing").most_common(1)[0][0]
        remedy = f"install one version on all hosts: pip install {package}=={common}"
        findings = list(differing(severity, package, values, remedy))
        different = different or (package == "paceline" and bool(findings))
        yield from findings
    if not different:  # else it is clear that the code is another
        remedy = "install the same paceline on all hosts, or use one folder that all share"
        yield from differing("error", "paceline's own code", each("source"), remedy)
    cards = {name: ", ".join(gpu.name for gpu in one.gpus) or "none" for name, one in hosts.items()}
    yield from differing("warning", "the set of GPUs", cards, "the slowest card sets the pace: use hosts of one kind")
    drivers = {name: one.gpus[0].driver for name, one in hosts.items() if one.gpus}
    yield from differing("warning", "the GPU driver", drivers, "install the same driver on all hosts")
    yield from differing("warning", "the number of cores", each("cores"), "the slowest host sets the pace of all")


def shares(hosts: Mapping[str, Facts], workers: Mapping[str, int], threads: int) -> Iterator[Finding]:
    """Whether each host can bear its `workers`, each with so many threads."""
    for name, one in hosts.items():
        count = workers[name]
        wanted = count * max(1, threads)
        if wanted > one.cores:
            remedy = (
                f"use --threads-per-rank {one.cores // count}" if one.cores >= count else f"use --nproc {one.cores}"
            )
            what = f"{count} workers x {max(1, threads)} threads = {wanted} on {one.cores} cores that are granted here"
            yield Finding("warning", name, what, f"{remedy}, or have more cores granted (Slurm: --cpus-per-rank)")
        if one.nofile.hard != UNLIMITED and one.nofile.hard < FEW_FILES:
            severity = "error" if one.nofile.hard < TOO_FEW_FILES else "warning"
            what = f"a process may open at most {one.nofile.hard} files (ulimit -Hn)"
            yield Finding(severity, name, what, f"raise it to {FEW_FILES} or more in /etc/security/limits.conf")
        if one.shm_size < SMALL_SHM_BYTES or one.shm_free < SMALL_SHM_BYTES // 2:
            what = f"/dev/shm has {_mib(one.shm_free)} free of {_mib(one.shm_size)}: loader workers pass batches by it"
            yield Finding("warning", name, what, "mount a larger one, delete what lies in it; Docker: --shm-size=1g")
        if one.gpus and one.memlock.soft != UNLIMITED and one.memlock.soft < 64 << 20:
            what = f"only {one.memlock.soft >> 10} KiB of memory may be locked, which InfiniBand needs"
            yield Finding("warning", name, what, "set memlock to unlimited in /etc/security/limits.conf")


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / (1 << 20):.0f} MiB"
