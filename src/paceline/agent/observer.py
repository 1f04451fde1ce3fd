"""`python -m paceline.agent.observer FD`: the guard of ranks that torchrun, srun or mpirun have started.

One on each node, started by local rank 0 (`worker/observed.py`) and nobody's child: it sees how all ranks of the node
end, that one too, and ends with the last of them. It reads a NodePlan from stdin; FD is the socket at which ranks come.

It watches its own ranks from the first on. Once they have met in torch's store the observers of several nodes know each
other: node 0's judges, the others follow. What it says goes where local rank 0's error output goes.

    --end     it may free the ranks that only wait, and end all that is left
"""

import argparse
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import replace as changed

import msgspec
from msgspec.structs import replace

from paceline.agent import messages as m
from paceline.agent.adopted import Adopted, Bystander
from paceline.agent.channel import Link
from paceline.agent.crew import Crew
from paceline.agent.follower import Follower
from paceline.agent.generation import Generation
from paceline.agent.guarding import Guarding, Judgement
from paceline.agent.head import POLL_FAILING_SECONDS
from paceline.agent.start import Inherited
from paceline.contract.evidence import Sample
from paceline.contract.introduction import Meeting
from paceline.contract.node_plan import NodePlan
from paceline.contract.orders import LIFELINE_GRACE_SECONDS, STOP_SIGNALS
from paceline.errors import ExitCode, PacelineError
from paceline.guard.deaths import due_seconds, first_to_fail
from paceline.guard.wording import named, verb
from paceline.observe.terminal import say

ARRIVAL_SECONDS = 60.0  # for all ranks of a node to come
LATE_SECONDS = 1.0  # for one more, when all that have come are gone again
LINGER_SECONDS = 30.0  # that node 0's stays for the others when its own ranks are done
MEET_SECONDS = 3.0  # for the other nodes to come, where something has failed before they have
MOVED_SECONDS = 1.0
QUESTION_SECONDS = 5.0


class Observer:
    """The guard of one node's ranks, and on node 0 of all."""

    def __init__(self, plan: NodePlan, own: Adopted) -> None:
        self.plan, self.own, self.orders = plan, own, Bystander(own)
        self.heads = plan.first_rank == 0 and plan.nodes > 1
        self.crew = Crew(plan if self.heads else replace(plan, nodes=1), self.orders)
        self._generation = Generation(plan, own, self.crew)
        self._guarding: Guarding | None = None
        self._told_seconds: float | None = None  # when a standstill was told that still lasts
        self._failed = self._apart = False  # a failure is told; node 0 is lost, or was never found
        self._over_seconds = 0.0

    def run(self) -> None:
        """Watch until the last rank has ended."""
        self._wait_for_ranks()
        try:
            self._watch()
        finally:
            self.crew.end(ExitCode.DONE)

    def _wait_for_ranks(self) -> None:
        deadline = time.monotonic() + ARRIVAL_SECONDS
        while not self.own.all_here and (left := deadline - time.monotonic()) > 0:
            if self.own.over:  # also when nobody has come yet
                deadline = min(deadline, time.monotonic() + (LATE_SECONDS if self.own.ranks else left))
            self.orders.wait(min(left, 0.25))
        if not self.own.all_here and not self.own.over:
            here = named(self.own.ranks)
            say(f"watchover sees {here} of the {self.plan.nproc} on this node: the others have not come")

    def _watch(self) -> None:
        if self.heads:
            addresses = tuple(dict.fromkeys((*self.plan.head, os.uname().nodename)))
            self.own.tell_first(Meeting(addresses, self.crew.port, self.plan.secret))
        while self._goes_on():
            if self._guarding is None:
                self._guarding = Guarding(self._generation)
            failing = due_seconds(self._generation.samples()) is not None and not self._failed
            self.crew.wait(POLL_FAILING_SECONDS if failing else self._guarding.look_seconds)
            if self.own.meeting is not None and not self.heads and not self._apart:
                self._follow(self.own.meeting)
            self._count_nodes()
            if self.crew.launcher_gone and not self._failed:
                self._end_all(LIFELINE_GRACE_SECONDS)
            self._look(self._generation.samples())

    def _goes_on(self) -> bool:
        """Whether a rank runs that this observer watches, or one has failed of which nothing was said yet."""
        if not self.own.over:
            return True
        samples = self._generation.samples()
        if due_seconds(samples) is not None and not self._failed:
            return True
        self._over_seconds = self._over_seconds or time.monotonic()
        return any(one.runs for one in samples) and time.monotonic() < self._over_seconds + LINGER_SECONDS

    # ---- several nodes ----

    @property
    def _whole(self) -> bool:
        """Whether all ranks of the job are seen from here."""
        return len(self._generation.samples()) == self.plan.world_size

    def _count_nodes(self) -> None:
        """Take in the other nodes' observers that have come."""
        before = [*self._generation.members]
        for member in self.crew.here:
            if member not in before:
                member.start(m.StartOrder(0, 0, self.plan.world_size, 0, "", ""))
        now = [*self.crew.members.values()]
        if now != before:
            self._generation.members = now
            if self._whole:
                self._guarding = None  # another one, that knows all ranks

    def _follow(self, meeting: Meeting) -> None:
        """Take part in the guard of all nodes, as node 0's observer asks, until it is over."""
        plan = replace(
            self.plan, head=meeting.addresses, head_ports=(meeting.port,), secret=meeting.secret, join_seconds=30.0
        )
        try:
            # that one tells what there is to tell, unless it is lost before
            self._failed = Subordinate(plan, self.orders, self.own).run() == ExitCode.DONE
        except PacelineError as error:
            say(f"hangs between this node and others are not judged: {error}")
        self._apart = True

    # ---- judging ----

    def _look(self, samples: Sequence[Sample]) -> None:
        """Judge what is to be judged now, and say it once."""
        now = time.monotonic()
        if self._failed or self._guarding is None:
            return
        due = due_seconds(samples)
        if due is not None:
            # who only lost others, or was broken off by them, cannot be told from a part of the ranks
            if now >= due + (0.0 if self._whole or self._apart or self.plan.nodes == 1 else MEET_SECONDS):
                self._failed = True
                self._tell_failure(samples)
            return
        if self._told_seconds is not None:
            least = now - self._told_seconds - MOVED_SECONDS
            moved = [one for one in samples if one.runs and one.still_seconds < least]
            if not moved:
                return
            self._told_seconds = None
            ranks = [one.rank for one in moved]
            say(f"{named(ranks)} {verb(ranks, 'is', 'are')} making progress again; the stall is over")
        judgement = self._guarding.look()
        if judgement is not None:
            self._told_seconds = time.monotonic()
            self._tell_stall(judgement, len(samples))

    def _tell_stall(self, judgement: Judgement, seen: int) -> None:
        if not self._whole and not 0 < len(judgement.verdict.guilty) < seen:  # those that are waited for are elsewhere
            where = "".join(f"\n  {sentence}" for sentence in judgement.verdict.sentences)
            return say(f"nothing moves on {os.uname().nodename}, and other nodes are not seen from here:{where}")
        say(judgement.page())
        if self.own.may_end:
            self._generation.free(judgement.freed, judgement.word)
            self._end_all(self.plan.grace_seconds)
        else:
            say("watchover does not stop jobs. Stop it yourself, or rerun with --end")
        return None

    def _tell_failure(self, samples: Sequence[Sample]) -> None:
        first = first_to_fail(samples)
        if first is not None and first.failure is not None and -(first.code or 0) in STOP_SIGNALS:
            return say(f"the ranks were ended from outside ({first.failure.type})")
        assert self._guarding is not None
        judgement = self._guarding.judge_failure(samples)
        seen = (
            ""
            if self._whole or self.plan.nodes == 1
            else f"\nas {os.uname().nodename} sees it, which has not met all other nodes"
        )
        say(changed(judgement, attempt_dir="").page(self._generation.oom_kills()) + seen)
        self.own.let_go(all_of_them=True)
        if self.own.may_end:
            self._end_all(self.plan.grace_seconds)
        return None

    def _end_all(self, grace_seconds: float) -> None:
        self._failed = True
        self._generation.stop(grace_seconds)


