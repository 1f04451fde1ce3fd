"""The other nodes as the head sees them: who has come, how their workers are, and who is no longer heard of.

The head waits in `Cluster.wait`, and nowhere else: until the time is over, or an order, another node or the end of a
child comes.
"""

import math
import select
import time
from collections.abc import Callable, Iterable, Sequence

from msgspec.structs import replace

from paceline.contract.evidence import Evidence, Sample
from paceline.contract.job import NodePlan
from paceline.contract.orders import STOP_SIGNALS, Orders
from paceline.errors import PacelineError
from paceline.host.procfs import allow_files
from paceline.launch.agent.channel import (
    BEAT_SECONDS,
    Alive,
    Ask,
    Beat,
    Hello,
    Link,
    Listener,
    Message,
    Ordered,
    PeerAddress,
    Reached,
    RunOver,
    Shown,
    StartOrder,
    StartReply,
    ToStore,
)
from paceline.launch.agent.store import StoreGate
from paceline.observe.machine import ClockAhead
from paceline.observe.terminal import say

DRIFT = 1e-4  # seconds a second by which two clocks may part: quartz is good for 5e-5
AGAIN_SECONDS = 60.0  # between two records that say nothing better


class ClockBounds:
    """By how much a node's clock is ahead of node 0's, from the times that the agents put on their signs of life.

    A message that is sent at s by one clock and comes at r by the other has taken r - s, plus or minus the clocks'
    difference. No message comes before it was sent. So each one to the head says that the node is ahead by at least
    s - r, and each one to the node that it is ahead by at most r - s: the quickest of both directions leave the
    narrowest bounds, and the middle of them is wrong by half their width at most, however unlike the two ways are.
    """

    def __init__(self) -> None:
        self.least_seconds, self.most_seconds = -math.inf, math.inf  # the node is ahead by this
        self._at_seconds = 0.0  # monotonic, when that held
        self._written_seconds, self._written_error_seconds = -math.inf, math.inf

    @property
    def error_seconds(self) -> float:
        """How wrong `ahead_seconds` may be; infinite as long as nothing has come of one direction."""
        return (self.most_seconds - self.least_seconds) / 2

    @property
    def ahead_seconds(self) -> float:
        """The most likely difference."""
        return self.least_seconds + self.error_seconds

    def see(self, now_seconds: float, *, least_seconds: float = -math.inf, most_seconds: float = math.inf) -> None:
        """Take in what a message shows that has come at `now_seconds` (monotonic)."""
        drift = DRIFT * max(0.0, now_seconds - self._at_seconds)  # what was known has become less certain
        least, most = max(self.least_seconds - drift, least_seconds), min(self.most_seconds + drift, most_seconds)
        if least > most:  # a clock has been set: nothing that was known holds any more
            least, most = least_seconds, most_seconds
            self._written_error_seconds = math.inf
        self.least_seconds, self.most_seconds, self._at_seconds = least, most, now_seconds

    def due(self, node: int, now_seconds: float) -> ClockAhead | None:
        """The record to write now: the first, one that is twice as good as the last, and else one a minute."""
        error = self.error_seconds
        late = now_seconds >= self._written_seconds + AGAIN_SECONDS
        if math.isinf(error) or not (error <= self._written_error_seconds / 2 or late):
            return None
        self._written_seconds, self._written_error_seconds = now_seconds, error
        return ClockAhead(round(time.time(), 3), node, round(self.ahead_seconds, 6), round(error, 6))


