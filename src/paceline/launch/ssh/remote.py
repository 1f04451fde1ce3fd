"""A run on other hosts: all hosts answer, then all agents start the workers, and the run ends with node 0.

    1  The launcher opens a session to each host, and the agent there announces itself (sessions.py). If a host cannot
       be used, nothing starts.
    2  The launcher sends each agent its plan with the addresses of node 0. Heartbeats begin.
    3  The launcher relays output and stop signals until the agent of node 0 ends. `Reconnector` tries lost hosts again.

If the launcher is killed or loses the network, the agents end the workers: their lifeline closes or has no heartbeat.
"""

import math
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from paceline.errors import ExitCode
from paceline.host.facts import NodeFacts
from paceline.launch.output import MultiNodeRelay, TerminalWriter
from paceline.launch.plan import Plan
from paceline.launch.ssh.sessions import (
    SSH_FAILED_EXIT_CODE,
    HostSession,
    OutputChunk,
    Sessions,
    await_agents,
    open_sessions,
    read_announcement,
    why_lost,
)
from paceline.protocol.control import GRACE_SECONDS, STOP_SIGNALS, signal_wakeup
from paceline.protocol.evidence import SUCCESS_EXIT_CODES
from paceline.runs.console import print_to_stderr

NODE0_REPORT_SECONDS = 5.0  # beyond the grace: the agent of node 0 has more information, and reports the failure itself
OTHER_AGENTS_END_SECONDS = 5.0  # for the other agents, which end at the same time as that of node 0
STOP_MARGIN_SECONDS = 4.0  # beyond the workers' grace: the agents end, and their last output arrives
CLOSING_SECONDS = min(2.0, GRACE_SECONDS) + 2.0  # for the agents to end after their lifelines are closed
SAME_REQUEST_SECONDS = 0.1  # timeout(1), for example, sends each signal twice: to its child and to the child's group
SCREEN_POLL_SECONDS = 0.1  # between checks whether the queue of the screen has room
FIRST_PAUSE_SECONDS, LAST_PAUSE_SECONDS, GROWTH = 2.0, 60.0, 1.5  # between two tries to reconnect
GIVE_UP_SECONDS = 4 * 3600.0  # without an answer
STABLE_CONNECTION_SECONDS = 60.0  # a host that was back for this time begins with the first pause again


def run_plan(plan: Plan) -> int:
    """Run the plan on other hosts to its end; return the exit code. Main thread only. See supervise.run."""
    with signal_wakeup((*STOP_SIGNALS, signal.SIGCHLD)) as wakeup, open_sessions(plan.agents, wakeup) as sessions:
        # a detached agent on this machine does not announce itself
        announces = any(command.argv[-1].endswith("--announce") for command in plan.agents)
        facts = await_agents(sessions, seconds=plan.nodes[0].join_seconds) if announces else []
        if isinstance(facts, signal.Signals):
            print_to_stderr(f"stopped by {facts.name} before anything was started")
            return 128 + facts
        remote_run = _RemoteRun(plan, sessions, facts)
        try:
            return remote_run.run()
        finally:
            remote_run.end()


