"""Compares in which order ranks have called their collectives. Pure."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from paceline.protocol.evidence import Op

ROOTED = frozenset({"broadcast", "reduce", "gather", "scatter"})  # code asks `rank == root` around these


@dataclass(frozen=True)
class Mismatch:
    """The first call at which the ranks part; `odd` are those in the minority, none without a majority."""

    calls: tuple[Op | None, ...]  # by rank; None: it had called nothing more
    odd: tuple[int, ...]

    @property
    def words(self) -> str:
        """Who called what."""
        told = [rank for rank in range(len(self.calls)) if not self.odd or rank in self.odd]
        words = "; ".join(f"rank {rank} called {_call(self.calls[rank])}" for rank in told)
        if not self.odd:
            return words + "; no majority says which is right"
        usual = next(call for rank, call in enumerate(self.calls) if rank not in self.odd)
        return words + f" where all others called {_call(usual)}"


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
        labels = [tuple(order_label(op, local) for op in ops) for ops in of_group]
        if len(set(labels)) > 1:
            return _mismatch(of_group, labels)
        if departure := _departure(of_group, known):
            return departure
    return local


def order_label(op: Op, local: frozenset[str]) -> tuple[str, ...]:
    """What ranks must have in common of a call."""
    # a name says more than a line: the same bucket leaves from backward on one rank, and after it on another
    shown = "" if op.name or op.kind in ROOTED or op.site in local else op.site
    return (*op.signature, shown)


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


def _call(op: Op | None) -> str:
    if op is None:
        return "nothing more"
    name = f" '{op.name}'" if op.name else ""
    return f"{op.kind}{name} {op.shape} {op.dtype}".rstrip() + (f" at {op.site}" if op.site else "")
