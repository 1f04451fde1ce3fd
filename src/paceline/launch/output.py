"""Output of ranks and hosts on its way to logs and screens: whole lines, without control characters.

`relay_rank` passes the output of a rank to its log and to the agent's output. A progress bar (of tqdm, for example)
returns to the beginning of its line and draws over it, ten times a second. A log gets the state of the bar every ten
seconds, and the last one. A terminal shows it redrawn in one line, for all ranks.

`HostRelay` shows the output of several hosts: node 0's unchanged, the others' line by line. Their lines begin with the
host, and the same line of several hosts is shown once: `[n2-n4] out of memory`.

`Tail` and `lines_of` read what was written to a file.
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
from pathlib import Path
from queue import SimpleQueue
from typing import IO, NamedTuple

from paceline.runs.console import LiveFilter, clean, join_ranges, last_drawn, strip_controls
from paceline.runs.owners import open_file

MAX_LINE_BYTES = 1 << 16  # a longer line appears in pieces
THIN_SECONDS = 10.0  # between two states of a bar that are kept
REDRAW_SECONDS = 0.1
SILENT_SECONDS = 3.0  # a rank that has drawn nothing for so long leaves the line to another
LINE_END = re.compile(rb"(\r?\n|\r)")
MOVED_UP = re.compile(rb"\x1b\[[0-9]*A")  # the end of a bar below another one: it will be drawn over as well
LOCK = threading.Lock()  # lines of two workers must not mix
TO_THE_END = b"\x1b[K"  # of the terminal's line: wipes what was drawn there


class LinePart(NamedTuple):
    """A line with its end, or a state of a bar."""

    text: bytes
    drawn: bool = False


class Thinned:
    """Splits the output of a pipe into lines; of the states of a bar only one is kept every ten seconds."""

    def __init__(self) -> None:
        self._rest, self._drawn, self._told = b"", b"", b""
        self._redraws = False  # the rest was begun by a \\r: it is a bar's newest state
        self._due_seconds: float | None = None

    @property
    def state(self) -> bytes:
        """What a bar shows now; empty: there is none."""
        return self._rest if self._redraws and self._rest.strip() else self._drawn

    @property
    def wait_seconds(self) -> float | None:
        """How long to wait for more output before a call of `due`; None: without limit."""
        if self._due_seconds is None or self.state in (b"", self._told):
            return None
        return max(0.0, self._due_seconds - time.monotonic())

    def feed(self, data: bytes) -> list[LinePart]:
        """The lines that are whole by now, and a bar's state if one is due."""
        found: list[LinePart] = []
        *pieces, self._rest = LINE_END.split(self._rest + data)
        for text, end in zip(pieces[::2], pieces[1::2], strict=True):
            self._redraws = end == b"\r"
            shown = MOVED_UP.sub(b"", text)
            if self._redraws or shown != text:
                if shown:  # blanks: a bar that wipes itself out
                    self._drawn = shown if shown.strip() else b""
                continue
            found.append(LinePart((text or self._drawn) + end))
            self._drawn = b""
        if len(self._rest) > MAX_LINE_BYTES:
            found.append(LinePart(self._rest))
            self._rest = b""
        return found + self.due()

    def due(self) -> list[LinePart]:
        """A bar's state, if ten seconds have gone by since the last one, or since the first."""
        state = self.state
        if not state or state == self._told:
            return []
        now = time.monotonic()
        if self._due_seconds is None:
            self._due_seconds = now + THIN_SECONDS
        if now < self._due_seconds:
            return []
        self._due_seconds, self._told, self._drawn = now + THIN_SECONDS, state, b""
        return [LinePart(state + b"\n", drawn=True)]

    def end(self) -> list[LinePart]:
        """The rest when no more output comes: the last line may have no end, and a bar has a last state."""
        state = self.state
        if self._rest and not self._redraws:
            return [LinePart(self._rest)]
        return [LinePart(state + b"\n")] if state and state != self._told else []


@dataclass
class _Bar:
    """The one line of the terminal in which a bar is drawn; the first rank that draws has it."""

    owner: bytes = b""
    seconds: float = 0.0
    shown: bool = False

    def draw(self, screen: int, prefix: bytes, state: bytes) -> None:
        """Draw a rank's state, and return to the line's beginning, so that the next output replaces it."""
        now = time.monotonic()
        mine = self.owner == prefix
        if now - self.seconds < (REDRAW_SECONDS if mine else SILENT_SECONDS):
            return
        with suppress(OSError):
            text = clean((prefix + state).decode(errors="replace"))[: (os.get_terminal_size(screen).columns or 80) - 1]
            _put(screen, text.encode(errors="replace") + TO_THE_END + b"\r")
            self.owner, self.seconds, self.shown = prefix, now, True

    def wiped(self) -> bytes:
        """What goes before the next line."""
        before, self.shown = TO_THE_END if self.shown else b"", False
        return before


_BAR = _Bar()