class _RemoteRun:
    def __init__(self, plan: Plan, sessions: Sessions, facts: Sequence[NodeFacts]) -> None:
        self._plan, self._sessions, self._head = plan, sessions, sessions.all[0]
        self._addresses = [address.address for fact in facts[:1] for address in fact.addresses]  # of node 0
        self._screen = TerminalWriter()
        self._relay = MultiNodeRelay([session.name for session in sessions.all], self._screen)
        self._stopped_seconds = math.inf  # time of the first stop signal
        self._deadline, self._code = math.inf, int(ExitCode.FAILED)  # end of the run at the latest, and its exit code
        self._reason = ""
        self._reconnector = Reconnector(sessions, self._send_plan, self._relay.say)
        self._unexplained: list[HostSession] = []  # failed sessions; node 0 may fail with the same code and the reason
        self._interrupted = False  # by a second signal: wait no longer

    def _send_plan(self, session: HostSession) -> None:
        node = self._plan.nodes[session.node]
        node0 = tuple(dict.fromkeys((*node.node0, *self._addresses)))
        self._sessions.send_line(session, msgspec.json.encode(msgspec.structs.replace(node, node0=node0)))
        session.has_plan = True

    def run(self) -> int:
        for session in self._sessions.all:
            self._send_plan(session)
        while not self._head.is_drained:
            if time.monotonic() >= self._deadline:
                self._explain()
                if self._reason:
                    self._relay.say(self._reason)
                return self._code
            self._pump(self._deadline)
        self._reconnector.stop()
        code = self._head.code
        if code < 0 or code == SSH_FAILED_EXIT_CODE:
            reason = why_lost(code, self._head.stderr)
            self._relay.say(
                f"node 0 ({self._head.name}) is lost, its ssh session has ended ({reason}): stopping the run on all "
                "nodes. Start it again to resume from its newest checkpoint"
            )
            return ExitCode.FAILED
        deadline = time.monotonic() + OTHER_AGENTS_END_SECONDS
        while not all(session.is_drained for session in self._sessions.all) and time.monotonic() < deadline:
            self._pump(deadline)
            if self._interrupted:
                break
        self._explain(head_code=code)
        return code

    def end(self) -> None:
        self._sessions.close_lifelines()
        deadline = time.monotonic() + CLOSING_SECONDS
        while not all(session.is_drained for session in self._sessions.all) and time.monotonic() < deadline:
            self._pump(deadline)
        self._sessions.kill()
        self._pump(0.0)
        self._relay.flush_all()
        self._screen.close()
        # a pager may block it without limit; a signal ends the wait
        while not self._screen.wait_closed(SCREEN_POLL_SECONDS):
            if self._sessions.wait_for_output(0.0, read=False)[1]:
                return

    def _pump(self, deadline: float) -> None:
        seconds = min(deadline - time.monotonic(), self._relay.show_due_lines(), self._reconnector.start_due_sessions())
        is_full = self._screen.full
        seconds = min(seconds, SCREEN_POLL_SECONDS) if is_full else seconds
        pieces, signals = self._sessions.wait_for_output(seconds, read=not is_full)
        ended_sessions, last_pieces = self._sessions.reap()
        for piece in (*pieces, *last_pieces):
            if not self._reconnector.handle_message(piece):
                self._relay.put(piece.session.node, piece.descriptor, piece.data)
        for number in signals:
            self._obey(number)
        for session in ended_sessions:
            self._relay.end_node(session.node)
            if session is not self._head and not self._reconnector.retry_if_failed(session):
                self._follower_ended(session)

    def _obey(self, number: signal.Signals) -> None:
        now = time.monotonic()
        if self._stopped_seconds == math.inf:
            self._stopped_seconds = now
            grace = max(node.grace_period_seconds + node.term_grace_seconds for node in self._plan.nodes)
            self._deadline = now + grace + self._plan.nodes[0].event_wait_seconds + STOP_MARGIN_SECONDS
            self._code = 128 + number
            self._reason = f"stopped by {number.name}; node 0 ({self._head.name}) has not ended in time"
            self._reconnector.stop()
            for session in self._sessions.all:
                self._sessions.send_line(session, f"stop {number.name}".encode())
        elif now > self._stopped_seconds + SAME_REQUEST_SECONDS:
            self._deadline, self._interrupted = now, True
            self._reason = f"{number.name} is a second signal: stopping all nodes immediately"

    def _follower_ended(self, session: HostSession) -> None:
        code = session.code
        if code in SUCCESS_EXIT_CODES or self._interrupted or not session.has_plan:
            return
        if code < 0 or code == SSH_FAILED_EXIT_CODE:
            reason = why_lost(code, session.stderr)
            self._relay.say(f"node {session.node} ({session.name}) is lost: its ssh session has ended ({reason})")
        else:
            self._unexplained.append(session)
        if self._stopped_seconds != math.inf:
            return
        first = self._plan.nodes[0]
        present = sum(session.has_plan and not session.is_drained for session in self._sessions.all)
        if first.elastic:
            self._reconnector.handle_lost(session, for_good=code == ExitCode.USAGE)
        may_continue = code != ExitCode.USAGE or session.node in self._reconnector.returned
        if may_continue and present >= min(first.min_nodes, first.nodes):
            self._explain()
            return
        seconds = first.grace_seconds + first.event_wait_seconds + NODE0_REPORT_SECONDS
        if (due := time.monotonic() + seconds) < self._deadline:
            self._deadline, self._code = due, ExitCode.USAGE if code == ExitCode.USAGE else ExitCode.FAILED
            self._reason = (
                f"node 0 ({self._head.name}) still ran {seconds:g} s after that: stopping the run on all nodes"
            )

    def _explain(self, head_code: int | None = None) -> None:
        """Report failed agents, except those with the exit code `head_code` of node 0, which has printed the reason."""
        for session in self._unexplained:
            if session.code != head_code:
                self._relay.say(f"node {session.node} ({session.name}): its agent ended with exit code {session.code}")
        self._unexplained.clear()


