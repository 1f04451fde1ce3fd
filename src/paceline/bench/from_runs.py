"""How did runs that are over scale? Their folders become the points that `scale` otherwise measures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from paceline.bench.scale_report import At, Runs
from paceline.bench.steps import Run, read_run
from paceline.disk.reading import is_file
from paceline.errors import UsageError
from paceline.observe.folder import WEIGHTS


def read_runs(folders: Sequence[Path], *, skip: int) -> Runs:
    """The runs in these folders, by ranks and samples of each; several of one kind are its rounds.

    Raises:
        UsageError: if none of them is of one rank, or none of several, or a folder cannot be read.
    """
    found: dict[At, list[Run]] = {}
    for folder in folders:
        run = read_run(folder, skip=skip)
        found.setdefault(At(run.world_size, round(run.samples / run.world_size)), []).append(run)
    sizes = sorted({at.ranks for at in found})
    if len(sizes) < 2 or sizes[0] != 1:
        raise UsageError(
            f"--runs has runs of {', '.join(map(str, sizes))} rank{'s' if sizes[-1] > 1 else ''}: scaling needs one of "
            "1 rank, and others of more, on the same task"
        )
    rounds = min(len(runs) for runs in found.values())
    return {at: runs[:rounds] for at, runs in found.items()}


def comparable(runs: Runs) -> tuple[int | None, int | None]:
    """(samples of each rank, of all together) for which one rank can be compared with others; None where it cannot."""
    weak = [at.batch for at in runs if at.ranks == 1 and any(o.ranks > 1 and o.batch == at.batch for o in runs)]
    strong = [
        at.batch for at in runs if at.ranks == 1 and any(o.ranks > 1 and o.ranks * o.batch == at.batch for o in runs)
    ]
    if not weak and not strong:
        told = ", ".join(f"{at.ranks} x {at.batch}" for at in sorted(runs, key=lambda at: (at.ranks, at.batch)))
        raise UsageError(
            f"--runs: none of these runs (ranks x samples of each in a step: {told}) can be compared with that of one "
            "rank: it needs as many samples in a step as each of the others' ranks, or as all of them together"
        )
    return max(weak, default=None), max(strong, default=None)


def over_network(runs: Runs) -> bool:
    """Whether ranks of any of these runs were on several hosts."""
    return any(len({*run.hosts.values()}) > 1 for found in runs.values() for run in found)


def weight_bytes(folders: Sequence[Path]) -> int:
    """About what ranks exchange in a step: the size of the weights that were saved."""
    return max((path.stat().st_size for folder in folders if is_file(path := folder / WEIGHTS)), default=0)
