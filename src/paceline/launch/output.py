"""Relay the output of ranks and hosts to logs and terminals: in complete lines, without control characters.

A progress bar (of tqdm, for example) redraws its line about ten times a second. A log gets the state of the bar every
ten seconds, and its last state. A terminal shows one redrawn line for all ranks.

The output of node 0 stays unchanged. Lines of the other nodes begin with the host, and equal lines of several hosts
appear once: `[n2-n4] out of memory`.
"""

import math
import os
import re
import select
import stat
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import IO, NamedTuple

from paceline.runs.console import (
    ControlSequenceFilter,
    join_ranges,
    remove_control_characters,
    resolve_carriage_returns,
    strip_control_sequences,
)
from paceline.runs.owners import open_file

MAX_LINE_BYTES = 1 << 16  # a longer line is split
BAR_LOG_SECONDS = 10.0  # between two states of a bar in a log
REDRAW_SECONDS = 0.1
# after this time without a new state, the bar of a different rank may use the terminal line
BAR_OWNER_TIMEOUT_SECONDS = 3.0
LINE_END = re.compile(rb"(\r?\n|\r)")
CURSOR_UP_PATTERN = re.compile(rb"\x1b\[[0-9]*A")  # cursor up: the text is one of several bars, and will be redrawn
OUTPUT_LOCK = threading.Lock()  # keeps the lines of two workers apart
CLEAR_LINE = b"\x1b[K"  # erases the terminal line from the cursor to its end


class LineOrBar(NamedTuple):
    text: bytes
    is_bar: bool = False


class LineSplitter:
    """Splits the output of a pipe into lines, and keeps one state of a progress bar every ten seconds."""

    def __init__(self) -> None:
        self._rest, self._drawn, self._last_state = b"", b"", b""
        self._redraws = False  # the rest follows a \\r: it is the newest state of a bar
        self._due_seconds: float | None = None

    @property
    def bar_state(self) -> bytes:
        """The present state of a bar; empty if there is no bar."""
        return self._rest if self._redraws and self._rest.strip() else self._drawn

    @property
    def wait_seconds(self) -> float | None:
        """The time to wait for more output before calling `take_due_bar`; None: no limit."""
        if self._due_seconds is None or self.bar_state in (b"", self._last_state):
            return None
        return max(0.0, self._due_seconds - time.monotonic())

    def feed(self, data: bytes) -> list[LineOrBar]:
        """Add output; return the lines that are now complete, and the state of a bar if it is due."""
        parts: list[LineOrBar] = []
        *pieces, self._rest = LINE_END.split(self._rest + data)
        for text, line_end in zip(pieces[::2], pieces[1::2], strict=True):
            self._redraws = line_end == b"\r"
            visible = CURSOR_UP_PATTERN.sub(b"", text)
            if self._redraws or visible != text:
                if visible:  # only blanks: the bar erases itself
                    self._drawn = visible if visible.strip() else b""
                continue
            parts.append(LineOrBar((text or self._drawn) + line_end))
            self._drawn = b""
        if len(self._rest) > MAX_LINE_BYTES:
            parts.append(LineOrBar(self._rest))
            self._rest = b""
        return parts + self.take_due_bar()

    def take_due_bar(self) -> list[LineOrBar]:
        state = self.bar_state
        if not state or state == self._last_state:
            return []
        now = time.monotonic()
        if self._due_seconds is None:
            self._due_seconds = now + BAR_LOG_SECONDS
        if now < self._due_seconds:
            return []
        self._due_seconds, self._last_state, self._drawn = now + BAR_LOG_SECONDS, state, b""
        return [LineOrBar(state + b"\n", is_bar=True)]

    def end(self) -> list[LineOrBar]:
        state = self.bar_state
        if self._rest and not self._redraws:
            return [LineOrBar(self._rest)]
        return [LineOrBar(state + b"\n")] if state and state != self._last_state else []


