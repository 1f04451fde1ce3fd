"""Ranks that have one terminal as standard input ask one after the other: `input()` a line, pdb until it goes on.

Whoever reads `sys.stdin` itself takes what is there, as under torchrun.
"""

from __future__ import annotations

import builtins
import fcntl
import os
import sys
from collections.abc import Generator
from contextlib import contextmanager, suppress
from functools import wraps
from typing import Any

from paceline.worker.imports import when_imported


class _Turn:
    """The turn to ask: a lock on a folder that all ranks of the node see. It ends with its holder."""

    def __init__(self, folder: str) -> None:
        self._folder, self._depth = folder, 0

    @contextmanager
    def taken(self) -> Generator[None]:
        if self._depth or not self._folder:
            yield
            return
        lock = os.open(self._folder, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            self._depth = 1
            yield
        finally:
            self._depth = 0
            with suppress(OSError):
                fcntl.flock(lock, fcntl.LOCK_UN)  # also where a fork holds it open
            os.close(lock)


def ask_in_turn(folder: str) -> None:
    """Have `input` and pdb of this process wait for their turn; `folder` is the same for all ranks of the node."""
    turn, ask = _Turn(folder), builtins.input

    @wraps(ask)
    def asked(prompt: object = "", /) -> str:
        with turn.taken():
            to_pipe = not sys.stdout.isatty() or "readline" not in sys.modules  # without that it goes to stderr
            if prompt and to_pipe:  # of a pipe people see whole lines
                sys.stdout.flush()
                with suppress(OSError):
                    os.write(0, f"[rank {os.environ.get('RANK', '')}] {prompt}".encode(errors="replace"))
                return ask()
            return ask(prompt)

    def pdb_is_there(*, late: bool) -> None:
        del late
        kind: Any = sys.modules["pdb"].Pdb
        interact = kind.interaction

        @wraps(interact)
        def interaction(debugger: Any, *args: Any, **kwargs: Any) -> Any:
            with turn.taken():
                return interact(debugger, *args, **kwargs)

        kind.interaction = interaction

    builtins.input = asked
    when_imported("pdb", pdb_is_there)
