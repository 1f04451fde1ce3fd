"""In which order a stage of a pipeline goes forward and backward, and how long the stages stand idle by that."""

from collections.abc import Sequence
from typing import Literal, get_args

Schedule = Literal["1f1b", "gpipe"]
SCHEDULES: tuple[Schedule, ...] = get_args(Schedule)
Action = tuple[bool, int]
"""(forward or backward, number of the micro-batch)"""


def actions(schedule: Schedule, stage: int, stages: int, microbatches: int) -> list[Action]:
    """What this stage does, in order.

    "gpipe" (Huang et al. 2018): all forwards, then all backwards; each stage keeps what all micro-batches leave for
    backward. "1f1b" (Narayanan et al. 2019, "PipeDream"): a stage goes backward as soon as it can, then forward with
    the next; it keeps as many micro-batches as there are stages from it on, at most. Both stand idle equally long.

    actions("1f1b", 0, 2, 3) is F0 F1 B0 F2 B1 B2; of stage 1 F0 B0 F1 B1 F2 B2.
    """
    ahead = microbatches if schedule == "gpipe" else min(microbatches, stages - stage)
    first = [(True, number) for number in range(ahead)]
    then = [[(False, number - ahead), (True, number)] for number in range(ahead, microbatches)]
    last = [(False, number) for number in range(microbatches - ahead, microbatches)]
    return [*first, *(one for pair in then for one in pair), *last]


def idle(schedule: Schedule, seconds: Sequence[tuple[float, float]], microbatches: int) -> list[float]:
    """The share of a step's time in which each stage waits, if stage s takes `seconds[s]` = (forward, backward).

    If all stages take equally long, (S - 1) / (M + S - 1) for S stages and M micro-batches. Messages take no time.
    """
    stages = len(seconds)
    left = [actions(schedule, stage, stages, microbatches) for stage in range(stages)]
    ended: dict[tuple[int, bool, int], float] = {}
    now, busy = [0.0] * stages, [0.0] * stages
    while any(left):
        for stage in range(stages):
            while left[stage]:
                forward, number = left[stage][0]
                neighbour = stage + (-1 if forward else 1)
                needed = neighbour, forward, number  # the first and the last stage need nobody
                if 0 <= neighbour < stages and needed not in ended:
                    break
                took = seconds[stage][0 if forward else 1]
                now[stage] = max(now[stage], ended.get(needed, 0.0)) + took
                busy[stage] += took
                ended[stage, forward, number] = now[stage]
                left[stage].pop(0)
    return [1 - one / max(now) for one in busy]
