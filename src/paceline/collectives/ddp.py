"""A communication hook that sums DDP's gradients in shared memory, for `paceline launch --collectives shared`.

torch fills its buckets during backward. The hook sums all of them when the last one is full: before that, no core of a
CPU is idle. It multiplies and adds in the order of DDP over gloo (see `ring_sum`): the same bits.

If this is not possible, DDP does not change, and rank 0 prints the reason. A hook that the script registers, earlier or
later, replaces this one.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Mapping
from functools import cache, partial, wraps
from itertools import count
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.futures import Future

from paceline.collectives.buckets import divide
from paceline.collectives.communicator import make_communicator
from paceline.collectives.shared_memory import SharedMemoryGroup
from paceline.collectives.shm_collectives import TensorChunk, TreeSum, all_gather_object, ring_sum
from paceline.collectives.shm_communicator import supports_shared_memory_sum
from paceline.collectives.sum_tree import LeafPartition, TreeNode
from paceline.collectives.torch_collectives import all_gather_json
from paceline.collectives.torch_communicator import print_on_rank_0
from paceline.protocol.control import SHARED_MEMORY

_numbers = count(1)  # of DDP instances, which all ranks create in the same order
_hooks: WeakKeyDictionary[Any, _Hook] = WeakKeyDictionary()
"""By the reducer of a DDP. An entry ends when the script registers a hook."""


def register_shared_memory_hook(ddp: Any, *, in_step: bool = True) -> None:
    """Sum the gradients of `ddp`, which has just been created, in shared memory if possible (a collective).

    `in_step`: whether all ranks create it in the same order with their other collectives.
    """
    group, size = ddp.process_group, dist.get_world_size()
    if dist.get_world_size(group) == 1:
        return
    reason, memory = _first_true({  # without a collective; the same on all ranks
        "it was made with init_sync=False": not in_step,
        "its process group is not that of all ranks": group is not dist.group.WORLD,
        f"its backend is {dist.get_backend(group)}, not gloo": "cpu:gloo" not in str(dist.get_backend_config(group)),
    }), None  # fmt: skip
    if not reason:
        reason = next(filter(None, all_gather_json(_obstacle(ddp, size), size)), "")
        memory = None if reason else make_communicator().memory
    if memory is None:
        _notify(f"DDP's gradients do not go through shared memory: {reason or 'the ranks have none'}")
        return
    _patch_ddp()
    hook = _Hook(ddp, memory, next(_numbers))
    cast(Any, dist)._register_comm_hook(ddp.reducer, None, hook)
    _hooks[ddp.reducer] = hook
    _notify(f"DDP's gradients go through shared memory ({size} ranks)")


def _obstacle(ddp: Any, size: int) -> str:
    return _first_true({
        f"{SHARED_MEMORY}=off": os.environ.get(SHARED_MEMORY) == "off",
        "not all parameters are real numbers on the CPU": not supports_shared_memory_sum(ddp._module_parameters),
        "torch.compile's python_reducer is in use": ddp._use_python_reducer,
        "the sums of some parameters are delayed": ddp._delay_all_reduce_params,
        "the script has registered a communication hook": getattr(ddp, "_comm_hooks", ()),
        "skip_all_reduce_unused_params is set": getattr(ddp, "skip_all_reduce_unused_params", False),
        "there are sparse gradients": any(getattr(module, "sparse", False) is True for module in ddp.modules()),
        # then DDP divides instead of multiplying, with the same result for powers of two only
        f"gradient_as_bucket_view or batched_grad_copy is set, and {size} is not a power of two": size & size - 1
        and (ddp.gradient_as_bucket_view or getattr(ddp, "batched_grad_copy", False)),
    })  # fmt: skip


def _first_true(obstacles: Mapping[str, object]) -> str:
    return next((reason for reason, is_present in obstacles.items() if is_present), "")


@cache
def _notify(text: str) -> None:
    print_on_rank_0(text)  # once for each text


class _Hook:
    def __init__(self, ddp: Any, memory: SharedMemoryGroup, number: int) -> None:
        self.script_hook: Callable[[Any], Future[Tensor]] | None = None
        # weak, because torch's reference to the hook would hide a cycle from the garbage collector
        self._ddp, self._memory = weakref.ref(ddp), memory
        self._name = "gradients" if number == 1 else f"gradients {number}"
        self._sums: dict[Any, RingSum] = {}
        self._waiting: list[tuple[Tensor, Future[Tensor]]] = []

    def __call__(self, _state: object, bucket: Any) -> Future[Tensor]:
        if self.script_hook is not None:
            return self.script_hook(bucket)
        future: Future[Tensor] = Future()
        self._waiting.append((bucket.buffer(), future))
        if bucket.is_last():
            waiting, self._waiting = self._waiting, []
            self._all_reduce([buffer for buffer, _ in waiting])
            for buffer, result in waiting:
                result.set_result(buffer)
        return future

    @torch.no_grad()
    def _all_reduce(self, buffers: list[Tensor]) -> None:
        memory, sizes, dtypes = self._memory, [len(buffer) for buffer in buffers], [buffer.dtype for buffer in buffers]
        key = (*sizes, *dtypes)
        if key not in self._sums:  # torch creates new buckets after the first step
            self._sums = {
                key: RingSum(
                    memory, sizes, dtypes, LeafPartition.one_leaf_per_rank(memory.size, memory.rank), self._name
                )
            }
        divisor = memory.size
        if not getattr(self._ddp(), "_divide_by_initial_world_size", True):  # Join: the number of active ranks
            # a rank that has ended calls the hook without a backward
            is_active = torch._C._current_graph_task_id() != -1  # pyright: ignore[reportPrivateUsage]
            divisor = sum(all_gather_object(memory, int(is_active), "who has joined"))
        torch._foreach_mul_(buffers, 1.0 / divisor)  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
        self._sums[key].run([buffers])


class RingSum(TreeSum):
    """As `TreeSum` over ranks with one leaf each, in the order of gloo's all-reduce."""

    def _make_root(
        self, chunk: TensorChunk, start: int, parts: dict[TreeNode, Tensor], out: Tensor, divisor: float | Tensor | None
    ) -> None:
        if len(parts) == 2:  # both orders give the same bits
            super()._make_root(chunk, start, parts, out, divisor)
            return
        parts_by_rank = [parts[rank, rank + 1] for rank in range(len(parts))]
        at, stop = 0, start + len(out)
        for segment, length in zip(chunk.segments, chunk.lengths, strict=True):
            low, high = max(start, at), min(stop, at + length)
            if low < high:
                inside, first = slice(low - start, high - start), segment.start + low - at
                ring_sum(
                    [part[inside] for part in parts_by_rank], first, self._sizes[segment.tensor_index], out[inside]
                )
            at += length
        if divisor is not None:
            divide(out, divisor)


@cache
def _patch_ddp() -> None:
    """Detect that a script registers a hook. torch accepts a single one: the script's first hook replaces ours."""
    torch_dist = cast(Any, dist)
    register, register_builtin = torch_dist._register_comm_hook, torch_dist._register_builtin_comm_hook
    builtin = {"ALLREDUCE": default_hooks.allreduce_hook, "FP16_COMPRESS": default_hooks.fp16_compress_hook}

    @wraps(register)
    def registered(reducer: Any, state: object, hook: Callable[..., Future[Tensor]]) -> None:
        our_hook = _hooks.pop(reducer, None)
        if our_hook is None:
            register(reducer, state, hook)
        else:
            our_hook.script_hook = partial(hook, state)

    @wraps(register_builtin)
    def registered_builtin(reducer: Any, kind: Any) -> None:
        if reducer in _hooks:
            registered(reducer, None, builtin[kind.name])
        else:
            register_builtin(reducer, kind)

    torch_dist._register_comm_hook, torch_dist._register_builtin_comm_hook = registered, registered_builtin
