"""`paceline compare`: every strategy beside the others, on this task and this machine."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import msgspec
import psutil
import tyro

from paceline.bench.advice import advise
from paceline.bench.compare_report import REFERENCE, Row, rows_of
from paceline.bench.compare_table import print_compared
from paceline.bench.rounds import Group, Measured, measure_rounds
from paceline.bench.spec import LOOKED_AT, NO_EXCHANGE, Candidate, Failed
from paceline.cli.measuring import cores_of, positive, settings_of, whole_numbers
from paceline.config import DEFAULT_BATCH_SIZE, EXACT, StrategyName, dump
from paceline.errors import ExitCode, UsageError, unknown
from paceline.launch.gpus import count_gpus
from paceline.launch.job import threads_per_rank

CHOICES = get_args(StrategyName)


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
    steps: int = 30
    """of each measurement"""
    warmup: int = 5
    """steps before it, which are not counted"""
    rounds: int = 3
    """how often everything is measured, in turn"""
    threads_per_rank: int | None = None
    """CPU threads of each rank (default: cores / ranks; exact and zero: 1, as train has it)"""
    config: Path | None = None
    """a config.toml with all other settings of the training"""
    device: Literal["auto", "cpu", "cuda"] | None = None
    """as for train, as all below"""
    optimizer: Literal["adamw", "sgd"] | None = None
    """which one"""
    precision: Literal["fp32", "bf16", "auto"] | None = None
    """of forward and backward"""
    data_dir: Path | None = None
    """folder of IDX files"""
    stem: Literal["imagenet", "small"] | None = None
    """ResNet18's first layers"""
    out: Path | None = None
    """write everything that was measured to this file, as JSON"""
    json: bool = False
    """print it as JSON instead of the table"""


class Compared(msgspec.Struct, frozen=True):
    """All that is printed or written."""

    task: str
    rows: list[Row]
    failures: list[Failed]
    advice: str
    notes: list[str]


def main(arguments: Sequence[str]) -> int:
    """Run `paceline compare ARGUMENTS`."""
    config = tyro.cli(CompareConfig, prog="paceline compare", args=list(arguments), description=CompareConfig.__doc__)
    positive(steps=config.steps, rounds=config.rounds, nproc=config.nproc, threads_per_rank=config.threads_per_rank)
    if config.warmup < LOOKED_AT:
        raise UsageError(f"--warmup must be at least {LOOKED_AT}, got {config.warmup}: memory is looked at in them")
    if config.out and not config.out.absolute().parent.is_dir():
        raise UsageError(f"--out {config.out}: the folder {config.out.absolute().parent} does not exist")
    asked = _strategies(config.strategies)
    batches = whole_numbers("--batch-sizes", config.batch_sizes or str(DEFAULT_BATCH_SIZE))
    settings = settings_of(config.task, config.config, {
        "launch.device": config.device, "compute.precision": config.precision,
        "optimizer.optimizer": config.optimizer, "data.data_dir": config.data_dir,
        "model.stem": config.stem,
    })  # fmt: skip
    gpus = 0 if settings.launch.device == "cpu" else count_gpus()
    cores = cores_of()
    nproc = config.nproc or gpus or cores
    if gpus and nproc > gpus:
        raise UsageError(f"--nproc {nproc} needs {nproc} GPUs, this machine has {gpus}. Use --device cpu, or fewer")
    threads = config.threads_per_rank or settings.launch.threads_per_rank
    usual = threads or threads_per_rank(cores, nproc)
    refused = [Failed(name, name, nproc, batches[0], why) for name in asked if (why := not_run(name, nproc))]
    run = [name for name in asked if name not in {failure.strategy for failure in refused}]
    groups = _groups(run, nproc, batches, usual, threads or 1)
    with tempfile.TemporaryDirectory(prefix="paceline-compare-", ignore_cleanup_errors=True) as folder:
        found = measure_rounds(
            groups, dump(settings), Path(folder), rounds=config.rounds, warmup=config.warmup, steps=config.steps,
            memory=True,
        )  # fmt: skip
    if found.code != ExitCode.DONE:
        return found.code
    compared = _compared(config, found, refused, batches[0], room(gpus, nproc), cores, usual)
    text = msgspec.json.format(msgspec.json.encode(compared), indent=2)
    if config.out:
        config.out.write_bytes(text + b"\n")
    if config.json:
        sys.stdout.write(text.decode() + "\n")
    else:
        print_compared(compared.rows, compared.failures, compared.advice, compared.notes)
    measured = {row.strategy for row in compared.rows if row.world_size == nproc} & {*run}
    return ExitCode.DONE if measured or not run else ExitCode.FAILED


