"""Collectives over torch.distributed: messages, small sums, and sums over the leaves of a tree.

On the CPU, each rank sends small data directly to all others: one round trip for any number of ranks. gloo's all-gather
and all-reduce are rings with W - 1 and 2 (W - 1) round trips.
"""

import json
from collections.abc import Callable, Sequence
from functools import lru_cache, partial, reduce
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.collectives.sum_tree import LeafPartition, tree_sum
from paceline.errors import ExitCode, TrainingError

CPU = torch.device("cpu")
MAX_GATHER_COPY_BYTES = 1 << 26  # the most bytes of the copies for all ranks; larger data uses the backend's all-gather
HEADER_BYTES = 64
Group = dist.ProcessGroup | None  # None: all ranks
WaitFunction = Callable[[], Tensor]
"""Waits for a collective, and returns its result; to be called once."""
StartFunction = Callable[[Tensor, str], WaitFunction]  # (tensor, name); see `start_all_gather`
MAX_EXTRA_BYTES = 1 << 16  # that a rank may send in addition to those of a ring: 50 ms at 10 Mbit/s


def all_gather_json(
    value: Any, size: int, device: torch.device = CPU, group: Group = None, *, name: str = "messages",
    start: StartFunction | None = None,
) -> list[Any]:  # fmt: skip
    """The `value` (JSON) of all `size` ranks of a group, by rank, on every rank.

    `name`: for the hang guard. `start`: replaces `start_all_gather`.
    """
    start = start or partial(start_all_gather, group=group)
    if size == 1:
        return [value]
    payload = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(device)
    length = torch.tensor([len(payload)], device=device)
    sizes = [int(n) for n in start(length, f"length of {name}")()]
    padded = torch.zeros(max(sizes), dtype=torch.uint8, device=device)
    padded[: len(payload)] = payload
    received = start(padded, name)()
    return [json.loads(bytes(row[:n].tolist())) for row, n in zip(received, sizes, strict=True)]


def start_all_gather(mine: Tensor, name: str, group: Group = None) -> WaitFunction:
    """Start an all-gather of `mine`, (n,) on all ranks of a group. The returned function waits and returns (ranks, n).

    gloo matches messages by their length only. On the CPU each message therefore begins with its name, type and size.
    If ranks have started different collectives, the function raises TrainingError with MISMATCH.
    """
    size = dist.get_world_size(group)
    if mine.device.type != "cpu" or size * mine.nbytes > MAX_GATHER_COPY_BYTES:
        sent, of_all = tag_collective(mine, name), mine.new_empty(size * len(mine))
        work = gather_shards(of_all, sent, group)
        return lambda: wait_for_result(work, of_all, sent).view(size, len(mine))
    row = torch.cat([_header(name, mine.dtype, len(mine)), mine.detach().contiguous().view(torch.uint8)])
    rows, received = tag_collective(row.repeat(size), name), row.new_empty(size * len(row))
    started = dist.all_to_all_single(received, rows, group=group, async_op=True)
    return lambda: _contents(wait_for_result(started, received, rows).view(size, -1), row, mine.dtype)


@lru_cache(1024)
def _header(name: str, dtype: torch.dtype, count: int) -> Tensor:
    text = f"{name} [{count}] {str(dtype).removeprefix('torch.')}".encode()[:HEADER_BYTES]
    return torch.frombuffer(bytearray(text.ljust(HEADER_BYTES, b"\0")), dtype=torch.uint8)


def _contents(rows: Tensor, mine: Tensor, dtype: torch.dtype) -> Tensor:
    headers = rows[:, :HEADER_BYTES]
    if not torch.equal(headers, mine[:HEADER_BYTES].expand_as(headers)):
        texts = [bytes(header.tolist()).rstrip(b"\0").decode(errors="replace") for header in headers]
        calls = "; ".join(f"rank {number} of the group sends '{text}'" for number, text in enumerate(texts))
        raise TrainingError(code="collectives-mismatch", exit_code=ExitCode.MISMATCH, where="", calls=calls)
    return rows[:, HEADER_BYTES:].contiguous().view(dtype)


