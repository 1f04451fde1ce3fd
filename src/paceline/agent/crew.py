"""The other nodes as the head sees them: who has come, how their workers are, and who is no longer heard of.

The head waits in here, and nowhere else: until the time is over, or an order, another node or the end of a child comes.
"""

import select
import time
from collections.abc import Sequence

from msgspec.structs import replace

from paceline.agent import messages as m
from paceline.agent.channel import Link
from paceline.agent.clocks import ClockBounds
from paceline.agent.door import Door
from paceline.agent.ears import Ears
from paceline.agent.gate import Gate
from paceline.contract.evidence import Evidence, Sample
from paceline.contract.node_plan import NodePlan
from paceline.contract.orders import STOP_SIGNALS, Orders
from paceline.host.procfs import allow_files

FAREWELL_SECONDS = 3.0
FILES = 1024  # for all but the links
BATCH_SECONDS = 2e-5  # for each node: how long signs of life may wait to be taken in


class RemoteNode:
    """One other node."""

    def __init__(self, hello: m.Hello, link: Link) -> None:
        self.hello, self.link = hello, link
        self.clock_ahead_seconds = hello.facts.wall_seconds - time.time()  # less the milliseconds of the way here
        self.clock = ClockBounds()  # the same, better known with every beat
        self.ranks: Sequence[int] = hello.ranks  # in this generation
        self.beat = m.Beat(-1)
        self._ends: tuple[object, ...] = ()  # what the last beat said of ends
        self.asked = 0  # the number of the last question
        self.shown: list[Evidence] | None = None  # its answer, once it is whole
        self._arrived: list[Evidence] = []
        self._samples: dict[int, Sample] = {}  # by rank
        self._listed: tuple[object, str, Sequence[Sample]] | None = None  # the list, and what it was made from
        self.reached: m.Reached | None = None
        self.started: m.StartReply | None = None
        self.lost = ""  # why it no longer takes part; empty while it does

    @property
    def name(self) -> str:
        """For people."""
        return f"node {self.hello.node} ({self.hello.facts.host})"

    def start(self, start: m.StartOrder) -> None:
        """Have it start its part of a generation."""
        self.ranks = self.hello.ranks or range(start.first_rank, start.first_rank + self.hello.nproc)
        self.beat, self._samples, self.started = m.Beat(start.generation), {}, None
        self.link.send(start)

    def samples(self) -> Sequence[Sample]:
        """What is known of its workers in this generation, also if it is lost."""
        if self._listed is None or self._listed[0] is not self._samples or self._listed[1] != self.lost:
            self._listed = self._samples, self.lost, [self._sample(rank) for rank in self.ranks]
        return self._listed[2]

    def _sample(self, rank: int) -> Sample:
        known = self._samples.get(rank) or Sample(rank, self.hello.facts.host, 0, self.hello.node)
        if not self.lost or known.code is not None:
            return known
        lost = f"{self.name} is lost: {self.lost}"
        return replace(known, lost=lost, ended_seconds=self.link.heard_seconds, failure=None, words="")

    def ask(self, question: m.Ask) -> None:
        """Have it find out what exactly its workers do."""
        self.asked, self.shown, self._arrived = question.question, None, []
        self.link.send(question)

    def hear(self, message: m.Message) -> bool:
        """Take in what it says; whether that is news, and not what it says again and again."""
        before = self._ends
        if isinstance(message, m.Beat):
            self._compare_clocks(message)
        match message:
            case m.Beat() if message.generation < self.beat.generation:
                pass  # it was on its way when the next generation was started
            case m.Beat():
                self.beat = message
                self._ends = _ends(message)
                if message.workers:
                    now = time.monotonic()
                    self._samples = {one.rank: one.turned(now) for one in message.workers}
            case m.Shown():
                self._hear_answer(message)
                return False  # whoever has asked looks ten times a second
            case m.StartReply():
                self.started = message
            case m.Reached():
                self.reached = message
            case _:
                self.link.end("it sent what only a head sends")
        return not isinstance(message, m.Beat) or self._ends != before

    def _compare_clocks(self, beat: m.Beat) -> None:
        now = time.monotonic()
        if beat.unix_time is not None:
            self.clock.see(now, least_seconds=beat.unix_time - time.time())
        if beat.alive_took_seconds is not None:
            self.clock.see(now, most_seconds=beat.alive_took_seconds)

    def _hear_answer(self, answer: m.Shown) -> None:
        if answer.question == self.asked and answer.evidence is None:
            self.shown = self._arrived
        elif answer.question == self.asked and answer.evidence and len(self._arrived) < self.hello.nproc:
            self._arrived.append(answer.evidence.turned(time.monotonic()))


def _ends(beat: m.Beat) -> tuple[object, ...]:
    """What somebody must look at when it changes: the ends of workers, and of their generation."""
    return beat.generation, beat.stopped, beat.left, *((one.code, one.failure is None) for one in beat.workers)


