"""`paceline compare`: measures every strategy on this task and this machine, and recommends one."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import msgspec
import psutil

from paceline.cli import command_line, measurement
from paceline.cli.options import check_gpus, check_positive, nproc_auto, parse_names, parse_whole_numbers, usable_gpus
from paceline.config.choices import torch_unsupported_reason
from paceline.config.mesh import Mesh, mesh_of, meshes_of
from paceline.config.settings import DEFAULT_BATCH_SIZE, TrainConfig, check_values
from paceline.config.strategies import DEFAULT_STRATEGY, EXACT_STRATEGIES, SINGLE_PROCESS_STRATEGY, STRATEGY_INFO
from paceline.errors import ExitCode, UsageError
from paceline.host.cgroup import threads_per_rank, usable_cores
from paceline.lab.compare import REFERENCE_PREFIX, Row, compared_rows, print_compared, recommend_strategy
from paceline.lab.measurement import NO_EXCHANGE, Candidate, FailedMeasurement
from paceline.lab.rounds import CandidateGroup, MeasuredRounds
from paceline.runs.utilization import format_speed


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
    how: measurement.MeasurementConfig = field(default_factory=measurement.MeasurementConfig)


class Comparison(msgspec.Struct, frozen=True):
    """The results, as printed by --json and written to --out."""

    task: str
    rows: list[Row]
    failures: list[FailedMeasurement]
    advice: str
    notes: list[str]


def main(arguments: Sequence[str]) -> int:
    config: CompareConfig = command_line("compare").parse(arguments)
    how = config.how
    check_positive(config, "nproc")
    measurement.check_measurement(how)
    strategies = parse_names("strategy", config.strategies, ["all", *STRATEGY_INFO])
    if "all" in strategies:
        strategies = [name for name in STRATEGY_INFO if name != SINGLE_PROCESS_STRATEGY]
    batches = parse_whole_numbers("--batch-sizes", config.batch_sizes or str(DEFAULT_BATCH_SIZE))
    settings = measurement.train_config(config.task, how)
    gpus = usable_gpus(settings.launch.device)
    cores = usable_cores()
    nproc = config.nproc or nproc_auto(settings.launch.device)
    check_gpus(f"--nproc {nproc}", nproc, gpus, settings.launch.backend)
    asked_threads = how.threads_per_rank or settings.launch.threads_per_rank
    threads = asked_threads or threads_per_rank(cores, nproc)
    reasons = {name: _strategy_obstacle(name, nproc) for name in strategies}
    refused = [FailedMeasurement(name, name, nproc, batches[0], why) for name, why in reasons.items() if why]
    strategies = [name for name, why in reasons.items() if not why]
    meshes = _meshes(config, nproc, settings)
    sequence = config.sequence_parallel or settings.launch.sequence_parallel
    groups = _make_candidate_groups(strategies, meshes, nproc, batches, threads, asked_threads or 1, sequence=sequence)
    with measurement.measure_groups(groups, settings, how, memory=True) as (rounds, _):
        pass
    if rounds.code != ExitCode.DONE:
        return rounds.code
    # Only torch can report the memory of GPUs
    memory = None if gpus else psutil.virtual_memory().total // nproc
    compared = _compare(config, rounds, refused, batches[0], memory, cores, threads)
    measurement.publish(
        compared, how, partial(print_compared, compared.rows, compared.failures, compared.advice, compared.notes)
    )
    ran = [row for row in compared.rows if row.world_size == nproc and (row.strategy in strategies or row.mesh)]
    return ExitCode.DONE if ran or not (strategies or meshes) else ExitCode.FAILED


def _meshes(config: CompareConfig, nproc: int, settings: TrainConfig) -> list[Mesh]:
    if "auto" in config.meshes and nproc == 1:
        raise UsageError(code="meshes-of-one-process")
    texts = config.meshes or [mesh for mesh in [settings.launch.mesh] if mesh]
    meshes = [mesh for text in texts for mesh in (meshes_of(nproc) if text == "auto" else [mesh_of(text, nproc)])]
    for mesh in meshes:
        launch = replace(settings.launch, mesh=str(mesh))
        if mesh.size_of("pipeline") == 1:
            launch = replace(launch, schedule_pipeline=None, stages_at=None)
        if mesh.size_of("tensor") == 1:
            launch = replace(launch, sequence_parallel=False)
        check_values(replace(settings, launch=launch, strategy=_strategy_for(mesh)))
    if config.sequence_parallel and not any(mesh.size_of("tensor") > 1 for mesh in meshes):
        raise UsageError(code="sequence-parallel-without-meshes")
    return list({str(mesh): mesh for mesh in meshes}.values())


def _strategy_for(mesh: Mesh) -> str:
    return "fsdp" if mesh.size_of("shard") > 1 else DEFAULT_STRATEGY


def _strategy_obstacle(strategy: str, nproc: int) -> str:
    info = STRATEGY_INFO[strategy]
    if not info.single_process or strategy == SINGLE_PROCESS_STRATEGY:
        return torch_unsupported_reason(strategy)
    where = " on a machine with several GPUs" if info.splits_over_gpus else ""
    return f"is single-process, but --nproc is {nproc}: `paceline train --strategy {strategy}`{where}"


def _make_candidate_groups(
    strategies: Sequence[str], meshes: Sequence[Mesh], nproc: int, batches: Sequence[int], threads: int,
    exact_threads: int, *, sequence: bool,
) -> list[CandidateGroup]:  # fmt: skip
    """The candidates, with a single process as baseline, and as upper bound ranks that exchange nothing."""
    alone, together = list[Candidate](), list[Candidate]()
    for batch in batches:
        alone.append(Candidate(f"single-b{batch}", SINGLE_PROCESS_STRATEGY, batch, threads))
        if nproc > 1:
            alone.append(Candidate(f"single-all-b{batch}", SINGLE_PROCESS_STRATEGY, batch * nproc, threads * nproc))
        if {*strategies} & {*EXACT_STRATEGIES}:
            alone.append(Candidate(f"{REFERENCE_PREFIX}-b{batch}", EXACT_STRATEGIES[0], batch, exact_threads, nproc))
        for name in (name for name in strategies if name != SINGLE_PROCESS_STRATEGY):
            rank_threads = exact_threads if name in EXACT_STRATEGIES else threads
            together.append(Candidate(f"{name}-b{batch}", name, batch, rank_threads))
        for mesh in meshes:  # the same global batch: with fewer replicas, in more micro-batches
            is_sequence_parallel = sequence and mesh.size_of("tensor") > 1
            name = f"{mesh}-b{batch}"
            strategy = _strategy_for(mesh)
            together.append(Candidate(name, strategy, batch, threads, nproc, str(mesh), is_sequence_parallel))
        if nproc > 1:
            together.append(Candidate(f"limit-b{batch}", NO_EXCHANGE, batch, threads))
    groups = [(1, alone), (nproc, together)] if nproc > 1 else [(1, [*alone, *together])]
    return [CandidateGroup(processes, candidates) for processes, candidates in groups]


def _compare(
    config: CompareConfig, rounds: MeasuredRounds, refused: Sequence[FailedMeasurement], batch: int, memory: int | None,
    cores: int, threads: int,
) -> Comparison:  # fmt: skip
    rows = compared_rows(rounds.rounds, f"single-b{batch}", config.how.steps)
    measured = [row for row in rows if row.strategy not in (SINGLE_PROCESS_STRATEGY, NO_EXCHANGE)]
    chosen = [row for row in measured if row.batch_size == batch]
    single = [row for row in rows if row.strategy == SINGLE_PROCESS_STRATEGY]
    alone = [row for row in single if row.name.endswith(f"-b{batch}")]
    advice = recommend_strategy(chosen, max(alone, key=lambda row: row.rate.median, default=None), memory)
    fastest = sorted(rows, key=lambda row: row.rate.median)[-1:]
    use = [f"{row.label}: {', '.join([*format_speed(row), row.mfu_words])}" for row in fastest if row.mfu_words]
    notes = [*comparison_notes(rows, cores, threads), *use, *rounds.notes()]
    return Comparison(config.task, rows, [*refused, *rounds.failures], advice, notes)


def comparison_notes(rows: Sequence[Row], cores: int, threads: int) -> list[str]:
    notes: list[str] = []
    ranks = max((row.world_size for row in rows), default=1)
    if launches := [row.launch_seconds for row in rows if row.world_size == ranks]:
        notes.append(
            f"{ranks} processes were ready after {launches[-1]:.1f} s; the first step includes applying the strategy "
            "to the model"
        )
    if shared := measurement.core_sharing_text(ranks, threads, cores):
        notes.append(f"{shared}: more than can run at once")
    return notes
