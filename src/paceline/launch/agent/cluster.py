"""The other nodes as the head sees them, and a generation of workers on all of them.

The head waits in `Cluster.wait`, and nowhere else: until the time is over, or an order, another node or the end of a
child comes. A `Generation` is all workers of one start: started, observed, asked, unblocked, stopped.
"""

import os
import secrets
import select
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self

from msgspec.structs import replace

from paceline.errors import PacelineError, UsageError
from paceline.guard.collect import ADVANCE_SECONDS, NATIVE_SECONDS
from paceline.guard.deaths import due_seconds
from paceline.host.procfs import allow_files
from paceline.launch.agent import channel
from paceline.launch.agent.store import StoreGate
from paceline.launch.agent.workers import Inherited, Workers
from paceline.protocol.control import LIFELINE_GRACE_SECONDS, STOP_SIGNALS, Orders
from paceline.protocol.evidence import Evidence, Sample
from paceline.protocol.job import NodePlan
from paceline.runs import writing
from paceline.runs.console import say


class RemoteNode:
    """One other node."""

    def __init__(self, hello: channel.Hello, link: channel.Link) -> None:
        self.hello, self.link = hello, link
        self.clock_ahead_seconds = hello.facts.wall_seconds - time.time()  # less the milliseconds of the way here
        self.clock = channel.ClockBounds()  # the same, better known with every beat
        self.ranks: Sequence[int] = hello.ranks  # in this generation
        self.beat = channel.Beat(-1)
        self._ends: tuple[object, ...] = ()  # what the last beat said of ends, of workers and of their generation
        self.asked = 0  # the number of the last question
        self.shown: list[Evidence] | None = None  # its answer, once it is whole
        self._arrived: list[Evidence] = []
        self._samples: dict[int, Sample] = {}  # by rank
        self._listed: tuple[object, str, Sequence[Sample]] | None = None  # the list, and what it was made from
        self.reached: channel.Reached | None = None
        self.started: channel.StartReply | None = None
        self.lost = ""  # why it no longer takes part; empty while it does
        self.leaves = ""  # why it wants to go; between two steps it may
        self.joined = False  # it has come by `paceline join`: what it is ordered to do is meant for it alone

    @property
    def name(self) -> str:
        """For people."""
        return f"node {self.hello.node} ({self.hello.facts.host})"

    @property
    def address(self) -> channel.PeerAddress:
        """The address at which other nodes can try to reach it."""
        return channel.PeerAddress(self.hello.facts.host, self.link.peer_address, self.hello.probe_port)

    def start(self, start: channel.StartOrder) -> None:
        """Order it to start its part of a generation."""
        self.ranks = self.hello.ranks or range(start.ranks.first, start.ranks.first + self.hello.nproc)
        self.beat, self._samples, self.started = channel.Beat(start.generation), {}, None
        self.link.send(start)

    def samples(self) -> Sequence[Sample]:
        """The last state of its workers in this generation, also if the node is lost."""
        if self._listed is None or self._listed[0] is not self._samples or self._listed[1] != self.lost:
            self._listed = self._samples, self.lost, [self._sample(rank) for rank in self.ranks]
        return self._listed[2]

    def _sample(self, rank: int) -> Sample:
        known = self._samples.get(rank) or Sample(rank, self.hello.facts.host, 0, self.hello.node)
        if not self.lost or known.code is not None:
            return known
        lost = f"{self.name} is lost: {self.lost}"
        return replace(known, lost=lost, ended_seconds=self.link.heard_seconds, failure=None, words="")

    def ask(self, question: channel.Ask) -> None:
        """Ask for details of what its workers do."""
        self.asked, self.shown, self._arrived = question.question, None, []
        self.link.send(question)

    def hear(self, message: channel.Message) -> bool:
        """Process a message; return whether it is news, and not a repeated sign of life."""
        match message:
            case channel.Beat():
                return self._hear_beat(message)
            case channel.Shown():
                self._hear_answer(message)
                return False  # whoever has asked looks ten times a second
            case channel.StartReply():
                self.started = message
            case channel.Reached():
                self.reached = message
            case _:
                self.link.end("it sent what only a head sends")
        return True

    def _hear_beat(self, beat: channel.Beat) -> bool:
        now, before = time.monotonic(), self._ends
        if beat.unix_time is not None:
            self.clock.see(now, least_seconds=beat.unix_time - time.time())
        if beat.alive_took_seconds is not None:
            self.clock.see(now, most_seconds=beat.alive_took_seconds)
        if beat.generation >= self.beat.generation:  # else it was on its way when the next one was started
            self.beat = beat
            codes = ((one.code, one.failure is None) for one in beat.workers)
            self._ends = beat.generation, beat.stopped, beat.left, *codes
            if beat.workers:
                self._samples = {one.rank: one.turned(now) for one in beat.workers}
        return self._ends != before

    def _hear_answer(self, answer: channel.Shown) -> None:
        if answer.question == self.asked and answer.evidence is None:
            self.shown = self._arrived
        elif answer.question == self.asked and answer.evidence and len(self._arrived) < self.hello.nproc:
            self._arrived.append(answer.evidence.turned(time.monotonic()))


