"""Checks between hosts: that each reaches each other one, by which interface, and how fast."""

import ipaddress
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from statistics import median

from paceline.doctor.check import Check, checked, duration, listed, rate
from paceline.doctor.messages import LinkSpeed, Reason
from paceline.doctor.survey import SLOW_BYTES_PER_SECOND, Pair, Survey, slow_pairs, usable_addresses
from paceline.host.compare import Finding
from paceline.host.facts import Address, Facts
from paceline.host.reach import is_loopback

TELLING: tuple[Reason, ...] = ("filtered", "refused", "stranger", "failed", "no route", "name unknown")
WORDS: dict[Reason, str] = {
    "filtered": "no answer, so a firewall drops it",
    "refused": "refused, though the port is open: a firewall rejects it",
    "no route": "no route",
    "stranger": "another machine answers",
    "failed": "the connection fails",
}


def host_names(survey: Survey) -> Iterator[Finding]:
    """Each host's name means that host, on all of them."""
    targets = {name: survey.wanted.names.get(name, name) for name in survey.facts}
    for name, one in survey.facts.items():
        own = one.own_addresses
        if own and is_loopback(own[0]):
            what = f"its own name {one.host} means {own[0]} there: a rank would tell the others to come to themselves"
            yield Finding("warning", name, what, _hosts_file(one))
    for source, resolved in survey.resolved.items():
        unknown = [targets[name] for name in survey.facts if name != source and not resolved.get(targets[name])]
        if unknown:
            what = f"does not know the name{'s' if len(unknown) > 1 else ''} {listed(unknown)}"
            yield Finding("warning", source, what, "add them to its /etc/hosts or DNS, or use addresses in --hosts")
        for name, one in survey.facts.items():
            addresses = resolved.get(targets[name], ())
            here = {address.address for address in (*one.addresses, *one.down)}
            if name != source and addresses and addresses[0] not in here:
                what = f"takes {targets[name]} for {addresses[0]}, but {name} has {listed(sorted(here))}"
                yield Finding("warning", source, what, f"correct {targets[name]} in its /etc/hosts or DNS")


def _hosts_file(one: Facts) -> str:
    address = one.addresses[0].address if one.addresses else "its address"
    return f"in its /etc/hosts write {address} {one.host}, and take {one.host} off the 127.x line"


def pairs(survey: Survey) -> Iterator[Finding]:
    """Each host can be reached by each other one at all."""
    for target, one in survey.facts.items():
        if not one.addresses:
            yield Finding("error", target, "has no address but loopback", "connect it to the others' network")
    closed: dict[Pair, Reason] = {
        pair: _most_telling(found) for pair, found in survey.reach.items() if found and "ok" not in found.values()
    }
    yield from _apart(survey, closed)
    one_way: dict[tuple[str, Reason], list[str]] = defaultdict(list)
    for (source, target), reason in closed.items():
        if (target, source) not in closed:
            one_way[target, reason].append(source)
    for (target, reason), sources in one_way.items():
        address = survey.facts[target].addresses[0].address
        what = f"cannot be reached from {listed(sources)} at {address}: {WORDS.get(reason, reason)}"
        yield Finding("error", target, what, _opening(survey, sources, target, reason, ""))


def _apart(survey: Survey, closed: Mapping[Pair, Reason]) -> Iterator[Finding]:
    """Pairs that are closed in both directions, in as few findings as possible."""
    apart = {(a, b) for a, b in closed if a < b and (b, a) in closed}
    while apart:
        host, count = Counter(host for pair in sorted(apart) for host in pair).most_common(1)[0]
        pairs = sorted(pair for pair in apart if host in pair)
        others = [a if b == host else b for a, b in pairs]
        reason = closed[pairs[0]]
        # of a pair alone nobody can say which of the two is at fault
        at_fault = host if count > 1 else ", ".join(sorted((host, *others)))
        what = f"{host} and {listed(others)} cannot reach each other: {WORDS.get(reason, reason)}"
        yield Finding("error", at_fault, what, _opening(survey, others, host, reason, ", and the other way round"))
        apart -= set(pairs)


def _most_telling(found: Mapping[str, Reason]) -> Reason:
    """Of several addresses' reasons the one that says most: no way to a private bridge is as it should be."""
    return next(reason for reason in TELLING if reason in found.values())


def _opening(survey: Survey, sources: list[str], target: str, reason: Reason, also: str) -> str:
    if reason in ("filtered", "refused"):
        origins = [survey.facts[source].addresses[0].address for source in sources]
        return (
            f"on {target} let in all TCP ports from {listed(origins)} (ranks meet on ports that are chosen freely), "
            f"and on {listed(sources)} let them out{also}: look at `nft list ruleset` on both"
        )
    return f"connect {listed(sources)} and {target} to one network; look at `ip route get` on {listed(sources)}"


