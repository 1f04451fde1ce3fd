"""CUDA graphs: forward and backward of the model as one recording each, replayed without Python and launches.

A recording is valid for one shape of inputs and for the very memory of parameters and buffers. One is made for each
such set, at its first use in training, and compared once, on that batch, with the model. Evaluation is not recorded.
"""

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from paceline.compute.rules import around_forward, subclassed
from paceline.errors import TrainingError, UsageError
from paceline.nested import tensors
from paceline.worker import recorder

MAX_GRAPHS = 8  # each holds memory for all activations of its shape
TOLERANCE = 1e-3  # relative, between a recording and the model itself: convolutions may choose another algorithm

Call = Callable[..., Any]
_plain = ContextVar("plain", default=False)


def graph_model(model: nn.Module, device: torch.device) -> None:
    """Let `model` be recorded and replayed in training. Call it after `in_bf16`, before a strategy is applied.

    Raises:
        UsageError: `device` is no GPU. Later, from a call, TrainingError: shapes that keep changing, a recording that
            does not compute what the model computes, or a model that cannot be recorded.
    """
    if device.type != "cuda":
        raise UsageError(code="cuda-graphs-on-cpu")
    graphs: dict[Any, Call] = {}
    # torch warns of nodes of another stream that are still alive: a recording keeps those of its own, and is compared
    torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(False)

    def around(forward: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # a dispatch mode looks at each operation, as the search for samples that are not finite does
        if not (torch.is_grad_enabled() and model.training) or is_in_torch_dispatch_mode() or _plain.get():
            return forward(*args, **kwargs)
        if kwargs or not all(isinstance(argument, Tensor) for argument in args):
            raise TrainingError(code="cuda-graphs-inputs")
        key = (tuple((a.shape, a.dtype) for a in args), tuple(b.data_ptr() for b in model.buffers()))
        if key not in graphs:
            if len(graphs) == MAX_GRAPHS:
                raise TrainingError(
                    code="cuda-graphs-too-many", most=MAX_GRAPHS, shapes=", ".join(str(tuple(a.shape)) for a in args)
                )
            graphs[key] = _recorded(model, forward, args)
        return graphs[key](*args)

    around_forward(model, around)
    subclassed(model, records_graphs=True)
    for parameter in model.parameters():
        # A replay gives memory of the recording, which the next replay overwrites: .grad must not be that memory.
        if parameter.requires_grad:
            parameter.register_hook(torch.clone)


@contextmanager
def not_recorded() -> Generator[None]:
    """Inside, models run as they are: what is computed for nothing must not be what later steps replay."""
    before = _plain.set(True)
    try:
        yield
    finally:
        _plain.reset(before)


class _Body(nn.Module):
    """The model as torch wants it: without hooks, and with a forward that may be replaced."""

    def __init__(self, model: nn.Module, call: Call) -> None:
        super().__init__()
        self.model, self.call = model, call

    def forward(self, *args: Tensor) -> Any:
        return self.call(*args)


def _recorded(model: nn.Module, forward: Call, args: tuple[Tensor, ...]) -> Call:
    body = _Body(model, forward)
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    device = args[0].device
    stream = torch.cuda.get_rng_state(device)

    def as_before() -> None:
        torch.cuda.set_rng_state(stream, device)
        for buffer, before in buffers:
            buffer.copy_(before)

    def gradients(call: Call) -> list[Tensor]:
        as_before()
        outputs = call(*args)
        total = sum(t.float().sum() for t in tensors(outputs))
        assert isinstance(total, Tensor)
        parameters = [p for p in model.parameters() if p.requires_grad]
        found = cast("Sequence[Tensor | None]", torch.autograd.grad(total, parameters, allow_unused=True))
        return [total.detach(), *(f.clone() for f in found if f is not None)]

    try:
        wanted = gradients(forward)
        as_before()
        recorder.capturing.set()
        replay: Any = torch.cuda.make_graphed_callables(body, args, allow_unused_input=True)
        found = gradients(replay)
        as_before()
    except RuntimeError as error:
        raise TrainingError(code="cuda-graphs-unrecordable", reason=str(error).splitlines()[0]) from error
    finally:
        recorder.capturing.clear()
    if len(found) != len(wanted) or not all(_close(a, b) for a, b in zip(found, wanted, strict=True)):
        raise TrainingError(code="cuda-graphs-differ")
    return replay


def _close(a: Tensor, b: Tensor) -> bool:
    return float((a - b).abs().max()) <= TOLERANCE * max(float(b.abs().max()), 1e-6)