@dataclass
class _Bar:
    """The terminal line for a progress bar. It shows the bar of the rank that draws first."""

    owner: bytes = b""
    seconds: float = 0.0
    shown: bool = False

    def draw(self, screen: int, prefix: bytes, state: bytes) -> None:
        """Draw the state of a rank, and return to the beginning of the line, so that the next output replaces it."""
        now = time.monotonic()
        is_owner = self.owner == prefix
        if now - self.seconds < (REDRAW_SECONDS if is_owner else BAR_OWNER_TIMEOUT_SECONDS):
            return
        with suppress(OSError):
            width = (os.get_terminal_size(screen).columns or 80) - 1
            text = remove_control_characters((prefix + state).decode(errors="replace"))[:width]
            _put(screen, text.encode(errors="replace") + CLEAR_LINE + b"\r")
            self.owner, self.seconds, self.shown = prefix, now, True

    def erase(self) -> bytes:
        erasure, self.shown = CLEAR_LINE if self.shown else b"", False
        return erasure


_BAR = _Bar()


def start_output_relay(source: IO[bytes], log: int, *, screen: int, prefix: bytes = b"") -> threading.Thread:
    """Relay the output of a worker's pipe until no process can write to it; then close `log`.

    `log` gets complete lines, since stdout and stderr may have the same log. `screen` gets every byte immediately,
    without terminal control sequences. With a `prefix`, or if it is a file, it gets complete lines that begin with the
    prefix.
    """
    thread = threading.Thread(target=_relay, args=(source, log, screen, prefix), daemon=True)
    thread.start()
    return thread


def _relay(source: IO[bytes], log: int, screen: int, prefix: bytes) -> None:
    lines, live_filter = LineSplitter(), ControlSequenceFilter()
    is_live = not prefix and not stat.S_ISREG(os.fstat(screen).st_mode)
    redrawn = bool(prefix) and os.isatty(screen)
    pass_on = partial(_pass_on, log=log, screen=-1 if is_live else screen, prefix=prefix, redrawn=redrawn)
    with source:
        ready = select.poll()
        ready.register(source, select.POLLIN)
        while True:
            wait_seconds = lines.wait_seconds
            if not ready.poll(None if wait_seconds is None else wait_seconds * 1000 + 1):
                pass_on(lines.take_due_bar())
                continue
            if not (data := os.read(source.fileno(), 65536)):
                break
            if is_live:
                with OUTPUT_LOCK:
                    _put(screen, live_filter.filter_bytes(data))
            pass_on(lines.feed(data))
            if redrawn and lines.bar_state:
                with OUTPUT_LOCK:
                    _BAR.draw(screen, prefix, lines.bar_state)
    pass_on(lines.end())
    if redrawn and _BAR.owner == prefix:
        with OUTPUT_LOCK:
            _put(screen, _BAR.erase())
    os.close(log)


def _pass_on(pieces: Sequence[LineOrBar], *, log: int, screen: int, prefix: bytes, redrawn: bool) -> None:
    with OUTPUT_LOCK:
        _put(log, b"".join(piece.text for piece in pieces))
    lines = [piece.text.rstrip(b"\r\n") for piece in pieces if not (redrawn and piece.is_bar)]
    if prefix:  # an empty line with a prefix would not separate paragraphs
        lines = [line for line in lines if strip_control_sequences(line).strip()]
    if lines and screen >= 0:
        data = strip_control_sequences(b"".join(prefix + line + b"\n" for line in lines))
        with OUTPUT_LOCK:
            _put(screen, (_BAR.erase() if redrawn else b"") + data)


def _put(descriptor: int, data: bytes) -> None:
    with suppress(OSError):  # the terminal is gone or the disk is full: this must not affect the worker
        while data:
            data = data[os.write(descriptor, data) :]


# ---- output of several hosts ----

MERGE_WAIT_SECONDS = 0.3  # how long a line waits for the same line of other hosts
HALF_LINE_SECONDS = 1.0  # how long other lines wait until node 0 completes its line
MAX_HOST_LINE_BYTES = 8192
MAX_WAITING_LINES = 200
MAX_UNWRITTEN_BYTES = 1 << 20


