"""Where a model is best cut into stages.

A stage is a stretch of the model's own forward, from one module's call to another's. A call is a place to cut if all
that was computed before it, and is used after it, goes in as its inputs: then the stage before sends these, and the
stage behind needs nothing else. So a model needs no form: its forward may be any Python around its layers.
"""

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from itertools import pairwise

from paceline.errors import UsageError, first_few

SLACK = 1.05  # of the slowest stage's time, given for memory
MAX_SHOWN = 12
INFINITE = float("inf")


@dataclass(frozen=True)
class Leaf:
    """A tensor that travels: which of the call's inputs, flattened, it is."""

    position: int
    dtype: str
    trained: bool
    """whether its gradient travels back"""


@dataclass(frozen=True)
class CutPoint:
    """A place to cut: before the call of `module`."""

    module: str
    leaves: tuple[Leaf, ...]
    before: tuple[str, ...]
    """the modules that are called before it only, without those inside them"""


@dataclass(frozen=True)
class Layers:
    """What lies between two places to cut."""

    forward_seconds: float = 0.0
    """of two samples"""
    backward_seconds: float = 0.0
    state_bytes: int = 0
    """of weights, gradients and the state of an optimizer with two moments"""
    kept_bytes: int = 0
    """that the forward of two samples leaves for backward"""
    trained: int = 0
    """numbers that are trained"""

    @property
    def seconds(self) -> float:
        """Forward and backward."""
        return self.forward_seconds + self.backward_seconds

    def __add__(self, other: "Layers") -> "Layers":
        return Layers(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))


@dataclass(frozen=True)
class Chain:
    """A model as a chain: `layers[i]` lies before `cuts[i]`, the last ones behind the last cut."""

    cuts: tuple[CutPoint, ...]
    layers: tuple[Layers, ...]
    users: dict[str, tuple[int, ...]]
    """of each parameter and buffer the layers, by number, that use it"""
    draws: bool
    """whether the forward draws random numbers"""


def best_cuts(found: Chain, stages: int, names: Sequence[str] = ()) -> list[int]:
    """The numbers of the cuts between `stages` stages: those of these `names`, else where the slowest stage is fastest.

    Of divisions whose slowest stage is about as fast, the one whose largest needs the least memory.

    Raises:
        UsageError: there are fewer places to cut than are needed, or not one of that name.
    """
    there = [cut.module for cut in found.cuts]
    shown = first_few(there, MAX_SHOWN) or "no module"
    if unknown := [name for name in names if name not in there]:
        raise UsageError(code="stage-cannot-begin", value=unknown[0], shown=shown)
    ends = sorted(there.index(name) for name in names)
    places = [0, *(end + 1 for end in ends), len(found.layers)]
    costs = [one.seconds for one in found.layers]
    if not names:
        fastest, _ = _divided(found, stages, costs, INFINITE)
        sizes = [float(one.state_bytes + one.kept_bytes) for one in found.layers]
        _, places = _divided(found, stages, sizes, fastest * SLACK)
    if not places:
        most = next((n for n in range(stages - 1, 0, -1) if _divided(found, n, costs, INFINITE)[1]), 1)
        raise UsageError(code="too-many-stages", value=stages, most=most, shown=shown)
    for begin, end in pairwise(places):
        if not sum(one.trained for one in found.layers[begin:end]):
            raise UsageError(code="stage-trains-nothing", begin=there[begin - 1] if begin else "the input")
    return [place - 1 for place in places[1:-1]]


def _divided(found: Chain, stages: int, costs: Sequence[float], limit: float) -> tuple[float, list[int]]:
    """The smallest largest cost of a stage, and where stages begin and end; no stage takes more seconds than `limit`.

    Each stage has something to train; no places where there is no such division.
    """
    count = len(costs)
    best: list[tuple[float, list[int]]] = [(0.0, [0]), *[(INFINITE, list[int]())] * count]
    for stage in range(stages):
        following: list[tuple[float, list[int]]] = [(INFINITE, list[int]())] * (count + 1)
        for start in range(stage, count):
            before, places = best[start]
            if before == INFINITE:
                continue
            cost, seconds, trained = 0.0, 0.0, 0
            for stop in range(start + 1, count + 1):
                layers = found.layers[stop - 1]
                cost, seconds, trained = cost + costs[stop - 1], seconds + layers.seconds, trained + layers.trained
                if seconds > limit:
                    break
                if trained and max(before, cost) < following[stop][0]:
                    following[stop] = max(before, cost), [*places, stop]
        best = following
    return best[count]
