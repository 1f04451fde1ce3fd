"""Runs a command in a session and folder of its own: what it prints and when, how it ends, what it leaves behind."""

import os
import subprocess
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from paceline.contract.variables import FAULTS_MARK
from paceline.host.procfs import PROC, processes
from paceline.host.sweep import carries, sweep

SETTLE_SECONDS = 2.0  # what is just ending is not left behind
LAST_LINES_SECONDS = 0.05  # longer only if what is left behind holds the pipe open
SHM = Path("/dev/shm")
Popen = Callable[..., subprocess.Popen[bytes]]


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
    argv: Sequence[str], folder: Path, env: Mapping[str, str], *, limit_seconds: float, popen: Popen = subprocess.Popen
) -> Ran:
    """Run `argv` in `folder`, with an empty TMPDIR of its own; whatever it leaves running is counted and killed.

    `popen` starts it, perhaps on another host.
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
    lines: list[tuple[float, str]] = []
    reader = threading.Thread(target=_read, args=(process, lines), daemon=True)
    reader.start()
    try:
        with suppress(subprocess.TimeoutExpired):
            process.wait(limit_seconds)
        reader.join(LAST_LINES_SECONDS)
        code, ended = process.poll(), time.monotonic()
        left = _left(mark) if code is not None else ()
    finally:
        sweep((), mark, variable=FAULTS_MARK)
        with suppress(ProcessLookupError):
            process.kill()
        process.wait()
        reader.join(SETTLE_SECONDS)
    files = sorted(_names(temporary))  # a folder with all in it counts once
    files += [str(SHM / name) for name in _names(SHM) - shared if not _mapped(name)]
    if code is not None and code < 0:
        code = 128 - code
    return Ran(code, tuple(lines), began, ended, left, tuple(sorted(files)))


def _read(process: subprocess.Popen[bytes], lines: list[tuple[float, str]]) -> None:
    """Each line as it comes, until everybody has closed the pipe."""
    assert process.stdout is not None
    with process.stdout as stream:
        for line in stream:
            lines.append((time.monotonic(), line.decode(errors="replace").removesuffix("\n")))


def _left(mark: str) -> tuple[str, ...]:
    deadline = time.monotonic() + SETTLE_SECONDS
    while (found := _carriers(mark)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return tuple(f"{pid} {words}" for pid, words in sorted(found.items()))


def _carriers(mark: str) -> dict[int, str]:
    """The living processes with this mark in their environment: pid -> command line."""
    found: dict[int, str] = {}
    for process in processes():
        if process.runs and carries(process.pid, FAULTS_MARK, mark):
            with suppress(OSError):  # just ended
                words = (PROC / str(process.pid) / "cmdline").read_bytes().replace(b"\0", b" ")
                found[process.pid] = words.decode(errors="replace")[:100].strip()
    return found


def _names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} if folder.is_dir() else set()


def _mapped(name: str) -> bool:
    """Whether a living process uses the file: /dev/shm is everybody's, and ours are all dead by now."""
    for maps in PROC.glob("[0-9]*/maps"):
        with suppress(OSError):
            if f"/dev/shm/{name}" in maps.read_text():
                return True
    return False
