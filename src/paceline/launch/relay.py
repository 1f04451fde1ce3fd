"""The output of several hosts as one that people can read: node 0's unchanged, the others' line by line.

Their lines begin with the host, and the same line of several hosts is shown once: `[n2-n4] out of memory`.
"""

import math
import os
import re
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from queue import SimpleQueue

from paceline.guard.sentences import in_runs
from paceline.runs.console import LiveFilter, harmless, last_drawn

FOLD_SECONDS = 0.3  # how long a line waits for the same one of other hosts
HALF_LINE_SECONDS = 1.0  # how long the others wait for the end of a line of node 0
MAX_LINE_BYTES = 8192  # a longer line appears in pieces
MAX_WAITING_LINES = 200
MAX_UNWRITTEN_BYTES = 1 << 20

_COLOURS = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")
_CONTROLS = re.compile(r"[\x00-\x08\x0a-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")


class Screen:
    """Our stdout and stderr, written on a thread of its own.

    A stopped terminal (Ctrl-S) or a pager can block a writer for ever; signs of life and signals must not wait.
    """

    def __init__(self) -> None:
        self._queue: SimpleQueue[tuple[int, bytes] | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._unwritten_bytes = 0
        self._thread = threading.Thread(target=self._write, daemon=True)
        self._thread.start()

    def put(self, descriptor: int, data: bytes) -> None:
        """Write it when all that came before is written."""
        with self._lock:
            self._unwritten_bytes += len(data)
        self._queue.put((descriptor, data))

    @property
    def full(self) -> bool:
        """Whether to read no more until people have read what is there."""
        return self._unwritten_bytes > MAX_UNWRITTEN_BYTES

    def close(self) -> None:
        """Write what is left, then end."""
        self._queue.put(None)

    def closed(self, seconds: float) -> bool:
        """Whether all is written, after at most `seconds`."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _write(self) -> None:
        while (item := self._queue.get()) is not None:
            descriptor, data = item
            rest = data
            with suppress(OSError):  # the terminal is gone; the run is not
                while rest:
                    rest = rest[os.write(descriptor, rest) :]
            with self._lock:
                self._unwritten_bytes -= len(data)


@dataclass
class _Line:
    descriptor: int
    text: str
    nodes: list[int]
    due_seconds: float


class Relay:
    """The output of all nodes, on its way to the screen."""

    def __init__(self, names: Sequence[str], screen: Screen) -> None:
        self._names, self._screen = names, screen
        self._unfinished: dict[tuple[int, int], bytes] = {}  # (node, descriptor) -> the beginning of a line
        self._waiting: list[_Line] = []
        self._node_0 = {1: LiveFilter(), 2: LiveFilter()}
        self._half_since: dict[int, float] = {}  # descriptor -> since when node 0's last line there has no end

    def put(self, node: int, descriptor: int, data: bytes) -> None:
        """What a node has written to its stdout (1) or stderr (2)."""
        if node == 0:
            self._screen.put(descriptor, self._node_0[descriptor].passed(data))
            self._half_since.pop(descriptor, None)
            if not data.endswith(b"\n"):
                self._half_since[descriptor] = time.monotonic()
            return
        *lines, rest = (self._unfinished.pop((node, descriptor), b"") + data).split(b"\n")
        if len(rest) > MAX_LINE_BYTES:
            lines, rest = [*lines, rest], b""
        if rest:
            self._unfinished[node, descriptor] = rest
        for line in lines:
            for start in range(0, max(1, len(line)), MAX_LINE_BYTES):
                self._add(node, descriptor, cleaned(line[start : start + MAX_LINE_BYTES]))

    def say(self, text: str) -> None:
        """Our own words, after all that was shown until now."""
        self._show(math.inf)
        for descriptor in self._half_since:
            self._screen.put(descriptor, b"\n")
        self._half_since.clear()
        self._screen.put(2, harmless(f"{text}\n".encode(errors="replace")))

    def flush(self) -> float:
        """Show what has waited long enough; the seconds until there is more to show."""
        now = time.monotonic()
        self._show(now)
        if not self._waiting:
            return math.inf
        first = self._waiting[0]
        return max(0.0, first.due_seconds - now, self._held_until(first.descriptor) - now)

    def finish(self) -> None:
        """Show all that still waits."""
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
        names = in_runs((self._names[node] for node in sorted(line.nodes)), ",")
        self._screen.put(line.descriptor, f"[{names}] {line.text}\n".encode(errors="replace"))


def cleaned(line: bytes) -> str:
    """The line without what could move the cursor or hide words: other machines' output is not trusted."""
    text = _COLOURS.sub("", line.decode(errors="replace"))
    return _CONTROLS.sub("\N{REPLACEMENT CHARACTER}", last_drawn(text))
