"""Runs a command in a session and folder of its own: what it prints and when, how it ends, what it leaves behind."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.contract.variables import FAULTS_MARK
from paceline.host.procfs import PROC, processes

SETTLE_SECONDS = 2.0  # what is just ending is not left behind
SHM = Path("/dev/shm")


@dataclass(frozen=True)
class Ran:
    """What a command did. Times are of CLOCK_MONOTONIC."""

    code: int | None  # as a shell sees it; None: it was ended at the limit
    lines: tuple[tuple[float, str], ...]  # of stdout and stderr together
    began_seconds: float
    ended_seconds: float
    processes_left: tuple[str, ...]
    files_left: tuple[str, ...]

    @property
    def text(self) -> str:
        """All lines."""
        return "\n".join(line for _, line in self.lines)


def run_command(
    argv: Sequence[str],
    folder: Path,
    env: Mapping[str, str],
    *,
    limit_seconds: float,
    popen: Callable[..., subprocess.Popen[bytes]] = subprocess.Popen,
) -> Ran:
    """Run `argv` in `folder`, with an empty TMPDIR of its own; whatever it leaves running is counted and killed.

    `popen` may start it on another host; what runs there without this environment is the caller's to count.
    """
    temporary, mark = folder / "tmp", uuid.uuid4().hex
    temporary.mkdir(exist_ok=True)
    shared = _names(SHM)
    began = time.monotonic()
    process = popen(
        argv,
        cwd=folder,
        env={**os.environ, **env, FAULTS_MARK: mark, "TMPDIR": str(temporary)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        lines = tuple(_lines(process, began + limit_seconds))
        code, ended = process.poll(), time.monotonic()
        left = _left(mark) if code is not None else ()
    finally:
        _kill_all(mark)
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()
    files = sorted(_names(temporary))  # a folder with all in it counts once
    files += [str(SHM / name) for name in _names(SHM) - shared if not _mapped(name)]
    if code is not None and code < 0:
        code = 128 - code
    return Ran(code, lines, began, ended, left, tuple(sorted(files)))


def _lines(process: subprocess.Popen[bytes], deadline: float) -> Iterator[tuple[float, str]]:
    """Each line as it comes, until the process ends or the deadline: what it leaves behind may keep the pipe open."""
    assert process.stdout is not None
    descriptor, rest = process.stdout.fileno(), b""
    os.set_blocking(descriptor, False)
    with selectors.DefaultSelector() as selector:
        selector.register(descriptor, selectors.EVENT_READ)
        while True:
            over = process.poll() is not None
            selector.select(0.0 if over else 0.1)
            try:
                data = os.read(descriptor, 1 << 16)
            except BlockingIOError:
                data = None
            now = time.monotonic()
            *whole, rest = (rest + (data or b"")).split(b"\n")
            yield from ((now, line.decode(errors="replace")) for line in whole)
            if data == b"":  # everybody has closed it
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.0, deadline - now))
                break
            if (over and data is None) or now > deadline:
                break
    if rest:
        yield time.monotonic(), rest.decode(errors="replace")


def _left(mark: str) -> tuple[str, ...]:
    deadline = time.monotonic() + SETTLE_SECONDS
    while (found := _carriers(mark)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return tuple(f"{pid} {words}" for pid, words in sorted(found.items()))


def _carriers(mark: str) -> dict[int, str]:
    """The living processes with this mark in their environment: pid -> command line."""
    found: dict[int, str] = {}
    wanted = f"{FAULTS_MARK}={mark}".encode()
    for process in processes():
        folder = PROC / str(process.pid)
        with contextlib.suppress(OSError):  # another user's, or just ended
            if process.runs and wanted in (folder / "environ").read_bytes().split(b"\0"):
                words = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                found[process.pid] = words[:100].strip()
    return found


def _kill_all(mark: str) -> None:
    deadline = time.monotonic() + SETTLE_SECONDS
    while (found := _carriers(mark)) and time.monotonic() < deadline:
        for pid in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def _names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} if folder.is_dir() else set()


def _mapped(name: str) -> bool:
    """Whether a living process uses the file: /dev/shm is everybody's, and ours are all dead by now."""
    for maps in PROC.glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            if f"/dev/shm/{name}" in maps.read_text():
                return True
    return False