class TerminalWriter:
    """stdout and stderr, written by a thread: a stopped terminal (Ctrl-S) or a pager can block a write forever."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[tuple[int, bytes] | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._unwritten_bytes = 0
        self._thread = threading.Thread(target=self._write, daemon=True)
        self._thread.start()

    def put(self, descriptor: int, data: bytes) -> None:
        with self._lock:
            self._unwritten_bytes += len(data)
        self._queue.put((descriptor, data))

    @property
    def full(self) -> bool:
        """Whether the caller should read no more output until some of it is written."""
        return self._unwritten_bytes > MAX_UNWRITTEN_BYTES

    def close(self) -> None:
        self._queue.put(None)

    def wait_closed(self, seconds: float) -> bool:
        """Wait up to `seconds`; return whether the thread has written all data."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _write(self) -> None:
        while (item := self._queue.get()) is not None:
            descriptor, data = item
            _put(descriptor, data)
            with self._lock:
                self._unwritten_bytes -= len(data)


@dataclass
class _Line:
    descriptor: int
    text: str
    nodes: list[int]
    due_seconds: float


class MultiNodeRelay:
    def __init__(self, names: Sequence[str], screen: TerminalWriter) -> None:
        self._names, self._screen = names, screen
        self._unfinished: dict[tuple[int, int], bytes] = {}  # (node, descriptor) -> the beginning of a line
        self._waiting: list[_Line] = []
        self._node_0 = {1: ControlSequenceFilter(), 2: ControlSequenceFilter()}
        self._half_since: dict[int, float] = {}  # descriptor -> time since which the line of node 0 is incomplete

    def put(self, node: int, descriptor: int, data: bytes) -> None:
        if node == 0:
            self._screen.put(descriptor, self._node_0[descriptor].filter_bytes(data))
            self._half_since.pop(descriptor, None)
            if not data.endswith(b"\n"):
                self._half_since[descriptor] = time.monotonic()
            return
        *lines, rest = (self._unfinished.pop((node, descriptor), b"") + data).split(b"\n")
        if len(rest) > MAX_HOST_LINE_BYTES:
            lines, rest = [*lines, rest], b""
        if rest:
            self._unfinished[node, descriptor] = rest
        for line in lines:
            for start in range(0, max(1, len(line)), MAX_HOST_LINE_BYTES):
                self._add(node, descriptor, sanitize_line(line[start : start + MAX_HOST_LINE_BYTES]))

    def say(self, text: str) -> None:
        """Show a line of the launcher, after all earlier output."""
        self._show(math.inf)
        for descriptor in self._half_since:
            self._screen.put(descriptor, b"\n")
        self._half_since.clear()
        self._screen.put(2, strip_control_sequences(f"{text}\n".encode(errors="replace")))

    def show_due_lines(self) -> float:
        """Show lines that have waited long enough; return the seconds until the next line is due."""
        now = time.monotonic()
        self._show(now)
        if not self._waiting:
            return math.inf
        first = self._waiting[0]
        return max(0.0, first.due_seconds - now, self._held_until(first.descriptor) - now)

    def flush_all(self) -> None:
        self._show(math.inf)

    def end_node(self, node: int) -> None:
        for descriptor in (1, 2):
            if rest := self._unfinished.pop((node, descriptor), b""):
                self._add(node, descriptor, sanitize_line(rest))

    def _add(self, node: int, descriptor: int, text: str) -> None:
        for line in reversed(self._waiting):
            if node in line.nodes:
                break  # keep the order of the lines of a node
            if (line.descriptor, line.text) == (descriptor, text):
                line.nodes.append(node)
                return
        self._waiting.append(_Line(descriptor, text, [node], time.monotonic() + MERGE_WAIT_SECONDS))
        while len(self._waiting) > MAX_WAITING_LINES:
            self._write(self._waiting.pop(0))

    def _show(self, now: float) -> None:
        while self._waiting:
            line = self._waiting[0]
            if now < max(line.due_seconds, self._held_until(line.descriptor)):
                return
            self._write(self._waiting.pop(0))

    def _held_until(self, descriptor: int) -> float:
        return self._half_since.get(descriptor, -math.inf) + HALF_LINE_SECONDS

    def _write(self, line: _Line) -> None:
        if self._half_since.pop(line.descriptor, None) is not None:
            self._screen.put(line.descriptor, b"\n")
        names = join_ranges((self._names[node] for node in sorted(line.nodes)), ",")
        self._screen.put(line.descriptor, f"[{names}] {line.text}\n".encode(errors="replace"))


