"""The figures of a run's page as thinned data for plotly, and the diagrams of --explain from templates/explain.svg."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from statistics import mean, median
from typing import TYPE_CHECKING, Any

from paceline.errors import plural
from paceline.report.run import PHASES, RankEvents, RunData
from paceline.runs.console import remove_control_characters
from paceline.runs.events import Evaluated, TracedStep
from paceline.runs.machine import NodeUtilization

if TYPE_CHECKING:
    from markupsafe import Markup

MAX_POINTS = 600  # per line; the lowest and the highest point of each interval are kept
MAX_LINES = 16
MAX_ROWS = 64  # ranks in a bar chart or a matrix
MAX_DRAWN_RANKS, MAX_LANES, MAX_BOXES = 8, 4, 300
# the colours of Okabe and Ito, which colour-blind people can distinguish; the page changes only their lightness
COLOURS = ("blue", "orange", "green", "pink", "sky", "red", "yellow", "grey")
DASHES = ("solid", "dash", "dot", "dashdot")
PHASE_COLOURS = {"data": "orange", "forward": "sky", "backward": "blue", "sync": "grey", "optimizer": "green"}
PATTERNS = ("", "/", "", "\\", "x", ".")  # in addition to the colour, for prints in grey
MIN_VALUE = 0.005  # in a figure's unit: a figure without higher values is omitted
AXES = ["samples", "minutes", "steps"]
MAX_CONTROL_BYTES = 1024  # of collectives without tensors of the model
UPDATE_DESCRIPTIONS = {"zero": "updates and sends its shard", "fsdp": "updates its shard"}


@dataclass(frozen=True)
class Figure:
    name: str  # an identifier
    title: str
    caption: str  # also describes the figure for screen readers
    traces: list[dict[str, Any]]
    x: str = ""
    y: str = ""
    kind: str = "lines"  # lines, bars, matrix, marks
    axes: list[str] = field(default_factory=list[str])
    """The names of the x axes x0, x1, ... of its traces. The reader can choose one."""
    from_zero: bool = False  # whether the y axis begins at 0
    log: bool = False  # whether the page offers a logarithmic y axis


def select_rows_to_draw(xs: Sequence[float], ys: Sequence[float]) -> list[int]:
    """The rows to draw: the first, the last, and the lowest and the highest point of each interval."""
    finite_rows = [row for row, y in enumerate(ys) if math.isfinite(y) and math.isfinite(xs[row])]
    if len(finite_rows) <= MAX_POINTS:
        return finite_rows
    size = 2 * len(finite_rows) / (MAX_POINTS - 2)
    kept = {finite_rows[0], finite_rows[-1]}
    for number in range(int(len(finite_rows) / size) + 1):
        if interval := finite_rows[int(number * size) : int((number + 1) * size)]:
            kept |= {min(interval, key=ys.__getitem__), max(interval, key=ys.__getitem__)}
    return sorted(kept)


def make_line_trace(name: str, axes: Sequence[Sequence[float]], ys: Sequence[float], style: int = 0) -> dict[str, Any]:
    rows = select_rows_to_draw(axes[0], ys)
    trace: dict[str, Any] = {
        "name": remove_control_characters(name)[:80], "colour": COLOURS[style % len(COLOURS)],
        "dash": DASHES[style // len(COLOURS) % len(DASHES)], "y": [round_for_figure(ys[row]) for row in rows],
    }  # fmt: skip
    return trace | {f"x{number}": [round_for_figure(axis[row]) for row in rows] for number, axis in enumerate(axes)}


def round_for_figure(number: float) -> float | None:
    """A number with the digits that are visible in a figure; None if it is not finite."""
    if not math.isfinite(number):
        return None
    return round(number, 2) if abs(number) >= 1e6 else float(f"{number:.6g}")


def _x_axis_values(log: RankEvents) -> list[list[float]]:
    """Samples, minutes since the beginning, and steps, of the rows that count."""
    began = log.start_events[0].unix_time if log.start_events else 0.0
    return [
        [*map(float, accumulate(log.steps.samples[row] for row in log.valid_rows))],
        [(log.steps.ended[row] - began) / 60 for row in log.valid_rows],
        [float(log.steps.step[row]) for row in log.valid_rows],
    ]


def _rates(log: RankEvents) -> list[float]:
    steps, window, rates = log.steps, max(1, len(log.valid_rows) // 200), list[float]()
    for number in range(0, len(log.valid_rows), window):
        rows = log.valid_rows[number : number + window]
        seconds = sum(steps.seconds[row] for row in rows)
        rates += [sum(steps.samples[row] for row in rows) / seconds if seconds > 0 else math.nan] * len(rows)
    return rates


CURVES: tuple[tuple[str, str, str, str, Callable[[RankEvents], list[float]], bool], ...] = (
    ("loss", "Loss", "The loss of each step's global batch.", "loss",
     lambda log: [log.steps.loss[row] for row in log.valid_rows], True),
    ("throughput", "Throughput", "Samples of the global batch per second, during steps.", "samples/s",
     _rates, False),
    ("norm", "Gradient norm", "The norm of the gradients before clipping.", "norm",
     lambda log: [log.steps.norm[row] for row in log.valid_rows], True),
    ("lr", "Learning rate", "The learning rate of each step.", "learning rate",
     lambda log: [log.steps.lr[row] for row in log.valid_rows], False),
)  # fmt: skip
"""Name, title, caption, y axis, values of the rows that count, and whether to offer a logarithmic axis."""


def training_curve_figures(runs: Sequence[RunData]) -> Iterable[Figure]:
    for name, title, caption, y, values, log in CURVES:
        traces = [
            make_line_trace(run.name if len(runs) > 1 else y, _x_axis_values(first), ys, number)
            for number, run in enumerate(runs[:MAX_LINES])
            if (first := run.first_rank_log) and sum(map(math.isfinite, ys := values(first))) > 1
        ]
        if traces:
            yield Figure(name, title, caption, traces, y=y, axes=AXES, log=log)
        if name == "loss":
            yield from _scores(runs)


def _scores(runs: Sequence[RunData]) -> Iterable[Figure]:
    names = dict.fromkeys(
        (event.split, metric) for run in runs if run.first_rank_log
        for _, event in run.first_rank_log.events_of(Evaluated) for metric in event.metrics
    )  # fmt: skip
    for index, (split, metric) in enumerate([*names][:MAX_LINES]):
        traces: list[dict[str, Any]] = []
        for number, run in enumerate(runs[:MAX_LINES]):
            if not (first := run.first_rank_log):
                continue
            scores = [(at, e) for at, e in first.events_of(Evaluated) if e.split == split and metric in e.metrics]
            if len(scores) < 2:  # the results table has a single score
                continue
            began, samples, _, steps = first.start_events[0].unix_time, *_x_axis_values(first)
            of_step = dict(zip(steps, samples, strict=True))
            axes = [[of_step.get(e.step, 0.0) for _, e in scores], [(at - began) / 60 for at, _ in scores],
                    [float(e.step) for _, e in scores]]  # fmt: skip
            values, title = [e.metrics[metric] for _, e in scores], run.name if len(runs) > 1 else metric
            trace = make_line_trace(title, axes, values, number)
            traces.append(trace | {"markers": True})
        label = remove_control_characters(f"{split} {metric}")[:60]
        if traces:
            yield Figure(f"score-{index}", label.capitalize(),
                         f"The {label} of each evaluation.", traces, y=label, axes=AXES)  # fmt: skip


def phase_figures(runs: Sequence[RunData]) -> Iterable[Figure]:
    rows: list[tuple[str, list[float]]] = []
    for run in runs:
        logs = [log for log in run.newest_rank_logs() if log.valid_rows][:MAX_ROWS]
        means = [[mean(column[row] for row in log.valid_rows[-2000:]) for column in log.steps.phases] for log in logs]
        if len(runs) == 1:
            rows = [(f"rank {log.rank}", seconds) for log, seconds in zip(logs, means, strict=True)]
        elif means:
            rows.append((run.name, [mean(seconds) for seconds in zip(*means, strict=True)]))
    if not rows:
        return
    names = [name for name, _ in rows]
    traces = [
        {"name": phase, "colour": PHASE_COLOURS[phase], "pattern": PATTERNS[number], "y": names,
         "x0": [round_for_figure(1e3 * seconds[number]) for _, seconds in rows]}
        for number, phase in enumerate(PHASES)
    ]  # fmt: skip
    caption = "The mean step, in milliseconds, by phase. All bars have about the same length; sync is waiting."
    yield Figure("phases", "Time of a step by phase", caption, traces, x="ms of a step", kind="bars")


def waiting_figures(run: RunData, waits: Mapping[int, Mapping[int, float]]) -> Iterable[Figure]:
    ranks = sorted(log.rank for log in run.newest_rank_logs())[:MAX_ROWS]
    if len(ranks) < 3 or not waits:  # for two ranks the summary is sufficient
        return
    total = sum(sum(waits_of.values()) for waits_of in waits.values()) or 1.0
    cells = [[None if a == b else round(100 * waits.get(a, {}).get(b, 0.0) / total, 1) for b in ranks] for a in ranks]
    trace = {"name": "waiting", "z": cells, "y": [f"rank {r}" for r in ranks], "x0": [f"rank {r}" for r in ranks]}
    caption = "The percentage of all waiting in which the rank of the row waited for the rank of the column."
    yield Figure("waits", "Waiting between ranks", caption, [trace], x="for", y="waited", kind="matrix")


def _gpu_value_getter(attribute: str, factor: float) -> Callable[[NodeUtilization], dict[str, float | None]]:
    def values(machine: NodeUtilization) -> dict[str, float | None]:
        numbers = {f"{machine.host} GPU {gpu.index}": getattr(gpu, attribute) for gpu in machine.gpus}
        return {name: None if number is None else number * factor for name, number in numbers.items()}

    return values


DEVICE_FIGURE_SPECS: tuple[tuple[str, str, str, Callable[[NodeUtilization], Mapping[str, float | None]]], ...] = (
    ("cores", "Processor", "cores busy", lambda m: {m.host: m.cores_busy, f"{m.host}: all cores": m.cores}),
    ("memory", "Memory in use", "GB", lambda m: {m.host: m.memory_bytes / 1e9}),
    ("rss", "Memory of each rank", "GB", lambda m: {f"rank {r}": use.memory_bytes / 1e9 for r, use in m.ranks.items()}),
    ("network", "Network", "MB/s",
     lambda m: {f"{m.host} sent": m.sent_bytes / 1e6, f"{m.host} received": m.received_bytes / 1e6}),
    ("gpu", "GPU busy", "%", _gpu_value_getter("busy", 100.0)),
    ("gpu-memory", "GPU memory", "GB", _gpu_value_getter("memory_bytes", 1e-9)),
    ("gpu-power", "GPU power", "W", _gpu_value_getter("watts", 1.0)),
    ("gpu-heat", "GPU temperature", "degrees C", _gpu_value_getter("degrees", 1.0)),
    ("gpu-clock", "GPU clock", "MHz", _gpu_value_getter("mhz", 1.0)),
)  # fmt: skip
"""Name, title, y axis, and values by line."""


def device_figures(run: RunData) -> Iterable[Figure]:
    began = (run.first_rank_log.start_events[0].unix_time if run.first_rank_log and run.first_rank_log.start_events
        else min((records[0].unix_time for records in run.machines.values() if records), default=0.0))  # fmt: skip
    for name, title, y, values in DEVICE_FIGURE_SPECS:
        lines: dict[str, tuple[list[float], list[float]]] = {}
        for record in (record for records in run.machines.values() for record in records):
            for label, number in values(record).items():
                if number is not None and len(lines) <= MAX_LINES:
                    xs, ys = lines.setdefault(label, ([], []))
                    xs.append(max(0.0, record.unix_time - began) / 60)
                    ys.append(number)
        shown = enumerate([*lines.items()][:MAX_LINES])
        traces = [make_line_trace(label, [xs], ys, n) for n, (label, (xs, ys)) in shown]
        if any(value and value > MIN_VALUE for trace in traces for value in trace["y"]):
            caption = "Measured on each node, about once per second."
            yield Figure(name, title, caption, traces, x="minutes", y=y, from_zero=True)


@dataclass(frozen=True)
class Diagram:
    title: str
    caption: str
    svg: Markup


def make_diagrams(run: RunData) -> list[Diagram]:
    drawings = [*_samples_drawing(run)]
    if steps := _typical_step(run):
        drawings = [*_stages_drawing(run, steps), *_step_timeline_drawing(run, steps), *drawings]
    return drawings


def _render_svg(name: str, **values: object) -> Markup:
    from jinja2 import Environment, PackageLoader

    environment = Environment(
        loader=PackageLoader("paceline.report"), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    return getattr(environment.get_template("explain.svg").module, name)(**values)


def _typical_step(run: RunData) -> dict[int, TracedStep]:
    """One detailed step of about median duration, by rank."""
    logs = run.newest_rank_logs()[:MAX_DRAWN_RANKS]
    common = set(logs[0].traced).intersection(*(log.traced for log in logs[1:])) if logs else set[int]()
    common = {step for step in common if all(log.traced[step].phases for log in logs)}
    late = [step for step in sorted(common) if step > logs[0].start_events[-1].start_step + 5] or sorted(common)
    if not late:
        return {}
    durations = {step: max(_trace_end_seconds(log.traced[step]) for log in logs) for step in late}
    middle = median(durations.values())
    step = min(late, key=lambda step: abs(durations[step] - middle))
    return {log.rank: log.traced[step] for log in logs}


def _trace_end_seconds(trace: TracedStep) -> float:
    return max(begin + duration for _, begin, duration in trace.phases)


def _ms(seconds: float) -> str:
    return f"{seconds:,.2f} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def _stages_drawing(run: RunData, steps: dict[int, TracedStep]) -> Iterator[Diagram]:
    memory = run.first_rank_log.memory if run.first_rank_log else None
    if run.first_rank_log is None or memory is None:
        return
    several, batch = run.world_size > 1, run.first_rank_log.steps.samples[-1] if run.first_rank_log.valid_rows else 0
    # as a float, because an untrusted file may have huge shapes
    numbers = sum(math.prod(shape, start=1.0) for _, shape, _ in memory.parameters)
    copies = ("; a shard on each rank" if run.strategy == "fsdp" else "; a copy on each rank") * several
    ranks = [
        {"rank": rank, "samples": max(1, round(batch / max(1, run.world_size))),
         **{phase: _ms(sum(seconds for name, _, seconds in trace.phases if name == phase)) for phase in PHASE_COLOURS}}
        for rank, trace in [*steps.items()][:MAX_LANES]
    ]  # fmt: skip
    sent = sum(size for name, _, _, size in next(iter(steps.values())).calls if not _is_control_collective(name, size))
    svg = _render_svg(
        "stages", ranks=ranks, colours=PHASE_COLOURS, sent=f"{sent / 1e6:,.2f} MB per rank" if sent and several else "",
        updates=UPDATE_DESCRIPTIONS.get(run.strategy, "updates the weights"),
        model=f"{plural(len(memory.parameters), 'tensor')}, {numbers:,.0f} numbers{copies}",
        reduced="all-reduce: gradients are summed over ranks" if several else "a single rank exchanges nothing",
    )  # fmt: skip
    ranks_note = f" Ranks 0 to {MAX_LANES - 1} of {run.world_size}." if run.world_size > MAX_LANES else ""
    yield Diagram("The four stages of a step", f"The work of each rank, and the synchronisation.{ranks_note}", svg)


def _is_control_collective(name: str, size: int) -> bool:
    """Whether a collective has only totals and control flags of the step. Its name then has several words."""
    return size < MAX_CONTROL_BYTES and " " in name


def _step_timeline_drawing(run: RunData, steps: dict[int, TracedStep]) -> Iterator[Diagram]:
    began = min(trace.unix_time for trace in steps.values())
    span = max(1e-6, *(trace.unix_time - began + _trace_end_seconds(trace) for trace in steps.values()))
    lanes: list[dict[str, Any]] = []
    for rank, trace in steps.items():
        offset = trace.unix_time - began
        phases = [(name, PHASE_COLOURS.get(name, "pink"), (offset + at) / span, duration / span, _ms(duration))
                  for name, at, duration in trace.phases[:MAX_BOXES]]  # fmt: skip
        calls: list[tuple[object, ...]] = []
        for name, at, duration, size in trace.calls[:MAX_BOXES] if run.world_size > 1 else ():
            ends = [begin + seconds for phase, begin, seconds in trace.phases if phase == "sync"]
            # no rank leaves sync before its collectives end
            latest = max(at, ends[0] if ends else _trace_end_seconds(trace))
            seconds = min(duration, latest - at) if duration >= 0 else latest - at
            details = f"{size / 1e6:,.3f} MB, {_ms(duration) if duration >= 0 else 'end unknown'}"
            label, is_control = remove_control_characters(name)[:60], _is_control_collective(name, size)
            calls.append((label, is_control, (offset + at) / span, seconds / span, details))
        lanes.append({"rank": rank, "phases": phases, "calls": calls})
    caption = "The phases of each rank, with its collectives below." if run.world_size > 1 else "Its phases."
    if run.strategy == "ddp":
        caption += " DDP sends its buckets during backward; torch does not record the times."
    clocks = [clock.error_seconds for clock in run.clock_offsets.values()]
    caption += f" The clocks of the nodes agree within {_ms(max(clocks))}." if clocks else ""
    ticks = [_ms(span * tick / 4) for tick in range(5)]
    keys = [*PHASE_COLOURS.items(), *([("tensors", "red"), ("totals", "yellow")] if run.world_size > 1 else [])]
    svg = _render_svg("step", lanes=lanes, ticks=ticks, keys=keys, height=72 if run.world_size > 1 else 42)
    yield Diagram(f"Step {next(iter(steps.values())).step:,}, on one clock", caption, svg)


def _samples_drawing(run: RunData) -> Iterator[Diagram]:
    logs = [log for log in run.newest_rank_logs() if log.virtual_ranks and log.valid_rows]
    owners = {
        virtual: log.rank for log in reversed(logs) for virtual in range(*(log.virtual_ranks or (0, 0)))[:MAX_BOXES]
    }
    if not logs or len(owners) >= MAX_BOXES:
        return
    batch = logs[0].steps.samples[logs[0].valid_rows[0]]
    listed = {record.virtual_rank: record.indices for log in logs for record in reversed(log.samples)}
    boxes = [
        {"virtual": virtual, "rank": rank, "colour": COLOURS[rank % len(COLOURS)],
         "samples": ", ".join(map(str, listed.get(virtual, ())[:6]))} for virtual, rank in sorted(owners.items())
    ]  # fmt: skip
    caption = f"The global batch of {batch:,} samples is split between {plural(len(boxes), 'virtual rank')}, from v0."
    caption += " The first samples of a step are listed." if listed else " To list the samples, use --record-samples."
    yield Diagram("Samples of each rank", caption, _render_svg("samples", boxes=boxes))
