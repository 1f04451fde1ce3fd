"""Waits for the agents of all hosts at once, and names every host that is not fit, with its reason."""

import re
import shlex
import signal
import time
from collections.abc import Sequence

import msgspec

from paceline.errors import UsageError, first_few
from paceline.host.facts import Facts
from paceline.launch.relay import cleaned
from paceline.launch.ssh.sessions import Sessions
from paceline.runs.console import MAX_NAMES, say

FIRST_WORD_SECONDS = 12.0  # ssh itself gives up after 10 s where nothing answers, and says why
NEXT_WORD_SECONDS = 30.0
MAX_GREETING_BYTES = 1 << 16  # of a login profile that writes to stdout, and of the announcement
MAX_QUOTE_CHARS = 80
SSH_FAILED = 255  # of ssh's own failures; else its exit code is that of the remote command
MAX_REASON_CHARS = 200

# What ssh prints -> what is true, and what to do; {ssh} is the user's ssh command with the host, {host} its name.
# The first that is found counts.
_SSH_WORDS = (
    (
        r"REMOTE HOST IDENTIFICATION HAS CHANGED|Host key for \S+ has changed",
        "its host key is not the one that is known. Another machine may answer in its place: ask its administrator for "
        "the key's fingerprint. If the machine was reinstalled, `ssh-keygen -R {host}`, then log in once: `{ssh}`",
    ),
    (
        r"Host key verification failed|No \S+ host key is known",
        "its host key is not known here yet. Log in once and compare the fingerprint: `{ssh}`; for many hosts, "
        "`ssh-keyscan {host}` prints what belongs into known_hosts",
    ),
    (
        r"Permission denied|Too many authentication failures|Authentication failed",
        "it wants a password or a key that is not there, and nobody can be asked. `{ssh} true` must work without a "
        "question: `ssh-copy-id` brings your key to it, `ssh-add` opens one that has a passphrase",
    ),
    (
        r"Could not resolve hostname",
        "no machine of that name is known. Is it spelt right, and is it in /etc/hosts, DNS or your ssh configuration?",
    ),
    (
        r"Connection refused",
        "nothing listens at its ssh port. Is sshd running there, and is it another port (name:port)?",
    ),
    (
        r"No route to host|Network is unreachable",
        "there is no way to it: it is off, not in this network, or a firewall rejects the connection",
    ),
    (
        r"timed out|Timeout",
        "it does not answer: it is off, or a firewall drops the connection",
    ),
    (
        r"Connection (closed|reset)|kex_exchange_identification|Connection aborted",
        "its sshd has ended the connection. It may allow only certain users or machines, or fewer logins at once "
        "(MaxStartups); its log says which",
    ),
    (r"Bad configuration option|Bad owner or permissions|unknown option|usage: ssh", "ssh does not take its settings"),
)
_LOST = re.compile(
    r"(Timeout, server .*|.*Connection to .* (?:closed|timed out).*|.*client_loop: .*|.*Connection reset.*|"
    r".*Broken pipe.*|.*Read from remote host.*|.*packet_write_wait.*)"
)


def await_agents(every: Sessions, *, seconds: float) -> list[Facts] | signal.Signals:
    """Wait until the agents of all hosts have announced themselves, and say who is missing; `seconds` at most.

    Returns:
        What each says of its host, in the order of the hosts; or the stop signal that came first.
    """
    begun = time.monotonic()
    deadline, next_word = begun + seconds, begun + FIRST_WORD_SECONDS
    heard = {session.node: b"" for session in every.all}
    found: dict[int, Facts | str] = {}  # or why there are none
    while len(found) < len(every.all) and (left := deadline - time.monotonic()) > 0:
        pieces, signals = every.wait(max(0.0, min(left, next_word - time.monotonic())))
        if signals:
            return signals[0]
        if time.monotonic() >= next_word:
            next_word += NEXT_WORD_SECONDS
            silent = first_few([session.name for session in every.all if session.node not in found], MAX_NAMES)
            say(f"after {time.monotonic() - begun:.0f} s no agent has answered on {silent}: a slow disk?")
        ended, last_words = every.reap()
        for piece in (*pieces, *last_words):
            node = piece.session.node
            if piece.descriptor == 1 and node not in found:
                heard[node] += piece.data
                if (told := announced(piece.session.name, heard[node])) is not None:
                    found[node] = told
        for session in ended:
            if not isinstance(found.get(session.node), str):  # also where it has announced itself, and ended
                found[session.node] = why_no_agent(session.command.argv, session.code, session.words)
    for session in every.all:
        if session.node not in found:
            found[session.node] = why_no_agent(session.command.argv, None, session.words)
    if wrong := {node: why for node, why in found.items() if isinstance(why, str)}:
        told = [f"{session.name}: {wrong[session.node]}" for session in every.all if session.node in wrong]
        raise UsageError(code="hosts-unusable", count=len(wrong), hosts=len(every.all), reasons="\n  ".join(told))
    return [facts for session in every.all if not isinstance(facts := found[session.node], str)]


