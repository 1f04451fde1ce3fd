"""Hosts that come while a run is on its way, lost ones and new ones: looked at first, let in between two steps.

    node -> head   Hello: as the node that was lost; or as any (-1), by `paceline join`
    head -> node   RunOver, with the reason, where it may not come in; else Enter, and to all Reach
    node -> head   StartReply: it sees the run's folder, or why not; Reached, as from all
    then           the head has the ranks save and end after their next step, and starts the next generation with it

Whatever is wrong with such a host is said, to it and here; the run goes on as it was.
"""

import time
from contextlib import suppress
from functools import cached_property
from pathlib import Path

import msgspec
from msgspec.structs import replace

from paceline.agent.channel import Enter, Reach
from paceline.agent.cluster import Crew, RemoteNode
from paceline.agent.gather import refuse_differences, try_to_reach
from paceline.contract.node_plan import NodePlan
from paceline.disk import writing
from paceline.errors import ExitCode, TrainingError, UsageError
from paceline.host.facts import Facts
from paceline.host.facts import gather as gather_facts
from paceline.observe.folder import INVITATION
from paceline.observe.nodes import NodeNow, NodesNow, State, write_nodes
from paceline.observe.terminal import say

CHECK_SECONDS = 30.0  # for a newcomer and all others to reach each other: longer than a lost host is not known as lost
AGAIN_SECONDS = 2.0  # between two tries
FIND_SECONDS = 20.0  # that a host looks for a head that is said to run


