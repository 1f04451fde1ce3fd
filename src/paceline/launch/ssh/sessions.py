"""The launcher's sessions with the hosts: each is an ssh client that forwards orders to the agent and ends with it.

`await_agents` waits for the agents of all hosts in parallel. It lists every unusable host with the reason.
"""

import math
import os
import re
import selectors
import shlex
import signal
import socket
import subprocess
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import IO, NamedTuple

import msgspec

from paceline.errors import UsageError, first_few
from paceline.host.facts import NodeFacts
from paceline.host.procfs import raise_open_file_limit
from paceline.launch.output import sanitize_line
from paceline.launch.plan import Command
from paceline.protocol.control import poll_readable, read_stop_signals
from paceline.runs.console import MAX_NAMES, print_to_stderr

# clients that log in at the same time: each login costs this machine about 50 ms of CPU time
MAX_CONCURRENT_LOGINS = 64
FILES, FILES_PER_SESSION = 256, 3
HEARTBEAT_SECONDS = 2.0  # between heartbeats; the agents allow NodePlan.silence_seconds without one
RESEND_SECONDS = 0.02  # between two tries to write to a client whose pipe is full
KEPT_STDERR_BYTES = 8192  # the end of each session's stderr, which contains the reason of a failure
READ_BYTES = 65536
LAST_OUTPUT_BYTES = 1 << 20  # limit of the output that is read after the end of a session


