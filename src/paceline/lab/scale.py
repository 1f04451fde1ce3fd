"""The measurements of `paceline scale`: efficiency, the time lost to each cause, and an estimate for more machines.

    step = work + exchange on one machine + 2 (M-1) * latency + 2 (M-1)/M * bytes / rate

estimates a step on M machines like this one with one link each. The first two terms are measured
(view/step_parts.py), the others are those of a ring. docs/scaling.md says what the estimate leaves out.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import linear_regression, mean, median

import msgspec
from rich.table import Table

from paceline.errors import UsageError, plural
from paceline.lab.compare import Spread, make_table, spread
from paceline.report.run import PHASES
from paceline.report.step_parts import Run, Spent, StepParts, backward_per_forward, between_meetings, take_apart
from paceline.runs.console import table_console
from paceline.runs.events import Counted, Event, MemoryBreakdown, Started, Step, Traced, event_files, read_events
from paceline.runs.folder import WEIGHTS
from paceline.runs.reading import is_file, real_path

COMPUTE, DATA, EXCHANGE, WAITING = "slower compute", "data", "exposed communication", "waiting for the slowest rank"
SMALLER, REST = "smaller batch per rank", "rest"
LOST = ("ranks", "batch each", "samples/s", "step ms", "efficiency", "lost ms")
ESTIMATED = ("scaling", "ranks", "batch each", "step ms", "samples/s", "efficiency", "on")
NOISE = 0.02  # of the efficiency: less is not reported
MACHINES = (2, 4, 8, 16, 64, 512)
COMPARED_MACHINES = (2, 8)  # for which what reduces traffic is estimated
LOCAL_STEPS = 16
INT8_SHARE = (1 + 4 / 512) / 4  # a byte for each number, and a scale for each 512
EXAMPLES = "100Gbit,5us   10Gbit,30us   12.5GB,2us   1Gbit"
_SCALE = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30}
_RATE = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?(k|K|M|m|G|g|T|t|Ki|Mi|Gi)?(bit|bps|B)(?:/s|ps)?")
_TIME = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?(ns|us|\u00b5s|\u03bcs|ms|s)")  # two letters look like a Greek mu
_SECONDS = {"ns": 1e-9, "us": 1e-6, "\u00b5s": 1e-6, "\u03bcs": 1e-6, "ms": 1e-3, "s": 1.0}


class At(msgspec.Struct, frozen=True, order=True):
    """A number of ranks, and the samples of each in a step."""

    ranks: int
    batch: int


Runs = Mapping[At, Sequence[Run]]  # by round; all points have the same number of rounds
Points = Mapping[At, StepParts]  # the mean step on so many ranks with so many samples each


@dataclass(frozen=True)
class Share:
    """One cause of lost efficiency."""

    cause: str
    seconds: float  # of a step; negative where more ranks made it faster
    percent: float  # of all that was lost


class Lost(msgspec.Struct, frozen=True):
    """The loss on a number of ranks, in weak or strong scaling."""

    mode: str
    at: At
    samples_per_second: float
    step_seconds: float
    efficiency: Spread
    lost_seconds: float  # of each step
    shares: list[Share]
    slowest: int | None
    slow_phase: str
    crowd: float  # threads for each core, at least 1


@dataclass(frozen=True)
class Network:
    """The link of one machine."""

    bytes_per_second: float
    latency_seconds: float = 0.0


@dataclass(frozen=True)
class Sent:
    """The data that a machine sends to the others."""

    share: float  # of all bytes
    messages: float  # that follow each other; a message to all others at the same time is one
    every: int = 1  # steps


@dataclass(frozen=True)
class Machine:
    """The facts that all measured points share."""

    cores: int
    threads: int  # of each rank
    weight_bytes: int  # that ranks exchange in a step
    over_network: bool = False  # whether the measured ranks exchange over a network
    in_parts: bool = False  # whether a rank is a copy of the model that is split over several processes
    low_rank_bytes: int = 0  # that they exchange with --compress powersgd; 0: unknown
    over_gloo: bool = True  # its receiver requests each message first: a message takes the latency twice

    def crowd(self, ranks: int) -> float:
        """Threads per core, at least 1."""
        return max(1.0, ranks * self.threads / self.cores)


class Estimate(msgspec.Struct, frozen=True):
    """An estimated step."""

    mode: str
    at: At
    where: str
    step_seconds: float
    efficiency: float


class Scaled(msgspec.Struct, frozen=True):
    """Everything that is printed or written."""

    what: str
    lost: list[Lost]
    estimates: list[Estimate]
    notes: list[str]


def read_run(folder: Path, *, skip: int) -> Run:
    """The run in `folder`, without its first `skip` steps.

    Raises:
        UsageError: if there are no events, a rank's are missing, or the steps are too few or have no phases.
    """
    folder = real_path(folder)
    started: dict[int, Started] = {}
    steps: dict[int, dict[int, Spent]] = {}
    samples: dict[int, int] = {}
    for rank, path in event_files(folder).items():
        before: Event | None = None
        for event in read_events(path):
            if isinstance(event, Started):
                started[rank] = event
                steps[rank] = {}  # an earlier start's steps had other companions
            elif isinstance(event, Step) and event.steps == 1:  # a record of several steps has no phases of each
                steps.setdefault(rank, {})[event.step] = _spent(event, before)
                samples[event.step] = event.samples
            if not isinstance(event, Traced | MemoryBreakdown | Counted):
                before = event
    size = max((start.world_size for start in started.values()), default=0)
    missing = sorted({*range(size)} - {*started})
    if not started or missing:
        what = f"the events of rank {missing[0]} of {size} are missing" if missing else "there are no events of a run"
        raise UsageError(code="no-run-to-compare", folder=folder, what=what)
    ranks = range(size)
    common = sorted(set[int].intersection(*({*steps[rank]} for rank in ranks)))[skip:]
    if len(common) < 2:
        raise UsageError(code="run-too-short", folder=folder, least=skip + 2, skip=skip)
    if not all(steps[rank][number].forward for rank in ranks for number in common):
        raise UsageError(code="run-without-phases", folder=folder)
    return Run(
        steps=[{rank: steps[rank][number] for rank in ranks} for number in common],
        samples=sum(samples[number] for number in common) / len(common),
        hosts={rank: started[rank].host for rank in ranks},
        on_cpus=any(started[rank].device == "cpu" for rank in ranks),
    )


def _spent(step: Step, before: Event | None) -> Spent:
    phases = {name: step.phase_seconds.get(name, 0.0) for name in PHASES}
    if not isinstance(before, Step) or before.steps > 1:
        return Spent(**phases, seconds=step.seconds)
    between = step.unix_time - before.unix_time - step.seconds
    return between_meetings(phases, step.seconds, between, before.phase_seconds.get("optimizer", 0.0))


def read_runs(folders: Sequence[Path], *, skip: int) -> Runs:
    """The runs in these folders, by ranks and samples of each; several of one point are its rounds.

    Raises:
        UsageError: if none of them is of one rank, or none of several, or a folder cannot be read.
    """
    runs: dict[At, list[Run]] = {}
    for folder in folders:
        run = read_run(folder, skip=skip)
        runs.setdefault(At(run.world_size, round(run.samples / run.world_size)), []).append(run)
    sizes = sorted({at.ranks for at in runs})
    if len(sizes) < 2 or sizes[0] != 1:
        raise UsageError(
            code="runs-without-one-rank", sizes=", ".join(map(str, sizes)), plural="s" if sizes[-1] > 1 else ""
        )
    rounds = min(map(len, runs.values()))
    return {at: repeated[:rounds] for at, repeated in runs.items()}


def comparable(runs: Runs) -> tuple[int | None, int | None]:
    """(samples of each rank, of all together) at which one rank can be compared with others; None if it cannot."""
    alone, others = [at.batch for at in runs if at.ranks == 1], [at for at in runs if at.ranks > 1]
    weak = [batch for batch in alone if any(at.batch == batch for at in others)]
    strong = [batch for batch in alone if any(at.ranks * at.batch == batch for at in others)]
    if not weak and not strong:
        raise UsageError(code="runs-do-not-match", told=", ".join(f"{at.ranks} x {at.batch}" for at in sorted(runs)))
    return max(weak, default=None), max(strong, default=None)


def over_network(runs: Runs) -> bool:
    """Whether the ranks of any of these runs were on several hosts."""
    return any(len({*run.hosts.values()}) > 1 for rounds in runs.values() for run in rounds)


def weight_bytes(folders: Sequence[Path]) -> int:
    """The bytes that ranks exchange in a step, estimated by the size of the saved weights."""
    return max((path.stat().st_size for folder in folders if is_file(path := folder / WEIGHTS)), default=0)


def parts_of(runs: Runs, alone: Runs) -> dict[At, StepParts]:
    """Split the middle round of each point into parts; `alone` are runs without exchange, if there are any."""
    base = next((_middle(rounds) for at, rounds in sorted(runs.items()) if at.ranks == 1), None)
    parts: dict[At, StepParts] = {}
    for at, rounds in runs.items():
        without = _middle(alone[at]) if alone.get(at) else base
        parts[at] = take_apart(_middle(rounds), backward_per_forward(without) if without and at.ranks > 1 else None)
    return parts


def lost_of(runs: Runs, parts: Points, machine: Machine, mode: str, batch: int) -> list[Lost]:
    """The loss on each number of ranks above 1; `batch` is that of each rank (weak), or of all together (strong)."""
    found: list[Lost] = []
    for ranks in sorted({at.ranks for at in runs}):
        at = At(ranks, batch if mode == "weak" else batch // ranks)
        base = At(1, batch)
        if ranks == 1 or at not in runs or base not in runs:
            continue
        work = 1 if mode == "weak" else ranks  # a rank has 1/work of the samples that one rank alone has
        ratios = [a.step_seconds / work / b.step_seconds for a, b in zip(runs[base], runs[at], strict=True)]
        alone, many = parts[base], parts[at]
        shares = lost_shares(alone, many, work, parts.get(At(1, at.batch)) if mode == "strong" else None)
        found.append(
            Lost(
                mode,
                at,
                samples_per_second=_middle(runs[at]).samples / many.step,
                step_seconds=many.step,
                efficiency=spread(ratios),
                lost_seconds=many.step - alone.step / work,
                shares=shares,
                slowest=many.slowest,
                slow_phase=many.slow_phase,
                crowd=machine.crowd(ranks),
            )
        )
    return found


def lost_shares(base: StepParts, parts: StepParts, work: int = 1, small: StepParts | None = None) -> list[Share]:
    """Causes of a step longer than that of one rank with `work` times the samples, divided by `work`; largest first.

    `small` is one rank with the samples of each rank, so it shows the cost of the smaller batch (strong scaling).
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
    shares = [Share(cause, seconds, 100 * seconds / lost if lost else 0.0) for cause, seconds in causes.items()]
    return sorted(shares, key=lambda share: -share.seconds)


