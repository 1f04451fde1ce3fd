"""`paceline compare` recommends a strategy from measurements; `paceline scale` finds the largest cause of lost time."""

import math
import sys
import tempfile
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Literal

import msgspec
import psutil

from paceline.cli import make_parser, options
from paceline.config import settings as configuration
from paceline.config.choices import torch_unsupported_reason
from paceline.config.mesh import BATCH_DIMENSIONS, Mesh, enumerate_meshes, format_strategy, resolve_mesh
from paceline.config.strategies import (
    DEFAULT_STRATEGY,
    EXACT_STRATEGIES,
    MULTI_PROCESS_STRATEGIES,
    SINGLE_PROCESS_STRATEGY,
    STRATEGY_INFO,
    StrategyName,
)
from paceline.errors import ExitCode, UsageError, plural, unknown_name_error
from paceline.host.cgroup import threads_per_rank, usable_cores
from paceline.lab import scale as scaling
from paceline.lab.compare import REFERENCE_PREFIX, StrategyRow, make_strategy_rows, print_comparison, strategy_advice
from paceline.lab.measurement import INSPECTED_STEPS, NO_EXCHANGE, Candidate, FailedMeasurement
from paceline.lab.rounds import CandidateGroups, MeasuredRounds, candidate_dir, measure_rounds
from paceline.lab.scale import NetworkSpeed, Runs, ScalePoint, ScalingInputs
from paceline.report.step_parts import RecordedSteps
from paceline.runs.reading import real_path
from paceline.runs.utilization import speed_texts
from paceline.tasks.registry import check_optimizer_reference, check_task_without_import

MIN_STEPS = 5
MAX_BATCH_MULTIPLE = 16  # limit of the batch of one process in strong scaling, in multiples of --batch-size


@dataclass(frozen=True)
class MeasurementConfig:
    """Measurement and settings of the training."""

    steps: int = 30
    """steps of each measurement"""
    warmup: int = 5
    """steps before each measurement"""
    rounds: int = 3
    """rounds: each round measures all candidates, one after the other"""
    threads_per_rank: int | None = None
    """CPU threads of each rank (default: cores / most ranks; exact and zero: 1)"""
    config: Path | None = None
    """config.toml with all other settings of the training"""
    device: Literal["auto", "cpu", "cuda", "xpu"] | None = None
    """device, as for train"""
    backend: Literal["auto", "nccl", "xccl", "gloo", "mpi"] | None = None
    """backend, as for train; with gloo several processes can use one GPU"""
    optimizer: str | None = None
    """optimizer, as for train"""
    precision: Literal["fp32", "tf32", "bf16", "fp16", "auto"] | None = None
    """forward/backward precision"""
    data_dir: Path | None = None
    """folder of IDX files (default: the packaged MNIST)"""
    stem: Literal["imagenet", "small"] | None = None
    """first layers of ResNet18"""
    task_arg: tuple[str, ...] = ()
    """NAME=VALUE, an argument of the task function. Repeatable"""
    out: Path | None = None
    """file for all results, as JSON"""
    json: bool = False
    """print JSON instead of tables"""


def check_measurement_options(how: MeasurementConfig) -> None:
    options.check_positive(how, "steps", "rounds", "threads_per_rank")
    if how.warmup < INSPECTED_STEPS:
        raise UsageError(code="warmup-too-short", least=INSPECTED_STEPS, value=how.warmup)
    options.check_out_file("--out", how.out)


def train_config(task: str, how: MeasurementConfig, *, num_workers: int | None = None) -> configuration.TrainConfig:
    """The settings of the measured training: the options, otherwise --config, otherwise the defaults."""
    default = configuration.load(real_path(how.config), must_own=True) if how.config else configuration.TrainConfig()
    values = {
        "launch.device": how.device, "launch.backend": how.backend, "compute.precision": how.precision,
        "optimizer.optimizer": configuration.make_task_path_absolute(how.optimizer or default.optimizer.optimizer),
        "data.data_dir": how.data_dir, "model.stem": how.stem, "data.num_workers": num_workers,
        "task": configuration.make_task_path_absolute(task), "task_arg": [*how.task_arg],
    }  # fmt: skip
    values = {dest: value for dest, value in values.items() if value is not None} | {"strategy": None}
    config: configuration.TrainConfig = options.build_settings(configuration.TrainConfig, values, default)
    configuration.check_values(config)
    check_task_without_import(config.task, configuration.task_options(config))
    check_optimizer_reference(config.optimizer.optimizer)
    return config


