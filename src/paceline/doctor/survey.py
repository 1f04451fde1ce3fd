"""Asks the hosts everything that the checks need: what they have, who reaches whom, how fast they are together."""

import itertools
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import TypeVar

from paceline.doctor import messages as m
from paceline.doctor.session import HostProgram, ask_hosts
from paceline.host.facts import Address, Facts
from paceline.mesh import Mesh

T = TypeVar("T")
FIRST_SECONDS = 20.0  # to log in and start Python, perhaps from a slow file system
SECONDS = 10.0
CONNECT_SECONDS = 1.3  # a lost SYN is sent again after 1 s
REHEARSAL_SECONDS = 120.0
CLOCK_ROUNDS = 8
MAX_ADDRESSES = 16  # of one host

MEASURE_SECONDS = 0.3
PATIENCE_SECONDS = 10.0
SLOW_BYTES_PER_SECOND = 500e6 / 8  # half of a 1 Gbit/s network
FAR_BELOW = 0.25  # of the median of all pairs
Pair = tuple[str, str]  # (from, to)


@dataclass(frozen=True)
class Wanted:
    """What the hosts are meant for."""

    hosts: tuple[str, ...]
    workers: tuple[int, ...]  # on each
    run_dir: str
    names: Mapping[str, str] = field(default_factory=dict[str, str])  # what hosts call it, where that is another name
    data_dir: str | None = ""  # empty: the packaged data; None: only the task knows where they are
    task: str = ""
    options: Mapping[str, str] = field(default_factory=dict[str, str])
    batch_size: int = 64  # samples of a rank in a step
    threads: int = 0  # of each worker; 0: the cores are shared
    cwd: str = ""
    quick: bool = False
    device: str = "cpu"
    backend: str = "auto"
    mesh: Mesh | None = None


@dataclass(frozen=True)
class Survey:
    """All answers; a host that is in `lost` is missing from everything that was asked later."""

    wanted: Wanted
    lost: Mapping[str, str]
    facts: Mapping[str, Facts]
    clock_offsets: Mapping[str, float]  # seconds that a host's clock is before this machine's
    resolved: Mapping[str, Mapping[str, tuple[str, ...]]]  # host -> name -> addresses
    reach: Mapping[Pair, Mapping[str, m.Reason]]  # -> address -> how it ended
    links: Mapping[Pair, m.LinkSpeed]
    written: m.Done | None  # the probe file, by the first host
    seen: Mapping[str, m.Done]  # the probe file, by every host
    disks: Mapping[str, m.Disk]
    files: Mapping[str, m.Files]
    rehearsed: m.Rehearsed | None
    seconds: float


def survey(wanted: Wanted, programs: Sequence[HostProgram]) -> Survey:
    """Ask everything. Never waits longer than the sum of the limits above; a host that does not answer is `lost`."""
    start = time.monotonic()
    facts = ask_hosts(programs, dict.fromkeys(wanted.hosts, m.AskFacts()), Facts, FIRST_SECONDS)
    names = [name for name in wanted.hosts if name in facts]

    def ask_all(request: m.Request, kind: type[T], seconds: float = SECONDS) -> dict[str, T]:
        return ask_hosts(programs, dict.fromkeys(names, request), kind, seconds)

    tokens = {name: secrets.token_hex(16) for name in names}
    ports = ask_hosts(programs, {name: m.Listen(tokens[name]) for name in names}, m.Listening, SECONDS)
    called = tuple(dict.fromkeys(wanted.names.get(name, name) for name in facts))
    resolved = ask_all(m.Resolve(called), m.Resolved, SECONDS + len(facts))
    reach = _reach(programs, facts, {name: (ports[name].port, tokens[name]) for name in ports})
    written, seen = _share(programs, names, wanted.run_dir)
    disks = ask_all(m.AskDisk(wanted.run_dir), m.Disk)
    offsets = _clocks(programs, names)
    files: Mapping[str, m.Files] = {}
    links: Mapping[Pair, m.LinkSpeed] = {}
    rehearsed: m.Rehearsed | None = None
    if not wanted.quick:
        files = {} if wanted.data_dir is None else ask_all(m.HashData(wanted.data_dir), m.Files, 3 * SECONDS)
        best = {pair: open_ways[0] for pair, found in reach.items()
                if (open_ways := [address for address, reason in found.items() if reason == "ok"])}  # fmt: skip
        doors = {(a, b): m.Target(address, ports[b].port, tokens[b]) for (a, b), address in best.items()}
        links = measure_links(programs, names, doors)
        if len(names) == len(wanted.hosts) and len(best) == len(names) * (len(names) - 1):
            rehearsed = _rehearse(programs, wanted, facts, usable_addresses(facts, reach))
    return Survey(
        wanted=wanted, lost={program.name: program.lost for program in programs if program.lost}, facts=facts,
        clock_offsets=offsets, resolved={name: answer.names for name, answer in resolved.items()}, reach=reach,
        links=links, written=written, seen=seen, disks=disks, files=files, rehearsed=rehearsed,
        seconds=time.monotonic() - start,
    )  # fmt: skip


