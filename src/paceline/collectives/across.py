"""Sums over hosts, for a slow network: each host has added up by itself before, and little travels between them.

The ranks of a host hold the same tensors. Each of them carries some to the ranks that have its place on the other hosts
(`compress` says how), and all hand out in memory what they come back with.

    2 hosts of 2 ranks, 3 tensors      0 and 2 exchange the largest, 1 and 3 the other two
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from paceline.collectives.buckets import numels_and_dtypes
from paceline.collectives.compress import NAME, State, compression
from paceline.collectives.hosts import Hosts
from paceline.collectives.memory_sum import TreeSum
from paceline.collectives.torch_collectives import start_gather
from paceline.collectives.transports import InMemory
from paceline.collectives.tree import Forest, Grads


def of_one_host(hosts: Hosts) -> Forest:
    """Each rank of this host is one leaf."""
    return Forest([(rank, rank + 1) for rank in range(hosts.memory.size)], hosts.memory.rank)


class Across:
    """Sums over hosts of tensors that are shaped as these parameters. What it holds back is part of a state."""

    def __init__(
        self, parameters: Sequence[nn.Parameter], hosts: Hosts, compress: str | None = None, rank: int | None = None
    ) -> None:
        """`compress` and `rank` as in `compress.compression`."""
        self._parameters, self._hosts = parameters, hosts
        memory, sizes = hosts.memory, [p.numel() for p in parameters]
        loads, carried = [0] * memory.size, [list[int]() for _ in range(memory.size)]
        for index in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
            place = loads.index(min(loads))
            loads[place] += sizes[index]
            carried[place].append(index)
        self._carried = sorted(carried[memory.rank])
        double = any(p.dtype == torch.float64 for p in parameters)
        self._dtype = torch.float64 if double else torch.float32
        self._way = compression(compress, rank, [parameters[i].shape for i in self._carried], self._dtype, hosts.count)
        kinds, alone = numels_and_dtypes(parameters), memory.size == 1
        self._hand_out = None if alone else TreeSum(memory, *kinds, of_one_host(hosts), NAME)
        self.forget()

    def sum(self, tensors: Grads) -> Grads:
        """The sums over all hosts, new tensors (a collective).

        Args:
            tensors: of each parameter, the same on all ranks of a host; None where it has none: all zeros.

        Returns:
            None where no host has ever had any: what is held back must still arrive.
        """
        group = self._hosts.across()
        there = start_gather(torch.tensor([tensor is not None for tensor in tensors], dtype=torch.uint8), NAME, group)
        found: Grads = [None] * len(tensors)
        if self._carried:
            mine = [self._values(i, tensors[i]) for i in self._carried]
            sums, state = self._way.sum(mine, self._state[0], group)
            for i, total in zip(self._carried, sums, strict=True):
                found[i] = total.to(self._parameters[i].dtype)
        else:
            state = self._state[0]
        used = self._state[1] | there().amax(0)
        self._state = state, used
        if self._hand_out is not None:
            handed = self._hand_out.run([[None if one is None else one.contiguous().view(-1) for one in found]])
            found = [
                None if one is None else one.view(p.shape) for one, p in zip(handed, self._parameters, strict=True)
            ]
        return [one if flag else None for one, flag in zip(found, used.tolist(), strict=True)]

    def keep(self) -> None:
        """Remember what is held back, for `put_back`."""
        self._kept = self._state

    def put_back(self) -> None:
        """What was summed since `keep` has not been used."""
        self._state = self._kept

    def forget(self) -> None:
        """Nothing is held back."""
        self._state: tuple[State, Tensor] = self._way.begin(), torch.zeros(len(self._parameters), dtype=torch.uint8)
        self._kept = self._state

    def state(self) -> dict[str, Tensor]:
        """What the next sum begins with, to be saved; `load` takes it over."""
        return {**self._state[0], "used": self._state[1]}

    def load(self, state: State) -> None:
        """Take over what `state` gave."""
        self._state = {name: one for name, one in state.items() if name != "used"}, state["used"]
        self._kept = self._state

    def _values(self, index: int, tensor: Tensor | None) -> Tensor:
        shape = self._parameters[index].shape
        return torch.zeros(shape, dtype=self._dtype) if tensor is None else tensor.detach().to(self._dtype)


class OnEachHost:
    """A transport of one bucket: in memory on each host and then, divided, across hosts; or not at all, without it."""

    early = False

    def __init__(self, parameters: Sequence[nn.Parameter], hosts: Hosts, across: Across | None) -> None:
        """A collective."""
        self.buckets: Sequence[Sequence[nn.Parameter]] = [parameters]
        self._parameters, self._across = parameters, across
        memory = hosts.memory if hosts.memory.size > 1 else None
        self._inside = InMemory(parameters, memory, of_one_host(hosts), ranks=hosts.size)

    def begin(self, number: int, own: list[Grads | None]) -> None:
        """See transports.Transport."""
        self._inside.begin(number, own)

    def end(self, divisor: float | Tensor | None) -> bool:
        """See transports.Transport. True: of this host's sums, where they are all."""
        finite = self._inside.end(divisor)
        if self._across is None:
            return finite
        # divided before: what is held back is part of a mean, whatever the weight of the step in which it arrives
        sums = self._across.sum([None if divisor is None else p.grad for p in self._parameters])
        if divisor is None:
            self._across.put_back()
            return False
        for parameter, total in zip(self._parameters, sums, strict=True):
            if total is not None and parameter.grad is None:
                parameter.grad = torch.empty_like(parameter)
            if total is not None and parameter.grad is not None:
                parameter.grad.copy_(total)
        return False

    def forget(self) -> None:
        """See transports.Transport."""
        self._inside.forget()
