"""What a worker prints, on its way to its log and to the screen: whole lines, and of a progress bar what is of use.

A bar (tqdm's, say) returns to the beginning of its line and draws over it, ten times a second. A log gets its state
every ten seconds, and its last one; a terminal sees it redrawn in one line, which many ranks share.
"""

import os
import re
import select
import stat
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, NamedTuple

from paceline.observe.terminal import LiveFilter, clean, harmless

MAX_LINE_BYTES = 1 << 16  # a longer line appears in pieces
THIN_SECONDS = 10.0  # between two states of a bar that are kept
REDRAW_SECONDS = 0.1
SILENT_SECONDS = 3.0  # a rank that has drawn nothing for so long leaves the line to another
LINE_END = re.compile(rb"(\r?\n|\r)")
MOVED_UP = re.compile(rb"\x1b\[[0-9]*A")  # the end of a bar below another one: it will be drawn over as well
LOCK = threading.Lock()  # two workers' lines must not mix
TO_THE_END = b"\x1b[K"  # of the terminal's line: wipes what was drawn there


class LinePart(NamedTuple):
    """A line with its end, or a state of a bar."""

    text: bytes
    drawn: bool = False


class Thinned:
    """Cuts what comes out of a pipe into lines; of the states of a bar only one is kept every ten seconds."""

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
        """How long to wait for more before `due` is to be asked; None: as long as it takes."""
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
        """What is left when nothing more comes: the last line may have no end, and a bar stands where it stood."""
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
        """Draw a rank's state, and go back to the line's beginning: whatever is written next takes its place."""
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


def relay(source: IO[bytes], log: int, *, screen: int, prefix: bytes = b"") -> threading.Thread:
    """Pass what comes out of a worker's pipe on, until nobody can write any more; then close `log`.

    `log` gets whole lines, for stdout and stderr may go into one. `screen` gets every byte as it comes, but for what
    would steer a terminal; with a `prefix`, or if it is a file, whole lines that begin with it.
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
        lines = [line for line in lines if harmless(line).strip()]
    if lines and screen >= 0:
        whole = harmless(b"".join(prefix + line + b"\n" for line in lines))
        with LOCK:
            _put(screen, (_BAR.wiped() if redrawn else b"") + whole)


def _write(target: int, data: bytes) -> None:
    with LOCK:
        _put(target, data)


def _put(target: int, data: bytes) -> None:
    with suppress(OSError):  # the terminal is gone or the disk is full: the worker must not feel it
        while data:
            data = data[os.write(target, data) :]
