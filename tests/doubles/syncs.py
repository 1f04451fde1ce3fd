"""Counts what makes the host wait for the device, without a device: every read of a value of a tensor on "meta".

    with HostReads() as reads: ...               # reads.lines: {"sums/totals.py:43": 1}

The meta device has shapes and no values: whoever wants a value asks here, and gets ones. Honest for how often a step
waits, and where. Not for copies to the device, which do not wait while they are small, nor for reads by C++ itself.
"""

from __future__ import annotations

import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

import paceline

BACKEND = "does_nothing"
ROOT = Path(paceline.__file__).parent


class HostReads(TorchDispatchMode):
    """See the module."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, given = func.name(), dict(kwargs or {})
        if name == "aten::_local_scalar_dense" and args[0].is_meta:
            self.lines[_line()] += 1
            return 1.0 if args[0].is_floating_point() else 1
        if name == "aten::_to_copy" and args[0].is_meta and torch.device(given.get("device") or "meta").type == "cpu":
            self.lines[_line()] += 1
            return torch.ones(args[0].shape, dtype=given.get("dtype") or args[0].dtype)
        return func(*args, **given)


def _line() -> str:
    ours = [frame for frame in traceback.extract_stack() if ROOT in Path(frame.filename).parents]
    return f"{Path(ours[-1].filename).relative_to(ROOT)}:{ours[-1].lineno}" if ours else "elsewhere"


class DoesNothing(dist.ProcessGroup):
    """A group whose collectives are over at once, and leave tensors as they are."""

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        return BACKEND


def _over(self: DoesNothing, *_: Any, **__: Any) -> Any:
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result([])
    return torch._C._distributed_c10d._create_work_from_future(future)  # pyright: ignore


for _name in (
    "allreduce",
    "broadcast",
    "allgather",
    "all_gather_single",
    "all_to_all_single",
    "alltoall_base",
    "barrier",
):
    setattr(DoesNothing, _name, _over)


def register() -> None:
    """Let torch know the backend."""
    dist.Backend.register_backend(
        BACKEND, lambda store, rank, size, timeout: DoesNothing(rank, size), devices=["cpu", "meta"]
    )
