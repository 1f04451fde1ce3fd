"""The table of rules: what can be wrong with a set of hosts, and what to do about it."""

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any

from paceline.doctor.messages import Examined
from paceline.doctor.survey import Survey
from paceline.host.facts import NODE_RULES, Address, Finding, Node, Rule, differences, itself
from paceline.host.reach import is_loopback

MAX_CLOCK_OFFSET_SECONDS = 2.0
BUSY_BYTES = 1 << 30  # of a GPU's memory in use: more than a driver and a desktop need
LITTLE_ROOM_BYTES, NO_ROOM_BYTES = 1 << 30, 64 << 20
SLOW_BYTES_PER_SECOND = 500e6 / 8  # half of a 1 Gbit/s network


@dataclass(frozen=True)
class Host(Node):
    """A host within the survey, and the facts of it that need the others."""

    survey: Survey

    def usable(self) -> Address | None:
        """The first of its addresses that all others reach; preferably what its own name means."""
        found = [links for (_, target), links in self.survey.reach.items() if target == self.name]
        usable = [one for one in self.facts.addresses
                  if all(one.address in links and not links[one.address].error for links in found)]  # fmt: skip
        return min(usable, key=lambda one: one.address not in self.facts.own_addresses, default=None)

    def closed(self) -> Iterator[tuple[list[str], str]]:
        """The hosts that reach none of its addresses, and why."""
        errors: dict[str, list[str]] = {}
        for (source, target), links in self.survey.reach.items():
            if target == self.name and all(link.error for link in links.values()):
                why = "; ".join(f"{address}: {link.error}" for address, link in links.items()) or "it has no address"
                errors.setdefault(why, []).append(source)
        yield from ((sources, why) for why, sources in errors.items())

    def clock(self) -> list[float]:
        """How far its clock is ahead of the median of all clocks, this machine's included."""
        offsets = self.survey.clock_offsets
        return [offset - median([*offsets.values(), 0.0]) for name, offset in offsets.items() if name == self.name]

    def folder(self) -> list[tuple[str, str]]:
        """The run folder, and the error of this host's access to it."""
        run_dir = self.survey.wanted.run_dir
        return [(run_dir, done.error) for name, done in self.survey.folder.items() if name == self.name]

    def speed(self) -> list[tuple[str, float]]:
        """The next host, and the bytes per second that arrived there."""
        return [(to, link.bytes_per_second) for (name, to), link in self.survey.links.items() if name == self.name]


def hosts_of(survey: Survey) -> list[Host]:
    """Those that answered."""
    workers = dict(zip(survey.wanted.hosts, survey.wanted.workers, strict=True))
    return [
        Host(name, one.facts, workers[name], survey.wanted.threads or max(1, one.facts.cores // workers[name]), survey)
        for name, one in survey.hosts.items()
    ]


def findings(survey: Survey) -> dict[str, list[Finding]]:
    """All that is wrong, by check; errors first."""
    found: dict[str, list[Finding]] = {"software": [*differences({n: one.facts for n, one in survey.hosts.items()})]}
    found["hosts"] = [Finding("error", *lost, "fix that, or leave this host out") for lost in survey.lost.items()]
    for host in hosts_of(survey):
        for rule in RULES:
            found.setdefault(rule.check, []).extend(rule.findings(host))
    return {check: sorted(these, key=lambda finding: finding.severity) for check, these in found.items()}


def rate(bytes_per_second: float) -> str:
    """11.9 Gbit/s."""
    bits = 8 * bytes_per_second
    return f"{bits / 1e9:.3g} Gbit/s" if bits >= 1e9 else f"{bits / 1e6:.3g} Mbit/s"


def _room(one: Examined) -> str:
    return f"only {one.disk_free / 1e9:.3g} GB free of {one.disk_size / 1e9:.3g} GB at {one.disk_path}"


RULES: tuple[Rule[Any], ...] = (
    *NODE_RULES,
    Rule("gpus", "error", itself, lambda h: 0 < len(h.facts.gpus) < h.workers,
         lambda h: f"{h.workers} workers, but {len(h.facts.gpus)} GPUs",
         lambda h: f"use --nproc {len(h.facts.gpus)}, or --backend gloo or --device cpu when you train"),
    Rule("gpus", "error", lambda h: h.facts.gpus, lambda gpu: gpu.lost,
         lambda gpu: f"GPU {gpu.index} does not answer: {gpu.lost}",
         "restart the machine, or leave it out with CUDA_VISIBLE_DEVICES"),
    Rule("gpus", "error", lambda h: h.facts.gpus, lambda gpu: gpu.ecc_errors,
         lambda gpu: f"GPU {gpu.index} has had {gpu.ecc_errors} memory errors that could not be corrected",
         "reset or replace it (nvidia-smi -q -d ECC,PAGE_RETIREMENT)"),
    Rule("gpus", "warning", lambda h: h.facts.gpus,
         lambda gpu: gpu.processes or gpu.memory_used > max(BUSY_BYTES, gpu.memory // 20),
         lambda gpu: f"GPU {gpu.index} is in use by {', '.join(f'pid {pid}' for pid in gpu.processes) or 'others'}: "
         f"{gpu.memory_used >> 20} of {gpu.memory >> 20} MiB",
         "wait for it, or choose others with CUDA_VISIBLE_DEVICES"),
    Rule("names", "warning", itself, lambda h: is_loopback(next(iter(h.facts.own_addresses), "")),
         lambda h: f"its own name {h.facts.host} means {h.facts.own_addresses[0]}, which no other host reaches",
         lambda h: f"in its /etc/hosts write {h.facts.addresses[0].address if h.facts.addresses else 'its address'} "
         f"{h.facts.host}, and take {h.facts.host} off the 127.x line"),
    Rule("ports", "error", Host.closed, bool,
         lambda one: f"cannot be reached from {', '.join(one[0])} at {one[1]}",
         lambda one: f"let it take connections from {', '.join(one[0])} on all TCP ports, because ranks choose ports "
         "freely, and let those hosts make them: look at `nft list ruleset` and `ip route get` on both"),
    Rule("clocks", "warning", Host.clock, lambda ahead: abs(ahead) > MAX_CLOCK_OFFSET_SECONDS,
         lambda ahead: f"its clock is {abs(ahead):.1f} s {'ahead' if ahead > 0 else 'behind'}: times in logs mislead, "
         "and torchrun's own rendezvous can start half of a job",
         "synchronise it: timedatectl set-ntp true, or chronyc makestep"),
    Rule("run folder", "error", Host.folder, lambda one: one[1], "{0[0]}: {0[1]}".format,
         "choose a --run-dir that can be written to, on a file system that all hosts mount (NFS, Lustre)"),
    Rule("disk", "error", lambda h: (h.survey.hosts[h.name],), lambda one: one.disk_free < NO_ROOM_BYTES, _room,
         "delete what is not needed, or choose another --run-dir"),
    Rule("disk", "warning", lambda h: (h.survey.hosts[h.name],),
         lambda one: NO_ROOM_BYTES <= one.disk_free < LITTLE_ROOM_BYTES, _room,
         "delete what is not needed, or choose another --run-dir"),
    Rule("bandwidth", "warning", Host.speed, lambda one: one[1] < SLOW_BYTES_PER_SECOND,
         lambda one: f"sends {rate(one[1])} to {one[0]}; {rate(SLOW_BYTES_PER_SECOND)} is needed",
         "look at the negotiated speed (ethtool), cable and switch port of both; all ranks wait for the slowest link"),
)  # fmt: skip
