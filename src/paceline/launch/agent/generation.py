"""One generation on all nodes, as the head has it: started, observed, asked, freed, stopped."""

import os
import secrets
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self

from msgspec.structs import replace

from paceline.contract.evidence import Evidence, Sample
from paceline.contract.job import NodePlan
from paceline.contract.orders import LIFELINE_GRACE_SECONDS
from paceline.disk import writing
from paceline.errors import UsageError
from paceline.guard.collect import ADVANCE_SECONDS, NATIVE_SECONDS
from paceline.guard.deaths import due_seconds
from paceline.launch.agent.channel import BEAT_SECONDS, PROOF, Ask, Release, StartOrder, Stop
from paceline.launch.agent.cluster import Cluster, RemoteNode
from paceline.launch.agent.workers import Inherited, Workers

START_SECONDS = 30.0  # for other nodes to start their processes
START_LOOK_SECONDS = 1.0
TRAVEL_SECONDS = 3.0  # for the answers of other nodes, beyond the time that they need
REACTION_SECONDS = 5.0  # a freed rank that has not moved by then is stuck elsewhere
FREED_LOOK_SECONDS = 0.1
SWEEP_MARGIN_SECONDS = 5.0  # for other nodes to kill what has not ended, and to say so
SHOW_CURSOR = b"\x1b[?25h"


class Generation:
    """All workers of one start. Use it in a `with`: after it nothing of the generation runs any more.

    `plan` is the head's, with the ranks of this generation; `own` the workers of its node, started; the other nodes of
    `cluster` that are here have been asked to start theirs.
    """

    def __init__(self, plan: NodePlan, own: Workers, cluster: Cluster, proof: str = "") -> None:
        self.plan, self.own, self.cluster, self.proof = plan, own, cluster, proof
        self.regroups = False  # its ranks are asked to save and end, for other hosts are to take part
        self.members: Sequence[RemoteNode] = cluster.here  # later perhaps lost
        self._question = 0

    @classmethod
    def start(cls, plan: NodePlan, number: int, cluster: Cluster, inherited: Inherited) -> Self:
        """Start it on all nodes that are here. `plan` is the head's, with the ranks on its own node.

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
            member.start(StartOrder(number, theirs, plan.attempt_dir, proof))
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
        """How all workers get on now, those of a lost node included."""
        found = self.own.samples()
        for member in self.members:
            found += member.samples()
        return found

    @property
    def interrupted(self) -> bool:
        """Whether there is something more urgent than a question: an order to stop, a failure."""
        return self.cluster.ordered or due_seconds(self.samples()) is not None

    def running(self) -> list[Sample]:
        """How those get on that have not ended."""
        return [one for one in self.samples() if one.runs]

    def oom_kills(self) -> int:
        """How many processes the kernels have killed for memory."""
        return self.own.oom_kills() + sum(member.beat.oom_kills for member in self.cluster.here)

    def left(self) -> list[int]:
        """The pids that not even SIGKILL has ended."""
        return [*self.own.left, *(pid for member in self.cluster.here for pid in member.beat.left)]

    def ask(self, patience_seconds: float, *, to_its_end: bool = False) -> list[Evidence]:
        """What exactly each rank does, by rank; a worker may take `patience_seconds` to answer.

        Anything urgent ends the question, unless it is asked `to_its_end`.
        """
        self._question += 1
        collection = self.own.collect(self._question, patience_seconds)
        for member in self.cluster.here:
            member.ask(Ask(self._question, patience_seconds))
        deadline = time.monotonic() + patience_seconds + NATIVE_SECONDS + TRAVEL_SECONDS
        while not collection.advance() or any(m.shown is None for m in self.cluster.here):
            self.cluster.wait(ADVANCE_SECONDS / 2)
            if time.monotonic() > deadline or (self.interrupted and not to_its_end):
                break
        found = {one.rank: one for one in collection.evidence(self.own.samples())}
        found |= {one.rank: one for member in self.cluster.here for one in member.shown or ()}
        return [_whole(one, found.get(one.rank)) for one in sorted(self.samples(), key=lambda one: one.rank)]

    def write_clocks(self) -> None:
        """Write down by how much other nodes' clocks are ahead of this one's, where that has become better known."""
        if (machine := self.own.machine) is None:
            return
        for member in self.cluster.here:
            if (record := member.clock.due(member.hello.node, time.monotonic())) is not None:
                machine.write(record)

    # ---- its end ----

    def regroup(self) -> None:
        """Have all ranks save and end after their next step, for the next generation to have other hosts."""
        if not self.regroups:
            self.regroups = True
            self.own.ask_to_regroup()

    def free(self, ranks: Sequence[int], word: str) -> None:
        """Give each of these ranks, which only wait, an exception out of its collective, and time to save what it has.

        Returns when they have ended, have shown that they never will, or have had the whole grace.
        """
        self.own.release(ranks, word.encode())
        self.cluster.send(Release(tuple(ranks), word))
        began = time.monotonic()
        while (waited_seconds := time.monotonic() - began) < self.plan.stop_grace_seconds and not self.cluster.ordered:
            running = [one for one in self.running() if one.rank in ranks]
            moves = any(one.still_seconds < waited_seconds for one in running)
            if not running or (waited_seconds > REACTION_SECONDS and not moves):
                return
            self.cluster.wait(FREED_LOOK_SECONDS)

    def stop(self, grace_seconds: float, number: int = signal.SIGTERM, *, signals_heard: int = 0) -> None:
        """End all workers and all they have started, on all nodes.

        They are asked by signal `number`, and given `grace_seconds`; less once one of them has ended badly, for then
        there is nothing left to save together (in a script there may be), or the launcher is gone. A stop signal beyond
        the first `signals_heard` ends the grace. A script that was sent another signal hears SIGTERM after it.
        """
        last_seconds = self.plan.term_grace_seconds if number != signal.SIGTERM else 0.0
        self._await_end(grace_seconds, last_seconds, number, signals_heard)
        if last_seconds:
            self._await_end(last_seconds, 0.0, signal.SIGTERM, len(self.cluster.signals))
        self.cluster.send(Stop(0.0))
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
            self.cluster.wait(min(deadline - now, self.own.seconds_left or BEAT_SECONDS))

    def _ask_to_stop(self, grace_seconds: float, number: int) -> None:
        self.cluster.send(Stop(grace_seconds, number))
        self.own.stop(grace_seconds, number)


def _proof(plan: NodePlan) -> str:
    """What all nodes must find in the attempt's folder, if they are to work in one and the same."""
    if plan.nodes == 1 or not plan.run_dir or plan.plain_store:
        return ""
    proof = secrets.token_hex(8)
    writing.replace(Path(plan.attempt_dir) / PROOF, proof.encode(), sync=True)
    return proof


def _whole(sample: Sample, found: Evidence | None) -> Evidence:
    """What was found of a rank, with what its sample says at greater length; or the sample alone."""
    if found is None:
        return Evidence.of(sample)
    return replace(found, failure=sample.failure or found.failure, words=sample.words or found.words)
