"""One stage of a model: a stretch of its own forward, from one module's call to another's, as `cuts` has found them.

Every stage runs the model's own Python from the top, with the parameters of other stages on the "meta" device, which
computes shapes only. Up to its begin nothing is computed: modules are skipped, and what they give is a shape. At its
begin that becomes what the stage before has sent. At its end it sends what goes into the next module, and leaves the
forward. What flows past the cut, against what was found, is still a mere shape, and cannot be mistaken for a number.

The random streams travel along: what a stage draws is what one process would draw at that place.
"""

from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from paceline.compute.rules import around_forward
from paceline.errors import TrainingError
from paceline.parallel.cuts import CutPoint
from paceline.seeding import put_stream_states, stream_states

META = torch.device("meta")
Take = Callable[[Tensor], Tensor]
"""A tensor of the shape and type wanted -> what the stage before has sent, as such a tensor."""


class Passing:
    """One micro-batch in this stage, between its forward and its backward."""

    def __init__(self) -> None:
        self.sent: list[Tensor] = []
        """what goes to the next stage, with graphs"""
        self.result: Any = None
        """what the model gives, on the last stage"""
        self.taken: list[Tensor] = []
        """the shapes of what the stage before has sent, and wants gradients of"""
        self.gradients: list[Tensor | None] = []
        """these, after the backward"""

    def forget(self) -> None:
        """Let go of all tensors."""
        self.__init__()


class _Gone(BaseException):
    """Leaves a forward behind the stage's end; no `except Exception` of a model's holds it up."""


class _Arrive(torch.autograd.Function):
    """Gives what `take` gives, made inside, so that a model may write into it; keeps its gradient."""

    @staticmethod
    def forward(ctx: Any, _: Tensor, take: Callable[[], Tensor], keep: Callable[[Tensor], None]) -> Tensor:
        ctx.keep = keep
        return take()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.keep(gradients[0])
        return None, None, None


class _ShapesOnly(TorchFunctionMode):
    """Inside, an operation on a mere shape gives a shape, whatever else it is given; it says that it is on `device`.

    So what a model makes beside what flows through it, a mask of that length say, is made in earnest.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not any(isinstance(t, Tensor) and t.is_meta for t in tree_leaves((args, kwargs))):
            return func(*args, **kwargs)
        if func == torch.Tensor.device.__get__:  # pyright: ignore[reportAttributeAccessIssue]
            return self._device
        if func is torch.Tensor.__float__:  # of batch norm's count of batches: no shape depends on it
            return 1.0
        args, kwargs = tree_map_only(torch.device, lambda _: META, _as_shapes((args, kwargs)))
        return func(*args, **kwargs)


def _as_shapes(value: Any) -> Any:
    return tree_map_only(Tensor, lambda t: t if t.is_meta else t.to(META), value)


class ModelStage:
    """The stretch of `model`'s forward that begins at the cut `begin` and ends at `end`; None: with the model's own."""

    def __init__(
        self,
        model: nn.Module,
        begin: CutPoint | None,
        end: CutPoint | None,
        device: torch.device,
        *,
        take: Take,
        send: Callable[[Tensor], None],
        draws: bool,
    ) -> None:
        """`take` and `send` are asked for each tensor that travels, in one order on both sides; `draws`: the random
        streams travel, too; in eval mode as well, where some models draw still.
        """
        self.model, self._begin, self._end, self._device = model, begin, end, device
        self._take, self._send, self._draws = take, send, draws
        self._skipping = ExitStack()
        self._now = Passing()
        self._anchor = torch.zeros((), requires_grad=True)
        self._inside = False
        for name, module in model.named_modules():
            if begin is not None and name == begin.module:
                module.register_forward_pre_hook(self._arrive, with_kwargs=True)
            if end is not None and name == end.module:
                module.register_forward_pre_hook(self._depart, with_kwargs=True)

    def skip(self, modules: Sequence[nn.Module]) -> None:
        """These are called before the stage begins: from now on they give shapes, and compute nothing."""
        for module in modules:
            around_forward(module, partial(self._skipped, {}, module))

    def forward(self, compute: Callable[[], Any]) -> Passing:
        """Run `compute()`, which calls the model: receives, computes and sends. The result is there on the last stage.

        Raises:
            TrainingError: the forward has not gone through the stage's begin and end.
        """
        self._now, self._inside = Passing(), self._begin is None
        with ExitStack() as self._skipping:
            if self._begin is not None:
                self._skipping.enter_context(_ShapesOnly(self._device))
            try:
                self._now.result = compute()
            except _Gone:
                return self._now
        if self._end is not None or not self._inside:
            missed = self._end if self._inside else self._begin
            assert missed is not None
            raise TrainingError(code="stage-module-not-called", module=missed.module)
        if any(isinstance(t, Tensor) and t.is_meta for t in tree_leaves(self._now.result)):
            raise _past(self._begin)
        return self._now

    def _arrive(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        assert self._begin is not None
        self._skipping.close()
        self._inside, run = True, self._now
        leaves, form = tree_flatten((args, kwargs))
        for leaf in self._begin.leaves:
            shape = leaves[leaf.position]
            wanted = torch.empty(shape.shape, dtype=getattr(torch, leaf.dtype), device=META)
            take = partial(self._take, wanted)
            if leaf.trained and torch.is_grad_enabled():
                run.taken.append(wanted)
                run.gradients.append(None)
                keep = partial(run.gradients.__setitem__, len(run.gradients) - 1)
                leaves[leaf.position] = _Arrive.apply(self._anchor, take, keep)
            else:
                leaves[leaf.position] = take()
        if self._draws:
            put_stream_states(self._take(torch.empty_like(stream_states(self._device), device=META)), self._device)
        if any(isinstance(t, Tensor) and t.is_meta for t in leaves):
            raise _past(self._begin)
        return tree_unflatten(leaves, form)

    def _depart(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        assert self._end is not None
        if not self._inside:
            raise TrainingError(code="stage-module-too-early", module=module)
        leaves = tree_leaves((args, kwargs))
        for leaf in self._end.leaves:
            tensor = leaves[leaf.position]
            if tensor.is_meta:
                raise _past(self._begin)
            self._send(tensor.detach().contiguous())
            if leaf.trained and torch.is_grad_enabled():
                self._now.sent.append(tensor)
        if self._draws:
            self._send(stream_states(self._device))
        raise _Gone

    def _skipped(
        self, known: dict[Any, Any], module: nn.Module, call: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        if self._inside:
            return call(*args, **kwargs)
        leaves, form = tree_flatten((args, kwargs))
        key = (str(form), *(tuple(t.shape) if isinstance(t, Tensor) else str(t) for t in leaves))
        if key not in known:
            with torch.no_grad(), _in_shapes(module):
                known[key] = _as_shapes(call(*_as_shapes(args), **_as_shapes(kwargs)))
        return tree_map_only(Tensor, torch.empty_like, known[key])


@contextmanager
def _in_shapes(module: nn.Module) -> Generator[None]:
    """Inside, what parameters and buffers it still has are shapes, too: a layer may be used by several stages."""
    owners: list[Any] = [there for one in module.modules() for there in (one._parameters, one._buffers)]  # pyright: ignore[reportPrivateUsage]
    kept = [dict(there) for there in owners]
    for there in owners:
        there.update(_as_shapes(dict(there)))
    try:
        yield
    finally:
        for there, before in zip(owners, kept, strict=True):
            there.update(before)


def _past(begin: CutPoint | None) -> TrainingError:
    return TrainingError(code="past-the-stage", module=begin.module if begin else "a cut")