@contextmanager
def measure_candidate_groups(
    groups: CandidateGroups, settings: configuration.TrainConfig, how: MeasurementConfig, *, memory: bool
) -> Generator[tuple[MeasuredRounds, Path]]:
    """Yields the measurements, and the folder of the event files, which is deleted at the end of the context."""
    with tempfile.TemporaryDirectory(prefix="paceline-bench-", ignore_cleanup_errors=True) as folder:
        root = Path(folder).resolve()
        text, counts = (
            configuration.config_to_toml(settings),
            {"rounds": how.rounds, "warmup": how.warmup, "steps": how.steps},
        )
        yield measure_rounds(groups, text, root, **counts, memory=memory), root


def core_sharing_text(ranks: int, threads: int, cores: int) -> str:
    """The number of threads and cores, as text; empty if each thread has a core."""
    if ranks * threads <= cores:
        return ""
    return f"{ranks} ranks x {plural(threads, 'thread')} = {ranks * threads} threads on {plural(cores, 'core')}"


def output_results(results: msgspec.Struct, how: MeasurementConfig, print_tables: Callable[[], None]) -> None:
    if how.out:
        options.write_json(how.out, results)
    if how.json:
        options.print_json(results)
    else:
        print_tables()


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
    how: MeasurementConfig = field(default_factory=MeasurementConfig)


class StrategyComparison(msgspec.Struct, frozen=True):
    """The results, as printed by --json and written to --out."""

    task: str
    rows: list[StrategyRow]
    failures: list[FailedMeasurement]
    advice: str
    notes: list[str]


def compare_strategies(arguments: Sequence[str]) -> int:
    config: CompareConfig = make_parser("compare").parse(arguments)
    how = config.how
    options.check_positive(config, "nproc")
    check_measurement_options(how)
    strategies = options.parse_names("strategy", config.strategies, ["all", *STRATEGY_INFO])
    if "all" in strategies:
        strategies = [name for name in STRATEGY_INFO if name != SINGLE_PROCESS_STRATEGY]
    batches = options.parse_whole_numbers("--batch-sizes", config.batch_sizes or str(configuration.DEFAULT_BATCH_SIZE))
    settings = train_config(config.task, how)
    gpus = options.usable_gpus(settings.launch.device)
    cores = usable_cores()
    nproc = config.nproc or options.resolve_auto_nproc(settings.launch.device)
    options.check_enough_gpus(f"--nproc {nproc}", nproc, gpus, settings.launch.backend)
    asked_threads = how.threads_per_rank or settings.launch.threads_per_rank
    threads = asked_threads or threads_per_rank(cores, nproc)
    reasons = {name: _strategy_obstacle(name, nproc) for name in strategies}
    refused = [FailedMeasurement(name, name, nproc, batches[0], why) for name, why in reasons.items() if why]
    strategies = [name for name, why in reasons.items() if not why]
    meshes = _meshes(config, nproc, settings)
    sequence = config.sequence_parallel or settings.launch.sequence_parallel
    groups = _make_candidate_groups(strategies, meshes, nproc, batches, threads, asked_threads or 1, sequence=sequence)
    with measure_candidate_groups(groups, settings, how, memory=True) as (rounds, _):
        pass
    if rounds.code != ExitCode.DONE:
        return rounds.code
    # Only torch can report the memory of GPUs
    memory = None if gpus else psutil.virtual_memory().total // nproc
    compared = _comparison(config, rounds, refused, batches[0], memory, cores, threads)
    show = partial(print_comparison, compared.rows, compared.failures, compared.advice, compared.notes)
    output_results(compared, how, show)
    ran = [row for row in compared.rows if row.world_size == nproc and (row.strategy in strategies or row.mesh)]
    return ExitCode.DONE if ran or not (strategies or meshes) else ExitCode.FAILED


def _meshes(config: CompareConfig, nproc: int, settings: configuration.TrainConfig) -> list[Mesh]:
    if "auto" in config.meshes and nproc == 1:
        raise UsageError(code="meshes-of-one-process")
    texts = config.meshes or [mesh for mesh in [settings.launch.mesh] if mesh]
    meshes = [
        mesh for text in texts for mesh in (enumerate_meshes(nproc) if text == "auto" else [resolve_mesh(text, nproc)])
    ]
    for mesh in meshes:
        launch = replace(settings.launch, mesh=str(mesh))
        if mesh.size_of("pipeline") == 1:
            launch = replace(launch, schedule_pipeline=None, stages_at=None)
        if mesh.size_of("tensor") == 1:
            launch = replace(launch, sequence_parallel=False)
        configuration.check_values(replace(settings, launch=launch, strategy=_strategy_for(mesh)))
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
) -> CandidateGroups:  # fmt: skip
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
    return {1: alone, nproc: together} if nproc > 1 else {1: [*alone, *together]}


