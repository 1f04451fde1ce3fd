"""Words between ranks: what each has to say, what must be the same on all, and errors that all of them share.

Words travel as JSON in byte tensors: torch's own object collectives unpickle what a peer sends, i.e. run its code.
"""

import json
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from paceline.errors import ExitCode, PacelineError, ToldElsewhere, UsageError
from paceline.sums.hosts import Hosts
from paceline.sums.ranks import over_memory, ranks
from paceline.worker.world import World

_PASSED = ("paceline.sums.", "contextlib")
Gather = Callable[[Any], dict[int, Any]]
"""(words, anything JSON can hold) -> those of several ranks, by their number in the world (a collective of these)"""


def new_group() -> dist.ProcessGroup:
    """Another group of all ranks, whose collectives cannot be mistaken for those of the default group."""
    group = dist.new_group()
    assert isinstance(group, dist.ProcessGroup)  # this rank is a member
    return group


def gather_words(words: Any, world: World) -> list[Any]:
    """Every rank's `words` (anything JSON can hold), by rank, on every rank.

    They carry the name of the function that gathers them: ranks that gather for different purposes fail.
    """
    return [words] if world.size == 1 else ranks(world.group).gather(words, f"words of {_caller()}", world.device)


def _caller() -> str:
    """The function that exchanges words, which is none of this folder's and no context manager's."""
    frame = sys._getframe(2)  # pyright: ignore[reportPrivateUsage]
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(_PASSED):
        frame = frame.f_back
    return frame.f_code.co_name


def by_all(world: World) -> Gather:
    """Among all ranks."""
    return lambda words: dict(enumerate(gather_words(words, world)))


def by_host(host: Hosts) -> Gather:
    """Among the ranks of this host."""
    those, first = over_memory(host.memory), host.number * host.memory.size
    return lambda words: dict(enumerate(those.gather(words, "words of a host"), first))


def by_itself(world: World) -> Gather:
    """This rank alone."""
    return lambda words: {world.rank: words}


@contextmanager
def together(world: World, *, prepares: bool = True) -> Generator[None]:
    """Inside, what fails on one rank fails on all of them: nobody is left waiting for a rank that has gone.

    Nothing inside may be a collective: a rank that has failed answers here, and the others would wait there.

    Args:
        world: the ranks.
        prepares: whether this comes before the first step: then anything that fails there is wrong use.

    Raises:
        UsageError: on the first rank that failed, with its own words, or its own traceback as the cause.
        Exception: in its place the rank's own error, unless this `prepares`.
        ToldElsewhere: on all other ranks.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as caught:
        error = caught
    code = int(error.exit_code) if isinstance(error, PacelineError) else ExitCode.FAILED
    failures = gather_words(None if error is None else ExitCode.USAGE if prepares else code, world)
    failed = [rank for rank, failure in enumerate(failures) if failure is not None]
    if not failed:
        return
    if world.rank != failed[0]:
        raise ToldElsewhere(f"rank {failed[0]} failed", ExitCode(failures[failed[0]])) from None
    assert error is not None
    if not prepares:
        raise error
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
