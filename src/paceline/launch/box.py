"""How far has a worker come? A page of memory that it writes and its agent reads, also after the worker's death.

The agent makes one memory file per rank and generation; the worker inherits it (PACELINE_BOX_FD) and maps it. Writing
is a store to memory, so a step may do it every time; what a killed process has written stays.

    offset 0   steps done   uint64, native byte order
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Self

BOX_BYTES = 4096
NAME = "paceline-box-"
# Native alignment: one store of 8 bytes. With "=" or "<" Python would write byte after byte, and a reader see half.
STEP = struct.Struct("@Q")
STEP_OFFSET = 0


class Box:
    """The worker's side."""

    def __init__(self, descriptor: int) -> None:
        self._memory = mmap.mmap(descriptor, BOX_BYTES)  # shared; holds a descriptor of its own

    @classmethod
    def from_env(cls, env: Mapping[str, str] = os.environ) -> Self | None:
        """The box that this worker's agent has made; None in a process that no agent of ours started."""
        text = env.get("PACELINE_BOX_FD", "")
        if not text.isdecimal() or not _is_box(int(text)):
            return None
        return cls(int(text))

    def set_step(self, done: int) -> None:
        """Say how many steps are done, at least 0."""
        STEP.pack_into(self._memory, STEP_OFFSET, done)

    def close(self) -> None:
        """Give the mapping back; what was written stays for the agent."""
        self._memory.close()


def _is_box(descriptor: int) -> bool:
    # a program that a worker starts sees the variable too, but not the file: its number may be any other file's
    try:
        return str(Path(f"/proc/self/fd/{descriptor}").readlink()).startswith(f"/memfd:{NAME}")
    except OSError:
        return False


def make_box(rank: int) -> int:
    """The agent's side: a descriptor of an empty box, not yet inherited by anybody."""
    descriptor = os.memfd_create(f"{NAME}{rank}")
    os.ftruncate(descriptor, BOX_BYTES)
    return descriptor


def read_step(descriptor: int) -> int:
    """How many steps the box's worker has done, 0 before it has said so."""
    (done,) = STEP.unpack(os.pread(descriptor, STEP.size, STEP_OFFSET))
    return done