def _comparison(
    config: CompareConfig, rounds: MeasuredRounds, refused: Sequence[FailedMeasurement], batch: int, memory: int | None,
    cores: int, threads: int,
) -> StrategyComparison:  # fmt: skip
    rows = make_strategy_rows(rounds.rounds, f"single-b{batch}", config.how.steps)
    measured = [row for row in rows if row.strategy not in (SINGLE_PROCESS_STRATEGY, NO_EXCHANGE)]
    chosen = [row for row in measured if row.batch_size == batch]
    single = [row for row in rows if row.strategy == SINGLE_PROCESS_STRATEGY]
    alone = [row for row in single if row.name.endswith(f"-b{batch}")]
    advice = strategy_advice(chosen, max(alone, key=lambda row: row.rate.median, default=None), memory)
    fastest = sorted(rows, key=lambda row: row.rate.median)[-1:]
    use = [f"{row.label}: {', '.join([*speed_texts(row), row.mfu_words])}" for row in fastest if row.mfu_words]
    notes = [*comparison_notes(rows, cores, threads), *use, *rounds.notes()]
    return StrategyComparison(config.task, rows, [*refused, *rounds.failures], advice, notes)


def comparison_notes(rows: Sequence[StrategyRow], cores: int, threads: int) -> list[str]:
    notes: list[str] = []
    ranks = max((row.world_size for row in rows), default=1)
    if launches := [row.launch_seconds for row in rows if row.world_size == ranks]:
        notes.append(
            f"{ranks} processes were ready after {launches[-1]:.1f} s; the first step includes applying the strategy "
            "to the model"
        )
    if shared := core_sharing_text(ranks, threads, cores):
        notes.append(f"{shared}: more than can run at once")
    return notes


@dataclass(frozen=True)
class ScaleConfig:
    """Measure the speedup by more ranks and the causes of lost time, and estimate a step on more nodes."""

    task: str | None = None
    """mnist-cnn, mnist-resnet18, or a custom task: module:name or file.py:name"""
    runs: str | None = None
    """run folders to evaluate instead of a task, on 1 and more ranks, separated by commas"""
    ranks: str = "1,2,4"
    """numbers of processes, separated by commas; 1 is always measured (with --mesh, one copy of the model)"""
    strategy: StrategyName = DEFAULT_STRATEGY
    """strategy that distributes the work over the ranks"""
    mesh: str | None = None
    """mesh of one copy of the model, as --mesh of train without data, e.g. tensor=2"""
    mode: Literal["weak", "strong", "both"] = "both"
    """weak: the same number of samples per rank. strong: the same number over all ranks"""
    batch_size: int = configuration.DEFAULT_BATCH_SIZE
    """samples of each rank and step; strong scaling: at the largest number of ranks"""
    network: str | None = None
    """estimate a step on more nodes, over links such as 100Gbit,5us"""
    num_workers: int | None = None
    """loader processes per rank"""
    how: MeasurementConfig = field(default_factory=MeasurementConfig)


def scale(arguments: Sequence[str]) -> int:
    config: ScaleConfig = make_parser("scale").parse(arguments)
    network = None if config.network is None else scaling.parse_network(config.network)
    copy, copies = _check_scale(config)
    return _scale_runs(config, config.runs, network) if config.runs else _scale_task(config, network, copy, copies)


