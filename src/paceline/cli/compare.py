"""`paceline compare`: measures every strategy beside the others, on this task and this machine."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import msgspec
import psutil

from paceline.bench.advice import advise
from paceline.bench.compare import REFERENCE, Row, compared_rows, print_compared
from paceline.bench.rounds import MeasuredRounds, ProcessSet
from paceline.bench.spec import NO_EXCHANGE, Candidate, NotMeasured
from paceline.cli.commands import command_line
from paceline.cli.flags import check_gpus, check_positive, chosen_names, nproc_auto, usable_gpus, whole_numbers
from paceline.cli.measuring import Measuring, check_measuring, crowd, measured, publish, settings_of
from paceline.config import DEFAULT_BATCH_SIZE, TrainConfig, check_values
from paceline.errors import ExitCode, UsageError
from paceline.host.cgroup import threads_per_rank, usable_cores
from paceline.ladder import DEFAULT, DEFAULT_ALONE, EXACT, LADDER
from paceline.mesh import Mesh, mesh_of, meshes_of
from paceline.observe.utilization import speed_words
from paceline.torch_version import lacks_torch

AUTO = "auto"


@dataclass(frozen=True)
class CompareConfig:
    """Measure every strategy (speed, memory, bytes sent, bits) and recommend one."""

    task: str
    """mnist-cnn, mnist-resnet18, or a custom task: module:name or file.py:name"""
    strategies: str = "all"
    """strategies to measure, separated by commas"""
    meshes: tuple[str, ...] = ()
    """mesh to measure as well, as --mesh of train. Repeatable; auto: all that --nproc allows"""
    sequence_parallel: bool = False
    """as for train, on meshes with tensor"""
    nproc: int | None = None
    """worker processes (default: one per GPU, or per core)"""
    batch_sizes: str | None = None
    """samples of each rank and step, separated by commas; all strategies run at each size (default: 64)"""
    how: Measuring = field(default_factory=Measuring)


class Compared(msgspec.Struct, frozen=True):
    """Everything that is printed or written."""

    task: str
    rows: list[Row]
    failures: list[NotMeasured]
    advice: str
    notes: list[str]


def main(arguments: Sequence[str]) -> int:
    """Run `paceline compare ARGUMENTS`."""
    config: CompareConfig = command_line("compare").parse(arguments)
    how = config.how
    check_positive(config, "nproc")
    check_measuring(how)
    asked = chosen_names("strategy", config.strategies, ["all", *LADDER])
    if "all" in asked:
        asked = [name for name in LADDER if name != DEFAULT_ALONE]
    batches = whole_numbers("--batch-sizes", config.batch_sizes or str(DEFAULT_BATCH_SIZE))
    settings = settings_of(config.task, how)
    gpus = usable_gpus(settings.launch.device)
    cores = usable_cores()
    nproc = config.nproc or nproc_auto(settings.launch.device)
    check_gpus(f"--nproc {nproc}", nproc, gpus, settings.launch.backend)
    threads = how.threads_per_rank or settings.launch.threads_per_rank
    usual = threads or threads_per_rank(cores, nproc)
    refused = [NotMeasured(name, name, nproc, batches[0], why) for name in asked if (why := _not_run(name, nproc))]
    run = [name for name in asked if name not in {failure.strategy for failure in refused}]
    meshes = _meshes(config, nproc, settings)
    sequence = config.sequence_parallel or settings.launch.sequence_parallel
    groups = _groups(run, meshes, nproc, batches, usual, threads or 1, sequence=sequence)
    with measured(groups, settings, how, memory=True) as (found, _):
        pass
    if found.code != ExitCode.DONE:
        return found.code
    # memory of this machine for each rank; of GPUs only torch knows it
    room_bytes = None if gpus else psutil.virtual_memory().total // nproc
    compared = _compared(config, found, refused, batches[0], room_bytes, cores, usual)
    publish(compared, how, partial(print_compared, compared.rows, compared.failures, compared.advice, compared.notes))
    ran = [row for row in compared.rows if row.world_size == nproc and (row.strategy in run or row.mesh)]
    return ExitCode.DONE if ran or not (run or meshes) else ExitCode.FAILED


def _meshes(config: CompareConfig, nproc: int, settings: TrainConfig) -> list[Mesh]:
    """Those to measure: as asked for, else that of --config, which a run on a mesh may have left.

    Raises:
        UsageError: a mesh that has not as many places as there are processes, or that no training could have.
    """
    if AUTO in config.meshes and nproc == 1:
        raise UsageError(code="meshes-of-one-process")
    asked = config.meshes or [mesh for mesh in [settings.launch.mesh] if mesh]
    found = [mesh for one in asked for mesh in (meshes_of(nproc) if one == AUTO else [mesh_of(one, nproc)])]
    for mesh in found:
        launch = replace(settings.launch, mesh=str(mesh))
        if mesh.of("pipeline") == 1:
            launch = replace(launch, schedule_pipeline=None, stages_at=None)
        if mesh.of("tensor") == 1:
            launch = replace(launch, sequence_parallel=False)
        check_values(replace(settings, launch=launch, strategy=_strategy_for(mesh)))
    if config.sequence_parallel and not any(mesh.of("tensor") > 1 for mesh in found):
        raise UsageError(code="sequence-parallel-without-meshes")
    return list({str(mesh): mesh for mesh in found}.values())


def _strategy_for(mesh: Mesh) -> str:
    return "fsdp" if mesh.of("shard") > 1 else DEFAULT


def _not_run(strategy: str, nproc: int) -> str:
    """Why a strategy is not measured; empty if it is."""
    rung = LADDER[strategy]
    if not rung.one_process or strategy == DEFAULT_ALONE:
        return lacks_torch(strategy)
    where = " on a machine with several GPUs" if rung.several_gpus else ""
    return f"is single-process, but --nproc is {nproc}: `paceline train --strategy {strategy}`{where}"


def _groups(
    run: Sequence[str],
    meshes: Sequence[Mesh],
    nproc: int,
    batches: Sequence[int],
    threads: int,
    exact_threads: int,
    *,
    sequence: bool,
) -> list[ProcessSet]:
    """One process as the base line, with a rank's cores and with all of them; the strategies, and their limit."""
    one, many = list[Candidate](), list[Candidate]()
    for batch in batches:
        one.append(Candidate(f"single-b{batch}", DEFAULT_ALONE, batch, threads))
        if nproc > 1:
            one.append(Candidate(f"single-all-b{batch}", DEFAULT_ALONE, batch * nproc, threads * nproc))
        if {*run} & {*EXACT}:
            one.append(Candidate(f"{REFERENCE}-b{batch}", EXACT[0], batch, exact_threads, nproc))
        for name in (name for name in run if name != DEFAULT_ALONE):
            many.append(Candidate(f"{name}-b{batch}", name, batch, exact_threads if name in EXACT else threads))
        for mesh in meshes:  # of the same global batch: where fewer ranks share it, in several turns
            apart = sequence and mesh.of("tensor") > 1
            name = f"{mesh}-b{batch}"
            many.append(Candidate(name, _strategy_for(mesh), batch, threads, nproc, str(mesh), apart))
        if nproc > 1:
            many.append(Candidate(f"limit-b{batch}", NO_EXCHANGE, batch, threads))
    if nproc == 1:
        return [ProcessSet(1, [*one, *many])]
    return [ProcessSet(1, one), ProcessSet(nproc, many)]


