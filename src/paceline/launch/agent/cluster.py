"""The coordinator's view of the other nodes, and a generation of workers on all nodes.

The coordinator waits only in `RemoteNodes.wait_for_events`: until a timeout, an order, a message of another node or
the end of a child. A `Generation` consists of all workers of one start. It starts, observes, queries, unblocks and
stops them.
"""

import os
import secrets
import select
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Self

from msgspec.structs import replace

from paceline.errors import PacelineError, UsageError
from paceline.guard.collect import ADVANCE_INTERVAL_SECONDS, NATIVE_STACK_SECONDS
from paceline.guard.deaths import diagnosis_due_at_seconds
from paceline.host.procfs import raise_open_file_limit
from paceline.launch.agent import channel
from paceline.launch.agent.files import RunFolderServer
from paceline.launch.agent.workers import InheritedResources, Workers
from paceline.protocol.balance import expand_to_rank_speeds
from paceline.protocol.control import LIFELINE_GRACE_SECONDS, STOP_SIGNALS, StopSignals
from paceline.protocol.evidence import Evidence, RankSample
from paceline.protocol.job import NodePlan
from paceline.runs import writing
from paceline.runs.console import print_to_stderr

if TYPE_CHECKING:
    from paceline.launch.agent.store_proxy import StoreProxy


class RemoteNode:
    def __init__(self, hello: channel.Hello, link: channel.Link) -> None:
        self.hello, self.link = hello, link
        self.clock_ahead_seconds = hello.facts.wall_seconds - time.time()  # too small by the network latency
        self.clock = channel.ClockBounds()  # the same, more exact with every beat
        self.ranks: Sequence[int] = hello.ranks  # in this generation
        self.beat = channel.NodeHeartbeat(-1)
        self._news: tuple[object, ...] = ()  # of the last beat
        self._asked = 0  # number of the last question
        self.evidence: dict[int, Evidence] = {}  # the answers so far, by rank
        self._samples: dict[int, RankSample] = {}  # by rank
        # (`_samples`, `lost`, result of `samples()`)
        self._cached: tuple[object, str, Sequence[RankSample]] | None = None
        self.reached: channel.ReachabilityReply | None = None
        self.started: channel.StartReply | None = None
        self.lost = ""  # why it no longer takes part; empty while it does
        self.leaves = ""  # why it wants to leave, which is possible between steps
        self.joined = False  # it came by `paceline join`: an order to it does not concern the other nodes

    @property
    def name(self) -> str:
        return f"node {self.hello.node} ({self.hello.facts.host})"

    @property
    def address(self) -> channel.PeerAddress:
        return channel.PeerAddress(self.hello.facts.host, self.link.peer_address, self.hello.probe_port)

    def start(self, start: channel.StartOrder) -> None:
        self.ranks = self.hello.ranks or range(start.ranks.first, start.ranks.first + self.hello.nproc)
        self.beat, self._samples, self.started = channel.NodeHeartbeat(start.generation), {}, None
        self.link.send(start)

    def worker_samples(self) -> Sequence[RankSample]:
        if self._cached is None or self._cached[0] is not self._samples or self._cached[1] != self.lost:
            self._cached = self._samples, self.lost, [self._sample(rank) for rank in self.ranks]
        return self._cached[2]

    def _sample(self, rank: int) -> RankSample:
        sample = self._samples.get(rank) or RankSample(rank, self.hello.facts.host, 0, self.hello.node)
        if not self.lost or sample.code is not None:
            return sample
        lost = f"{self.name} is lost: {self.lost}"
        return replace(sample, lost_reason=lost, ended_seconds=self.link.heard_seconds, failure=None, error_text="")

    def request_evidence(self, question: channel.EvidenceRequest) -> None:
        self._asked, self.evidence = question.question, {}
        self.link.send(question)

    def handle_message(self, message: channel.Message) -> bool:
        """Process a message; return False for a heartbeat that changes nothing."""
        match message:
            case channel.NodeHeartbeat():
                return self._process_beat(message)
            case channel.EvidenceReply(question, evidence):
                if question == self._asked and evidence.rank in self.ranks:
                    self.evidence[evidence.rank] = evidence.swap_times_and_ages(time.monotonic())
                return False  # the caller of `request_evidence` polls ten times a second
            case channel.StartReply():
                self.started = message
            case channel.ReachabilityReply():
                self.reached = message
            case _:
                self.link.end("it sent a message that only a coordinator sends")
        return True

    def _process_beat(self, beat: channel.NodeHeartbeat) -> bool:
        now, previous_news = time.monotonic(), self._news
        if beat.unix_time is not None:
            self.clock.narrow(now, least_seconds=beat.unix_time - time.time())
        if beat.alive_took_seconds is not None:
            self.clock.narrow(now, most_seconds=beat.alive_took_seconds)
        if beat.generation >= self.beat.generation:  # otherwise it was sent before the present generation started
            self.beat, self._news = beat, beat.urgent_state
            if beat.workers:
                self._samples = {worker.rank: worker.swap_times_and_ages(now) for worker in beat.workers}
        return self._news != previous_news


