"""`paceline scale`: measures efficiency on 1, 2, 4, ... ranks, finds the largest cause of lost time, and estimates."""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Literal

from paceline.cli import command_line, measurement
from paceline.cli.options import check_gpus, check_positive, parse_whole_numbers, usable_gpus
from paceline.config.mesh import BATCH_DIMENSIONS, Mesh, format_strategy
from paceline.config.settings import DEFAULT_BATCH_SIZE, check_values
from paceline.config.strategies import (
    DEFAULT_STRATEGY,
    EXACT_STRATEGIES,
    MULTI_PROCESS_STRATEGIES,
    STRATEGY_INFO,
    StrategyName,
)
from paceline.errors import ExitCode, UsageError, plural, unknown_name_error
from paceline.host.cgroup import threads_per_rank, usable_cores
from paceline.lab import scale
from paceline.lab.measurement import NO_EXCHANGE, Candidate
from paceline.lab.rounds import CandidateGroup, MeasuredRounds, candidate_dir
from paceline.lab.scale import Network, Runs, ScalePoint, TrainingProperties
from paceline.report.step_parts import RecordedSteps

MIN_STEPS = 5
MAX_BATCH_MULTIPLE = 16  # limit of the batch of one process in strong scaling, in multiples of --batch-size


@dataclass(frozen=True)
class ScaleConfig:
    """Measure the speedup by more ranks and the causes of lost time, and estimate a step on more machines."""

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
    batch_size: int = DEFAULT_BATCH_SIZE
    """samples of each rank and step; strong scaling: at the largest number of ranks"""
    network: str | None = None
    """estimate a step on more machines, over links such as 100Gbit,5us"""
    num_workers: int | None = None
    """loader processes per rank"""
    how: measurement.MeasurementConfig = field(default_factory=measurement.MeasurementConfig)


def main(arguments: Sequence[str]) -> int:
    config: ScaleConfig = command_line("scale").parse(arguments)
    network = None if config.network is None else scale.parse_network(config.network)
    _check(config)
    return _read(config, config.runs, network) if config.runs else _measure(config, network)


def _check(config: ScaleConfig) -> None:
    if (config.task is None) == (config.runs is None):
        raise UsageError(code="scale-task-or-runs")
    copy, how = _model_copy_mesh(config), config.how
    if config.mesh and config.runs:
        raise UsageError(code="mesh-with-runs")
    copies = _copy_counts(config, copy)
    check_positive(config, "batch_size")
    measurement.check_measurement(how)
    if how.steps < MIN_STEPS:
        raise UsageError(code="too-few-steps", least=MIN_STEPS, value=how.steps)
    if copies[-1] == 1:
        unit, example = ("one copy of the model", 2 * copy.size) if copy.size > 1 else ("one rank", "1,2")
        hint = f"{unit} with: name a larger number, like {example}"
        raise UsageError(code="nothing-to-compare", value=config.ranks, more=hint)
    if STRATEGY_INFO[config.strategy].single_process:
        raise unknown_name_error("strategy for several processes", config.strategy, MULTI_PROCESS_STRATEGIES)
    if config.mode != "weak" and math.lcm(*copies) > MAX_BATCH_MULTIPLE * copies[-1]:
        raise UsageError(
            code="ranks-do-not-divide", value=config.ranks, common=math.lcm(*copies), batch_size=config.batch_size
        )


def _read(config: ScaleConfig, folders: str, network: Network | None) -> int:
    paths = [Path(folder.strip()) for folder in folders.split(",")]
    runs = scale.read_runs(paths, skip=config.how.warmup)
    weak, strong = scale.comparable_batches(runs)
    size = scale.estimate_exchanged_bytes(paths)
    # The number of cores is unknown: assume one for each rank
    cores, on_cpus = sum(at.ranks for at in runs), any(run.on_cpus for points in runs.values() for run in points)
    machine = TrainingProperties(cores, 1, size, exchanges_over_network=scale.ran_over_network(runs), uses_gloo=on_cpus)
    batches = (weak if config.mode != "strong" else None, strong if config.mode != "weak" else None)
    title = f"{len(paths)} runs, {size / 1e6:.1f} MB of weights; backward without communication is that of one rank"
    return _publish(config, network, title, runs, {}, machine, batches, [])


def _measure(config: ScaleConfig, network: Network | None) -> int:
    """Measure each number of ranks, with and without exchange between them."""
    copy = _model_copy_mesh(config)
    copies = _copy_counts(config, copy)
    settings, how = measurement.train_config(str(config.task), config.how, num_workers=config.num_workers), config.how
    if copy.size > 1:
        launch = replace(settings.launch, mesh=_mesh(config, copy, copies[-1]))
        check_values(replace(settings, launch=launch, strategy=config.strategy))
    gpus, processes = usable_gpus(settings.launch.device), copies[-1] * copy.size
    check_gpus(f"--ranks {config.ranks}", processes, gpus, settings.launch.backend)
    cores = usable_cores()
    configured = how.threads_per_rank or settings.launch.threads_per_rank
    threads = configured or (
        1 if config.strategy in EXACT_STRATEGIES else threads_per_rank(cores, min(cores, processes))
    )
    weak = config.batch_size if config.mode != "strong" else None
    strong = config.batch_size * math.lcm(*copies) if config.mode != "weak" else None
    points = points_to_measure(copies, weak, strong)
    groups = [
        _candidate_group(config, copy, size, [at for at in points if at.ranks == size], threads) for size in copies
    ]
    with measurement.measure_groups(groups, settings, how, memory=False) as (rounds, folder):
        if rounds.code != ExitCode.DONE:
            return rounds.code
        if rounds.failures:
            first = rounds.failures[0]
            print(f"{first.strategy} on {first.world_size} ranks failed: {first.reason}", file=sys.stderr)
            return ExitCode.FAILED
        runs = _runs(folder, points, config, config.strategy, copy)
        alone = _runs(folder, [at for at in points if at.ranks > 1], config, NO_EXCHANGE, copy)
    chunks = [chunk for round_chunks in rounds.rounds for chunk in round_chunks]
    size, low_rank = max(chunk.weight_bytes for chunk in chunks), max(chunk.low_rank_bytes for chunk in chunks)
    title = (
        f"{config.task} on {chunks[0].device}, {format_strategy(config.strategy, str(copy))}, "
        f"{plural(threads, 'thread')} per process, {cores} cores, {size / 1e6:.1f} MB of gradients"
    )
    if copy.size > 1:
        title += f"; a rank below is a copy of the model on {copy.size} processes"
    machine = TrainingProperties(
        cores, threads * copy.size, size, has_split_model=copy.size > 1, low_rank_bytes=low_rank,
        uses_gloo=gpus == 0 or settings.launch.backend == "gloo",
    )  # fmt: skip
    notes = scaling_notes([count * copy.size for count in copies], rounds, cores, threads)
    return _publish(config, network, title, runs, alone, machine, (weak, strong), notes)


