"""Connect the nodes of a run: at the start, and when hosts join a running run.

At the start, each node connects to the coordinator, which waits until all nodes are connected and can reach each other.

Later, lost hosts can return and new hosts can join. The coordinator checks them first, and they join between steps:

    node -> coordinator   Hello: as the lost node; or as any free node (-1), by `paceline join`
    coordinator -> node   RunEndNotice with the reason, if the host may not join; else JoinOrder
    coordinator -> nodes  ReachabilityRequest to all nodes, which answer with ReachabilityReply
    node -> coordinator   StartReply: it sees the run folder, or why not
    then                  the ranks save and end after their next step; the next generation includes the host

If a host is rejected, the host and the coordinator print the reason, and the run continues without the host.
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

from paceline.errors import ExitCode, PacelineError, TrainingError, UsageError, first_few, plural
from paceline.host.facts import NodeFacts, compare_hosts
from paceline.host.facts import gather_facts as gather_facts
from paceline.host.tcp import resolve_addresses, why_unreachable
from paceline.launch.agent.channel import JoinOrder, Link, PeerAddress, ReachabilityRequest, authenticate_to_coordinator
from paceline.launch.agent.cluster import RemoteNode, RemoteNodes
from paceline.protocol.control import StopSignals
from paceline.protocol.job import NodePlan, host_labels
from paceline.runs import writing
from paceline.runs.attempt import ElasticNodes, NodeState, NodeStatus, write_nodes_status
from paceline.runs.console import MAX_NAMES, print_to_stderr
from paceline.runs.folder import JOIN_FILE

FIRST_MESSAGE_SECONDS = 10.0
NEXT_MESSAGE_SECONDS = 30.0
REACH_SECONDS = 30.0
MAX_CLOCK_DIFFERENCE_SECONDS = 2.0
MAX_PROBES = 64
MAX_ALL_PAIRS_NODES = 24  # up to this number of nodes, each node tests the connection to every other node
REPLY_POLL_SECONDS = 0.1

CONNECT_SECONDS = 2.0
CONNECT_RETRY_SECONDS = 0.5


def wait_for_nodes(plan: NodePlan, cluster: RemoteNodes) -> NodePlan:
    """Wait until all nodes are connected and can reach each other, or an order comes; return the plan of node 0."""
    count = len(plan.hosts) or plan.nodes  # the run starts with the listed hosts; up to `nodes` may join later
    if count == 1:
        return plan
    others = plural(count - 1, "other node")
    print_to_stderr(f"node 0 ({os.uname().nodename}) waits for {others} at port {cluster.port}")
    _wait_for_all(plan, cluster, count)
    if cluster.is_stop_ordered:
        return plan
    members, facts = cluster.present_nodes, gather_facts()
    check_compatible(plan, facts, members)
    failures = why_nodes_unreachable(cluster, REACH_SECONDS, lambda: cluster.is_stop_ordered)
    if failures:
        raise UsageError(code="nodes-not-connected", reasons=first_few(failures, MAX_NAMES, "\n  "))
    hosts = [facts.host, *(m.hello.facts.host for m in members)]
    print_to_stderr(f"all {count} nodes are here: {first_few(hosts, MAX_NAMES)}")
    return plan


def with_reachable_master_addr(plan: NodePlan, cluster: RemoteNodes) -> NodePlan:
    address = cluster.present_nodes[0].link.own_address if cluster.present_nodes else plan.master_addr
    if address == plan.master_addr:
        return plan
    return replace(plan, master_addr=address, interface=interface_of(gather_facts(), address))


def _wait_for_all(plan: NodePlan, cluster: RemoteNodes, count: int) -> None:
    start = time.monotonic()
    next_message, deadline = start + FIRST_MESSAGE_SECONDS, start + plan.join_seconds
    while len(cluster.members) < count - 1 and not cluster.is_stop_ordered:
        cluster.wait_for_events(max(0.05, min(next_message, deadline) - time.monotonic()))
        if cluster.wrong:
            raise UsageError(code="node-not-accepted", reasons="; ".join(cluster.wrong))
        if lost_members := [m for m in cluster.members.values() if m.lost]:
            raise PacelineError(code="node-disconnected", node=lost_members[0].name, reason=lost_members[0].lost)
        now = time.monotonic()
        if now < min(next_message, deadline) or len(cluster.members) >= count - 1:
            continue
        missing = [node for node in range(1, count) if node not in cluster.members]
        host_names = host_labels(plan.hosts)
        names = [f"node {n} ({host_names[n]})" if n < len(host_names) else f"node {n}" for n in missing]
        status = f"{1 + len(cluster.members)} of {count} nodes are here; missing: {first_few(names, MAX_NAMES)}"
        if now >= deadline:
            raise PacelineError(code="nodes-missing", found=status, seconds=now - start)
        next_message += NEXT_MESSAGE_SECONDS
        print_to_stderr(f"{status} (after {now - start:.0f} s)")


def nodes_to_probe(place: int, count: int) -> list[int]:
    """The nodes to which the node at `place` of `count` tests its connection.

    These are all nodes, or in a large run those at the distances 1, 2, 4, ... in both directions. Each node is then
    tested by several nodes, and any division of the nodes into two parts is crossed, with 2 log2(count) tests for each
    node. Example: 0 of 1,000 tests 1, 2, 4, ..., 512 and 999, 998, 996, ..., 488.
    """
    if count <= MAX_ALL_PAIRS_NODES:
        return [other for other in range(count) if other != place]
    distances = [1 << k for k in range((count - 1).bit_length())]
    return sorted({(place + sign * distance) % count for distance in distances for sign in (1, -1)} - {place})


def why_nodes_unreachable(cluster: RemoteNodes, seconds: float, interrupted: Callable[[], bool]) -> list[str]:
    members, host = cluster.present_nodes, os.uname().nodename
    if not members:
        return []
    with socket.create_server(("", 0)) as probe:
        own_address = PeerAddress(host, members[0].link.own_address, probe.getsockname()[1])
        addresses = [own_address, *(member.address for member in members)]
        for position, member in enumerate(members, 1):
            member.reached = None
            peers = tuple(addresses[other] for other in nodes_to_probe(position, len(addresses)))
            member.link.send(ReachabilityRequest(peers))
        failures = why_peers_unreachable(host, [addresses[other] for other in nodes_to_probe(0, len(addresses))])
        deadline = time.monotonic() + seconds
        while any(m.reached is None for m in cluster.present_nodes) and time.monotonic() < deadline:
            if interrupted():
                break
            cluster.wait_for_events(REPLY_POLL_SECONDS)
    return [*failures, *(reason for m in members if m.reached is not None for reason in m.reached.unreachable)]


def why_peers_unreachable(host: str, peers: Sequence[PeerAddress]) -> list[str]:
    with ThreadPoolExecutor(MAX_PROBES) as pool:  # in parallel, since the coordinator waits for the answer
        reasons = pool.map(why_unreachable, [peer.address for peer in peers], [peer.port for peer in peers])
        return [f"{host} cannot reach {peer.host}: {why}" for peer, why in zip(peers, reasons, strict=True) if why]


def interface_of(facts: NodeFacts, address: str) -> str:
    """The network interface with this address; empty if there is none (gloo and NCCL then choose one)."""
    return next((a.interface for a in facts.addresses if a.address == address), "")


def check_compatible(plan: NodePlan, own: NodeFacts, members: Sequence[RemoteNode]) -> None:
    """Raise UsageError if these nodes cannot train together with node 0, whose facts are `own`. Warn of the rest."""
    coordinator = f"node 0 ({own.host})"
    hosts = {coordinator: own, **{m.name: m.hello.facts for m in members}}
    workers = {coordinator: plan.nproc, **{m.name: m.hello.nproc for m in members}}
    findings = compare_hosts(hosts, workers, plan.threads)
    warnings = [f"{finding.host}: {finding.what}. {finding.remedy}" for finding in findings]
    errors = [text for text, finding in zip(warnings, findings, strict=True) if finding.severity == "error"]
    if errors:
        raise UsageError(code="nodes-incompatible", reasons="\n  ".join(errors))
    for member in members:
        if abs(member.clock_ahead_seconds) > MAX_CLOCK_DIFFERENCE_SECONDS:
            warnings.append(
                f"{member.name}: its clock is {member.clock_ahead_seconds:+.1f} s off node 0's: times in logs cannot "
                "be compared (paceline itself does not compare clocks). Synchronise them with NTP or chrony"
            )
    for text in warnings:
        print_to_stderr(f"warning: {text}")


def wait_for_coordinator_link(plan: NodePlan, orders: StopSignals) -> Link | None:
    start = time.monotonic()
    next_message = start + FIRST_MESSAGE_SECONDS
    other_programs: dict[int, str] = {}  # port -> message, from all tries: the coordinator may be gone at the timeout
    while not orders.has_order:
        link = _try_all(plan, other_programs)
        if link is not None:
            return link
        waited_seconds = time.monotonic() - start
        if waited_seconds >= plan.join_seconds or time.monotonic() >= next_message:
            node = f"node {plan.node} ({os.uname().nodename})" if plan.node > 0 else os.uname().nodename
            status = f"{node} waits for node 0: {_why(plan, other_programs)}"
            if waited_seconds >= plan.join_seconds:
                raise PacelineError(code="node-0-not-found", found=status, seconds=waited_seconds)
            next_message += NEXT_MESSAGE_SECONDS
            print_to_stderr(f"{status} (after {waited_seconds:.0f} s)")
        orders.wait(CONNECT_RETRY_SECONDS)
    return None


def _try_all(plan: NodePlan, other_programs: dict[int, str]) -> Link | None:
    """Try all addresses in parallel: if a firewall drops packets, each try takes seconds."""
    secret = bytes.fromhex(plan.secret)
    pending: dict[socket.socket, int] = {}
    try:
        for family, address in resolve_addresses(plan.node0):
            for port in plan.node0_ports:
                connection = socket.socket(family, socket.SOCK_STREAM)
                connection.setblocking(False)
                code = connection.connect_ex((address, port))
                if code in (0, errno.EINPROGRESS):
                    pending[connection] = port
                else:
                    connection.close()
        deadline = time.monotonic() + CONNECT_SECONDS
        while pending and (remaining := deadline - time.monotonic()) > 0:
            for connection in select.select([], list(pending), [], remaining)[1]:
                port = pending.pop(connection)
                if connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) or _is_itself(connection):
                    connection.close()
                    continue
                try:
                    return authenticate_to_coordinator(connection, secret)
                except ConnectionRefusedError as error:
                    other_programs[port] = str(error)
        return None
    finally:
        for connection in pending:
            connection.close()


def _is_itself(connection: socket.socket) -> bool:
    # a loopback socket can connect to itself, if the kernel assigns it the port to which it connects
    with suppress(OSError):
        return connection.getsockname()[:2] == connection.getpeername()[:2]
    return True


def _why(plan: NodePlan, other_programs: dict[int, str]) -> str:
    ports = ", ".join(map(str, plan.node0_ports))
    if other_programs:
        return "; ".join(f"port {port} of {plan.node0[0]}: {reason}" for port, reason in other_programs.items())
    reasons = [reason for name in plan.node0 if (reason := why_unreachable(name, plan.node0_ports[0]))]
    suffix = f" (tried ports {ports})" if len(plan.node0_ports) > 1 else ""
    return "; ".join(reasons) + suffix if reasons else f"no agent answers at {' or '.join(plan.node0)}, ports {ports}"


CHECK_SECONDS = 30.0  # for testing connections between a new host and all others; longer than detecting a lost host
JOIN_RECHECK_SECONDS = 2.0  # between two tests
FIND_COORDINATOR_SECONDS = 20.0  # how long a host searches the coordinator of a running run


class JoinQueue:
    def __init__(self, plan: NodePlan, cluster: RemoteNodes) -> None:
        self._plan, self._cluster = plan, cluster
        self._workers: dict[int, int] = {}  # node -> its number of workers at the start
        self._tried: RemoteNode | None = None  # the host whose connections are being tested
        self._failures: list[str] | None = None  # failed connections; None: the test is not complete
        self._deadline_seconds = self._sent_seconds = 0.0
        self._gone: dict[tuple[int, str], NodeStatus] = {}  # (node, host) -> why it has left
        self._written: ElasticNodes | None = None
        self.ready: list[RemoteNode] = []  # hosts that can join between two steps

    @cached_property
    def _facts(self) -> NodeFacts:
        return gather_facts()

    @property
    def is_regroup_wanted(self) -> bool:
        """Whether hosts are ready to join or want to leave, which is possible between steps."""
        return bool(self.ready) or any(member.leaves for member in self._cluster.present_nodes)

    # ---- a host asks to join ----

    def _assign_number(self, node: RemoteNode) -> None:
        """Assign a node number to a host. Raises UsageError or TrainingError if the host may not join (now)."""
        plan, cluster, hello = self._plan, self._cluster, node.hello
        if not plan.elastic:
            raise UsageError(code="run-accepts-no-hosts", nodes=plan.nodes)
        if hello.nodes != plan.nodes or not (0 < hello.node < plan.nodes or hello.node == -1):
            raise UsageError(code="joined-other-run", node=hello.node, of=hello.nodes, nodes=plan.nodes)
        present = {node.hello.node: node for node in (*cluster.present_nodes, *cluster.waiting) if not node.leaves}
        if (rival := present.get(hello.node)) is not None:
            facts, silent = rival.hello.facts, time.monotonic() - rival.link.heard_seconds
            raise TrainingError(code="node-taken", node=hello.node, host=facts.host, pid=facts.pid, seconds=silent)
        free = [number for number in range(1, plan.nodes) if number not in present and hello.node in (-1, number)]
        if not free:
            names = ", ".join([self._facts.host, *(present[number].hello.facts.host for number in sorted(present))])
            raise UsageError(code="no-free-node", least=plan.min_nodes, nodes=plan.nodes, names=names)
        workers_of = {number: self._workers.get(number, plan.nproc) for number in free}
        number = next((number for number in free if hello.nproc <= workers_of[number]), -1)
        if number < 0:
            raise UsageError(code="joined-with-more-workers", value=hello.nproc, most=max(workers_of.values()))
        node.hello = replace(hello, node=number)
        check_compatible(plan, self._facts, [node])

    def check_waiting_nodes(self) -> None:
        """Continue to check the waiting hosts."""
        cluster = self._cluster
        for node in [node for node in cluster.waiting if node.lost or node.leaves]:
            print_to_stderr(f"{node.name} has left before it could join: {node.lost or node.leaves}")
            self._reject(node, "", "left" if node.leaves else "lost")
        if self._tried is None:
            self._check_next()
        elif reason := self._why_not(self._tried):
            print_to_stderr(f"{self._tried.name} cannot join: {reason}")
            self._reject(self._tried, reason, "refused")
        elif self._failures is not None and not self._failures:
            print_to_stderr(f"{self._tried.name} is ready and will join after the current step")
            self.ready.append(self._tried)
            self._tried = None
        elif self._failures and time.monotonic() > self._sent_seconds + JOIN_RECHECK_SECONDS:
            self._test_connections(self._tried)  # a lost node may have caused the failures: test again
        self._write()

    def _check_next(self) -> None:
        node = next((node for node in self._cluster.waiting if node not in self.ready), None)
        if node is None:
            return
        self._tried, self._deadline_seconds = node, time.monotonic() + CHECK_SECONDS
        node.link.send(JoinOrder(node.hello.node, self._plan.attempt_dir, self._cluster.proof))
        self._test_connections(node)

    def _test_connections(self, node: RemoteNode) -> None:
        cluster, self._failures, self._sent_seconds = self._cluster, None, time.monotonic()
        peers_of = {node: tuple(member.address for member in cluster.present_nodes)}
        peers_of |= dict.fromkeys(cluster.present_nodes, (node.address,))
        for member, peers in peers_of.items():
            member.reached = None
            member.link.send(ReachabilityRequest(peers))

    def _why_not(self, node: RemoteNode) -> str:
        if node.started is not None and node.started.refusal:
            return node.started.refusal
        replies = [member.reached for member in (node, *self._cluster.present_nodes)]
        if self._failures is None and node.started is not None and all(replies):
            reasons = [text for reply in replies if reply is not None for text in reply.unreachable]
            self._failures = reasons + why_peers_unreachable(self._facts.host, [node.address])
        is_late = time.monotonic() > self._deadline_seconds
        if is_late and self._failures is None:
            return f"its connections could not be tested within {CHECK_SECONDS:g} s"
        return "; ".join(self._failures or ()) if is_late else ""

    def _reject(self, node: RemoteNode, reason: str, state: NodeState) -> None:
        message = f"{node.name} cannot join: {reason}" if reason else ""
        self._cluster.dismiss(node, ExitCode.USAGE if reason else ExitCode.DONE, message)
        self._cluster.waiting = [other for other in self._cluster.waiting if other is not node]
        self.ready = [other for other in self.ready if other is not node]
        self._tried = None if self._tried is node else self._tried
        self._note(node, state, reason or node.lost or node.leaves)

    # ---- between two generations ----

    def admit(self) -> list[RemoteNode]:
        """Release the hosts that want to leave, and return those that join now. No worker runs at this time."""
        cluster = self._cluster
        for member in [member for member in cluster.present_nodes if member.leaves]:
            cluster.dismiss(member, ExitCode.DONE)
            member.lost = f"it has left: {member.leaves}"
            self._note(member, "left", member.leaves)
        entered = [node for node in self.ready if not node.link.ended]
        for node in entered:
            cluster.members[node.hello.node] = node
            self._gone.pop((node.hello.node, node.hello.facts.host), None)
        self.ready.clear()
        cluster.waiting = [node for node in cluster.waiting if node not in entered]
        return entered

    def dismiss(self, member: RemoteNode, why: str) -> None:
        message = f"{member.name} is removed: the first step with it failed: {why}"
        print_to_stderr(message)
        self._cluster.dismiss(member, ExitCode.USAGE, message)
        member.lost = f"removed: {why}"
        self._note(member, "refused", why)

    # ---- for `paceline status` and `paceline join` ----

    def _note(self, node: RemoteNode, state: NodeState, reason: str) -> None:
        number, host = node.hello.node, node.hello.facts.host
        self._gone[number, host] = NodeStatus(number, host, state, reason)

    def _write(self) -> None:
        cluster, plan = self._cluster, self._plan
        if not plan.elastic:
            return
        for node, member in cluster.members.items():
            if member.lost and (node, member.hello.facts.host) not in self._gone:
                self._note(member, "lost", member.lost)
        present = [NodeStatus(0, self._facts.host, "in")]
        present += [NodeStatus(node.hello.node, node.hello.facts.host, "in") for node in cluster.present_nodes]
        present += [NodeStatus(node.hello.node, node.hello.facts.host, "waits") for node in cluster.waiting]
        status = ElasticNodes(plan.min_nodes, plan.nodes, (*present, *self._gone.values()))
        if status != self._written:
            self._written = status
            write_nodes_status(Path(plan.attempt_dir), status)

    def publish_invitation(self, plan: NodePlan) -> None:
        """Let hosts join from now on. `plan` is complete.

        If the run accepts hosts, write a private file with the secret for `paceline join`. `withdraw` removes it.
        """
        cluster = self._cluster
        self._workers = {node: member.hello.nproc for node, member in cluster.members.items()}
        cluster.place_for = self._assign_number
        if not plan.elastic or cluster.is_stop_ordered:
            return
        addresses = [*(address.address for address in self._facts.addresses), self._facts.host]
        invitation = replace(
            plan, node=-1, attempt_dir="", keep_open=(), detached=False, silence_seconds=0.0,
            node0=tuple(dict.fromkeys((*plan.node0, *addresses))), node0_ports=(self._cluster.port,),
            join_seconds=min(plan.join_seconds, FIND_COORDINATOR_SECONDS),
        )  # fmt: skip
        with suppress(OSError):  # a full disk must not stop the run
            writing.replace_file(Path(plan.attempt_dir) / JOIN_FILE, msgspec.json.encode(invitation))

    def withdraw_invitation(self) -> None:
        with suppress(OSError):
            writing.remove(Path(self._plan.attempt_dir) / JOIN_FILE)
