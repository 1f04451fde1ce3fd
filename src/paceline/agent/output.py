"""A worker's output goes into its log and, of those that are to be seen, onto the agent's own output."""

import os
import re
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import IO

from paceline.observe.terminal import LiveFilter, harmless

MAX_LINE_BYTES = 1 << 16  # a longer line appears in pieces
LINE_END = re.compile(rb"(\r?\n|\r)")  # a progress bar ends its lines with \r
LOCK = threading.Lock()  # two workers' lines must not mix


def relay(source: IO[bytes], log: int, *, screen: int, prefix: bytes = b"") -> threading.Thread:
    """Pass what comes out of a worker's pipe on, until nobody can write any more; then close `log`.

    `log` gets whole lines, for stdout and stderr may go into one. `screen` gets every byte as it comes, but for what
    would steer a terminal, or, with a `prefix`, whole lines that begin with it.
    """
    thread = threading.Thread(target=_relay, args=(source, log, screen, prefix), daemon=True)
    thread.start()
    return thread


def _relay(source: IO[bytes], log: int, screen: int, prefix: bytes) -> None:
    rest, shown = b"", LiveFilter()
    with source:
        while data := os.read(source.fileno(), 65536):
            if not prefix:
                _write(screen, shown.passed(data))
            *lines, rest = LINE_END.split(rest + data)
            lines = [line + end for line, end in zip(lines[::2], lines[1::2], strict=True)]
            if len(rest) > MAX_LINE_BYTES:
                lines, rest = [*lines, rest], b""
            _pass_on(lines, log, screen, prefix)
    if rest:
        _pass_on([rest], log, screen, prefix)
    os.close(log)


def _pass_on(lines: Sequence[bytes], log: int, screen: int, prefix: bytes) -> None:
    if lines:
        _write(log, b"".join(lines))
    if lines and prefix:
        whole = b"".join(prefix + line.rstrip(b"\r\n") + b"\n" for line in lines)
        _write(screen, harmless(whole))


def _write(target: int, data: bytes) -> None:
    with suppress(OSError), LOCK:  # the terminal is gone or the disk is full: the worker must not feel it
        while data:
            data = data[os.write(target, data) :]
