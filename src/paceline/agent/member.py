"""One other node of a run, as the head sees it: who it is, how its workers are, whether it is still heard of."""

import time
from collections.abc import Sequence

from msgspec.structs import replace

from paceline.agent import messages as m
from paceline.agent.channel import Link
from paceline.agent.clocks import ClockBounds
from paceline.contract.evidence import Evidence, Sample


class RemoteNode:
    """One other node."""

    def __init__(self, hello: m.Hello, link: Link) -> None:
        self.hello, self.link = hello, link
        self.clock_ahead_seconds = hello.facts.wall_seconds - time.time()  # less the milliseconds of the way here
        self.clock = ClockBounds()  # the same, better known with every beat
        self.ranks: Sequence[int] = hello.ranks  # in this generation
        self.beat = m.Beat(-1)
        self._ends: tuple[object, ...] = ()  # what the last beat said of ends, of workers and of their generation
        self.asked = 0  # the number of the last question
        self.shown: list[Evidence] | None = None  # its answer, once it is whole
        self._arrived: list[Evidence] = []
        self._samples: dict[int, Sample] = {}  # by rank
        self._listed: tuple[object, str, Sequence[Sample]] | None = None  # the list, and what it was made from
        self.reached: m.Reached | None = None
        self.started: m.StartReply | None = None
        self.lost = ""  # why it no longer takes part; empty while it does
        self.leaves = ""  # why it wants to go; between two steps it may
        self.joined = False  # it has come by `paceline join`: what it is ordered to do is meant for it alone

    @property
    def name(self) -> str:
        """For people."""
        return f"node {self.hello.node} ({self.hello.facts.host})"

    @property
    def address(self) -> m.PeerAddress:
        """Where others can try to reach it."""
        return m.PeerAddress(self.hello.facts.host, self.link.peer_address, self.hello.probe_port)

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
        match message:
            case m.Beat():
                return self._hear_beat(message)
            case m.Shown():
                self._hear_answer(message)
                return False  # whoever has asked looks ten times a second
            case m.StartReply():
                self.started = message
            case m.Reached():
                self.reached = message
            case _:
                self.link.end("it sent what only a head sends")
        return True

    def _hear_beat(self, beat: m.Beat) -> bool:
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

    def _hear_answer(self, answer: m.Shown) -> None:
        if answer.question == self.asked and answer.evidence is None:
            self.shown = self._arrived
        elif answer.question == self.asked and answer.evidence and len(self._arrived) < self.hello.nproc:
            self._arrived.append(answer.evidence.turned(time.monotonic()))
