"""Compressed sums over hosts for a slow network, after each host has added up the tensors of its ranks.

The ranks of a host hold the same tensors. Each rank exchanges some of them with the ranks of the same number on the
other hosts. The ranks of a host then exchange the results in memory.

    2 hosts of 2 ranks, 3 tensors      0 and 2 exchange the largest, 1 and 3 the other two

A codec returns the sum over hosts of a list of tensors, and its state for the next sum (*error feedback*):

    values of this step + residual  =  sent values  +  next residual

No value is lost, only delayed: over many steps, the sums equal those without compression, except for the last residual.
All hosts get the same bits, which depend only on the values.

    none       the values
    bf16       2 bytes for each; int8: 1 byte, and a scale for each block of 512 (Dettmers 2016)
    powersgd   products of each matrix with a few vectors (Vogels, Karimireddy, Jaggi 2019)
"""

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.collectives.buckets import assign_grads, assign_items_to_least_loaded, numels_and_dtypes
from paceline.collectives.hosts import NodeTopology
from paceline.collectives.shm_collectives import TreeSum
from paceline.collectives.shm_communicator import SharedMemoryBucketReducer
from paceline.collectives.sum_tree import Grads, LeafPartition, round_up
from paceline.collectives.torch_collectives import start_all_gather, start_all_reduce, tag_collective, wait_for_result

CodecState = Mapping[str, Tensor]
BLOCK = 512  # elements with one scale: 0.8 % more bytes
INT8_MAX = 127
MIN_SCALE = 1e-30  # a block with a smaller scale stays in the residual
DEFAULT_RANK = 4
COLLECTIVE_NAME = "between nodes"


class Bf16Quantizer:
    """Encodes numbers in bfloat16: (rows, n) <-> (rows, bytes) uint8; n is a multiple of BLOCK."""

    def pack(self, values: Tensor) -> Tensor:
        return values.bfloat16().view(torch.uint8)

    def unpack(self, packed: Tensor, dtype: torch.dtype) -> Tensor:
        """Bytes to numbers. Numbers that were not finite are still not finite."""
        return packed.view(torch.bfloat16).to(dtype)


class Int8Quantizer:
    """As Bf16, but in 8-bit integers with a scale for each block. A row has its scales (float32), then its numbers."""

    def pack(self, values: Tensor) -> Tensor:
        blocks = values.view(len(values), -1, BLOCK)
        scales = (blocks.abs().amax(-1) / INT8_MAX).float()
        factors = torch.where(scales > MIN_SCALE, 1 / scales, 0).to(values.dtype)
        numbers = (blocks * factors[..., None]).round_().clamp_(-INT8_MAX, INT8_MAX).to(torch.int8)
        return torch.cat([scales.view(torch.uint8), numbers.flatten(1).view(torch.uint8)], 1)

    def unpack(self, packed: Tensor, dtype: torch.dtype) -> Tensor:
        at = packed.shape[1] // (BLOCK + torch.float32.itemsize) * torch.float32.itemsize
        scales = packed[:, :at].contiguous().view(torch.float32).to(dtype)
        numbers = packed[:, at:].contiguous().view(torch.int8).view(len(packed), -1, BLOCK)
        return (numbers.to(dtype) * scales[..., None]).flatten(1)


class QuantizedCodec:
    """Each host adds up one shard: it receives the rounded shards of all hosts, and sends its rounded sum to all.

    With H hosts, a host therefore sends 2 (H - 1) / H numbers for each value, like an all-reduce.
    """

    def __init__(
        self, shapes: Sequence[torch.Size], dtype: torch.dtype, hosts: int, code: Bf16Quantizer | Int8Quantizer
    ) -> None:
        self._shapes, self._dtype, self._hosts, self._code = shapes, dtype, hosts, code
        self._size = sum(shape.numel() for shape in shapes)
        self._shard_size = round_up(self._size, BLOCK * hosts) // hosts

    def initial_state(self) -> CodecState:
        """The residuals: `held` of the values of this host, `owed` of the sum that it sends."""
        size = self._shard_size
        return {"held": torch.zeros(self._hosts * size, dtype=self._dtype), "owed": torch.zeros(size).to(self._dtype)}

    def compressed_all_reduce(
        self, tensors: Sequence[Tensor], state: CodecState, group: dist.ProcessGroup
    ) -> tuple[list[Tensor], CodecState]:
        """The sums, new and contiguous, and the next state (a collective). Does not change its arguments."""
        code, values = self._code, state["held"].clone()
        values[: self._size] += flatten_tensors(tensors)
        packed = code.pack(values.view(self._hosts, -1))
        received = torch.empty_like(packed)
        work = dist.all_to_all_single(received, tag_collective(packed, COLLECTIVE_NAME), group=group, async_op=True)
        held = values.sub_(code.unpack(packed, self._dtype).flatten())  # during the transfer
        wait_for_result(work, received)
        total = state["owed"].clone()
        for part in code.unpack(received, self._dtype):  # in the order of hosts
            total += part
        packed_total = code.pack(total[None])
        gathered = start_all_gather(packed_total.flatten(), COLLECTIVE_NAME, group)
        owed = total.sub_(code.unpack(packed_total, self._dtype)[0])
        sums = code.unpack(gathered(), self._dtype).flatten()[: self._size]
        return unflatten_tensors(sums, self._shapes), {"held": held, "owed": owed}


