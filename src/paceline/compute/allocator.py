"""Keeps the memory of one step for the next; glibc would give large blocks back to the kernel, which zeroes them again.

Measured: page faults take 11 to 37 % of a CPU step. Three settings keep freed memory in the process: no block has a
mapping of its own, the heap never shrinks, and it grows by 64 MiB. The price is memory: a heap has gaps. So it is done
only where there is room, and never under an allocator or a setting of the user's own.

No torch here: it may be called before anything is imported.
"""

import ctypes
import os
import re
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = -1, -2, -4  # malloc.h
TOP_PAD_BYTES = 64 << 20
ACTIVATION_BYTES = 2 << 30  # of a step, assumed: not known before the first
GAPS = 2  # the heap may become so many times as large as what is in it (measured: up to 1.5 times)


def room_needed(state_bytes: int) -> int:
    """Bytes that must be free for a rank whose weights, gradients and optimizer state take `state_bytes`."""
    return ACTIVATION_BYTES + GAPS * state_bytes


def keep_memory(*, free_bytes: int | None, state_bytes: int, env: Mapping[str, str] = os.environ) -> str:
    """Tune glibc's malloc for a training on the CPU, for this whole process and for good; return why not, or "".

    `free_bytes` is what this rank may still take (None: not known), `state_bytes` what its weights, gradients and
    optimizer state will take; `env` may hold the user's own settings of the allocator.
    """
    own = next((name for name in env if name.startswith("MALLOC_") or name == "GLIBC_TUNABLES"), None)
    if own is not None:
        return f"{own} is set"
    if re.search("malloc", env.get("LD_PRELOAD", "")):
        return "LD_PRELOAD names another allocator"
    needed = room_needed(state_bytes)
    if free_bytes is not None and free_bytes < needed:
        return f"{free_bytes >> 20:,} MiB are free for this rank, and it wants {needed >> 20:,} MiB of room"
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    if libc is None or not hasattr(libc, "gnu_get_libc_version"):  # musl, macOS
        return "the C library is not glibc"
    settings = ((M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, -1), (M_TOP_PAD, TOP_PAD_BYTES))
    done = [libc.mallopt(name, value) for name, value in settings]
    return "" if all(done) else "glibc has refused"


def peak_memory() -> int:
    """The largest resident memory of this process so far, in bytes; 0 where the kernel does not say."""
    with suppress(OSError, AttributeError):  # not ru_maxrss: a process inherits its parent's
        status = Path("/proc/self/status").read_text()
        return int(re.search(r"^VmHWM:\s*([0-9]+) kB", status, re.MULTILINE)[1]) << 10  # pyright: ignore[reportOptionalSubscript]
    return 0
