"""Asks the hosts everything that the rules need: what they are, which ports are open, how fast the network is."""

import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paceline.lab.doctor import messages as m
from paceline.lab.doctor.session import HostProgram, ask_hosts

FIRST_SECONDS = 20.0  # to log in and start Python, perhaps from a slow file system
SECONDS = 10.0
CONNECT_SECONDS = 1.3  # a lost SYN is sent again after 1 s
MEASURE_SECONDS = 0.3
MAX_ADDRESSES = 16  # of one host
Pair = tuple[str, str]  # (from, to)


@dataclass(frozen=True)
class Wanted:
    """What the hosts are meant for."""

    hosts: tuple[str, ...]
    workers: tuple[int, ...]  # on each
    run_dir: str
    threads: int = 0  # of each worker; 0: the workers share the cores
    quick: bool = False


@dataclass(frozen=True)
class Survey:
    """All answers. A host in `lost` is missing from everything that was asked later."""

    wanted: Wanted
    lost: Mapping[str, str]
    hosts: Mapping[str, m.Examined]
    clock_offsets: Mapping[str, float]  # seconds that a host's clock is ahead of this machine's
    reach: Mapping[Pair, Mapping[str, m.Link]]  # -> address -> how it ended
    folder: Mapping[str, m.Done]  # the probe file, as each host sees it; only the writer if it could not write
    links: Mapping[Pair, m.Link]  # from each host to the next one, measured
    seconds: float


def survey(wanted: Wanted, programs: Sequence[HostProgram]) -> Survey:
    """Ask everything. Each question has a time limit; a host that does not answer in time is `lost`."""
    start = time.monotonic()
    tokens = {name: secrets.token_hex(16) for name in wanted.hosts}
    requests = {name: m.Examine(token, wanted.run_dir) for name, token in tokens.items()}
    hosts = ask_hosts(programs, requests, m.Examined, FIRST_SECONDS)
    targets = {
        name: [m.Target(each.address, one.port, tokens[name]) for each in one.facts.addresses[:MAX_ADDRESSES]]
        for name, one in hosts.items()
    }
    reach = _connect(programs, {(a, b): targets[b] for a in hosts for b in hosts if a != b})
    ring = {
        (a, b): [one for one in targets[b] if not reach[a, b][one.address].error][:1]
        for a, b in zip(hosts, [*hosts][1:] + [*hosts][:1], strict=True) if (a, b) in reach
    }  # fmt: skip
    measured = {} if wanted.quick else _connect(programs, ring, MEASURE_SECONDS)
    links = {pair: one for pair, found in measured.items() for one in found.values() if not one.error}
    folder, offsets = _share(programs, [*hosts], wanted.run_dir), _clocks(programs, [*hosts])
    lost = {program.name: program.lost for program in programs if program.lost}
    return Survey(wanted, lost, hosts, offsets, reach, folder, links, time.monotonic() - start)


def _connect(
    programs: Sequence[HostProgram], pairs: Mapping[Pair, Sequence[m.Target]], measure_seconds: float = 0.0
) -> dict[Pair, dict[str, m.Link]]:
    """All hosts try their targets at the same time: the link to each address, by pair."""
    of_host: dict[str, list[tuple[Pair, m.Target]]] = {source: [] for source, _ in pairs}
    for pair, targets in pairs.items():
        of_host[pair[0]].extend((pair, target) for target in targets)
    requests = {
        name: m.Connect(tuple(target for _, target in tries), CONNECT_SECONDS, measure_seconds)
        for name, tries in of_host.items()
    }
    answers = ask_hosts(programs, requests, m.Connected, SECONDS + CONNECT_SECONDS * len(of_host))
    links = {pair: dict[str, m.Link]() for pair in pairs if pair[0] in answers}
    for name, answer in answers.items():
        for (pair, target), link in zip(of_host[name], answer.links, strict=True):
            links[pair][target.address] = link
    return links


def _share(programs: Sequence[HostProgram], names: Sequence[str], folder: str) -> dict[str, m.Done]:
    """The first host writes a file, all look for it, and it is removed."""
    token, writer = secrets.token_hex(16), names[:1]
    written = ask_hosts(programs, dict.fromkeys(writer, m.Probe("write", folder, token)), m.Done, SECONDS)
    if any(done.error for done in written.values()):
        return written
    seen = ask_hosts(programs, dict.fromkeys(names, m.Probe("read", folder, token)), m.Done, SECONDS)
    ask_hosts(programs, dict.fromkeys(writer, m.Probe("remove", folder, token)), m.Done, SECONDS)
    return seen


def _clocks(programs: Sequence[HostProgram], names: Sequence[str]) -> dict[str, float]:
    """Each clock compared with this machine's, in the middle between question and answer."""
    offsets: dict[str, float] = {}
    for name in names:
        asked, start = time.time(), time.monotonic()
        for answer in ask_hosts(programs, {name: m.AskTime()}, m.Time, SECONDS).values():
            offsets[name] = answer.wall_seconds - (asked + (time.monotonic() - start) / 2)
    return offsets
