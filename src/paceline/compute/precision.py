"""bf16, fp16 and tf32: faster modes that the user selects, because they round differently from fp32.

In bf16 and fp16 forward and backward run under torch's autocast. Weights, gradients, losses and the optimizer stay
float32. Convolutions get channels-last inputs, for which their half-precision kernels are written. tf32 is NVIDIA's
float32 with 10 bits of fraction in matrix products and convolutions. torch's default uses it for convolutions only.
"""

import platform
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from paceline.compute.forward import ForwardWrapper, assign_dynamic_subclass, wrap_forward
from paceline.nested import map_tensors

AUTOCAST_MODULES = (
    nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d,
    nn.MultiheadAttention,
)  # fmt: skip
"""Modules whose weights autocast rounds to bf16 at each use."""
PROBE_SECONDS = 0.3
MIN_BF16_SPEEDUP = 1.05  # precision=auto selects bf16 if it is faster by this factor


def tf32_unsupported_reason(device: torch.device) -> str:
    if device.type == "cuda" and torch.version.cuda and torch.cuda.get_device_capability(device) >= (8, 0):
        return ""
    return "tf32 is a mode of NVIDIA's GPUs of compute capability 8.0 and newer"


def set_float32_mode(precision: str, device: torch.device) -> None:
    if device.type == "cuda":
        # the older of torch's two settings: it also sets the newer one, and torch.compile reads only the older one
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = precision == "tf32"


def bf16_unsupported_reason(device: torch.device) -> str:
    if device.type not in ("cpu", "cuda"):
        return ""
    if device.type == "cuda":
        if torch.cuda.get_device_capability(device) >= (8, 0):
            return ""
        return f"{torch.cuda.get_device_name(device)} has no bf16 (GPUs of compute capability 8.0 and newer have)"
    if platform.machine() in ("x86_64", "AMD64"):
        instructions = r"\b(avx512_bf16|amx_bf16)\b"
        used = torch.backends.cpu.get_cpu_capability().startswith("AVX512")  # ATEN_CPU_CAPABILITY may forbid them
    else:
        instructions, used = r"\bbf16\b", True
    try:
        flags = Path("/proc/cpuinfo").read_text()
    except OSError:
        flags = ""
    if re.search(instructions, flags) and used:
        return ""
    return "this processor has no bf16 instructions (avx512_bf16, amx_bf16; ARM: bf16) that torch may use"


def autocast_bf16(model: nn.Module, device: torch.device) -> None:
    """Run `model`'s forward under bf16 autocast. Its outputs are float32, and so are loss and metrics.

    Call it after `checkpoint_activations`, before a strategy is applied. If the model has two-dimensional convolutions,
    its inputs (N, C, H, W) get the channels-last format, on a GPU its weights too.

    Args:
        model: changed in place. Its parameters keep their type.
        device: where the model computes. This function does not check that the device supports bf16.

    Raises:
        UsageError: the forward cannot be replaced: a ScriptModule, or a forward that was set on the instance.
    """
    _in_half(model, device, torch.bfloat16)
    assign_dynamic_subclass(model, computes_in_bf16=True)


def autocast_fp16(model: nn.Module, device: torch.device) -> None:
    """As `autocast_bf16`, for fp16. Its range is small, so losses must be scaled (see `stepping.trained_model`)."""
    _in_half(model, device, torch.float16)


def _in_half(model: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    wrap_forward(model, autocast_wrapper(model, device, dtype))
    if device.type != "cpu" and _convolves(model):  # cuDNN would convert each weight at each use
        model.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]


def _convolves(model: nn.Module) -> bool:
    return any(isinstance(m, (nn.Conv2d, nn.ConvTranspose2d)) for m in model.modules())


def find_autocast_weights(model: nn.Module) -> set[nn.Parameter]:
    """The float32 weights that autocast rounds before each use after `autocast_bf16`, so ranks can send them rounded.

    These are the weights of torch's linear layers, convolutions and attention. A class with a different forward may use
    its weights unrounded. Empty for a model that does not compute in bf16.
    """
    rounded: dict[nn.Parameter, bool] = {}
    for module in model.modules() if getattr(model, "computes_in_bf16", False) else ():
        rounds = isinstance(module, AUTOCAST_MODULES) and type(module).forward.__module__.startswith("torch.nn.")
        for parameter in module.parameters(recurse=False):  # a weight tied to an embedding is not rounded there
            rounded[parameter] = rounds and parameter.dtype == torch.float32 and rounded.get(parameter, True)
    return {parameter for parameter, rounds in rounded.items() if rounds}


def autocast_wrapper(model: nn.Module, device: torch.device, dtype: torch.dtype) -> ForwardWrapper:
    """The wrapper of `autocast_bf16` and `autocast_fp16`: (a forward of the model, args, kwargs) -> its outputs."""
    convolves = _convolves(model)

    def around(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if convolves:
            args, kwargs = map_tensors((args, kwargs), _channels_last)
        with torch.autocast(device.type, dtype):
            return map_tensors(forward(*args, **kwargs), _float32)

    return around


def _channels_last(tensor: Tensor) -> Tensor:
    if tensor.ndim != 4:
        return tensor
    last = tensor.contiguous(memory_format=torch.channels_last)
    if last.stride(1) == 1 or last.requires_grad:
        return last
    # with one channel both layouts are equal, and torch has kept the other strides, by which it chooses kernels
    _, channels, height, width = last.shape
    return last.as_strided(last.shape, (channels * height * width, 1, channels * width, channels))


def _float32(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


def time_alternatives(steps: Mapping[str, Callable[[], object]], device: torch.device) -> dict[str, float]:
    """The shortest time of each of `steps` in seconds, run in turn for about 0.3 s after a warm-up run."""
    shortest = dict.fromkeys(steps, float("inf"))
    for step in steps.values():
        step()
    began = time.perf_counter()
    while True:
        for name, step in steps.items():
            synchronize_device(device)
            start = time.perf_counter()
            step()
            synchronize_device(device)
            shortest[name] = min(shortest[name], time.perf_counter() - start)
        if time.perf_counter() - began > PROBE_SECONDS:
            return shortest


def synchronize_device(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
