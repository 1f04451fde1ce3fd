"""The other nodes as the head sees them: who has come, how their workers are, and who is no longer heard of."""

from __future__ import annotations

import select
import time
from collections.abc import Sequence
from contextlib import suppress

from paceline.agent.channel import Knock, Link
from paceline.agent.door import listen
from paceline.agent.messages import (
    Alive,
    Ask,
    End,
    Hello,
    Message,
    Peer,
    Pulses,
    Reach,
    Reached,
    Release,
    Report,
    Shown,
    Start,
    Started,
    Stop,
    Told,
)
from paceline.agent.messages import observed as arrived
from paceline.contract.evidence import Evidence
from paceline.contract.node_plan import NodePlan
from paceline.contract.orders import Readable
from paceline.guard.deaths import Observation
from paceline.guard.pulse import Pulse

BEAT_SECONDS = 2.0
SILENCE_SECONDS = 15.0  # then a node is lost: a few lost packets are not, TCP sends them again well within it
FAREWELL_SECONDS = 3.0
MAX_STRANGERS = 64  # who knock at the same time


class Member:
    """One other node."""

    def __init__(self, hello: Hello, link: Link) -> None:
        self.hello, self.link = hello, link
        self.clock_ahead_seconds = hello.facts.wall_seconds - time.time()  # less the milliseconds of the way here
        self.observations: list[Observation] = []
        self.report = Report(-1)
        self.pulses: tuple[Pulse, ...] = ()
        self.asked = 0  # the number of the last question
        self.shown: list[Evidence] | None = None  # its answer, once it is whole
        self._arrived: list[Evidence] = []
        self.reached: Reached | None = None
        self.started: Started | None = None
        self.lost = ""  # why it no longer takes part; empty while it does

    @property
    def name(self) -> str:
        """For people."""
        return f"node {self.hello.node} ({self.hello.facts.host})"

    def ask(self, question: Ask) -> None:
        """Have it find out what exactly its workers do."""
        self.asked, self.shown, self._arrived = question.question, None, []
        self.link.send(question)

    def hear(self, answer: Shown) -> None:
        """A part of its answer, or the end of it."""
        if answer.question == self.asked and answer.evidence is None:
            self.shown = self._arrived
        elif answer.question == self.asked and answer.evidence and len(self._arrived) < self.hello.nproc:
            self._arrived.append(answer.evidence)


