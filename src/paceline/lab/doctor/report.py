"""The rules of `paceline doctor`, and its report: a line per check with the fix of each finding, or JSON."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import msgspec
from rich.console import Console
from rich.text import Text

from paceline.errors import plural
from paceline.guard.report import printable
from paceline.host.facts import (
    NODE_RULES,
    Address,
    Node,
    NodeFacts,
    NodeProblem,
    NodeRule,
    find_differences,
    node_as_tuple,
)
from paceline.host.tcp import is_loopback
from paceline.lab.doctor.host import FactsAnswer
from paceline.lab.doctor.survey import Survey

MAX_CLOCK_OFFSET_SECONDS = 2.0
BUSY_BYTES = 1 << 30  # of a GPU's memory in use: more than a driver and a desktop need
LOW_SPACE_BYTES, NO_SPACE_BYTES = 1 << 30, 64 << 20
FREE_SPACE_ADVICE = "delete unneeded files, or choose a different --run-dir"
SLOW_BYTES_PER_SECOND = 500e6 / 8  # half of a 1 Gbit/s network
STYLES = {"ok": "green", "warning": "yellow", "error": "bold red", "-": "dim"}


class Check(msgspec.Struct, frozen=True):
    status: str  # error, warning, ok, or - if it could not be checked
    name: str
    summary: str  # printed if there are no findings
    findings: tuple[NodeProblem, ...] = ()


@dataclass(frozen=True)
class Host(Node):
    survey: Survey

    def usable_address(self) -> Address | None:
        """The first of its addresses that all others reach, preferably one that its host name resolves to."""
        incoming = [links for (_, target), links in self.survey.links_by_address.items() if target == self.name]
        usable = [a for a in self.facts.addresses
                  if all(a.address in links and not links[a.address].error for links in incoming)]  # fmt: skip
        return min(usable, key=lambda a: a.address not in self.facts.own_addresses, default=None)

    def hosts_unable_to_connect(self) -> list[tuple[list[str], str]]:
        """The hosts that reach none of its addresses, and why."""
        errors: dict[str, list[str]] = {}
        for (source, target), links in self.survey.links_by_address.items():
            if target == self.name and all(link.error for link in links.values()):
                reason = "; ".join(f"{address}: {link.error}" for address, link in links.items())
                errors.setdefault(reason, []).append(source)
        return [(sources, reason) for reason, sources in errors.items()]

    def offsets_from_median_clock(self) -> list[float]:
        """The seconds by which its clock is ahead of the median of all clocks, including this machine's."""
        offsets = self.survey.clock_offsets
        return [offset - median([*offsets.values(), 0.0]) for name, offset in offsets.items() if name == self.name]


