"""The block that stands last on the screen when a run has failed: who, how, why, and where to read on. Pure."""

from __future__ import annotations

import signal
from collections.abc import Sequence

from paceline.guard.deaths import Kind, Observation
from paceline.observe.terminal import clean

TAIL_LINES = 15
MAX_LINES = 80  # of a traceback or message: a deep recursion must not push the headline off the screen


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
