"""The agent of every node except node 0. It follows the coordinator, and ends its workers if that is lost."""

import dataclasses
import math
import os
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from msgspec.structs import replace

from paceline.errors import ExitCode, UsageError
from paceline.guard.collect import ADVANCE_INTERVAL_SECONDS, EvidenceCollection
from paceline.guard.detectors import heartbeat_interval_seconds, sample_interval_seconds
from paceline.host.facts import gather_facts as gather_facts
from paceline.launch.agent import channel
from paceline.launch.agent.files import SeparateRunFolder
from paceline.launch.agent.joining import interface_of, wait_for_coordinator_link, why_peers_unreachable
from paceline.launch.agent.workers import InheritedResources, Workers
from paceline.protocol.balance import AUTO, SAMPLE_SECONDS
from paceline.protocol.control import REMOTE_GRACE_SECONDS, StopSignals
from paceline.protocol.job import NodePlan
from paceline.runs import writing
from paceline.runs.console import print_to_stderr
from paceline.runs.reading import read_file

LATE_FILE_SECONDS = 20.0  # a network file system may show a new file with a delay
COPY_LOOK_SECONDS = 0.2
COORDINATOR_STOP_SECONDS = 20.0  # beyond the grace: within it the coordinator ends the run after an order


class Follower:
    def __init__(
        self, plan: NodePlan, orders: StopSignals, inherited: InheritedResources, on_started: Callable[[], None]
    ) -> None:
        self.plan, self.orders = plan, orders
        self._inherited = inherited
        # details that the coordinator has requested from the workers
        self._collection: EvidenceCollection | None = None
        self._max_sample_seconds = SAMPLE_SECONDS if plan.balance == AUTO else math.inf
        self._sample_seconds = min(sample_interval_seconds(plan.hang_timeout), self._max_sample_seconds)
        self._on_started = on_started  # called when the workers have been started
        self._code: int | None = None
        self._forwarded = 0  # number of stop signals that the coordinator knows
        self._reported_launcher_gone = False
        self._deadline_seconds = float("inf")
        self._ranks: tuple[int, ...] = ()  # of workers that another launcher has started
        self._number = -1  # of the generation, even if it could not be started
        self._workers: Workers | None = None  # of this generation; None if they could not be started
        self._files: SeparateRunFolder | None = None  # None: this node sees the run folder of node 0, or needs none
        self._news: Sequence[object] = ()
        self._sent_seconds = 0.0
        self._alive_took_seconds: float | None = None  # for the coordinator to compare clocks

    def run(self) -> int:
        """Follow the coordinator to the end of the run; return the exit code, which the coordinator determines."""
        link = wait_for_coordinator_link(self.plan, self.orders)
        if link is None:
            return ExitCode.FAILED if self.orders.launcher_gone else 128 + self.orders.signals[0]
        try:
            return self._follow(link)
        finally:
            if self._workers is not None:
                self._workers.kill_sessions()
            if self._files is not None and self._code is not None:
                num_signals = len(self.orders.signals)
                self._files.finish(lambda: self._wait_for_copies(link, num_signals))
            link.end("the run is over")

    def _follow(self, link: channel.Link) -> int:
        plan, facts = self.plan, gather_facts()
        interface = interface_of(facts, link.own_address)
        self.plan = replace(plan, master_addr=link.peer_address, node0_ports=(link.peer_port,), interface=interface)
        with socket.create_server(("", 0)) as probe:  # open until the end of the run: others may test it later
            link.send(channel.Hello(plan.node, plan.nodes, plan.nproc, probe.getsockname()[1], facts, self._ranks))
            while self._code is None:
                self.orders.wait(ADVANCE_INTERVAL_SECONDS if self._collection else self._sample_seconds, [link])
                for message in link.receive():
                    self._execute(message, link)
                self._forward_orders(link)
                if workers := self._workers:
                    if workers.stopping and not workers.swept and not workers.seconds_until_kill:
                        workers.kill_sessions()
                    self._answer(link, workers)
                self._report(link)
                if self._code is None and (reason := self._coordinator_lost(link)):
                    return self._stop_without_coordinator(reason)
        return self._code

    def _wait_for_copies(self, link: channel.Link, num_signals: int) -> bool:
        """Returns False after a further stop order, the grace of the last one, or the end of the launcher."""
        self.orders.wait(COPY_LOOK_SECONDS)
        link.send(channel.NodeHeartbeat(self._number, stopped=True))
        has_new_order = self.orders.launcher_gone or len(self.orders.signals) != num_signals
        return not has_new_order and time.monotonic() < self._deadline_seconds - COORDINATOR_STOP_SECONDS

    def _execute(self, message: channel.Message, link: channel.Link) -> None:
        match message:
            case channel.ReachabilityRequest(peers):
                link.send(channel.ReachabilityReply(tuple(why_peers_unreachable(os.uname().nodename, peers))))
            case channel.JoinOrder():
                link.send(self._enter(message))
            case channel.StartOrder():
                link.send(self._start(message, link))
            case channel.EvidenceRequest():
                if self._workers is not None:
                    self._answer(link, self._workers, message)
            case channel.UnblockOrder() | channel.StopOrder() | channel.StopStepOrder():
                if self._workers is not None:
                    self._workers.execute(message)
            case channel.RunEndNotice(code, words):
                self._code = code
                if words:
                    print_to_stderr(words)
            case channel.CoordinatorHeartbeat(unix_time):
                self._alive_took_seconds = None if unix_time is None else time.time() - unix_time
            case _:
                link.end("it sent a message that only a node sends")

    def _enter(self, order: channel.JoinOrder) -> channel.StartReply:
        self.plan = replace(self.plan, node=order.node)
        try:
            self._find_folder(Path(order.attempt_dir).resolve(), order.proof)
        except (UsageError, OSError) as error:
            return channel.StartReply(-1, str(error))
        print_to_stderr(f"node {order.node} ({os.uname().nodename}) has found the run, and joins after its next step")
        return channel.StartReply(-1)

    def _start(self, start: channel.StartOrder, link: channel.Link) -> channel.StartReply:
        plan = replace(self.plan, ranks=start.ranks, attempt_dir=str(Path(start.attempt_dir).resolve()))
        self._number = start.generation
        if self._workers is not None:
            self._workers.close()
            self._workers = None
        node = f"node {plan.node} ({os.uname().nodename})"
        try:
            self._find_folder(Path(start.attempt_dir).resolve(), start.proof)
            inherited = self._inherited
            if (files := self._files) is not None:
                files.begin_generation(start.ranks, lambda: self._report(link))
                inherited = dataclasses.replace(inherited, transfers=files.transfers, keeps_copy=files.keeps_copy)
            self._workers = Workers.start(plan, start.generation, inherited)
            self._on_started()
        except UsageError as error:
            return channel.StartReply(start.generation, f"{node}: {error}")
        except OSError as error:
            return channel.StartReply(start.generation, f"{node}: cannot start the workers: {error}")
        return channel.StartReply(start.generation, copies_files=self._files is not None)

    def _find_folder(self, attempt_dir: Path, proof: str) -> None:
        if not proof:  # there is no run folder
            writing.make_folder(attempt_dir, exist_ok=True)
            return
        deadline, is_shared = time.monotonic() + LATE_FILE_SECONDS, False
        while self._files is None:
            with suppress(OSError):  # the file does not exist yet
                if read_file(attempt_dir / channel.PROOF_FILE, limit_bytes=100, ours=True) == proof.encode():
                    return
            if not is_shared:
                self._files = SeparateRunFolder.create_if_needed(self.plan, attempt_dir)
                is_shared = self._files is None
            if time.monotonic() > deadline:
                raise UsageError(code="run-dir-not-shared", run_dir=attempt_dir.parent)
            time.sleep(0.1)

    def _answer(self, link: channel.Link, workers: Workers, request: channel.EvidenceRequest | None = None) -> None:
        """Process a request of the guard, or send the answer to the last request if it is complete. Never waits."""
        try:
            if request is not None:
                self._collection = workers.start_evidence_collection(request.question, request.patience_seconds)
            elif (collection := self._collection) is not None and collection.advance():
                self._collection, now = None, time.monotonic()
                for evidence in collection.evidence(workers.worker_samples()):
                    link.send(channel.EvidenceReply(collection.question, evidence.swap_times_and_ages(now)))
        except Exception as error:  # an error of the guard must not end the run
            self._collection = None
            reason = f"{type(error).__name__}: {error}"
            print_to_stderr(f"warning: the hang guard of this node crashed and is disabled: {reason}")

    def _forward_orders(self, link: channel.Link) -> None:
        """Forward stop orders of this agent to the coordinator. If the run does not end in time, this node ends."""
        new_signals = self.orders.signals[self._forwarded :]
        self._forwarded += len(new_signals)
        for number in new_signals:
            link.send(channel.StopSignalNotice(int(number)))
        if self.orders.launcher_gone and not self._reported_launcher_gone:
            self._reported_launcher_gone = True
            link.send(channel.StopSignalNotice(0))
        if self.orders.has_order and self._deadline_seconds == float("inf"):
            grace = REMOTE_GRACE_SECONDS if self.orders.launcher_gone else self.plan.grace_period_seconds
            self._deadline_seconds = time.monotonic() + grace + COORDINATOR_STOP_SECONDS

    def _report(self, link: channel.Link) -> None:
        """Send a heartbeat if it is due, or immediately if a worker or the generation has ended."""
        now = time.monotonic()
        beat = channel.NodeHeartbeat(self._number, stopped=True)
        if workers := self._workers:
            samples = tuple(sample.swap_times_and_ages(now) for sample in workers.worker_samples())
            oom_kills, left = workers.oom_kills(), tuple(workers.left)
            beat = channel.NodeHeartbeat(workers.number, samples, oom_kills, workers.swept, left)
        is_guarded = self._workers is not None and not self.plan.hang_timeout.off
        sampled = heartbeat_interval_seconds(self.plan.hang_timeout, self.plan.nodes, beat.workers)
        sampled = min(sampled, self._max_sample_seconds)
        interval = sampled - self._sample_seconds / 2 if is_guarded else channel.BEAT_SECONDS
        is_due = now >= self._sent_seconds + interval
        if is_due or beat.urgent_state != self._news or self._alive_took_seconds is not None:
            link.send(replace(beat, unix_time=time.time(), alive_took_seconds=self._alive_took_seconds))
            self._news, self._sent_seconds, self._alive_took_seconds = beat.urgent_state, now, None

    def _coordinator_lost(self, link: channel.Link) -> str:
        is_late = time.monotonic() > self._deadline_seconds
        return link.ended or ("it did not end the run after a stop order" if is_late else "")

    def _stop_without_coordinator(self, reason: str) -> int:
        if workers := self._workers:
            workers.stop(self.plan.grace_seconds)
            while seconds := workers.seconds_until_kill:
                self.orders.wait(seconds)
            workers.kill_sessions()
        resume = f". To resume: paceline train --resume auto --run-dir {self.plan.run_dir}"
        print_to_stderr(
            f"node {self.plan.node} ({os.uname().nodename}) has lost node 0 ({self.plan.node0[0]}): {reason}. It has "
            f"stopped its workers{resume if self.plan.run_dir and not self.plan.plain_store else ''}"
        )
        return 128 + self.orders.signals[0] if self.orders.signals else ExitCode.FAILED