def hosts_in_survey(survey: Survey) -> list[Host]:
    workers = dict(zip(survey.planned.hosts, survey.planned.workers, strict=True))
    threads = survey.planned.threads
    return [
        Host(name, host.facts, workers[name], threads or max(1, host.facts.cores // workers[name]), survey)
        for name, host in survey.hosts.items()
    ]


def _rate(bytes_per_second: float) -> str:
    bits = 8 * bytes_per_second
    return f"{bits / 1e9:.3g} Gbit/s" if bits >= 1e9 else f"{bits / 1e6:.3g} Mbit/s"


def _free_space(disk: FactsAnswer) -> str:
    return f"only {disk.disk_free / 1e9:,.3f} GB free of {disk.disk_size / 1e9:,.0f} GB at {disk.disk_path}"


RULES: tuple[NodeRule, ...] = (
    *NODE_RULES,
    NodeRule("gpus", "error", node_as_tuple, lambda h: 0 < len(h.facts.gpus) < h.workers,
         lambda h: f"{h.workers} workers, but {len(h.facts.gpus)} GPUs",
         lambda h: f"use --nproc {len(h.facts.gpus)}, or --backend gloo or --device cpu when you train"),
    NodeRule("gpus", "error", lambda h: h.facts.gpus, lambda gpu: gpu.lost,
         lambda gpu: f"GPU {gpu.index} does not answer: {gpu.lost}",
         "restart the machine, or exclude the GPU with CUDA_VISIBLE_DEVICES"),
    NodeRule("gpus", "error", lambda h: h.facts.gpus, lambda gpu: gpu.ecc_errors,
         lambda gpu: f"GPU {gpu.index} has {gpu.ecc_errors} uncorrectable memory errors",
         "reset or replace it (nvidia-smi -q -d ECC,PAGE_RETIREMENT)"),
    NodeRule("gpus", "warning", lambda h: h.facts.gpus,
         lambda gpu: gpu.processes or gpu.memory_used > max(BUSY_BYTES, gpu.memory // 20),
         lambda gpu: f"GPU {gpu.index} is in use by {', '.join(f'pid {pid}' for pid in gpu.processes) or 'others'}: "
         f"{gpu.memory_used >> 20} of {gpu.memory >> 20} MiB",
         "wait for it, or choose others with CUDA_VISIBLE_DEVICES"),
    NodeRule("names", "warning", node_as_tuple, lambda h: is_loopback(next(iter(h.facts.own_addresses), "")),
         lambda h: f"its name {h.facts.host} resolves to {h.facts.own_addresses[0]}, which no other node can reach",
         lambda h: f"in its /etc/hosts write {h.facts.addresses[0].address if h.facts.addresses else 'its address'} "
         f"{h.facts.host}, and remove {h.facts.host} from the 127.x line"),
    NodeRule("ports", "error", Host.hosts_unable_to_connect, bool,
         lambda closed: f"cannot be reached from {', '.join(closed[0])} "
         f"{f'at {closed[1]}' if closed[1] else 'because it has no address'}",
         lambda closed: f"allow connections from {', '.join(closed[0])} to all its TCP ports, because ranks use any "
         "ports: check `nft list ruleset` and `ip route get` on both sides"),
    NodeRule("clocks", "warning", Host.offsets_from_median_clock, lambda ahead: abs(ahead) > MAX_CLOCK_OFFSET_SECONDS,
         lambda ahead: f"its clock is {abs(ahead):.1f} s {'ahead' if ahead > 0 else 'behind'}: log times are wrong, "
         "and the rendezvous of torchrun can start only a part of a job",
         "synchronise it: timedatectl set-ntp true, or chronyc makestep"),
    NodeRule("run folder", "error",
         lambda h: [(h.survey.planned.run_dir, f.error) for n, f in h.survey.folder_access.items() if n == h.name],
         lambda access: access[1], "{0[0]}: {0[1]}".format,
         "choose a writable --run-dir on a file system that all nodes mount (NFS, Lustre). `--on ssh` also works "
         "with separate file systems"),
    NodeRule("disk", "error", lambda h: [h.survey.hosts[h.name]], lambda disk: disk.disk_free < NO_SPACE_BYTES,
         _free_space, FREE_SPACE_ADVICE),
    NodeRule("disk", "warning", lambda h: [h.survey.hosts[h.name]],
         lambda disk: NO_SPACE_BYTES <= disk.disk_free < LOW_SPACE_BYTES, _free_space, FREE_SPACE_ADVICE),
    NodeRule("bandwidth", "warning",
         lambda h: [(b, link.bytes_per_second) for (a, b), link in h.survey.measured_links.items() if a == h.name],
         lambda link: link[1] < SLOW_BYTES_PER_SECOND,
         lambda link: f"sends {_rate(link[1])} to {link[0]}; {_rate(SLOW_BYTES_PER_SECOND)} is needed",
         "check the negotiated speed (ethtool), cable and switch port of both; all ranks wait for the slowest link"),
)  # fmt: skip


def run_checks(survey: Survey) -> list[Check]:
    by_check = {"software": [*find_differences({name: host.facts for name, host in survey.hosts.items()})]}
    by_check["hosts"] = [
        NodeProblem("error", *lost, "repair it, or remove it from the nodes of the run") for lost in survey.lost.items()
    ]
    for host in hosts_in_survey(survey):
        for rule in RULES:
            by_check.setdefault(rule.check, []).extend(rule.findings(host))
    several = len(survey.planned.hosts) > 1
    checks: list[Check] = []
    for name, (needs_several, summarise) in SUMMARIES.items():
        summary = summarise(survey) if survey.hosts or name == "hosts" else ""
        findings = tuple(sorted(by_check.get(name, ()), key=lambda finding: finding.severity))
        if (several or not needs_several) and (summary or findings):
            status = findings[0].severity if findings else "-" if summary.startswith("not ") else "ok"
            checks.append(Check(status, name, summary, findings))
    return checks


def worst_link_values(survey: Survey) -> tuple[float, float]:
    by_address = survey.links_by_address.values()
    trips = [[link.round_trip_seconds for link in links.values() if not link.error] for links in by_address]
    slowest = min((link.bytes_per_second for link in survey.measured_links.values()), default=0.0)
    return slowest, max((min(trip) for trip in trips if trip), default=0.0)


def _versions(facts: NodeFacts) -> str:
    return f"Python {facts.python}, " + ", ".join(f"{name} {version}" for name, version in facts.packages.items())


def _ports(survey: Survey) -> str:
    usable = [(host.name, host.usable_address()) for host in hosts_in_survey(survey)]
    addresses = ", ".join(f"{name} {a.address} ({a.interface})" for name, a in usable if a)
    return f"all {len(survey.links_by_address)} connections between {len(survey.hosts)} nodes are open: {addresses}"


def _bandwidth(survey: Survey) -> str:
    if survey.planned.quick:
        return ""
    slowest, round_trip = worst_link_values(survey)
    if not survey.measured_links:
        return "not measured: no connection is open"
    count = len(survey.measured_links)
    return f"{_rate(slowest)} on the slowest of {count} links, round trip {1e3 * round_trip:.2g} ms"


SUMMARIES: dict[str, tuple[bool, Callable[[Survey], str]]] = {
    # check: whether it needs several hosts, and its summary if there are no findings
    "hosts": (False, lambda s: f"answered: {', '.join(s.hosts) or 'none'}"),
    "software": (False, lambda s: _versions(next(iter(s.hosts.values())).facts)),
    "resources": (False, lambda s: "; ".join(sorted({
        f"{plural(h.workers, 'worker')} x {plural(h.threads, 'thread')} on {plural(h.facts.cores, 'core')}"
        for h in hosts_in_survey(s)}))),
    "gpus": (False, lambda s: "; ".join(f"{host.name}: {len(host.facts.gpus)} x {host.facts.gpus[0].name}"
                                        for host in hosts_in_survey(s) if host.facts.gpus)),
    "names": (True, lambda _: "each host name resolves to its node, on all nodes"),
    "ports": (True, _ports),
    "clocks": (True, lambda s: f"all within {max(map(abs, s.clock_offsets.values()), default=0):.2g} s"),
    "run folder": (False, lambda s: f"{s.planned.run_dir} is writable; visible on {', '.join(s.folder_access)}"),
    "disk": (False, lambda s: f"at least {min(host.disk_free for host in s.hosts.values()) / 1e9:.3g} GB free"),
    "bandwidth": (True, _bandwidth),
}  # fmt: skip


def print_checks(console: Console, survey: Survey, checks: Sequence[Check]) -> None:
    for check in checks:
        summary = "" if check.findings else check.summary
        line = Text.assemble((f"{check.status:8}", STYLES[check.status]), f"{check.name:12}", summary)
        for number, finding in enumerate(check.findings):
            line.append(f"\n{'':20}" if number else "")
            line.append(f"{finding.host}: {printable(finding.what)}\n{'':20}-> {printable(finding.remedy)}")
        console.print(line, soft_wrap=True)
    counts = [sum(f.severity == level for check in checks for f in check.findings) for level in ("error", "warning")]
    console.print(f"{plural(counts[0], 'error')}, {plural(counts[1], 'warning')}, {survey.seconds:.1f} s")


def encode_json(survey: Survey, checks: Sequence[Check]) -> bytes:
    report: dict[str, Any] = {
        "errors": sum(finding.severity == "error" for check in checks for finding in check.findings),
        "checks": checks,
        "seconds": survey.seconds,
        "clock_offset_seconds": survey.clock_offsets,
        "ports": [{"from": a, "to": b, "addresses": links} for (a, b), links in survey.links_by_address.items()],
        "bandwidth": dict(zip(("bytes_per_second", "round_trip_seconds"), worst_link_values(survey), strict=True)),
        "facts": {name: host.facts for name, host in survey.hosts.items()},
    }
    return msgspec.json.format(msgspec.json.encode(report), indent=2)
