"""In which order is everything measured? A B C A B C: in each round every candidate once, each time in new processes.

A round starts one set of processes for each world size, in which the candidates take turns, beginning with another one
in each round. What the machine does at a time so meets all candidates alike, and their ratios within a round are fair.
A candidate that fails ends its set; it is not tried again, and the set is started again for those after it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from paceline.bench.sets import failed, measure
from paceline.bench.spec import Candidate, Chunk, Failed, Order
from paceline.contract.orders import STOP_SIGNALS
from paceline.errors import ExitCode


@dataclass(frozen=True)
class Group:
    """What is measured on one number of processes."""

    nproc: int
    candidates: Sequence[Candidate]


@dataclass
class Measured:
    """What all rounds have found so far."""

    rounds: list[list[Chunk]] = field(default_factory=list[list[Chunk]])
    failures: list[Failed] = field(default_factory=list[Failed])
    code: int = ExitCode.DONE
    """not 0: nobody could measure anything more, for a reason that has been told"""


def folder_of(root: Path, number: int, nproc: int, name: str) -> Path:
    """Where the events of a candidate in round `number` (from 0) are."""
    return root / f"round-{number}" / f"ranks-{nproc}" / name


def measure_rounds(
    groups: Sequence[Group], settings: str, root: Path, *, rounds: int, warmup: int, steps: int, memory: bool
) -> Measured:
    """Measure all groups, `rounds` times.

    Args:
        groups: one for each world size.
        settings: the training's, as TOML.
        root: an existing folder, for everything that is written.
        rounds: how often.
        warmup: steps before a chunk, at least LOOKED_AT.
        steps: of a chunk.
        memory: whether memory is looked at, in the first round.
    """
    found = Measured()
    for number in range(rounds):
        found.rounds.append([])
        for group in groups:
            _say(f"round {number + 1} of {rounds}: {group.nproc} process{'es' if group.nproc > 1 else ''} ...")
            shift = number % max(1, len(group.candidates))
            turn = [*group.candidates[shift:], *group.candidates[:shift]]
            _measure_group(found, group.nproc, turn, settings, root, (number, warmup, steps, memory and number == 0))
            if found.code != ExitCode.DONE:
                return found
    return found


def _measure_group(
    found: Measured,
    nproc: int,
    turn: Sequence[Candidate],
    settings: str,
    root: Path,
    how: tuple[int, int, int, bool],
) -> None:
    """One set of processes, started again after each candidate that fails."""
    number, warmup, steps, memory = how
    gone = {failure.name for failure in found.failures if failure.world_size == nproc}
    left = [candidate for candidate in turn if candidate.name not in gone]
    while left:
        folder = folder_of(root, number, nproc, "")
        if folder.exists():  # of the set that a candidate has ended; its events stay beside those of the new one
            folder = folder.with_name(f"{folder.name}-again-{len(left)}")
        order = Order(left, warmup, steps, str(folder), time.time(), memory)
        ended = measure(order, settings, nproc)
        found.rounds[-1].extend(ended.chunks)
        if ended.code == ExitCode.DONE:
            return
        if ended.running is None or ended.code - 128 in {*STOP_SIGNALS}:
            found.code = ended.code
            return
        at = ended.running
        found.failures.append(failed(at, ended, nproc))
        _say(f"{at.strategy} failed and is left out; the others go on")
        done = {chunk.name for chunk in ended.chunks}
        left = [candidate for candidate in left if candidate.name not in done and candidate.name != at.name]


def _say(words: str) -> None:
    print(words, file=sys.stderr, flush=True)
