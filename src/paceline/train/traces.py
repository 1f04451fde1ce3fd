"""Steps in detail, for `paceline trace` and the page of a run: few of many, and always the last.

In detail are the first 63 steps, then every second up to 127, every fourth up to 255, and so on: 32 or so in each
doubling, the same on all ranks. So a step in a million costs nothing, and a file of any run has room for them.
"""

import time
from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from math import prod

from paceline.contract.box import Box
from paceline.observe.events import Anatomy, Event, Traced
from paceline.strategies.base import Replica
from paceline.train.costs import held_bytes
from paceline.train.fit import Border, StepRecord

LAST = 8  # steps that are always in detail
WHOLE_BITS = 6  # up to 2**6 - 1 all are
MOST_PARAMETERS = 4096


class Traces:
    """Of one rank."""

    def __init__(self, box: Box) -> None:
        self._box, self._last = box, deque[tuple[int, Sequence[Border]]](maxlen=LAST)

    def of(self, record: StepRecord, new: Sequence[Replica]) -> list[Event]:
        """The step in detail, if it is due; after it what the `new` replicas hold."""
        found: list[Event] = [anatomy(new)] if new else []
        if record.borders and is_due(record.step):
            self._last.clear()  # those before it will not be the last
            found.append(self._traced(record.step, record.borders))
        elif record.borders:
            self._last.append((record.step, record.borders))
        return found

    def rest(self) -> list[Traced]:
        """The last steps, as far as they are not written down yet."""
        found = [self._traced(step, borders) for step, borders in self._last]
        self._last.clear()
        return found

    def _traced(self, step: int, borders: Sequence[Border]) -> Traced:
        began, ended = borders[0][1], borders[-1][1]
        pairs = pairwise(borders)
        calls = [
            (op.name or op.kind, round(at / 1e9 - began, 7), round(seconds, 7), size_of(op.shape, op.dtype))
            for at, seconds, op in self._box.calls_since(int(began * 1e9))
            if at / 1e9 <= ended
        ]
        return Traced(
            step=step,
            unix_time=time.time() - (time.monotonic() - began),
            phases=[(word, round(at - began, 7), round(until - at, 7)) for (word, at), (_, until) in pairs],
            calls=calls,
        )


def is_due(step: int) -> bool:
    """Whether this step, counted from 1, is written down in detail."""
    return step % (1 << max(0, step.bit_length() - WHOLE_BITS)) == 0


def size_of(shapes: str, dtypes: str) -> int:
    """Bytes of a collective's tensors, as the guard knows them: '[10, 3] [4]', 'float32'; 0 where it does not say."""
    width = max((int("".join(filter(str.isdigit, name)) or 0) // 8 for name in dtypes.split(", ")), default=0)
    found = [[number.strip() for number in shape.split(",")] for shape in shapes.strip("[]").split("] [")]
    total = sum(prod(map(int, shape)) for shape in found if all(map(str.isdigit, shape)))
    return total * width


def anatomy(replicas: Sequence[Replica]) -> Anatomy:
    """What this rank holds of all models, after a step."""
    named = [pair for replica in replicas for pair in replica.model.named_parameters()]
    trained = [p for _, p in named if p.requires_grad]
    gradients = [held.tensor for replica in replicas for held in replica.gradients()]
    return Anatomy(
        parameters=[(name, [*p.shape], p.numel() * p.element_size()) for name, p in named[:MOST_PARAMETERS]],
        weight_bytes=held_bytes(p for _, p in named),
        gradient_bytes=held_bytes(gradients) or held_bytes(trained),
        optimizer_bytes=held_bytes(
            value for replica in replicas for state in replica.optimizer.state.values() for value in state.values()
        ),
        buffer_bytes=held_bytes(buffer for replica in replicas for buffer in replica.model.buffers()),
    )