@dataclass
class _LostHost:
    session: HostSession
    since_seconds: float
    pause_seconds: float = FIRST_PAUSE_SECONDS
    due_seconds: float = 0.0
    is_connecting: bool = False  # the reconnector has opened its session, and no agent has answered yet
    returned_at_seconds: float = math.inf  # when it came back

    def schedule_retry(self) -> None:
        self.is_connecting, self.returned_at_seconds = False, math.inf
        self.due_seconds = time.monotonic() + self.pause_seconds
        self.pause_seconds = min(LAST_PAUSE_SECONDS, self.pause_seconds * GROWTH)


class Reconnector:
    """Reconnects to the lost hosts of a run, with growing pauses. A host that answers gets a new agent, which joins."""

    def __init__(
        self, sessions: Sessions, send_plan: Callable[[HostSession], object], say: Callable[[str], object]
    ) -> None:
        self._sessions, self._send_plan, self._say = sessions, send_plan, say
        self._lost: dict[int, _LostHost] = {}  # by node; includes hosts that are back
        self.returned: set[int] = set()  # nodes that have answered again
        self._over = False

    def handle_lost(self, session: HostSession, *, for_good: bool) -> None:
        if for_good or self._over:
            self._lost.pop(session.node, None)
            return
        now = time.monotonic()
        host = self._lost.get(session.node)
        if host is None or now > host.returned_at_seconds + STABLE_CONNECTION_SECONDS:
            host = self._lost[session.node] = _LostHost(session, now)
            self._say(f"reconnecting to node {session.node} ({session.name}); it rejoins the run when it answers")
        host.session, host.since_seconds = session, now
        host.schedule_retry()

    def start_due_sessions(self) -> float:
        """Start the sessions that are due; return the seconds until the next one is due."""
        now = time.monotonic()
        away = [host for host in self._lost.values() if host.returned_at_seconds == math.inf]
        waiting = [host for host in away if not host.is_connecting]
        for host in waiting:
            if now < host.due_seconds:
                continue
            if now > host.since_seconds + GIVE_UP_SECONDS:
                self._give_up(host, f"it has not answered for {GIVE_UP_SECONDS / 3600:.0f} hours")
                continue
            host.session, host.is_connecting = self._sessions.reconnect(host.session), True
        return max(0.0, min((host.due_seconds - now for host in waiting if not host.is_connecting), default=math.inf))

    def handle_message(self, piece: OutputChunk) -> bool:
        """Process output of a host that is being reconnected; return False for output of other hosts.

        If the output completes an announcement, the agent gets its plan.
        """
        host = self._lost.get(piece.session.node)
        if host is None or not host.is_connecting:
            return False
        answer = read_announcement(piece)
        if isinstance(answer, str):
            self._give_up(host, answer)
        elif answer is not None:
            host.is_connecting, host.returned_at_seconds = False, time.monotonic()
            self.returned.add(piece.session.node)
            self._say(f"node {piece.session.node} ({piece.session.name}) answers again")
            self._send_plan(piece.session)
        return True

    def retry_if_failed(self, session: HostSession) -> bool:
        """Whether a session has ended without an agent. If so, schedule the next try."""
        host = self._lost.get(session.node)
        if host is None or not host.is_connecting:
            return False
        host.schedule_retry()
        return True

    def _give_up(self, host: _LostHost, reason: str) -> None:
        self._say(f"giving up on node {host.session.node} ({host.session.name}): {reason}")
        del self._lost[host.session.node]
        host.session.send_signal(signal.SIGTERM)

    def stop(self) -> None:
        self._over = True
        for host in self._lost.values():
            if host.is_connecting:
                host.session.send_signal(signal.SIGTERM)
        self._lost.clear()