class PowerSgdCodec:
    """PowerSGD: sends M Q (m, r) of a matrix M (m, n), and then P' M (r, n).

    P is an orthonormal basis of the sum of M Q. P P' M is the projection of M to the space of P, and the residual is
    M - P P' M. The next Q is the sum of P' M: the steps form a power iteration. Vectors, and matrices that are hardly
    larger than their products, are sent uncompressed.
    """

    def __init__(self, shapes: Sequence[torch.Size], dtype: torch.dtype, rank: int) -> None:
        """`rank`: the number of vectors. 0: everything is sent uncompressed."""
        self._shapes, self._dtype, self._rank = shapes, dtype, rank
        sizes = [(shape[0], shape.numel() // max(1, shape[0])) if len(shape) > 1 else (1, 1) for shape in shapes]
        self._matrices = {i: (m, n) for i, (m, n) in enumerate(sizes) if 0 < 2 * rank * (m + n) < m * n}
        self._whole = [i for i in range(len(shapes)) if i not in self._matrices]
        whole = sum(shapes[i].numel() for i in self._whole)
        self.sent = sum(rank * (m + n) for m, n in self._matrices.values()) + whole
        """The number of values that one sum sends."""

    def initial_state(self) -> CodecState:
        state: dict[str, Tensor] = {}
        for i, (m, n) in self._matrices.items():
            state[f"held/{i}"] = torch.zeros(m, n, dtype=self._dtype)
            generator = torch.Generator().manual_seed(i)  # the same on all hosts
            state[f"basis/{i}"] = torch.randn(n, self._rank, dtype=self._dtype, generator=generator)
        return state

    def compressed_all_reduce(
        self, tensors: Sequence[Tensor], state: CodecState, group: dist.ProcessGroup
    ) -> tuple[list[Tensor], CodecState]:
        after: dict[str, Tensor] = {}
        values = {i: state[f"held/{i}"] + tensors[i].reshape(size) for i, size in self._matrices.items()}
        left = [value @ state[f"basis/{i}"] for i, value in values.items()]
        others = [tensors[i] for i in self._whole]
        shapes = [t.shape for t in (*left, *others)]
        sums = unflatten_tensors(start_all_reduce(flatten_tensors([*left, *others]), COLLECTIVE_NAME, group)(), shapes)
        bases: list[Tensor] = [torch.linalg.qr(total)[0] for total in sums[: len(left)]]
        right = [value.T @ base for value, base in zip(values.values(), bases, strict=True)]
        for (i, value), base, factor in zip(values.items(), bases, right, strict=True):
            after[f"held/{i}"] = value - base @ factor.T
        results = dict(zip(self._whole, sums[len(left) :], strict=True))
        if right:
            totals = unflatten_tensors(
                start_all_reduce(flatten_tensors(right), COLLECTIVE_NAME, group)(), [factor.shape for factor in right]
            )
            for i, base, total in zip(values, bases, totals, strict=True):
                after[f"basis/{i}"] = total.clone()
                results[i] = (base @ total.T).view(self._shapes[i])
        return [results[i] for i in range(len(self._shapes))], after


def make_codec(
    compress: str | None, rank: int | None, shapes: Sequence[torch.Size], dtype: torch.dtype, hosts: int
) -> PowerSgdCodec | QuantizedCodec:
    if compress in (None, "powersgd"):
        return PowerSgdCodec(shapes, dtype, 0 if compress is None else rank or DEFAULT_RANK)
    return QuantizedCodec(shapes, dtype, hosts, Int8Quantizer() if compress == "int8" else Bf16Quantizer())


def flatten_tensors(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def unflatten_tensors(flat: Tensor, shapes: Sequence[torch.Size]) -> list[Tensor]:
    """Views of `flat` with these shapes; the inverse of `flatten_tensors`."""
    parts = flat.split([shape.numel() for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


class InterNodeAllReduce:
    """Sums tensors with the shapes of these parameters over hosts, compressed if `compress` is set.

    Its state contains the residual of the compression.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        hosts: NodeTopology,
        compress: str | None = None,
        rank: int | None = None,
    ) -> None:
        self._parameters, self._hosts = parameters, hosts
        memory = hosts.memory
        self._carried = sorted(assign_items_to_least_loaded([p.numel() for p in parameters], memory.size)[memory.rank])
        double = any(p.dtype == torch.float64 for p in parameters)
        self._dtype = torch.float64 if double else torch.float32
        shapes = [parameters[i].shape for i in self._carried]
        self._codec = make_codec(compress, rank, shapes, self._dtype, hosts.node_count)
        specs, partition = numels_and_dtypes(parameters), LeafPartition.one_leaf_per_rank(memory.size, memory.rank)
        self._exchange = TreeSum(memory, *specs, partition, COLLECTIVE_NAME) if memory.size > 1 else None
        self.reset_residual()

    def sum(self, tensors: Grads) -> Grads:
        """The sums over all hosts, new tensors (a collective).

        `tensors`: one for each parameter, the same on all ranks of a host; None: all zeros. A sum is None if no host
        has ever had a tensor for its parameter: otherwise a residual must be sent.
        """
        group = self._hosts.inter_node_group()
        present = start_all_gather(
            torch.tensor([tensor is not None for tensor in tensors], dtype=torch.uint8), COLLECTIVE_NAME, group
        )
        results: Grads = [None] * len(tensors)
        state, used = self._state
        if self._carried:
            mine = [self._values_or_zeros(i, tensors[i]) for i in self._carried]
            sums, state = self._codec.compressed_all_reduce(mine, state, group)
            for i, total in zip(self._carried, sums, strict=True):
                results[i] = total.to(self._parameters[i].dtype)
        used = used | present().amax(0)
        self._state = state, used
        if self._exchange is not None:
            results = self._exchange.run([[None if t is None else t.contiguous().view(-1) for t in results]])
        return [
            total.view(p.shape) if flag and total is not None else None
            for total, p, flag in zip(results, self._parameters, used.tolist(), strict=True)
        ]

    def save_state(self) -> None:
        self._kept = self._state

    def restore_state(self) -> None:
        self._state = self._kept

    def reset_residual(self) -> None:
        used = torch.zeros(len(self._parameters), dtype=torch.uint8)
        self._kept = self._state = self._codec.initial_state(), used

    def state(self) -> dict[str, Tensor]:
        return {**self._state[0], "used": self._state[1]}

    def load(self, state: CodecState) -> None:
        self._state = {name: tensor for name, tensor in state.items() if name != "used"}, state["used"]
        self._kept = self._state

    def _values_or_zeros(self, index: int, tensor: Tensor | None) -> Tensor:
        shape = self._parameters[index].shape
        return torch.zeros(shape, dtype=self._dtype) if tensor is None else tensor.detach().to(self._dtype)


class TwoLevelBucketReducer(SharedMemoryBucketReducer):
    """A transport of one bucket: sums in memory on each host, divides, and sums over hosts with `across`."""

    def __init__(
        self, parameters: Sequence[nn.Parameter], hosts: NodeTopology, across: InterNodeAllReduce | None
    ) -> None:
        memory = hosts.memory
        partition = LeafPartition.one_leaf_per_rank(memory.size, memory.rank)
        super().__init__(parameters, memory if memory.size > 1 else None, partition, ranks=hosts.size)
        self._across = across

    def finish_buckets(self, divisor: float | Tensor | None) -> bool:
        finite = super().finish_buckets(divisor)
        if self._across is None:
            return finite
        # Divide first: a residual is part of a mean, and must not depend on the weight of the step that sends it.
        sums = self._across.sum([None if divisor is None else p.grad for p in self._parameters])
        if divisor is None:
            self._across.restore_state()
        else:
            assign_grads(self._parameters, sums)
        return False
