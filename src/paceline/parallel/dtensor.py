"""DTensors in a model on a mesh: placements, whole tensors, and the communication of a sharded layer."""

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

REPLICATED: list[Any] = [Replicate()]
PARTIAL: list[Any] = [Partial()]


def replicated_from_local(tensor: Tensor, mesh: DeviceMesh) -> DTensor:
    """A tensor that is equal on all ranks, as a DTensor. Its gradient is the sum of the gradients of all ranks."""
    return DTensor.from_local(tensor if torch.is_grad_enabled() else tensor.detach(), mesh, REPLICATED)


def reshard_to_local(tensor: DTensor, dim: int) -> Tensor:
    """This rank's shard along `dim`, as a plain contiguous tensor.

    A change of the sharded dimension is one all-to-all, forward and backward. torch's all-to-all leaves gaps in memory,
    which its views do not support.
    """
    placement, ranks = tensor.placements[0], tensor.device_mesh.size()
    if (
        not isinstance(placement, Shard)
        or placement.is_shard(dim)
        or tensor.shape[dim] % ranks
        or tensor.shape[placement.dim] % ranks
    ):
        return with_contiguous_gradient(tensor.redistribute(placements=[Shard(dim)]).to_local())
    return _AllToAll.apply(tensor.to_local(), tensor.device_mesh.get_group(), ranks, placement.dim, dim)  # pyright: ignore


def with_contiguous_gradient(tensor: Tensor) -> Tensor:
    """The same tensor. Its gradient becomes contiguous, as torch assumes of the gradient of a DTensor."""
    if tensor.requires_grad:
        tensor.register_hook(Tensor.contiguous)
    return tensor


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shard: Tensor, group: Any, ranks: int, gathered: int, split: int) -> Tensor:
        """(shard along dimension `gathered`) -> shard along dimension `split`."""
        ctx.reverse = group, ranks, split, gathered
        return _all_to_all(shard, group, ranks, gathered, split)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return _all_to_all(gradients[0], *ctx.reverse), None, None, None, None


def _all_to_all(shard: Tensor, group: Any, ranks: int, gathered: int, split: int) -> Tensor:
    sent = torch.stack(shard.chunk(ranks, split))
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return torch.cat(received.unbind(), gathered)


class FusedProjectionOutput(Tensor):
    """The output of a fused projection: several tensors that the model's code uses as one, along the last dimension."""

    parts: Sequence[DTensor]

    @staticmethod
    def from_parts(parts: Sequence[DTensor]) -> "FusedProjectionOutput":
        first = parts[0]
        shape = [*first.shape[:-1], sum(part.shape[-1] for part in parts)]
        fused = Tensor._make_wrapper_subclass(FusedProjectionOutput, shape, dtype=first.dtype, device=first.device)  # pyright: ignore[reportAttributeAccessIssue]
        fused.parts = parts
        return fused

    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue, reportAssignmentType]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(f"{func} of a fused projection outside the model's forward")


def gather_and_concat(parts: Sequence[DTensor], dim: int) -> Tensor:
    return torch.cat([part.redistribute(placements=REPLICATED) for part in parts], dim)


def full_tensor(value: Any) -> Any:
    value = gather_and_concat(value.parts, -1) if isinstance(value, FusedProjectionOutput) else value
    return value.redistribute(placements=REPLICATED).to_local() if isinstance(value, DTensor) else value


@dataclass
class GatheredInputCache:
    """The last input of a sharded layer. Queries, keys and values have a common input, and one sum of its gradient."""

    inputs: Any = None
    gathered: Tensor | None = None
    saved: DTensor | None = None
    """the shard of this rank, for backward"""
    regathered: tuple[DTensor, Tensor] | None = None
    """the last shard that a backward has gathered, and the whole"""

    def clear(self) -> None:
        self.__init__()

    def gather_again(self, shard: DTensor) -> Tensor:
        """The whole of `shard`, gathered once for all layers with this input."""
        if self.regathered is None or self.regathered[0] is not shard:
            self.regathered = None  # free it before the next gather
            self.regathered = (shard, shard.redistribute(placements=REPLICATED).to_local())
        return self.regathered[1]


