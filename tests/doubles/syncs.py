"""Counts the operations for which the host waits for the device, without a device: reads of values, blocking copies.

    with HostReads() as reads: ...               # reads.lines: {"collectives/control.py:43": 1}

The meta device has shapes and no values. A read of one value gives 1 here; of several values 1, 1, 0, 0, ... (a loss, a
weight, and control flags that are not set). A copy from the CPU waits for the stream unless it is `non_blocking`;
`torch.tensor(..., device=...)` is such a copy. This counts how often a step waits, and on which line. It does not count
reads by C++, nor copies from pageable memory that a driver does not stage.
"""

from __future__ import annotations

import sys
import traceback
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import paceline
from paceline.collectives import control

BACKEND, NAME = "does_nothing", "default_pg"
ROOT = Path(paceline.__file__).parent
MAKERS = (torch.tensor, torch.as_tensor, Tensor.new_tensor)
"""what puts numbers of Python on a device; torch hides the copy from dispatch modes"""


class _Made(TorchFunctionMode):
    def __init__(self, lines: Counter[str]) -> None:
        super().__init__()
        self._lines = lines

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func in MAKERS and found.is_meta and not any(found is one for one in args):
            self._lines[line_of_ours()] += 1
        return found


class HostReads(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.lines: Counter[str] = Counter()
        self._made = _Made(self.lines)

    def __enter__(self) -> HostReads:
        self._made.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._made.__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, given = func.name(), dict(kwargs or {})
        if name == "aten::_local_scalar_dense" and args[0].is_meta:
            self.lines[line_of_ours()] += 1
            return 1.0 if args[0].is_floating_point() else 1
        if name == "aten::_to_copy":
            to = torch.device(given.get("device") or args[0].device).type
            if args[0].is_meta and to == "cpu":
                self.lines[line_of_ours()] += 1
                found = torch.zeros(args[0].shape, dtype=given.get("dtype") or args[0].dtype)
                found.view(-1)[:2] = 1
                return found
            if not args[0].is_meta and to == "meta" and not given.get("non_blocking"):
                self.lines[line_of_ours()] += 1
        if name == "aten::copy_" and args[0].is_meta != args[1].is_meta:
            if not (args[2] if len(args) > 2 else given.get("non_blocking")):
                self.lines[line_of_ours()] += 1
            return args[0] if args[1].is_meta else func(*args, **given)
        return func(*args, **given)


@contextmanager
def on_the_cpu() -> Generator[None]:
    """A step on the CPU defers its reads to its end as on a GPU, with real values."""

    def far(device: torch.device) -> bool:
        return True

    near = control.is_async
    users = [module for module in [*sys.modules.values()] if vars(module).get("is_async") is near]
    for module in users:
        vars(module)["is_async"] = far
    try:
        yield
    finally:
        for module in users:
            vars(module)["is_async"] = near


def line_of_ours() -> str:
    ours = [frame for frame in traceback.extract_stack() if ROOT in Path(frame.filename).parents]
    return f"{Path(ours[-1].filename).relative_to(ROOT)}:{ours[-1].lineno}" if ours else "elsewhere"


class DoesNothing(dist.ProcessGroup):
    """A group whose collectives end immediately and do not change tensors."""

    @property
    def group_name(self) -> str:
        return NAME

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        return BACKEND


def _over(self: DoesNothing, tensors: Any = (), *_: Any, **__: Any) -> Any:
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(tensors if isinstance(tensors, list) else [])  # DDP looks for its bucket there
    return torch._C._distributed_c10d._create_work_from_future(future)  # pyright: ignore


for _name in (
    "allreduce", "broadcast", "allgather", "all_gather_single", "_allgather_base", "_reduce_scatter_base",
    "reduce_scatter_single", "all_to_all_single", "alltoall_base", "barrier",
):  # fmt: skip
    setattr(DoesNothing, _name, _over)


def join() -> None:
    """Become rank 0 of a group of 2 without a second process."""
    dist.Backend.register_backend(
        BACKEND, lambda store, rank, size, timeout: DoesNothing(rank, size), devices=["cpu", "meta"]
    )
    dist.init_process_group(BACKEND, store=dist.HashStore(), rank=0, world_size=2)
    torch._C._distributed_c10d._register_process_group(NAME, dist.group.WORLD)  # pyright: ignore


def let_fsdp_in() -> None:
    """fully_shard treats meta tensors as uninitialized. Make it treat them as tensors with values."""
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group, _fully_shard

    vars(torch)["meta"] = torch.cpu  # streams and events that do nothing
    vars(_fully_shard)["_get_device_from_mesh"] = lambda mesh: torch.device("meta")
    _fsdp_param_group.FSDPParamGroup._validate_no_meta_params = lambda self: None  # pyright: ignore