@dataclass
class HostSession:
    node: int
    command: Command
    process: subprocess.Popen[bytes] | None = None  # None: it has not been started yet
    answered: bool = False  # it has written to stdout, or has ended
    has_plan: bool = False  # the plan was sent: from now on the session gets heartbeats
    unsent: bytes = b""
    greeting: bytes = b""  # its stdout until the agent has announced itself
    stderr: bytes = b""  # the end of its stderr
    is_drained: bool = False  # it has ended, and its output was read to the end

    @property
    def name(self) -> str:
        return self.command.name

    @property
    def code(self) -> int:
        assert self.process is not None and self.process.returncode is not None
        return self.process.returncode

    @property
    def has_ended(self) -> bool:
        """Whether the client had ended at the last poll. The pipes may still contain output."""
        return self.process is not None and self.process.returncode is not None

    @property
    def stdin(self) -> IO[bytes] | None:
        stdin = self.process.stdin if self.process is not None else None
        return None if stdin is None or stdin.closed else stdin

    @property
    def output_pipes(self) -> list[tuple[int, IO[bytes]]]:
        pipes = ((1, self.process.stdout), (2, self.process.stderr)) if self.process is not None else ()
        return [(descriptor, pipe) for descriptor, pipe in pipes if pipe is not None and not pipe.closed]

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to the client and its helpers (e.g. the client for a jump host), if it still runs."""
        if self.process is not None and self.process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)


class OutputChunk(NamedTuple):
    session: HostSession
    descriptor: int
    data: bytes


class Sessions:
    def __init__(
        self, commands: Sequence[Command], wakeup: socket.socket, fan_out: int = MAX_CONCURRENT_LOGINS
    ) -> None:
        self.all = [HostSession(node, command) for node, command in enumerate(commands)]
        self._queue, self._fan_out = list(reversed(self.all)), fan_out
        self._wakeup = wakeup
        self._heartbeat_seconds = 0.0  # time of the last heartbeat
        self._selector = selectors.PollSelector()  # each pipe with its session and descriptor
        self._selector.register(wakeup, selectors.EVENT_READ)

    def start_more(self) -> None:
        """Start further sessions, up to the limit of concurrent logins. Raises UsageError if the program is missing."""
        logging_in = sum(s.process is not None and not s.answered for s in self.all) if self._queue else 0
        for _ in range(min(self._fan_out - logging_in, len(self._queue))):
            self._start(self._queue.pop())

    def _start(self, session: HostSession) -> None:
        command = session.command
        try:
            process = subprocess.Popen(
                command.argv,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,  # Ctrl-C must reach only this process, which forwards it to the agents
                bufsize=0,
            )
        except FileNotFoundError as error:
            raise UsageError(code="no-ssh", value=command.argv[0]) from error
        session.process = process
        assert process.stdin is not None
        os.set_blocking(process.stdin.fileno(), False)
        for descriptor, pipe in session.output_pipes:
            os.set_blocking(pipe.fileno(), False)
            self._selector.register(pipe, selectors.EVENT_READ, (session, descriptor, pipe))

    def send_line(self, session: HostSession, line: bytes) -> None:
        if session.process is None or session.stdin is not None:
            session.unsent += line + b"\n"
            self._send(session)

    def wait_for_output(self, seconds: float, *, read: bool = True) -> tuple[list[OutputChunk], list[signal.Signals]]:
        """Wait up to `seconds` for output, a stop signal or the end of a session; return output and signals.

        Without `read`, the output stays in the pipes. Unsent lines are sent in any case.
        """
        self.start_more()
        self._send_heartbeats()
        for session in self.all:
            self._send(session)
            seconds = min(seconds, RESEND_SECONDS) if session.unsent else seconds
        until_heartbeat = self._heartbeat_seconds + HEARTBEAT_SECONDS - time.monotonic()
        self._poll_processes()
        ending = any(session.has_ended and not session.is_drained for session in self.all)
        seconds = 0.0 if ending else max(0.0, min(seconds, until_heartbeat))
        pieces: list[OutputChunk] = []
        if read:
            for key, _ in self._selector.select(seconds):
                pieces += self._read(*key.data) if key.data else ()
        else:
            poll_readable([self._wakeup], seconds)
        return pieces, read_stop_signals(self._wakeup)

    def _poll_processes(self) -> None:
        """Poll all clients if any has ended. If none has, this costs a single system call."""
        with suppress(ChildProcessError):
            if os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                for session in self.all:
                    if session.process is not None:
                        session.process.poll()

    def reap(self) -> tuple[list[HostSession], list[OutputChunk]]:
        self._poll_processes()
        ended_sessions = [session for session in self.all if session.has_ended and not session.is_drained]
        pieces: list[OutputChunk] = []
        for session in ended_sessions:
            session.is_drained = session.answered = True
            for descriptor, pipe in session.output_pipes:
                size = 0
                while size < LAST_OUTPUT_BYTES and (new_pieces := self._read(session, descriptor, pipe)):
                    pieces += new_pieces
                    size += len(new_pieces[0].data)
                self._close(pipe)
            self._close_lifeline(session)
        return ended_sessions, pieces

    def reconnect(self, session: HostSession) -> HostSession:
        self.all[session.node] = new_session = HostSession(session.node, session.command)
        self._start(new_session)
        return new_session

    def close_lifelines(self) -> None:
        for session in self.all:
            self._close_lifeline(session)

    def kill(self) -> None:
        """Kill the clients with their helpers. Without a network, a client may not end otherwise."""
        for number, seconds in ((signal.SIGTERM, 0.5), (signal.SIGKILL, math.inf)):
            for session in self.all:
                session.send_signal(number)
            deadline = time.monotonic() + seconds
            for process in (session.process for session in self.all if session.process is not None):
                with suppress(subprocess.TimeoutExpired):
                    remaining = deadline - time.monotonic()
                    process.wait(None if remaining == math.inf else max(0.0, remaining))

    def close(self) -> None:
        self._queue.clear()
        self.close_lifelines()
        self.kill()
        for session in self.all:
            for _, pipe in session.output_pipes:
                self._close(pipe)
        self._selector.close()

    def _send_heartbeats(self) -> None:
        now = time.monotonic()
        if now < self._heartbeat_seconds + HEARTBEAT_SECONDS:
            return
        self._heartbeat_seconds = now
        for session in self.all:
            if session.has_plan and not session.unsent:
                self.send_line(session, b"")

    def _send(self, session: HostSession) -> None:
        stdin = session.stdin
        if not session.unsent or stdin is None:
            return
        try:
            session.unsent = session.unsent[os.write(stdin.fileno(), session.unsent) :]
        except BlockingIOError:
            pass
        except OSError:  # the client is ending; its exit code has the reason
            session.unsent = b""

    def _read(self, session: HostSession, descriptor: int, pipe: IO[bytes]) -> list[OutputChunk]:
        try:
            data = os.read(pipe.fileno(), READ_BYTES)
        except BlockingIOError:
            return []
        if not data:
            self._close(pipe)
            return []
        session.answered = session.answered or descriptor == 1
        if descriptor == 2:
            session.stderr = (session.stderr + data)[-KEPT_STDERR_BYTES:]
        return [OutputChunk(session, descriptor, data)]

    def _close(self, pipe: IO[bytes]) -> None:
        if not pipe.closed:
            self._selector.unregister(pipe)
            pipe.close()

    def _close_lifeline(self, session: HostSession) -> None:
        session.unsent = b""
        if session.stdin is not None:
            with suppress(OSError):
                session.stdin.close()


@contextmanager
def open_sessions(commands: Sequence[Command], wakeup: socket.socket) -> Generator[Sessions]:
    """Start the sessions, with at most MAX_CONCURRENT_LOGINS concurrent logins. All sessions end with the context."""
    raise_open_file_limit(FILES + FILES_PER_SESSION * len(commands))
    sessions = Sessions(commands, wakeup)
    try:
        sessions.start_more()
        yield sessions
    finally:
        sessions.close()


# ---- their agents, or why there are none ----

FIRST_MESSAGE_SECONDS = 12.0  # ssh itself gives up after 10 s without an answer, and prints the reason
NEXT_MESSAGE_SECONDS = 30.0
MAX_GREETING_BYTES = 1 << 16  # of the output of a login profile and of the announcement
MAX_QUOTE_CHARS = 80
SSH_FAILED_EXIT_CODE = 255  # exit code of ssh's failures; other codes are those of the remote command
MAX_REASON_CHARS = 200

# Output of ssh -> cause and remedy. {ssh} is the user's ssh command with the host, {host} the name of the host. The
# first match counts.
_SSH_ERRORS = (
    (
        r"REMOTE HOST IDENTIFICATION HAS CHANGED|Host key for \S+ has changed",
        "its host key has changed. Another machine may answer in its place: ask its administrator for the key's "
        "fingerprint. If the machine was reinstalled, run `ssh-keygen -R {host}`, then log in once: `{ssh}`",
    ),
    (
        r"Host key verification failed|No \S+ host key is known",
        "its host key is not known on this machine yet. Log in once and compare the fingerprint: `{ssh}`. For many "
        "hosts, `ssh-keyscan {host}` prints the lines for known_hosts",
    ),
    (
        r"Permission denied|Too many authentication failures|Authentication failed",
        "it requires a password or a missing key, and paceline cannot answer prompts. `{ssh} true` must work without a "
        "prompt: `ssh-copy-id` installs your key there, `ssh-add` unlocks a key that has a passphrase",
    ),
    (
        r"Could not resolve hostname",
        "its name cannot be resolved. Check the spelling, /etc/hosts, DNS and your ssh configuration",
    ),
    (r"Connection refused", "nothing listens at its ssh port. Check that sshd runs there, and its port (name:port)"),
    (
        r"No route to host|Network is unreachable",
        "there is no route to it: it is off, in a different network, or a firewall rejects the connection",
    ),
    (r"timed out|Timeout", "it does not answer: it is off, or a firewall drops the connection"),
    (
        r"Connection (closed|reset)|kex_exchange_identification|Connection aborted",
        "its sshd closed the connection. It may restrict users, machines or the number of concurrent logins "
        "(MaxStartups); the reason is in its log",
    ),
    (r"Bad configuration option|Bad owner or permissions|unknown option|usage: ssh", "ssh rejects its settings"),
)
_LOST = re.compile(
    r"(Timeout, server .*|.*Connection to .* (?:closed|timed out).*|.*client_loop: .*|.*Connection reset.*|"
    r".*Broken pipe.*|.*Read from remote host.*|.*packet_write_wait.*)"
)


def await_agents(sessions: Sessions, *, seconds: float) -> list[NodeFacts] | signal.Signals:
    """Wait up to `seconds` until the agents of all hosts have announced themselves. Report missing ones meanwhile.

    Returns the facts of each host, in the order of the hosts; or a stop signal, if one came first.
    """
    start = time.monotonic()
    deadline, next_message = start + seconds, start + FIRST_MESSAGE_SECONDS
    answers: dict[int, NodeFacts | str] = {}  # the facts, or why there are none
    while len(answers) < len(sessions.all) and (remaining := deadline - time.monotonic()) > 0:
        pieces, signals = sessions.wait_for_output(max(0.0, min(remaining, next_message - time.monotonic())))
        if signals:
            return signals[0]
        if time.monotonic() >= next_message:
            next_message += NEXT_MESSAGE_SECONDS
            silent = first_few([session.name for session in sessions.all if session.node not in answers], MAX_NAMES)
            waited = f"{time.monotonic() - start:.0f} s"
            print_to_stderr(f"no answer from the agent on {silent} after {waited}: a slow disk?")
        ended, last_pieces = sessions.reap()
        for piece in (*pieces, *last_pieces):
            node = piece.session.node
            if node not in answers and (answer := read_announcement(piece)) is not None:
                answers[node] = answer
        for session in ended:
            if not isinstance(answers.get(session.node), str):  # also if the agent ended after its announcement
                answers[session.node] = why_no_agent(session.command.argv, session.code, session.stderr)
    for session in sessions.all:
        if session.node not in answers:
            answers[session.node] = why_no_agent(session.command.argv, None, session.stderr)
    if reasons := {node: reason for node, reason in answers.items() if isinstance(reason, str)}:
        lines = [f"{session.name}: {reasons[session.node]}" for session in sessions.all if session.node in reasons]
        raise UsageError(code="hosts-unusable", count=len(reasons), hosts=len(sessions.all), reasons="\n  ".join(lines))
    return [facts for session in sessions.all if not isinstance(facts := answers[session.node], str)]


def read_announcement(piece: OutputChunk) -> NodeFacts | str | None:
    """The announcement of an agent in the output of its host; None: not yet complete; or why it can never come."""
    session = piece.session
    session.greeting += piece.data if piece.descriptor == 1 else b""
    *lines, _ = session.greeting.split(b"\n")
    found = next((line for line in lines if line.startswith(b"{") and b'"host"' in line), None)
    if found is None:
        if len(session.greeting) <= MAX_GREETING_BYTES:
            return None
        return (
            f"its login profile has written more than {MAX_GREETING_BYTES} bytes to stdout "
            f"({_quote(session.greeting)}...). It should write nothing in non-interactive shells"
        )
    try:
        facts = msgspec.json.decode(found, type=NodeFacts)
    except msgspec.MsgspecError as error:
        return f"its agent uses a different protocol ({error}). Install the same version of paceline"
    if found is not lines[0]:
        print_to_stderr(
            f"{session.name}: its login profile writes to stdout ({_quote(lines[0])}). paceline ignores this output; "
            "the profile should write only in interactive shells"
        )
    return facts


def _quote(line: bytes) -> str:
    return repr(sanitize_line(line)[:MAX_QUOTE_CHARS])


def why_no_agent(argv: Sequence[str], code: int | None, stderr: bytes) -> str:
    """Why a session has no agent, and the remedy. `code` is None if it still ran at the timeout."""
    text = "\n".join(sanitize_line(line) for line in stderr.split(b"\n"))
    lines = [line.strip() for line in text.split("\n") if line.strip()]
    quote = f" ({lines[-1][:MAX_REASON_CHARS]})" if lines else ""
    if code is None:
        return (
            f"no agent has answered in time{quote}. Check that `{_test_command(argv)} true` ends immediately: its "
            "login profile may wait for input, or its disk may be slow"
        )
    if code == SSH_FAILED_EXIT_CODE:
        for pattern, sentence in _SSH_ERRORS:
            if match := re.search(f".*(?:{pattern}).*", text):
                cause = sentence.format(ssh=_test_command(argv), host=argv[-2] if len(argv) > 1 else "")
                return f"{cause} (ssh: {match[0].strip().removeprefix('ssh: ')[:MAX_REASON_CHARS]})"
        return f"ssh has failed{quote or ' without a message'}. Try `{_test_command(argv)} true`"
    python = next(iter(shlex.split(argv[-1].removeprefix("exec "))), "python")
    if "No module named" in text and "paceline" in text:
        return (
            f"paceline is not installed for {python} there{quote}. Install the same version, or specify a Python that "
            "has it (--python)"
        )
    if code in (126, 127) or "not found" in text or "No such file" in text:
        return f"there is no Python at {python}{quote}. Specify the one on the nodes with --python"
    return f"the agent ended with exit code {code} before it answered{quote}"


def why_lost(code: int, stderr: bytes) -> str:
    if code < 0:
        return f"the ssh client on this machine was killed by signal {-code}"
    messages = _LOST.findall("\n".join(sanitize_line(line) for line in stderr.split(b"\n")))
    if not messages:
        return "ssh has printed no reason; its session may have been killed on the node"
    return f"ssh: {messages[-1].strip().removeprefix('ssh: ')[:MAX_REASON_CHARS]}"


def _test_command(argv: Sequence[str]) -> str:
    client = argv[: argv.index("-T")] if "-T" in argv else argv[:1]
    port = argv[argv.index("-p", len(client)) :][:2] if "-p" in argv[len(client) :] else ()
    host = argv[-2:-1] if "--" in argv else ()
    return shlex.join([*client, *port, *host])