class LayerCommunication:
    def __init__(
        self, mesh: DeviceMesh, count: Callable[[int], None], cache: GatheredInputCache, *, sequence: bool = False
    ) -> None:
        """`count` is called with the bytes that a forward, or its backward, passes to an all-reduce along `mesh`.

        `cache`: the same for all layers of a model. `sequence`: outputs stay sharded along it, see `reduce_output`.
        """
        self.mesh, self._count, self._cache, self._sequence = mesh, count, cache, sequence

    def gather_input(self, inputs: Any) -> Tensor:
        """The whole input, whose gradient is summed over ranks."""
        cache = self._cache
        if cache.inputs is not inputs or cache.gathered is None:
            whole = inputs if isinstance(inputs, DTensor) else replicated_from_local(full_tensor(inputs), self.mesh)
            # the gradient has the placement of the input: for a shard, a rank receives the sum of that shard only
            gathered = whole.redistribute(placements=REPLICATED).to_local(grad_placements=PARTIAL)
            if gathered.requires_grad:
                self._count(gathered.nbytes)
            cache.inputs, cache.gathered, cache.saved = inputs, gathered, None
            return gathered
        return cache.gathered

    def linear(self, inputs: Any, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The linear function of the whole input. For backward, a rank keeps only its shard of a sharded input."""
        gathered = self.gather_input(inputs)
        with self._saving_shard(inputs, gathered):
            return F.linear(gathered, weight, bias)

    @contextmanager
    def _saving_shard(self, inputs: Any, gathered: Tensor) -> Generator[None]:
        """Inside, autograd keeps the shard of `inputs` in place of `gathered`, and gathers it again in backward."""
        if not (self._sequence and isinstance(inputs, DTensor) and inputs.placements[0].is_shard()):
            yield
            return
        cache, address, count = self._cache, gathered.data_ptr(), gathered.numel()
        shard: Any = cache.saved
        if shard is None:
            shard = cache.saved = inputs.detach()  # pyright: ignore[reportAttributeAccessIssue]
            self._count(gathered.nbytes // 2)  # a gather is half of an all-reduce

        def pack(tensor: Tensor) -> Any:
            same = tensor.data_ptr() == address and tensor.numel() == count and tensor.is_contiguous()
            return tensor.shape if same else tensor

        def unpack(packed: Any) -> Tensor:
            return packed if isinstance(packed, Tensor) else cache.gather_again(shard).view(packed)

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield

    def shard_input(self, inputs: Any, dim: int = -1) -> Tensor:
        dim %= inputs.ndim
        whole = inputs if isinstance(inputs, DTensor) else replicated_from_local(full_tensor(inputs), self.mesh)
        return whole.redistribute(placements=[Shard(dim)]).to_local()

    def reduce_output(self, part: Tensor, bias: Tensor | None = None) -> Tensor:
        """The sum over ranks, and `bias` once: whole and plain on each rank.

        With `sequence` a rank keeps its part of the sequence (Korthikanti et al. 2022). Norms, dropouts and sums are
        computed and kept for that part only, and the next sharded layer gathers the whole. Both send the same bytes.
        """
        self._count(part.nbytes)
        outputs, dim = DTensor.from_local(part, self.mesh, PARTIAL), part.ndim - 2
        if self._sequence and dim > 0 and part.shape[dim] % self.mesh.size() == 0:
            shard = outputs.redistribute(placements=[Shard(dim)])
            return shard if bias is None else shard + replicated_from_local(bias, self.mesh)
        whole = outputs.redistribute(placements=REPLICATED).to_local()
        return whole if bias is None else whole + bias

    def wrap_shard(self, shard: Tensor, dim: int = -1) -> DTensor:
        return DTensor.from_local(shard, self.mesh, [Shard(dim % shard.ndim)])
