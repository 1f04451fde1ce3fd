"""Reduces the values that virtual ranks have of one buffer to one value: sum, mean, max, min or first.

A module declares the reduction in `buffer_reductions`. Without a declaration, it is inferred from the values.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.checkpoint.state import StateSource
from paceline.collectives.sum_tree import LeafPartition, add_optional

UNDECLARED = "open"  # not declared: inferred at each merge
UNCHANGED = "unchanged"  # all virtual ranks still have the initial value
MAX_CALLS = 3  # of one module in one micro-batch, if its writes cannot be counted


@dataclass(frozen=True)
class BufferChangeCounts:
    """The changes of an integer buffer by one virtual rank, since its initial value."""

    micro_batches: int = 0
    samples: int = 0
    writes: int = 0  # in-place operations on the buffer
    replaced: int = 0  # micro-batches in which the module has assigned a new tensor

    def tensor(self) -> Tensor:
        return torch.tensor([self.micro_batches, self.samples, self.writes, self.replaced])


@dataclass(frozen=True)
class BufferObservation:
    """Facts about the value of an undeclared buffer on one virtual rank, for the inference of its reduction."""

    digest: str  # of the bytes; empty if the buffer still has its initial value
    step: int | None
    """Integer buffers: the difference of all changed elements from their initial value; None if they differ."""
    decreased: bool  # integer and bool buffers: whether an element is smaller than before
    seen: BufferChangeCounts
    by_samples: bool | None = None  # floating-point and complex buffers: `may_depend_on_sample_count` of the last step


def reductions_for_dtype(buffer: Tensor) -> tuple[str, ...]:
    if buffer.is_complex():
        return ("sum", "mean", "first")
    if buffer.is_floating_point():
        return ("sum", "mean", "max", "min", "first")
    return ("max", "min", "first") if buffer.dtype == torch.bool else ("sum", "max", "min", "first")


def observe_buffer(
    own: Tensor, initial: Tensor, before: Tensor | None, seen: BufferChangeCounts, *, changed: bool
) -> BufferObservation:
    """The facts about one value. `before` is an older value; `changed`: whether it differs from `initial`."""
    if not changed:
        return BufferObservation("", 0, False, seen)
    digest = digest_of(own)
    if own.is_floating_point() or own.is_complex():
        return BufferObservation(digest, None, False, seen)
    values, initial_values = own.long(), initial.long()
    differences = (values - initial_values)[values != initial_values].unique().tolist()
    older = initial_values if before is None else before.long()
    decreased = differences[0] < 0 or bool((values < older).any())
    return BufferObservation(digest, differences[0] if len(differences) == 1 else None, decreased, seen)


def digest_of(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data).hexdigest()


def load_change_counts(source: StateSource, virtual_rank: int, name: str) -> BufferChangeCounts:
    saved = source.tensor(f"seen/{virtual_rank}/{name}")
    return BufferChangeCounts() if saved is None else BufferChangeCounts(*saved.tolist())


def infer_saved_reduction(source: StateSource, name: str, values: Mapping[int, Tensor], initial: Tensor) -> str:
    """The reduction of an undeclared buffer, inferred from its saved values, by virtual rank; see `infer_reduction`."""
    ranks: list[BufferObservation] = []
    for virtual_rank, value in values.items():
        is_changed = initial.shape != value.shape or bool((value != initial).any())
        history = load_change_counts(source, virtual_rank, name)
        ranks.append(observe_buffer(value, initial, None, history, changed=is_changed))
    return infer_reduction(initial, ranks)


def infer_reduction(like: Tensor, ranks: Sequence[BufferObservation], *, by_chance: bool = False) -> str:
    """The reduction of an undeclared buffer, from the values of all virtual ranks; empty if it cannot be inferred.

    `like`: a value, for its type. `by_chance`: whether integers that are equal now may differ at other times.
    """
    if not any(value.digest for value in ranks):
        return UNCHANGED
    equal = len({value.digest for value in ranks}) == 1
    if len(ranks) == 1:
        return "first"
    if like.is_floating_point() or like.is_complex():
        return "first" if equal and not any(value.by_samples for value in ranks) else ""
    decreased = any(value.decreased for value in ranks)
    if like.dtype == torch.bool:
        return "first" if equal else "" if decreased else "max"
    ranks = [value for value in ranks if value.digest or value.seen.micro_batches]
    if not all(value.seen.micro_batches for value in ranks):  # a checkpoint without a history
        return ""
    by_samples = _counts_samples(ranks)
    if _counts_calls(ranks):
        return "" if by_samples or _called_unevenly(ranks) else "first"
    if decreased or (equal and not by_samples and not by_chance):  # it was assigned, or the calls cannot be counted
        return ""
    return "sum"


def _counts_calls(ranks: Sequence[BufferObservation]) -> bool:
    """Whether each call of the module has changed the buffer by one, for any number of samples."""
    if any(value.step is None for value in ranks):
        return False
    steps = [(abs(value.step or 0), value.seen) for value in ranks]
    if all(step == history.writes for step, history in steps):
        return True
    calls_once = all(history.writes == history.micro_batches and not history.replaced for _, history in steps)
    call_counts = range(1, 2 if calls_once else MAX_CALLS + 1)
    return any(all(step == calls * history.micro_batches for step, history in steps) for calls in call_counts)


def _called_unevenly(ranks: Sequence[BufferObservation]) -> bool:
    """Whether some virtual ranks have changed the buffer in more of their micro-batches than others."""
    steps = {abs(value.step or 0) for value in ranks}
    return len(steps) > 1 and (0 in steps or len({value.seen.micro_batches for value in ranks}) == 1)


def may_depend_on_sample_count(now: Tensor, before: Tensor, micro_batches: int, samples: int) -> bool | None:
    """Whether a change that is equal on all virtual ranks may depend on their number of samples; None: no change.

    It does not if each micro-batch has changed the buffer by one, if the buffer decreased by a fraction (a
    temperature), or if its elements changed by different amounts (a vector that follows the weights).
    """
    old, new = as_float64(before), as_float64(now)
    changes = (new - old)[new != old].unique()
    if not len(changes):
        return None
    if bool((changes % 1 == 0).all()):
        return samples <= micro_batches or bool((changes.abs() != micro_batches).any())
    return len(changes) == 1 and bool((new.abs() > old.abs()).any())


def _counts_samples(ranks: Sequence[BufferObservation]) -> bool:
    """Whether each sample has changed the buffer by the same number."""
    if any(not value.step or value.step < 0 or not value.seen.samples for value in ranks):
        return False
    rates = {divmod(value.step or 0, value.seen.samples) for value in ranks}
    return len(rates) == 1 and next(iter(rates))[1] == 0


def as_float64(tensor: Tensor) -> Tensor:
    """The tensor, flat in float64; a complex number becomes two elements."""
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).flatten().double()


def from_float64(flat: Tensor, like: Tensor) -> Tensor:
    """The inverse of `as_float64`: a tensor with the shape and type of `like`."""
    if not like.is_complex():
        return flat.reshape(like.shape).to(like.dtype)
    return torch.view_as_complex(flat.reshape(*like.shape, 2).contiguous()).to(like.dtype)


def reduce_in_process(of_ranks: Mapping[int, Tensor], reduction: str, initial: Tensor, virtual_ranks: int) -> Tensor:
    """The value of one buffer, computed in one process with the same bits as in `VirtualRankBuffers.merged`."""
    first = of_ranks[min(of_ranks)]
    if reduction == UNCHANGED:
        return initial
    if reduction == "first" or virtual_ranks == 1:
        return first
    if reduction in ("max", "min"):
        pick = torch.maximum if reduction == "max" else torch.minimum
        result = first
        for value in of_ranks.values():
            result = pick(result, value)
        return result + 0.0 if result.is_floating_point() else result  # no -0, because -0 and 0 have no defined order
    if not (first.is_floating_point() or first.is_complex()):
        return initial + sum((value - initial for value in of_ranks.values()), torch.zeros_like(initial))
    sums = LeafPartition([(0, virtual_ranks)], 0).make_partial_sums(add_optional)
    start = as_float64(initial) if reduction == "sum" else as_float64(torch.zeros_like(first))
    for virtual_rank, value in sorted(of_ranks.items()):
        sums.add(virtual_rank, as_float64(value) - start)
    (total,) = sums.finish()
    assert total is not None
    return from_float64(total + start if reduction == "sum" else total / total.new_tensor(len(of_ranks)), first)
