"""How the nodes of a run connect to each other: at the start, and while the run is running.

At the start each node connects to the head, which waits for all nodes and starts when each can reach each.

Hosts that join later, lost ones and new ones, are checked first, and join between two steps:

    node -> head   Hello: as the node that was lost; or as any (-1), by `paceline join`
    head -> node   RunOver, with the reason, if it may not join; else Enter, and to all nodes Reach
    node -> head   StartReply: it sees the run's folder, or why not; Reached, as from all
    then           the head has the ranks save and end after their next step, and starts the next generation with it

The reason of a refusal is printed on that host and on the head; the run continues without the host.
"""

import errno
import os
import select
import socket
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cached_property
from pathlib import Path

import msgspec
from msgspec.structs import replace

from paceline.errors import ExitCode, PacelineError, TrainingError, UsageError, first_few
from paceline.host.facts import Facts, compare_hosts
from paceline.host.facts import gather as gather_facts
from paceline.host.reach import candidates, why_unreachable
from paceline.launch.agent.channel import Enter, Link, PeerAddress, Reach, introduce
from paceline.launch.agent.cluster import Cluster, RemoteNode
from paceline.protocol.control import Orders
from paceline.protocol.job import NodePlan, labels
from paceline.runs import writing
from paceline.runs.attempt import NodesStatus, NodeState, NodeStatus, write_nodes
from paceline.runs.console import MAX_NAMES, say
from paceline.runs.folder import INVITATION

FIRST_WORD_SECONDS = 10.0
NEXT_WORD_SECONDS = 30.0
REACH_SECONDS = 30.0
CLOCK_SECONDS = 2.0
MAX_PROBES = 64
ALL_PAIRS = 24  # up to so many nodes each tries every other
WAIT_SECONDS = 0.1

CONNECT_SECONDS = 2.0
PAUSE_SECONDS = 0.5


def gather_nodes(plan: NodePlan, cluster: Cluster) -> NodePlan:
    """Wait until all nodes are here and can reach each other, or an order comes; node 0's plan, now complete.

    Raises:
        PacelineError: if nodes are missing after --join-timeout; the error lists them.
        UsageError: if a node may not or cannot take part: a different paceline, or a firewall.
    """
    count = len(plan.hosts) or plan.nodes  # those that are named begin; up to `nodes` may come later
    if count == 1:
        return plan
    say(f"node 0 ({os.uname().nodename}) waits for {count - 1} more at port {cluster.port}")
    _wait_for_all(plan, cluster, count)
    if cluster.ordered:
        return plan
    members, facts = cluster.here, gather_facts()
    refuse_differences(plan, facts, members)
    apart = unreachable(cluster, REACH_SECONDS, lambda: cluster.ordered)
    if apart:
        raise UsageError(code="nodes-not-connected", reasons=first_few(apart, MAX_NAMES, "\n  "))
    say(f"all {count} nodes are here: {first_few([facts.host, *(m.hello.facts.host for m in members)], MAX_NAMES)}")
    return plan


def reachable(plan: NodePlan, cluster: Cluster) -> NodePlan:
    """Node 0's plan with the address and the interface by which its members reach it; unchanged without members."""
    own = cluster.here[0].link.own_address if cluster.here else plan.master_addr
    if own == plan.master_addr:
        return plan
    return replace(plan, master_addr=own, interface=interface_of(gather_facts(), own))


def _wait_for_all(plan: NodePlan, cluster: Cluster, count: int) -> None:
    begun = time.monotonic()
    next_word, end = begun + FIRST_WORD_SECONDS, begun + plan.join_seconds
    while len(cluster.members) < count - 1 and not cluster.ordered:
        cluster.wait(max(0.05, min(next_word, end) - time.monotonic()))
        if cluster.wrong:
            raise UsageError(code="node-not-accepted", reasons="; ".join(cluster.wrong))
        if lost := [m for m in cluster.members.values() if m.lost]:
            raise PacelineError(code="node-disconnected", node=lost[0].name, reason=lost[0].lost)
        now = time.monotonic()
        if now < min(next_word, end) or len(cluster.members) >= count - 1:
            continue
        absent = [node for node in range(1, count) if node not in cluster.members]
        named = labels(plan.hosts)
        names = [f"node {n} ({named[n]})" if n < len(named) else f"node {n}" for n in absent]
        words = f"{1 + len(cluster.members)} of {count} nodes are here; missing: {first_few(names, MAX_NAMES)}"
        if now >= end:
            raise PacelineError(code="nodes-missing", found=words, seconds=now - begun)
        next_word += NEXT_WORD_SECONDS
        say(f"{words} (after {now - begun:.0f} s)")