FAREWELL_SECONDS = 3.0
FILES = 1024  # for all but the links
BATCH_SECONDS = 1e-4  # for each node: how long signs of life may wait to be taken in; a tenth of a second of a thousand
MAX_PARTED = 16
SILENT_SECONDS = 3 * channel.BEAT_SECONDS


class Cluster:
    """All nodes except the head's, and all orders, to any of the agents."""

    def __init__(self, plan: NodePlan, orders: Orders) -> None:
        self.members: dict[int, RemoteNode] = {}
        self.gate: StoreGate | None = None  # to the store of the generation that runs
        self.waiting: list[RemoteNode] = []  # have come while the run is on its way, and are not members yet
        self.place_for: Callable[[RemoteNode], object] | None = None  # gives such a one its number; see `JoinQueue`
        self.wrong: list[str] = []  # who had the secret, and could not be taken all the same
        self._plan, self._orders = plan, orders
        allow_files(FILES + plan.nodes)
        self._listener = channel.Listener(plan.head_ports, bytes.fromhex(plan.secret)) if plan.nodes > 1 else None
        self._told: dict[int, list[int]] = {}  # node -> orders it was given: signals, 0 for a launcher that is gone
        self._beat_seconds = 0.0
        self.settled_seconds = 0.0  # when connections have recovered from what has been silent and is heard again
        self._poller = channel.Poller()
        self._parted: list[channel.Link] = []  # to nodes that have been told to end

    @property
    def port(self) -> int:
        """The port to which the other agents connect; 0 for one node."""
        return self._listener.port if self._listener else 0

    @property
    def here(self) -> list[RemoteNode]:
        """The nodes that take part, by number."""
        return [member for _, member in sorted(self.members.items()) if not member.lost]

    @property
    def launcher_gone(self) -> bool:
        """Whether any agent has lost its launcher."""
        return self._orders.launcher_gone or any(0 in told for told in self._told.values())

    @property
    def signals(self) -> Sequence[int]:
        """The stop signals so far. An order to one agent is one to all, and the same order to several counts once."""
        others = ([n for n in told if n in STOP_SIGNALS] for told in self._told.values())
        return max([self._orders.signals, *others], key=len)

    @property
    def ordered(self) -> bool:
        """Whether there is any order: to stop, all of them."""
        return self.launcher_gone or bool(self.signals)

    def wait(self, seconds: float) -> None:
        """Return after `seconds`, or earlier if there is news; by then all messages of other nodes are processed."""
        if self._listener is None:
            self._orders.wait(seconds)
            return
        until = time.monotonic() + min(seconds, channel.BEAT_SECONDS)
        while True:
            self._poller.attend(one.link for one in (*self.here, *self.waiting))
            waited_for = [*self._listener.sockets(), self._poller]
            news = self._orders.wait(until - time.monotonic(), waited_for)
            for link, messages in self._listener.arrived():
                self._welcome(link, messages)
                news = True
            if self._listen() or news or time.monotonic() >= until:
                return
            # nothing but signs of life: of a thousand nodes one comes each millisecond, and many are taken in at once
            time.sleep(BATCH_SECONDS * len(self.members))

    def _listen(self) -> bool:
        """Process messages of members, and send signs of life if they are due; return whether there is news."""
        heard, news = {*self._poller.heard()}, False
        beat_due = time.monotonic() > self._beat_seconds + channel.BEAT_SECONDS
        for member in (*self.here, *self.waiting) if heard or beat_due else ():
            if beat_due or member.link in heard:  # with each beat all are looked at: who is silent says nothing
                news = self._hear(member, member.link.receive()) or news
                member.lost = member.link.ended
                news = news or bool(member.lost)
            if beat_due:
                member.link.send(channel.Alive(time.time()))  # a time for each: a send may wait
        if beat_due:
            self._beat_seconds = now = time.monotonic()
            silent = max((now - member.link.heard_seconds for member in self.here), default=0.0)
            if silent > SILENT_SECONDS:  # TCP tries again after pauses that double: up to as long as it was cut off
                self.settled_seconds = now + silent + channel.BEAT_SECONDS
        return news

    def _welcome(self, link: channel.Link, messages: Sequence[channel.Message]) -> None:
        hello = messages[0]
        if isinstance(hello, channel.ToStore):
            if self.gate is None:
                return link.end("there is no store")
            link.send(channel.Alive())
            return self.gate.adopt(link.detach())
        if not isinstance(hello, channel.Hello):
            return link.end("it did not say who it is")
        if self.place_for is not None:
            return self._welcome_late(self.place_for, RemoteNode(hello, link), messages[1:])
        who = f"node {hello.node} ({hello.facts.host}, pid {hello.facts.pid})"
        if not 0 < hello.node < self._plan.nodes or hello.nodes != self._plan.nodes:
            self.wrong.append(f"{who} came as one of {hello.nodes} nodes, this run has {self._plan.nodes}")
        elif hello.node in self.members:
            there = self.members[hello.node].hello.facts
            self.wrong.append(f"{who} came, but that number has {there.host}, pid {there.pid}, already")
        else:
            member = self.members[hello.node] = RemoteNode(hello, link)
            link.send(channel.Alive(time.time()))  # also of a run that is over at once the clocks shall be known
            self._hear(member, messages[1:])
            return None
        link.send(channel.RunOver(2))
        return link.end("not taken")

    def _welcome_late(
        self, place_for: Callable[[RemoteNode], object], one: RemoteNode, messages: Sequence[channel.Message]
    ) -> None:
        """Let a host that joins a running run wait, or refuse it; the run continues."""
        facts = one.hello.facts
        one.joined = one.hello.node < 0
        try:
            place_for(one)
        except PacelineError as error:
            say(f"{facts.host} (pid {facts.pid}) is not let in: {error.shown}")
            return self.part_with(one, error.exit_code, f"{facts.host} is not let in: {error.shown}")
        self.waiting.append(one)
        one.link.send(channel.Alive(time.time()))
        self._hear(one, messages)
        return None

    def part_with(self, one: RemoteNode, code: int, words: str = "") -> None:
        """Order a node to print `words` and to end with this code; the run continues."""
        one.link.send(channel.RunOver(code, words))
        self._parted.append(one.link)  # closed at once, the order might be lost before it is read
        while len(self._parted) > MAX_PARTED:
            self._parted.pop(0).end("it has had its time")

    def _hear(self, member: RemoteNode, messages: Sequence[channel.Message]) -> bool:
        news = False
        for message in messages:
            if not isinstance(message, channel.Ordered):
                news = member.hear(message) or news
                continue
            news = True
            if member.joined or member in self.waiting or (message.signal == 0 and self._plan.elastic):
                # whose launcher is gone is for the head's own to say: one session to one host may break
                member.leaves = "it was told to" if message.signal else "its launcher's session has ended"
            else:
                self._told.setdefault(member.hello.node, []).append(message.signal)
        return news

    def send(self, message: channel.Message) -> None:
        """Send a message to all nodes that take part."""
        for member in self.here:
            member.link.send(message)

    def stopped(self) -> bool:
        """Whether no worker runs any more on the nodes that are not lost."""
        return all(member.beat.stopped for member in self.here)

    def end(self, code: int) -> None:
        """Order all nodes to end, and wait for it for some seconds: they must end before the head."""
        for member in (*self.here, *self.waiting):
            member.link.send(channel.RunOver(code))
        deadline = time.monotonic() + FAREWELL_SECONDS
        while (links := [one.link for one in self.here if not one.link.ended]) and time.monotonic() < deadline:
            self._poller.attend(links)
            select.select([self._poller], [], [], max(0.0, deadline - time.monotonic()))
            for link in self._poller.heard():
                link.receive()
        for link in (*(member.link for member in (*self.members.values(), *self.waiting)), *self._parted):
            link.end("the run is over")
        self._poller.close()
        if self._listener is not None:
            self._listener.close()