def _middle(runs: Sequence[Run]) -> Run:
    middle = median([run.step_seconds for run in runs])
    return min(runs, key=lambda run: abs(run.step_seconds - middle))


def estimates_of(points: Points, machine: Machine, weak: int | None, strong: int | None, link: Network
                 ) -> list[Estimate]:  # fmt: skip
    """Estimate steps on more machines like this one over `link`; for `weak` also with settings that reduce traffic."""
    estimates = list[Estimate]()
    here = _ranks_each(points, machine)

    def add(count: int, mode: str, batch: int, sent: Sent, where: str) -> None:
        work = 1 if mode == "weak" else count * here
        if own := batch // work:
            seconds = estimated_step(points, machine, count, own, link, sent)
            alone = _work_alone(points, batch) / work
            estimates.append(Estimate(mode, At(count * here, own), where, seconds, alone / seconds if seconds else 0.0))

    for count in MACHINES:
        for mode, batch in (("weak", weak), ("strong", strong)):
            if batch:
                where = f"{count} machines, {plural(here, 'rank')} each"
                add(count, mode, batch, Sent(1.0, ring_messages(count)), where)
    for count in COMPARED_MACHINES if weak else ():
        for words, sent in less_traffic(machine, count):
            add(count, "weak", weak or 0, sent, f"{count} machines, {words}")
    return estimates


