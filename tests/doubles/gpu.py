"""A GPU in Python: tensors that say they are on "pygpu:0", with real values, on a machine that has none.

    install()                                     # once in a process; then model.to(device()) and all that follows

A tensor on it is a shell around one on the CPU. Every operation goes through here, so that one which mixes both devices
is an error as on a GPU, `numpy()` of it as well, and everything computed has the CPU's values: a whole training must
give the CPU's bits. Random numbers come from a generator of the device's own, which its manual_seed sets.

Honest for: where tensors are, in whole runs, and code that takes every device for CUDA's. Not for: streams, kernels,
memory, what is asynchronous, bits of a GPU. Not there: autocast, graphs, torch.compile.
"""

import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "pygpu"
CPU = torch.device("cpu")
aten = torch.ops.aten
COPIES = {aten.copy_.default, aten._to_copy.default}
INDICES = {aten.index.Tensor, aten.index_put_.default, aten.index_put.default}  # CUDA takes them from the CPU, too
used: dict[str, int] = {}
"""how often each operation has run on the device"""
_stream = torch.Generator().get_state()


def device() -> torch.device:
    return torch.device(NAME, 0)


class OnGpu(Tensor):
    raw: Tensor

    @staticmethod
    def __new__(cls, raw: Tensor) -> "OnGpu":
        shell: OnGpu = Tensor._make_wrapper_subclass(  # pyright: ignore
            cls, raw.shape, strides=raw.stride(), storage_offset=raw.storage_offset(), dtype=raw.dtype, device=device()
        )
        shell.raw = raw
        return shell

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, dict(kwargs or {}))

    @property
    def data(self) -> "OnGpu":  # pyright: ignore
        return self.detach()  # pyright: ignore

    @data.setter
    def data(self, other: "OnGpu") -> None:
        Tensor.data.__set__(self, other)  # pyright: ignore
        self.raw = other.raw

    def data_ptr(self) -> int:
        return self.raw.data_ptr()

    def untyped_storage(self) -> Any:
        return self.raw.untyped_storage()

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        raise TypeError("can't convert pygpu:0 device type tensor to numpy. Use Tensor.cpu() first")

    def record_stream(self, stream: Any) -> None:
        """Memory is never reused early here."""

    def __repr__(self, **_: Any) -> str:
        return f"on pygpu:0: {self.raw!r}"


class Everywhere(TorchDispatchMode):
    """Intercepts operations that create tensors, or move them to the device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, dict(kwargs or {}))


def run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """One operation; computed on the values of the wrappers if it is on the device."""
    flat = tree_flatten((args, kwargs))[0]
    shells = [value for value in flat if isinstance(value, OnGpu)]
    asked = kwargs.get("device")
    to_gpu = asked is not None and torch.device(asked).type == NAME
    kwargs.pop("pin_memory", None)
    if not shells and not to_gpu:
        return func(*args, **kwargs)
    plain = [v for v in flat if isinstance(v, Tensor) and not isinstance(v, OnGpu) and v.dim() and not v.is_meta]
    may_mix = func in COPIES or (func in INDICES and isinstance(args[0], OnGpu))
    if shells and plain and not may_mix:
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but found at least two devices, pygpu:0 and cpu! ({func})"
        )
    used[str(func)] = used.get(str(func), 0) + 1
    given = {**kwargs, "device": CPU} if "device" in kwargs else dict(kwargs)
    inner = tree_map(lambda v: v.raw if isinstance(v, OnGpu) else v, (args, given))
    by_raw = {id(shell.raw): shell for shell in shells}
    results = _seeded(func, lambda: func(*inner[0], **inner[1]))
    on_gpu = to_gpu if asked is not None else not (func is aten.copy_.default and not isinstance(args[0], OnGpu))

    def wrapped(value: Any) -> Any:
        if not isinstance(value, Tensor) or not on_gpu:
            return value
        return by_raw[id(value)] if id(value) in by_raw else OnGpu(value)

    if func is aten.copy_.default:
        return args[0]
    return tree_map(wrapped, results)


def _seeded(func: Any, call: Callable[[], Any]) -> Any:
    """Uses the random stream of the device."""
    global _stream
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return call()
    cpu = torch.get_rng_state()
    torch.set_rng_state(_stream)
    try:
        return call()
    finally:
        _stream = torch.get_rng_state()
        torch.set_rng_state(cpu)


class Passed:
    """An event or a stream of a device that is always up to date."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.at = 0.0

    def record(self, *_: Any) -> None:
        self.at = time.perf_counter()

    def query(self) -> bool:
        return True

    def elapsed_time(self, end_event: "Passed") -> float:
        return (end_event.at - self.at) * 1e3

    def record_event(self, *_: Any) -> "Passed":
        return self

    def wait(self, *_: Any) -> None: ...

    wait_stream = wait_event = synchronize = wait


def _seed(seed: int) -> None:
    global _stream
    _stream = torch.Generator().manual_seed(seed).get_state()


def _set_state(state: Tensor, *_: Any) -> None:
    global _stream
    _stream = state.clone()


class Module:
    Stream = Event = current_stream = staticmethod(Passed)
    manual_seed = manual_seed_all = staticmethod(_seed)
    set_rng_state = staticmethod(_set_state)

    def __getattr__(self, name: str) -> Any:
        answers = {
            "device_count": 1, "is_available": True, "current_device": 0, "is_initialized": True,
            "_is_in_bad_fork": False, "set_device": None, "synchronize": None, "stream": nullcontext(),
            "device": nullcontext(), "mem_get_info": (1 << 30, 1 << 31),
            "get_amp_supported_dtype": [torch.float32, torch.bfloat16],
        }  # fmt: skip
        if name not in answers:
            raise AttributeError(name)
        return lambda *_, **__: answers[name]

    @staticmethod
    def get_rng_state(*_: Any) -> Tensor:
        return _stream.clone()


def install() -> None:
    """Install the device in this process, for this thread and the threads of torch's engine."""
    _setup_privateuseone_for_python_backend(NAME, Module())
    torch.Event = Passed  # pyright: ignore
    Tensor.pin_memory = Tensor.clone  # pyright: ignore
    torch.accelerator.max_memory_allocated = lambda *_: 1 << 20  # it has no allocator
    torch.accelerator.memory_allocated = torch.accelerator.max_memory_allocated
    torch.accelerator.reset_peak_memory_stats = lambda *_: None
    torch.accelerator.empty_cache = lambda: None
    torch.accelerator.synchronize = lambda *_: None  # it never runs behind the host
    torch.__future__.set_swap_module_params_on_conversion(True)  # parameters stay the same objects, as on CUDA
    torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(..., device=) goes through here, too
    Everywhere().__enter__()
