"""All nodes of a run come together: they find the head, which waits for them and starts when each can reach each."""

import errno
import os
import select
import socket
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from msgspec.structs import replace

from paceline.agent.channel import Link, PeerAddress, Reach, introduce
from paceline.agent.cluster import Crew, RemoteNode
from paceline.contract.node_plan import NodePlan
from paceline.contract.orders import Orders
from paceline.errors import PacelineError, UsageError, first_few
from paceline.host.compare import compare_hosts
from paceline.host.facts import Facts
from paceline.host.facts import gather as gather_facts
from paceline.host.reach import candidates, why_unreachable
from paceline.observe.terminal import MAX_NAMES, say

FIRST_WORD_SECONDS = 10.0
NEXT_WORD_SECONDS = 30.0
REACH_SECONDS = 30.0
CLOCK_SECONDS = 2.0
MAX_PROBES = 64
ALL_PAIRS = 24  # up to so many nodes each tries every other
WAIT_SECONDS = 0.1

CONNECT_SECONDS = 2.0
PAUSE_SECONDS = 0.5


def gather_nodes(plan: NodePlan, crew: Crew) -> NodePlan:
    """Wait until all nodes are here and can reach each other, or an order comes; node 0's plan, now complete.

    Raises:
        PacelineError: when some have not come in time; says which.
        UsageError: when a node may not take part, or cannot: it is another paceline, or a firewall keeps it apart.
    """
    count = len(plan.names) or plan.nodes  # those that are named begin; up to `nodes` may come later
    if count == 1:
        return plan
    say(f"node 0 ({os.uname().nodename}) waits for {count - 1} more at port {crew.port}")
    _wait_for_all(plan, crew, count)
    if crew.ordered:
        return plan
    members, facts = crew.here, gather_facts()
    refuse_differences(plan, facts, members)
    apart = unreachable(crew, REACH_SECONDS, lambda: crew.ordered)
    if apart:
        raise UsageError(
            "not every node can reach every other one, on a port chosen freely as gloo and NCCL do:\n  "
            + first_few(apart, MAX_NAMES, "\n  ")
            + "\nOpen all ports between these nodes. `paceline doctor` checks it again."
        )
    say(f"all {count} nodes are here: {first_few([facts.host, *(m.hello.facts.host for m in members)], MAX_NAMES)}")
    return plan


def reachable(plan: NodePlan, crew: Crew) -> NodePlan:
    """Node 0's plan with the address and the interface by which its members reach it; as it is where there is none."""
    own = crew.here[0].link.own_address if crew.here else plan.master_addr
    if own == plan.master_addr:
        return plan
    return replace(plan, master_addr=own, interface=interface_of(gather_facts(), own))


def _wait_for_all(plan: NodePlan, crew: Crew, count: int) -> None:
    begun = time.monotonic()
    next_word, end = begun + FIRST_WORD_SECONDS, begun + plan.join_seconds
    while len(crew.members) < count - 1 and not crew.ordered:
        crew.wait(max(0.05, min(next_word, end) - time.monotonic()))
        if crew.wrong:
            raise UsageError("; ".join(crew.wrong))
        if lost := [m for m in crew.members.values() if m.lost]:
            raise PacelineError(f"{lost[0].name} connected, then disconnected before the run started: {lost[0].lost}")
        now = time.monotonic()
        if now < min(next_word, end) or len(crew.members) >= count - 1:
            continue
        absent = [node for node in range(1, count) if node not in crew.members]
        names = [f"node {n} ({plan.names[n]})" if n < len(plan.names) else f"node {n}" for n in absent]
        words = f"{1 + len(crew.members)} of {count} nodes are here; missing: {first_few(names, MAX_NAMES)}"
        if now >= end:
            raise PacelineError(
                f"{words}. Given up after {now - begun:.0f} s (--join-timeout). Each missing node says on its own "
                "output why it cannot come, if it was started at all"
            )
        next_word += NEXT_WORD_SECONDS
        say(f"{words} (after {now - begun:.0f} s)")


def partners(place: int, count: int) -> list[int]:
    """Whom the node at `place` of `count` tries to reach: all others; of many those 1, 2, 4, ... before and after it.

    So a node that nobody can reach is tried by several, and every split into two is crossed, with 2 log2(count) tries
    each. Example: 0 of 1,000 tries 1, 2, 4, ..., 512 and 999, 998, 996, ..., 488.
    """
    if count <= ALL_PAIRS:
        return [other for other in range(count) if other != place]
    jumps = [1 << k for k in range((count - 1).bit_length())]
    return sorted({(place + sign * jump) % count for jump in jumps for sign in (1, -1)} - {place})


def unreachable(crew: Crew, seconds: float, interrupted: Callable[[], bool]) -> list[str]:
    """Which nodes cannot reach which `partners` at ports chosen freely, as far as they answer within `seconds`; why."""
    members, host = crew.here, os.uname().nodename
    if not members:
        return []
    with socket.create_server(("", 0)) as probe:
        own = PeerAddress(host, members[0].link.own_address, probe.getsockname()[1])
        every = [own, *(member.address for member in members)]
        for place, member in enumerate(members, 1):
            member.reached = None
            member.link.send(Reach(tuple(every[other] for other in partners(place, len(every)))))
        apart = try_to_reach(host, [every[other] for other in partners(0, len(every))])
        deadline = time.monotonic() + seconds
        while any(m.reached is None for m in crew.here) and time.monotonic() < deadline and not interrupted():
            crew.wait(WAIT_SECONDS)
    return [*apart, *(words for m in members if m.reached is not None for words in m.reached.unreachable)]


