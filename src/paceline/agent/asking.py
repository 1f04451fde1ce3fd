"""The head asks all nodes: what exactly does each rank do, and which node cannot reach which?"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Sequence

from paceline.agent.crew import Crew
from paceline.agent.gather import try_to_reach
from paceline.agent.messages import Peer
from paceline.agent.node import Node
from paceline.contract.evidence import Evidence
from paceline.guard.collect import ADVANCE_SECONDS, NATIVE_SECONDS, Collection
from paceline.guard.deaths import Observation

TRAVEL_SECONDS = 3.0  # for the answers of other nodes, beyond the time that they need
REACH_SECONDS = 6.0


class Asking:
    """Of one generation. While it waits, the crew does its work, and anything urgent ends the question.

    Args:
        node: the head's own.
        crew: the others.
        wait: waits so many seconds, or less when something happens.
        interrupted: whether there is something more urgent than a question.
    """

    def __init__(self, node: Node, crew: Crew, wait: Callable[[float], None], interrupted: Callable[[], bool]) -> None:
        self._node, self._crew, self._wait, self._interrupted = node, crew, wait, interrupted
        self._question = 0

    def ask(
        self, observe: Callable[[], Sequence[Observation]], patience_seconds: float, *, to_its_end: bool = False
    ) -> list[Evidence]:
        """What is known of each rank of all nodes, by rank.

        Args:
            observe: what is known of all workers, now.
            patience_seconds: how long a worker may take to answer.
            to_its_end: whether nothing is more urgent.
        """
        self._question += 1
        collection = Collection(self._node.watched(), self._question, patience_seconds=patience_seconds)
        self._crew.ask(self._question, patience_seconds)
        deadline = time.monotonic() + patience_seconds + NATIVE_SECONDS + TRAVEL_SECONDS
        while (
            not collection.advance() or any(m.shown is None for m in self._crew.here)
        ) and time.monotonic() < deadline:
            self._wait(ADVANCE_SECONDS / 2)
            if time.monotonic() > deadline or (self._interrupted() and not to_its_end):
                break
        found = {one.rank: one for one in collection.evidence(self._node.watched())}
        found |= {one.rank: one for member in self._crew.here for one in member.shown or ()}
        return [found.get(o.rank) or _from_afar(o) for o in sorted(observe(), key=lambda o: o.rank)]

    def unreachable(self) -> list[str]:
        """Which nodes cannot reach which others, and why; tried now, on ports chosen freely."""
        members = self._crew.here
        if not members:
            return []
        host = os.uname().nodename
        peers = [Peer(m.hello.node, m.hello.facts.host, m.link.peer_address, m.hello.probe_port) for m in members]
        with socket.create_server(("", 0)) as probe:
            own = Peer(0, host, members[0].link.own_address, probe.getsockname()[1])
            for member in members:
                member.reached = None
            self._crew.reach([own, *peers])
            apart = try_to_reach(host, peers)
            deadline = time.monotonic() + REACH_SECONDS
            while any(m.reached is None for m in self._crew.here) and time.monotonic() < deadline:
                self._wait(ADVANCE_SECONDS)
                if self._interrupted():
                    break
        return [*apart, *(words for m in members if m.reached is not None for words in m.reached.unreachable)]


def _from_afar(o: Observation) -> Evidence:
    """A rank of whom its agent has said nothing more."""
    record = f"{o.record.type}: {o.record.message}" if o.record is not None else o.log_tail
    return Evidence(o.rank, o.host, o.pid, code=o.code, lost=bool(o.lost), words=record[-8000:])
