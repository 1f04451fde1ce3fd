"""Whole parameters for an optimizer that reads whole matrices, if each rank holds pieces of the parameters.

Each parameter has an owner, one rank that updates it. Before an update the owner receives the gradient from the ranks
that hold its pieces. After the update it sends them the new values. The state of the optimizer stays with the owner.
The owner computes what a single process computes, and copying changes no bit.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.collectives.buckets import assign_items_to_least_loaded
from paceline.collectives.torch_collectives import Group, tag_collective
from paceline.collectives.torch_communicator import print_on_rank_0


@dataclass(frozen=True)
class LocalShard:
    """The elements [start, stop) of a flattened parameter, which this rank updates, as a separate parameter."""

    start: int
    stop: int
    parameter: nn.Parameter
    full_shape: torch.Size  # the shape of the full parameter

    @property
    def is_whole(self) -> bool:
        return self.parameter.shape == self.full_shape


Ranges = Mapping[str, tuple[int, int]]
"""By parameter the elements [start, stop) that a rank holds, flattened."""


class ParameterOwners:
    """The owners of the parameters that one optimizer trains. All methods are collectives."""

    def __init__(
        self, parameters: Mapping[str, Tensor], ranges: Sequence[Ranges], pieces: Mapping[str, LocalShard], rank: int,
        *, has_gradient: Callable[[str], bool], holds_values: bool, group: Group = None,
    ) -> None:  # fmt: skip
        """Distribute the parameters, at least one, over the ranks, balanced by cost, the same on all ranks.

        `ranges` are by rank; `pieces` are those of this `rank` of the `group`. `has_gradient`: whether any rank has
        used a parameter in this step. `holds_values`: each rank has all elements of `parameters`, not only its pieces.
        """
        self._shapes = {name: parameter.shape for name, parameter in parameters.items()}
        self._ranges, self._pieces, self._rank, self._group = ranges, pieces, rank, group
        self._has_gradient, self._holds_values = has_gradient, holds_values
        self._device = next(iter(parameters.values())).device
        costs = [update_cost(shape) for shape in self._shapes.values()]
        owned_by_rank = assign_items_to_least_loaded(costs, len(ranges))
        names = [*parameters]
        self._owner = {names[i]: owner for owner, indices in enumerate(owned_by_rank) for i in indices}
        self._active: list[str] = []
        self._between: dict[str, Tensor] = {}  # the data of each owned parameter between updates
        self.owned: dict[str, LocalShard] = {}
        """The parameters that this rank updates."""
        for name in (names[i] for i in sorted(owned_by_rank[rank])):
            parameter = parameters[name]
            values = self._between[name] = parameter.detach() if holds_values else _placeholder(parameter)
            self.owned[name] = LocalShard(0, parameter.numel(), nn.Parameter(values), parameter.shape)

    def attach_to(self, optimizer: Optimizer) -> dict[str, LocalShard]:
        """Exchange before and after each update of `optimizer`. Returns what this rank updates, by name."""
        optimizer.register_step_pre_hook(self.gather_to_owners)
        optimizer.register_step_post_hook(self.scatter_from_owners)
        if len(self._ranges) > 1:
            print_on_rank_0(
                f"{type(optimizer).__name__} reads whole parameters: each of its {len(self._shapes)} parameters is "
                "updated by one rank. For this the ranks send gradients and weights once more in each step"
            )
        return self.owned

    @torch.no_grad()
    def gather_to_owners(self, *_: object) -> None:
        """Before an update: set the gradients and the values of the parameters that this rank owns."""
        self._active = [name for name in self._shapes if self._has_gradient(name)]
        for whole in self._owned_active().values():
            parameter = whole.parameter
            if not self._holds_values:
                parameter.data = torch.empty(whole.full_shape, dtype=parameter.dtype, device=parameter.device)
            parameter.grad = torch.empty_like(parameter)
        self._exchange("gradients for whole updates", to_owners=True, read=_gradient)
        if not self._holds_values:
            self._exchange("weights for whole updates", to_owners=True, read=_values)

    @torch.no_grad()
    def scatter_from_owners(self, *_: object) -> None:
        self._exchange("weights after whole updates", to_owners=False, read=_values)
        for name, whole in self._owned_active().items():
            whole.parameter.grad = None
            whole.parameter.data = self._between[name]  # an optimizer may also have assigned another tensor

    def _owned_active(self) -> dict[str, LocalShard]:
        return {name: self.owned[name] for name in self._active if name in self.owned}

    def _exchange(self, name: str, *, to_owners: bool, read: Callable[[LocalShard], Tensor]) -> None:
        """Copy between pieces and whole parameters. Both sides list the tensors of a rank in the same order."""
        pieces: list[list[Tensor]] = [[] for _ in self._ranges]
        parts: list[list[Tensor]] = [[] for _ in self._ranges]
        for active in self._active:
            if active in self._ranges[self._rank]:
                pieces[self._owner[active]].append(read(self._pieces[active]))
            if active in self.owned:
                flat = read(self.owned[active])
                for rank, ranges in enumerate(self._ranges):
                    if active in ranges:
                        parts[rank].append(flat[slice(*ranges[active])])
        sources, targets = (pieces, parts) if to_owners else (parts, pieces)
        for target, source in zip(targets[self._rank], sources[self._rank], strict=True):
            target.copy_(source)
        sources[self._rank], targets[self._rank] = [], []
        if len(self._ranges) > 1:
            self._send(sources, targets, name)

    def _send(self, sources: Sequence[Sequence[Tensor]], targets: Sequence[Sequence[Tensor]], name: str) -> None:
        empty = torch.empty(0, dtype=torch.uint8, device=self._device)
        sent = torch.cat([empty, *(source.view(torch.uint8) for of_rank in sources for source in of_rank)])
        sizes = [[sum(t.nbytes for t in of_rank) for of_rank in tensors] for tensors in (targets, sources)]
        received = sent.new_empty(sum(sizes[0]))
        dist.all_to_all_single(received, tag_collective(sent, name), *sizes, group=self._group)
        flat = [target for of_rank in targets for target in of_rank]
        for target, values in zip(flat, received.split([t.nbytes for t in flat]), strict=True):
            target.view(torch.uint8).copy_(values)


def replace_optimizer_parameters(
    optimizer: Optimizer, groups: Sequence[Sequence[str]], updated: Mapping[str, nn.Parameter]
) -> None:
    """Let `optimizer` train `updated` in place of the parameters in its groups, whose names are `groups`.

    The state that it created in its constructor for a parameter without an entry is dropped.
    """
    for group, names in zip(optimizer.param_groups, groups, strict=True):
        for name, parameter in zip(names, group["params"], strict=True):
            state = optimizer.state.pop(parameter, None)
            if state is not None and name in updated:
                optimizer.state[updated[name]] = state
        group["params"] = [updated[name] for name in names if name in updated]


def update_cost(shape: Sequence[int]) -> int:
    """The cost of an update in proportion to others: of a matrix that of a product with its smaller square."""
    elements = torch.Size(shape).numel()
    return elements * min(shape[0], elements // shape[0]) if len(shape) > 1 and elements else elements


def _gradient(shard: LocalShard) -> Tensor:
    assert shard.parameter.grad is not None
    return shard.parameter.grad.view(-1)


def _values(shard: LocalShard) -> Tensor:
    values = shard.parameter.detach()
    return values.view(-1) if values.is_contiguous() else values.reshape(-1)  # assigned by the optimizer


def _placeholder(like: Tensor) -> Tensor:
    return torch.zeros((), dtype=like.dtype, device=like.device).expand(like.shape)
