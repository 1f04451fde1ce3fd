"""torch.compile and CUDA graphs for a model.

torch.compile does not guarantee bits: fused kernels round differently, and the choice of kernels may depend on the
first shapes. paceline reports a missing compiler before the first step.

CUDA graphs: the forward and the backward of the model are recorded once and replayed without Python and kernel
launches. A recording is valid for one shape of inputs and for the memory of parameters and buffers. For each such set
the first use in training makes a recording, and compares it once with the model on the current batch. A forward without
gradients, for example in an evaluation, is not recorded.
"""

import importlib.util
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from paceline.compute.forward import assign_dynamic_subclass, may_record_cuda_graph, wrap_forward
from paceline.errors import TrainingError, UsageError
from paceline.nested import tensors
from paceline.rank import flight_recorder
from paceline.runs.folder import create_user_compile_cache

MAX_REASON_CHARS = 1500
MAX_GRAPHS = 8  # each one needs memory for all activations
TOLERANCE = 1e-3  # relative, between a recording and the model: convolutions may choose a different algorithm

Call = Callable[..., Any]


def compile_model(model: nn.Module, device: torch.device) -> None:
    """Compile `model` in place with torch, at its first call. Names and state do not change.

    Call it last, after `autocast_bf16`, and before a strategy is applied. A call that torch cannot compile raises
    TrainingError, with the end of torch's message.

    Args:
        model: changed in place.
        device: where the model computes. torch needs Triton and a C compiler for a GPU, and a C++ compiler for the CPU.

    Raises:
        UsageError: if the compiler that torch needs is missing, if the cache cannot be created or is not private, or
            if the forward of the model cannot be replaced.
    """
    why = missing_compiler_reason(device)
    if why:
        raise UsageError(code="compile-not-possible", why=why)
    if "TORCHINDUCTOR_CACHE_DIR" not in os.environ:  # the default is in /tmp, and torch unpickles what it contains
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(create_user_compile_cache())
    # torch does not compile frames of torch, such as the forward of nn.Sequential: it needs a frame of ours around it
    wrap_forward(model, lambda forward, args, kwargs: forward(*args, **kwargs))
    cls: Any = type(model)

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        try:
            return cls.__call__(self, *args, **kwargs)
        except Exception as error:
            dynamo = sys.modules.get("torch._dynamo.exc")
            if dynamo is None or not isinstance(error, dynamo.TorchDynamoException):
                raise
            raise TrainingError(code="compile-failed", reason=str(error).strip()[-MAX_REASON_CHARS:]) from error

    assign_dynamic_subclass(model, __call__=call)
    model.compile()


def missing_compiler_reason(device: torch.device) -> str:
    """Why torch.compile cannot compile here, with the missing package; empty if it can."""
    if device.type != "cpu":
        if importlib.util.find_spec("triton") is None:
            return "torch compiles for GPUs with Triton, which is not installed: pip install triton"
        names = [os.environ["CC"]] if "CC" in os.environ else ["cc", "gcc", "clang"]
        language, package = "C", "gcc"
    else:
        names = [os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")]  # as torch._inductor looks
        language, package = "C++", "g++"
    if any(shutil.which(name) for name in names):
        return ""
    return (
        f"torch compiles with a {language} compiler, and PATH has no {' or '.join(names)}. Install one (Debian: "
        f"apt install {package}), name it in {'CXX' if language == 'C++' else 'CC'}, or leave out --compile"
    )


def use_cuda_graphs(model: nn.Module, device: torch.device) -> None:
    """Record and replay `model` in training. Call it after `autocast_bf16`, before a strategy is applied.

    A call of the model raises TrainingError for too many shapes, for a recording whose results differ from those of the
    model, and for a model that cannot be recorded.

    Args:
        model: changed in place. It must be called with tensors as positional arguments, and have at most 8 different
            shapes of inputs in training.
        device: the GPU on which the model computes.

    Raises:
        UsageError: if `device` is not a GPU, or if the forward of the model cannot be replaced.
    """
    if device.type != "cuda":
        raise UsageError(code="cuda-graphs-on-cpu")
    graphs: dict[Any, Call] = {}
    # torch warns about live nodes of a different stream: a recording keeps its nodes, and is compared with the model
    torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(False)

    def around(forward: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # a dispatch mode needs each operation, for example the search for samples that are not finite
        if (
            not (torch.is_grad_enabled() and model.training)
            or is_in_torch_dispatch_mode()
            or not may_record_cuda_graph()
        ):
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

    wrap_forward(model, around)
    assign_dynamic_subclass(model, records_graphs=True)
    for parameter in model.parameters():
        # the next replay overwrites the memory of the recording, so .grad must not use it
        if parameter.requires_grad:
            parameter.register_hook(torch.clone)


class _Recordable(nn.Module):
    """The model for the recording: without hooks, and with a replaceable forward."""

    def __init__(self, model: nn.Module, call: Call) -> None:
        super().__init__()
        self.model, self.call = model, call

    def forward(self, *args: Tensor) -> Any:
        return self.call(*args)


def _recorded(model: nn.Module, forward: Call, args: tuple[Tensor, ...]) -> Call:
    recordable = _Recordable(model, forward)
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    device = args[0].device
    stream = torch.cuda.get_rng_state(device)

    def restore() -> None:
        torch.cuda.set_rng_state(stream, device)
        for buffer, before in buffers:
            buffer.copy_(before)

    def gradients(call: Call) -> list[Tensor]:
        restore()
        outputs = call(*args)
        total = sum(t.float().sum() for t in tensors(outputs))
        assert isinstance(total, Tensor)
        parameters = [p for p in model.parameters() if p.requires_grad]
        grads = cast("Sequence[Tensor | None]", torch.autograd.grad(total, parameters, allow_unused=True))
        return [total.detach(), *(grad.clone() for grad in grads if grad is not None)]

    try:
        expected = gradients(forward)
        restore()
        flight_recorder.graph_capture.set()
        replay: Any = torch.cuda.make_graphed_callables(recordable, args, allow_unused_input=True)
        replayed = gradients(replay)
        restore()
    except RuntimeError as error:
        raise TrainingError(code="cuda-graphs-unrecordable", reason=str(error).splitlines()[0]) from error
    finally:
        flight_recorder.graph_capture.clear()
    if len(replayed) != len(expected) or not all(map(_is_close, replayed, expected)):
        raise TrainingError(code="cuda-graphs-differ")
    return replay


def _is_close(a: Tensor, b: Tensor) -> bool:
    return float((a - b).abs().max()) <= TOLERANCE * max(float(b.abs().max()), 1e-6)
