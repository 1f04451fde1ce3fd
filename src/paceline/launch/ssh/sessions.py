"""The launcher's session with each host: an ssh client that passes orders on, and ends when the agent there ends.

`await_agents` waits for the agents of all hosts at once, and names every host that cannot be used, with the reason.
"""

import math
import os
import re
import select
import shlex
import signal
import socket
import subprocess
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import IO

import msgspec

from paceline.errors import UsageError, first_few
from paceline.host.facts import Facts
from paceline.host.procfs import allow_files
from paceline.launch.output import cleaned
from paceline.launch.plan import Command
from paceline.protocol.control import read_inbox
from paceline.runs.console import MAX_NAMES, say

FAN_OUT = 64  # clients that log in at the same time: each costs this machine some 50 ms of a core until it is in
FILES, FILES_OF_ONE = 256, 3
BREATH_SECONDS = 2.0  # between signs of life; the agents allow NodePlan.silence_seconds of silence
KEPT_WORDS_BYTES = 8192  # of each session's stderr, which ends with why it failed
READ_BYTES = 65536
LAST_WORDS_BYTES = 1 << 20  # read at most that much after its end


@dataclass
class HostSession:
    """The ssh client of one host, and its state."""

    node: int
    command: Command
    process: subprocess.Popen[bytes] | None = None  # None: its turn has not come
    answered: bool = False  # something has come of it, or it has ended
    told: bool = False  # it has its plan: from now on it gets signs of life
    unsent: bytes = b""
    words: bytes = b""  # the end of what came on its stderr
    ended: bool = False  # and read to the end
    pipes: dict[IO[bytes], int] = field(default_factory=dict[IO[bytes], int])  # still open -> 1 (its stdout) or 2

    @property
    def name(self) -> str:
        """The host, for people."""
        return self.command.name

    @property
    def code(self) -> int:
        """Its exit code; only of one that has ended."""
        assert self.process is not None and self.process.returncode is not None
        return self.process.returncode

    @property
    def has_ended(self) -> bool:
        """Whether its client is gone, as far as was looked (`Sessions`); its last words may still be in the pipes."""
        return self.process is not None and self.process.returncode is not None

    @property
    def stdin(self) -> IO[bytes] | None:
        """Its lifeline, while it is open."""
        stdin = self.process.stdin if self.process is not None else None
        return None if stdin is None or stdin.closed else stdin

    def send_signal(self, number: signal.Signals) -> None:
        """To the client and its helpers (a jump host's client), if it still runs."""
        if self.process is not None and self.process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)


@dataclass(frozen=True)
class Output:
    """What came out of one session: from its stdout (1) or stderr (2)."""

    session: HostSession
    descriptor: int
    data: bytes


def start_session(session: HostSession) -> None:
    """Start its client.

    Raises:
        UsageError: when the program is missing.
    """
    command = session.command
    try:
        process = subprocess.Popen(
            command.argv,
            env={**os.environ, **command.env},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for us: we tell the agents
            bufsize=0,
        )
    except FileNotFoundError as error:
        raise UsageError(code="no-ssh", value=command.argv[0]) from error
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    for stream in (process.stdin, process.stdout, process.stderr):
        os.set_blocking(stream.fileno(), False)
    session.process, session.pipes = process, {process.stdout: 1, process.stderr: 2}


