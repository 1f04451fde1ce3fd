"""Makes the bits of a run depend only on its definition, and records the hardware and versions they also depend on.

In addition to the reduction tree of `strategies.exact`, this needs kernels that always add in the same order, and the
same number of threads per rank at every world size, because torch splits its loops by the number of threads.
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
from paceline.config.strategies import DEFAULT_STRATEGY
from paceline.errors import PacelineError, TrainingError
from paceline.rank.imports import when_imported
from paceline.rank.world import device_name

DRIVERS = Path("/proc/driver/nvidia/version"), Path("/sys/module/amdgpu/version")
INDUCTOR_CONFIG = "torch._inductor.config"
DEFAULT_THREADS = 1  # the largest number that is possible at every world size


@contextmanager
def use_deterministic_kernels() -> Generator[None]:
    """Make torch use deterministic kernels only. An operation without such a kernel raises an error with advice."""
    mode_before = torch.get_deterministic_debug_mode()
    options: Any = torch.utils.deterministic  # type checkers do not see the properties of this module
    fill_before = options.fill_uninitialized_memory
    benchmark_before = torch.backends.cudnn.benchmark
    # cuBLAS reads it when it creates its first handle; without it, matrix products on several streams can differ
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.set_deterministic_debug_mode("error")
    when_imported(INDUCTOR_CONFIG, _set_inductor)  # `use_deterministic_algorithms` would import it just for this
    options.fill_uninitialized_memory = False  # filling each new tensor with NaN costs memory bandwidth
    torch.backends.cudnn.benchmark = False  # it would choose the kernel that happened to be fastest
    try:
        with convert_missing_kernel_error(TrainingError):
            yield
    finally:
        torch.set_deterministic_debug_mode(mode_before)
        if INDUCTOR_CONFIG in sys.modules:
            _set_inductor(late=True)
        options.fill_uninitialized_memory = fill_before
        torch.backends.cudnn.benchmark = benchmark_before


def _set_inductor(*, late: bool = False) -> None:
    """Set the deterministic mode of torch's compiler. At its import, keep a setting from the environment if unset."""
    deterministic_mode = torch.get_deterministic_debug_mode() > 0
    if late or deterministic_mode:
        sys.modules[INDUCTOR_CONFIG].deterministic = deterministic_mode  # pyright: ignore[reportAttributeAccessIssue]


@contextmanager
def convert_missing_kernel_error(raised: type[PacelineError]) -> Generator[None]:
    """Convert torch's error about an operation without a deterministic kernel to a `raised` error with advice."""
    try:
        yield
    except RuntimeError as error:
        match = re.search(r"(\S+) does not have a deterministic implementation", str(error))
        if match is None:
            raise
        raise raised(code="no-deterministic-kernel", operation=match[1], default=DEFAULT_STRATEGY) from error


def hardware_facts(device: torch.device) -> dict[str, Any]:
    build_info = torch.__config__.show()
    libraries = re.findall(
        r"(Intel\(R\) oneAPI Math Kernel Library Version \S+|Intel\(R\) MKL-DNN v\S+|oneDNN v\S+)", build_info
    )
    if device.type == "cuda":
        return {
            "torch": str(torch.__version__), "libraries": sorted({*libraries, *_gpu_libraries()}),
            "processor": torch.cuda.get_device_name(device),
            "capability": ".".join(map(str, torch.cuda.get_device_capability(device))), "driver": _driver(),
            "float32": f"{_tf32(torch.backends.cuda.matmul)} products, {_tf32(torch.backends.cudnn)} convolutions",
        }  # fmt: skip
    is_cpu = device.type == "cpu"
    return {
        "torch": str(torch.__version__), "libraries": sorted(set(libraries)),
        "processor": cpu_model() if is_cpu else device_name(device),
        "capability": torch.backends.cpu.get_cpu_capability() if is_cpu else None,
    }  # fmt: skip


def _gpu_libraries() -> Generator[str]:
    yield f"ROCm {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda}"
    yield f"cuDNN {torch.backends.cudnn.version()}"
    if dist.is_nccl_available():
        yield f"NCCL {'.'.join(map(str, nccl.version()))}"
    for package in ("nvidia-cublas", "nvidia-cublas-cu12", "nvidia-cublas-cu13"):
        with suppress(PackageNotFoundError):  # some builds of torch include cuBLAS
            yield f"cuBLAS {version(package)}"


def _driver() -> str:
    for file in DRIVERS:
        with suppress(OSError):
            if match := re.search(r"\b\d+(\.\d+)+\b", file.read_text()):
                return match[0]
    return "unknown"


def _tf32(backend: Any) -> str:
    return "tf32" if backend.allow_tf32 else "fp32"