def estimated_step(points: Points, machine: Machine, count: int, batch: int, link: Network, sent: Sent | None = None
                   ) -> float:  # fmt: skip
    """Seconds of a step on `count` machines, each of whose ranks has `batch` samples."""
    here, sent = _ranks_each(points, machine), sent or Sent(1.0, ring_messages(count))
    work, inside = _work_alone(points, batch), 0.0
    if here > 1:  # ranks of one machine slow each other down, and wait for the slowest
        full = {at: parts for at, parts in points.items() if at.ranks == here}
        inside = mean(parts.exchange for parts in full.values())
        work *= mean((parts.step - parts.exchange) / _work_alone(points, at.batch) for at, parts in full.items())
    latency = link.latency_seconds * (2 if machine.over_gloo else 1)
    between = sent.messages * latency + ring_volume(count) * sent.share * machine.weight_bytes / link.bytes_per_second
    return work + inside + between / sent.every


def _ranks_each(points: Points, machine: Machine) -> int:
    """The most ranks measured that have cores of their own."""
    return max((at.ranks for at in points if machine.crowd(at.ranks) <= 1 and not machine.over_network), default=1)


def _work_alone(points: Points, batch: int) -> float:
    """Seconds that one rank takes for `batch` samples: measured, or on the line through the measured points."""
    alone = {at.batch: parts.step for at, parts in points.items() if at.ranks == 1}
    if batch in alone:
        return alone[batch]
    if len(alone) == 1:
        [(size, seconds)] = alone.items()
        return seconds * batch / size
    slope, start = linear_regression(list(alone), list(alone.values()))
    return max(slope * batch + start, min(seconds * batch / size for size, seconds in alone.items()))


