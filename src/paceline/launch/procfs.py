"""Who runs on this machine, read from /proc: process states, sessions, and who holds a port."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
LISTENING = "0A"  # the kernel's number for TCP_LISTEN in /proc/net/tcp


@dataclass(frozen=True)
class Process:
    """One line of /proc/PID/stat. `start` is in clock ticks since boot: with the pid it names one process for ever."""

    pid: int
    state: str  # R S D T Z ...
    parent: int
    session: int
    start: int
    cpu_seconds: float = 0.0  # used so far, by all its threads

    @property
    def runs(self) -> bool:
        """Whether it still exists as more than an entry that nobody has waited for."""
        return self.state not in "ZX"


def read_process(pid: int) -> Process | None:
    """The process now, or None when there is none (or no /proc, as on macOS)."""
    try:
        text = (PROC / str(pid) / "stat").read_text(errors="replace")
    except OSError:
        return None
    # The command's name stands in parentheses and may hold spaces and parentheses: split after the last one.
    fields = text.rpartition(")")[2].split()
    cpu_seconds = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return Process(pid, fields[0], int(fields[1]), int(fields[3]), int(fields[19]), cpu_seconds)


def processes() -> Iterator[Process]:
    """Every process of this machine that we can see."""
    for folder in PROC.iterdir() if PROC.is_dir() else ():
        if folder.name.isdecimal() and (process := read_process(int(folder.name))) is not None:
            yield process


def port_holder(port: int) -> str | None:
    """`pid 4711 (python server.py)` for the process that listens on the port; None where /proc does not show it."""
    wanted = {f"socket:[{inode}]" for inode in _listening_inodes(port)}
    for process in processes() if wanted else ():
        folder = PROC / str(process.pid)
        try:
            links = [str(link.readlink()) for link in (folder / "fd").iterdir()]
            words = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
        except OSError:  # another user's, or just ended
            continue
        if wanted.intersection(links):
            # Two words say which program it is; further ones may hold passwords.
            return f"pid {process.pid} ({' '.join(words[:2]).strip()[:80]})"
    return None


def _listening_inodes(port: int) -> Iterator[str]:
    for table in ("tcp", "tcp6"):
        try:
            lines = (PROC / "net" / table).read_text().splitlines()[1:]
        except OSError:
            continue
        for fields in map(str.split, lines):
            if fields[3] == LISTENING and int(fields[1].rpartition(":")[2], 16) == port:
                yield fields[9]
