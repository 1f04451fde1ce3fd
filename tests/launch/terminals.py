"""Programs on a terminal of their own, typed into by a test."""

import json
import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.launch.launch_harness import LAUNCHER

LEADS = "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"


@contextmanager
def on_terminal(command: Sequence[str], **more: Any) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """The program, in the foreground of its terminal, and the descriptor by which one types and reads there."""
    keyboard, terminal = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", LEADS, *command],
        stdin=terminal, stdout=terminal, stderr=terminal, start_new_session=True, **more,
    )  # fmt: skip
    os.close(terminal)
    try:
        yield process, keyboard
    finally:
        process.terminate()
        process.wait(30)
        os.close(keyboard)


def read_until(keyboard: int, words: bytes, *, times: int = 1, seconds: float = 30.0) -> bytes:
    """What appears there, until `words` have."""
    shown, deadline = b"", time.monotonic() + seconds
    while shown.count(words) < times:
        assert select.select([keyboard], [], [], max(0.0, deadline - time.monotonic()))[0], shown
        shown += os.read(keyboard, 65536)
    return shown


def shown_by_a_launch(folder: Path, worker: str, **settings: Any) -> bytes:
    """What a launcher with two workers writes to its terminal; `settings` are further fields of its JobSpec."""
    (folder / "worker.py").write_text(worker)
    argv = [sys.executable, str(folder / "worker.py")]
    told = json.dumps({"attempt_dir": str(folder), "argv": argv, "nproc": 2, **settings})
    main, side = pty.openpty()
    try:
        command = [sys.executable, "-P", "-c", LAUNCHER, told]
        done = subprocess.run(command, stdin=side, stdout=side, timeout=90, check=False)
        assert done.returncode == 0
        return os.read(main, 100)
    finally:
        os.close(main)
        os.close(side)
