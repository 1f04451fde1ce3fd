"""`paceline scale`: measures efficiency on 1, 2, 4, ... ranks, names the largest cause of the loss, and estimates."""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Literal

from paceline.bench.estimate import Machine, estimates_of, parse_network
from paceline.bench.rounds import MeasuredRounds, ProcessSet, folder_of
from paceline.bench.runs import At, Run, Runs, comparable, over_network, read_run, read_runs, weight_bytes
from paceline.bench.scale import Scaled, lost_of, parts_of, print_scaled
from paceline.bench.spec import NO_EXCHANGE, Candidate
from paceline.cli import command_line
from paceline.cli.measuring import Measuring, check_measuring, crowd, measured, publish, settings_of
from paceline.cli.options import check_gpus, check_positive, usable_gpus, whole_numbers
from paceline.config.choices import DEFAULT, EXACT, FOR_SEVERAL, STRATEGY_INFO, StrategyName
from paceline.config.mesh import OF_BATCH, Mesh, strategy_on
from paceline.config.settings import DEFAULT_BATCH_SIZE, check_values
from paceline.errors import ExitCode, UsageError, plural, unknown
from paceline.host.cgroup import threads_per_rank, usable_cores

FEWEST_STEPS = 5
LARGEST_SHARE = 16  # times --batch-size, which one process must hold for strong scaling


@dataclass(frozen=True)
class ScaleConfig:
    """Measure the speedup by more ranks and the causes of lost time, and estimate a step on more machines."""

    task: str | None = None
    """mnist-cnn, mnist-resnet18, or a custom task: module:name or file.py:name"""
    runs: str | None = None
    """run folders to evaluate instead of a task, on 1 and more ranks, separated by commas"""
    ranks: str = "1,2,4"
    """numbers of processes, separated by commas; 1 is always measured (with --mesh, one copy of the model)"""
    strategy: StrategyName = DEFAULT
    """how the ranks share the work"""
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
    how: Measuring = field(default_factory=Measuring)


@dataclass(frozen=True)
class Points:
    """Runs on one rank and on several, measured or read, and what is known of their machine."""

    what: str
    runs: Runs
    alone: Runs
    """the same without exchange; empty where that was not measured"""
    machine: Machine
    batches: tuple[int | None, int | None]
    """of each rank, for weak scaling; of all together, for strong scaling"""
    notes: list[str]


def main(arguments: Sequence[str]) -> int:
    """Run `paceline scale ARGUMENTS`."""
    config: ScaleConfig = command_line("scale").parse(arguments)
    network = None if config.network is None else parse_network(config.network)
    _check(config)
    found = _read(config, config.runs) if config.runs else _measure(config)
    if isinstance(found, int):
        return found
    parts = parts_of(found.runs, found.alone)
    weak, strong = found.batches
    lost = [one for mode, batch in (("weak", weak), ("strong", strong)) if batch
            for one in lost_of(found.runs, parts, found.machine, mode, batch)]  # fmt: skip
    estimates = estimates_of(parts, found.machine, weak, strong, network) if network else []
    told = [] if network else ["for more machines, state the network between them: --network 100Gbit,5us"]
    scaled = Scaled(found.what, lost, estimates, [*found.notes, *told])
    publish(scaled, config.how, partial(print_scaled, scaled))
    return ExitCode.DONE


def _read(config: ScaleConfig, folders: str) -> Points:
    """Points from runs that have ended."""
    paths = [Path(word.strip()) for word in folders.split(",")]
    runs = read_runs(paths, skip=config.how.warmup)
    weak, strong = comparable(runs)
    size = weight_bytes(paths)
    # nobody knows their cores: as many as ranks
    cores, on_cpus = sum(at.ranks for at in runs), any(run.on_cpus for found in runs.values() for run in found)
    machine = Machine(cores, 1, size, over_network=over_network(runs), over_gloo=on_cpus)
    modes = (weak if config.mode != "strong" else None, strong if config.mode != "weak" else None)
    what = f"{len(paths)} runs, {size / 1e6:.1f} MB of weights; a backward by itself is estimated from that of one rank"
    return Points(what, runs, {}, machine, modes, [])


def _measure(config: ScaleConfig) -> Points | int:
    copy = _copy(config)
    ranks = _copies(config, copy)
    settings, how = settings_of(str(config.task), config.how, num_workers=config.num_workers), config.how
    if copy.size > 1:
        launch = replace(settings.launch, mesh=_mesh(config, copy, ranks[-1]))
        check_values(replace(settings, launch=launch, strategy=config.strategy))
    gpus = usable_gpus(settings.launch.device)
    check_gpus(f"--ranks {config.ranks}", ranks[-1] * copy.size, gpus, settings.launch.backend)
    cores = usable_cores()
    asked = how.threads_per_rank or settings.launch.threads_per_rank
    threads = asked or (1 if config.strategy in EXACT else threads_per_rank(cores, min(cores, ranks[-1] * copy.size)))
    weak = config.batch_size if config.mode != "strong" else None
    strong = config.batch_size * math.lcm(*ranks) if config.mode != "weak" else None
    points = points_to_measure(ranks, weak, strong)
    groups = [_group(config, copy, size, [at for at in points if at.ranks == size], threads) for size in ranks]
    with measured(groups, settings, how, memory=False) as (found, folder):
        if found.code != ExitCode.DONE:
            return found.code
        if found.failures:
            first = found.failures[0]
            print(f"{first.strategy} on {first.world_size} ranks failed: {first.reason}", file=sys.stderr)
            return ExitCode.FAILED
        runs = _runs(folder, points, config, config.strategy, copy)
        alone = _runs(folder, [at for at in points if at.ranks > 1], config, NO_EXCHANGE, copy)
    chunks = [chunk for each in found.rounds for chunk in each]
    size, low_rank = max(chunk.weight_bytes for chunk in chunks), max(chunk.low_rank_bytes for chunk in chunks)
    device = found.rounds[0][0].device
    what = (
        f"{config.task} on {device}, {strategy_on(config.strategy, str(copy))}, {plural(threads, 'thread')} a process, "
        f"{cores} cores, {size / 1e6:.1f} MB of gradients"
    )
    notes = scaling_notes([count * copy.size for count in ranks], found, cores, threads)
    if copy.size > 1:
        what += f"; a rank below is a copy of the model, which {copy.size} processes share"
    machine = Machine(
        cores, threads * copy.size, size, in_parts=copy.size > 1, low_rank_bytes=low_rank,
        over_gloo=gpus == 0 or settings.launch.backend == "gloo",
    )  # fmt: skip
    return Points(what, runs, alone, machine, (weak, strong), notes)