def _publish(
    config: ScaleConfig, network: Network | None, title: str, runs: Runs, alone: Runs, machine: TrainingProperties,
    batches: tuple[int | None, int | None], notes: list[str],
) -> int:  # fmt: skip
    """Publish efficiency, losses and estimates.

    `alone` are the runs without communication; empty if that was not measured. `batches` are the samples of each rank
    (weak scaling), and of all ranks together (strong scaling).
    """
    parts = scale.split_steps_by_point(runs, alone)
    modes = [(mode, batch) for mode, batch in zip(("weak", "strong"), batches, strict=True) if batch]
    lost = [row for mode, batch in modes for row in scale.compute_scaling_losses(runs, parts, machine, mode, batch)]
    estimates = scale.estimates_of(parts, machine, *batches, network) if network else []
    if network is None:
        notes = [*notes, "to estimate a step on more machines, specify their network: --network 100Gbit,5us"]
    scaled = scale.ScalingReport(title, lost, estimates, notes)
    measurement.publish(scaled, config.how, partial(scale.print_scaled, scaled))
    return ExitCode.DONE


def _model_copy_mesh(config: ScaleConfig) -> Mesh:
    mesh = Mesh.parse(config.mesh) if config.mesh else Mesh()
    if named := [name for name in BATCH_DIMENSIONS if name in mesh.sizes]:
        raise UsageError(code="scale-mesh-with-data", value=config.mesh, dimension=named[0])
    return mesh


def _copy_counts(config: ScaleConfig, copy: Mesh) -> list[int]:
    rank_counts = [ranks for ranks in parse_whole_numbers("--ranks", config.ranks) if ranks > 1 or copy.size == 1]
    if uneven := [ranks for ranks in rank_counts if ranks % copy.size]:
        raise UsageError(
            code="ranks-no-whole-copies", value=config.ranks, processes=uneven[0], size=copy.size, mesh=config.mesh,
            twice=2 * copy.size,
        )  # fmt: skip
    return sorted({1, *(ranks // copy.size for ranks in rank_counts)})


def _mesh(config: ScaleConfig, copy: Mesh, count: int) -> str:
    """The mesh of `count` copies; empty if each is one process."""
    return str(Mesh({"shard" if config.strategy == "fsdp" else "data": count, **copy.sizes})) if copy.size > 1 else ""


def points_to_measure(ranks: Sequence[int], weak: int | None, strong: int | None) -> list[ScalePoint]:
    """Each number of ranks at its batch sizes, and one rank at all of these batch sizes."""
    batches = [(size, batch) for size in ranks for batch in (weak, strong and strong // size) if batch]
    return sorted({ScalePoint(count, batch) for size, batch in batches for count in (size, 1)})


def _candidate_group(
    config: ScaleConfig, copy: Mesh, size: int, points: Sequence[ScalePoint], threads: int
) -> CandidateGroup:
    """The points on `size` ranks, or copies of the model, each with and without communication between them."""
    names, mesh = [config.strategy] if size == 1 else [config.strategy, NO_EXCHANGE], _mesh(config, copy, size)
    candidates = [Candidate(_name(name, at), name, at.batch, threads, mesh=mesh) for at in points for name in names]
    return CandidateGroup(size * copy.size, candidates)


def _name(strategy: str, at: ScalePoint) -> str:
    return f"{strategy.replace(' ', '-')}-b{at.batch}"


def _runs(folder: Path, points: Sequence[ScalePoint], config: ScaleConfig, strategy: str, copy: Mesh) -> Runs:
    def read(at: ScalePoint, number: int) -> RecordedSteps:
        run_folder = candidate_dir(folder, number, at.ranks * copy.size, _name(strategy, at))
        return scale.read_run(run_folder, skip=config.how.warmup)

    return {at: [read(at, number) for number in range(config.how.rounds)] for at in points}


def scaling_notes(ranks: Sequence[int], rounds: MeasuredRounds, cores: int, threads: int) -> list[str]:
    shared = [text for size in ranks if (text := measurement.core_sharing_text(size, threads, cores))]
    notes = [f"{text}: the threads compete for cores, so compute is slower" for text in shared]
    launch = {
        size: median(c.launch_seconds for chunks in rounds.rounds for c in chunks if c.world_size == size)
        for size in ranks
    }
    times = ", ".join(f"{seconds:.1f} s for {size}" for size, seconds in launch.items())
    return [*notes, f"not included: startup, from the command until all ranks are ready: {times}", *rounds.notes()]