def sanitize_line(line: bytes) -> str:
    """The final state of a line, without characters that could move the cursor or hide text."""
    return remove_control_characters(resolve_carriage_returns(line.decode(errors="replace")))


# ---- files ----

MAX_READ_BYTES = 1 << 20  # of one read
BLOCK_BYTES = 1 << 16
MAX_SEARCHED_BYTES = 4 << 20  # the last lines are searched in this part of the file
FILE_BAR_SECONDS = 10.0  # between two states of an unfinished bar


class LogFollower:
    """Reads new text from a file that grows, or does not exist yet."""

    def __init__(self, path: Path, offset_bytes: int = 0) -> None:
        self.path = path
        self._offset, self._rest = offset_bytes, b""
        self._bar_seconds = time.monotonic() + FILE_BAR_SECONDS

    def read(self, *, to_the_end: bool = False) -> str:
        """New text, up to the last complete line. With `to_the_end`, also the incomplete line."""
        text = self._read()
        while to_the_end and (new_text := self._read()):
            text += new_text
        if to_the_end and self._rest:
            text += sanitize_line(self._rest) + "\n"
            self._rest = b""
        return text

    def _read(self) -> str:
        try:
            with open_file(self.path) as file:
                data = os.pread(file.descriptor, MAX_READ_BYTES, self._offset)
        except OSError:  # does not exist yet
            return ""
        self._offset += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        bar_due = b"\r" in self._rest and time.monotonic() >= self._bar_seconds
        if bar_due or len(self._rest) > MAX_LINE_BYTES:
            lines, self._rest = [*lines, self._rest], b""
            self._bar_seconds = time.monotonic() + FILE_BAR_SECONDS
        return "".join(f"{sanitize_line(line)}\n" for line in lines)


class LogLine(NamedTuple):
    end_offset: int
    text: str


def read_lines(path: Path, start: int = 0, end: int | None = None) -> Iterator[LogLine]:
    """The lines in the bytes from `start` to `end` (default: the present size) of a file. A long line is split."""
    rest, at = b"", start
    with open_file(path) as file:
        end = file.status.st_size if end is None else end
        while at < end and (data := os.pread(file.descriptor, min(BLOCK_BYTES, end - at), at)):
            line_end = at - len(rest)
            at += len(data)
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                line_end += len(line) + 1
                yield LogLine(line_end - 1, sanitize_line(line))
            if len(rest) > MAX_LINE_BYTES:  # keep the last state of an unfinished bar: more of it may follow
                if b"\r" not in rest:
                    yield LogLine(at - 1, sanitize_line(rest))
                rest = rest[rest.rfind(b"\r") + 1 :] if b"\r" in rest[:-1] else b""
    if rest:
        yield LogLine(at - 1, sanitize_line(rest))


def last_lines_range(path: Path, count: int) -> tuple[int, int]:
    """The offset of the last `count` lines of a file, of those in its last 4 MiB, and the size of the file in bytes."""
    with open_file(path) as file:
        end = file.status.st_size
        max_size, size = min(end, MAX_SEARCHED_BYTES), min(end, BLOCK_BYTES)
        while True:  # read from the end: a log may be larger than memory
            data = os.pread(file.descriptor, size, end - size)
            start = len(data) if data.endswith(b"\n") or not data else len(data) + 1
            for _ in range(count):
                start = data.rfind(b"\n", 0, max(0, start - 1)) + 1
                if not start:
                    break
            if start or size == max_size:
                return end - size + min(start, len(data)), end
            size = min(max_size, 4 * size)
