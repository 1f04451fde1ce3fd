"""Splits a model into the stages of a pipeline, by recording one forward and backward.

A stage is a part of the model's forward, from one module's call to another's. A model can be split before a call if all
tensors that were computed before the call and are used after it are inputs of the call. The earlier stage sends these
inputs, and the later stage needs nothing else. So the model's forward may be any Python code around its layers.
"""

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from paceline.errors import UsageError, first_few
from paceline.parallel.pipeline import SplitPoint, StageInputSpec
from paceline.seeding import GeneratorStates

ASKS_VALUES = ("item", "tolist", "numpy", "__bool__", "__float__", "__int__", "__index__", "__contains__")
STATE_COPIES = 4  # for a parameter: itself, its gradient, two moments of Adam
NUM_MEASUREMENTS = 4  # measurements; the shortest time counts
MAX_STAGE_SLOWDOWN = 1.05  # the slowest stage may take this much longer if that saves memory
MAX_SHOWN = 12
INFINITE = float("inf")


@dataclass(frozen=True)
class LayerCost:
    seconds: float = 0.0
    """of forward and backward of two samples"""
    state_bytes: int = 0
    """size of weights, gradients and the state of an optimizer with two moments"""
    kept_bytes: int = 0
    """activations that the forward of two samples keeps for backward"""
    trained: int = 0
    """number of trained elements"""

    def __add__(self, other: "LayerCost") -> "LayerCost":
        return LayerCost(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))


@dataclass(frozen=True)
class LayerChain:
    """A model as a chain: `layers[i]` is before `points[i]`, and the last layers are after the last point."""

    points: tuple[SplitPoint, ...]
    layers: tuple[LayerCost, ...]
    users: dict[str, tuple[int, ...]]
    """by name of a parameter or buffer, the indices of the layers that use it"""
    draws: bool
    """whether the forward draws random numbers"""


# ---- the best split ----------------------------------------------------------------------------------------------


def choose_split_points(chain: LayerChain, stages: int, names: Sequence[str] = ()) -> list[int]:
    """The indices of the split points between `stages` stages: those with these `names`, else the best ones.

    The best split has the fastest slowest stage. Among splits of about the same speed, its largest stage needs the
    least memory.
    """
    modules = [point.module for point in chain.points]
    shown = first_few(modules, MAX_SHOWN) or "no module"
    if unknown := [name for name in names if name not in modules]:
        raise UsageError(code="stage-cannot-begin", value=unknown[0], shown=shown)
    seconds = [layers.seconds for layers in chain.layers]
    if names:
        bounds = [0, *sorted(modules.index(name) + 1 for name in names), len(chain.layers)]
    else:
        fastest, _ = _partition(chain, stages, seconds, INFINITE)
        sizes = [float(layers.state_bytes + layers.kept_bytes) for layers in chain.layers]
        _, bounds = _partition(chain, stages, sizes, fastest * MAX_STAGE_SLOWDOWN)
    if not bounds:
        max_stages = next((n for n in range(stages - 1, 0, -1) if _partition(chain, n, seconds, INFINITE)[1]), 1)
        raise UsageError(code="too-many-stages", value=stages, most=max_stages, shown=shown)
    for begin, end in pairwise(bounds):
        if not sum(layers.trained for layers in chain.layers[begin:end]):
            raise UsageError(code="stage-trains-nothing", begin=modules[begin - 1] if begin else "the input")
    return [bound - 1 for bound in bounds[1:-1]]


def _partition(chain: LayerChain, stages: int, costs: Sequence[float], limit: float) -> tuple[float, list[int]]:
    """The smallest possible cost of the largest stage, and the bounds of the stages; no bounds if there is no split.

    Each stage trains a parameter, and takes at most `limit` seconds.
    """
    count = len(costs)
    best: list[tuple[float, list[int]]] = [(0.0, [0]), *[(INFINITE, list[int]())] * count]
    for stage in range(stages):
        following: list[tuple[float, list[int]]] = [(INFINITE, list[int]())] * (count + 1)
        for start in range(stage, count):
            before, bounds = best[start]
            if before == INFINITE:
                continue
            cost, seconds, trained = 0.0, 0.0, 0
            for stop in range(start + 1, count + 1):
                layers = chain.layers[stop - 1]
                cost, seconds, trained = cost + costs[stop - 1], seconds + layers.seconds, trained + layers.trained
                if seconds > limit:
                    break
                if trained and max(before, cost) < following[stop][0]:
                    following[stop] = max(before, cost), [*bounds, stop]
        best = following
    return best[count]


