"""The agent of every node except node 0: it follows the head, and ends its workers if the head is lost."""

import os
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from msgspec.structs import replace

from paceline.errors import ExitCode, UsageError
from paceline.guard.collect import ADVANCE_SECONDS, Collection
from paceline.guard.detectors import heartbeat_seconds, sample_seconds
from paceline.host.facts import gather as gather_facts
from paceline.launch.agent import channel
from paceline.launch.agent.joining import interface_of, join, try_to_reach
from paceline.launch.agent.workers import Inherited, Workers
from paceline.protocol.control import REMOTE_GRACE_SECONDS, Orders
from paceline.protocol.job import NodePlan
from paceline.runs import writing
from paceline.runs.console import say
from paceline.runs.reading import read

HEAD_STOP_SECONDS = 20.0  # beyond the grace: the head that knows of an order must have ended the run by then


class Follower:
    """One node of a run whose head is on a different node."""

    def __init__(self, plan: NodePlan, orders: Orders, inherited: Inherited, on_started: Callable[[], None]) -> None:
        self.plan, self.orders = plan, orders
        self._inherited = inherited
        self._collection: Collection | None = None  # what the workers are being asked for the head
        self._sample_seconds = sample_seconds(plan.stall_after)
        self._on_started = on_started  # called when the workers are started
        self._code: int | None = None
        self._told = 0
        self._said_gone = False
        self._patience_seconds = float("inf")
        self._ranks: tuple[int, ...] = ()  # of workers that another launcher has started
        self._number = -1  # the generation's, also of one that could not be started
        self._workers: Workers | None = None  # this generation's, where they could be started
        self._news: Sequence[object] = []
        self._sent_seconds = 0.0
        self._alive_took_seconds: float | None = None  # for the head to compare clocks

    def run(self) -> int:
        """Follow the head to the end of the run; the exit code, which is the head's.

        Raises:
            PacelineError: if no connection to the head can be made.
        """
        link = join(self.plan, self.orders)
        if link is None:
            return ExitCode.FAILED if self.orders.launcher_gone else 128 + self.orders.signals[0]
        try:
            return self._follow(link)
        finally:
            if self._workers is not None:
                self._workers.sweep()
            link.end("the run is over")

    def _follow(self, link: channel.Link) -> int:
        plan, facts = self.plan, gather_facts()
        interface = interface_of(facts, link.own_address)
        self.plan = replace(plan, master_addr=link.peer_address, head_ports=(link.peer_port,), interface=interface)
        with socket.create_server(("", 0)) as probe:  # open until the run ends: others may try it late
            link.send(channel.Hello(plan.node, plan.nodes, plan.nproc, probe.getsockname()[1], facts, self._ranks))
            while self._code is None:
                self.orders.wait(ADVANCE_SECONDS if self._collection is not None else self._sample_seconds, [link])
                for message in link.receive():
                    self._do(message, link)
                self._pass_on(link)
                if workers := self._workers:
                    if workers.stopping and not workers.swept and not workers.seconds_left:
                        workers.sweep()
                    self._answer(link, workers)
                self._report(link)
                if self._code is None and (why := self._head_lost(link)):
                    return self._alone(why)
        return self._code

    def _do(self, message: channel.Message, link: channel.Link) -> None:
        match message:
            case channel.Reach(peers):
                link.send(channel.Reached(tuple(try_to_reach(os.uname().nodename, peers))))
            case channel.Enter():
                link.send(self._enter(message))
            case channel.StartOrder():
                link.send(self._start(message))
            case channel.Ask() | channel.Release():
                if self._workers is not None:
                    self._answer(link, self._workers, message)
            case channel.Stop(grace_seconds, number):
                if self._workers is not None:
                    self._workers.stop(grace_seconds, number)
            case channel.RunOver(code, words):
                self._code = code
                if words:
                    say(words)
            case channel.Alive(unix_time):
                self._alive_took_seconds = None if unix_time is None else time.time() - unix_time
            case _:
                link.end("it sent what only a node sends")

    def _enter(self, order: channel.Enter) -> channel.StartReply:
        """Become a node of a running run, with the number that the head has assigned."""
        self.plan = replace(self.plan, node=order.node)
        try:
            self._find_folder(Path(order.attempt_dir).resolve(), order.proof)
        except (UsageError, OSError) as error:
            return channel.StartReply(-1, str(error))
        say(f"node {order.node} ({os.uname().nodename}) has found the run, and waits until it has taken its next step")
        return channel.StartReply(-1)

    def _start(self, start: channel.StartOrder) -> channel.StartReply:
        plan = replace(self.plan, ranks=start.ranks, attempt_dir=str(Path(start.attempt_dir).resolve()))
        self._number = start.generation
        if self._workers is not None:
            self._workers.close()
            self._workers = None
        who = f"node {plan.node} ({os.uname().nodename})"
        try:
            self._find_folder(Path(start.attempt_dir).resolve(), start.proof)
            self._workers = Workers.start(plan, start.generation, self._inherited)
            self._on_started()
        except UsageError as error:
            return channel.StartReply(start.generation, f"{who}: {error}")
        except OSError as error:
            return channel.StartReply(start.generation, f"{who}: the workers cannot be started: {error}")
        return channel.StartReply(start.generation)

    def _find_folder(self, attempt_dir: Path, proof: str) -> None:
        if not proof:  # any script's: its logs may lie on each host for themselves
            writing.make_folder(attempt_dir, exist_ok=True)
            return
        deadline = time.monotonic() + 5.0  # what a network file system may take to show a new file
        while not _holds(attempt_dir, proof):
            if time.monotonic() > deadline:
                raise UsageError(code="run-dir-not-shared", run_dir=attempt_dir.parent)
            time.sleep(0.1)

    def _answer(
        self, link: channel.Link, workers: Workers, message: channel.Ask | channel.Release | None = None
    ) -> None:
        """Process a request of the guard, or send the answer to the last one if it is complete. Never waits."""
        try:
            match message:
                case channel.Ask(question, patience_seconds):
                    self._collection = workers.collect(question, patience_seconds)
                case channel.Release(ranks, word):
                    workers.release(ranks, word.encode())
                case None:
                    if (collection := self._collection) is not None and collection.advance():
                        self._collection, now = None, time.monotonic()
                        for evidence in collection.evidence(workers.samples()):
                            link.send(channel.Shown(collection.question, evidence.turned(now)))
                        link.send(channel.Shown(collection.question, None))
        except Exception as error:  # the guard is never the cause of anything
            self._collection = None
            say(f"warning: the guard of this node has failed, and is off: {type(error).__name__}: {error}")

    def _pass_on(self, link: channel.Link) -> None:
        """Forward orders from outside to the head. If the head does not end the run, this node ends alone."""
        fresh = self.orders.signals[self._told :]
        self._told += len(fresh)
        for number in fresh:
            link.send(channel.Ordered(int(number)))
        if self.orders.launcher_gone and not self._said_gone:
            self._said_gone = True
            link.send(channel.Ordered(0))
        if self.orders.given and self._patience_seconds == float("inf"):
            grace = REMOTE_GRACE_SECONDS if self.orders.launcher_gone else self.plan.stop_grace_seconds
            self._patience_seconds = time.monotonic() + grace + HEAD_STOP_SECONDS

    def _report(self, link: channel.Link) -> None:
        now = time.monotonic()
        beat = channel.Beat(self._number, stopped=True)
        if own := self._workers:
            workers = tuple(one.turned(now) for one in own.samples())
            beat = channel.Beat(own.number, workers, own.oom_kills(), own.swept, tuple(own.left))
        news = [(beat.generation, beat.stopped), *((one.code, one.failure is None) for one in beat.workers)]
        often = self._workers is not None and not self.plan.stall_after.off  # for the guard
        every = heartbeat_seconds(self.plan.stall_after, self.plan.nodes, beat.workers) - self._sample_seconds / 2
        late = now >= self._sent_seconds + (every if often else channel.BEAT_SECONDS)
        if late or news != self._news or self._alive_took_seconds is not None:
            link.send(replace(beat, unix_time=time.time(), alive_took_seconds=self._alive_took_seconds))
            self._news, self._sent_seconds, self._alive_took_seconds = news, now, None

    def _head_lost(self, link: channel.Link) -> str:
        """Why this node is without the head now; empty while it is not."""
        late = time.monotonic() > self._patience_seconds
        return link.ended or ("it did not end the run as it was told to" if late else "")

    def _alone(self, why: str) -> int:
        if workers := self._workers:
            workers.stop(self.plan.grace_seconds)
            while left := workers.seconds_left:
                self.orders.wait(left)
            workers.sweep()
        resume = f". Go on with it: paceline train --resume auto --run-dir {self.plan.run_dir}"
        say(
            f"node {self.plan.node} ({os.uname().nodename}) has lost node 0 ({self.plan.head[0]}): {why}; its own "
            f"workers are stopped{resume if self.plan.run_dir and not self.plan.plain_store else ''}"
        )
        return 128 + self.orders.signals[0] if self.orders.signals else ExitCode.FAILED


def _holds(attempt_dir: Path, proof: str) -> bool:
    try:
        return read(attempt_dir / channel.PROOF, limit_bytes=100, ours=True) == proof.encode()
    except OSError:  # not there yet
        return False