def _check_scale(config: ScaleConfig) -> tuple[Mesh, list[int]]:
    """The mesh of one copy of the model, and the numbers of copies to measure."""
    if (config.task is None) == (config.runs is None):
        raise UsageError(code="scale-task-or-runs")
    copy = Mesh.parse(config.mesh) if config.mesh else Mesh()
    if named := [name for name in BATCH_DIMENSIONS if name in copy.sizes]:
        raise UsageError(code="scale-mesh-with-data", value=config.mesh, dimension=named[0])
    if config.mesh and config.runs:
        raise UsageError(code="mesh-with-runs")
    all_ranks = options.parse_whole_numbers("--ranks", config.ranks)
    rank_counts = [ranks for ranks in all_ranks if ranks > 1 or copy.size == 1]
    if uneven := [ranks for ranks in rank_counts if ranks % copy.size]:
        raise UsageError(
            code="ranks-no-whole-copies", value=config.ranks, processes=uneven[0], size=copy.size, mesh=config.mesh,
            twice=2 * copy.size,
        )  # fmt: skip
    copies = sorted({1, *(ranks // copy.size for ranks in rank_counts)})
    options.check_positive(config, "batch_size")
    check_measurement_options(config.how)
    if config.how.steps < MIN_STEPS:
        raise UsageError(code="too-few-steps", least=MIN_STEPS, value=config.how.steps)
    if copies[-1] == 1:
        unit, example = ("one copy of the model", 2 * copy.size) if copy.size > 1 else ("one rank", "1,2")
        raise UsageError(code="nothing-to-compare", value=config.ranks, unit=unit, example=example)
    if STRATEGY_INFO[config.strategy].single_process:
        raise unknown_name_error("strategy for several processes", config.strategy, MULTI_PROCESS_STRATEGIES)
    if config.mode != "weak" and math.lcm(*copies) > MAX_BATCH_MULTIPLE * copies[-1]:
        raise UsageError(
            code="ranks-do-not-divide", value=config.ranks, common=math.lcm(*copies), batch_size=config.batch_size
        )
    return copy, copies


def _scale_runs(config: ScaleConfig, folders: str, network: NetworkSpeed | None) -> int:
    paths = [Path(folder.strip()) for folder in folders.split(",")]
    runs = scaling.read_runs(paths, skip=config.how.warmup)
    weak, strong = scaling.weak_and_strong_batches(runs)
    size = scaling.estimate_exchanged_bytes(paths)
    # The number of cores is unknown: assume one for each rank
    cores, on_cpus = sum(at.ranks for at in runs), any(run.on_cpus for points in runs.values() for run in points)
    setup = ScalingInputs(cores, 1, size, exchanges_over_network=scaling.used_several_hosts(runs), uses_gloo=on_cpus)
    batches = (weak if config.mode != "strong" else None, strong if config.mode != "weak" else None)
    title = f"{len(paths)} runs, {size / 1e6:.1f} MB of weights; backward without communication is that of one rank"
    return _publish_scaling(config, network, title, runs, {}, setup, batches, [])


def _scale_task(config: ScaleConfig, network: NetworkSpeed | None, copy: Mesh, copies: Sequence[int]) -> int:
    settings, how = train_config(str(config.task), config.how, num_workers=config.num_workers), config.how
    if copy.size > 1:
        launch = replace(settings.launch, mesh=_copies_mesh(config, copy, copies[-1]))
        configuration.check_values(replace(settings, launch=launch, strategy=config.strategy))
    gpus, processes = options.usable_gpus(settings.launch.device), copies[-1] * copy.size
    options.check_enough_gpus(f"--ranks {config.ranks}", processes, gpus, settings.launch.backend)
    cores = usable_cores()
    configured = how.threads_per_rank or settings.launch.threads_per_rank
    threads = configured or (
        1 if config.strategy in EXACT_STRATEGIES else threads_per_rank(cores, min(cores, processes))
    )
    weak = config.batch_size if config.mode != "strong" else None
    strong = config.batch_size * math.lcm(*copies) if config.mode != "weak" else None
    points = points_to_measure(copies, weak, strong)
    groups = _scale_groups(config, copy, points, threads)
    with measure_candidate_groups(groups, settings, how, memory=False) as (rounds, folder):
        if rounds.code != ExitCode.DONE:
            return rounds.code
        if rounds.failures:
            first = rounds.failures[0]
            print(f"{first.strategy} on {first.world_size} ranks failed: {first.reason}", file=sys.stderr)
            return ExitCode.FAILED
        runs = _recorded_runs(folder, points, config, config.strategy, copy)
        alone = _recorded_runs(folder, [at for at in points if at.ranks > 1], config, NO_EXCHANGE, copy)
    chunks = [chunk for round_chunks in rounds.rounds for chunk in round_chunks]
    size, low_rank = max(chunk.weight_bytes for chunk in chunks), max(chunk.low_rank_bytes for chunk in chunks)
    title = (
        f"{config.task} on {chunks[0].device}, {format_strategy(config.strategy, str(copy))}, "
        f"{plural(threads, 'thread')} per process, {cores} cores, {size / 1e6:.1f} MB of gradients"
    )
    if copy.size > 1:
        title += f"; a rank below is a copy of the model on {copy.size} processes"
    setup = ScalingInputs(
        cores, threads * copy.size, size, has_split_model=copy.size > 1, low_rank_bytes=low_rank,
        uses_gloo=gpus == 0 or settings.launch.backend == "gloo",
    )  # fmt: skip
    notes = scaling_notes([count * copy.size for count in copies], rounds, cores, threads)
    return _publish_scaling(config, network, title, runs, alone, setup, (weak, strong), notes)


def _publish_scaling(
    config: ScaleConfig, network: NetworkSpeed | None, title: str, runs: Runs, alone: Runs, setup: ScalingInputs,
    batches: tuple[int | None, int | None], notes: list[str],
) -> int:  # fmt: skip
    """Publish efficiency, losses and estimates.

    `alone` are the runs without communication; empty if that was not measured. `batches` are the samples of each rank
    (weak scaling), and of all ranks together (strong scaling).
    """
    parts = scaling.step_parts_by_point(runs, alone)
    modes = [(mode, batch) for mode, batch in zip(("weak", "strong"), batches, strict=True) if batch]
    lost = [row for mode, batch in modes for row in scaling.compute_scaling_losses(runs, parts, setup, mode, batch)]
    estimates = scaling.estimate_scaling(parts, setup, *batches, network) if network else []
    if network is None:
        notes = [*notes, "to estimate a step on more nodes, specify their network: --network 100Gbit,5us"]
    scaled = scaling.ScalingReport(title, lost, estimates, notes)
    output_results(scaled, config.how, partial(scaling.print_scaling_report, scaled))
    return ExitCode.DONE


def _copies_mesh(config: ScaleConfig, copy: Mesh, count: int) -> str:
    """The mesh of `count` copies; empty if each is one process."""
    return str(Mesh({"shard" if config.strategy == "fsdp" else "data": count, **copy.sizes})) if copy.size > 1 else ""


def points_to_measure(ranks: Sequence[int], weak: int | None, strong: int | None) -> list[ScalePoint]:
    """Each number of ranks at its batch sizes, and one rank at all of these batch sizes."""
    batches = [(size, batch) for size in ranks for batch in (weak, strong and strong // size) if batch]
    return sorted({ScalePoint(count, batch) for size, batch in batches for count in (size, 1)})


def _scale_groups(config: ScaleConfig, copy: Mesh, points: Sequence[ScalePoint], threads: int) -> CandidateGroups:
    """Each point, with and without communication between its ranks, which are copies of the model."""
    groups: dict[int, list[Candidate]] = {}
    for at in points:
        mesh = _copies_mesh(config, copy, at.ranks)
        for name in [config.strategy] if at.ranks == 1 else [config.strategy, NO_EXCHANGE]:
            candidate = Candidate(_candidate_name(name, at), name, at.batch, threads, mesh=mesh)
            groups.setdefault(at.ranks * copy.size, []).append(candidate)
    return groups


def _candidate_name(strategy: str, at: ScalePoint) -> str:
    return f"{strategy.replace(' ', '-')}-b{at.batch}"


def _recorded_runs(folder: Path, points: Sequence[ScalePoint], config: ScaleConfig, strategy: str, copy: Mesh) -> Runs:
    def read(at: ScalePoint, number: int) -> RecordedSteps:
        run_folder = candidate_dir(folder, number, at.ranks * copy.size, _candidate_name(strategy, at))
        return scaling.read_run_steps(run_folder, skip=config.how.warmup)

    return {at: [read(at, number) for number in range(config.how.rounds)] for at in points}


def scaling_notes(ranks: Sequence[int], rounds: MeasuredRounds, cores: int, threads: int) -> list[str]:
    shared = [text for size in ranks if (text := core_sharing_text(size, threads, cores))]
    notes = [f"{text}: the threads compete for cores, so compute is slower" for text in shared]
    launch = {
        size: median(c.launch_seconds for chunks in rounds.rounds for c in chunks if c.world_size == size)
        for size in ranks
    }
    times = ", ".join(f"{seconds:.1f} s for {size}" for size, seconds in launch.items())
    return [*notes, f"not included: startup, from the command until all ranks are ready: {times}", *rounds.notes()]
