"""Tries lost hosts of a run again, with growing pauses; one that answers gets a new agent, which asks to come in."""

import math
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

from paceline.launch.ssh.announcements import announced
from paceline.launch.ssh.host_session import HostSession, Output
from paceline.launch.ssh.sessions import Sessions

FIRST_PAUSE_SECONDS, LAST_PAUSE_SECONDS, GROWTH = 2.0, 60.0, 1.5
GIVE_UP_SECONDS = 4 * 3600.0  # without an answer
STEADY_SECONDS = 60.0  # that a host has to stay, to be tried again at once when it is lost once more


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


class Returning:
    """Those hosts of one run; `greet` sends an agent its plan, `say` is for people."""

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
        """The run ends: nobody is tried any more."""
        self._over = True
        for one in self._lost.values():
            if one.tries:
                one.session.send_signal(signal.SIGTERM)
        self._lost.clear()