def try_to_reach(host: str, peers: Sequence[PeerAddress]) -> list[str]:
    """Which of these cannot be reached from here, and why."""
    with ThreadPoolExecutor(MAX_PROBES) as pool:  # all together in the time of one: others wait for this agent's word
        reasons = pool.map(why_unreachable, [peer.address for peer in peers], [peer.port for peer in peers])
        return [f"{host} cannot reach {peer.host}: {why}" for peer, why in zip(peers, reasons, strict=True) if why]


def interface_of(facts: Facts, address: str) -> str:
    """The network interface that has this address; empty if none has (then gloo and NCCL choose)."""
    return next((a.interface for a in facts.addresses if a.address == address), "")


def refuse_differences(plan: NodePlan, own: Facts, members: Sequence[RemoteNode]) -> None:
    """Raise UsageError where these nodes cannot train together with node 0, whose facts are `own`; else warn."""
    head = f"node 0 ({own.host})"
    hosts = {head: own, **{m.name: m.hello.facts for m in members}}
    workers = {head: plan.nproc, **{m.name: m.hello.nproc for m in members}}
    findings = compare_hosts(hosts, workers, plan.threads)
    told = [f"{finding.host}: {finding.what}. {finding.remedy}" for finding in findings]
    errors = [words for words, finding in zip(told, findings, strict=True) if finding.severity == "error"]
    if errors:
        raise UsageError("These nodes are incompatible:\n  " + "\n  ".join(errors))
    for member in members:
        if abs(member.clock_ahead_seconds) > CLOCK_SECONDS:
            told.append(
                f"{member.name}: its clock is {member.clock_ahead_seconds:+.1f} s off node 0's: times in logs cannot "
                "be compared (the run itself compares no clocks). Synchronise them: NTP, chrony"
            )
    for words in told:
        say(f"warning: {words}")


def join(plan: NodePlan, orders: Orders) -> Link | None:
    """Connect to the head; None when ordered to stop while it is not to be found.

    Raises:
        PacelineError: when it was not found in time; says why.
    """
    begun = time.monotonic()
    next_word = begun + FIRST_WORD_SECONDS
    strangers: dict[int, str] = {}  # by port, of all rounds: the head may be gone when the time is over
    while not orders.given:
        link = _try_all(plan, strangers)
        if link is not None:
            return link
        waited = time.monotonic() - begun
        if waited >= plan.join_seconds or time.monotonic() >= next_word:
            who = f"node {plan.node} ({os.uname().nodename})" if plan.node > 0 else os.uname().nodename
            words = f"{who} waits for node 0: {_why(plan, strangers)}"
            if waited >= plan.join_seconds:
                raise PacelineError(f"{words}. Given up after {waited:.0f} s (--join-timeout)")
            next_word += NEXT_WORD_SECONDS
            say(f"{words} (after {waited:.0f} s)")
        orders.wait(PAUSE_SECONDS)
    return None


def _try_all(plan: NodePlan, strangers: dict[int, str]) -> Link | None:
    """One round: all at the same time, for a firewall that drops would cost seconds each."""
    secret = bytes.fromhex(plan.secret)
    trying: dict[socket.socket, int] = {}
    try:
        for family, address in candidates(plan.head):
            for port in plan.head_ports:
                connection = socket.socket(family, socket.SOCK_STREAM)
                connection.setblocking(False)
                code = connection.connect_ex((address, port))
                if code in (0, errno.EINPROGRESS):
                    trying[connection] = port
                else:
                    connection.close()
        deadline = time.monotonic() + CONNECT_SECONDS
        while trying and (left := deadline - time.monotonic()) > 0:
            for connection in select.select([], list(trying), [], left)[1]:
                port = trying.pop(connection)
                if connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) or _is_itself(connection):
                    connection.close()
                    continue
                met = introduce(connection, secret)
                if isinstance(met, Link):
                    return met
                strangers[port] = met
        return None
    finally:
        for connection in trying:
            connection.close()


def _is_itself(connection: socket.socket) -> bool:
    # a loopback socket can connect to itself, when the port it is given happens to be the one it asks for
    with suppress(OSError):
        return connection.getsockname()[:2] == connection.getpeername()[:2]
    return True


def _why(plan: NodePlan, strangers: dict[int, str]) -> str:
    ports = ", ".join(map(str, plan.head_ports))
    if strangers:
        return "; ".join(f"port {port} of {plan.head[0]}: {words}" for port, words in strangers.items())
    why = [words for name in plan.head if (words := why_unreachable(name, plan.head_ports[0]))]
    tried = f" (tried ports {ports})" if len(plan.head_ports) > 1 else ""
    return "; ".join(why) + tried if why else f"no agent answers at {' or '.join(plan.head)}, ports {ports}"