class RemoteNode:
    """One other node."""

    def __init__(self, hello: Hello, link: Link) -> None:
        self.hello, self.link = hello, link
        self.clock_ahead_seconds = hello.facts.wall_seconds - time.time()  # less the milliseconds of the way here
        self.clock = ClockBounds()  # the same, better known with every beat
        self.ranks: Sequence[int] = hello.ranks  # in this generation
        self.beat = Beat(-1)
        self._ends: tuple[object, ...] = ()  # what the last beat said of ends, of workers and of their generation
        self.asked = 0  # the number of the last question
        self.shown: list[Evidence] | None = None  # its answer, once it is whole
        self._arrived: list[Evidence] = []
        self._samples: dict[int, Sample] = {}  # by rank
        self._listed: tuple[object, str, Sequence[Sample]] | None = None  # the list, and what it was made from
        self.reached: Reached | None = None
        self.started: StartReply | None = None
        self.lost = ""  # why it no longer takes part; empty while it does
        self.leaves = ""  # why it wants to go; between two steps it may
        self.joined = False  # it has come by `paceline join`: what it is ordered to do is meant for it alone

    @property
    def name(self) -> str:
        """For people."""
        return f"node {self.hello.node} ({self.hello.facts.host})"

    @property
    def address(self) -> PeerAddress:
        """Where others can try to reach it."""
        return PeerAddress(self.hello.facts.host, self.link.peer_address, self.hello.probe_port)

    def start(self, start: StartOrder) -> None:
        """Have it start its part of a generation."""
        self.ranks = self.hello.ranks or range(start.ranks.first, start.ranks.first + self.hello.nproc)
        self.beat, self._samples, self.started = Beat(start.generation), {}, None
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

    def ask(self, question: Ask) -> None:
        """Have it find out what exactly its workers do."""
        self.asked, self.shown, self._arrived = question.question, None, []
        self.link.send(question)

    def hear(self, message: Message) -> bool:
        """Take in what it says; whether that is news, and not what it says again and again."""
        match message:
            case Beat():
                return self._hear_beat(message)
            case Shown():
                self._hear_answer(message)
                return False  # whoever has asked looks ten times a second
            case StartReply():
                self.started = message
            case Reached():
                self.reached = message
            case _:
                self.link.end("it sent what only a head sends")
        return True

    def _hear_beat(self, beat: Beat) -> bool:
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

    def _hear_answer(self, answer: Shown) -> None:
        if answer.question == self.asked and answer.evidence is None:
            self.shown = self._arrived
        elif answer.question == self.asked and answer.evidence and len(self._arrived) < self.hello.nproc:
            self._arrived.append(answer.evidence.turned(time.monotonic()))


FAREWELL_SECONDS = 3.0
FILES = 1024  # for all but the links
BATCH_SECONDS = 1e-4  # for each node: how long signs of life may wait to be taken in; a tenth of a second of a thousand
MAX_PARTED = 16
SILENT_SECONDS = 3 * BEAT_SECONDS


class Poller:
    """Which of many links have something to say: the kernel keeps the list, so a look costs the same for a thousand.

    It can be waited for itself: it is readable when one of them is.
    """

    def __init__(self) -> None:
        self._kernel = select.epoll()
        self._links: dict[int, Link] = {}  # by descriptor

    def fileno(self) -> int:
        """For select."""
        return self._kernel.fileno()

    def attend(self, links: Iterable[Link]) -> None:
        """Listen to these, and to no others."""
        now = {link.fileno(): link for link in links if not link.ended}
        for number in self._links.keys() - now.keys():
            if self._links.pop(number).fileno() >= 0:  # a closed one has left the list by itself
                self._kernel.unregister(number)
        for number, link in now.items():
            if self._links.get(number) is not link:  # also one that has got a closed one's number
                self._kernel.register(number, select.EPOLLIN)
                self._links[number] = link

    def heard(self) -> list[Link]:
        """Those that can be read now; never waits."""
        return [self._links[number] for number, _ in self._kernel.poll(0, max(1, len(self._links)))]

    def close(self) -> None:
        """Listen to nobody any more."""
        self._kernel.close()