def not_run(strategy: str, nproc: int) -> str:
    """Why a strategy has no line of its own; empty if it has."""
    if strategy == "single":
        return ""
    if strategy == "dp":
        return f"lives in one process, there are {nproc}: `paceline train --strategy dp` on a machine with several GPUs"
    return ""


def room(gpus: int, nproc: int) -> int | None:
    """Memory of this machine for each rank, in bytes; None for GPUs, whose memory only torch knows."""
    return None if gpus else psutil.virtual_memory().total // nproc


def base_name(batch: int) -> str:
    """The base line's: one process with the threads of one rank."""
    return f"single-b{batch}"


def _groups(run: Sequence[str], nproc: int, batches: Sequence[int], threads: int, exact_threads: int) -> list[Group]:
    """One process as the base line, with a rank's cores and with all; and the strategies, with their limit."""
    one, many = list[Candidate](), list[Candidate]()
    for batch in batches:
        one.append(Candidate(base_name(batch), "single", batch, threads))
        if nproc > 1:
            one.append(Candidate(f"single-all-b{batch}", "single", batch * nproc, threads * nproc))
        if {*run} & {*EXACT}:
            one.append(Candidate(f"{REFERENCE}-b{batch}", "exact", batch, exact_threads, nproc))
        for name in (name for name in run if name != "single"):
            many.append(Candidate(f"{name}-b{batch}", name, batch, exact_threads if name in EXACT else threads))
        if nproc > 1:
            many.append(Candidate(f"limit-b{batch}", NO_EXCHANGE, batch, threads))
    if nproc == 1:
        return [Group(1, [*one, *many])]
    return [Group(1, one), Group(nproc, many)] if many else [Group(1, one)]


def _compared(
    config: CompareConfig, found: Measured, refused: Sequence[Failed], batch: int, room_bytes: int | None, cores: int,
    threads: int,
) -> Compared:  # fmt: skip
    rows = rows_of(found.rounds, base_name(batch), EXACT, config.steps)
    chosen = [row for row in rows if row.batch_size == batch and row.strategy not in ("single", NO_EXCHANGE)]
    alone = [row for row in rows if row.strategy == "single" and f"b{batch}" == row.name.rpartition("-")[2]]
    best = max(alone, key=lambda row: row.rate.median, default=None)
    return Compared(
        config.task,
        rows,
        [*refused, *found.failures],
        advise(chosen, best, EXACT, room_bytes),
        _notes(rows, cores, threads),
    )


def _notes(rows: Sequence[Row], cores: int, threads: int) -> list[str]:
    ranks = max((row.world_size for row in rows), default=1)
    notes = [
        f"processes were ready after {launch:.1f} s ({size} of them); first step: the strategy applied to the model, "
        "and one step"
        for size, launch in sorted({row.world_size: row.launch_seconds for row in rows}.items())
    ][-1:]
    if ranks * threads > cores:
        notes.append(
            f"{ranks} ranks x {threads} threads = {ranks * threads} threads on {cores} cores: more than can run at once"
        )
    return notes


def _strategies(text: str) -> list[str]:
    names = [word.strip() for word in text.split(",") if word.strip()]
    if names == ["all"]:
        return [name for name in CHOICES if name != "single"]
    for name in names:
        if name not in CHOICES:
            raise unknown("strategy", name, ["all", *CHOICES])
    if not names:
        raise UsageError(f"name at least one strategy: all, {', '.join(CHOICES)}")
    return list(dict.fromkeys(names))
