"""torch.compile and CUDA graphs for a model.

torch.compile keeps no promise of bits: fused kernels round differently, and which kernels are made may depend on the
shapes that came first. What it lacks is reported before the first step.

CUDA graphs: forward and backward of the model are one recording each, replayed without Python and launches. A recording
is valid for one shape of inputs and for the memory of parameters and buffers. One is made for each such set, at its
first use in training, and compared once, on the current batch, with the model itself. A forward without gradients,
e.g. in an evaluation, is not recorded.
"""

import importlib.util
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from paceline.compute.forward import may_record, override_members, wrap_forward
from paceline.errors import TrainingError, UsageError
from paceline.nested import tensors
from paceline.rank import recorder
from paceline.runs.owners import check_ours
from paceline.runs.writing import make_folder

MAX_REASON_CHARS = 1500
MAX_GRAPHS = 8  # each holds memory for all activations of its shape
TOLERANCE = 1e-3  # relative, between a recording and the model itself: convolutions may choose another algorithm

Call = Callable[..., Any]


def compile_model(model: nn.Module, device: torch.device) -> None:
    """Let torch compile `model` in place, when it is first called; names and state stay as they are.

    Call it last, after `in_bf16`, and before a strategy is applied. A call that torch cannot compile raises
    TrainingError, with the end of torch's message.

    Raises:
        UsageError: the compiler that torch would use is missing.
    """
    why = lacks_compiler(device)
    if why:
        raise UsageError(code="compile-not-possible", why=why)
    _keep_results_private()
    # torch compiles no frame of its own, and the forward of nn.Sequential, say, is one: it needs one of ours around it
    wrap_forward(model, lambda forward, args, kwargs: forward(*args, **kwargs))
    kind: Any = type(model)

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        try:
            return kind.__call__(self, *args, **kwargs)
        except Exception as error:
            dynamo = sys.modules.get("torch._dynamo.exc")
            if dynamo is None or not isinstance(error, dynamo.TorchDynamoException):
                raise
            raise TrainingError(code="compile-failed", reason=str(error).strip()[-MAX_REASON_CHARS:]) from error

    override_members(model, __call__=call)
    model.compile()


def _keep_results_private() -> None:
    """Have torch keep what it compiles, and unpickles again, in a folder of the user; its default is in /tmp.

    Raises:
        UsageError: others could have written there.
    """
    if "TORCHINDUCTOR_CACHE_DIR" in os.environ:
        return
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").resolve() / "paceline" / "inductor"
    try:
        make_folder(folder, exist_ok=True)
    except OSError as error:
        raise UsageError(code="compile-no-folder", folder=folder, strerror=error.strerror) from None
    check_ours(folder)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)


def lacks_compiler(device: torch.device) -> str:
    """Why torch.compile cannot compile here, and what to install; empty if it can."""
    if device.type != "cpu":
        if importlib.util.find_spec("triton") is None:
            return "torch compiles for GPUs with Triton, which is not installed: pip install triton"
        names = [os.environ["CC"]] if "CC" in os.environ else ["cc", "gcc", "clang"]
        kind, package = "C", "gcc"
    else:
        names = [os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")]  # as torch._inductor looks
        kind, package = "C++", "g++"
    if any(shutil.which(name) for name in names):
        return ""
    return (
        f"torch compiles with a {kind} compiler, and there is no {' or '.join(names)} in PATH. Install one (Debian: "
        f"apt install {package}), name it in {'CXX' if kind == 'C++' else 'CC'}, or leave out --compile"
    )


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
        if not (torch.is_grad_enabled() and model.training) or is_in_torch_dispatch_mode() or not may_record():
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
    override_members(model, records_graphs=True)
    for parameter in model.parameters():
        # A replay gives memory of the recording, which the next replay overwrites: .grad must not be that memory.
        if parameter.requires_grad:
            parameter.register_hook(torch.clone)


class _Recordable(nn.Module):
    """The model as torch records it: without hooks, and with a forward that may be replaced."""

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
        wanted = gradients(forward)
        restore()
        recorder.capturing.set()
        replay: Any = torch.cuda.make_graphed_callables(recordable, args, allow_unused_input=True)
        replayed = gradients(replay)
        restore()
    except RuntimeError as error:
        raise TrainingError(code="cuda-graphs-unrecordable", reason=str(error).splitlines()[0]) from error
    finally:
        recorder.capturing.clear()
    if len(replayed) != len(wanted) or not all(_is_close(a, b) for a, b in zip(replayed, wanted, strict=True)):
        raise TrainingError(code="cuda-graphs-differ")
    return replay


def _is_close(a: Tensor, b: Tensor) -> bool:
    return float((a - b).abs().max()) <= TOLERANCE * max(float(b.abs().max()), 1e-6)
