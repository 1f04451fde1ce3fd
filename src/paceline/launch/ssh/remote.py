"""A run on other hosts: first all hosts answer, then all start, and the run ends with node 0.

    1  a session to each host; the agent there announces itself (sessions.py). If one cannot, nothing is started
    2  each agent is sent its plan, with node 0's addresses; signs of life from now on
    3  output, stop signals, lost sessions (`Reconnector` tries their hosts again), until node 0's agent has ended

If this launcher is killed or loses the network, the agents end the workers: their lifeline ends or is silent.
"""

import math
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from paceline.errors import ExitCode
from paceline.host.facts import Facts
from paceline.launch.output import HostRelay, Screen
from paceline.launch.plan import Plan
from paceline.launch.ssh.sessions import (
    SSH_FAILED,
    HostSession,
    Output,
    Sessions,
    announced,
    await_agents,
    open_sessions,
    why_lost,
)
from paceline.protocol.control import GRACE_SECONDS, STOP_SIGNALS, signal_inbox
from paceline.protocol.evidence import GOOD_ENDS
from paceline.runs.console import say

HEAD_SECONDS = 5.0  # beyond the grace: node 0's agent, which knows more, ends a broken run by itself and says why
LAST_SECONDS = 5.0  # the other agents end at the same time as node 0's
STOP_MARGIN_SECONDS = 4.0  # beyond the workers' grace: the agents' own ends, and the way of their last words
CLOSING_SECONDS = min(2.0, GRACE_SECONDS) + 2.0  # from the end of the lifelines to that of the agents
SAME_REQUEST_SECONDS = 0.1  # timeout(1), for one, sends every signal twice: to its child and to the child's group
PAUSE_SECONDS = 0.1  # between looks whether the screen's queue has room again
DETACHED = b'{"detached"'  # begins an agent's second line: it goes on without us
FIRST_PAUSE_SECONDS, LAST_PAUSE_SECONDS, GROWTH = 2.0, 60.0, 1.5
GIVE_UP_SECONDS = 4 * 3600.0  # without an answer
STEADY_SECONDS = 60.0  # that a host has to stay, to be tried again at once when it is lost once more


def run_remote(plan: Plan) -> int:
    """Run the plan on other hosts to its end; the exit code. Main thread only. See supervise.run.

    Raises:
        UsageError: when a host cannot be used; names all of them. Nothing was started then.
    """
    with signal_inbox((*STOP_SIGNALS, signal.SIGCHLD)) as inbox, open_sessions(plan.agents, inbox) as every:
        # a detached agent on this machine does not announce itself: there is nothing to wait for
        announces = any(command.argv[-1].endswith("--announce") for command in plan.agents)
        facts = await_agents(every, seconds=plan.nodes[0].join_seconds) if announces else []
        if isinstance(facts, signal.Signals):
            say(f"stopped by {facts.name} before anything was started")
            return 128 + facts
        watch = _Watch(plan, every, facts)
        try:
            return watch.run()
        finally:
            watch.end()


