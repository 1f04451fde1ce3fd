"""What moves between layers that are cut: inputs that all ranks need whole, sums of what each of them has computed."""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from paceline.parallel.exchange import EVERYWHERE, SUMMANDS, everywhere
from paceline.parallel.view import made_whole

Told = Callable[[int], None]
"""(bytes that a forward, or its backward, hands to an all-reduce): told when a layer computes"""


@dataclass
class Inputs:
    """The last input that a layer has taken: queries, keys and values share one, and the sum of its gradient."""

    whole: Any = None
    taken: Tensor | None = None
    kept: DTensor | None = None
    """this rank's part of it, for backward"""
    again: tuple[DTensor, Tensor] | None = None
    """what was fetched last in a backward: of which share, and the whole"""

    def forget(self) -> None:
        """Let go of all tensors."""
        self.__init__()

    def fetched(self, share: DTensor) -> Tensor:
        """The whole of `share`, fetched once for all layers that took it together."""
        if self.again is None or self.again[0] is not share:
            self.again = None  # before there are two
            self.again = (share, share.redistribute(placements=EVERYWHERE).to_local())
        return self.again[1]


class Local:
    """What a layer's forward needs to move what has to move."""

    def __init__(self, mesh: DeviceMesh, told: Told, inputs: Inputs, *, sequence: bool = False) -> None:
        """`inputs` is the same for all layers of a model; `sequence`: sums stay apart, see `summed`."""
        self.mesh, self._told, self._inputs, self._sequence = mesh, told, inputs, sequence

    def taken(self, inputs: Any) -> Tensor:
        """The whole input, for a share of the work: its gradient is added up over ranks."""
        if self._inputs.whole is not inputs or self._inputs.taken is None:
            there = inputs if isinstance(inputs, DTensor) else everywhere(made_whole(inputs), self.mesh)
            # its gradient goes back as it came: a rank that has given a part gets the sum of that part only
            taken = there.redistribute(placements=EVERYWHERE).to_local(grad_placements=SUMMANDS)
            if taken.requires_grad:
                self._told(taken.nbytes)
            self._inputs.whole, self._inputs.taken, self._inputs.kept = inputs, taken, None
        return self._inputs.taken  # pyright: ignore[reportReturnType]

    @contextmanager
    def kept_apart(self, inputs: Any, taken: Tensor) -> Generator[None]:
        """Around what computes with `taken`: for backward a rank keeps its part of `inputs`, and fetches the whole."""
        if not (self._sequence and isinstance(inputs, DTensor) and inputs.placements[0].is_shard()):
            yield
            return
        held, at, count = self._inputs, taken.data_ptr(), taken.numel()
        kept: Any = held.kept
        if kept is None:
            kept = held.kept = inputs.detach()  # pyright: ignore[reportAttributeAccessIssue]
            self._told(taken.nbytes // 2)  # a gather is half of an all-reduce

        def pack(tensor: Tensor) -> Any:
            same = tensor.data_ptr() == at and tensor.numel() == count and tensor.is_contiguous()
            return tensor.shape if same else tensor

        def unpack(packed: Any) -> Tensor:
            return packed if isinstance(packed, Tensor) else held.fetched(kept).view(packed)

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield

    def share(self, inputs: Any, dim: int = -1) -> Tensor:
        """This rank's share of an input along `dim`."""
        dim %= inputs.ndim
        shared = inputs if isinstance(inputs, DTensor) else everywhere(made_whole(inputs), self.mesh)
        return shared.redistribute(placements=[Shard(dim)]).to_local()

    def summed(self, part: Tensor, bias: Tensor | None = None) -> Tensor:
        """The sum over ranks, and `bias` once: whole and plain on each of them.

        With `sequence` a rank keeps its part of the places (Korthikanti et al. 2022): what follows, norms, dropout and
        sums, is computed and kept for that part only; the next layer that is cut fetches the whole. Both
        send what one sum does.
        """
        self._told(part.nbytes)
        sums, places = DTensor.from_local(part, self.mesh, SUMMANDS), part.ndim - 2
        if self._sequence and places > 0 and part.shape[places] % self.mesh.size() == 0:
            apart = sums.redistribute(placements=[Shard(places)])
            return apart if bias is None else apart + everywhere(bias, self.mesh)
        whole = sums.redistribute(placements=EVERYWHERE).to_local()
        return whole if bias is None else whole + bias

    def shared(self, share: Tensor, dim: int = -1) -> DTensor:
        """What the ranks have shares of."""
        return DTensor.from_local(share, self.mesh, [Shard(dim % share.ndim)])
