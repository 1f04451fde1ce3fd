"""`paceline compare`: every strategy beside the others, on this task and this machine."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import msgspec
import psutil
import tyro

from paceline.bench.advice import advise
from paceline.bench.compare_report import REFERENCE, Row, compared_rows
from paceline.bench.compare_table import print_compared
from paceline.bench.rounds import MeasuredRounds, ProcessSet, measure_rounds
from paceline.bench.spec import LOOKED_AT, NO_EXCHANGE, Candidate, NotMeasured
from paceline.cli.measuring import CliMeasuring, Measuring, check_out, positive, publish, settings_of, whole_numbers
from paceline.config import DEFAULT_BATCH_SIZE, dump
from paceline.errors import ExitCode, UsageError, unknown
from paceline.host.cgroup import threads_per_rank, usable_cores
from paceline.host.gpus import count_gpus
from paceline.ladder import DEFAULT_ALONE, EXACT, LADDER


@dataclass(frozen=True)
class CompareConfig:
    """Measure strategies beside each other: speed, memory, bytes sent, bits. Ends with a sentence of advice."""

    task: tyro.conf.Positional[str]
    """mnist-cnn, mnist-resnet18, or your own: module:name or file.py:name"""
    strategies: str = "all"
    """which, separated by commas"""
    nproc: int | None = None
    """worker processes (default: one per GPU, or per core)"""
    batch_sizes: str | None = None
    """samples of each rank in a step, separated by commas: all strategies at each of them (default 64)"""
    how: CliMeasuring = field(default_factory=Measuring)


class Compared(msgspec.Struct, frozen=True):
    """All that is printed or written."""

    task: str
    rows: list[Row]
    failures: list[NotMeasured]
    advice: str
    notes: list[str]


def main(arguments: Sequence[str]) -> int:
    """Run `paceline compare ARGUMENTS`."""
    config = tyro.cli(CompareConfig, prog="paceline compare", args=list(arguments), description=CompareConfig.__doc__)
    how = config.how
    positive(steps=how.steps, rounds=how.rounds, nproc=config.nproc, threads_per_rank=how.threads_per_rank)
    if how.warmup < LOOKED_AT:
        raise UsageError(f"--warmup must be at least {LOOKED_AT}, got {how.warmup}: memory is looked at in them")
    check_out(how)
    asked = _strategies(config.strategies)
    batches = whole_numbers("--batch-sizes", config.batch_sizes or str(DEFAULT_BATCH_SIZE))
    settings = settings_of(config.task, how)
    gpus = 0 if settings.launch.device == "cpu" else count_gpus()
    cores = usable_cores()
    nproc = config.nproc or gpus or cores
    if gpus and nproc > gpus:
        raise UsageError(f"--nproc {nproc} needs {nproc} GPUs, this machine has {gpus}. Use --device cpu, or fewer")
    threads = how.threads_per_rank or settings.launch.threads_per_rank
    usual = threads or threads_per_rank(cores, nproc)
    refused = [NotMeasured(name, name, nproc, batches[0], why) for name in asked if (why := not_run(name, nproc))]
    run = [name for name in asked if name not in {failure.strategy for failure in refused}]
    sets = _sets(run, nproc, batches, usual, threads or 1)
    with tempfile.TemporaryDirectory(prefix="paceline-compare-", ignore_cleanup_errors=True) as folder:
        found = measure_rounds(
            sets, dump(settings), Path(folder).resolve(), rounds=how.rounds, warmup=how.warmup, steps=how.steps,
            memory=True,
        )  # fmt: skip
    if found.code != ExitCode.DONE:
        return found.code
    compared = _compared(config, found, refused, batches[0], room(gpus, nproc), cores, usual)
    publish(compared, how, partial(print_compared, compared.rows, compared.failures, compared.advice, compared.notes))
    measured = {row.strategy for row in compared.rows if row.world_size == nproc} & {*run}
    return ExitCode.DONE if measured or not run else ExitCode.FAILED


def not_run(strategy: str, nproc: int) -> str:
    """Why a strategy has no line of its own; empty if it has."""
    rung = LADDER[strategy]
    if not rung.one_process or strategy == DEFAULT_ALONE:
        return ""
    where = " on a machine with several GPUs" if rung.several_gpus else ""
    return f"lives in one process, there are {nproc}: `paceline train --strategy {strategy}`{where}"


def room(gpus: int, nproc: int) -> int | None:
    """Memory of this machine for each rank, in bytes; None for GPUs, whose memory only torch knows."""
    return None if gpus else psutil.virtual_memory().total // nproc


def base_name(batch: int) -> str:
    """The base line's: one process with the threads of one rank."""
    return f"single-b{batch}"


