"""What leaves a host for the others, made smaller. What that leaves out is held back, and added to what leaves next.

Each way gives the sum over hosts of lists of tensors, and the state with which its next sum begins (*error feedback*):

    this step's values + held back  =  what leaves  +  held back for the next step

So nothing is lost, only late: over steps, the sums add up to those of a run that sends all, but for what is held back
at the end. All hosts come to the same bits, which depend on nothing but the values.

    whole      the values as they are
    bf16       2 bytes for each; int8: 1 byte, and a scale for each block of 512 (Dettmers 2016)
    powersgd   of each matrix its product with a few vectors, and theirs with it (Vogels, Karimireddy, Jaggi 2019)
"""

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.collectives.torch_collectives import labelled, start_gather, start_sum, when_done
from paceline.collectives.tree import round_up

State = Mapping[str, Tensor]
BLOCK = 512  # elements that share a scale: 0.8 % more bytes
LARGEST = 127
TINY = 1e-30  # of a scale: what is smaller waits until it has grown
DEFAULT_RANK = 4
NAME = "between hosts"


class Whole:
    """Sums lists of tensors of the same shapes over the ranks of a group, one on each host: nothing is left out."""

    def __init__(self, shapes: Sequence[torch.Size]) -> None:
        self._shapes = shapes

    def begin(self) -> State:
        """The state before the first sum."""
        return {}

    def sum(self, tensors: Sequence[Tensor], state: State, group: dist.ProcessGroup) -> tuple[list[Tensor], State]:
        """The sums, new and contiguous, and the state after them; neither argument changes (a collective)."""
        flat = labelled(flattened(tensors), NAME)
        return split(when_done(dist.all_reduce(flat, group=group, async_op=True), flat), self._shapes), state


class Bf16:
    """Numbers as bytes, and back: (rows, n) <-> (rows, bytes) uint8, where n is a multiple of BLOCK."""

    def pack(self, values: Tensor) -> Tensor:
        """To bytes."""
        return values.bfloat16().view(torch.uint8)

    def unpack(self, packed: Tensor, dtype: torch.dtype) -> Tensor:
        """To numbers; not finite where what was packed was not."""
        return packed.view(torch.bfloat16).to(dtype)


class Int8:
    """As Bf16. First the scales of a row, float32, then its numbers."""

    def pack(self, values: Tensor) -> Tensor:
        """See Bf16."""
        blocks = values.view(len(values), -1, BLOCK)
        scales = (blocks.abs().amax(-1) / LARGEST).float()
        factors = torch.where(scales > TINY, 1 / scales, 0).to(values.dtype)
        numbers = (blocks * factors[..., None]).round_().clamp_(-LARGEST, LARGEST).to(torch.int8)
        return torch.cat([scales.view(torch.uint8), numbers.flatten(1).view(torch.uint8)], 1)

    def unpack(self, packed: Tensor, dtype: torch.dtype) -> Tensor:
        """See Bf16."""
        at = packed.shape[1] // (BLOCK + torch.float32.itemsize) * torch.float32.itemsize
        scales = packed[:, :at].contiguous().view(torch.float32).to(dtype)
        numbers = packed[:, at:].contiguous().view(torch.int8).view(len(packed), -1, BLOCK)
        return (numbers.to(dtype) * scales[..., None]).flatten(1)


class Rounded:
    """Each host adds up a share: all send it theirs, rounded, and it sends its sum to all, rounded.

    So a host sends 2 (H - 1) / H numbers for each value, as an all-reduce does, however many hosts H there are.
    """

    def __init__(self, shapes: Sequence[torch.Size], dtype: torch.dtype, hosts: int, code: Bf16 | Int8) -> None:
        self._shapes, self._dtype, self._hosts, self._code = shapes, dtype, hosts, code
        self._size = sum(shape.numel() for shape in shapes)
        self._share = round_up(self._size, BLOCK * hosts) // hosts

    def begin(self) -> State:
        """See Whole. `held`: of what this host has to send; `owed`: of the sum that it has sent."""
        share = self._share
        return {"held": torch.zeros(self._hosts * share, dtype=self._dtype), "owed": torch.zeros(share).to(self._dtype)}

    def sum(self, tensors: Sequence[Tensor], state: State, group: dist.ProcessGroup) -> tuple[list[Tensor], State]:
        """See Whole."""
        code, values = self._code, state["held"].clone()
        values[: self._size] += flattened(tensors)
        packed = code.pack(values.view(self._hosts, -1))
        received = torch.empty_like(packed)
        work = dist.all_to_all_single(received, labelled(packed, NAME), group=group, async_op=True)
        held = values.sub_(code.unpack(packed, self._dtype).flatten())  # while it travels
        when_done(work, received)
        total = state["owed"].clone()
        for part in code.unpack(received, self._dtype):  # in the order of hosts
            total += part
        mine = code.pack(total[None])
        gathered = start_gather(mine.flatten(), NAME, group)
        owed = total.sub_(code.unpack(mine, self._dtype)[0])
        sums = code.unpack(gathered(), self._dtype).flatten()[: self._size]
        return split(sums, self._shapes), {"held": held, "owed": owed}


