"""Checks that all ranks have called a sum or a gather of their loop from the same place of the program.

`s.sum` and its like are alike to every transport wherever they are called. A rank that has left a loop early would add
its numbers to those that the others add up at another line, and nobody would see it. So each rank sends a hash of its
stack along, of the user's lines only.

Ranks may call from different lines on purpose (`if s.rank == 0: s.sum(mine) else: s.sum(0)`): then no rank calls from
another one's line. It is an error if a rank has called before from the place where another rank calls now. A `where`
(the epoch, say) must always be the same.
"""

import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import islice
from traceback import walk_stack
from types import FrameType
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

from paceline.errors import ExitCode, PacelineError, ToldElsewhere, TrainingError
from paceline.worker.sites import MAX_DEPTH, Owner, frame_of, owner, short, site_words

SHOWN = 3  # lines of a rank in an error
FACTOR, PRIME = 1_000_003, (1 << 61) - 1
HALF = 1 << 26  # a float64 holds two such hashes exactly


class Places:
    """What one process knows of the places from which its ranks have called."""

    def __init__(self) -> None:
        self._called: set[int] = set()  # hashes of lines
        self._agreed: set[tuple[int, ...]] = set()  # those of different lines that were right together

    def compare(self, hashes: Sequence[int], what: str, gather: Callable[[Any], list[Any]]) -> None:
        """Compare the hashes of all ranks, by rank (a collective, `gather`, where they differ).

        Raises:
            TrainingError: with MISMATCH, on one rank; ToldElsewhere on the others.
        """
        rank, lines = dist.get_rank(), tuple(one // HALF for one in hashes)  # without `where`, which changes each step
        same_where = len({one % HALF for one in hashes}) == 1
        if len({*hashes}) > 1 and not (same_where and lines in self._agreed):
            told = gather([_lines(), [one in self._called for one in lines]])
            known = any(
                called and lines[other] != lines[by]
                for by, (_, of_rank) in enumerate(told)
                for other, called in enumerate(of_rank)
            )
            if known or not same_where:
                raise _mismatch(hashes, [site for site, _ in told], what, rank)
            self._agreed.add(lines)
        self._called.add(lines[rank])


def place_hash(where: Sequence[int] = ()) -> int:
    """A hash of the user's lines that have led here, and of `where`: 0 <= n < 2**52."""
    frame: FrameType | None = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    found, depth = 0, 0
    while frame is not None and depth < MAX_DEPTH:
        if of_file := _of_file(frame.f_code.co_filename):
            found = (found * FACTOR + of_file + frame.f_lineno) % PRIME
        frame, depth = frame.f_back, depth + 1
    return found % HALF * HALF + zlib.crc32(repr([*where]).encode()) % HALF


@cache
def _of_file(filename: str) -> int:
    """A number for a file of the user's, the same on every host; 0 for any other."""
    return 1 + zlib.crc32(short(filename).encode()) if owner(filename) is Owner.USER else 0


def _lines() -> str:
    """The user's lines, the innermost first."""
    return ", called from ".join(site_words(frame_of(frame)) for frame in islice(_users_frames(), SHOWN))


def _users_frames() -> Iterator[FrameType]:
    frames = (frame for frame, _ in islice(walk_stack(sys._getframe(1)), MAX_DEPTH))  # pyright: ignore[reportPrivateUsage]
    return (frame for frame in frames if owner(frame.f_code.co_filename) is Owner.USER)


def places() -> Places:
    """Those of torch's default group."""
    group = dist.group.WORLD
    assert group is not None  # joined
    if group not in _of_group:
        _of_group[group] = Places()
    return _of_group[group]


_of_group: WeakKeyDictionary[dist.ProcessGroup, Places] = WeakKeyDictionary()


def _mismatch(hashes: Sequence[int], sites: Sequence[str], what: str, rank: int) -> PacelineError:
    (usual, votes), *_ = Counter(hashes).most_common()
    odd = [number for number, one in enumerate(hashes) if one != usual] if 2 * votes > len(hashes) else []
    told_by = min(odd, default=0)
    if rank != told_by:
        return ToldElsewhere(f"rank {told_by} tells what happened", ExitCode.MISMATCH)
    shown = "; ".join(f"rank {number} at {site or 'an unknown line'}" for number, site in enumerate(sites))
    return TrainingError(
        f"the ranks exchange {what} from different places of the program: {shown}. What they add up or gather does "
        "not belong together. One of them has left a loop earlier than the others, or has called once more: all ranks "
        "must call s.sum, s.mean, s.any, s.gather and s.compute in the same order. A decision of one rank must reach "
        "all: if s.any(stop): break.",
        ExitCode.MISMATCH,
    )