class Crew:
    """All nodes but the head's own, behind one listening socket. Never waits; `serve` does what is to be done now."""

    def __init__(self, plan: NodePlan) -> None:
        self.members: dict[int, Member] = {}
        self.told: dict[int, list[int]] = {}  # node -> orders it was given: signals, 0 for a launcher that is gone
        self.wrong: list[str] = []  # who had the secret, and could not be taken all the same
        self._plan, self._secret = plan, bytes.fromhex(plan.secret)
        self._door = listen(plan.head_ports) if plan.nodes > 1 else None
        self._knocks: list[Knock] = []
        self._strangers: list[Link] = []  # have proved themselves, but not said who they are
        self._beat_seconds = 0.0

    @property
    def port(self) -> int:
        """Where the other agents come; 0 for one node."""
        return self._door.getsockname()[1] if self._door else 0

    @property
    def here(self) -> list[Member]:
        """Those that take part, by number."""
        return [member for _, member in sorted(self.members.items()) if not member.lost]

    def sockets(self) -> list[Readable]:
        """What to wait for."""
        door = [self._door] if self._door else []
        links = [m.link for m in self.here if not m.link.ended]
        return [*door, *self._knocks, *self._strangers, *links]

    def serve(self) -> None:
        """Let in who comes, hear everybody, give signs of life, and note who is lost."""
        if self._door is None:
            return
        self._let_in()
        for member in self.here:
            for message in member.link.receive():
                self._hear(member, message)
            silent = time.monotonic() - member.link.heard_seconds
            if member.link.ended:
                member.lost = member.link.ended
            elif silent > SILENCE_SECONDS:
                member.lost = f"it has not been heard of for {silent:.0f} s: powered off, or cut off from the network?"
                member.link.end(member.lost)
        if time.monotonic() > self._beat_seconds + BEAT_SECONDS:
            self._beat_seconds = time.monotonic()
            self._send(Alive())

    def _let_in(self) -> None:
        assert self._door is not None
        with suppress(BlockingIOError):
            while len(self._knocks) < MAX_STRANGERS:
                self._knocks.append(Knock(self._door.accept()[0], self._secret))
        for knock in list(self._knocks):
            link = None if knock.closed else knock.answer()
            if link is not None:
                self._strangers.append(link)
            if link is not None or knock.closed:
                self._knocks.remove(knock)
        for link in list(self._strangers):
            for message in link.receive()[:1]:
                self._strangers.remove(link)
                self._welcome(message, link)
            if link.ended and link in self._strangers:
                self._strangers.remove(link)

    def _welcome(self, message: Message, link: Link) -> None:
        if not isinstance(message, Hello):
            return link.end("it did not say who it is")
        who = f"node {message.node} ({message.facts.host}, pid {message.facts.pid})"
        if not 0 < message.node < self._plan.nodes or message.nodes != self._plan.nodes:
            self.wrong.append(f"{who} came as one of {message.nodes} nodes, this run has {self._plan.nodes}")
        elif message.node in self.members:
            there = self.members[message.node].hello.facts
            self.wrong.append(f"{who} came, but that number has {there.host}, pid {there.pid}, already")
        else:
            self.members[message.node] = Member(message, link)
            return None
        link.send(End(2))
        return link.end("not taken")

    def _hear(self, member: Member, message: Message) -> None:
        match message:
            case Report() if message.generation < member.report.generation:
                pass  # it was on its way when the next generation was started
            case Report():
                member.report = message
                if message.workers:
                    member.observations = arrived(message.workers, time.monotonic())
            case Pulses() if message.generation == member.report.generation:
                member.pulses = message.pulses
            case Pulses():
                pass
            case Shown():
                member.hear(message)
            case Started():
                member.started = message
            case Reached():
                member.reached = message
            case Told():
                self.told.setdefault(member.hello.node, []).append(message.signal)
            case _:
                member.link.end("it sent what only a head sends")

    def _send(self, message: Message) -> None:
        for member in self.here:
            member.link.send(message)

    def reach(self, peers: Sequence[Peer]) -> None:
        """Have every node try to connect to all others of `peers`."""
        for member in self.here:
            member.link.send(Reach(tuple(peer for peer in peers if peer.node != member.hello.node)))

    def ask(self, question: int, patience_seconds: float) -> None:
        """Have every node find out what exactly its workers do."""
        for member in self.here:
            member.ask(Ask(question, patience_seconds))

    def release(self, ranks: Sequence[int], word: str) -> None:
        """Have these ranks leave the collective in which they wait."""
        self._send(Release(tuple(ranks), word))

    def start(self, first: Start, first_rank: int) -> None:
        """Start a generation on all that are here, with ranks from `first_rank` on."""
        for member in self.here:
            member.observations, member.started, member.report = [], None, Report(first.generation)
            member.pulses = ()
            member.link.send(
                Start(
                    first.generation,
                    first_rank,
                    first.world_size,
                    first.master_port,
                    first.attempt_dir,
                    first.proof,
                )
            )
            first_rank += member.hello.nproc

    def observe(self, generation: int, ranks: dict[int, list[int]]) -> list[Observation]:
        """What is known of the workers of all other nodes of this generation, those of a lost node included.

        Args:
            generation: whose.
            ranks: each node's ranks.
        """
        found: list[Observation] = []
        for node, its_ranks in ranks.items():
            member = self.members[node]
            known = {o.rank: o for o in member.observations} if member.report.generation == generation else {}
            for rank in its_ranks:
                o = known.get(rank, Observation(rank, member.hello.facts.host, 0, None, float("inf")))
                if member.lost and o.code is None:
                    o = Observation(
                        rank,
                        o.host,
                        o.pid,
                        None,
                        member.link.heard_seconds,
                        lost=f"{member.name} is lost: {member.lost}",
                    )
                found.append(o)
        return found

    def stop(self, grace_seconds: float) -> None:
        """Have all workers asked to end within this time; said again, it can only become less."""
        self._send(Stop(grace_seconds))

    def stopped(self) -> bool:
        """Whether nothing runs any more on any node that is not lost."""
        return all(member.report.stopped for member in self.here)

    def end(self, code: int) -> None:
        """Tell all that the run is over, and wait a little until they are gone: they are to be gone before us."""
        self._send(End(code))
        deadline = time.monotonic() + FAREWELL_SECONDS
        while (links := [m.link for m in self.here if not m.link.ended]) and time.monotonic() < deadline:
            select.select(links, [], [], max(0.0, deadline - time.monotonic()))
            for link in links:
                link.receive()
        for member in self.members.values():
            member.link.end("the run is over")
        for stranger in (*self._strangers, *self._knocks):
            stranger.end("the run is over") if isinstance(stranger, Link) else stranger.refuse()
        if self._door is not None:
            self._door.close()