def _sets(run: Sequence[str], nproc: int, batches: Sequence[int], threads: int, exact_threads: int) -> list[ProcessSet]:
    """One process as the base line, with a rank's cores and with all; and the strategies, with their limit."""
    one, many = list[Candidate](), list[Candidate]()
    for batch in batches:
        one.append(Candidate(base_name(batch), DEFAULT_ALONE, batch, threads))
        if nproc > 1:
            one.append(Candidate(f"single-all-b{batch}", DEFAULT_ALONE, batch * nproc, threads * nproc))
        if {*run} & {*EXACT}:
            one.append(Candidate(f"{REFERENCE}-b{batch}", EXACT[0], batch, exact_threads, nproc))
        for name in (name for name in run if name != DEFAULT_ALONE):
            many.append(Candidate(f"{name}-b{batch}", name, batch, exact_threads if name in EXACT else threads))
        if nproc > 1:
            many.append(Candidate(f"limit-b{batch}", NO_EXCHANGE, batch, threads))
    if nproc == 1:
        return [ProcessSet(1, [*one, *many])]
    return [ProcessSet(1, one), ProcessSet(nproc, many)] if many else [ProcessSet(1, one)]


def _compared(
    config: CompareConfig, found: MeasuredRounds, refused: Sequence[NotMeasured], batch: int, room_bytes: int | None,
    cores: int, threads: int,
) -> Compared:  # fmt: skip
    rows = compared_rows(found.rounds, base_name(batch), EXACT, config.how.steps)
    chosen = [row for row in rows if row.batch_size == batch and row.strategy not in (DEFAULT_ALONE, NO_EXCHANGE)]
    alone = [row for row in rows if row.strategy == DEFAULT_ALONE and f"b{batch}" == row.name.rpartition("-")[2]]
    best = max(alone, key=lambda row: row.rate.median, default=None)
    return Compared(
        config.task,
        rows,
        [*refused, *found.failures],
        advise(chosen, best, EXACT, room_bytes),
        notes_of(rows, cores, threads),
    )


def notes_of(rows: Sequence[Row], cores: int, threads: int) -> list[str]:
    """What has to be said of the machine, and what is no part of the rows."""
    ranks = max((row.world_size for row in rows), default=1)
    notes = [
        f"processes were ready after {launch:.1f} s ({size} of them); first step: the strategy applied to the model, "
        "and one step"
        for size, launch in sorted({row.world_size: row.launch_seconds for row in rows}.items())
    ][-1:]
    if ranks * threads > cores:
        notes.append(
            f"{ranks} ranks x {threads} thread{'s' if threads > 1 else ''} = {ranks * threads} threads on {cores} "
            f"core{'s' if cores > 1 else ''}: more than can run at once"
        )
    return notes


def _strategies(text: str) -> list[str]:
    names = [word.strip() for word in text.split(",") if word.strip()]
    if names == ["all"]:
        return [name for name in LADDER if name != DEFAULT_ALONE]
    for name in names:
        if name not in LADDER:
            raise unknown("strategy", name, ["all", *LADDER])
    if not names:
        raise UsageError(f"name at least one strategy: all, {', '.join(LADDER)}")
    return list(dict.fromkeys(names))