class LowRank:
    """Of a matrix M (m, n) leave M Q (m, r), then, P being an orthonormal basis of the sum of these, P' M (r, n).

    P P' M is what of M lies in the space of P; the rest is held back. The next Q is the sum of P' M, so that the steps
    are those of a power iteration. What is no matrix, or hardly larger than what would be sent for it, is sent whole.
    """

    def __init__(self, shapes: Sequence[torch.Size], dtype: torch.dtype, rank: int) -> None:
        self._shapes, self._dtype, self._rank = shapes, dtype, rank
        sizes = [(shape[0], shape.numel() // max(1, shape[0])) if len(shape) > 1 else (1, 1) for shape in shapes]
        self._matrices = {i: (m, n) for i, (m, n) in enumerate(sizes) if 2 * rank * (m + n) < m * n}
        self._whole = [i for i in range(len(shapes)) if i not in self._matrices]
        self.sent = sum(rank * (m + n) for m, n in self._matrices.values()) + sum(
            shapes[i].numel() for i in self._whole
        )
        """how many numbers go into a sum"""

    def begin(self) -> State:
        """See Whole. `held/i`: of matrix i; `basis/i`: its Q."""
        state: dict[str, Tensor] = {}
        for i, (m, n) in self._matrices.items():
            state[f"held/{i}"] = torch.zeros(m, n, dtype=self._dtype)
            drawn = torch.Generator().manual_seed(i)  # any: the same on all hosts
            state[f"basis/{i}"] = torch.randn(n, self._rank, dtype=self._dtype, generator=drawn)
        return state

    def sum(self, tensors: Sequence[Tensor], state: State, group: dist.ProcessGroup) -> tuple[list[Tensor], State]:
        """See Whole."""
        after: dict[str, Tensor] = {}
        values = {i: state[f"held/{i}"] + tensors[i].reshape(size) for i, size in self._matrices.items()}
        left = [value @ state[f"basis/{i}"] for i, value in values.items()]
        others = [tensors[i] for i in self._whole]
        shapes = [*(one.shape for one in left), *(one.shape for one in others)]
        sums = split(start_sum(flattened([*left, *others]), NAME, group)(), shapes)
        bases: list[Tensor] = [torch.linalg.qr(one)[0] for one in sums[: len(left)]]
        right = [value.T @ base for value, base in zip(values.values(), bases, strict=True)]
        for (i, value), base, own in zip(values.items(), bases, right, strict=True):
            after[f"held/{i}"] = value - base @ own.T
        found = dict(zip(self._whole, sums[len(left) :], strict=True))
        if right:
            totals = split(start_sum(flattened(right), NAME, group)(), [one.shape for one in right])
            for i, base, total in zip(values, bases, totals, strict=True):
                after[f"basis/{i}"] = total.clone()
                found[i] = (base @ total.T).view(self._shapes[i])
        return [found[i] for i in range(len(self._shapes))], after


def compression(
    compress: str | None, rank: int | None, shapes: Sequence[torch.Size], dtype: torch.dtype, hosts: int
) -> Whole | LowRank | Rounded:
    """The one with this name; `rank` is that of powersgd. `dtype`: in which it computes, float32 or float64."""
    if compress is None:
        return Whole(shapes)
    if compress == "powersgd":
        return LowRank(shapes, dtype, rank or DEFAULT_RANK)
    return Rounded(shapes, dtype, hosts, Int8() if compress == "int8" else Bf16())


def flattened(tensors: Sequence[Tensor]) -> Tensor:
    """(n,): all their elements, in new memory."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def split(flat: Tensor, shapes: Sequence[torch.Size]) -> list[Tensor]:
    """The tensors that `flattened` has put together; their memory stays that of `flat`."""
    parts = flat.split([shape.numel() for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