class Subordinate(Follower):
    """The observer of another node than the first: it does what that one's asks, and starts nobody."""

    def __init__(self, plan: NodePlan, orders: Bystander, own: Adopted) -> None:
        super().__init__(plan, orders, Inherited(), lambda: None)
        self._ranks, self._own, self._over_seconds = own.ranks, own, 0.0

    def _start(self, start: m.StartOrder) -> m.StartReply:
        self._number, self._workers = start.generation, self._own
        return m.StartReply(start.generation)

    def _head_lost(self, link: Link) -> str:
        if self._own.over:  # node 0's may still have a question about them
            self._over_seconds = self._over_seconds or time.monotonic()
            if time.monotonic() > self._over_seconds + QUESTION_SECONDS:
                return "all its ranks have ended"
        return super()._head_lost(link)

    def _alone(self, why: str) -> int:
        if self._own.over or self._own.stopping:
            return ExitCode.DONE
        say(f"hangs between this node and others are no longer judged: node 0's observer is lost: {why}")
        return ExitCode.FAILED


def main(arguments: Sequence[str] | None = None) -> int:
    """Watch, and end with the last rank; the exit code means nothing."""
    parser = argparse.ArgumentParser(prog="python -m paceline.agent.observer", description=__doc__)
    parser.add_argument("door", type=int)
    parser.add_argument("--end", action="store_true")
    options = parser.parse_args(arguments)
    for number in STOP_SIGNALS:  # they reach all of a job's processes, and it is the ranks that decide what they mean
        signal.signal(number, signal.SIG_IGN)
    with os.fdopen(0, "rb", closefd=False) as file:
        plan = msgspec.json.decode(file.read(), type=NodePlan)
    plan = replace(plan, secret=secrets.token_hex(32), head_ports=(0,))
    door = socket.socket(fileno=options.door)
    door.setblocking(False)
    own = Adopted(plan, door, may_end=options.end)
    try:
        Observer(plan, own).run()
    except Exception as error:  # the ranks run on
        say(f"warning: watchover has failed, and sees nothing any more: {type(error).__name__}: {error}")
    finally:
        own.close()
    return ExitCode.DONE


if __name__ == "__main__":
    sys.exit(main())
