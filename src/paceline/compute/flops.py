"""FLOPs and tokens of a sample, and the peak of a device, for MFU and tokens per second.

torch's formulas count matrix products, convolutions and attention (`torch.utils.flop_counter`). Other operations count
as 0. These are the FLOPs of the model, as in PaLM, nanoGPT and torchtitan: a forward that backward recomputes does not
count, the backward of attention counts as two forwards, and each group of a convolution counts once. torch's formulas
for these backwards count more.
"""

import os
import sys
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from paceline.compute.precision import synchronize_device
from paceline.compute.resources import cpu_model
from paceline.rank.world import World, device_name
from paceline.runs.reading import read_json
from paceline.runs.utilization import throughput_and_mfu
from paceline.runs.writing import make_folder, replace_file

PEAK_SECONDS, SHORT_SECONDS = 0.25, 0.02  # for all products; for a product that is too small to reach the peak
LEAST_ROWS, MOST_ROWS, MOST_ON_GPU = 512, 4096, 8192  # of the matrices
BUSY_MACHINE_VARIABLES = {"CI", "PYTEST_CURRENT_TEST"}  # environment variables of busy machines
HALF_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
ATTENTION = ("flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu")


class FlopCounter(TorchDispatchMode):
    """Counts the FLOPs of one forward and backward, by shapes.

    While it is active, autograd computes some backwards differently (prod, masked_fill), so the last bits may differ.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.flops = self.samples = self._running = 0
        self.dtype = torch.float32  # the type of the last counted operation
        self.is_active, self._formulas = False, dict[Any, Callable[..., int]]()

    @property
    def per_sample(self) -> float:
        return self.flops / self.samples if self.samples else 0.0

    @contextmanager
    def count_flops(self, samples: int) -> Generator[None]:
        """Inside, count the operations of `samples` samples up to the last `mark_backward_end`; none after an error."""
        self._formulas = self._formulas or _formulas()
        self.is_active = True
        try:
            with self:
                yield
        finally:
            self.is_active = False
        self.samples = samples

    def mark_backward_end(self) -> None:
        """Call it after a backward: later operations belong to the optimizer and do not count."""
        self.flops = self._running

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        formula = self._formulas.get(getattr(func, "_overloadpacket", func))
        # a forward inside a backward, with gradients enabled, is a recomputation
        if formula and not (torch.is_grad_enabled() and torch._C._current_graph_task_id() != -1):  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue, reportUnknownMemberType]
            with suppress(Exception):  # a formula may not support the arguments: the operation counts as 0
                self._running += formula(*args, **(kwargs or {}), out_val=out)
                self.dtype = args[1].dtype
        return out


def _formulas() -> dict[Any, Callable[..., int]]:
    from torch.utils import flop_counter  # not at the top: it imports Triton, which the first optimizer imports later

    def attention(q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> int:
        return flop_counter.sdpa_flop_count(q.shape, k.shape, v.shape)

    def attention_backward(_: Any, q: Tensor, k: Tensor, v: Tensor, *__: Any, **___: Any) -> int:
        return 2 * attention(q, k, v)

    def convolution_backward(grad: Tensor, x: Tensor, w: Tensor, *others: Any, **_: Any) -> int:
        forward = flop_counter.conv_flop_count([*x.shape], [*w.shape], [*grad.shape], transposed=others[4])
        return forward * sum(others[7][:2])  # for the inputs, for the weights

    aten, formulas = torch.ops.aten, dict[Any, Callable[..., int]](flop_counter.flop_registry)
    for name in (f"_scaled_dot_product_{op}" for op in ATTENTION if hasattr(aten, f"_scaled_dot_product_{op}")):
        formulas |= {getattr(aten, name): attention, getattr(aten, f"{name}_backward"): attention_backward}
    return formulas | {aten.convolution_backward: convolution_backward}


def can_count_flops(modules: Iterable[nn.Module]) -> bool:
    """Whether the operations of a custom loop, over these models, can be counted in its first step.

    torch.compile and CUDA graphs do not compile or record while operations are counted. The threads of nn.DataParallel
    cannot be counted.
    """
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    if any(callable(backend) for backend in getattr(dynamo, "cached_backends", {}).values()):
        return False
    return not any(hasattr(m, "records_graphs") or len(getattr(m, "device_ids", None) or ()) > 1 for m in modules)


def count_tokens(batch: Any) -> int:
    """The number of tokens of a batch: of its `input_ids` or first tensor, if that has (B, T) integers; else 0."""
    while batch is not None and not isinstance(batch, Tensor):
        if isinstance(batch, (tuple, list)):
            batch = batch[0] if batch else None
        else:
            batch = batch.get("input_ids") if isinstance(batch, Mapping) else getattr(batch, "input_ids", None)
    if batch is None or batch.ndim != 2 or batch.dtype not in (torch.int32, torch.int64):
        return 0
    return batch.numel()


class Utilization:
    def __init__(
        self, world: World, given: float | None = None, count: FlopCounter | None = None, precision: str = ""
    ) -> None:
        """`given`: the peak of one device in TFLOP/s, or 0. `precision`: bf16 or fp16, if it differs from `count`."""
        self.device, self.devices, self.given, self._peak = world.device, world.size, given, given
        self.count, self._half = count or FlopCounter(), HALF_DTYPES.get(precision)
        self.tokens = self.samples = 0  # computed by this rank so far

    def peak_tflops(self, *, measure: bool = False, samples_per_second: float | None = None) -> float:
        """The peak of one device: given, measured earlier on this node, or measured now if `measure`. 0: unknown.

        If the run is faster than a measured peak, the machine was busy then, and the peak is measured again.
        """
        if self.given is None and self.count.per_sample and (self._peak is None or measure):
            reached = self.count.per_sample * (samples_per_second or 0.0) / self.devices / 1e12
            self._peak = peak_tflops(self.device, self._half or self.count.dtype, measure=measure, reached=reached)
        return self._peak or 0.0

    def throughput_metrics(self, samples_per_second: float | None) -> dict[str, float]:
        """See `utilization.throughput_and_mfu`. The tokens per sample are the average of this rank."""
        tokens = self.tokens / max(1, self.samples)
        return throughput_and_mfu(samples_per_second, tokens, self.count.per_sample, self.peak_tflops(), self.devices)


def peak_tflops(device: torch.device, dtype: torch.dtype, *, measure: bool, reached: float = 0.0) -> float:
    """The peak of `device`, measured once on this node and stored in the user's cache folder. 0: unknown.

    With `measure`, this measures for 0.3 s if no stored peak is above `reached`, except in CI and under pytest.
    """
    if device.type == "cpu":
        name = f"{cpu_model()}, {torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads"
    else:
        tf32 = torch.backends.cuda.matmul.allow_tf32 and dtype == torch.float32
        name = f"{device_name(device)}{', tf32' if tf32 else ''}"
    folder = os.environ.get("XDG_CACHE_HOME") or Path(os.environ.get("HOME") or "/nonexistent") / ".cache"
    path, key, peaks = Path(folder).resolve() / "paceline" / "peaks.json", f"{name}, {dtype}", dict[str, float]()
    with suppress(OSError):
        peaks = read_json(path, dict[str, float])
    if measure and peaks.get(key, 0.0) <= reached and not BUSY_MACHINE_VARIABLES & os.environ.keys():
        peaks[key] = max(peaks.get(key, 0.0), measure_tflops(device, dtype))
        with suppress(OSError):
            make_folder(path.parent, exist_ok=True)
            replace_file(path, msgspec.json.encode(peaks))
    return peaks.get(key, 0.0)


def measure_tflops(device: torch.device, dtype: torch.dtype) -> float:
    """The fastest of several matrix products, in TFLOP/s. It does not use the random streams of the run."""
    generator, best, rows, a = torch.Generator(device).manual_seed(0), 0.0, LEAST_ROWS, torch.empty(0)
    max_rows, began = MOST_ROWS if device.type == "cpu" else MOST_ON_GPU, time.perf_counter()
    with torch.no_grad(), suppress(torch.OutOfMemoryError):
        while time.perf_counter() - began < PEAK_SECONDS:
            if len(a) != rows:
                a = torch.rand(rows, rows, device=device, generator=generator).to(dtype)
            synchronize_device(device)
            start = time.perf_counter()
            torch.mm(a, a)
            synchronize_device(device)
            seconds = time.perf_counter() - start
            best = max(best, 2 * rows**3 / seconds / 1e12)
            rows *= 2 if seconds < SHORT_SECONDS and rows < max_rows else 1
    return float(f"{best:.4g}")
