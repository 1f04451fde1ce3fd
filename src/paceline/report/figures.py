"""The figures of a run's page for plotly's JavaScript: plain data, thinned, without any text of HTML. And the
drawings of how the run works (`paceline report --explain`): templates/explain.svg, filled in with its own numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from statistics import mean, median
from typing import TYPE_CHECKING, Any

from paceline.errors import plural
from paceline.report.run import PHASES, RankLog, WholeRun
from paceline.runs.console import clean
from paceline.runs.events import Evaluated, Traced
from paceline.runs.machine import MachineUse

if TYPE_CHECKING:
    from markupsafe import Markup

POINTS = 600  # of a line, at most; of each stretch its lowest and its highest are kept
MOST_LINES = 16
MOST_ROWS = 64  # ranks in a bar chart or a matrix
MOST_DRAWN_RANKS, MOST_LANES, MOST_BOXES = 8, 4, 300
# Okabe and Ito's colours, which the colour-blind can tell apart; the page has darker or lighter ones of the same hue
COLOURS = ("blue", "orange", "green", "pink", "sky", "red", "yellow", "grey")
DASHES = ("solid", "dash", "dot", "dashdot")
PHASE_COLOURS = {"data": "orange", "forward": "sky", "backward": "blue", "sync": "grey", "optimizer": "green"}
PATTERNS = ("", "/", "", "\\", "x", ".")  # beside the colour, so that a print in grey can be read
NOTHING = 0.005  # of a figure's unit: what never gets higher is left out
AXES = ["samples", "minutes", "steps"]
SMALL_BYTES = 1024  # of collectives that carry no tensor of the model
UPDATES = {"zero": "updates its shard, sends it", "fsdp": "updates its shard"}


@dataclass(frozen=True)
class Figure:
    """One figure."""

    name: str  # an identifier
    title: str
    words: str  # a description, for readers who do not see it
    traces: list[dict[str, Any]]
    x: str = ""
    y: str = ""
    kind: str = "lines"  # lines, bars, matrix, marks
    axes: list[str] = field(default_factory=list[str])
    """names of the x axes x0, x1, ... of its traces: the reader can choose one"""
    from_zero: bool = False  # whether the y axis begins at 0
    log: bool = False  # whether the page offers a logarithmic y axis


def points(xs: Sequence[float], ys: Sequence[float]) -> list[int]:
    """The rows to draw: the lowest and the highest point of each interval, the first and the last."""
    known = [row for row, y in enumerate(ys) if math.isfinite(y) and math.isfinite(xs[row])]
    if len(known) <= POINTS:
        return known
    size = 2 * len(known) / (POINTS - 2)
    kept = {known[0], known[-1]}
    for number in range(int(len(known) / size) + 1):
        if stretch := known[int(number * size) : int((number + 1) * size)]:
            kept |= {min(stretch, key=ys.__getitem__), max(stretch, key=ys.__getitem__)}
    return sorted(kept)


def line(name: str, axes: Sequence[Sequence[float]], ys: Sequence[float], style: int = 0) -> dict[str, Any]:
    """A line, thinned over the first of its x axes."""
    rows = points(axes[0], ys)
    trace: dict[str, Any] = {
        "name": clean(name)[:80], "colour": COLOURS[style % len(COLOURS)],
        "dash": DASHES[style // len(COLOURS) % len(DASHES)], "y": [shown_number(ys[row]) for row in rows],
    }  # fmt: skip
    return trace | {f"x{number}": [shown_number(axis[row]) for row in rows] for number, axis in enumerate(axes)}


def shown_number(number: float) -> float | None:
    """A number with the digits that are visible in a figure; None if it is not finite."""
    if not math.isfinite(number):
        return None
    return round(number, 2) if abs(number) >= 1e6 else float(f"{number:.6g}")


def _axes(log: RankLog) -> list[list[float]]:
    """Samples, minutes since the beginning, and steps, of the rows that count."""
    began = log.started[0].unix_time if log.started else 0.0
    return [
        [*map(float, accumulate(log.steps.samples[row] for row in log.rows))],
        [(log.steps.ended[row] - began) / 60 for row in log.rows],
        [float(log.steps.step[row]) for row in log.rows],
    ]


def _rates(log: RankLog) -> list[float]:
    """Samples per second over windows of steps."""
    steps, window, rates = log.steps, max(1, len(log.rows) // 200), list[float]()
    for number in range(0, len(log.rows), window):
        rows = log.rows[number : number + window]
        seconds = sum(steps.seconds[row] for row in rows)
        rates += [sum(steps.samples[row] for row in rows) / seconds if seconds > 0 else math.nan] * len(rows)
    return rates


CURVES: tuple[tuple[str, str, str, str, Callable[[RankLog], list[float]], bool], ...] = (
    ("loss", "Loss", "The loss of each step's global batch.", "loss",
     lambda log: [log.steps.loss[row] for row in log.rows], True),
    ("throughput", "Throughput", "Samples of the global batch a second, while steps were taken.", "samples/s",
     _rates, False),
    ("norm", "Gradient norm", "The norm of the gradients before clipping.", "norm",
     lambda log: [log.steps.norm[row] for row in log.rows], True),
    ("lr", "Learning rate", "The learning rate of each step.", "learning rate",
     lambda log: [log.steps.lr[row] for row in log.rows], False),
)  # fmt: skip
"""name, title, words, y axis, values of the rows that count, whether a logarithmic axis is offered"""


def curves(runs: Sequence[WholeRun]) -> Iterable[Figure]:
    """Loss, scores, throughput, gradient norm and learning rate of one run or several: a line for each run."""
    for name, title, words, y, values, log in CURVES:
        traces = [
            line(run.name if len(runs) > 1 else y, _axes(first), ys, number)
            for number, run in enumerate(runs[:MOST_LINES])
            if (first := run.first) and sum(map(math.isfinite, ys := values(first))) > 1
        ]
        if traces:
            yield Figure(name, title, words, traces, y=y, axes=AXES, log=log)
        if name == "loss":
            yield from _scores(runs)


def _scores(runs: Sequence[WholeRun]) -> Iterable[Figure]:
    names = dict.fromkeys(
        (event.split, metric) for run in runs if run.first for _, event in run.first.of(Evaluated)
        for metric in event.metrics
    )  # fmt: skip
    for index, (split, metric) in enumerate([*names][:MOST_LINES]):
        traces: list[dict[str, Any]] = []
        for number, run in enumerate(runs[:MOST_LINES]):
            if not (first := run.first):
                continue
            scores = [(at, e) for at, e in first.of(Evaluated) if e.split == split and metric in e.metrics]
            if len(scores) < 2:  # one alone stands in the results
                continue
            began, samples, _, steps = first.started[0].unix_time, *_axes(first)
            of_step = dict(zip(steps, samples, strict=True))
            axes = [[of_step.get(e.step, 0.0) for _, e in scores], [(at - began) / 60 for at, _ in scores],
                    [float(e.step) for _, e in scores]]  # fmt: skip
            trace = line(run.name if len(runs) > 1 else metric, axes, [e.metrics[metric] for _, e in scores], number)
            traces.append(trace | {"markers": True})
        label = clean(f"{split} {metric}")[:60]
        if traces:
            yield Figure(f"score-{index}", label.capitalize(),
                         f"The {label} of each evaluation.", traces, y=label, axes=AXES)  # fmt: skip


def phases(runs: Sequence[WholeRun]) -> Iterable[Figure]:
    """The mean step by phase: a bar for each rank, or for each run."""
    rows: list[tuple[str, list[float]]] = []
    for run in runs:
        logs = [log for log in run.latest() if log.rows][:MOST_ROWS]
        means = [[mean(column[row] for row in log.rows[-2000:]) for column in log.steps.phases] for log in logs]
        if len(runs) == 1:
            rows = [(f"rank {log.rank}", found) for log, found in zip(logs, means, strict=True)]
        elif means:
            rows.append((run.name, [mean(found) for found in zip(*means, strict=True)]))
    if not rows:
        return
    names = [name for name, _ in rows]
    traces = [
        {"name": phase, "colour": PHASE_COLOURS[phase], "pattern": PATTERNS[number], "y": names,
         "x0": [shown_number(1e3 * found[number]) for _, found in rows]}
        for number, phase in enumerate(PHASES)
    ]  # fmt: skip
    words = "The mean step, in milliseconds, by phase. In lockstep all bars are about equally long; sync is waiting."
    yield Figure("phases", "Where a step's time goes", words, traces, x="ms of a step", kind="bars")


def waiting(run: WholeRun, waits: Mapping[int, Mapping[int, float]]) -> Iterable[Figure]:
    """The matrix of waiting between ranks; `waits` as in Bottleneck."""
    ranks = sorted(log.rank for log in run.latest())[:MOST_ROWS]
    if len(ranks) < 3 or not waits:  # of two, the first sentence says it
        return
    total = sum(sum(of.values()) for of in waits.values()) or 1.0
    cells = [[None if a == b else round(100 * waits.get(a, {}).get(b, 0.0) / total, 1) for b in ranks] for a in ranks]
    trace = {"name": "waiting", "z": cells, "y": [f"rank {r}" for r in ranks], "x0": [f"rank {r}" for r in ranks]}
    words = "The row's rank waited for the column's: its part of all waiting."
    yield Figure("waits", "Who waited for whom", words, [trace], x="for", y="waited", kind="matrix")


def _of_gpus(attribute: str, factor: float) -> Callable[[MachineUse], dict[str, float | None]]:
    def values(machine: MachineUse) -> dict[str, float | None]:
        numbers = {f"{machine.host} GPU {gpu.index}": getattr(gpu, attribute) for gpu in machine.gpus}
        return {name: None if number is None else number * factor for name, number in numbers.items()}

    return values


DEVICES: tuple[tuple[str, str, str, Callable[[MachineUse], Mapping[str, float | None]]], ...] = (
    ("cores", "Processor", "cores busy", lambda m: {m.host: m.cores_busy, f"{m.host}: cores there are": m.cores}),
    ("memory", "Memory in use", "GB", lambda m: {m.host: m.memory_bytes / 1e9}),
    ("rss", "Memory of each rank", "GB", lambda m: {f"rank {r}": use.memory_bytes / 1e9 for r, use in m.ranks.items()}),
    ("network", "Network", "MB/s",
     lambda m: {f"{m.host} sent": m.sent_bytes / 1e6, f"{m.host} received": m.received_bytes / 1e6}),
    ("gpu", "GPU busy", "%", _of_gpus("busy", 100.0)),
    ("gpu-memory", "GPU memory", "GB", _of_gpus("memory_bytes", 1e-9)),
    ("gpu-power", "GPU power", "W", _of_gpus("watts", 1.0)),
    ("gpu-heat", "GPU temperature", "degrees C", _of_gpus("degrees", 1.0)),
    ("gpu-clock", "GPU clock", "MHz", _of_gpus("mhz", 1.0)),
)  # fmt: skip
"""name, title, y axis, values by line"""


def devices(run: WholeRun) -> Iterable[Figure]:
    """The use of the machines: a line for each host, rank or GPU."""
    began = run.first.started[0].unix_time if run.first and run.first.started else min(
        (records[0].unix_time for records in run.machines.values() if records), default=0.0)  # fmt: skip
    for name, title, y, values in DEVICES:
        lines: dict[str, tuple[list[float], list[float]]] = {}
        for record in (record for records in run.machines.values() for record in records):
            for label, number in values(record).items():
                if number is not None and len(lines) <= MOST_LINES:
                    xs, ys = lines.setdefault(label, ([], []))
                    xs.append(max(0.0, record.unix_time - began) / 60)
                    ys.append(number)
        traces = [line(label, [xs], ys, n) for n, (label, (xs, ys)) in enumerate([*lines.items()][:MOST_LINES])]
        if any(value and value > NOTHING for trace in traces for value in trace["y"]):
            yield Figure(name, title, "Of each machine, about once a second.", traces, x="minutes", y=y, from_zero=True)


@dataclass(frozen=True)
class Drawing:
    """A drawing, its title, and a sentence about it."""

    title: str
    words: str
    svg: Markup


def drawings(run: WholeRun) -> list[Drawing]:
    """The drawings of a run that its events allow."""
    steps = _typical(run)
    return [*(_stages(run, steps) if steps else ()), *(_one_step(run, steps) if steps else ()), *_samples(run)]


def _draw(name: str, **values: object) -> Markup:
    from jinja2 import Environment, PackageLoader

    environment = Environment(
        loader=PackageLoader("paceline.report"), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    return getattr(environment.get_template("explain.svg").module, name)(**values)


def _typical(run: WholeRun) -> dict[int, Traced]:
    """The same detailed step of each rank, of about median duration."""
    logs = run.latest()[:MOST_DRAWN_RANKS]
    common = set(logs[0].traced).intersection(*(log.traced for log in logs[1:])) if logs else set[int]()
    common = {step for step in common if all(log.traced[step].phases for log in logs)}
    late = [step for step in sorted(common) if step > logs[0].started[-1].start_step + 5] or sorted(common)
    if not late:
        return {}
    lasts = {step: max(_end(log.traced[step]) for log in logs) for step in late}
    usual = median(lasts.values())
    step = min(late, key=lambda one: abs(lasts[one] - usual))
    return {log.rank: log.traced[step] for log in logs}


def _end(one: Traced) -> float:
    return max(begins + lasts for _, begins, lasts in one.phases)


def _ms(seconds: float) -> str:
    return f"{seconds:,.2f} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def _stages(run: WholeRun, steps: dict[int, Traced]) -> Iterator[Drawing]:
    """Construct, forward, backward, optimizer: the diagram of DDP."""
    memory = run.first.memory if run.first else None
    if run.first is None or memory is None:
        return
    several, batch = run.world_size > 1, run.first.steps.samples[-1] if run.first.rows else 0
    numbers = sum(math.prod(shape, start=1.0) for _, shape, _ in memory.parameters)  # floats: a stranger's may be long
    copies = ("; a shard on each rank" if run.strategy == "fsdp" else "; a copy on each rank") * several
    ranks = [
        {"rank": rank, "samples": max(1, round(batch / max(1, run.world_size))),
         **{phase: _ms(sum(lasts for name, _, lasts in one.phases if name == phase)) for phase in PHASE_COLOURS}}
        for rank, one in [*steps.items()][:MOST_LANES]
    ]  # fmt: skip
    sent = sum(size for name, _, _, size in next(iter(steps.values())).calls if not _is_control(name, size))
    svg = _draw(
        "stages", ranks=ranks, colours=PHASE_COLOURS, updates=UPDATES.get(run.strategy, "updates the weights"),
        model=f"{plural(len(memory.parameters), 'tensor')}, {numbers:,.0f} numbers{copies}",
        reduced="all-reduce: gradients are summed over ranks" if several else "one rank exchanges nothing",
        sent=f"{sent / 1e6:,.2f} MB per rank" if sent and several else "",
    )  # fmt: skip
    more = f" Ranks 0 to {MOST_LANES - 1} of {run.world_size}." if run.world_size > MOST_LANES else ""
    yield Drawing("The four stages of a step", f"The work of each rank, and the point at which ranks meet.{more}", svg)


def _is_control(name: str, size: int) -> bool:
    """Whether a collective carries totals and control flags of the step; their names have several words."""
    return size < SMALL_BYTES and " " in name


def _one_step(run: WholeRun, steps: dict[int, Traced]) -> Iterator[Drawing]:
    """One step of all ranks on one clock, with its collectives."""
    began = min(one.unix_time for one in steps.values())
    whole = max(1e-6, *(one.unix_time - began + _end(one) for one in steps.values()))
    lanes: list[dict[str, Any]] = []
    for rank, one in steps.items():
        offset = one.unix_time - began
        phases = [(name, PHASE_COLOURS.get(name, "pink"), (offset + at) / whole, lasts / whole, _ms(lasts))
                  for name, at, lasts in one.phases[:MOST_BOXES]]  # fmt: skip
        calls: list[tuple[object, ...]] = []
        for name, at, lasts, size in one.calls[:MOST_BOXES] if run.world_size > 1 else ():
            synced = [begins + seconds for phase, begins, seconds in one.phases if phase == "sync"]
            needed = max(at, synced[0] if synced else _end(one))  # no rank leaves sync before its collectives end
            seconds = min(lasts, needed - at) if lasts >= 0 else needed - at
            told = f"{size / 1e6:,.3f} MB, {_ms(lasts) if lasts >= 0 else 'its end was not seen'}"
            calls.append((clean(name)[:60], _is_control(name, size), (offset + at) / whole, seconds / whole, told))
        lanes.append({"rank": rank, "phases": phases, "calls": calls})
    words = "The phases of each rank, and its collectives below them." if run.world_size > 1 else "Its phases."
    if run.strategy == "ddp":
        words += " DDP's buckets are sent during backward; torch does not record when."
    clocks = [clock.error_seconds for clock in run.clocks.values()]
    words += f" The clocks of the nodes agree within {_ms(max(clocks))}." if clocks else ""
    ticks = [_ms(whole * tick / 4) for tick in range(5)]
    keys = [*PHASE_COLOURS.items(), *([("tensors", "red"), ("totals", "yellow")] if run.world_size > 1 else [])]
    svg = _draw("step", lanes=lanes, ticks=ticks, keys=keys, height=72 if run.world_size > 1 else 42)
    yield Drawing(f"Step {next(iter(steps.values())).step:,}, on one clock", words, svg)


def _samples(run: WholeRun) -> Iterator[Drawing]:
    """The global batch, and the samples that each rank computes."""
    logs = [log for log in run.latest() if log.share and log.rows]
    owners = {virtual: log.rank for log in reversed(logs) for virtual in range(*(log.share or (0, 0)))[:MOST_BOXES]}
    if not logs or len(owners) >= MOST_BOXES:
        return
    batch = logs[0].steps.samples[logs[0].rows[0]]
    listed = {one.virtual_rank: one.indices for log in logs for one in reversed(log.samples)}
    boxes = [
        {"virtual": virtual, "rank": rank, "colour": COLOURS[rank % len(COLOURS)],
         "samples": ", ".join(map(str, listed.get(virtual, ())[:6]))} for virtual, rank in sorted(owners.items())
    ]  # fmt: skip
    words = f"The global batch of {batch:,} samples is split into {plural(len(boxes), 'virtual rank')}, v0 and on."
    words += " The first samples of a step are listed." if listed else " --record-samples lists the samples."
    yield Drawing("Which rank sees which sample", words, _draw("samples", boxes=boxes))