NODE_END_SECONDS = 3.0
NUM_OTHER_OPEN_FILES = 1024  # open files besides the links
# heartbeats are collected for this time per node: a tenth of a second for a thousand nodes
HEARTBEAT_BATCH_SECONDS = 1e-4
MAX_DISMISSED = 16
SILENT_SECONDS = 3 * channel.BEAT_SECONDS


class RemoteNodes:
    """All nodes except the coordinator's, and all orders, to any of the agents."""

    def __init__(self, plan: NodePlan, orders: StopSignals) -> None:
        self.members: dict[int, RemoteNode] = {}
        self.gate: StoreProxy | None = None  # to the store of the present generation
        self.files: RunFolderServer | None = None  # for nodes that do not see the run folder
        self.proof = ""  # see `StartOrder.proof`
        self.waiting: list[RemoteNode] = []  # nodes that came while the run is running, and are not members yet
        self.place_for: Callable[[RemoteNode], object] | None = None  # assigns a number to such a node; see `JoinQueue`
        self.wrong: list[str] = []  # errors of nodes that have the secret but cannot be accepted
        self._plan, self._orders = plan, orders
        self._listener: channel.Listener | None = None
        if plan.nodes > 1 and plan.run_dir and plan.attach < 0:
            self.files = RunFolderServer(Path(plan.attempt_dir).resolve())
            # the other nodes read this file to check that they see the folder
            self.proof = secrets.token_hex(8)
            writing.replace_file(Path(plan.attempt_dir) / channel.PROOF_FILE, self.proof.encode(), sync=True)
        if plan.nodes > 1:  # the ranks of a single node keep the limit of the user
            raise_open_file_limit(NUM_OTHER_OPEN_FILES + plan.nodes)
            self._listener = channel.Listener(plan.node0_ports, bytes.fromhex(plan.secret))
        self._orders_by_node: dict[int, list[int]] = {}  # node -> its stop signals; 0: its launcher has ended
        self._beat_seconds = 0.0
        self.settled_seconds = 0.0  # time when connections have recovered from the last interruption
        self._poller = channel.Poller()
        self._dismissed: list[channel.Link] = []  # links to nodes that were ordered to end

    @property
    def port(self) -> int:
        """The port to which the other agents connect; 0 for one node."""
        return self._listener.port if self._listener else 0

    @property
    def present_nodes(self) -> list[RemoteNode]:
        return [member for _, member in sorted(self.members.items()) if not member.lost]

    @property
    def launcher_gone(self) -> bool:
        return self._orders.launcher_gone or any(0 in orders for orders in self._orders_by_node.values())

    @property
    def signals(self) -> Sequence[int]:
        """The stop signals so far. A signal to one agent applies to all, and a signal to several agents counts once."""
        others = ([n for n in orders if n in STOP_SIGNALS] for orders in self._orders_by_node.values())
        return max([self._orders.signals, *others], key=len)

    @property
    def is_stop_ordered(self) -> bool:
        return self.launcher_gone or bool(self.signals)

    def adopt_stop_signal(self, ranks: Sequence[RankSample]) -> None:
        """Treat the first stop signal that a rank has received itself as an order to this agent."""
        if not self.signals:
            self._orders.signals += [signal.Signals(r.stop_signal) for r in ranks if r.stop_signal in STOP_SIGNALS][:1]

    def wait_for_events(self, seconds: float) -> None:
        if self._listener is None:
            self._orders.wait(seconds)
            return
        deadline = time.monotonic() + min(seconds, channel.BEAT_SECONDS)
        while True:
            self._poller.set_links(node.link for node in (*self.present_nodes, *self.waiting))
            sockets = [*self._listener.sockets(), self._poller]
            has_news = self._orders.wait(deadline - time.monotonic(), sockets)
            for link, messages in self._listener.take_new_links():
                self._welcome(link, messages)
                has_news = True
            if self._receive() or has_news or time.monotonic() >= deadline:
                return
            # Only heartbeats: a thousand nodes send one each millisecond, so process many of them together
            time.sleep(HEARTBEAT_BATCH_SECONDS * len(self.members))

    def _receive(self) -> bool:
        """Process messages of nodes, and send heartbeats if they are due; return whether there is news."""
        readable, has_news = {*self._poller.readable_links()}, False
        beat_due = time.monotonic() > self._beat_seconds + channel.BEAT_SECONDS
        for member in (*self.present_nodes, *self.waiting) if readable or beat_due else ():
            if beat_due or member.link in readable:  # with each heartbeat check all nodes, to detect silent ones
                has_news = self._process(member, member.link.receive()) or has_news
                member.lost = member.link.ended
                has_news = has_news or bool(member.lost)
            if beat_due:
                # read the clock for each node: a send may wait
                member.link.send(channel.CoordinatorHeartbeat(time.time()))
        if beat_due:
            self._beat_seconds = now = time.monotonic()
            silence = max((now - member.link.heard_seconds for member in self.present_nodes), default=0.0)
            if silence > SILENT_SECONDS:  # TCP retries with doubling pauses, up to the length of the interruption
                self.settled_seconds = now + silence + channel.BEAT_SECONDS
        return has_news

    def _welcome(self, link: channel.Link, messages: Sequence[channel.Message]) -> None:
        hello = messages[0]
        if isinstance(hello, channel.StoreConnectionRequest):
            if self.gate is None:
                return link.end("there is no store")
            link.send(channel.CoordinatorHeartbeat())
            return self.gate.relay_connection(link.detach())
        file_messages = channel.FilePart | channel.FileRequest | channel.CheckpointListRequest
        if self.files is not None and isinstance(hello, file_messages):
            return self.files.serve(link, messages)
        if not isinstance(hello, channel.Hello):
            return link.end("its first message was not Hello")
        if self.place_for is not None:
            return self._welcome_late(self.place_for, RemoteNode(hello, link), messages[1:])
        sender = f"node {hello.node} ({hello.facts.host}, pid {hello.facts.pid})"
        if not 0 < hello.node < self._plan.nodes or hello.nodes != self._plan.nodes:
            self.wrong.append(f"{sender} expects {hello.nodes} nodes, but this run has {self._plan.nodes}")
        elif hello.node in self.members:
            rival = self.members[hello.node].hello.facts
            self.wrong.append(f"{sender} has connected, but {rival.host}, pid {rival.pid}, already has its number")
        else:
            member = self.members[hello.node] = RemoteNode(hello, link)
            # immediately, so that even a short run knows the clocks
            link.send(channel.CoordinatorHeartbeat(time.time()))
            self._process(member, messages[1:])
            return None
        link.send(channel.RunEndNotice(2))
        return link.end("not accepted")

    def _welcome_late(
        self, place_for: Callable[[RemoteNode], object], node: RemoteNode, messages: Sequence[channel.Message]
    ) -> None:
        """Let a host that joins a running run wait, or reject it. The run continues."""
        facts = node.hello.facts
        node.joined = node.hello.node < 0
        try:
            place_for(node)
        except PacelineError as error:
            print_to_stderr(f"{facts.host} (pid {facts.pid}) cannot join: {error.message_with_code}")
            return self.dismiss(node, error.exit_code, f"{facts.host} cannot join: {error.message_with_code}")
        self.waiting.append(node)
        node.link.send(channel.CoordinatorHeartbeat(time.time()))
        self._process(node, messages)
        return None

    def dismiss(self, node: RemoteNode, code: int, words: str = "") -> None:
        """Order a node to print `words` and to end with this code. The run continues."""
        node.link.send(channel.RunEndNotice(code, words))
        self._dismissed.append(node.link)  # closed immediately, the order could be lost before it is read
        while len(self._dismissed) > MAX_DISMISSED:
            self._dismissed.pop(0).end("it did not end in time")

    def _process(self, member: RemoteNode, messages: Sequence[channel.Message]) -> bool:
        has_news = False
        for message in messages:
            if not isinstance(message, channel.StopSignalNotice):
                has_news = member.handle_message(message) or has_news
                continue
            has_news = True
            if member.joined or member in self.waiting or (message.signal == 0 and self._plan.elastic):
                # Only this node leaves. The coordinator notices the end of the launcher: here only a session has ended
                member.leaves = "it was ordered to stop" if message.signal else "its launcher's session has ended"
            else:
                self._orders_by_node.setdefault(member.hello.node, []).append(message.signal)
        return has_news

    def stopped(self) -> bool:
        return all(member.beat.stopped for member in self.present_nodes)

    def end(self, code: int) -> None:
        """Order all nodes to end, and wait for them. A node that still copies files sends heartbeats.

        They must end before the coordinator.
        """
        for member in (*self.present_nodes, *self.waiting):
            member.link.send(channel.RunEndNotice(code))
        start = time.monotonic()
        while links := [n.link for n in self.present_nodes if not n.link.ended]:
            if time.monotonic() > max(start, *(link.heard_seconds for link in links)) + NODE_END_SECONDS:
                break
            self._poller.set_links(links)
            select.select([self._poller], [], [], NODE_END_SECONDS / 10)
            for link in self._poller.readable_links():
                link.receive()
        for link in (*(member.link for member in (*self.members.values(), *self.waiting)), *self._dismissed):
            link.end("the run is over")
        self._poller.close()
        if self._listener is not None:
            self._listener.close()


