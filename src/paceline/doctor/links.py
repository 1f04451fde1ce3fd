"""Measures each way between two hosts, as many at once as there are without a host in two of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import median

from paceline.doctor import messages as m
from paceline.doctor.session import HostProgram, ask_hosts

MEASURE_SECONDS = 0.3
PATIENCE_SECONDS = 10.0
SLOW_BYTES_PER_SECOND = 500e6 / 8  # half of a 1 Gbit/s network
FAR_BELOW = 0.25  # of the median of all pairs
Pair = tuple[str, str]  # (from, to)


def measure_links(
    programs: Sequence[HostProgram], names: Sequence[str], doors: Mapping[Pair, m.Target]
) -> dict[Pair, m.LinkSpeed]:
    """Round trip and throughput of every way that is open; one that looks slow is measured again, alone.

    A busy machine makes a link look slow for a moment, so the faster measurement counts.
    """
    links: dict[Pair, m.LinkSpeed] = {}
    for pairs in rounds(names):
        links |= _measure(programs, {pair: doors[pair] for pair in pairs if pair in doors})
    for pair in slow_pairs(links):
        again = _measure(programs, {pair: doors[pair]}).get(pair)
        if again is not None and again.bytes_per_second > links[pair].bytes_per_second:
            links[pair] = again
    return links


def _measure(programs: Sequence[HostProgram], doors: Mapping[Pair, m.Target]) -> dict[Pair, m.LinkSpeed]:
    requests = {source: m.MeasureLink(target, MEASURE_SECONDS) for (source, _), target in doors.items()}
    answers = ask_hosts(programs, requests, m.LinkSpeed, PATIENCE_SECONDS)
    return {(source, target): answers[source] for source, target in doors if source in answers}


def rounds(names: Sequence[str]) -> Iterator[list[Pair]]:
    """All ordered pairs, each host in at most one pair of a round (a round-robin tournament, there and back)."""
    circle: list[str] = [*names, *([""] if len(names) % 2 else [])]
    for _ in range(len(circle) - 1):
        half = len(circle) // 2
        pairs = [pair for pair in zip(circle[:half], circle[: half - 1 : -1], strict=True) if all(pair)]
        if pairs:
            yield pairs
            yield [(b, a) for a, b in pairs]
        circle = [circle[0], circle[-1], *circle[1:-1]]


def slow_pairs(links: Mapping[Pair, m.LinkSpeed]) -> list[Pair]:
    """The ways that are too slow to train over, or far slower than most others."""
    usual = median([one.bytes_per_second for one in links.values()] or [0.0])
    limit = max(SLOW_BYTES_PER_SECOND, FAR_BELOW * usual)
    return [pair for pair, one in links.items() if one.reason == "ok" and one.bytes_per_second < limit]
