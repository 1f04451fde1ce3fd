"""Which goals are reached? `python benchmarks/summary.py` reads benchmarks/results and prints a table (Markdown).

A ratio counts by the lower quartile of its pairs, and with fewer than 5 quiet pairs it is not measured. What is not
there yet says so. Which command writes which record stands in docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import quantiles

from race.contenders import BASE
from race.figures import FEWEST_PAIRS, Row, efficiency, lower_quartile, ratios, read

RESULTS = Path(__file__).parent / "results"
PEERS = "peers.json"
KIB, MIB = 1 << 10, 1 << 20
Measured = Callable[[Path], "float | None"]
"""results folder -> the number; None: not measured. OSError: there is no such file."""


@dataclass(frozen=True)
class Goal:
    """A number that must be reached (or, `at_most`, not exceeded)."""

    what: str
    number: float
    measured: Measured
    at_most: bool = False
    limit: Measured | None = None
    """what nothing could exceed, measured in the same run"""

    def line(self, results: Path) -> str:
        """Of the table."""
        sign = "<=" if self.at_most else ">="
        try:
            value = self.measured(results)
        except OSError:
            return f"| {self.what} | {sign} {self.number:g} | no record | - |"
        if value is None:
            return f"| {self.what} | {sign} {self.number:g} | not measured | - |"
        passed = value <= self.number if self.at_most else value >= self.number
        verdict = "yes" if passed else "NO"
        if not passed and self.limit is not None and (most := self.limit(results)) is not None:
            verdict += f"; without any exchange {most:.3f}"
        return f"| {self.what} | {sign} {self.number:g} | {value:.3f} | {verdict} |"


def row(file: Path, work: str, contender: str) -> Row | None:
    """One row of a record."""
    return next((one for one in read(file) if (one.work, one.contender) == (work, contender)), None)


def speed(file: str, work: str, contender: str) -> Measured:
    """Against vanilla DDP."""

    def measured(results: Path) -> float | None:
        own, base = row(results / file, work, contender), row(results / file, work, BASE)
        return lower_quartile(ratios(own, base)) if own and base else None

    return measured


def weak(work: str, contender: str = "default") -> Measured:
    """Against one rank by itself."""

    def measured(results: Path) -> float | None:
        own, alone = (row(results / PEERS, work, name) for name in (contender, "one-rank"))
        return lower_quartile(efficiency(own, alone)) if own and alone else None

    return measured


def memory(work: str) -> Measured:
    """Peak of a rank, against vanilla DDP's."""

    def measured(results: Path) -> float | None:
        own, base = (row(results / PEERS, work, name) for name in ("default", BASE))
        return own.peak_mb / base.peak_mb if own and base and own.peak_mb and base.peak_mb else None

    return measured


def recorded(file: str, *, upper: bool = False) -> Measured:
    """The lower (or upper) quartile of a record's list "ratio"."""

    def measured(results: Path) -> float | None:
        values: list[float] = json.loads((results / file).read_text())["ratio"]
        if lower_quartile(values) is None:
            return None
        return quantiles(values, n=4, method="inclusive")[2 if upper else 0]

    return measured


def summed(against: str, at_least: int, at_most: float = math.inf) -> Measured:
    """Of sums over ranks of so many bytes, the size that does worst; `against` is the name of its ratios."""

    def measured(results: Path) -> float | None:
        lines = json.loads((results / "collectives.json").read_text())["lines"]
        chosen = [line for line in lines if at_least <= line["bytes"] <= at_most]
        enough = chosen and all(line["quiet"] >= FEWEST_PAIRS for line in chosen)
        return min(line[against][0] for line in chosen) if enough else None

    return measured


def held(strategy: str, shared: Sequence[str]) -> Measured:
    """Bytes that a rank holds between two steps, against what one process holds, `shared` of it cut over the ranks."""

    def measured(results: Path) -> float | None:
        rows = json.loads((results / "memory.json").read_text())["rows"]
        own, alone = (next((r for r in rows if r["strategy"] == name), None) for name in (strategy, "single"))
        if own is None or alone is None or own["memory"] is None or alone["memory"] is None:
            return None
        ranks = own["world_size"]
        kinds = ("weights", "gradients", "optimizer")
        arithmetic = sum(alone["memory"][kind] / (ranks if kind in shared else 1) for kind in kinds)
        return sum(own["memory"][kind] for kind in kinds) / arithmetic

    return measured


def goals() -> list[Goal]:
    """Those of issue 6 that these benchmarks measure."""
    works = ("W1", "W2", "W3", "W3g")
    default, fast, scaling = (1.25, 1.35, 2.1, 1.15), (2.0, 1.9, 2.6, 1.7), (0.94, 0.90, 0.72, 0.94)
    found: list[Goal] = []
    for title, name, limit, numbers in (
        ("default mode", "default", "no-exchange", default),
        ("fast mode (bf16)", "fast", "no-exchange-fast", fast),
        ("`exact`, V = W", "exact", "no-exchange", (1.0,) * 4),
    ):
        found += [
            Goal(f"{w}, {title} / vanilla DDP", n, speed(PEERS, w, name), limit=speed(PEERS, w, limit))
            for w, n in zip(works, numbers, strict=True)
        ]
    found.append(Goal("W3, 4 ranks on 2 cores / vanilla DDP", 1.5, speed("peers-4.json", "W3", "default")))
    pairs = zip(works, scaling, strict=True)
    found += [
        Goal(f"{w}, weak scaling, 2 ranks / our own one", n, weak(w), limit=weak(w, "no-exchange")) for w, n in pairs
    ]
    found += [Goal(f"{w}, peak memory of a rank / vanilla DDP's", 1.05, memory(w), at_most=True) for w in works]
    found.append(Goal("first step, seconds / torchrun's", 0.60, recorded("startup.json", upper=True), at_most=True))
    found.append(Goal("epoch of W1 to the accuracy line, tutorial's seconds / ours", 1.3, recorded("epoch.json")))
    worst = "all-reduce, seconds of {} / ours, "
    found += [
        Goal(f"{worst.format('gloo')}{sizes}", number, summed("gloo / shared", *bounds))
        for sizes, number, bounds in (
            ("<= 64 KiB", 30.0, (0, 64 * KIB)), ("1-8 MiB", 10.0, (MIB, 8 * MIB)), (">= 25 MiB", 4.5, (25 * MIB,)),
        )
    ]  # fmt: skip
    found.append(Goal(f"{worst.format('memcpy')}>= 25 MiB", 0.6, summed("memcpy / shared", 25 * MIB)))
    for strategy, shared in (("zero", ("gradients", "optimizer")), ("fsdp", ("weights", "gradients", "optimizer"))):
        what = f"`{strategy}`, bytes that a rank holds / their arithmetic"
        found.append(Goal(what, 1.1, held(strategy, shared), at_most=True))
    for work, name, number in (("W1", "default", 5.0), ("W1", "cuda-graphs", 12.0), ("W2", "default", 4.0)):
        what = f"one GPU, {work} {name} / tutorial script with 8 loaders, fp32"
        found.append(Goal(what, number, speed("gpu.json", f"{work} fp32", name)))
    return found


def summary(chosen: Sequence[Goal], results: Path) -> str:
    """The table."""
    head = ["| what | goal | measured | reached |", "|---|---|---|---|"]
    return "\n".join([*head, *(goal.line(results) for goal in chosen)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="?", default=RESULTS, help="a folder of records")
    print(summary(goals(), parser.parse_args().results))


if __name__ == "__main__":
    main()