class Cluster:
    """All nodes but the head's own, and all orders, whichever agent was given them."""

    def __init__(self, plan: NodePlan, orders: Orders) -> None:
        self.members: dict[int, RemoteNode] = {}
        self.gate: StoreGate | None = None  # to the store of the generation that runs
        self.waiting: list[RemoteNode] = []  # have come while the run is on its way, and are not members yet
        self.place_for: Callable[[RemoteNode], object] | None = None  # gives such a one its number; see `Newcomers`
        self.wrong: list[str] = []  # who had the secret, and could not be taken all the same
        self._plan, self._orders = plan, orders
        allow_files(FILES + plan.nodes)
        self._door = Listener(plan.head_ports, bytes.fromhex(plan.secret)) if plan.nodes > 1 else None
        self._told: dict[int, list[int]] = {}  # node -> orders it was given: signals, 0 for a launcher that is gone
        self._beat_seconds = 0.0
        self.settled_seconds = 0.0  # when connections have recovered from what has been silent and is heard again
        self._ears = Poller()
        self._parted: list[Link] = []  # to nodes that have been told to end

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
        until = time.monotonic() + min(seconds, BEAT_SECONDS)
        while True:
            self._ears.attend(one.link for one in (*self.here, *self.waiting))
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
        breath = time.monotonic() > self._beat_seconds + BEAT_SECONDS
        for member in (*self.here, *self.waiting) if heard or breath else ():
            if breath or member.link in heard:  # with each breath all are looked at: who is silent says nothing
                news = self._hear(member, member.link.receive()) or news
                member.lost = member.link.ended
                news = news or bool(member.lost)
            if breath:
                member.link.send(Alive(time.time()))  # a time for each: a send may wait
        if breath:
            self._beat_seconds = now = time.monotonic()
            silent = max((now - member.link.heard_seconds for member in self.here), default=0.0)
            if silent > SILENT_SECONDS:  # TCP tries again after pauses that double: up to as long as it was cut off
                self.settled_seconds = now + silent + BEAT_SECONDS
        return news

    def _welcome(self, link: Link, messages: Sequence[Message]) -> None:
        hello = messages[0]
        if isinstance(hello, ToStore):
            if self.gate is None:
                return link.end("there is no store")
            link.send(Alive())
            return self.gate.adopt(link.detach())
        if not isinstance(hello, Hello):
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
            link.send(Alive(time.time()))  # also of a run that is over at once the clocks shall be known
            self._hear(member, messages[1:])
            return None
        link.send(RunOver(2))
        return link.end("not taken")

    def _welcome_late(
        self, place_for: Callable[[RemoteNode], object], one: RemoteNode, messages: Sequence[Message]
    ) -> None:
        """Have one that comes while the run is on its way wait, or turn it away: the run goes on as it was."""
        facts = one.hello.facts
        one.joined = one.hello.node < 0
        try:
            place_for(one)
        except PacelineError as error:
            say(f"{facts.host} (pid {facts.pid}) is not let in: {error}")
            return self.part_with(one, error.exit_code, f"{facts.host} is not let in: {error}")
        self.waiting.append(one)
        one.link.send(Alive(time.time()))
        self._hear(one, messages)
        return None

    def part_with(self, one: RemoteNode, code: int, words: str = "") -> None:
        """Have a node end with this code, and these words; the run goes on."""
        one.link.send(RunOver(code, words))
        self._parted.append(one.link)  # closed at once, the order might be lost before it is read
        while len(self._parted) > MAX_PARTED:
            self._parted.pop(0).end("it has had its time")

    def _hear(self, member: RemoteNode, messages: Sequence[Message]) -> bool:
        news = False
        for message in messages:
            if not isinstance(message, Ordered):
                news = member.hear(message) or news
                continue
            news = True
            if member.joined or member in self.waiting or (message.signal == 0 and self._plan.elastic):
                # whose launcher is gone is for the head's own to say: one session to one host may break
                member.leaves = "it was told to" if message.signal else "its launcher's session has ended"
            else:
                self._told.setdefault(member.hello.node, []).append(message.signal)
        return news

    def send(self, message: Message) -> None:
        """Tell all that take part."""
        for member in self.here:
            member.link.send(message)

    def stopped(self) -> bool:
        """Whether nothing runs any more on any node that is not lost."""
        return all(member.beat.stopped for member in self.here)

    def end(self, code: int) -> None:
        """Tell all that the run is over, and wait a little until they are gone: they must be gone before us."""
        for member in (*self.here, *self.waiting):
            member.link.send(RunOver(code))
        deadline = time.monotonic() + FAREWELL_SECONDS
        while (links := [one.link for one in self.here if not one.link.ended]) and time.monotonic() < deadline:
            self._ears.attend(links)
            select.select([self._ears], [], [], max(0.0, deadline - time.monotonic()))
            for link in self._ears.heard():
                link.receive()
        for link in (*(member.link for member in (*self.members.values(), *self.waiting)), *self._parted):
            link.end("the run is over")
        self._ears.close()
        if self._door is not None:
            self._door.close()