def relay_rank(source: IO[bytes], log: int, *, screen: int, prefix: bytes = b"") -> threading.Thread:
    """Relay the output of a worker's pipe until no process can write to it any more; then close `log`.

    `log` gets whole lines, since stdout and stderr may go into one log. `screen` gets every byte at once, without those
    that would steer a terminal; with a `prefix`, or if it is a file, it gets whole lines that begin with the prefix.
    """
    thread = threading.Thread(target=_relay, args=(source, log, screen, prefix), daemon=True)
    thread.start()
    return thread


def _relay(source: IO[bytes], log: int, screen: int, prefix: bytes) -> None:
    lines, shown = Thinned(), LiveFilter()
    live = not prefix and not stat.S_ISREG(os.fstat(screen).st_mode)
    redrawn = bool(prefix) and os.isatty(screen)
    with source:
        ready = select.poll()
        ready.register(source, select.POLLIN)
        while True:
            wait = lines.wait_seconds
            if not ready.poll(None if wait is None else wait * 1000 + 1):
                _pass_on(lines.due(), log, -1 if live else screen, prefix, redrawn=redrawn)
                continue
            if not (data := os.read(source.fileno(), 65536)):
                break
            if live:
                _write(screen, shown.passed(data))
            _pass_on(lines.feed(data), log, -1 if live else screen, prefix, redrawn=redrawn)
            if redrawn and lines.state:
                with LOCK:
                    _BAR.draw(screen, prefix, lines.state)
    _pass_on(lines.end(), log, -1 if live else screen, prefix, redrawn=redrawn)
    if redrawn:
        with LOCK:
            _put(screen, _BAR.wiped() if _BAR.owner == prefix else b"")
    os.close(log)


def _pass_on(pieces: Sequence[LinePart], log: int, screen: int, prefix: bytes, *, redrawn: bool) -> None:
    if pieces:
        _write(log, b"".join(piece.text for piece in pieces))
    lines = [piece.text.rstrip(b"\r\n") for piece in pieces if not (redrawn and piece.drawn)]
    if prefix:  # beside a prefix an empty line separates nothing
        lines = [line for line in lines if strip_controls(line).strip()]
    if lines and screen >= 0:
        whole = strip_controls(b"".join(prefix + line + b"\n" for line in lines))
        with LOCK:
            _put(screen, (_BAR.wiped() if redrawn else b"") + whole)


def _write(target: int, data: bytes) -> None:
    with LOCK:
        _put(target, data)


def _put(target: int, data: bytes) -> None:
    with suppress(OSError):  # the terminal is gone or the disk is full: the worker must not feel it
        while data:
            data = data[os.write(target, data) :]


# ---- output of several hosts ----

FOLD_SECONDS = 0.3  # how long a line waits for the same one of other hosts
HALF_LINE_SECONDS = 1.0  # how long the others wait for the end of a line of node 0
MAX_HOST_LINE_BYTES = 8192
MAX_WAITING_LINES = 200
MAX_UNWRITTEN_BYTES = 1 << 20

_COLOURS = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")
_CONTROLS = re.compile(r"[\x00-\x08\x0a-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")