class _Watch:
    """The sessions of a run, from its start to its end."""

    def __init__(self, plan: Plan, every: Sessions, facts: Sequence[Facts]) -> None:
        self._plan, self._every, self._head = plan, every, every.all[0]
        self._addresses = [address.address for fact in facts[:1] for address in fact.addresses]  # of node 0
        self._screen = Screen()
        self._relay = HostRelay([session.name for session in every.all], self._screen)
        self._stopped_seconds = math.inf  # since when a stop is ordered
        self._deadline, self._code = math.inf, int(ExitCode.FAILED)  # when and as what the run ends at the latest
        self._reason = ""
        self._reconnector = Reconnector(every, self._greet, self._relay.say)
        self._unexplained: list[HostSession] = []  # ended badly; node 0's agent may end alike, and then has said why
        self._detached: set[int] = set()
        self._interrupted = False  # by a second signal: wait for nothing more

    def _greet(self, session: HostSession) -> None:
        node = self._plan.nodes[session.node]
        head = tuple(dict.fromkeys((*node.head, *self._addresses)))
        self._every.tell(session, msgspec.json.encode(msgspec.structs.replace(node, head=head)))
        session.told = True

    def run(self) -> int:
        """Send every agent its plan, and wait until node 0's has ended, or the run has to be; the exit code."""
        for session in self._every.all:
            self._greet(session)
        while not self._head.ended:
            if time.monotonic() >= self._deadline:
                self._explain()
                if self._reason:
                    self._relay.say(self._reason)
                return self._code
            self._pump(self._deadline)
        self._reconnector.stop()
        code = self._head.code
        if code < 0 or code == SSH_FAILED:
            why = why_lost(code, self._head.words)
            self._relay.say(
                f"node 0 ({self._head.name}) is lost, its ssh session has ended ({why}): the run is stopped on all "
                "nodes. Start it again to go on from its newest checkpoint"
            )
            return ExitCode.FAILED
        patience = time.monotonic() + LAST_SECONDS
        while not all(session.ended for session in self._every.all) and time.monotonic() < patience:
            self._pump(patience)
            if self._interrupted:
                break
        self._explain(but=code)
        return self._detached_code() if self._plan.nodes[0].detached and code == ExitCode.DONE else code

    def end(self) -> None:
        """Close the lifelines, wait for the agents' ends, and show all output."""
        self._every.hang_up()
        patience = time.monotonic() + CLOSING_SECONDS
        while not all(session.ended for session in self._every.all) and time.monotonic() < patience:
            self._pump(patience)
        self._every.kill()
        self._pump(0.0)
        self._relay.finish()
        self._screen.close()
        while not self._screen.closed(PAUSE_SECONDS):  # a pager may hold it up, as long as people like
            if self._every.wait(0.0, read=False)[1]:
                return

    def _pump(self, until: float) -> None:
        """Wait for the next event, not beyond `until`, and process it."""
        seconds = min(until - time.monotonic(), self._relay.flush(), self._reconnector.try_again())
        full = self._screen.full
        pieces, signals = self._every.wait(min(seconds, PAUSE_SECONDS) if full else seconds, read=not full)
        ended, last_words = self._every.reap()
        for piece in (*pieces, *last_words):
            if not self._reconnector.heard(piece):
                self._show(piece)
        for number in signals:
            self._obey(number)
        for session in ended:
            self._relay.end(session.node)
            if session is not self._head and not self._reconnector.failed(session):
                self._follower_ended(session)

    def _show(self, piece: Output) -> None:
        data = piece.data
        if self._plan.nodes[0].detached and piece.descriptor == 1 and DETACHED in data:
            self._detached.add(piece.session.node)
            data = b"".join(line for line in data.splitlines(keepends=True) if not line.startswith(DETACHED))
        if data:
            self._relay.put(piece.session.node, piece.descriptor, data)

    def _obey(self, number: signal.Signals) -> None:
        now = time.monotonic()
        if self._stopped_seconds == math.inf:
            self._stopped_seconds = now
            grace = max(node.stop_grace_seconds + node.term_grace_seconds for node in self._plan.nodes)
            self._deadline, self._code = now + grace + STOP_MARGIN_SECONDS, 128 + number
            self._reason = f"stopped by {number.name}; node 0 ({self._head.name}) has not ended by itself in time"
            self._reconnector.stop()
            for session in self._every.all:
                self._every.tell(session, f"stop {number.name}".encode())
        elif now > self._stopped_seconds + SAME_REQUEST_SECONDS:
            self._deadline, self._interrupted = now, True
            self._reason = f"{number.name}, a second signal: all lifelines are closed at once"

    def _follower_ended(self, session: HostSession) -> None:
        code = session.code
        if code in GOOD_ENDS or self._interrupted or not session.told:
            return
        if code < 0 or code == SSH_FAILED:
            self._relay.say(
                f"node {session.node} ({session.name}) is lost: its ssh session has ended "
                f"({why_lost(code, session.words)})"
            )
        else:
            self._unexplained.append(session)
        if self._stopped_seconds != math.inf:
            return
        first = self._plan.nodes[0]
        here = sum(session.told and not session.ended for session in self._every.all)
        if first.elastic:
            self._reconnector.lost(session, for_good=code == ExitCode.USAGE)
        if here >= min(first.min_nodes, first.nodes) and (
            code != ExitCode.USAGE or self._reconnector.has_returned(session)
        ):
            self._explain()
            return
        due = time.monotonic() + first.grace_seconds + HEAD_SECONDS
        if due < self._deadline:
            self._deadline, self._code = due, ExitCode.USAGE if code == ExitCode.USAGE else ExitCode.FAILED
            self._reason = (
                f"node 0 ({self._head.name}) still ran {first.grace_seconds + HEAD_SECONDS:g} s after that: "
                "the run is stopped on all nodes"
            )

    def _explain(self, but: int | None = None) -> None:
        """Report agents that have ended, except those with the exit code of node 0, which has printed the reason."""
        for session in self._unexplained:
            if session.code != but:
                self._relay.say(
                    f"node {session.node} ({session.name}): its agent has ended with exit code {session.code}"
                )
        self._unexplained.clear()

    def _detached_code(self) -> int:
        missing = [session.name for session in self._every.all if session.node not in self._detached]
        if not missing:
            return ExitCode.DONE
        self._relay.say(f"the agent on {', '.join(missing)} has not said that it goes on by itself")
        return ExitCode.FAILED