# ---- the survey --------------------------------------------------------------------------------------------------


@dataclass
class _Call:
    number: int
    start: int
    leaves: list[tuple[int, Tensor]]
    stop: int = 0


class _DataFlow(TorchFunctionMode):
    """Records when each tensor was computed and when it was last used, in numbers of operations."""

    def __init__(self, model: nn.Module, inputs: Any) -> None:
        super().__init__()
        self.now, self.called, self.draws = 0, 0, False
        state = [*model.named_parameters(), *model.named_buffers()]
        self.uses: dict[str, set[int]] = {name: set() for name, _ in state}
        self.calls: dict[str, list[_Call]] = {name: [] for name, _ in model.named_modules()}
        self.made: dict[int, int] = {}
        self.last_used: dict[int, int] = {}
        self._state = {id(tensor): name for name, tensor in state}
        self._parameters = {id(p) for p in model.parameters()}
        self._all_alive: list[Any] = [inputs]  # else a new tensor could have the same id
        self._plain = {id(t) for t in (*tree_leaves(inputs), *model.buffers())}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = torch.get_rng_state()
        result = func(*args, **(kwargs or {}))
        drawn = not torch.equal(before, torch.get_rng_state())
        inputs = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        outputs = [t for t in tree_leaves(result) if isinstance(t, Tensor)]
        if not outputs and getattr(func, "__name__", "") not in ASKS_VALUES:
            return result  # e.g. a shape
        self.now, self.draws = self.now + 1, self.draws or drawn
        computed = drawn
        for tensor in inputs:
            if (name := self._state.get(id(tensor))) is not None:
                self.uses[name].add(self.now)
            if self.depends_on_parameter(tensor):
                self.last_used[id(tensor)] = self.now
                computed = True
            computed = computed or id(tensor) in self._parameters
        for tensor in outputs:
            self._all_alive.append(tensor)
            if id(tensor) in self._state:
                continue
            if computed:
                self._plain.discard(id(tensor))
                self.made.setdefault(id(tensor), self.now)
            elif id(tensor) not in self.made:
                self._plain.add(id(tensor))
        return result

    def depends_on_parameter(self, tensor: Tensor) -> bool:
        """Whether the tensor depends on a parameter. An unknown tensor was computed now, by a custom operation."""
        if id(tensor) in self._plain or id(tensor) in self._parameters:
            return False
        self._all_alive.append(tensor)
        self.made.setdefault(id(tensor), self.now)
        return True

    def begin(self, name: str, _: nn.Module, args: Any, kwargs: Any) -> None:
        leaves = enumerate(tree_leaves((args, kwargs)))
        dependent = [(i, t) for i, t in leaves if isinstance(t, Tensor) and self.depends_on_parameter(t)]
        self.called += 1
        self.calls[name].append(_Call(self.called, self.now, dependent))

    def end(self, name: str, *_: object) -> None:
        self.calls[name][-1].stop = self.now

    def points(self) -> list[tuple[str, _Call]]:
        by_start: dict[int, tuple[str, _Call]] = {}
        for name, calls in self.calls.items():  # outer modules come first
            if name and len(calls) == 1 and calls[0].start not in by_start and self._can_split(calls[0]):
                by_start[calls[0].start] = name, calls[0]
        return [by_start[start] for start in sorted(by_start)]

    def _can_split(self, call: _Call) -> bool:
        """Whether tensors from before the call are not used after it, and in it only as its inputs."""
        inside = {id(tensor) for _, tensor in call.leaves}
        return bool(inside) and all(
            self.made[key] > call.start or last <= (call.stop if key in inside else call.start)
            for key, last in self.last_used.items()
        )

    def split_point(self, name: str, call: _Call) -> SplitPoint:
        leaves = [StageInputSpec(i, str(t.dtype).removeprefix("torch."), t.requires_grad) for i, t in call.leaves]
        before: list[str] = []
        for other, calls in self.calls.items():  # outer modules come first
            inside = any(other.startswith(f"{outer}.") for outer in before)
            if calls and not inside and all(c.number < call.number and c.stop <= call.start for c in calls):
                before.append(other)
        return SplitPoint(name, tuple(leaves), tuple(o for o in before if not f"{name}.".startswith(f"{o}.")))

    def layers_of(self, name: str, starts: Sequence[int]) -> set[int]:
        """The layers that use parameter `name`; if none does, the layers in which its module is called."""
        if used := self.uses[name]:
            return {sum(start < position for start in starts) for position in used}
        calls = self.calls.get(name.rpartition(".")[0], [])
        first = {sum(start <= call.start for start in starts) for call in calls}
        return first | {sum(start < call.stop for start in starts) for call in calls} or {0}