def _copy(config: ScaleConfig) -> Mesh:
    """How one copy of the model is shared.

    Raises:
        UsageError: the mesh says how many copies there are.
    """
    mesh = Mesh.parse(config.mesh) if config.mesh else Mesh()
    if named := [name for name in OF_BATCH if name in mesh.sizes]:
        raise UsageError(code="scale-mesh-with-data", value=config.mesh, dimension=named[0])
    return mesh


def _copies(config: ScaleConfig, copy: Mesh) -> list[int]:
    """How many copies of the model there are at each number of processes."""
    asked = [ranks for ranks in whole_numbers("--ranks", config.ranks) if ranks > 1 or copy.size == 1]
    if odd := [ranks for ranks in asked if ranks % copy.size]:
        raise UsageError(
            code="ranks-no-whole-copies", value=config.ranks, processes=odd[0], size=copy.size, mesh=config.mesh,
            twice=2 * copy.size,
        )  # fmt: skip
    return sorted({1, *(ranks // copy.size for ranks in asked)})


def _mesh(config: ScaleConfig, copy: Mesh, count: int) -> str:
    """The mesh of so many copies; empty where each is one process."""
    return str(Mesh({"shard" if config.strategy == "fsdp" else "data": count, **copy.sizes})) if copy.size > 1 else ""


def points_to_measure(ranks: Sequence[int], weak: int | None, strong: int | None) -> list[At]:
    """Every number of ranks at each batch that is compared, and one rank at all of them."""
    points: set[At] = set()
    for size in ranks:
        shares = [weak] if weak else []
        shares += [strong // size] if strong else []
        for share in shares:
            points |= {At(size, share), At(1, share)}
    return sorted(points)


def _check(config: ScaleConfig) -> None:
    if (config.task is None) == (config.runs is None):
        raise UsageError(code="scale-task-or-runs")
    copy, how = _copy(config), config.how
    if config.mesh and config.runs:
        raise UsageError(code="mesh-with-runs")
    ranks = _copies(config, copy)
    check_positive(config, "batch_size")
    check_measuring(how)
    if how.steps < FEWEST_STEPS:
        raise UsageError(code="too-few-steps", least=FEWEST_STEPS, value=how.steps)
    if ranks[-1] == 1:
        more = f"one copy of the model with: name a larger number, like {2 * copy.size}"
        more = more if copy.size > 1 else "one rank with: name a larger number, like 1,2"
        raise UsageError(code="nothing-to-compare", value=config.ranks, more=more)
    if STRATEGY_INFO[config.strategy].one_process:
        raise unknown("strategy for several processes", config.strategy, FOR_SEVERAL)
    if config.mode != "weak" and math.lcm(*ranks) > LARGEST_SHARE * ranks[-1]:
        raise UsageError(
            code="ranks-do-not-divide", value=config.ranks, common=math.lcm(*ranks), batch_size=config.batch_size
        )


def _group(config: ScaleConfig, copy: Mesh, size: int, points: Sequence[At], threads: int) -> ProcessSet:
    """The points on so many ranks, or copies of the model, each with and without exchange between them."""
    names, mesh = [config.strategy] if size == 1 else [config.strategy, NO_EXCHANGE], _mesh(config, copy, size)
    found = [Candidate(_name(name, at), name, at.batch, threads, mesh=mesh) for at in points for name in names]
    return ProcessSet(size * copy.size, found)


def _name(strategy: str, at: At) -> str:
    return f"{strategy.replace(' ', '-')}-b{at.batch}"


def _runs(folder: Path, points: Sequence[At], config: ScaleConfig, strategy: str, copy: Mesh) -> Runs:
    def read(at: At, number: int) -> Run:
        where = folder_of(folder, number, at.ranks * copy.size, _name(strategy, at))
        return read_run(where, skip=config.how.warmup)

    return {at: [read(at, number) for number in range(config.how.rounds)] for at in points}


def scaling_notes(ranks: Sequence[int], found: MeasuredRounds, cores: int, threads: int) -> list[str]:
    """Notes on the machine and its GPUs, and on what the steps leave out."""
    crowded = [words for size in ranks if (words := crowd(size, threads, cores))]
    notes = [f"{words}: they take turns, so slower compute must be expected" for words in crowded]
    launch = {
        size: median(c.launch_seconds for chunks in found.rounds for c in chunks if c.world_size == size)
        for size in ranks
    }
    told = ", ".join(f"{seconds:.1f} s for {size}" for size, seconds in launch.items())
    return [*notes, f"not in the steps: launch, from the command until all ranks are ready: {told}", *found.notes()]