def usable_addresses(facts: Mapping[str, Facts], reach: Mapping[Pair, Mapping[str, m.Reason]]) -> dict[str, Address]:
    """For each host the first of its addresses that all others reach, by which the ranks should meet.

    Preferred: what the host's own name means, for that is what programs that ask for nothing else will take.
    """
    chosen: dict[str, Address] = {}
    for name, one in facts.items():
        sources = [found for (_, target), found in reach.items() if target == name]
        usable = [a for a in one.addresses if all(found.get(a.address) == "ok" for found in sources)]
        if usable:
            chosen[name] = min(usable, key=lambda address: address.address not in one.own_addresses)
    return chosen


def _reach(
    programs: Sequence[HostProgram], facts: Mapping[str, Facts], doors: Mapping[str, tuple[int, str]]
) -> dict[Pair, dict[str, m.Reason]]:
    """Every host tries every address of every other one, all at once."""
    addresses = [(name, address.address) for name in doors for address in facts[name].addresses[:MAX_ADDRESSES]]
    tries = {source: [one for one in addresses if one[0] != source] for source in doors}
    requests = {
        source: m.Connect(tuple(m.Target(address, *doors[target]) for target, address in every), CONNECT_SECONDS)
        for source, every in tries.items()
        if every
    }
    answers = ask_hosts(programs, requests, m.Connected, SECONDS + CONNECT_SECONDS * len(facts))
    reach: dict[Pair, dict[str, m.Reason]] = {
        (source, target): {} for source in answers for target in doors if target != source
    }
    for source, answer in answers.items():
        for (target, address), reason in zip(tries[source], answer.reasons, strict=True):
            reach[source, target][address] = reason
    return reach


def _share(
    programs: Sequence[HostProgram], names: Sequence[str], folder: str
) -> tuple[m.Done | None, dict[str, m.Done]]:
    if not names:
        return None, {}
    token = secrets.token_hex(16)
    written = ask_hosts(programs, {names[0]: m.Probe("write", folder, token)}, m.Done, SECONDS).get(names[0])
    if written is None or not written.ok:
        return written, {}
    seen = ask_hosts(programs, dict.fromkeys(names, m.Probe("read", folder, token)), m.Done, SECONDS)
    ask_hosts(programs, {names[0]: m.Probe("remove", folder, token)}, m.Done, SECONDS)
    return written, seen


def _clocks(programs: Sequence[HostProgram], names: Sequence[str]) -> dict[str, float]:
    """Each clock against ours, as NTP does it: of several questions the one that was answered fastest."""
    best: dict[str, tuple[float, float]] = {}
    for program in (one for one in programs if one.name in names):
        for _ in range(CLOCK_ROUNDS):
            asked, start = time.time(), time.monotonic()
            answer = ask_hosts([program], {program.name: m.AskTime()}, m.Time, SECONDS).get(program.name)
            took = time.monotonic() - start
            if answer and (program.name not in best or took < best[program.name][0]):
                best[program.name] = (took, answer.wall_seconds - (asked + took / 2))
    return {name: offset for name, (_, offset) in best.items()}


