"""A pipeline: a stage of a model, the order of its micro-batches, and its messages to other stages.

A stage is a part of the model's forward, from one module's call to another's (see `partition`). Every stage runs the
model's Python code from the top. The parameters of other stages are on the "meta" device, which computes shapes only.
Before the stage begins, modules are skipped, and their outputs are shapes. At its begin, the tensors from the previous
stage replace the shapes. At its end, the stage sends the inputs of the next module, and leaves the forward. A value
that bypasses the split point is still a shape, so a stage cannot compute with it by mistake.

A stage also sends the state of its random streams, so that the next stage draws the same numbers as one process.
"""

from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from paceline.compute.forward import wrap_forward
from paceline.errors import TrainingError
from paceline.protocol.evidence import Phase
from paceline.rank.world import World
from paceline.seeding import generator_states, restore_generator_states

META = torch.device("meta")
Schedule = Literal["1f1b", "gpipe"]
Action = tuple[bool, int]
"""(forward or backward, number of the micro-batch)"""
Take = Callable[[Tensor], Tensor]
"""(a tensor of the shape and type) -> the tensor that the previous stage has sent"""


@dataclass(frozen=True)
class StageInputSpec:
    position: int
    """among the flattened inputs"""
    dtype: str
    trained: bool
    """whether the next stage sends its gradient back"""


@dataclass(frozen=True)
class SplitPoint:
    module: str
    leaves: tuple[StageInputSpec, ...]
    before: tuple[str, ...]
    """outermost modules that are only called before it"""


def stage_schedule(schedule: Schedule, stage: int, stages: int, microbatches: int) -> list[Action]:
    """The forwards and backwards of this stage in a step, in order.

    "gpipe" (Huang et al. 2018): all forwards, then all backwards. A stage keeps the activations of all micro-batches.
    "1f1b" (Narayanan et al. 2019, "PipeDream"): a stage runs a backward as soon as possible, then the next forward. In
    S stages, stage s keeps the activations of at most S - s micro-batches. Both schedules are idle for the same time.

    stage_schedule("1f1b", 0, 2, 3) is F0 F1 B0 F2 B1 B2. For stage 1 it is F0 B0 F1 B1 F2 B2.
    """
    ahead = microbatches if schedule == "gpipe" else min(microbatches, stages - stage)
    order = [(True, number) for number in range(ahead)]
    for number in range(ahead, microbatches):
        order += [(False, number - ahead), (True, number)]
    return order + [(False, number) for number in range(microbatches - ahead, microbatches)]


def idle_fractions(seconds: Sequence[float], microbatches: int) -> list[float]:
    """The fraction of a step in which each stage waits, if stage s takes `seconds[s]` for a micro-batch.

    The first micro-batch passes all stages, and the others follow at the pace of the slowest one. It is
    (S - 1) / (M + S - 1) for S equally fast stages and M micro-batches. Messages take no time in this model.
    """
    step_seconds = sum(seconds) + (microbatches - 1) * max(seconds)
    return [1 - microbatches * stage_seconds / step_seconds for stage_seconds in seconds]


class StageMicroBatch:
    """One micro-batch in this stage, between its forward and its backward."""

    def __init__(self) -> None:
        self.sent: list[Tensor] = []
        """tensors for the next stage, with their autograd graphs"""
        self.result: Any = None
        """the output of the model, on the last stage"""
        self.taken: list[Tensor] = []
        """shapes of the tensors from the previous stage that need gradients"""
        self.gradients: list[Tensor | None] = []
        """the gradients of `taken`, after the backward"""

    def reset(self) -> None:
        self.__init__()


class _EndOfStage(BaseException):
    """Leaves a forward at the stage's end. No `except Exception` of a model catches it."""


class _Receive(torch.autograd.Function):
    """Returns the tensor from `take` as the output of an operation, so that a model may write into it.

    Its backward passes the gradient to `keep`.
    """

    @staticmethod
    def forward(ctx: Any, _: Tensor, take: Callable[[], Tensor], keep: Callable[[Tensor], None]) -> Tensor:
        ctx.keep = keep
        return take()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.keep(gradients[0])
        return None, None, None


