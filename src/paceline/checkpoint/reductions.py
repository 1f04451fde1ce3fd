"""How the values that virtual ranks have of one buffer become one value.

A buffer is averaged, added up, or reduced to its largest, smallest or first value. A module declares it in
`buffer_reductions`; without a declaration it is inferred from what the virtual ranks' values have in common.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.checkpoint.state import Source
from paceline.collectives.tree import LeafPartition, add_optional

OPEN = "open"  # neither declared nor known: inferred at each merge
UNCHANGED = "unchanged"  # all virtual ranks still have the initial value
MOST_CALLS = 3  # of one module in one micro-batch, if its writes cannot be counted


@dataclass(frozen=True)
class Seen:
    """What one virtual rank has done with an integer buffer since it had its initial value."""

    micro_batches: int = 0
    samples: int = 0
    writes: int = 0
    """in-place operations on it"""
    replaced: int = 0
    """micro-batches in which the module has assigned another tensor"""

    def tensor(self) -> Tensor:
        """For a checkpoint."""
        return torch.tensor([self.micro_batches, self.samples, self.writes, self.replaced])


@dataclass(frozen=True)
class RankValue:
    """One virtual rank's value of an undeclared buffer, as far as the inference needs it."""

    digest: str
    """of its bytes; empty if it still has its initial value"""
    step: int | None
    """of an integer buffer: the only difference from the initial value, 0 elements left out; None: there are several"""
    decreased: bool
    """whether an element of an integer or bool buffer is smaller than before"""
    seen: Seen
    by_samples: bool | None = None
    """of a floating-point or complex buffer: `may_count_samples` of its last step"""


def choices(buffer: Tensor) -> tuple[str, ...]:
    """The reductions that a buffer of this type can have."""
    if buffer.is_complex():
        return ("sum", "mean", "first")
    if buffer.is_floating_point():
        return ("sum", "mean", "max", "min", "first")
    return ("max", "min", "first") if buffer.dtype == torch.bool else ("sum", "max", "min", "first")


def observed(own: Tensor, initial: Tensor, before: Tensor | None, seen: Seen, *, changed: bool) -> RankValue:
    """`before` is an older value of it; `changed`: whether it is not `initial`."""
    if not changed:
        return RankValue("", 0, False, seen)
    digest = digest_of(own)
    if own.is_floating_point() or own.is_complex():
        return RankValue(digest, None, False, seen)
    now, first = own.long(), initial.long()
    differences = (now - first)[now != first].unique().tolist()
    older = first if before is None else before.long()
    decreased = differences[0] < 0 or bool((now < older).any())
    return RankValue(digest, differences[0] if len(differences) == 1 else None, decreased, seen)


def digest_of(tensor: Tensor) -> str:
    """Of the bytes of a tensor."""
    return hashlib.sha256(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data).hexdigest()


def saved_seen(source: Source, virtual_rank: int, name: str) -> Seen:
    """What a virtual rank has done with a buffer, by a saved state."""
    saved = source.tensor(f"seen/{virtual_rank}/{name}")
    return Seen() if saved is None else Seen(*saved.tolist())


def saved_reduction(source: Source, name: str, values: Mapping[int, Tensor], initial: Tensor) -> str:
    """The reduction of an undeclared buffer with these values by virtual rank in a saved state, as `inferred`."""
    ranks: list[RankValue] = []
    for virtual_rank, value in values.items():
        changed = initial.shape != value.shape or bool((value != initial).any())
        ranks.append(observed(value, initial, None, saved_seen(source, virtual_rank, name), changed=changed))
    return inferred(initial, ranks)


