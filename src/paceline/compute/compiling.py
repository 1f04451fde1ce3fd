"""torch.compile for a model, with what is missing reported before the first step.

It keeps no promise of bits: fused kernels round differently, and which kernels are made may depend on the shapes that
came first.
"""

import importlib.util
import os
import shutil
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from paceline.compute.rules import around_forward, subclassed
from paceline.errors import TrainingError, UsageError
from paceline.runs.owners import check_ours
from paceline.runs.writing import make_folder

MAX_WORDS_CHARS = 1500


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
    around_forward(model, lambda forward, args, kwargs: forward(*args, **kwargs))
    kind: Any = type(model)

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with _told():
            return kind.__call__(self, *args, **kwargs)

    subclassed(model, __call__=call)
    model.compile()


def _keep_results_private() -> None:
    """Have torch keep what it compiles, and unpickles again, in a folder of the user's own; its default is in /tmp.

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
    """What torch.compile lacks here, and what to install, in words; empty if nothing."""
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


@contextmanager
def _told() -> Generator[None]:
    try:
        yield
    except Exception as error:
        dynamo = sys.modules.get("torch._dynamo.exc")
        if dynamo is None or not isinstance(error, dynamo.TorchDynamoException):
            raise
        raise TrainingError(code="compile-failed", reason=str(error).strip()[-MAX_WORDS_CHARS:]) from error
