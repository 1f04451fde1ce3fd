"""Finds where a model can be cut into stages, and what lies between, by watching one forward and backward of it."""

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from paceline.parallel.cuts import Chain, CutPoint, Layers, Leaf
from paceline.seeding import remembered_streams

ASKS_VALUES = ("item", "tolist", "numpy", "__bool__", "__float__", "__int__", "__index__", "__contains__")
STATE_COPIES = 4  # of a parameter: itself, its gradient, two moments of Adam
PASSES = 4  # the least time counts


@dataclass
class _Call:
    number: int
    start: int
    leaves: list[tuple[int, Tensor]]
    stop: int = 0


class _Flow(TorchFunctionMode):
    """Notes of each tensor when it was computed and when it was last used, in numbers of operations."""

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
        self._all_alive: list[Any] = [inputs]  # or one's address becomes another's
        self._plain = {id(t) for t in (*tree_leaves(inputs), *model.buffers())}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = torch.get_rng_state()
        result = func(*args, **(kwargs or {}))
        drawn = not torch.equal(before, torch.get_rng_state())
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        gives = [t for t in tree_leaves(result) if isinstance(t, Tensor)]
        if not gives and getattr(func, "__name__", "") not in ASKS_VALUES:
            return result  # a shape, say
        self.now, self.draws = self.now + 1, self.draws or drawn
        computed = drawn
        for tensor in given:
            if (name := self._state.get(id(tensor))) is not None:
                self.uses[name].add(self.now)
            if self.see(tensor):
                self.last_used[id(tensor)] = self.now
                computed = True
            computed = computed or id(tensor) in self._parameters
        for tensor in gives:
            self._all_alive.append(tensor)
            if id(tensor) in self._state:
                continue
            if computed:
                self._plain.discard(id(tensor))
                self.made.setdefault(id(tensor), self.now)
            elif id(tensor) not in self.made:
                self._plain.add(id(tensor))
        return result

    def see(self, tensor: Tensor) -> bool:
        """Whether it depends on a parameter; if it was never seen, it has just been computed in a way of its own."""
        if id(tensor) in self._plain or id(tensor) in self._parameters:
            return False
        self._all_alive.append(tensor)
        self.made.setdefault(id(tensor), self.now)
        return True

    def begin(self, name: str, _: nn.Module, args: Any, kwargs: Any) -> None:
        """A forward pre-hook."""
        leaves = [(i, t) for i, t in enumerate(tree_leaves((args, kwargs))) if isinstance(t, Tensor) and self.see(t)]
        self.called += 1
        self.calls[name].append(_Call(self.called, self.now, leaves))

    def end(self, name: str, *_: object) -> None:
        """A forward hook."""
        self.calls[name][-1].stop = self.now

    def is_cut(self, call: _Call) -> bool:
        """Whether all that is used after it began, and was computed before, goes in, and is not used any more after."""
        inside = {id(tensor) for _, tensor in call.leaves}
        return bool(inside) and all(
            self.made[key] > call.start or last <= (call.stop if key in inside else call.start)
            for key, last in self.last_used.items()
        )


def surveyed(model: nn.Module, forward: Callable[[], Any], inputs: Any, loss: Callable[[Any], Tensor]) -> Chain:
    """Watch `loss(forward())`, and its backward, of the whole `model` on this rank: places to cut, times, memory.

    Buffers and random streams are afterwards what they were.
    """
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    restore = remembered_streams()
    try:
        flow = _Flow(model, inputs)
        with _hooked(model, flow.begin, flow.end), flow:
            loss(forward())
        cuts = _found(flow)
        times = _Clock(model, cuts).measured(forward, loss)
    finally:
        restore()
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
        model.zero_grad(set_to_none=True)
    starts = [call.start for _, call in cuts]
    users = {name: tuple(sorted(_layers_of(name, flow, starts))) for name in flow.uses}
    for name, parameter in model.named_parameters():
        copies = STATE_COPIES if parameter.requires_grad else 1
        for number in users[name]:
            times[number] += Layers(0.0, 0.0, parameter.nbytes * copies, 0, parameter.numel() * parameter.requires_grad)
    return Chain(tuple(_cut(name, call, flow) for name, call in cuts), tuple(times), users, flow.draws)


