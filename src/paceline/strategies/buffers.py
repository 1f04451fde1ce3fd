"""Buffers (BatchNorm's running statistics, say) kept per virtual rank, as parameters never need to be.

Each virtual rank sees its own samples, so its buffers drift apart from the others'. Which rank computes a virtual rank
must not matter: its buffers are put into the module before its forward, and taken out after it.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.data.plan import Work
from paceline.scratch.batchnorm import SyncBatchNorm
from paceline.world import World

Buffers = dict[str, Tensor]


class VirtualBuffers:
    """The buffers of this rank's virtual ranks, by virtual rank."""

    def __init__(self, model: nn.Module, world: World) -> None:
        self._world = world
        self._slots = {
            (f"{prefix}.{name}" if prefix else name): (owner, name)
            for prefix, owner in model.named_modules()
            for name, buffer in owner.named_buffers(recurse=False)
            if buffer is not None
        }
        self._synchronised = {name for name, (owner, _) in self._slots.items() if isinstance(owner, SyncBatchNorm)}
        self._initial = {name: buffer.clone() for name, buffer in self._in_module().items()}
        self._of: dict[int, Buffers] = {}

    @contextmanager
    def of(self, work: Work) -> Generator[None]:
        """Inside, the module has the buffers of this work's virtual rank; a stand-in's changes are forgotten.

        Except those of synchronised batch norm: its statistics are global, so a stand-in's are everybody's.
        """
        own = self._of.get(work.virtual_rank) or {name: buffer.clone() for name, buffer in self._initial.items()}
        if work.counted:
            self._put(own)
        else:
            self._put({n: b if n in self._synchronised else b.clone() for n, b in own.items()})
        yield
        # Read back: a module may have replaced its buffer instead of writing into it.
        after = self._in_module()
        kept = after if work.counted else {n: after[n] if n in self._synchronised else b for n, b in own.items()}
        self._of[work.virtual_rank] = kept

    @contextmanager
    def merged(self) -> Generator[None]:
        """Inside, the module has on every rank the mean of the buffers over all virtual ranks (a collective).

        Only virtual ranks that have seen a sample count; buffers that are no floats are those of the lowest one.
        """
        before = self._in_module()
        self._put(self._mean())
        try:
            yield
        finally:
            self._put(before)

    def _mean(self) -> Buffers:
        sets = list(self._of.values())
        mean: Buffers = {}
        count = torch.tensor([float(len(sets))], dtype=torch.float64, device=self._world.device)
        dist.all_reduce(count)
        for name, initial in self._initial.items():
            if count == 0:  # nothing trained yet
                mean[name] = initial.clone()
            elif initial.is_floating_point():
                total = sum((s[name].double() for s in sets), torch.zeros_like(initial, dtype=torch.float64))
                dist.all_reduce(total)
                mean[name] = (total / count).reshape(initial.shape).to(initial.dtype)
            else:
                lowest = (self._of[min(self._of)][name] if self._of else initial).clone().contiguous()
                dist.broadcast(lowest, src=0)  # rank 0 owns virtual rank 0, which has a share of every global batch
                mean[name] = lowest
        return mean

    def _in_module(self) -> Buffers:
        return {name: getattr(owner, leaf) for name, (owner, leaf) in self._slots.items()}

    def _put(self, buffers: Mapping[str, Tensor]) -> None:
        for name, (owner, leaf) in self._slots.items():
            setattr(owner, leaf, buffers[name])