def _rehearse(
    programs: Sequence[HostProgram], wanted: Wanted, facts: Mapping[str, Facts], addresses: Mapping[str, Address]
) -> m.Rehearsed:
    """The ranks of the run itself, started by the hosts' programs, train a few steps and add up their gradients."""
    head = wanted.hosts[0]
    several = len(wanted.hosts) > 1
    port = ask_hosts(programs, {head: m.FreePort()}, m.Listening, SECONDS).get(head)
    if port is None or (several and len(addresses) < len(facts)):
        return m.Rehearsed(why="there is no address that all hosts reach")
    first_ranks = [0, *itertools.accumulate(wanted.workers)]
    requests = {
        name: m.Rehearse(
            first_rank=first,
            workers=workers,
            world_size=sum(wanted.workers),
            address=addresses[head].address if several else "127.0.0.1",
            port=port.port,
            interface=addresses[name].interface if several else "",
            threads=wanted.threads or max(1, facts[name].cores // workers),
            task=wanted.task,
            options=dict(wanted.options),
            batch_size=wanted.batch_size,
            cwd=wanted.cwd,
            seconds=REHEARSAL_SECONDS,
            device=wanted.device,
            backend=wanted.backend,
            along_tensor=wanted.mesh.of("tensor") if wanted.mesh else 1,
        )
        for name, workers, first in zip(wanted.hosts, wanted.workers, first_ranks, strict=False)
    }
    answers = ask_hosts(programs, requests, m.Rehearsed, REHEARSAL_SECONDS + SECONDS)
    failed = [f"{name}: {answer.why}" for name, answer in answers.items() if answer.why]
    failed += [f"{program.name}: {program.lost}" for program in programs if program.lost]
    return m.Rehearsed(why="; ".join(failed)) if failed else answers[head]


def measure_links(
    programs: Sequence[HostProgram], names: Sequence[str], doors: Mapping[Pair, m.Target]
) -> dict[Pair, m.LinkSpeed]:
    """Round trip and throughput of every way that is open; one that looks slow is measured again, alone.

    A busy machine makes a link look slow for a moment, so the faster measurement counts.
    """
    links: dict[Pair, m.LinkSpeed] = {}
    for pairs in rounds(names):
        links |= _measure(programs, {pair: doors[pair] for pair in pairs if pair in doors})
    for pair in slow_pairs(links):
        again = _measure(programs, {pair: doors[pair]}).get(pair)
        if again is not None and again.bytes_per_second > links[pair].bytes_per_second:
            links[pair] = again
    return links


def _measure(programs: Sequence[HostProgram], doors: Mapping[Pair, m.Target]) -> dict[Pair, m.LinkSpeed]:
    requests = {source: m.MeasureLink(target, MEASURE_SECONDS) for (source, _), target in doors.items()}
    answers = ask_hosts(programs, requests, m.LinkSpeed, PATIENCE_SECONDS)
    return {(source, target): answers[source] for source, target in doors if source in answers}


def rounds(names: Sequence[str]) -> Iterator[list[Pair]]:
    """All ordered pairs, each host in at most one pair of a round (a round-robin tournament, there and back)."""
    circle: list[str] = [*names, *([""] if len(names) % 2 else [])]
    for _ in range(len(circle) - 1):
        half = len(circle) // 2
        pairs = [pair for pair in zip(circle[:half], circle[: half - 1 : -1], strict=True) if all(pair)]
        if pairs:
            yield pairs
            yield [(b, a) for a, b in pairs]
        circle = [circle[0], circle[-1], *circle[1:-1]]


def slow_pairs(links: Mapping[Pair, m.LinkSpeed]) -> list[Pair]:
    """The ways that are too slow to train over, or far slower than most others."""
    usual = median([one.bytes_per_second for one in links.values()] or [0.0])
    limit = max(SLOW_BYTES_PER_SECOND, FAR_BELOW * usual)
    return [pair for pair, one in links.items() if one.reason == "ok" and one.bytes_per_second < limit]