def interfaces(survey: Survey) -> Check:
    """The interfaces by which the ranks should meet, and those that lead astray."""
    usable = usable_addresses(survey.facts, survey.reach)
    by_interface: dict[str, list[str]] = defaultdict(list)
    for name, address in usable.items():
        by_interface[address.interface].append(f"{name} {address.address}")
    told = [
        f"GLOO_SOCKET_IFNAME={interface} NCCL_SOCKET_IFNAME={interface} ({', '.join(hosts)})"
        for interface, hosts in by_interface.items()
    ]
    return checked("interfaces", "; ".join(told) or "none that all hosts reach", _astray(survey, usable))


def _astray(survey: Survey, usable: Mapping[str, Address]) -> Iterator[Finding]:
    for name, one in survey.facts.items():
        good = usable.get(name)
        remedy = (
            f"have the ranks use {good.interface}: --env GLOO_SOCKET_IFNAME={good.interface} "
            f"--env NCCL_SOCKET_IFNAME={good.interface}"
            if good
            else "connect it, or take it out of use: ip link set NAME down"
        )
        for address in one.down:
            what = f"interface {address.interface} ({address.address}) is down or has no cable"
            yield Finding("warning", name, what, f"{remedy}; or connect it, or remove its address")
        for address in one.addresses:
            neighbours = [source for source in _neighbours(survey.facts, name, address)
                          if survey.reach.get((source, name), {}).get(address.address, "ok") != "ok"]  # fmt: skip
            if good and neighbours:
                what = f"interface {address.interface} ({address.address}) does not reach {listed(neighbours)}"
                yield Finding("warning", name, what, f"{remedy}; or fix that network")


def _neighbours(facts: Mapping[str, Facts], name: str, address: Address) -> Iterator[str]:
    """The other hosts that have an address in the same network, and so should reach it.

    A bridge that every host has for itself (Docker's, with the same address everywhere) is no common network.
    """
    network = ipaddress.ip_network(f"{address.address}/{address.prefix}", strict=False)
    for other, one in facts.items():
        addresses = [ipaddress.ip_address(a.address) for a in one.addresses]
        if other == name or ipaddress.ip_address(address.address) in addresses:
            continue
        if any(a in network for a in addresses if a.version == network.version):
            yield other


def link_speeds(survey: Survey) -> Check:
    """How fast each way is; none is far slower than the others."""
    if not survey.links:
        return Check("links", "not measured: no way is open", done=False)
    slowest = min(survey.links.values(), key=lambda one: one.bytes_per_second)
    worst = max(one.round_trip_seconds for one in survey.links.values())
    summary = f"at least {rate(slowest.bytes_per_second)} one way, round trip at most {duration(worst)}"
    return checked("links", summary, _slow(survey.links))


def _slow(links: Mapping[Pair, LinkSpeed]) -> Iterator[Finding]:
    usual = median(one.bytes_per_second for one in links.values())
    slow = {pair: links[pair] for pair in slow_pairs(links)}
    hosts = sorted({host for pair in links for host in pair})
    # A host all of whose ways are slow has a slow connection itself; its partners need not be named as well.
    culprits = [host for host in hosts if len(hosts) > 2 and all(pair in slow for pair in links if host in pair)]
    told: set[Pair] = set()
    for host in culprits if len(culprits) < len(hosts) else ():
        ways = {pair: one for pair, one in slow.items() if host in pair}
        told |= ways.keys()
        yield _slow_finding(host, "its link to all others", ways, usual)
    rest = {pair: one for pair, one in slow.items() if pair not in told}
    for source, target in {tuple(sorted(pair)) for pair in rest}:
        ways = {pair: one for pair, one in rest.items() if set(pair) == {source, target}}
        yield _slow_finding(f"{source}, {target}", f"the link between {source} and {target}", ways, usual)


def _slow_finding(host: str, what: str, ways: Mapping[Pair, LinkSpeed], usual: float) -> Finding:
    found = min(one.bytes_per_second for one in ways.values())
    told = f"{what} carries {rate(found)}, where at least {rate(SLOW_BYTES_PER_SECOND)} is needed"
    if found > SLOW_BYTES_PER_SECOND:
        told = f"{what} carries {rate(found)}, most others {rate(usual)}"
    remedy = "look at the negotiated speed (ethtool), cable and switch port; all ranks wait for the slowest link"
    return Finding("warning", host, told, remedy)
