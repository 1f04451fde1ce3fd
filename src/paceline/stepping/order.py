"""Checks in every step, before parameters change, that all ranks have called the same collectives in the same order.

Two collectives of one shape that a rank calls in the other order are paired wrongly: nothing fails, and the sums are
wrong. So each rank hashes what it calls, with names and source lines. The hashes ride in the step's totals, one slot
for each rank, and only where they differ do the ranks exchange what they have called.

Source lines alone may differ for good reason (`if rank == 0: broadcast(mine) else: broadcast(buffer)`): a line that
some rank has called more often than another belongs to a branch, and is left out of the hash from then on. But where
all ranks have always called from the same lines, and one leaves them for two calls that look alike, it may have
exchanged the two: that is an error, too. Code that means it gives the tensors names, which are compared instead of
lines (`tensor.collective = "sum of weights"`).
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import msgspec

from paceline.contract.evidence import Op
from paceline.errors import ExitCode, TrainingError
from paceline.sums import gather_words, told_once
from paceline.worker.world import World

ROOTED = frozenset({"broadcast", "reduce", "gather", "scatter"})  # code asks `rank == root` around these
HASH_BYTES = 6  # a float64 holds it exactly


@dataclass(frozen=True)
class Mismatch:
    """The first call at which the ranks part; `odd` are those in the minority, none without a majority."""

    calls: tuple[Op | None, ...]  # by rank; None: it had called nothing more
    odd: tuple[int, ...]


class CallOrder:
    """This rank's side of the comparison. All ranks find, and so leave out, the same lines."""

    def __init__(
        self,
        world: World,
        take: Callable[[], int],
        taken: Callable[[], list[Op]],
        notice: Callable[[str], None],
    ) -> None:
        """`take` and `taken` are those of the guard, see `worker.guard`."""
        self._world, self._take, self._taken, self._notice = world, take, taken, notice
        self._local: frozenset[str] = frozenset()
        self._known: frozenset[str] = frozenset()  # lines from which all ranks have called
        self._agreed = 0
        # True once the guard's hash, which contains every line, was too strict.
        self._hashes_itself = False

    def hashes(self) -> list[float]:
        """One number for each rank, to be added up: this rank's hash of all it has called since the last time."""
        if self._world.size == 1:
            return []
        slots = [0.0] * self._world.size
        mine = self._take()
        slots[self._world.rank] = float(_hashed(self._taken(), self._local) if self._hashes_itself else mine)
        return slots

    def check(self, hashes: Sequence[float], where: str) -> None:
        """Compare all ranks' `hashes` of the step `where`, added up over ranks (a collective where they differ).

        Raises:
            TrainingError: with MISMATCH, told by a rank in the minority; ToldElsewhere on the others.
        """
        if not hashes:
            return
        if len(set(hashes)) == 1:
            self._agreed += 1
            if self._agreed & (self._agreed - 1) == 0:  # 1, 2, 4, 8, ...: soon knows what every step does
                self._known |= {_label(op, self._local)[-1] for op in self._taken()}
            return
        told = gather_words([msgspec.to_builtins(op) for op in self._taken()], self._world)
        histories = [msgspec.convert(words, list[Op]) for words in told]
        found = compare_orders(histories, self._local, self._known)
        if isinstance(found, Mismatch):
            error = TrainingError(_sentence(found, where), ExitCode.MISMATCH)
            raise told_once(error, self._world, by=min(found.odd, default=0))
        self._hashes_itself = True
        if new := found - self._local:
            self._notice(
                f"some ranks call collectives from lines where others do not ({', '.join(sorted(new))}): these lines "
                "are left out when the order of collectives is compared"
            )
        self._local = found


def compare_orders(
    histories: Sequence[Sequence[Op]], local: frozenset[str], known: frozenset[str] = frozenset()
) -> Mismatch | frozenset[str]:
    """The mismatch between the ranks' calls (the oldest first), or all lines that belong to single ranks.

    `local` are the lines of single ranks that are left out already, `known` those from which all ranks have called in
    earlier steps.
    """
    counts = [Counter(op.site for op in history) for history in histories]
    sites = {site for count in counts for site in count}
    local |= {site for site in sites if len({count[site] for count in counts}) > 1}
    for group in dict.fromkeys(op.group for history in histories for op in history):
        of_group = [[op for op in history if op.group == group] for history in histories]
        labels = [tuple(_label(op, local) for op in ops) for ops in of_group]
        if len(set(labels)) > 1:
            return _mismatch(of_group, labels)
        if departure := _departure(of_group, known):
            return departure
    return local


def _label(op: Op, local: frozenset[str]) -> tuple[str, ...]:
    # a name says more than a line: the same bucket leaves from backward on one rank, and after it on another
    shown = "" if op.name or op.kind in ROOTED or op.site in local else op.site
    return (*op.signature, shown)


def _hashed(history: Sequence[Op], local: frozenset[str]) -> int:
    """As the guard's own hash: ordered within each group, whatever the order between groups."""
    groups = sorted({op.group for op in history})
    lines = [[_label(op, local) for op in history if op.group == group] for group in groups]
    digest = hashlib.blake2b(repr((groups, lines)).encode(), digest_size=HASH_BYTES).digest()
    return int.from_bytes(digest, "little")


def _departure(of_group: Sequence[Sequence[Op]], known: frozenset[str]) -> Mismatch | None:
    """Where ranks have left the known lines of the others for two indistinguishable calls in a row.

    All ranks' calls have the same signatures here.
    """
    for first, second in pairwise(zip(*of_group, strict=True)):
        if first[0].signature != second[0].signature or first[0].name or first[0].kind in ROOTED:
            continue
        left = [rank for rank, ops in enumerate(zip(first, second, strict=True)) if not known & {op.site for op in ops}]
        stayed = [rank for rank, ops in enumerate(zip(first, second, strict=True)) if known >= {op.site for op in ops}]
        if left and stayed and len(left) + len(stayed) == len(first):
            return Mismatch(first, tuple(left))
    return None


def _mismatch(of_group: Sequence[Sequence[Op]], labels: Sequence[tuple[tuple[str, ...], ...]]) -> Mismatch:
    (common, votes), *_ = Counter(labels).most_common()
    at = next(i for i in range(max(map(len, labels))) if len({line[i : i + 1] for line in labels}) > 1)
    calls = tuple(ops[at] if at < len(ops) else None for ops in of_group)
    majority = 2 * votes > len(labels)
    return Mismatch(calls, tuple(r for r, line in enumerate(labels) if line != common) if majority else ())


def _sentence(found: Mismatch, where: str) -> str:
    told = [rank for rank in range(len(found.calls)) if not found.odd or rank in found.odd]
    words = "; ".join(f"rank {rank} called {_call(found.calls[rank])}" for rank in told)
    if found.odd:
        usual = next(call for rank, call in enumerate(found.calls) if rank not in found.odd)
        words += f" where all others called {_call(usual)}"
    else:
        words += "; no majority says which is right"
    return (
        f"the ranks called different collectives before {where}: {words}. In another order, collectives of the same "
        "shape silently mix up values. All ranks must call the same ones in the same order; where a branch is meant, "
        "name what is sent (tensor.collective = 'my sum'), and names are compared. The parameters are still those "
        "before this step."
    )


def _call(op: Op | None) -> str:
    if op is None:
        return "nothing more"
    name = f" '{op.name}'" if op.name else ""
    return f"{op.kind}{name} {op.shape} {op.dtype}".rstrip() + (f" at {op.site}" if op.site else "")