def announced(name: str, heard: bytes) -> Facts | str | None:
    """The agent's facts in what the host of this `name` has written; why they never will be there; None: not yet.

    A login profile's words may come before.
    """
    *lines, _ = heard.split(b"\n")
    for number, line in enumerate(lines):
        if not line.startswith(b"{") or b'"host"' not in line:
            continue
        try:
            facts = msgspec.json.decode(line, type=Facts)
        except msgspec.MsgspecError as error:
            return f"its agent speaks otherwise than ours ({error}). Install the same version of paceline"
        if number:
            say(
                f"{name}: its login profile writes to stdout ({_quote(lines[0])}), which was skipped; it "
                "should only do so in interactive shells"
            )
        return facts
    if len(heard) > MAX_GREETING_BYTES:
        return (
            f"its login profile has written more than {MAX_GREETING_BYTES} bytes to stdout "
            f"({_quote(heard)}...); it should be silent in shells that are not interactive"
        )
    return None


def _quote(line: bytes) -> str:
    return repr(cleaned(line)[:MAX_QUOTE_CHARS])


def why_no_agent(argv: Sequence[str], code: int | None, words: bytes) -> str:
    """Why a session has not brought an agent, and what to do, by its stderr.

    `argv` is the user's ssh command, our options from `-T` on, `--`, the host, a command; `code` its exit code, None
    when it still ran at the end of our patience.
    """
    text = "\n".join(cleaned(line) for line in words.split(b"\n"))
    said = [line.strip() for line in text.split("\n") if line.strip()]
    quote = f" ({said[-1][:MAX_REASON_CHARS]})" if said else ""
    if code is None:
        return (
            f"no agent has answered in time{quote}. Does `{_by_hand(argv)} true` end at once? Its login profile may "
            "wait for something, or its disk be slow"
        )
    if code == SSH_FAILED:
        for pattern, sentence in _SSH_WORDS:
            if found := re.search(f".*(?:{pattern}).*", text):
                told = sentence.format(ssh=_by_hand(argv), host=argv[-2] if len(argv) > 1 else "")
                return f"{told} (ssh: {found[0].strip().removeprefix('ssh: ')[:MAX_REASON_CHARS]})"
        return f"ssh has failed{quote or ' without a word'}. Try `{_by_hand(argv)} true`"
    python = next(iter(shlex.split(argv[-1].removeprefix("exec "))), "python")
    if "No module named" in text and "paceline" in text:
        return (
            f"paceline is not installed for {python} there{quote}. Install the same version, or name a Python that has "
            "it (--python)"
        )
    if code in (126, 127) or "not found" in text or "No such file" in text:
        return f"there is no Python at {python}{quote}. Name the one on the hosts with --python"
    return f"the agent has ended with exit code {code} before it could answer{quote}"


def why_lost(code: int, words: bytes) -> str:
    """Why a session is lost that had an agent."""
    if code < 0:
        return f"the ssh client here was killed by signal {-code}"
    found = _LOST.findall("\n".join(cleaned(line) for line in words.split(b"\n")))
    if not found:
        return "ssh has said nothing; was it ended there?"
    return f"ssh: {found[-1].strip().removeprefix('ssh: ')[:MAX_REASON_CHARS]}"


def _by_hand(argv: Sequence[str]) -> str:
    """What a person types to try the same connection."""
    own = argv[: argv.index("-T")] if "-T" in argv else argv[:1]
    port = argv[argv.index("-p", len(own)) :][:2] if "-p" in argv[len(own) :] else ()
    host = argv[-2:-1] if "--" in argv else ()
    return shlex.join([*own, *port, *host])