@dataclass
class _Lost:
    session: HostSession
    since_seconds: float
    pause_seconds: float = FIRST_PAUSE_SECONDS
    due_seconds: float = 0.0
    tries: bool = False  # its session is one of ours, and no agent has answered yet
    here_seconds: float = math.inf  # since when it has been back
    words: bytes = b""

    def wait(self) -> None:
        """Try it again after the pause; the next one is longer."""
        self.tries, self.here_seconds, self.words = False, math.inf, b""
        self.due_seconds = time.monotonic() + self.pause_seconds
        self.pause_seconds = min(LAST_PAUSE_SECONDS, self.pause_seconds * GROWTH)


class Reconnector:
    """Tries the lost hosts of a run again, with growing pauses. One that answers gets a new agent, which asks to join.

    `greet` sends an agent its plan, `say` is for people.
    """

    def __init__(self, every: Sessions, greet: Callable[[HostSession], object], say: Callable[[str], object]) -> None:
        self._every, self._greet, self._say = every, greet, say
        self._lost: dict[int, _Lost] = {}  # by node; also those that are back
        self._returned: set[int] = set()
        self._over = False

    def lost(self, session: HostSession, *, for_good: bool) -> None:
        """The agent of this host has ended; `for_good`: it may not come back."""
        if for_good or self._over:
            self._lost.pop(session.node, None)
            return
        now = time.monotonic()
        one = self._lost.get(session.node)
        if one is None or now > one.here_seconds + STEADY_SECONDS:
            one = self._lost[session.node] = _Lost(session, now)
            self._say(f"node {session.node} ({session.name}) is tried again; it comes back in when it answers")
        one.session, one.since_seconds = session, now
        one.wait()

    def has_returned(self, session: HostSession) -> bool:
        """Whether the agent of this session was not one of the first: the run does without it."""
        return session.node in self._returned

    def try_again(self) -> float:
        """Start the sessions that are due; the seconds until the next one is."""
        now = time.monotonic()
        waiting = [one for one in self._lost.values() if not one.tries and one.here_seconds == math.inf]
        for one in waiting:
            if now < one.due_seconds:
                continue
            if now > one.since_seconds + GIVE_UP_SECONDS:
                self._give_up(one, f"it has not answered for {GIVE_UP_SECONDS / 3600:.0f} hours")
                continue
            one.session, one.tries = self._every.again(one.session), True
        return max(0.0, min((one.due_seconds - now for one in waiting if not one.tries), default=math.inf))

    def heard(self, piece: Output) -> bool:
        """Whether this comes from a session in which no agent has answered yet; if it now has, it is greeted."""
        one = self._lost.get(piece.session.node)
        if one is None or not one.tries:
            return False
        if piece.descriptor == 1:
            one.words += piece.data
        found = announced(piece.session.name, one.words)
        if isinstance(found, str):
            self._give_up(one, found)
        elif found is not None:
            one.tries, one.here_seconds = False, time.monotonic()
            self._returned.add(piece.session.node)
            self._say(f"node {piece.session.node} ({piece.session.name}) answers again")
            self._greet(piece.session)
        return True

    def failed(self, session: HostSession) -> bool:
        """Whether this session that has ended never had an agent; it is tried again."""
        one = self._lost.get(session.node)
        if one is None or not one.tries:
            return False
        one.wait()
        return True

    def _give_up(self, one: _Lost, why: str) -> None:
        self._say(f"node {one.session.node} ({one.session.name}) is given up: {why}")
        del self._lost[one.session.node]
        one.session.send_signal(signal.SIGTERM)

    def stop(self) -> None:
        """The run ends: try no host any more."""
        self._over = True
        for one in self._lost.values():
            if one.tries:
                one.session.send_signal(signal.SIGTERM)
        self._lost.clear()
