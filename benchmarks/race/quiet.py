"""Was the machine ours? A look at the time that all its processors have spent, before and after a lap."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

IDLE_SHARE = 0.88  # of all processors, before a lap begins
LOOK_SECONDS = 0.15
FOREIGN_SHARE = 0.06  # of all processors during a lap, at most: else it does not count
TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Spent:
    """Processor seconds since the machine started, over all its processors."""

    at_seconds: float
    busy_seconds: float


def look() -> Spent:
    """Interrupts are left out: they are nobody's, mostly the network's. What a hypervisor took away is foreign."""
    words = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    user, nice, system, _idle, _waiting, _irq, _softirq, stolen = (int(word) for word in words[:8])
    return Spent(time.monotonic(), (user + nice + system + stolen) / TICKS_PER_SECOND)


def foreign_share(before: Spent, after: Spent, own_seconds: float) -> float:
    """The part of all processors' time that others had, from 0 to 1."""
    passed = (after.at_seconds - before.at_seconds) * (os.cpu_count() or 1)
    return max(0.0, after.busy_seconds - before.busy_seconds - own_seconds) / passed


def wait_until_idle(patience_seconds: float) -> bool:
    """Whether the machine has become idle; asked for that long at most."""
    deadline = time.monotonic() + patience_seconds
    while time.monotonic() < deadline:
        before = look()
        time.sleep(LOOK_SECONDS)
        if foreign_share(before, look(), 0.0) <= 1 - IDLE_SHARE:
            return True
    return False