def inferred(like: Tensor, ranks: Sequence[RankValue], *, by_chance: bool = False) -> str:
    """The reduction of an undeclared buffer like `like`, from what all virtual ranks that have a value say of it.

    Empty: it cannot be inferred. `by_chance`: integers that are equal now need not be so at other times.
    """
    if not any(one.digest for one in ranks):
        return UNCHANGED
    equal = len({one.digest for one in ranks}) == 1
    if len(ranks) == 1:
        return "first"
    if like.is_floating_point() or like.is_complex():
        return "first" if equal and not any(one.by_samples for one in ranks) else ""
    decreased = any(one.decreased for one in ranks)
    if like.dtype == torch.bool:
        return "first" if equal else "" if decreased else "max"
    ranks = [one for one in ranks if one.digest or one.seen.micro_batches]
    if not all(one.seen.micro_batches for one in ranks):  # of a checkpoint that does not say it
        return ""
    of_samples = _counts_samples(ranks)
    if _counts_calls(ranks):
        return "" if of_samples or _called_unevenly(ranks) else "first"
    if decreased or (equal and not of_samples and not by_chance):  # it was set, or the calls cannot be counted
        return ""
    return "sum"


def _counts_calls(ranks: Sequence[RankValue]) -> bool:
    """Whether each call of the module has changed it by one, however many samples there were."""
    if any(one.step is None for one in ranks):
        return False
    steps = [(abs(one.step or 0), one.seen) for one in ranks]
    if all(step == seen.writes for step, seen in steps):
        return True
    once = all(seen.writes == seen.micro_batches and not seen.replaced for _, seen in steps)
    times = range(1, 2 if once else MOST_CALLS + 1)
    return any(all(step == calls * seen.micro_batches for step, seen in steps) for calls in times)


def _called_unevenly(ranks: Sequence[RankValue]) -> bool:
    """Whether some have changed it in more of their micro-batches than others."""
    steps = {abs(one.step or 0) for one in ranks}
    return len(steps) > 1 and (0 in steps or len({one.seen.micro_batches for one in ranks}) == 1)


def may_count_samples(now: Tensor, before: Tensor, micro_batches: int, samples: int) -> bool | None:
    """Whether a change that is equal on all virtual ranks may depend on their number of samples; None: no change.

    It does not if each micro-batch has changed it by one, if it became smaller by a part (a temperature), or if its
    elements changed by different parts (a vector that follows the weights).
    """
    old, new = as_float64(before), as_float64(now)
    changes = (new - old)[new != old].unique()
    if not len(changes):
        return None
    if bool((changes % 1 == 0).all()):
        return samples <= micro_batches or bool((changes.abs() != micro_batches).any())
    return len(changes) == 1 and bool((new.abs() > old.abs()).any())


def _counts_samples(ranks: Sequence[RankValue]) -> bool:
    """Whether each sample has changed it by the same number."""
    if any(not one.step or one.step < 0 or not one.seen.samples for one in ranks):
        return False
    rates = {divmod(one.step or 0, one.seen.samples) for one in ranks}
    return len(rates) == 1 and next(iter(rates))[1] == 0


def as_float64(tensor: Tensor) -> Tensor:
    """Flat, a complex number as two elements."""
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).flatten().double()


def from_float64(flat: Tensor, like: Tensor) -> Tensor:
    """A tensor as `like`, of what `as_float64` has made of it."""
    if not like.is_complex():
        return flat.reshape(like.shape).to(like.dtype)
    return torch.view_as_complex(flat.reshape(*like.shape, 2).contiguous()).to(like.dtype)


def reduced(of_ranks: Mapping[int, Tensor], reduction: str, initial: Tensor, virtual_ranks: int) -> Tensor:
    """What `VirtualBuffers.merged` makes of one buffer, in one process: the same bits."""
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
        return result + 0.0 if result.is_floating_point() else result  # no -0: which zero is larger is not defined
    if not (first.is_floating_point() or first.is_complex()):
        return initial + sum((value - initial for value in of_ranks.values()), torch.zeros_like(initial))
    sums = LeafPartition([(0, virtual_ranks)], 0).partial_sums(add_optional)
    start = as_float64(initial) if reduction == "sum" else as_float64(torch.zeros_like(first))
    for virtual_rank, value in sorted(of_ranks.items()):
        sums.add(virtual_rank, as_float64(value) - start)
    (total,) = sums.finish()
    assert total is not None
    return from_float64(total + start if reduction == "sum" else total / total.new_tensor(len(of_ranks)), first)