class Newcomers:
    """The head's side; `plan` is the head's."""

    def __init__(self, plan: NodePlan, crew: Crew) -> None:
        self._plan, self._crew = plan, crew
        self._workers: dict[int, int] = {}  # that a place is for
        self._tried: RemoteNode | None = None  # the one whose connections are being tried
        self._apart: list[str] | None = None  # who cannot reach whom; None: it is not known yet
        self._deadline_seconds = self._sent_seconds = 0.0
        self._gone: dict[tuple[int, str], NodeNow] = {}  # who is not there any more, and why
        self._written: NodesNow | None = None
        self._ready: list[RemoteNode] = []

    @cached_property
    def _facts(self) -> Facts:
        return gather_facts()

    @property
    def wanted(self) -> bool:
        """Whether some are ready to come in, or want to go: between two steps they may."""
        return bool(self._ready) or any(member.leaves for member in self._crew.here)

    @property
    def count(self) -> int:
        """How many are ready to come in."""
        return len(self._ready)

    # ---- at the door ----

    def _place_for(self, one: RemoteNode) -> None:
        """Give it a number.

        Raises:
            UsageError: it may not come in.
            TrainingError: not now.
        """
        plan, crew, hello = self._plan, self._crew, one.hello
        if not plan.elastic:
            raise UsageError(f"this run takes no hosts: it was started with --nodes {plan.nodes}, not with MIN:MAX")
        if hello.nodes != plan.nodes or not (0 < hello.node < plan.nodes or hello.node == -1):
            raise UsageError(f"it came as node {hello.node} of {hello.nodes}, this run has {plan.nodes}")
        there = {there.hello.node: there for there in (*crew.here, *crew.waiting) if not there.leaves}
        if (rival := there.get(hello.node)) is not None:
            facts, silent = rival.hello.facts, time.monotonic() - rival.link.heard_seconds
            words = f"by {facts.host}, pid {facts.pid}, last heard from {silent:.0f} s ago"
            raise TrainingError(
                f"Node {hello.node} is already taken ({words}). Use `paceline join` to get a free slot."
            )
        free = [node for node in range(1, plan.nodes) if node not in there and hello.node in (-1, node)]
        if not free:
            names = ", ".join([self._facts.host, *(there[node].hello.facts.host for node in sorted(there))])
            raise UsageError(f"this run takes no more hosts: --nodes {plan.min_nodes}:{plan.nodes}, and it has {names}")
        places = {node: self._workers.get(node, plan.nproc) for node in free}
        node = next((node for node in free if hello.nproc <= places[node]), -1)
        if node < 0:
            most = max(places.values())
            raise UsageError(f"it came with {hello.nproc} workers, and its place is for {most}: --nproc {most}")
        one.hello = replace(hello, node=node)
        refuse_differences(plan, self._facts, [one])

    def look(self, attempt_dir: str, proof: str) -> None:
        """Go on with looking at whoever waits; `proof` is what it must find in the attempt's folder."""
        crew = self._crew
        for one in [one for one in crew.waiting if one.lost or one.leaves]:
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
        crew = self._crew
        one = next((one for one in crew.waiting if one not in self._ready), None)
        if one is None:
            return
        self._tried, self._deadline_seconds = one, time.monotonic() + CHECK_SECONDS
        one.link.send(Enter(one.hello.node, attempt_dir, proof))
        self._try_connections(one)

    def _try_connections(self, one: RemoteNode) -> None:
        crew, self._apart, self._sent_seconds = self._crew, None, time.monotonic()
        others = tuple(member.address for member in crew.here)
        for member, peers in ((one, others), *((member, (one.address,)) for member in crew.here)):
            member.reached = None
            member.link.send(Reach(peers))

    def _why_not(self, one: RemoteNode) -> str:
        """Why it may not come in, by what is known until now."""
        if one.started is not None and one.started.refusal:
            return one.started.refusal
        tried = [member for member in (one, *self._crew.here) if member.reached is not None]
        if self._apart is None and one.started is not None and len(tried) == 1 + len(self._crew.here):
            told = [words for member in tried if member.reached is not None for words in member.reached.unreachable]
            self._apart = told + try_to_reach(self._facts.host, [one.address])
        late = time.monotonic() > self._deadline_seconds
        if late and self._apart is None:
            return f"its connections could not be tried within {CHECK_SECONDS:g} s"
        return "; ".join(self._apart or ()) if late else ""

    def _turn_away(self, one: RemoteNode, why: str, state: State) -> None:
        words = f"{one.name} is not let in: {why}" if why else ""
        self._crew.part_with(one, ExitCode.USAGE if why else ExitCode.DONE, words)
        self._crew.waiting = [other for other in self._crew.waiting if other is not one]
        self._ready = [other for other in self._ready if other is not one]
        self._tried = None if self._tried is one else self._tried
        self._note(one, state, why or one.lost or one.leaves)

    # ---- between two generations ----

    def admit(self) -> list[RemoteNode]:
        """Let those go that want to, and those in that are ready: these. Nothing of the last generation runs now."""
        crew = self._crew
        for member in [member for member in crew.here if member.leaves]:
            crew.part_with(member, ExitCode.DONE)
            member.lost = f"it has left: {member.leaves}"
            self._note(member, "left", member.leaves)
        entered = [one for one in self._ready if not one.link.ended]
        for one in entered:
            crew.members[one.hello.node] = one
            self._gone.pop((one.hello.node, one.hello.facts.host), None)
        self._ready.clear()
        crew.waiting = [one for one in crew.waiting if one not in entered]
        return entered

    def dismiss(self, member: RemoteNode, why: str) -> None:
        """End the part of one that came in, and with which no step was taken."""
        words = f"{member.name} is not kept: the first step with it failed: {why}"
        say(words)
        self._crew.part_with(member, ExitCode.USAGE, words)
        member.lost = f"not kept: {why}"
        self._note(member, "refused", why)

    # ---- for people, and for `paceline join` ----

    def _note(self, one: RemoteNode, state: State, words: str) -> None:
        found = NodeNow(one.hello.node, one.hello.facts.host, state, words)
        self._gone[found.node, found.host] = found

    def _write(self, attempt_dir: Path) -> None:
        crew, plan = self._crew, self._plan
        if not plan.elastic:
            return
        for node, member in crew.members.items():
            if member.lost and (node, member.hello.facts.host) not in self._gone:
                self._note(member, "lost", member.lost)
        told = [NodeNow(0, self._facts.host, "in")]
        told += [NodeNow(one.hello.node, one.hello.facts.host, "in") for one in crew.here]
        told += [NodeNow(one.hello.node, one.hello.facts.host, "waits") for one in crew.waiting]
        now = NodesNow(plan.min_nodes, plan.nodes, (*told, *self._gone.values()))
        if now != self._written:
            self._written = now
            write_nodes(attempt_dir, now)

    def invite(self, plan: NodePlan) -> None:
        """The first nodes are here, and `plan` is complete: whoever comes now comes late.

        Of a run that takes hosts write down what `paceline join` needs, the secret included: private, and only while
        it does.
        """
        crew = self._crew
        self._workers = {node: member.hello.nproc for node, member in crew.members.items()}
        crew.place_for = self._place_for
        if not plan.elastic or crew.ordered:
            return
        addresses = [*(one.address for one in self._facts.addresses), self._facts.host]
        own = replace(
            plan, node=-1, attempt_dir="", keep_open=(), detached=False, silence_seconds=0.0,
            head=tuple(dict.fromkeys((*plan.head, *addresses))), head_ports=(self._crew.port,),
            join_seconds=min(plan.join_seconds, FIND_SECONDS),
        )  # fmt: skip
        with suppress(OSError):  # a full disk does not keep the run from going on
            writing.replace(Path(plan.attempt_dir) / INVITATION, msgspec.json.encode(own))

    def withdraw(self, attempt_dir: str) -> None:
        """The run is over: there is nothing to join any more."""
        with suppress(OSError):
            writing.remove(Path(attempt_dir) / INVITATION)