def profile_chain(
    model: nn.Module, forward: Callable[[], Any], inputs: Any, loss: Callable[[Any], Tensor]
) -> LayerChain:
    """Run `loss(forward())` and its backward on the whole `model` of this rank: find split points, times and memory.

    Buffers and random streams are restored afterwards.
    """
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    restore = GeneratorStates().restore
    try:
        flow = _DataFlow(model, inputs)
        with _hooked(model, flow.begin, flow.end), flow:
            loss(forward())
        points = flow.points()
        layers = _SegmentProfiler(model, points).measure(forward, loss)
    finally:
        restore()
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
        model.zero_grad(set_to_none=True)
    starts = [call.start for _, call in points]
    users = {name: tuple(sorted(flow.layers_of(name, starts))) for name in flow.uses}
    for name, parameter in model.named_parameters():
        size = parameter.nbytes * (STATE_COPIES if parameter.requires_grad else 1)
        for number in users[name]:
            layers[number] += LayerCost(state_bytes=size, trained=parameter.numel() * parameter.requires_grad)
    return LayerChain(tuple(flow.split_point(name, call) for name, call in points), tuple(layers), users, flow.draws)


class _SegmentProfiler:
    """Measures forward and backward between split points, and the bytes that are kept for backward."""

    def __init__(self, model: nn.Module, points: Sequence[tuple[str, _Call]]) -> None:
        self._model = model
        self._places = {name: (number, call.leaves[0][0]) for number, (name, call) in enumerate(points, 1)}
        self._state = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
        self._count = len(points) + 1

    def measure(self, forward: Callable[[], Any], loss: Callable[[Any], Tensor]) -> list[LayerCost]:
        runs = [self._run(forward, loss) for _ in range(NUM_MEASUREMENTS)]
        return [LayerCost(min(run.seconds for run in of), 0, of[0].kept_bytes) for of in zip(*runs, strict=True)]

    def _run(self, forward: Callable[[], Any], loss: Callable[[Any], Tensor]) -> list[LayerCost]:
        self._at, self._kept, self._passed_at = 0, [0] * self._count, [0.0] * self._count
        self._begun = [time.perf_counter()] * self._count
        with _hooked(self._model, self._begin), torch.autograd.graph.saved_tensors_hooks(self._keep, lambda t: t):
            total = loss(forward())
            backward_start = time.perf_counter()
            total.backward()
        self._model.zero_grad(set_to_none=True)
        seconds = [b - a for a, b in zip(self._begun, [*self._begun[1:], backward_start], strict=True)]
        self._passed_at[0], last = time.perf_counter(), backward_start
        for number in reversed(range(self._count)):  # without a gradient, the time counts for the layers before
            if self._passed_at[number]:
                seconds[number] += self._passed_at[number] - last
                last = self._passed_at[number]
        return [LayerCost(of_layers, 0, kept) for of_layers, kept in zip(seconds, self._kept, strict=True)]

    def _begin(self, name: str, _: nn.Module, args: Any, kwargs: Any) -> None:
        if name in self._places:
            self._at, position = self._places[name]
            self._begun[self._at] = time.perf_counter()
            if (leaf := tree_leaves((args, kwargs))[position]).requires_grad:
                leaf.register_hook(partial(self._passed, self._at))

    def _passed(self, number: int, _: Tensor) -> None:
        self._passed_at[number] = time.perf_counter()

    def _keep(self, tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in self._state:
            self._kept[self._at] += tensor.nbytes
        return tensor


@contextmanager
def _hooked(model: nn.Module, begin: Callable[..., None], end: Callable[..., None] | None = None) -> Generator[None]:
    handles: list[Any] = []
    for name, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(partial(begin, name), with_kwargs=True))
        if end is not None:
            handles.append(module.register_forward_hook(partial(end, name)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
