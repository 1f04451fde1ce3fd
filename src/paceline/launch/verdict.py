"""The block that stands last on the screen when a run has failed: who, how, why, and where to read on. Pure."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence

from paceline.launch.failure import Kind, Observation

TAIL_LINES = 15
MAX_LINES = 80  # of a traceback or message: a deep recursion must not push the headline off the screen

# C0 but tab and newline, C1, marks of direction: what a worker wrote must not steer the terminal, or hide words
CONTROL = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]+")


# of bytes, which may be UTF-8: all of C0 but tab, newline, return and colours; C1 stands behind \xc2 there
STEERS = re.compile(
    rb"\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b\[(?![0-9;:]*m)[0-?]*[ -/]*[@-~]|\x1b(?!\[[0-9;:]*m).?"
    rb"|[\x00-\x08\x0b\x0c\x0e-\x1a\x1c-\x1f\x7f]|\xc2[\x80-\x9f]"
)
BEGUN = re.compile(rb"(?:\x1b(?:\[[0-?]*[ -/]*|\][^\x07\x1b]*\x1b?)?|\xc2)\Z")
MAX_SEQUENCE_BYTES = 4096


def tell(
    primary: Observation, observations: Sequence[Observation], *, oom_kills: int, attempt_dir: str, last: str = ""
) -> str:
    """The verdict on a failed run.

    Args:
        primary: the failure to tell, one of `observations`.
        observations: all workers of all nodes.
        oom_kills: how many processes the kernel's OOM killer took during the run.
        attempt_dir: the folder of the logs.
        last: the last collective of the primary's rank, in words, where it is known.
    """
    if primary.kind is Kind.LOST:
        ranks = ", ".join(str(o.rank) for o in observations if o.lost == primary.lost)
        return f"{clean(primary.lost)}\nwith it rank {ranks}; output of the ranks: {attempt_dir}/rank-<rank>.log"
    alike = [o for o in observations if _same_words(o, primary)]
    lines = [f"{_who(alike, primary, len(observations))} failed: {_how(primary, oom_kills)}", *_why(primary)]
    early = sorted((o for o in observations if o.code == 0), key=lambda o: o.seen_seconds)
    if primary.kind is Kind.VICTIM and early:  # who leaves without a word is the culprit, not whom it left
        left = [f"{_who([o], o, len(observations))} had already ended, with code 0, while others ran" for o in early]
        lines = [*left, "so the others lost it:", *lines]
    elif primary.kind is Kind.VICTIM:
        lines.append("it lost its peers, but no rank failed by itself")
    if last and primary.kind is not Kind.EXCEPTION:  # whose traceback says more
        lines.append(clean(last))
    if len(observations) > 1:
        lines.append(f"output of the ranks: {attempt_dir}/rank-<rank>.log")
    return "\n".join(lines)


def _same_words(one: Observation, other: Observation) -> bool:
    if one is other:
        return True
    if one.record is None or other.record is None:
        return False
    return (one.record.type, one.record.message) == (other.record.type, other.record.message)


def _who(alike: Sequence[Observation], primary: Observation, total: int) -> str:
    if len(alike) == 1:
        return f"rank {primary.rank} ({primary.host}, pid {primary.pid})"
    hosts = ", ".join(sorted({o.host for o in alike}))
    if len(alike) == total:
        return f"all {total} ranks ({hosts})"
    return f"ranks {', '.join(str(o.rank) for o in alike)} ({hosts})"


def _how(primary: Observation, oom_kills: int) -> str:
    if primary.record or (primary.code or 0) >= 0:
        return f"exit code {primary.exit_code}"
    number = -(primary.code or 0)
    try:
        name = signal.Signals(number).name
    except ValueError:  # a real-time signal
        name = f"signal {number}"
    if number != signal.SIGKILL:
        return f"killed by {name}"
    if oom_kills > 0:
        kills = "1 kill" if oom_kills == 1 else f"{oom_kills} kills"
        return f"killed by {name} (the kernel's OOM killer: cgroup counted {kills})"
    return f"killed by {name} (if nobody sent it, the kernel's OOM killer may have: see dmesg)"


def _why(primary: Observation) -> list[str]:
    if primary.record:
        text = primary.record.traceback or primary.record.message
        return _clipped(clean(text).rstrip("\n").split("\n"), MAX_LINES)
    tail = clean(primary.log_tail).rstrip("\n").split("\n")[-TAIL_LINES:]
    return ["its last lines:", *(f"  {line}" for line in tail)] if any(tail) else []


def _clipped(lines: list[str], limit: int) -> list[str]:
    if len(lines) <= limit:
        return lines
    left_out = len(lines) - limit
    return [*lines[: limit // 4], f"  ... {left_out} lines ...", *lines[limit // 4 + left_out :]]


def escaped(json: str) -> str:
    """JSON with what could steer a terminal written as JSON writes it."""
    return re.sub("[\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]", lambda m: f"\\u{ord(m[0]):04x}", json)


def clean(text: str) -> str:
    """`text` without what would steer a terminal."""
    return CONTROL.sub("", text.replace("\r\n", "\n").replace("\r", "\n"))


def harmless(data: bytes) -> bytes:
    """`data` without what would steer a terminal, but for colours and \\r; nor does what is left come to mean that."""
    while (less := STEERS.sub(b"", data)) != data:
        data = less
    return data


class LiveFilter:
    """What passes of a stream of bytes to a terminal: text, colours, and \\r, by which progress bars are drawn.

    A sequence may be cut between two reads: what may still become one is held back until it is whole, or too long.
    """

    def __init__(self) -> None:
        self._held = b""

    def passed(self, data: bytes) -> bytes:
        """What can be shown of the bytes so far."""
        data = self._held + data
        cut = BEGUN.search(data)
        self._held = data[cut.start() :] if cut is not None and len(data) - cut.start() < MAX_SEQUENCE_BYTES else b""
        shown = harmless(data[: len(data) - len(self._held)])
        if shown.endswith(b"\xc2"):  # what was taken out stood between it and what comes next
            shown, self._held = shown[:-1], b"\xc2" + self._held
        return shown