def less_traffic(machine: Machine, count: int) -> list[tuple[str, Sent]]:
    """The settings that reduce the traffic of `count` machines, by name; without those whose bytes are unknown."""
    if machine.in_parts:  # cannot be compressed
        return []
    settings = [("--compress bf16", Sent(0.5, 2)), ("--compress int8", Sent(INT8_SHARE, 2))]
    if machine.low_rank_bytes:
        sums = 2 * (1 if count == 2 else ring_messages(count))  # two machines send each other theirs
        settings += [("--compress powersgd", Sent(machine.low_rank_bytes / machine.weight_bytes, sums))]
    return [*settings, (f"--local-steps {LOCAL_STEPS}", Sent(1.0, ring_messages(count), LOCAL_STEPS))]


def ring_messages(ranks: int) -> float:
    """The messages of a ring all-reduce that follow each other."""
    return 2.0 * (ranks - 1)


def ring_volume(ranks: int) -> float:
    """The bytes that each rank of a ring all-reduce sends, in units of the size of the gradients."""
    return 2.0 * (ranks - 1) / ranks


def print_scaled(scaled: Scaled) -> None:
    """Print the tables and the notes."""
    console = table_console(160)
    console.print(scaled.what, markup=False)
    for mode in ("weak", "strong"):
        if rows := [lost for lost in scaled.lost if lost.mode == mode]:
            console.print(_lost_table(mode, rows))
            for lost in rows:
                console.print(loss_sentence(lost), markup=False)
    if scaled.estimates:
        console.print(_estimate_table(scaled.estimates))
    for note in scaled.notes:
        console.print(note, markup=False)


def loss_sentence(lost: Lost) -> str:
    """The loss, and its largest cause."""
    ranks = f"{lost.at.ranks} ranks, {lost.mode}"
    gone = 100 * (1 - lost.efficiency.median)
    if gone < 100 * NOISE:
        return f"{ranks}: nothing to speak of is lost ({gone:.0f} %)"
    first = lost.shares[0]
    return f"{ranks}: {gone:.0f} % is lost, most of it ({first.percent:.0f} %) to {first.cause}{_who(lost)}"


def _who(lost: Lost) -> str:
    """The rank or the threads that make the largest share, in brackets; empty if they are unknown."""
    cause = lost.shares[0].cause
    if cause == WAITING and lost.slowest is not None:
        return f" (rank {lost.slowest}, in its {lost.slow_phase})"
    turns = f"{lost.crowd:g} threads for each core" if lost.crowd > 1 else ""
    if cause == WAITING:
        return f" (another one each time{turns and '; ' + turns})"
    return f" ({turns})" if cause == COMPUTE and turns else ""


def _lost_table(mode: str, rows: Sequence[Lost]) -> Table:
    what = "as many samples for each rank" if mode == "weak" else "as many samples for all ranks together"
    table = make_table(LOST, f"{mode} scaling ({what})")
    for lost in rows:
        ratio = lost.efficiency
        efficiency = f"{ratio.median:.2f} ({ratio.low:.2f}-{ratio.high:.2f})"
        numbers = (f"{lost.samples_per_second:,.0f}", f"{lost.step_seconds * 1000:.1f}", efficiency)
        table.add_row(str(lost.at.ranks), str(lost.at.batch), *numbers, f"{lost.lost_seconds * 1000:.1f}")
    return table


def _estimate_table(rows: Sequence[Estimate]) -> Table:
    table = make_table(ESTIMATED, "ESTIMATED, not measured (docs/scaling.md)")
    for row in rows:
        rate = row.at.ranks * row.at.batch / row.step_seconds
        numbers = (f"{row.step_seconds * 1000:.1f}", f"{rate:,.0f}", f"{row.efficiency:.2f}", row.where)
        table.add_row(row.mode, str(row.at.ranks), str(row.at.batch), *numbers)
    return table


def parse_network(text: str) -> Network:
    """Parse a link such as "100Gbit,5us": a rate, and after a comma the latency of one message (default 0).

    Raises:
        UsageError: for a text that does not describe a link.
    """
    rate, comma, latency = (part.strip() for part in text.partition(","))
    speed, delay = _RATE.fullmatch(rate), _TIME.fullmatch(latency)
    if speed is None or float(speed[1]) <= 0:
        reason = f"{rate!r} is no rate above 0: a number, then Gbit, Mbit, GB, MB (bits or bytes a second)"
    elif comma and delay is None:
        reason = f"{latency!r} is no time: a number, then us, ms or ns"
    else:
        # k, m, g, t in either case, as tc and people write them: a rate is never in thousandths
        prefix = speed[2] or ""
        prefix = prefix if len(prefix) == 2 else {"K": "k", "m": "M", "g": "G", "t": "T"}.get(prefix, prefix)
        bytes_per_second = float(speed[1]) * (_SCALE[prefix] * (1.0 if speed[3] == "B" else 1 / 8))
        return Network(bytes_per_second, float(delay[1]) * _SECONDS[delay[2]] if delay else 0.0)
    raise UsageError(code="network-not-understood", value=text, reason=reason, examples=EXAMPLES)