def partners(place: int, count: int) -> list[int]:
    """The nodes that the node at `place` of `count` tries to reach: all, or of many the 1st, 2nd, 4th, ... around it.

    So several nodes try each node, and each split of the nodes into two parts is crossed, with 2 log2(count) tries for
    each node. Example: 0 of 1,000 tries 1, 2, 4, ..., 512 and 999, 998, 996, ..., 488.
    """
    if count <= ALL_PAIRS:
        return [other for other in range(count) if other != place]
    jumps = [1 << k for k in range((count - 1).bit_length())]
    return sorted({(place + sign * jump) % count for jump in jumps for sign in (1, -1)} - {place})


def unreachable(cluster: Cluster, seconds: float, interrupted: Callable[[], bool]) -> list[str]:
    """The nodes that cannot reach a partner at a free port, with the reasons, as far as they answer in `seconds`."""
    members, host = cluster.here, os.uname().nodename
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
        while any(m.reached is None for m in cluster.here) and time.monotonic() < deadline and not interrupted():
            cluster.wait(WAIT_SECONDS)
    return [*apart, *(words for m in members if m.reached is not None for words in m.reached.unreachable)]


def try_to_reach(host: str, peers: Sequence[PeerAddress]) -> list[str]:
    """The peers that this host cannot reach, with the reasons."""
    with ThreadPoolExecutor(MAX_PROBES) as pool:  # all together in the time of one: others wait for this agent's word
        reasons = pool.map(why_unreachable, [peer.address for peer in peers], [peer.port for peer in peers])
        return [f"{host} cannot reach {peer.host}: {why}" for peer, why in zip(peers, reasons, strict=True) if why]


def interface_of(facts: Facts, address: str) -> str:
    """The network interface that has this address; empty if none has (then gloo and NCCL choose)."""
    return next((a.interface for a in facts.addresses if a.address == address), "")


def refuse_differences(plan: NodePlan, own: Facts, members: Sequence[RemoteNode]) -> None:
    """Raise UsageError if these nodes cannot train together with node 0, whose facts are `own`; else warn."""
    head = f"node 0 ({own.host})"
    hosts = {head: own, **{m.name: m.hello.facts for m in members}}
    workers = {head: plan.nproc, **{m.name: m.hello.nproc for m in members}}
    findings = compare_hosts(hosts, workers, plan.threads)
    told = [f"{finding.host}: {finding.what}. {finding.remedy}" for finding in findings]
    errors = [words for words, finding in zip(told, findings, strict=True) if finding.severity == "error"]
    if errors:
        raise UsageError(code="nodes-incompatible", reasons="\n  ".join(errors))
    for member in members:
        if abs(member.clock_ahead_seconds) > CLOCK_SECONDS:
            told.append(
                f"{member.name}: its clock is {member.clock_ahead_seconds:+.1f} s off node 0's: times in logs cannot "
                "be compared (the run itself compares no clocks). Synchronise them: NTP, chrony"
            )
    for words in told:
        say(f"warning: {words}")