class _ShapesOnly(TorchFunctionMode):
    """Inside, an operation with a shape among its inputs returns a shape. A shape reports `device` as its device.

    So a tensor that a model creates independently of its inputs, for example a mask, has values.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not any(_is_shape(leaf) for leaf in tree_leaves((args, kwargs))):
            return func(*args, **kwargs)
        if func == torch.Tensor.device.__get__:  # pyright: ignore[reportAttributeAccessIssue]
            return self._device
        if func is torch.Tensor.__float__:  # for batch norm's count of batches, on which no shape depends
            return 1.0
        args, kwargs = tree_map_only(torch.device, lambda _: META, _as_shapes((args, kwargs)))
        return func(*args, **kwargs)


def _is_shape(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_meta


def _as_shapes(value: Any) -> Any:
    return tree_map_only(Tensor, lambda t: t if t.is_meta else t.to(META), value)


class ModelStage:
    """The part of `model`'s forward from `begin` to `end`. None is the begin or end of the model."""

    def __init__(
        self, model: nn.Module, begin: SplitPoint | None, end: SplitPoint | None, device: torch.device, *,
        take: Take, send: Callable[[Tensor], None], draws: bool,
    ) -> None:  # fmt: skip
        """`take` and `send` are called for each tensor, in the same order on both sides.

        With `draws` they also transfer the state of the random streams, even in eval mode: some models draw in it.
        """
        self.model, self._begin, self._end, self._device = model, begin, end, device
        self._take, self._send, self._draws = take, send, draws
        self._skipping = ExitStack()
        self._now = StageMicroBatch()
        self._anchor = torch.zeros((), requires_grad=True)
        self._inside = False
        for point, hook in ((begin, self._arrive), (end, self._depart)):
            if point is not None:
                model.get_submodule(point.module).register_forward_pre_hook(hook, with_kwargs=True)

    def skip(self, modules: Sequence[nn.Module]) -> None:
        """Let these modules, which are called before the stage begins, return shapes without computation."""
        for module in modules:
            wrap_forward(module, partial(self._skipped, {}, module))

    def forward(self, compute: Callable[[], Any]) -> StageMicroBatch:
        """Run `compute()`, which calls the model: receive, compute and send. The last stage has the result."""
        self._now, self._inside = StageMicroBatch(), self._begin is None
        with ExitStack() as self._skipping:
            if self._begin is not None:
                self._skipping.enter_context(_ShapesOnly(self._device))
            try:
                self._now.result = compute()
            except _EndOfStage:
                return self._now
        missed = self._end if self._inside else self._begin
        if missed is not None:
            raise TrainingError(code="stage-module-not-called", module=missed.module)
        if any(map(_is_shape, tree_leaves(self._now.result))):
            raise _past_stage_error(self._begin)
        return self._now

    def _arrive(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        assert self._begin is not None
        self._skipping.close()
        self._inside, run = True, self._now
        leaves, form = tree_flatten((args, kwargs))
        for leaf in self._begin.leaves:
            shape = torch.empty(leaves[leaf.position].shape, dtype=getattr(torch, leaf.dtype), device=META)
            take = partial(self._take, shape)
            if leaf.trained and torch.is_grad_enabled():
                run.taken.append(shape)
                run.gradients.append(None)
                keep = partial(run.gradients.__setitem__, len(run.gradients) - 1)
                leaves[leaf.position] = _Receive.apply(self._anchor, take, keep)
            else:
                leaves[leaf.position] = take()
        if self._draws:
            like = torch.empty_like(generator_states(self._device), device=META)
            restore_generator_states(self._take(like), self._device)
        if any(map(_is_shape, leaves)):
            raise _past_stage_error(self._begin)
        return tree_unflatten(leaves, form)

    def _depart(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        assert self._end is not None
        if not self._inside:
            raise TrainingError(code="stage-module-too-early", module=module)
        leaves = tree_leaves((args, kwargs))
        for leaf in self._end.leaves:
            tensor = leaves[leaf.position]
            if tensor.is_meta:
                raise _past_stage_error(self._begin)
            self._send(tensor.detach().contiguous())
            if leaf.trained and torch.is_grad_enabled():
                self._now.sent.append(tensor)
        if self._draws:
            self._send(generator_states(self._device))
        raise _EndOfStage

    def _skipped(
        self, cache: dict[Any, Any], module: nn.Module, call: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        if self._inside:
            return call(*args, **kwargs)
        leaves, form = tree_flatten((args, kwargs))
        key = (str(form), *(tuple(t.shape) if isinstance(t, Tensor) else str(t) for t in leaves))
        if key not in cache:
            with torch.no_grad(), _in_shapes(module):
                cache[key] = _as_shapes(call(*_as_shapes(args), **_as_shapes(kwargs)))
        return tree_map_only(Tensor, torch.empty_like, cache[key])


@contextmanager
def _in_shapes(module: nn.Module) -> Generator[None]:
    owners: list[Any] = [tensors for m in module.modules() for tensors in (m._parameters, m._buffers)]  # pyright: ignore[reportPrivateUsage]
    kept = [dict(tensors) for tensors in owners]
    for tensors in owners:
        tensors.update(_as_shapes(dict(tensors)))
    try:
        yield
    finally:
        for tensors, before in zip(owners, kept, strict=True):
            tensors.update(before)


def _past_stage_error(begin: SplitPoint | None) -> TrainingError:
    return TrainingError(code="past-the-stage", module=begin.module if begin else "a split point")


class Pipeline:
    """This rank's stage and its neighbours. It sends outputs to the next stage, and gradients to the previous one.

    Each direction has a separate process group. On a GPU, messages between two ranks of one group run in the order of
    their calls, so a message to the next stage would block one to the previous stage forever.
    """

    def __init__(
        self, world: World, model: nn.Module, points: Sequence[SplitPoint], *, draws: bool, schedule: Schedule,
        names: dict[str, list[str]], called: Mapping[str, str],
    ) -> None:  # fmt: skip
        """The model is split at `points`, one fewer than ranks along the pipeline (a collective of all ranks)."""
        self.names = names
        """`checkpoint.export.state_dict_names_by_saved_name` of the whole model"""
        self.called = called
        """by name in the whole model's state_dict, the name under which a tensor is saved (tied ones have several)"""
        along = world.along("pipeline")
        assert world.mesh is not None
        self._device = world.device
        self._schedule: Schedule = schedule
        self._pending = deque[tuple[Any, Tensor]]()
        for members in sorted({world.mesh.peers(rank, ("pipeline",)) for rank in range(world.size)}):
            down, up = (dist.new_group(members, group_desc=f"pipeline of the mesh, {name}") for name in ("down", "up"))
            if world.rank in members:
                assert isinstance(down, dist.ProcessGroup)
                assert isinstance(up, dist.ProcessGroup)
                self._down, self._up = down, up
        self.number, self.stages = along.rank, along.size
        begin, end = [None, *points, None][along.rank : along.rank + 2]
        self.stage = ModelStage(
            model, begin, end, world.device, take=self._receive_activation, send=self._send_down, draws=draws
        )
        self.sent_bytes = 0
        self.enter: Callable[[Phase], object] | None = None
        """called with each phase in a step, so that waiting for other stages is a phase"""

    @property
    def is_last(self) -> bool:
        return self.number == self.stages - 1

    def actions(self, microbatches: int) -> list[Action]:
        return stage_schedule(self._schedule, self.number, self.stages, microbatches)

    def backward(self, run: StageMicroBatch, propagate: Callable[[], object] | None) -> None:
        if propagate is not None:
            propagate()
        elif run.sent:
            torch.autograd.backward(run.sent, [self._receive_gradient(sent) for sent in run.sent])
        for like, gradient in zip(run.taken, run.gradients, strict=True):
            self._send(torch.zeros_like(like, device=self._device) if gradient is None else gradient, -1, self._up)
        run.reset()

    def wait_for_sends(self) -> None:
        while self._pending:
            self._pending.popleft()[0].wait()

    def _send_down(self, tensor: Tensor) -> None:
        # limit the pending messages in an evaluation; in a step, backward limits them, and this could deadlock
        while self.enter is None and len(self._pending) > 4 * self.stages:
            self._pending.popleft()[0].wait()
        self._send(tensor, 1, self._down)

    def _receive_activation(self, like: Tensor) -> Tensor:
        return self._receive(like, -1, self._down, Phase.FORWARD)

    def _receive_gradient(self, like: Tensor) -> Tensor:
        return self._receive(like, 1, self._up, Phase.BACKWARD)

    def _send(self, tensor: Tensor, step: int, group: dist.ProcessGroup) -> None:
        sent = tensor.to(self._device).contiguous()
        if sent.numel() and (work := dist.isend(sent, group=group, group_dst=self.number + step)) is not None:
            self._pending.append((work, sent))
            self.sent_bytes += sent.nbytes

    def _receive(self, like: Tensor, step: int, group: dist.ProcessGroup, next_phase: Phase) -> Tensor:
        received = torch.empty(like.shape, dtype=like.dtype, device=self._device)
        if received.numel():
            if self.enter is not None:
                self.enter(Phase.SYNC)
            dist.recv(received, group=group, group_src=self.number + step)
            if self.enter is not None:
                self.enter(next_phase)
        return received
