"""What every rank has to say, on every rank, over torch.distributed alone.

On the CPU each rank sends it to all others at once, if it is not much: one trip there and back, however many ranks
there are. Gloo's own all-gather and all-reduce are rings, which take one and two trips for each rank but one.
"""

import json
from collections.abc import Callable
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

CPU = torch.device("cpu")
AT_ONCE_BYTES = 1 << 26  # of all messages to all; what is larger is not copied for each
MOST_BYTES = 1 << 16  # that a rank sends to all beyond a ring's: 50 ms at 10 Mbit/s


def gather_over_torch(
    words: Any, size: int, device: torch.device = CPU, group: dist.ProcessGroup | None = None
) -> list[Any]:
    """The `words` (anything JSON can hold) of all `size` ranks of a group, the default one, by rank, on every rank."""
    if size == 1:
        return [words]
    payload = torch.frombuffer(bytearray(json.dumps(words).encode()), dtype=torch.uint8).to(device)
    length = torch.tensor([len(payload)], device=device)
    sizes = [int(n) for n in start_gather(length, "lengths of words", group)()]
    padded = torch.zeros(max(sizes), dtype=torch.uint8, device=device)
    padded[: len(payload)] = payload
    received = start_gather(padded, "words", group)()
    return [json.loads(bytes(own[:n].tolist())) for own, n in zip(received, sizes, strict=True)]


def start_gather(mine: Tensor, name: str, group: dist.ProcessGroup | None = None) -> Callable[[], Tensor]:
    """Start to send `mine`, (n,), the same n on all ranks of a group, to all of them; the returned function waits.

    Returns:
        To be called once: (ranks, n), by rank.
    """
    size = dist.get_world_size(group)
    to_all = mine.device.type == "cpu" and size * mine.nbytes <= AT_ONCE_BYTES
    own, of_all = labelled(mine.repeat(size) if to_all else mine, name), mine.new_empty(size * len(mine))
    if to_all:
        work = dist.all_to_all_single(of_all, own, group=group, async_op=True)
    else:
        work = gather_shares(of_all, own, group)
    return lambda: when_done(work, of_all, own).view(size, len(mine))


def start_sum(numbers: Tensor, name: str, group: dist.ProcessGroup | None = None) -> Callable[[], Tensor]:
    """Start adding up `numbers`, (n,), over the ranks of a group, the same n on all; the returned function waits.

    Sent to all where that takes few bytes more than a ring: none between two.
    """
    size = dist.get_world_size(group)
    more = (size - 1) * (size - 2) * numbers.nbytes // max(1, size)
    if numbers.device.type == "cpu" and more <= MOST_BYTES:
        gathered = start_gather(numbers, name, group)
        return lambda: reduce(torch.add, gathered().unbind())  # in the order of ranks: the same bits on all of them
    total = labelled(numbers.clone(), name)
    work = dist.all_reduce(total, group=group, async_op=True)
    return lambda: when_done(work, total)


def when_done(work: dist.Work | None, found: Tensor, *sent: Tensor) -> Tensor:
    """What is `found`, once the work that finds it is done; gloo reads what is `sent` until then: it is kept."""
    if work is not None:  # None only for ranks outside the group
        work.wait()
    return found


def gather_shares(flat: Tensor, mine: Tensor, group: dist.ProcessGroup | None) -> dist.Work:
    """Start to bring all ranks' equal shares together in `flat`, uncopied; `mine` may be this rank's part of it."""
    name = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"  # before torch 2.13
    work = getattr(dist, name)(flat, mine, group=group, async_op=True)
    assert isinstance(work, dist.Work)  # None only for ranks outside the group
    return work


def labelled(tensor: Tensor, name: str) -> Tensor:
    """Give the collective that `tensor` is passed to a name, for whoever watches; torch itself takes no notice."""
    vars(tensor)["collective"] = name
    return tensor