# ---- one start of the workers on all nodes ----

START_SECONDS = 30.0  # for other nodes to start their processes
START_LOOK_SECONDS = 1.0
TRAVEL_SECONDS = 3.0  # for the answers of other nodes, beyond the time that they need
REACTION_SECONDS = 5.0  # a freed rank that has not moved by then is stuck elsewhere
FREED_LOOK_SECONDS = 0.1
SWEEP_MARGIN_SECONDS = 5.0  # for other nodes to kill what has not ended, and to say so
SHOW_CURSOR = b"\x1b[?25h"


class Generation:
    """All workers of one start. Use it in a `with`: after it no process of the generation runs any more.

    `plan` is the head's, with the ranks of this generation. `own` are the started workers of the head's node. The other
    nodes of `cluster` have been ordered to start theirs.
    """

    def __init__(self, plan: NodePlan, own: Workers, cluster: Cluster, proof: str = "") -> None:
        self.plan, self.own, self.cluster, self.proof = plan, own, cluster, proof
        self.regroups = False  # its ranks are asked to save and end, for other hosts are to take part
        self.members: Sequence[RemoteNode] = cluster.here  # later perhaps lost
        self._question = 0

    @classmethod
    def start(cls, plan: NodePlan, number: int, cluster: Cluster, inherited: Inherited) -> Self:
        """Start it on all nodes that are here. `plan` is the head's, with the ranks on its node.

        Raises:
            UsageError, OSError: when this node's workers cannot be started; then none are.
        """
        members = cluster.here
        total = plan.nproc + sum(member.hello.nproc for member in members)
        ranks = replace(plan.ranks, world_size=total, groups=1 + len(members))
        plan = replace(plan, ranks=ranks)
        proof = _proof(plan)
        own = Workers.start(plan, number, inherited)
        cluster.gate = own.gate
        first = plan.nproc
        for group_rank, member in enumerate(members, 1):
            theirs = replace(ranks, first=first, group_rank=group_rank, master_port=own.port)
            member.start(channel.StartOrder(number, theirs, plan.attempt_dir, proof))
            first += member.hello.nproc
        return cls(plan, own, cluster, proof)

    def wait_started(self) -> bool:
        """Wait until all other nodes have started their workers; False when an order comes first."""
        deadline = time.monotonic() + START_SECONDS
        while waiting := [member for member in self.cluster.here if member.started is None]:
            if time.monotonic() > deadline:
                raise UsageError(code="node-starts-slowly", node=waiting[0].name, seconds=START_SECONDS)
            self.cluster.wait(START_LOOK_SECONDS)
            if self.cluster.ordered:
                return False
        refused = [m.started.refusal for m in self.cluster.here if m.started is not None and m.started.refusal]
        if refused:
            raise UsageError(code="node-not-started", reasons="\n".join(refused))
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if not self.own.swept:
            self.stop(0.0)
        self.own.close()

    # ---- what is known ----

    def samples(self) -> list[Sample]:
        """The state of all workers now, including those of a lost node."""
        found = self.own.samples()
        for member in self.members:
            found += member.samples()
        return found

    @property
    def interrupted(self) -> bool:
        """Whether an order to stop or a failure is more urgent than a question."""
        return self.cluster.ordered or due_seconds(self.samples()) is not None

    def running(self) -> list[Sample]:
        """The state of the workers that have not ended."""
        return [one for one in self.samples() if one.runs]

    def oom_kills(self) -> int:
        """The number of processes that the kernels have killed for memory."""
        return self.own.oom_kills() + sum(member.beat.oom_kills for member in self.cluster.here)

    def left(self) -> list[int]:
        """The pids that not even SIGKILL has ended."""
        return [*self.own.left, *(pid for member in self.cluster.here for pid in member.beat.left)]

    def ask(self, patience_seconds: float, *, to_its_end: bool = False) -> list[Evidence]:
        """Details of what each rank does, by rank; a worker may take `patience_seconds` to answer.

        An order or a failure ends the question, unless `to_its_end`.
        """
        self._question += 1
        collection = self.own.collect(self._question, patience_seconds)
        for member in self.cluster.here:
            member.ask(channel.Ask(self._question, patience_seconds))
        deadline = time.monotonic() + patience_seconds + NATIVE_SECONDS + TRAVEL_SECONDS
        while not collection.advance() or any(m.shown is None for m in self.cluster.here):
            self.cluster.wait(ADVANCE_SECONDS / 2)
            if time.monotonic() > deadline or (self.interrupted and not to_its_end):
                break
        found = {one.rank: one for one in collection.evidence(self.own.samples())}
        found |= {one.rank: one for member in self.cluster.here for one in member.shown or ()}
        return [_whole(one, found.get(one.rank)) for one in sorted(self.samples(), key=lambda one: one.rank)]

    def write_clocks(self) -> None:
        """Record how far the clocks of other nodes are ahead of this node's, if the bounds have become narrower."""
        if (machine := self.own.machine) is None:
            return
        for member in self.cluster.here:
            if (record := member.clock.due(member.hello.node, time.monotonic())) is not None:
                machine.write(record)

    # ---- its end ----

    def regroup(self) -> None:
        """Have all ranks save and end after their next step, so that the next generation can have other hosts."""
        if not self.regroups:
            self.regroups = True
            self.own.ask_to_regroup()

    def unblock(self, ranks: Sequence[int], word: str) -> None:
        """Raise an exception in the collective in which each of these ranks waits, and give the ranks time to save.

        Returns when they have ended, have shown that they never will, or have had the whole grace.
        """
        self.own.release(ranks, word.encode())
        self.cluster.send(channel.Release(tuple(ranks), word))
        began = time.monotonic()
        while (waited_seconds := time.monotonic() - began) < self.plan.stop_grace_seconds and not self.cluster.ordered:
            running = [one for one in self.running() if one.rank in ranks]
            moves = any(one.still_seconds < waited_seconds for one in running)
            if not running or (waited_seconds > REACTION_SECONDS and not moves):
                return
            self.cluster.wait(FREED_LOOK_SECONDS)

    def stop(self, grace_seconds: float, number: int = signal.SIGTERM, *, signals_heard: int = 0) -> None:
        """End all workers and all they have started, on all nodes.

        They are sent signal `number`, and have `grace_seconds` to end. They have less once one of them has ended badly,
        since the ranks can no longer save together (in a script they may), or once the launcher is gone. A stop signal
        beyond the first `signals_heard` ends the grace. After a different signal, a script is sent SIGTERM as well.
        """
        last_seconds = self.plan.term_grace_seconds if number != signal.SIGTERM else 0.0
        self._await_end(grace_seconds, last_seconds, number, signals_heard)
        if last_seconds:
            self._await_end(last_seconds, 0.0, signal.SIGTERM, len(self.cluster.signals))
        self.cluster.send(channel.Stop(0.0))
        self.own.sweep()
        deadline = time.monotonic() + SWEEP_MARGIN_SECONDS
        while not self.cluster.stopped() and time.monotonic() < deadline:
            self.cluster.wait(deadline - time.monotonic())
        if os.isatty(2):  # a progress bar that was killed had no chance to show the cursor again
            with suppress(OSError):
                os.write(2, SHOW_CURSOR)

    def _await_end(self, grace_seconds: float, more_seconds: float, number: int, signals_heard: int) -> None:
        """Ask all to stop, and wait for it; they are not killed for `more_seconds` after that."""
        self._ask_to_stop(grace_seconds + more_seconds, number)
        deadline, gone = time.monotonic() + grace_seconds, self.cluster.launcher_gone
        while (self.own.seconds_left or not self.cluster.stopped()) and len(self.cluster.signals) <= signals_heard:
            now = time.monotonic()
            if now >= deadline:
                break
            if not self.own.patient and any(one.ended_badly for one in self.samples()):
                deadline = min(deadline, now + self.plan.grace_seconds)
                self._ask_to_stop(deadline - now, number)
            if self.cluster.launcher_gone and not gone:
                gone, deadline = True, min(deadline, now + LIFELINE_GRACE_SECONDS)
                self._ask_to_stop(deadline - now, signal.SIGTERM)
            self.cluster.wait(min(deadline - now, self.own.seconds_left or channel.BEAT_SECONDS))

    def _ask_to_stop(self, grace_seconds: float, number: int) -> None:
        self.cluster.send(channel.Stop(grace_seconds, number))
        self.own.stop(grace_seconds, number)


def _proof(plan: NodePlan) -> str:
    """The content of a file in the attempt's folder, by which the other nodes see that they share the folder."""
    if plan.nodes == 1 or not plan.run_dir or plan.plain_store:
        return ""
    proof = secrets.token_hex(8)
    writing.replace(Path(plan.attempt_dir) / channel.PROOF, proof.encode(), sync=True)
    return proof


def _whole(sample: Sample, found: Evidence | None) -> Evidence:
    """The evidence on a rank, completed from its sample; or the sample alone."""
    if found is None:
        return Evidence.of(sample)
    return replace(found, failure=sample.failure or found.failure, words=sample.words or found.words)
