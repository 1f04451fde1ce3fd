"""How does an agent outlive the shell, or the ssh connection, that has started it?"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from paceline.disk import writing

DETACHED = b'{"detached": true}\n'  # the agent's last word to its launcher


def detach(log: Path) -> Callable[[], None]:
    """Go on in a child of our own session; return what it has to call once its workers are started.

    Until then its words still reach the launcher, and its end is ours: with its exit code. From then on they go to
    `log`, and this process says so and ends. Call it before there are threads or children.
    """
    ready, begun = os.pipe()
    child = os.fork()
    if child:
        os.close(begun)
        if os.read(ready, 1):
            with suppress(OSError):
                os.write(1, DETACHED)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        os._exit(os.waitstatus_to_exitcode(status) & 0xFF)
    os.close(ready)
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)

    def settled() -> None:
        nonlocal begun
        if begun < 0:
            return
        sys.stdout.flush()
        sys.stderr.flush()
        words = writing.keep(log, append=True)
        os.dup2(words, 1)
        os.dup2(words, 2)
        os.close(words)
        os.write(begun, b"+")
        os.close(begun)
        begun = -1

    return settled