def _cut(name: str, call: _Call, flow: _Flow) -> CutPoint:
    leaves = [Leaf(i, str(t.dtype).removeprefix("torch."), t.requires_grad) for i, t in call.leaves]
    before: list[str] = []
    for other, calls in flow.calls.items():  # outer modules come first
        inside = any(other.startswith(f"{outer}.") for outer in before)
        if calls and not inside and all(c.number < call.number and c.stop <= call.start for c in calls):
            before.append(other)
    around = [outer for outer in before if f"{name}.".startswith(f"{outer}.")]
    return CutPoint(name, tuple(leaves), tuple(outer for outer in before if outer not in around))


def _found(flow: _Flow) -> list[tuple[str, _Call]]:
    once = [(name, calls[0]) for name, calls in flow.calls.items() if name and len(calls) == 1]
    found: dict[int, tuple[str, _Call]] = {}
    for name, call in once:  # outer modules come first
        if call.start not in found and flow.is_cut(call):
            found[call.start] = name, call
    return [found[start] for start in sorted(found)]


def _layers_of(name: str, flow: _Flow, starts: Sequence[int]) -> set[int]:
    """Which layers use parameter `name`; where no use was seen, those in which its module is called."""
    if used := flow.uses[name]:
        return {sum(start < now for start in starts) for now in used}
    calls = flow.calls.get(name.rpartition(".")[0], [])
    first = {sum(start <= call.start for start in starts) for call in calls}
    return first | {sum(start < call.stop for start in starts) for call in calls} or {0}


class _Clock:
    """Times a forward and backward between places to cut, and counts what stays for backward."""

    def __init__(self, model: nn.Module, cuts: Sequence[tuple[str, _Call]]) -> None:
        self._model = model
        self._places = {name: (number, call.leaves[0][0]) for number, (name, call) in enumerate(cuts, 1)}
        self._own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
        self._count = len(cuts) + 1

    def measured(self, forward: Callable[[], Any], loss: Callable[[Any], Tensor]) -> list[Layers]:
        """Of all passes the least time of each stretch."""
        runs = [self._run(forward, loss) for _ in range(PASSES)]
        return [
            Layers(min(one.forward_seconds for one in of), min(one.backward_seconds for one in of), 0, of[0].kept_bytes)
            for of in zip(*runs, strict=True)
        ]

    def _run(self, forward: Callable[[], Any], loss: Callable[[Any], Tensor]) -> list[Layers]:
        self._at, self._kept, self._back = 0, [0] * self._count, [0.0] * self._count
        self._begun = [time.perf_counter()] * self._count
        with _hooked(self._model, self._begin), torch.autograd.graph.saved_tensors_hooks(self._keep, lambda t: t):
            total = loss(forward())
            turn = time.perf_counter()
            total.backward()
        self._model.zero_grad(set_to_none=True)
        there = [b - a for a, b in zip(self._begun, [*self._begun[1:], turn], strict=True)]
        self._back[0], last, back = time.perf_counter(), turn, [0.0] * self._count
        for number in reversed(range(self._count)):  # where no gradient has passed, the time is the next one's
            if self._back[number]:
                back[number], last = self._back[number] - last, self._back[number]
        return [Layers(a, b, 0, kept) for a, b, kept in zip(there, back, self._kept, strict=True)]

    def _begin(self, name: str, _: nn.Module, args: Any, kwargs: Any) -> None:
        if name in self._places:
            self._at, position = self._places[name]
            self._begun[self._at] = time.perf_counter()
            if (leaf := tree_leaves((args, kwargs))[position]).requires_grad:
                leaf.register_hook(partial(self._passed, self._at))

    def _passed(self, number: int, _: Tensor) -> None:
        self._back[number] = time.perf_counter()

    def _keep(self, tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in self._own:
            self._kept[self._at] += tensor.nbytes
        return tensor


@contextmanager
def _hooked(model: nn.Module, begin: Callable[..., None], end: Callable[..., None] | None = None) -> Generator[None]:
    """Inside, `begin` and `end` are called with each module's name around its forward."""
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