def join(plan: NodePlan, orders: Orders) -> Link | None:
    """Connect to the head; None if an order to stop comes first.

    Raises:
        PacelineError: if no connection was made within --join-timeout; the error has the reason.
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
                raise PacelineError(code="node-0-not-found", found=words, seconds=waited)
            next_word += NEXT_WORD_SECONDS
            say(f"{words} (after {waited:.0f} s)")
        orders.wait(PAUSE_SECONDS)
    return None


def _try_all(plan: NodePlan, strangers: dict[int, str]) -> Link | None:
    """Try all addresses at the same time: with a firewall that drops, each would take seconds."""
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


CHECK_SECONDS = 30.0  # for a newcomer and all others to reach each other: longer than a lost host is not known as lost
AGAIN_SECONDS = 2.0  # between two tries
FIND_SECONDS = 20.0  # that a host looks for a head that is said to run


class JoinQueue:
    """The hosts that join a running run, on the head; `plan` is the head's."""

    def __init__(self, plan: NodePlan, cluster: Cluster) -> None:
        self._plan, self._cluster = plan, cluster
        self._workers: dict[int, int] = {}  # that a place is for
        self._tried: RemoteNode | None = None  # the one whose connections are being tried
        self._apart: list[str] | None = None  # who cannot reach whom; None: it is not known yet
        self._deadline_seconds = self._sent_seconds = 0.0
        self._gone: dict[tuple[int, str], NodeStatus] = {}  # who is not there any more, and why
        self._written: NodesStatus | None = None
        self._ready: list[RemoteNode] = []

    @cached_property
    def _facts(self) -> Facts:
        return gather_facts()

    @property
    def wanted(self) -> bool:
        """Whether hosts are ready to join, or want to leave; they may between two steps."""
        return bool(self._ready) or any(member.leaves for member in self._cluster.here)

    @property
    def count(self) -> int:
        """The number of hosts that are ready to join."""
        return len(self._ready)

    # ---- a host asks to join ----

    def _place_for(self, one: RemoteNode) -> None:
        """Assign a node number to a host.

        Raises:
            UsageError: the host may not join.
            TrainingError: the host may not join now.
        """
        plan, cluster, hello = self._plan, self._cluster, one.hello
        if not plan.elastic:
            raise UsageError(code="run-accepts-no-hosts", nodes=plan.nodes)
        if hello.nodes != plan.nodes or not (0 < hello.node < plan.nodes or hello.node == -1):
            raise UsageError(code="joined-other-run", node=hello.node, of=hello.nodes, nodes=plan.nodes)
        there = {there.hello.node: there for there in (*cluster.here, *cluster.waiting) if not there.leaves}
        if (rival := there.get(hello.node)) is not None:
            facts, silent = rival.hello.facts, time.monotonic() - rival.link.heard_seconds
            raise TrainingError(code="node-taken", node=hello.node, host=facts.host, pid=facts.pid, seconds=silent)
        free = [node for node in range(1, plan.nodes) if node not in there and hello.node in (-1, node)]
        if not free:
            names = ", ".join([self._facts.host, *(there[node].hello.facts.host for node in sorted(there))])
            raise UsageError(code="no-free-node", least=plan.min_nodes, nodes=plan.nodes, names=names)
        places = {node: self._workers.get(node, plan.nproc) for node in free}
        node = next((node for node in free if hello.nproc <= places[node]), -1)
        if node < 0:
            raise UsageError(code="joined-with-more-workers", value=hello.nproc, most=max(places.values()))
        one.hello = replace(hello, node=node)
        refuse_differences(plan, self._facts, [one])

    def look(self, attempt_dir: str, proof: str) -> None:
        """Continue to check the hosts that wait; `proof` is the content of a file of the attempt that they must see."""
        cluster = self._cluster
        for one in [one for one in cluster.waiting if one.lost or one.leaves]:
            say(f"{one.name} waited to come in, and is gone again: {one.lost or one.leaves}")
            self._turn_away(one, "", "left" if one.leaves else "lost")
        if self._tried is None:
            self._try_next(attempt_dir, proof)
        elif why := self._why_not(self._tried):
            say(f"{self._tried.name} is not let in: {why}")
            self._turn_away(self._tried, why, "refused")
        elif self._apart is not None and not self._apart:
            say(f"{self._tried.name} is ready and will join after the current step")
            self._ready.append(self._tried)
            self._tried = None
        elif self._apart and time.monotonic() > self._sent_seconds + AGAIN_SECONDS:
            self._try_connections(self._tried)  # one of the others may be lost, and nobody know it yet
        self._write(Path(attempt_dir))

    def _try_next(self, attempt_dir: str, proof: str) -> None:
        cluster = self._cluster
        one = next((one for one in cluster.waiting if one not in self._ready), None)
        if one is None:
            return
        self._tried, self._deadline_seconds = one, time.monotonic() + CHECK_SECONDS
        one.link.send(Enter(one.hello.node, attempt_dir, proof))
        self._try_connections(one)

    def _try_connections(self, one: RemoteNode) -> None:
        cluster, self._apart, self._sent_seconds = self._cluster, None, time.monotonic()
        others = tuple(member.address for member in cluster.here)
        for member, peers in ((one, others), *((member, (one.address,)) for member in cluster.here)):
            member.reached = None
            member.link.send(Reach(peers))

    def _why_not(self, one: RemoteNode) -> str:
        """Why a host may not join, as far as its checks show until now."""
        if one.started is not None and one.started.refusal:
            return one.started.refusal
        tried = [member for member in (one, *self._cluster.here) if member.reached is not None]
        if self._apart is None and one.started is not None and len(tried) == 1 + len(self._cluster.here):
            told = [words for member in tried if member.reached is not None for words in member.reached.unreachable]
            self._apart = told + try_to_reach(self._facts.host, [one.address])
        late = time.monotonic() > self._deadline_seconds
        if late and self._apart is None:
            return f"its connections could not be tried within {CHECK_SECONDS:g} s"
        return "; ".join(self._apart or ()) if late else ""

    def _turn_away(self, one: RemoteNode, why: str, state: NodeState) -> None:
        words = f"{one.name} is not let in: {why}" if why else ""
        self._cluster.part_with(one, ExitCode.USAGE if why else ExitCode.DONE, words)
        self._cluster.waiting = [other for other in self._cluster.waiting if other is not one]
        self._ready = [other for other in self._ready if other is not one]
        self._tried = None if self._tried is one else self._tried
        self._note(one, state, why or one.lost or one.leaves)

    # ---- between two generations ----

    def admit(self) -> list[RemoteNode]:
        """Release the hosts that want to leave, and return those that now join. No worker runs at this moment."""
        cluster = self._cluster
        for member in [member for member in cluster.here if member.leaves]:
            cluster.part_with(member, ExitCode.DONE)
            member.lost = f"it has left: {member.leaves}"
            self._note(member, "left", member.leaves)
        entered = [one for one in self._ready if not one.link.ended]
        for one in entered:
            cluster.members[one.hello.node] = one
            self._gone.pop((one.hello.node, one.hello.facts.host), None)
        self._ready.clear()
        cluster.waiting = [one for one in cluster.waiting if one not in entered]
        return entered

    def dismiss(self, member: RemoteNode, why: str) -> None:
        """Remove a node that has joined, since no step was taken with it."""
        words = f"{member.name} is not kept: the first step with it failed: {why}"
        say(words)
        self._cluster.part_with(member, ExitCode.USAGE, words)
        member.lost = f"not kept: {why}"
        self._note(member, "refused", why)

    # ---- for people, and for `paceline join` ----

    def _note(self, one: RemoteNode, state: NodeState, words: str) -> None:
        found = NodeStatus(one.hello.node, one.hello.facts.host, state, words)
        self._gone[found.node, found.host] = found

    def _write(self, attempt_dir: Path) -> None:
        cluster, plan = self._cluster, self._plan
        if not plan.elastic:
            return
        for node, member in cluster.members.items():
            if member.lost and (node, member.hello.facts.host) not in self._gone:
                self._note(member, "lost", member.lost)
        told = [NodeStatus(0, self._facts.host, "in")]
        told += [NodeStatus(one.hello.node, one.hello.facts.host, "in") for one in cluster.here]
        told += [NodeStatus(one.hello.node, one.hello.facts.host, "waits") for one in cluster.waiting]
        now = NodesStatus(plan.min_nodes, plan.nodes, (*told, *self._gone.values()))
        if now != self._written:
            self._written = now
            write_nodes(attempt_dir, now)

    def invite(self, plan: NodePlan) -> None:
        """From now on hosts may join; `plan` is complete.

        If the run accepts hosts, write a private file for `paceline join`, with the secret. `withdraw` removes it.
        """
        cluster = self._cluster
        self._workers = {node: member.hello.nproc for node, member in cluster.members.items()}
        cluster.place_for = self._place_for
        if not plan.elastic or cluster.ordered:
            return
        addresses = [*(one.address for one in self._facts.addresses), self._facts.host]
        own = replace(
            plan, node=-1, attempt_dir="", keep_open=(), detached=False, silence_seconds=0.0,
            head=tuple(dict.fromkeys((*plan.head, *addresses))), head_ports=(self._cluster.port,),
            join_seconds=min(plan.join_seconds, FIND_SECONDS),
        )  # fmt: skip
        with suppress(OSError):  # a full disk does not keep the run from going on
            writing.replace(Path(plan.attempt_dir) / INVITATION, msgspec.json.encode(own))

    def withdraw(self, attempt_dir: str) -> None:
        """Remove the file for `paceline join`: the run is over."""
        with suppress(OSError):
            writing.remove(Path(attempt_dir) / INVITATION)