class Sessions:
    """The sessions of all hosts, node 0 first. At most FAN_OUT of them log in at the same time."""

    def __init__(self, commands: Sequence[Command], inbox: socket.socket, fan_out: int = FAN_OUT) -> None:
        self.all = [HostSession(node, command) for node, command in enumerate(commands)]
        self._queue, self._fan_out = list(reversed(self.all)), fan_out
        self._inbox = inbox
        self._breath_seconds = 0.0
        self._pipes: dict[int, tuple[HostSession, IO[bytes]]] = {}
        self._poll = select.poll()
        self._poll.register(inbox, select.POLLIN)

    def start_more(self) -> None:
        """Start those whose turn it is.

        Raises:
            UsageError: when the program is missing.
        """
        logging_in = sum(one.process is not None and not one.answered for one in self.all) if self._queue else 0
        for _ in range(min(self._fan_out - logging_in, len(self._queue))):
            self._begin(self._queue.pop())

    def _begin(self, session: HostSession) -> None:
        start_session(session)
        for pipe in session.pipes:
            self._pipes[pipe.fileno()] = session, pipe
            self._poll.register(pipe, select.POLLIN)

    def tell(self, session: HostSession, line: bytes) -> None:
        """Send a line; the rest is sent later if the pipe is full."""
        if session.process is None or session.stdin is not None:
            session.unsent += line + b"\n"
            self._send(session)

    def wait(self, seconds: float, *, read: bool = True) -> tuple[list[Output], list[signal.Signals]]:
        """Output and stop signals that come within `seconds`; returns earlier if there are any, or a session has ended.

        Without `read` the output stays in the pipes; lines are sent in any case.
        """
        self.start_more()
        self._breathe()
        poll = self._poll if read else select.poll()
        poll.register(self._inbox, select.POLLIN)
        full = [stdin for session in self.all if session.unsent and (stdin := session.stdin) is not None]
        for stdin in full:
            poll.register(stdin, select.POLLOUT)
        until_breath = self._breath_seconds + BREATH_SECONDS - time.monotonic()
        self._look_for_ends()
        ending = any(session.has_ended and not session.ended for session in self.all)
        ready = poll.poll(0 if ending else 1000 * max(0.0, min(seconds, until_breath)))
        signals = read_inbox(self._inbox)
        for stdin in full:
            poll.unregister(stdin)
        for session in self.all:
            self._send(session)
        readable = [self._pipes[fd] for fd, _ in ready if fd in self._pipes]
        return [piece for session, pipe in readable for piece in self._read(session, pipe)], signals

    def _look_for_ends(self) -> None:
        """Notice clients that have ended: with one question to the kernel if none has, and not one for each."""
        with suppress(ChildProcessError):
            if os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                for session in self.all:
                    if session.process is not None:
                        session.process.poll()

    def reap(self) -> tuple[list[HostSession], list[Output]]:
        """The sessions that have ended since the last call, and their last words."""
        self._look_for_ends()
        ended = [session for session in self.all if session.has_ended and not session.ended]
        pieces: list[Output] = []
        for session in ended:
            session.ended = session.answered = True
            for pipe in list(session.pipes):
                size = 0
                while size < LAST_WORDS_BYTES and (more := self._read(session, pipe)):
                    pieces += more
                    size += len(more[0].data)
                self._close(session, pipe)
            self._hang_up(session)
        return ended, pieces

    def again(self, session: HostSession) -> HostSession:
        """Another session to the host of one that has ended, in its place."""
        self.all[session.node] = new = HostSession(session.node, session.command)
        self._begin(new)
        return new

    def hang_up(self) -> None:
        """Close all lifelines: the agents end their workers."""
        for session in self.all:
            self._hang_up(session)

    def kill(self) -> None:
        """End the clients, with their helpers: a client without a network may not end."""
        for number, seconds in ((signal.SIGTERM, 0.5), (signal.SIGKILL, math.inf)):
            for session in self.all:
                session.send_signal(number)
            deadline = time.monotonic() + seconds
            for process in (session.process for session in self.all if session.process is not None):
                with suppress(subprocess.TimeoutExpired):
                    left = deadline - time.monotonic()
                    process.wait(None if left == math.inf else max(0.0, left))

    def close(self) -> None:
        """End all sessions, and close all pipes."""
        self._queue.clear()
        self.hang_up()
        self.kill()
        for session in self.all:
            for pipe in list(session.pipes):
                self._close(session, pipe)

    def _breathe(self) -> None:
        now = time.monotonic()
        if now < self._breath_seconds + BREATH_SECONDS:
            return
        self._breath_seconds = now
        for session in self.all:
            if session.told and not session.unsent:
                self.tell(session, b"")

    def _send(self, session: HostSession) -> None:
        stdin = session.stdin
        if not session.unsent or stdin is None:
            return
        try:
            session.unsent = session.unsent[os.write(stdin.fileno(), session.unsent) :]
        except BlockingIOError:
            return
        except OSError:  # it is ending; its exit code says why
            session.unsent = b""

    def _read(self, session: HostSession, pipe: IO[bytes]) -> list[Output]:
        try:
            data = os.read(pipe.fileno(), READ_BYTES)
        except BlockingIOError:
            return []
        except OSError:
            data = b""
        if not data:
            self._close(session, pipe)
            return []
        session.answered = session.answered or session.pipes[pipe] == 1
        if session.pipes[pipe] == 2:
            session.words = (session.words + data)[-KEPT_WORDS_BYTES:]
        return [Output(session, session.pipes[pipe], data)]

    def _close(self, session: HostSession, pipe: IO[bytes]) -> None:
        if session.pipes.pop(pipe, None) is None:
            return  # it was read to its end
        if self._pipes.pop(pipe.fileno(), None) is not None:
            self._poll.unregister(pipe)
        pipe.close()

    def _hang_up(self, session: HostSession) -> None:
        session.unsent = b""
        if session.stdin is not None:
            with suppress(OSError):
                session.stdin.close()


@contextmanager
def open_sessions(commands: Sequence[Command], inbox: socket.socket) -> Generator[Sessions]:
    """Start the sessions, at most FAN_OUT at once; none is left afterwards.

    Raises:
        UsageError: when the program is missing.
    """
    allow_files(FILES + FILES_OF_ONE * len(commands))
    every = Sessions(commands, inbox)
    try:
        every.start_more()
        yield every
    finally:
        every.close()


# ---- their agents, or why there are none ----

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
    """Why a session with an agent is lost."""
    if code < 0:
        return f"the ssh client here was killed by signal {-code}"
    found = _LOST.findall("\n".join(cleaned(line) for line in words.split(b"\n")))
    if not found:
        return "ssh has said nothing; was it ended there?"
    return f"ssh: {found[-1].strip().removeprefix('ssh: ')[:MAX_REASON_CHARS]}"


def _by_hand(argv: Sequence[str]) -> str:
    """A command to try the same connection."""
    own = argv[: argv.index("-T")] if "-T" in argv else argv[:1]
    port = argv[argv.index("-p", len(own)) :][:2] if "-p" in argv[len(own) :] else ()
    host = argv[-2:-1] if "--" in argv else ()
    return shlex.join([*own, *port, *host])