class Screen:
    """Our stdout and stderr, written by a thread.

    A stopped terminal (Ctrl-S) or a pager can block a writer without limit; signs of life and signals must not wait.
    """

    def __init__(self) -> None:
        self._queue: SimpleQueue[tuple[int, bytes] | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._unwritten_bytes = 0
        self._thread = threading.Thread(target=self._write, daemon=True)
        self._thread.start()

    def put(self, descriptor: int, data: bytes) -> None:
        """Write `data` after all earlier data."""
        with self._lock:
            self._unwritten_bytes += len(data)
        self._queue.put((descriptor, data))

    @property
    def full(self) -> bool:
        """Whether to read no more output until some of it is written."""
        return self._unwritten_bytes > MAX_UNWRITTEN_BYTES

    def close(self) -> None:
        """Write the rest, then end."""
        self._queue.put(None)

    def closed(self, seconds: float) -> bool:
        """Whether all is written, after at most `seconds`."""
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


class HostRelay:
    """The output of all nodes, on its way to the screen."""

    def __init__(self, names: Sequence[str], screen: Screen) -> None:
        self._names, self._screen = names, screen
        self._unfinished: dict[tuple[int, int], bytes] = {}  # (node, descriptor) -> the beginning of a line
        self._waiting: list[_Line] = []
        self._node_0 = {1: LiveFilter(), 2: LiveFilter()}
        self._half_since: dict[int, float] = {}  # descriptor -> since when node 0's last line there has no end

    def put(self, node: int, descriptor: int, data: bytes) -> None:
        """Process output of a node, from its stdout (1) or stderr (2)."""
        if node == 0:
            self._screen.put(descriptor, self._node_0[descriptor].passed(data))
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
                self._add(node, descriptor, cleaned(line[start : start + MAX_HOST_LINE_BYTES]))

    def say(self, text: str) -> None:
        """Show a line of the launcher, after all output so far."""
        self._show(math.inf)
        for descriptor in self._half_since:
            self._screen.put(descriptor, b"\n")
        self._half_since.clear()
        self._screen.put(2, strip_controls(f"{text}\n".encode(errors="replace")))

    def flush(self) -> float:
        """Show lines that have waited long enough; the seconds until there is more to show."""
        now = time.monotonic()
        self._show(now)
        if not self._waiting:
            return math.inf
        first = self._waiting[0]
        return max(0.0, first.due_seconds - now, self._held_until(first.descriptor) - now)

    def finish(self) -> None:
        """Show all lines that wait."""
        self._show(math.inf)

    def end(self, node: int) -> None:
        """No more comes from this node: its last line may have no end."""
        for descriptor in (1, 2):
            if rest := self._unfinished.pop((node, descriptor), b""):
                self._add(node, descriptor, cleaned(rest))

    def _add(self, node: int, descriptor: int, text: str) -> None:
        for line in reversed(self._waiting):
            if node in line.nodes:
                break  # what a node says stays in its order
            if (line.descriptor, line.text) == (descriptor, text):
                line.nodes.append(node)
                return
        self._waiting.append(_Line(descriptor, text, [node], time.monotonic() + FOLD_SECONDS))
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


def cleaned(line: bytes) -> str:
    """The line without characters that could move the cursor or hide text: output of other machines is not trusted."""
    text = _COLOURS.sub("", line.decode(errors="replace"))
    return _CONTROLS.sub("\N{REPLACEMENT CHARACTER}", last_drawn(text))


# ---- files ----

MAX_BYTES = 1 << 20  # of one look
BLOCK_BYTES = 1 << 16
MAX_LAST_BYTES = 4 << 20  # how far back the last lines are looked for
BAR_SECONDS = 10.0  # between two states of a bar that has no end yet


class Tail:
    """A file that grows, or does not exist yet; what was read is not read again."""

    def __init__(self, path: Path, offset_bytes: int = 0) -> None:
        self.path = path
        self._offset, self._rest = offset_bytes, b""
        self._bar_seconds = time.monotonic() + BAR_SECONDS

    def read(self, *, to_the_end: bool = False) -> str:
        """New text, up to the last whole line; `to_the_end`: all there is."""
        text = self._read()
        while to_the_end and (more := self._read()):
            text += more
        if to_the_end and self._rest:
            text += _shown(self._rest) + "\n"
            self._rest = b""
        return text

    def _read(self) -> str:
        try:
            with open_file(self.path) as it:
                data = os.pread(it.descriptor, MAX_BYTES, self._offset)
        except OSError:  # not there yet
            return ""
        self._offset += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        bar_due = b"\r" in self._rest and time.monotonic() >= self._bar_seconds
        if bar_due or len(self._rest) > MAX_LINE_BYTES:
            lines, self._rest = [*lines, self._rest], b""
            self._bar_seconds = time.monotonic() + BAR_SECONDS
        return "".join(f"{_shown(line)}\n" for line in lines)


class Line(NamedTuple):
    """A line of a file, and where its last byte is."""

    end: int
    text: str


def lines_of(path: Path, start: int = 0, end: int | None = None) -> Iterator[Line]:
    """The lines of a file as it is now, from byte `start` on, up to `end`; a long one in pieces.

    Raises:
        OSError: if it cannot be read.
    """
    rest, at = b"", start
    with open_file(path) as it:
        end = it.found.st_size if end is None else end
        while at < end and (data := os.pread(it.descriptor, min(BLOCK_BYTES, end - at), at)):
            here = at - len(rest)
            at += len(data)
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                here += len(line) + 1
                yield Line(here - 1, _shown(line))
            if len(rest) > MAX_LINE_BYTES:  # of a bar without end its last state may still come
                if b"\r" not in rest:
                    yield Line(at - 1, _shown(rest))
                rest = rest[rest.rfind(b"\r") + 1 :] if b"\r" in rest[:-1] else b""
    if rest:
        yield Line(at - 1, _shown(rest))


def _shown(line: bytes) -> str:
    text = line.decode(errors="replace")
    return clean(last_drawn(text) if "\r" in text else text)


def start_of_last(path: Path, count: int) -> tuple[int, int]:
    """Where the last `count` lines of a file begin, as far as they lie in its last 4 MiB, and how many bytes it has.

    Raises:
        OSError: if it cannot be read.
    """
    with open_file(path) as it:
        end = it.found.st_size
        most, size = min(end, MAX_LAST_BYTES), min(end, BLOCK_BYTES)
        while True:  # from the end: a log may be larger than memory
            data = os.pread(it.descriptor, size, end - size)
            cut = len(data) if data.endswith(b"\n") or not data else len(data) + 1
            for _ in range(count):
                cut = data.rfind(b"\n", 0, max(0, cut - 1)) + 1
                if not cut:
                    break
            if cut or size == most:
                return end - size + min(cut, len(data)), end
            size = min(most, 4 * size)
