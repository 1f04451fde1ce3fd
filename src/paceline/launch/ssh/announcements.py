"""Waits for the agents of all hosts at once, and names every host that is not fit, with its reason."""

from __future__ import annotations

import signal
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

import msgspec

from paceline.errors import UsageError
from paceline.launch.relay import cleaned
from paceline.launch.ssh.refusal import why_no_agent
from paceline.launch.ssh.sessions import HostSession, Sessions
from paceline.observe.terminal import say

if TYPE_CHECKING:
    from paceline.host.facts import Facts

FIRST_WORD_SECONDS = 12.0  # ssh itself gives up after 10 s where nothing answers, and says why
NEXT_WORD_SECONDS = 30.0
MAX_GREETING_BYTES = 1 << 16  # of a login profile that writes to stdout, and of the announcement
MAX_QUOTE_CHARS = 80


def await_agents(every: Sessions, *, seconds: float) -> list[Facts] | signal.Signals:
    """Wait until the agents of all hosts have announced themselves, and say who is missing; `seconds` at most.

    Returns:
        What each says of its host, in the order of the hosts; or the stop signal that came first.
    """
    begun = time.monotonic()
    deadline, next_word = begun + seconds, begun + FIRST_WORD_SECONDS
    heard = {session.node: b"" for session in every.all}
    facts: dict[int, Facts] = {}
    wrong: dict[int, str] = {}
    while len(facts) + len(wrong) < len(every.all) and (left := deadline - time.monotonic()) > 0:
        pieces, signals = every.wait(max(0.0, min(left, next_word - time.monotonic())))
        if signals:
            return signals[0]
        if time.monotonic() >= next_word:
            next_word += NEXT_WORD_SECONDS
            silent = [s.name for s in every.all if s.node not in facts and s.node not in wrong]
            say(f"after {time.monotonic() - begun:.0f} s no agent has answered on {', '.join(silent)}: a slow disk?")
        ended, last_words = every.reap()
        for piece in (*pieces, *last_words):
            node = piece.session.node
            if piece.descriptor == 1 and node not in facts and node not in wrong:
                heard[node] += piece.data
                _listen(piece.session, heard, facts, wrong)
        for session in ended:
            facts.pop(session.node, None)  # it has announced itself, and ended
            wrong.setdefault(session.node, why_no_agent(session.command.argv, session.code, session.words))
    for session in every.all:
        if session.node not in facts and session.node not in wrong:
            wrong[session.node] = why_no_agent(session.command.argv, None, session.words)
    if wrong:
        raise UsageError(_refused(every, wrong))
    return [facts[session.node] for session in every.all]


def _listen(session: HostSession, heard: dict[int, bytes], facts: dict[int, Facts], wrong: dict[int, str]) -> None:
    """Look for the announcement in what a host has written, which may begin with a login profile's words."""
    from paceline.host.facts import Facts  # only here: agents import this file too, and would wait for psutil

    *lines, _ = heard[session.node].split(b"\n")
    for number, line in enumerate(lines):
        if not line.startswith(b"{") or b'"host"' not in line:
            continue
        try:
            facts[session.node] = msgspec.json.decode(line, type=Facts)
        except msgspec.MsgspecError as error:
            wrong[session.node] = (
                f"its agent speaks otherwise than ours ({error}). Install the same version of paceline"
            )
            return
        if number:
            say(
                f"{session.name}: its login profile writes to stdout ({_quote(lines[0])}), which was skipped; it "
                "should only do so in interactive shells"
            )
        return
    if len(heard[session.node]) > MAX_GREETING_BYTES:
        wrong[session.node] = (
            f"its login profile has written more than {MAX_GREETING_BYTES} bytes to stdout "
            f"({_quote(heard[session.node])}...); it should be silent in shells that are not interactive"
        )


def _quote(line: bytes) -> str:
    return repr(cleaned(line)[:MAX_QUOTE_CHARS])


def _refused(every: Sessions, wrong: Mapping[int, str]) -> str:
    hosts = f"{len(wrong)} of {len(every.all)} hosts" if len(every.all) > 1 else "the host"
    told = [f"{session.name}: {wrong[session.node]}" for session in every.all if session.node in wrong]
    return "\n  ".join([f"{hosts} cannot be used, so nothing was started:", *told])