def _compared(
    config: CompareConfig, found: MeasuredRounds, refused: Sequence[NotMeasured], batch: int, room_bytes: int | None,
    cores: int, threads: int,
) -> Compared:  # fmt: skip
    rows = compared_rows(found.rounds, f"single-b{batch}", config.how.steps)
    chosen = [row for row in rows if row.batch_size == batch and row.strategy not in (DEFAULT_ALONE, NO_EXCHANGE)]
    alone = [row for row in rows if row.strategy == DEFAULT_ALONE and f"b{batch}" == row.name.rpartition("-")[2]]
    best = max(alone, key=lambda row: row.rate.median, default=None)
    advice = advise(chosen, best, room_bytes)
    fastest = sorted(rows, key=lambda row: row.rate.median)[-1:]
    use = [f"{row.way}: {', '.join([*speed_words(row), row.mfu_words])}" for row in fastest if row.mfu_words]
    notes = [*comparison_notes(rows, cores, threads), *use, *found.notes()]
    return Compared(config.task, rows, [*refused, *found.failures], advice, notes)


def comparison_notes(rows: Sequence[Row], cores: int, threads: int) -> list[str]:
    """Notes on the machine, and on what the rows leave out."""
    ranks = max((row.world_size for row in rows), default=1)
    notes = [
        f"processes were ready after {launch:.1f} s ({size} of them); first step: the strategy applied to the model, "
        "and one step"
        for size, launch in sorted({row.world_size: row.launch_seconds for row in rows}.items())
    ][-1:]
    if crowded := crowd(ranks, threads, cores):
        notes.append(f"{crowded}: more than can run at once")
    return notes
