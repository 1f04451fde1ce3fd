"""Makes old records of steps fewer: two that follow each other become one that stands for both.

What a proof needs is kept in sums: how many samples were used, and their fingerprint. Steps that were left out and the
slowest stay whole. So do those of earlier starts: a later one has taken some of them again, and only they say which.
"""

from collections.abc import Iterable, Sequence
from statistics import median

import msgspec
from msgspec.structs import replace

from paceline.observe.events import MOST_FOLDED, RolledBack, Step, decode_event

SLOW_FACTOR, MOST_SLOW = 2.0, 1 / 16  # of the usual step; of all steps
_STEP = b'{"kind":"step"'
_STARTED, _BACK = b'{"kind":"started"', b'{"kind":"rolled-back"'


def fold(old: Sequence[bytes], new: Sequence[bytes] = ()) -> list[bytes]:
    """The lines `old` of a file of events with about half as many steps; `new` are those after them."""
    events = [decode_event(line) if line.startswith(_STEP) else None for line in old]
    steps = [event for event in events if isinstance(event, Step)]
    slow, undone = _slow_seconds(steps), _undone([*old, *new])
    starts = [number for number, line in enumerate([*old, *new]) if line.startswith(_STARTED)]
    earlier = min(starts[-1] if starts else 0, len(old))
    encode = msgspec.json.encode
    kept: list[bytes] = [*old[:earlier]]
    before: Step | None = None  # the last line of `kept`, if it may still become one with the next
    for line, event in zip(old[earlier:], events[earlier:], strict=True):
        step = event if isinstance(event, Step) and not event.skipped and _mean_seconds(event) < slow else None
        if before is not None and step is not None and before.step not in undone and _follow(before, step):
            kept[-1], before = encode(_both(before, step)), None
        else:
            kept.append(line)
            before = step
    return kept


def _undone(lines: Iterable[bytes]) -> set[int]:
    """The steps to which the run went back."""
    found = (decode_event(line) for line in lines if line.startswith(_BACK))
    return {event.to for event in found if isinstance(event, RolledBack)}


def _mean_seconds(step: Step) -> float:
    return step.seconds / step.steps


def _slow_seconds(steps: Sequence[Step]) -> float:
    """How long a step takes that is kept whole."""
    if not steps:
        return 0.0
    each = sorted(map(_mean_seconds, steps))
    return max(SLOW_FACTOR * median(each), each[int((1 - MOST_SLOW) * (len(each) - 1))] * (1 + 1e-9))


def _follow(a: Step, b: Step) -> bool:
    next_first = b.step - b.steps + 1
    return (a.step + 1, a.epoch, a.share) == (next_first, b.epoch, b.share) and a.steps + b.steps <= MOST_FOLDED


def _both(a: Step, b: Step) -> Step:
    count = a.steps + b.steps
    known = a.grad_norm is not None and b.grad_norm is not None
    return replace(
        b,
        loss=(a.loss * a.steps + b.loss * b.steps) / count,
        grad_norm=((a.grad_norm or 0.0) * a.steps + (b.grad_norm or 0.0) * b.steps) / count if known else None,
        samples=a.samples + b.samples,
        seconds=a.seconds + b.seconds,
        data_seconds=a.data_seconds + b.data_seconds,
        consumed=a.consumed + b.consumed,
        fingerprint=_sum(a.fingerprint, b.fingerprint),
        phase_seconds={
            phase: round(a.phase_seconds.get(phase, 0.0) + spent, 7) for phase, spent in b.phase_seconds.items()
        },
        steps=count,
    )


def _sum(a: str, b: str) -> str:
    """As data.consumed.add, which needs torch; empty where one is no fingerprint: then nothing is proven by it."""
    try:
        return f"{(int(a, 16) + int(b, 16)) % 2**64:016x}"
    except ValueError:
        return ""
