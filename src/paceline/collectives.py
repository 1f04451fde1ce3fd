"""The few collectives that training needs besides gradients: sums of metrics, and words between ranks.

Words travel as JSON in byte tensors: torch's own object collectives unpickle what a peer sends, i.e. run its code.
"""

from __future__ import annotations

import json
import traceback
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.errors import ExitCode, PacelineError, ToldElsewhere, UsageError
from paceline.scratch.reduce import named
from paceline.scratch.tree import tree_sum
from paceline.world import World


@dataclass(frozen=True)
class Totals:
    """What a `start_totals` gave: sums over virtual ranks, and sums over ranks."""

    sums: list[float]
    votes: list[float]


def start_totals(leaves: Tensor, votes: Sequence[float] = ()) -> Callable[[], Totals]:
    """Start adding up over ranks; the returned function waits and gives the sums.

    Args:
        leaves: (V, k) float64, row v what virtual rank v has to add; rows of other ranks' virtual ranks are zeros. The
            rows are added up in the order of `scratch.tree`, so that the world size does not show in a single bit.
        votes: what this rank has to say, m numbers; added up over ranks in no particular order.
    """
    # One slot for each virtual rank: adding zeros to it changes nothing, so everybody gets all leaves as they are.
    slots = torch.cat([leaves.flatten(), leaves.new_tensor(votes)])
    work = dist.all_reduce(named(slots, "totals of the step"), async_op=True)

    def wait() -> Totals:
        if work is not None:  # None where this rank is no member of the group
            work.wait()
        everything: list[float] = slots.tolist()
        rows = [everything[i * leaves.shape[1] : (i + 1) * leaves.shape[1]] for i in range(len(leaves))]
        parts = {(v, v + 1): row for v, row in enumerate(rows)}
        sums = tree_sum(parts, lambda a, b: [x + y for x, y in zip(a, b, strict=True)], len(rows))
        return Totals(sums, everything[leaves.numel() :])

    return wait


def new_group() -> dist.ProcessGroup:
    """Another group of all ranks, whose collectives cannot be mistaken for those of the default group."""
    group = dist.new_group()
    assert isinstance(group, dist.ProcessGroup)  # this rank is a member
    return group


def gather_words(words: Any, world: World) -> list[Any]:
    """Every rank's `words` (anything JSON can hold), by rank, on every rank."""
    payload = torch.frombuffer(bytearray(json.dumps(words).encode()), dtype=torch.uint8)
    length = named(torch.tensor([len(payload)], device=world.device), "lengths of words")
    lengths = [torch.zeros_like(length) for _ in range(world.size)]
    dist.all_gather(lengths, length)
    sizes = [int(n) for n in lengths]
    padded = named(torch.zeros(max(sizes), dtype=torch.uint8, device=world.device), "words")
    padded[: len(payload)] = payload.to(world.device)
    received = [torch.empty_like(padded) for _ in range(world.size)]
    dist.all_gather(received, padded)
    return [json.loads(bytes(r[:n].tolist())) for r, n in zip(received, sizes, strict=True)]


@contextmanager
def together(world: World) -> Generator[None]:
    """Inside, what fails on one rank fails on all of them: nobody is left waiting for a rank that has gone.

    Nothing inside may be a collective: a rank that has failed answers here, and the others would wait there.

    Raises:
        UsageError: on the first rank that failed, with its own words, or its own traceback as the cause.
        ToldElsewhere: on all other ranks.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as caught:
        error = caught
    failures = gather_words(None if error is None else type(error).__name__, world)
    failed = [rank for rank, failure in enumerate(failures) if failure is not None]
    if not failed:
        return
    if world.rank != failed[0]:
        raise ToldElsewhere(f"rank {failed[0]} failed", ExitCode.USAGE) from None
    assert error is not None
    who = "every rank" if len(failed) == world.size else "rank " + ", ".join(map(str, failed))
    where = f" (on {who} of {world.size})" if world.size > 1 else ""
    if isinstance(error, PacelineError):
        raise UsageError(f"{error}{where}") from None
    shown = "".join(traceback.format_exception(error)).rstrip()
    raise UsageError(
        f"{shown}\nThis was raised before the first step{where}, while the run was being prepared."
    ) from None


def check_equal(what: str, mine: Any, world: World, *, error: type[PacelineError] = UsageError) -> None:
    """Refuse to go on unless `mine` (anything JSON can hold) is the same on all ranks.

    Raises:
        UsageError: (or `error`) on rank 0, naming the ranks in the minority and both values.
        ToldElsewhere: on all other ranks.
    """
    everybody = [json.dumps(words, sort_keys=True) for words in gather_words(mine, world)]
    (common, votes), *others = Counter(everybody).most_common()
    if not others:
        return
    if votes == 1 or votes == others[0][1]:  # a tie accuses nobody
        told = "; ".join(f"rank {rank} has {words}" for rank, words in enumerate(everybody))
    else:
        odd = [rank for rank, words in enumerate(everybody) if words != common]
        told = "; ".join(f"rank {rank} has {everybody[rank]}" for rank in odd) + f", all others {common}"
    raise told_once(error(f"the ranks' {what} differ: {told}. Every rank must have the same."), world)


def told_once(error: PacelineError, world: World, *, by: int = 0) -> PacelineError:
    """What each rank raises when all of them have found the same `error`: rank `by` tells it, the others only end."""
    return error if world.rank == by else ToldElsewhere(f"rank {by} tells what happened", error.exit_code)