# ---- one start of the workers on all nodes ----

START_SECONDS = 30.0  # for other nodes to start their processes
START_LOOK_SECONDS = 1.0
NETWORK_ANSWER_SECONDS = 3.0  # for the answers of other nodes, beyond the time that the nodes need
UNBLOCKED_PROGRESS_SECONDS = 5.0  # an unblocked rank without progress after this time is blocked in a different place
UNBLOCKED_LOOK_SECONDS = 0.1
SWEEP_MARGIN_SECONDS = 5.0  # for other nodes to kill the remaining processes and to report it
SHOW_CURSOR = b"\x1b[?25h"


class Generation:
    """All workers of one start. Use it as a context manager: at its end, all processes of the generation have ended.

    `plan` is that of the coordinator, with the ranks of this generation. `own` are the started workers of its node. The
    other nodes of `cluster` have been ordered to start their workers.
    """

    def __init__(self, plan: NodePlan, own: Workers, cluster: RemoteNodes) -> None:
        self.plan, self.own, self.cluster = plan, own, cluster
        self.regroups = False  # the ranks have been asked to save and end, because hosts join or leave
        self.members: Sequence[RemoteNode] = cluster.present_nodes  # some may be lost later
        self._question = 0
        self._last_step = 0  # of a script that stops by step; 0: not chosen

    @classmethod
    def start(cls, plan: NodePlan, number: int, cluster: RemoteNodes, inherited: InheritedResources) -> Self:
        """Start a generation on all present nodes. `plan` is that of the coordinator, with the ranks on its node."""
        members = cluster.present_nodes
        total = plan.nproc + sum(member.hello.nproc for member in members)
        nprocs = [plan.nproc, *(member.hello.nproc for member in members)]
        speeds = expand_to_rank_speeds(plan.ranks.speeds, nprocs) if plan.ranks.speeds else ()
        ranks = replace(plan.ranks, world_size=total, groups=1 + len(members), speeds=speeds)
        plan = replace(plan, ranks=ranks)
        own_workers = Workers.start(plan, number, inherited)
        cluster.gate = own_workers.gate
        first = plan.nproc
        for group_rank, member in enumerate(members, 1):
            node_ranks = replace(ranks, first=first, group_rank=group_rank, master_port=own_workers.port)
            member.start(channel.StartOrder(number, node_ranks, plan.attempt_dir, cluster.proof))
            first += member.hello.nproc
        return cls(plan, own_workers, cluster)

    def wait_started(self) -> bool:
        """Wait until all other nodes have started their workers; return False if an order comes first."""
        deadline = time.monotonic() + START_SECONDS
        while waiting := [member for member in self.cluster.present_nodes if member.started is None]:
            if time.monotonic() > deadline:
                raise UsageError(code="node-starts-slowly", node=waiting[0].name, seconds=START_SECONDS)
            self.cluster.wait_for_events(START_LOOK_SECONDS)
            if self.cluster.is_stop_ordered:
                return False
        replies = [member.started for member in self.cluster.present_nodes]
        if refusals := [reply.refusal for reply in replies if reply is not None and reply.refusal]:
            raise UsageError(code="node-not-started", reasons="\n".join(refusals))
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if not self.own.swept:
            self.stop(0.0)
        self.own.close()

    # ---- its state ----

    def worker_samples(self) -> list[RankSample]:
        return [*self.own.worker_samples(), *(sample for member in self.members for sample in member.worker_samples())]

    @property
    def interrupted(self) -> bool:
        """Whether an order to stop or a failure has come, which is more urgent than a question."""
        return self.cluster.is_stop_ordered or diagnosis_due_at_seconds(self.worker_samples()) is not None

    def running_workers(self) -> list[RankSample]:
        return [sample for sample in self.worker_samples() if sample.is_running]

    def oom_kills(self) -> int:
        return self.own.oom_kills() + sum(member.beat.oom_kills for member in self.cluster.present_nodes)

    def collect_evidence(self, patience_seconds: float, *, to_its_end: bool = False) -> list[Evidence]:
        """Details of the state of each rank, sorted by rank. A worker may take `patience_seconds` to answer.

        An order or a failure ends the collection early, unless `to_its_end`.
        """
        self._question += 1
        collection = self.own.start_evidence_collection(self._question, patience_seconds)
        for member in self.cluster.present_nodes:
            member.request_evidence(channel.EvidenceRequest(self._question, patience_seconds))
        deadline = time.monotonic() + patience_seconds + NATIVE_STACK_SECONDS + NETWORK_ANSWER_SECONDS
        while not collection.advance() or any(len(m.evidence) < len(m.ranks) for m in self.cluster.present_nodes):
            self.cluster.wait_for_events(ADVANCE_INTERVAL_SECONDS / 2)
            if time.monotonic() > deadline or (self.interrupted and not to_its_end):
                break
        by_rank = {evidence.rank: evidence for evidence in collection.evidence(self.own.worker_samples())}
        for member in self.cluster.present_nodes:
            by_rank |= member.evidence
        completed: list[Evidence] = []
        for sample in sorted(self.worker_samples(), key=lambda sample: sample.rank):
            evidence = by_rank.get(sample.rank) or Evidence.from_sample(sample)
            failure, text = sample.failure or evidence.failure, sample.error_text or evidence.error_text
            completed.append(replace(evidence, failure=failure, error_text=text))
        return completed

    def write_clocks(self) -> None:
        if (machine := self.own.machine) is None:
            return
        for member in self.cluster.present_nodes:
            if (record := member.clock.due_record(member.hello.node, time.monotonic())) is not None:
                machine.write(record)

    # ---- its end ----

    def regroup(self) -> None:
        """Have all ranks save and end after their next step, so that hosts can join or leave in the next generation."""
        if not self.regroups:
            self.regroups = True
            self.own.ask_to_regroup()

    def unblock(self, ranks: Sequence[int], word: str) -> None:
        """Raise an exception in the collective in which each of these ranks waits, and let the ranks save.

        Returns when they have ended, make no progress, or have used the whole grace.
        """
        self._order(channel.UnblockOrder(tuple(ranks), word))
        start, grace_seconds = time.monotonic(), self.plan.grace_period_seconds
        while (waited_seconds := time.monotonic() - start) < grace_seconds and not self.cluster.is_stop_ordered:
            running = [sample for sample in self.running_workers() if sample.rank in ranks]
            has_progress = any(sample.still_seconds < waited_seconds for sample in running)
            if not running or (waited_seconds > UNBLOCKED_PROGRESS_SECONDS and not has_progress):
                return
            self.cluster.wait_for_events(UNBLOCKED_LOOK_SECONDS)

    def save_and_stop(self, number: int) -> None:
        """As `stop` after signal `number`, but ranks of an unmodified script that can save stop after the same step."""
        self._order(channel.StopStepOrder())
        self.stop(self.plan.grace_period_seconds, number, signals_heard=1)

    def stop(self, grace_seconds: float, number: int = signal.SIGTERM, *, signals_heard: int = 0) -> None:
        """End all workers and their child processes, on all nodes.

        The grace becomes shorter once a worker has failed, since the ranks can no longer save together (ranks of a
        script may), or once the launcher has ended. After a signal `number` other than SIGTERM, a script also gets
        SIGTERM. `signals_heard` is the number of stop signals so far. A further one ends the grace.
        """
        last_seconds = self.plan.term_grace_seconds if number != signal.SIGTERM else 0.0
        self._await_end(grace_seconds, last_seconds, number, signals_heard)
        if last_seconds:
            self._await_end(last_seconds, 0.0, signal.SIGTERM, len(self.cluster.signals))
        self._order(channel.StopOrder(0.0))
        self.own.kill_sessions()
        deadline = time.monotonic() + SWEEP_MARGIN_SECONDS
        while not self.cluster.stopped() and time.monotonic() < deadline:
            self.cluster.wait_for_events(deadline - time.monotonic())
        if os.isatty(2):  # a killed progress bar has not restored the cursor
            with suppress(OSError):
                os.write(2, SHOW_CURSOR)

    def _await_end(self, grace_seconds: float, more_seconds: float, number: int, signals_heard: int) -> None:
        """Signal all workers and wait for them to end. The nodes kill them only after a further `more_seconds`."""
        self._order(channel.StopOrder(grace_seconds + more_seconds, number))
        deadline, launcher_gone = time.monotonic() + grace_seconds, self.cluster.launcher_gone
        while self.own.seconds_until_kill or not self.cluster.stopped():
            now = time.monotonic()
            if now >= deadline or len(self.cluster.signals) > signals_heard:
                break
            if not self.own.patient and any(sample.ended_badly for sample in self.worker_samples()):
                deadline = min(deadline, now + self.plan.grace_seconds)
                self._order(channel.StopOrder(deadline - now, number))
            self._choose_last_step()
            if self.cluster.launcher_gone and not launcher_gone:
                launcher_gone, deadline = True, min(deadline, now + LIFELINE_GRACE_SECONDS)
                self._order(channel.StopOrder(deadline - now))
            self.cluster.wait_for_events(min(deadline - now, self.own.seconds_until_kill or channel.BEAT_SECONDS))

    def _choose_last_step(self) -> None:
        """Choose the last step of an unmodified script, once all of its ranks have a stop request.

        After its next step, each of these ranks waits for the choice. A rank publishes the number of a step before it
        looks whether it must wait. So no rank has passed the step after the newest published one.
        """
        samples = self.worker_samples()
        running = [sample for sample in samples if sample.is_running]
        if not self._last_step and running and all(sample.stop_asked for sample in running):
            self._last_step = 1 + max(sample.steps_ended for sample in samples)
            self._order(channel.StopStepOrder(self._last_step))

    def _order(self, order: channel.Order) -> None:
        for member in self.cluster.present_nodes:
            member.link.send(order)
        self.own.execute(order)
