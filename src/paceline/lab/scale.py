"""The measurements of `paceline scale`: efficiency, the time lost to each cause, and an estimate for more nodes.

    step = work + exchange on one node + 2 (M-1) * latency + 2 (M-1)/M * bytes / rate

estimates a step on M nodes like this one with one link each. The first two terms are measured
(report/step_parts.py), the others are those of a ring. docs/scaling.md describes the limits of the estimate.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import linear_regression, mean, median

import msgspec
from rich.table import Table

from paceline.errors import UsageError, plural
from paceline.lab.compare import Quartiles, make_empty_table, quartiles
from paceline.report import step_parts
from paceline.report.run import RunData, load_rank_events
from paceline.runs.console import table_console
from paceline.runs.folder import WEIGHTS
from paceline.runs.reading import is_file, real_path

COMPUTE, DATA, EXCHANGE, WAITING = "slower compute", "data", "exposed communication", "waiting for the slowest rank"
SMALLER, REST = "smaller batch per rank", "rest"
LOSS_COLUMNS = ("ranks", "batch each", "samples/s", "step ms", "efficiency", "lost ms")
ESTIMATE_COLUMNS = ("scaling", "ranks", "batch each", "step ms", "samples/s", "efficiency", "on")
MIN_REPORTED_LOSS = 0.02  # a smaller loss of efficiency is not reported
ESTIMATED_NODE_COUNTS = (2, 4, 8, 16, 64, 512)
COMPARED_NODE_COUNTS = (2, 8)  # estimated also with settings that reduce traffic
LOCAL_STEPS = 16
INT8_FRACTION = (1 + 4 / 512) / 4  # a byte per number, and a scale per 512 numbers
EXAMPLES = "100Gbit,5us   10Gbit,30us   12.5GB,2us   1Gbit"
_SCALE = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30}
_RATE = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?(k|K|M|m|G|g|T|t|Ki|Mi|Gi)?(bit|bps|B)(?:/s|ps)?")
_TIME = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?(ns|us|\u00b5s|\u03bcs|ms|s)")  # the micro sign and the Greek mu
_SECONDS = {"ns": 1e-9, "us": 1e-6, "\u00b5s": 1e-6, "\u03bcs": 1e-6, "ms": 1e-3, "s": 1.0}


class ScalePoint(msgspec.Struct, frozen=True, order=True):
    """A number of ranks, and the samples per rank in a step."""

    ranks: int
    batch: int


Runs = Mapping[ScalePoint, Sequence[step_parts.RecordedSteps]]  # by round; all points have the same number of rounds
StepPartsByPoint = Mapping[ScalePoint, step_parts.StepParts]  # the mean step at each point


@dataclass(frozen=True)
class ScalingLossShare:
    cause: str
    seconds: float  # of a step; negative if more ranks made it faster
    percent: float  # of the total loss


class ScalingLoss(msgspec.Struct, frozen=True):
    mode: str
    at: ScalePoint
    samples_per_second: float
    step_seconds: float
    efficiency: Quartiles
    lost_seconds: float  # per step
    shares: list[ScalingLossShare]
    slowest: int | None
    slow_phase: str
    crowd: float  # threads per core, at least 1


@dataclass(frozen=True)
class NetworkSpeed:
    bytes_per_second: float
    latency_seconds: float = 0.0


@dataclass(frozen=True)
class ExchangeCost:
    fraction: float  # of the uncompressed bytes
    messages: float  # sequential; one message to all others at the same time counts once
    steps_per_exchange: int = 1  # steps between two exchanges


@dataclass(frozen=True)
class ScalingInputs:
    cores: int
    threads: int  # per rank
    weight_bytes: int  # that ranks exchange per step
    exchanges_over_network: bool = False  # whether the measured ranks exchange over a network
    has_split_model: bool = False  # whether a "rank" is a copy of the model that is split over several processes
    low_rank_bytes: int = 0  # that ranks exchange with --compress powersgd; 0: unknown
    uses_gloo: bool = True  # its receiver requests each message first, so a message takes the latency twice

    def core_oversubscription(self, ranks: int) -> float:
        return max(1.0, ranks * self.threads / self.cores)


class ScalingEstimate(msgspec.Struct, frozen=True):
    mode: str
    at: ScalePoint
    where: str
    step_seconds: float
    efficiency: float


class ScalingReport(msgspec.Struct, frozen=True):
    what: str
    lost: list[ScalingLoss]
    estimates: list[ScalingEstimate]
    notes: list[str]


def read_run_steps(folder: Path, *, skip: int) -> step_parts.RecordedSteps:
    run = RunData(real_path(folder))
    load_rank_events(run)
    logs, size = run.newest_rank_logs(), run.world_size
    missing = sorted({*range(size)} - {log.rank for log in logs})
    fault = f"the events of rank {missing[0]} of {size} are missing" if missing else ""
    if fault := next(iter(run.unreadable_parts), fault if logs else "there are no events of a run"):
        raise UsageError(code="no-run-to-compare", folder=run.folder, what=fault)
    # a record of several steps has no phases per step
    single = step_parts.rows_by_common_step(logs, logs[0].start_events[-1].start_step).values()
    rows = [of for of in single if all(log.steps.covered[row] == 1 for log, row in zip(logs, of, strict=True))][skip:]
    if len(rows) < 2:
        raise UsageError(code="run-too-short", folder=run.folder, least=skip + 2, skip=skip)
    steps = [step_parts.phase_seconds_by_rank(logs, of) for of in rows]
    if not all(spent.forward for step in steps for spent in step.values()):
        raise UsageError(code="run-without-phases", folder=run.folder)
    samples = sum(logs[0].steps.samples[first] for first, *_ in rows)
    on_cpus = any(log.start_events[-1].device == "cpu" for log in logs)
    return step_parts.RecordedSteps(steps, samples / len(rows), run.hosts, on_cpus)


def read_runs(folders: Sequence[Path], *, skip: int) -> Runs:
    runs: dict[ScalePoint, list[step_parts.RecordedSteps]] = {}
    for folder in folders:
        run = read_run_steps(folder, skip=skip)
        runs.setdefault(ScalePoint(run.world_size, round(run.mean_global_batch / run.world_size)), []).append(run)
    sizes = sorted({at.ranks for at in runs})
    if len(sizes) < 2 or sizes[0] != 1:
        raise UsageError(
            code="runs-without-one-rank", sizes=", ".join(map(str, sizes)), plural="s" if sizes[-1] > 1 else ""
        )
    rounds = min(map(len, runs.values()))
    return {at: repeated[:rounds] for at, repeated in runs.items()}


def weak_and_strong_batches(runs: Runs) -> tuple[int | None, int | None]:
    """(samples per rank, global samples) at which one rank can be compared with several ranks; None if it cannot."""
    batches_alone, others = [at.batch for at in runs if at.ranks == 1], [at for at in runs if at.ranks > 1]
    weak = [batch for batch in batches_alone if any(at.batch == batch for at in others)]
    strong = [batch for batch in batches_alone if any(at.ranks * at.batch == batch for at in others)]
    if not weak and not strong:
        raise UsageError(code="runs-do-not-match", runs=", ".join(f"{at.ranks} x {at.batch}" for at in sorted(runs)))
    return max(weak, default=None), max(strong, default=None)


def used_several_hosts(runs: Runs) -> bool:
    return any(len({*run.hosts.values()}) > 1 for rounds in runs.values() for run in rounds)


def estimate_exchanged_bytes(folders: Sequence[Path]) -> int:
    return max((path.stat().st_size for folder in folders if is_file(path := folder / WEIGHTS)), default=0)


def step_parts_by_point(runs: Runs, alone: Runs) -> dict[ScalePoint, step_parts.StepParts]:
    """Split the median round of each point into parts. `alone` are runs without exchange, if there are any."""
    base = next((_median_run(rounds) for at, rounds in sorted(runs.items()) if at.ranks == 1), None)
    parts: dict[ScalePoint, step_parts.StepParts] = {}
    for at, rounds in runs.items():
        reference = _median_run(alone[at]) if alone.get(at) else base
        ratio = step_parts.backward_to_forward_ratio(reference) if reference and at.ranks > 1 else None
        parts[at] = step_parts.split_step_time(_median_run(rounds), ratio)
    return parts


def compute_scaling_losses(
    runs: Runs, parts: StepPartsByPoint, setup: ScalingInputs, mode: str, batch: int
) -> list[ScalingLoss]:
    """The loss on each number of ranks above 1. `batch` is per rank (weak scaling), or global (strong scaling)."""
    losses: list[ScalingLoss] = []
    for ranks in sorted({at.ranks for at in runs}):
        at = ScalePoint(ranks, batch if mode == "weak" else batch // ranks)
        base = ScalePoint(1, batch)
        if ranks == 1 or at not in runs or base not in runs:
            continue
        work = 1 if mode == "weak" else ranks  # a rank has 1/work of the samples of the single rank
        ratios = [a.mean_step_seconds / work / b.mean_step_seconds for a, b in zip(runs[base], runs[at], strict=True)]
        single, several = parts[base], parts[at]
        small = parts.get(ScalePoint(1, at.batch)) if mode == "strong" else None
        shares = slowdown_causes(single, several, work, small)
        losses.append(
            ScalingLoss(
                mode,
                at,
                samples_per_second=_median_run(runs[at]).mean_global_batch / several.step,
                step_seconds=several.step,
                efficiency=quartiles(ratios),
                lost_seconds=several.step - single.step / work,
                shares=shares,
                slowest=several.slowest,
                slow_phase=several.slow_phase,
                crowd=setup.core_oversubscription(ranks),
            )
        )
    return losses


def slowdown_causes(
    base: step_parts.StepParts, parts: step_parts.StepParts, work: int = 1, small: step_parts.StepParts | None = None
) -> list[ScalingLossShare]:
    """The causes of a longer step than on one rank, which has `work` times the samples; the largest first.

    The step of the one rank is divided by `work`. `small` is one rank with the samples of each rank. It shows the cost
    of the smaller batch (strong scaling).
    """
    causes = {
        COMPUTE: parts.compute - base.compute / work,
        DATA: parts.data - base.data / work,
        EXCHANGE: parts.exchange - base.exchange / work,
        WAITING: parts.waiting - base.waiting / work,
    }
    if small is not None:
        causes[SMALLER] = small.compute - base.compute / work
        causes[COMPUTE] = parts.compute - small.compute
    lost = parts.step - base.step / work
    causes[REST] = lost - sum(causes.values())
    largest_first = sorted(causes.items(), key=lambda item: -item[1])
    return [ScalingLossShare(cause, s, 100 * s / lost if lost else 0.0) for cause, s in largest_first]


def _median_run(runs: Sequence[step_parts.RecordedSteps]) -> step_parts.RecordedSteps:
    middle = median([run.mean_step_seconds for run in runs])
    return min(runs, key=lambda run: abs(run.mean_step_seconds - middle))


def estimate_scaling(points: StepPartsByPoint, setup: ScalingInputs, weak: int | None, strong: int | None,
                 link: NetworkSpeed) -> list[ScalingEstimate]:  # fmt: skip
    """Estimate steps on more nodes like this one over `link`, for `weak` also with settings that reduce traffic."""
    estimates = list[ScalingEstimate]()
    ranks_each = _ranks_each(points, setup)
    modes = [(mode, batch) for mode, batch in (("weak", weak), ("strong", strong)) if batch]
    each = f"{plural(ranks_each, 'rank')} each"
    cases = [
        (count, mode, batch, each, ExchangeCost(1.0, ring_message_count(count)))
        for count in ESTIMATED_NODE_COUNTS for mode, batch in modes
    ] + [
        (count, "weak", weak, setting, traffic)
        for count in COMPARED_NODE_COUNTS if weak for setting, traffic in traffic_reducing_settings(setup, count)
    ]  # fmt: skip
    for count, mode, batch, setting, traffic in cases:
        work = 1 if mode == "weak" else count * ranks_each
        if per_rank := batch // work:
            seconds = estimate_step_seconds(points, setup, count, per_rank, link, traffic)
            seconds_alone = _single_rank_seconds(points, batch) / work
            at, where = ScalePoint(count * ranks_each, per_rank), f"{count} nodes, {setting}"
            estimates.append(ScalingEstimate(mode, at, where, seconds, seconds_alone / seconds if seconds else 0.0))
    return estimates


def estimate_step_seconds(
    points: StepPartsByPoint, setup: ScalingInputs, count: int, batch: int, link: NetworkSpeed,
    sent: ExchangeCost | None = None,
) -> float:  # fmt: skip
    """Seconds of a step on `count` nodes, with `batch` samples per rank."""
    ranks_each, sent = _ranks_each(points, setup), sent or ExchangeCost(1.0, ring_message_count(count))
    work, inside = _single_rank_seconds(points, batch), 0.0
    if ranks_each > 1:  # ranks of one node slow each other down, and wait for the slowest
        full = [(at.batch, parts) for at, parts in points.items() if at.ranks == ranks_each]
        inside = mean(parts.exchange for _, parts in full)
        work *= mean((parts.step - parts.exchange) / _single_rank_seconds(points, size) for size, parts in full)
    latency = link.latency_seconds * (2 if setup.uses_gloo else 1)
    sent_bytes = 2.0 * (count - 1) / count * sent.fraction * setup.weight_bytes  # of a ring all-reduce
    between = sent.messages * latency + sent_bytes / link.bytes_per_second
    return work + inside + between / sent.steps_per_exchange


def _ranks_each(points: StepPartsByPoint, setup: ScalingInputs) -> int:
    if setup.exchanges_over_network:
        return 1
    return max((at.ranks for at in points if setup.core_oversubscription(at.ranks) <= 1), default=1)


def _single_rank_seconds(points: StepPartsByPoint, batch: int) -> float:
    """Seconds that one rank takes for `batch` samples: measured, or from a line through the measured points."""
    seconds_by_batch = {at.batch: parts.step for at, parts in points.items() if at.ranks == 1}
    if batch in seconds_by_batch:
        return seconds_by_batch[batch]
    if len(seconds_by_batch) == 1:
        [(size, seconds)] = seconds_by_batch.items()
        return seconds * batch / size
    slope, start = linear_regression(list(seconds_by_batch), list(seconds_by_batch.values()))
    return max(slope * batch + start, min(seconds * batch / size for size, seconds in seconds_by_batch.items()))


def traffic_reducing_settings(setup: ScalingInputs, count: int) -> list[tuple[str, ExchangeCost]]:
    """The settings that reduce the traffic of `count` nodes, by name, except those with an unknown size."""
    if setup.has_split_model:  # does not support compression
        return []
    settings = [("--compress bf16", ExchangeCost(0.5, 2)), ("--compress int8", ExchangeCost(INT8_FRACTION, 2))]
    if setup.low_rank_bytes:
        sums = 2 * (1 if count == 2 else ring_message_count(count))  # two nodes exchange directly
        settings += [("--compress powersgd", ExchangeCost(setup.low_rank_bytes / setup.weight_bytes, sums))]
    return [*settings, (f"--local-steps {LOCAL_STEPS}", ExchangeCost(1.0, ring_message_count(count), LOCAL_STEPS))]


def ring_message_count(ranks: int) -> float:
    return 2.0 * (ranks - 1)


def print_scaling_report(scaled: ScalingReport) -> None:
    console = table_console(160)
    console.print(scaled.what, markup=False)
    for mode in ("weak", "strong"):
        if rows := [lost for lost in scaled.lost if lost.mode == mode]:
            console.print(_lost_table(mode, rows))
            for lost in rows:
                console.print(describe_scaling_loss(lost), markup=False)
    if scaled.estimates:
        console.print(_estimate_table(scaled.estimates))
    for note in scaled.notes:
        console.print(note, markup=False)


def describe_scaling_loss(lost: ScalingLoss) -> str:
    ranks = f"{lost.at.ranks} ranks, {lost.mode}"
    percent = 100 * (1 - lost.efficiency.median)
    if percent < 100 * MIN_REPORTED_LOSS:
        return f"{ranks}: no significant loss ({percent:.0f} %)"
    first = lost.shares[0]
    return f"{ranks}: {percent:.0f} % is lost, most of it ({first.percent:.0f} %) to {first.cause}{_origin(lost)}"


def _origin(lost: ScalingLoss) -> str:
    """The rank or the threads behind the largest cause, in parentheses; empty if unknown."""
    cause = lost.shares[0].cause
    if cause == WAITING and lost.slowest is not None:
        return f" (rank {lost.slowest}, in its {lost.slow_phase})"
    threads = f"{lost.crowd:g} threads per core" if lost.crowd > 1 else ""
    if cause == WAITING:
        return f" (a different rank in each step{threads and '; ' + threads})"
    return f" ({threads})" if cause == COMPUTE and threads else ""


def _lost_table(mode: str, rows: Sequence[ScalingLoss]) -> Table:
    constant = "the same batch per rank" if mode == "weak" else "the same global batch"
    table = make_empty_table(LOSS_COLUMNS, f"{mode} scaling ({constant})")
    for lost in rows:
        ratio = lost.efficiency
        efficiency = f"{ratio.median:.2f} ({ratio.low:.2f}-{ratio.high:.2f})"
        numbers = (f"{lost.samples_per_second:,.0f}", f"{lost.step_seconds * 1000:.1f}", efficiency)
        table.add_row(str(lost.at.ranks), str(lost.at.batch), *numbers, f"{lost.lost_seconds * 1000:.1f}")
    return table


def _estimate_table(rows: Sequence[ScalingEstimate]) -> Table:
    table = make_empty_table(ESTIMATE_COLUMNS, "ESTIMATED, not measured (docs/scaling.md)")
    for row in rows:
        rate = row.at.ranks * row.at.batch / row.step_seconds
        numbers = (f"{row.step_seconds * 1000:.1f}", f"{rate:,.0f}", f"{row.efficiency:.2f}", row.where)
        table.add_row(row.mode, str(row.at.ranks), str(row.at.batch), *numbers)
    return table


def parse_network(text: str) -> NetworkSpeed:
    """Parse a link such as "100Gbit,5us": a rate, and after a comma the latency of one message (default 0)."""
    rate, comma, latency = (part.strip() for part in text.partition(","))
    speed, delay = _RATE.fullmatch(rate), _TIME.fullmatch(latency)
    if speed is None or float(speed[1]) <= 0:
        reason = f"{rate!r} is not a rate above 0: use a number, then Gbit, Mbit, GB, MB (bits or bytes per second)"
    elif comma and delay is None:
        reason = f"{latency!r} is not a time: use a number, then us, ms or ns"
    else:
        # k, m, g, t in either case, as for tc: a rate is never in thousandths
        prefix = speed[2] or ""
        prefix = prefix if len(prefix) == 2 else {"K": "k", "m": "M", "g": "G", "t": "T"}.get(prefix, prefix)
        bytes_per_second = float(speed[1]) * (_SCALE[prefix] * (1.0 if speed[3] == "B" else 1 / 8))
        return NetworkSpeed(bytes_per_second, float(delay[1]) * _SECONDS[delay[2]] if delay else 0.0)
    raise UsageError(code="network-not-understood", value=text, reason=reason, examples=EXAMPLES)
