"""Makes the bits of a run depend on nothing but its definition, and records what they still depend on.

Beside the tree of `strategies.exact` this takes kernels that always add in the same order, and one number of threads
per rank for every world size, since it decides how torch cuts its loops.
"""

import os
import re
import sys
from collections.abc import Generator
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.cuda import nccl

from paceline.compute.resources import cpu_model
from paceline.config.strategies import DEFAULT
from paceline.errors import PacelineError, TrainingError
from paceline.rank.imports import when_imported
from paceline.rank.world import device_name

DRIVERS = Path("/proc/driver/nvidia/version"), Path("/sys/module/amdgpu/version")
KERNEL_MAKER = "torch._inductor.config"
DEFAULT_THREADS = 1  # the largest number that every world size can have


@contextmanager
def deterministic() -> Generator[None]:
    """Inside, torch uses deterministic kernels only; an operation without one is an error that says what to do."""
    before = torch.get_deterministic_debug_mode()
    options: Any = torch.utils.deterministic  # a module with properties, which type checkers do not see
    filling = options.fill_uninitialized_memory
    benchmark = torch.backends.cudnn.benchmark
    # cuBLAS reads it when it makes its first handle; without it matrix products on several streams may differ
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.set_deterministic_debug_mode("error")
    when_imported(KERNEL_MAKER, _determine)  # as `use_deterministic_algorithms` does, which imports it for that
    options.fill_uninitialized_memory = False  # NaN into every new tensor: costs memory bandwidth
    torch.backends.cudnn.benchmark = False  # picks the kernel that was fastest this time
    try:
        with explained(TrainingError):
            yield
    finally:
        torch.set_deterministic_debug_mode(before)
        if KERNEL_MAKER in sys.modules:
            _determine(late=True)
        options.fill_uninitialized_memory = filling
        torch.backends.cudnn.benchmark = benchmark


def _determine(*, late: bool) -> None:
    """Tell what chooses a compiler's kernels; a wish from the environment stays where nobody has asked for others."""
    wanted = torch.get_deterministic_debug_mode() > 0
    if late or wanted:
        sys.modules[KERNEL_MAKER].deterministic = wanted  # pyright: ignore[reportAttributeAccessIssue]


@contextmanager
def explained(kind: type[PacelineError]) -> Generator[None]:
    """Inside, torch's complaint about an operation without such a kernel becomes a `kind` that says what to do."""
    try:
        yield
    except RuntimeError as error:
        match = re.search(r"(\S+) does not have a deterministic implementation", str(error))
        if match is None:
            raise
        raise kind(code="no-deterministic-kernel", operation=match[1], default=DEFAULT) from error


def holds_for(device: torch.device) -> dict[str, Any]:
    """What the bits depend on beside the run's definition: versions of torch and its libraries, and the processor."""
    built = torch.__config__.show()
    libraries = re.findall(
        r"(Intel\(R\) oneAPI Math Kernel Library Version \S+|Intel\(R\) MKL-DNN v\S+|oneDNN v\S+)", built
    )
    if device.type == "cuda":
        return {
            "torch": str(torch.__version__),
            "libraries": sorted({*libraries, *_gpu_libraries()}),
            "processor": torch.cuda.get_device_name(device),
            "capability": ".".join(map(str, torch.cuda.get_device_capability(device))),
            "driver": _driver(),
            "float32": f"{_tf32(torch.backends.cuda.matmul)} products, {_tf32(torch.backends.cudnn)} convolutions",
        }
    return {
        "torch": str(torch.__version__),
        "libraries": sorted(set(libraries)),
        "processor": cpu_model() if device.type == "cpu" else device_name(device),
        "capability": torch.backends.cpu.get_cpu_capability() if device.type == "cpu" else None,
    }


def _gpu_libraries() -> Generator[str]:
    yield f"ROCm {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda}"
    yield f"cuDNN {torch.backends.cudnn.version()}"
    if dist.is_nccl_available():
        yield f"NCCL {'.'.join(map(str, nccl.version()))}"
    for package in ("nvidia-cublas", "nvidia-cublas-cu12", "nvidia-cublas-cu13"):
        with suppress(PackageNotFoundError):  # a torch of another source has it built in
            yield f"cuBLAS {version(package)}"


def _driver(files: tuple[Path, ...] = DRIVERS) -> str:
    for file in files:
        with suppress(OSError):
            found = re.search(r"\b\d+(\.\d+)+\b", file.read_text())
            if found:
                return found[0]
    return "unknown"


def _tf32(kind: Any) -> str:
    return "tf32" if kind.allow_tf32 else "fp32"