class Crew:
    """All nodes but the head's own, and all orders, whichever agent was given them."""

    def __init__(self, plan: NodePlan, orders: Orders) -> None:
        self.members: dict[int, RemoteNode] = {}
        self.gate: Gate | None = None  # to the store of the generation that runs
        self.wrong: list[str] = []  # who had the secret, and could not be taken all the same
        self._plan, self._orders = plan, orders
        allow_files(FILES + plan.nodes)
        self._door = Door(plan.head_ports, bytes.fromhex(plan.secret)) if plan.nodes > 1 else None
        self._told: dict[int, list[int]] = {}  # node -> orders it was given: signals, 0 for a launcher that is gone
        self._beat_seconds = 0.0
        self._ears = Ears()

    @property
    def port(self) -> int:
        """Where the other agents come; 0 for one node."""
        return self._door.port if self._door else 0

    @property
    def here(self) -> list[RemoteNode]:
        """Those that take part, by number."""
        return [member for _, member in sorted(self.members.items()) if not member.lost]

    @property
    def launcher_gone(self) -> bool:
        """Whether any agent has lost its launcher."""
        return self._orders.launcher_gone or any(0 in told for told in self._told.values())

    @property
    def signals(self) -> Sequence[int]:
        """The stop signals so far. An order to one agent is one to all; the same order reaches many, and is one."""
        others = ([n for n in told if n in STOP_SIGNALS] for told in self._told.values())
        return max([self._orders.signals, *others], key=len)

    @property
    def ordered(self) -> bool:
        """Whether there is any order: to stop, all of them."""
        return self.launcher_gone or bool(self.signals)

    def wait(self, seconds: float) -> None:
        """Return after `seconds`, or earlier when something happens; what other nodes have sent is taken in by then."""
        if self._door is None:
            self._orders.wait(seconds)
            return
        until = time.monotonic() + min(seconds, m.BEAT_SECONDS)
        while True:
            self._ears.attend(one.link for one in self.here)
            waited_for = [*self._door.sockets(), self._ears]
            news = self._orders.wait(until - time.monotonic(), waited_for)
            for link, messages in self._door.arrived():
                self._welcome(link, messages)
                news = True
            if self._listen() or news or time.monotonic() >= until:
                return
            # nothing but signs of life: of a thousand nodes one comes each millisecond, and many are taken in at once
            time.sleep(BATCH_SECONDS * len(self.members))

    def _listen(self) -> bool:
        """Take in what members have sent, and send signs of life where they are due; whether there is news."""
        heard, news = {*self._ears.heard()}, False
        breath = time.monotonic() > self._beat_seconds + m.BEAT_SECONDS
        for member in self.here if heard or breath else ():
            if breath or member.link in heard:  # with each breath all are looked at: who is silent says nothing
                news = self._hear(member, member.link.receive()) or news
                member.lost = member.link.ended
                news = news or bool(member.lost)
            if breath:
                member.link.send(m.Alive(time.time()))  # a time for each: a send may wait
        if breath:
            self._beat_seconds = time.monotonic()
        return news

    def _welcome(self, link: Link, messages: Sequence[m.Message]) -> None:
        hello = messages[0]
        if isinstance(hello, m.ToStore):
            if self.gate is None:
                return link.end("there is no store")
            link.send(m.Alive())
            return self.gate.adopt(link.detach())
        if not isinstance(hello, m.Hello):
            return link.end("it did not say who it is")
        who = f"node {hello.node} ({hello.facts.host}, pid {hello.facts.pid})"
        if not 0 < hello.node < self._plan.nodes or hello.nodes != self._plan.nodes:
            self.wrong.append(f"{who} came as one of {hello.nodes} nodes, this run has {self._plan.nodes}")
        elif hello.node in self.members:
            there = self.members[hello.node].hello.facts
            self.wrong.append(f"{who} came, but that number has {there.host}, pid {there.pid}, already")
        else:
            member = self.members[hello.node] = RemoteNode(hello, link)
            link.send(m.Alive(time.time()))  # also of a run that is over at once the clocks shall be known
            self._hear(member, messages[1:])
            return None
        link.send(m.RunOver(2))
        return link.end("not taken")

    def _hear(self, member: RemoteNode, messages: Sequence[m.Message]) -> bool:
        news = False
        for message in messages:
            if isinstance(message, m.Ordered):
                self._told.setdefault(member.hello.node, []).append(message.signal)
                news = True
            else:
                news = member.hear(message) or news
        return news

    def send(self, message: m.Message) -> None:
        """Tell all that take part."""
        for member in self.here:
            member.link.send(message)

    def stopped(self) -> bool:
        """Whether nothing runs any more on any node that is not lost."""
        return all(member.beat.stopped for member in self.here)

    def end(self, code: int) -> None:
        """Tell all that the run is over, and wait a little until they are gone: they must be gone before us."""
        self.send(m.RunOver(code))
        deadline = time.monotonic() + FAREWELL_SECONDS
        while (links := [one.link for one in self.here if not one.link.ended]) and time.monotonic() < deadline:
            self._ears.attend(links)
            select.select([self._ears], [], [], max(0.0, deadline - time.monotonic()))
            for link in self._ears.heard():
                link.receive()
        for member in self.members.values():
            member.link.end("the run is over")
        self._ears.close()
        if self._door is not None:
            self._door.close()