def start_all_reduce(numbers: Tensor, name: str, group: Group = None) -> WaitFunction:
    """Start an all-reduce of `numbers`, (n,) on all ranks of a group. The returned function waits.

    `numbers` may become the sum. If this takes few bytes more than a ring, each rank sends them to all others (between
    two ranks it takes none).
    """
    size = dist.get_world_size(group)
    extra_bytes = (size - 1) * (size - 2) * numbers.nbytes // max(1, size)
    if numbers.device.type == "cpu" and extra_bytes <= MAX_EXTRA_BYTES:
        gathered = start_all_gather(numbers, name, group)
        return lambda: reduce(torch.add, gathered().unbind())  # in the order of ranks: all get the same bits
    total = tag_collective(numbers, name)
    work = dist.all_reduce(total, group=group, async_op=True)
    return lambda: wait_for_result(work, total)


def wait_for_result(work: dist.Work | None, result: Tensor, *inputs: Tensor) -> Tensor:
    """Wait for `work`, and return `result`, which it fills. Keeps `inputs` alive meanwhile, because gloo reads them."""
    if work is not None:  # None only for ranks outside the group
        work.wait()
    return result


def gather_shards(flat: Tensor, mine: Tensor, group: Group, *, async_op: bool = True) -> dist.Work | None:
    """All-gather of shards of equal size into `flat`, without copies; `mine` may be this rank's part of it."""
    name = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"  # before torch 2.13
    return getattr(dist, name)(flat, mine, group=group, async_op=async_op)


def tag_collective(tensor: Tensor, name: str) -> Tensor:
    """Set the name of the collective that gets `tensor`, for the hang guard; returns `tensor`."""
    vars(tensor)["collective"] = name
    return tensor


def start_reduce_scatter(
    partition: LeafPartition, partials: Sequence[Tensor], name: str, group: Group = None
) -> WaitFunction:
    """Start a reduce-scatter in the order of the tree: each rank receives the subtrees of its shard, and adds them up.

    `partials`: the sums of this rank's subtrees, each (n,); n is a multiple of the number of ranks.
    """
    nodes, own = partition.subtrees_by_rank, partials[0]
    world_size, counts = len(nodes), [len(rank_nodes) for rank_nodes in nodes]
    if world_size == 1:
        return lambda: own
    shard_size = len(own) // world_size
    if len(partials) > 1:
        own = torch.stack([t.view(world_size, -1) for t in partials], 1).flatten()
    received = own.new_empty(sum(counts) * shard_size)
    work = dist.all_to_all_single(
        received, tag_collective(own, name),
        [count * shard_size for count in counts], [counts[partition.rank] * shard_size] * world_size,
        group=group, async_op=True,
    )  # fmt: skip

    def wait() -> Tensor:
        parts = wait_for_result(work, received, own).view(-1, shard_size).unbind()
        total = tree_sum(dict(zip(chain(*nodes), parts, strict=True)), Tensor.add_, partition.leaf_count)
        return total.clone()  # the memory of all subtrees becomes free

    return wait


class TreeAllReduce:
    """An all-reduce in the order of the tree: an all-to-all, then a sum of one shard on each rank, then an all-gather.

    For each subtree of a rank, this moves the same number of bytes as an all-reduce. Several exchanges may run at the
    same time, started in the same order on every rank.
    """

    def __init__(
        self, partition: LeafPartition, partials: Sequence[Tensor], group: Group = None, name: str = "", *,
        in_order: bool = True,
    ) -> None:  # fmt: skip
        """Start it. `partials`: the sums of this rank's subtrees, each (n,); n is padded (see `LeafPartition.padded`).

        If not `in_order` of the tree, each rank has one subtree, the order is that of the backend, and n is any number.
        """
        self._group, self._name, self._flat = group, name, partials[0]
        self._work: dist.Work | None = None
        self._scatter: WaitFunction | None = None
        counts = [len(nodes) for nodes in partition.subtrees_by_rank]
        if counts == [1, 1] or not in_order:  # a sum of two has only one order: an all-reduce is the tree
            self._work = dist.all_reduce(tag_collective(self._flat, name), group=group, async_op=True)
        elif len(counts) > 1:
            self._scatter = start_reduce_scatter(partition, partials, name, group)

    def start_gather(self) -> None:
        """Wait for the first half, and start to send the second: the sum of this rank's shard."""
        if self._scatter is not None:
            self._mine, self._scatter = self._scatter(), None  # keep it: the backend reads it until the work is done
            self._work = gather_shards(self._flat, tag_collective(self._mine, self._name), self._group)

    def wait(self) -> Tensor:
        self.start_gather()
        if self._work is not None:
            self._work.wait()
        return self._flat
