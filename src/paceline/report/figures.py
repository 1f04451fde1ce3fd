"""The figures of a run's page, as plotly's JavaScript takes them: plain data, thinned, without any text of HTML."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import mean
from typing import Any

from paceline.report.run import PHASES, RankLog, WholeRun
from paceline.runs.console import clean
from paceline.runs.events import Evaluated
from paceline.runs.machine import MachineUse

POINTS = 600  # of a line, at most; of each stretch its lowest and its highest are kept
MOST_LINES = 16
MOST_ROWS = 64  # ranks in a bar chart or a matrix
# Okabe and Ito's colours, which the colour-blind can tell apart; the page has darker or lighter ones of the same hue
COLOURS = ("blue", "orange", "green", "pink", "sky", "red", "yellow", "grey")
DASHES = ("solid", "dash", "dot", "dashdot")
PHASE_COLOURS = {"data": "orange", "forward": "sky", "backward": "blue", "sync": "grey", "optimizer": "green"}
PATTERNS = ("", "/", "", "\\", "x", ".")  # beside the colour, so that a print in grey can be read
NOTHING = 0.005  # of a figure's unit: what never gets higher is left out
OF_GPUS = (  # name, title, unit, field, factor
    ("gpu", "GPU busy", "%", "busy", 100.0),
    ("gpu-memory", "GPU memory", "GB", "memory_bytes", 1e-9),
    ("gpu-power", "GPU power", "W", "watts", 1.0),
    ("gpu-heat", "GPU temperature", "degrees C", "degrees", 1.0),
    ("gpu-clock", "GPU clock", "MHz", "mhz", 1.0),
)


@dataclass(frozen=True)
class Figure:
    """One figure."""

    name: str  # an identifier
    title: str
    words: str  # what is seen in it, for those who do not
    traces: list[dict[str, Any]]
    x: str = ""
    y: str = ""
    kind: str = "lines"  # lines, bars, matrix, marks
    axes: list[str] = field(default_factory=list[str])
    """names of other x axes that a trace has, as x0, x1, ...: the reader can choose"""
    from_zero: bool = False  # whether the y axis begins at 0
    log: bool = False  # whether a logarithmic y axis is worth offering


def points(xs: Sequence[float], ys: Sequence[float]) -> list[int]:
    """Which points stand for all: the lowest and the highest of each stretch, the first and the last."""
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
    """A line over the first of its x axes; the others can be chosen."""
    rows = points(axes[0], ys)
    trace: dict[str, Any] = {
        "name": clean(name)[:80], "colour": COLOURS[style % len(COLOURS)],
        "dash": DASHES[style // len(COLOURS) % len(DASHES)], "y": [shown_number(ys[row]) for row in rows],
    }  # fmt: skip
    return trace | {f"x{number}": [shown_number(axis[row]) for row in rows] for number, axis in enumerate(axes)}


def shown_number(number: float) -> float | None:
    """With the digits that can be seen in a figure; None for what JSON has no number for."""
    if not math.isfinite(number):
        return None
    return round(number, 2) if abs(number) >= 1e6 else float(f"{number:.6g}")


def _axes(log: RankLog) -> list[list[float]]:
    """Samples, minutes since the beginning, and steps, of the rows that count."""
    steps, samples, total = log.steps, list[float](), 0
    began = log.started[0].unix_time if log.started else 0.0
    for row in log.rows:
        total += steps.samples[row]
        samples.append(float(total))
    return [
        samples,
        [(steps.ended[row] - began) / 60 for row in log.rows],
        [float(steps.step[row]) for row in log.rows],
    ]


AXES = ["samples", "minutes", "steps"]


def _of_first(
    runs: Sequence[WholeRun], name: str, title: str, words: str, y: str,
    column: Callable[[RankLog], Sequence[float]], *, log: bool = False,
) -> Iterable[Figure]:  # fmt: skip
    """A line for each run, of what is global."""
    traces: list[dict[str, Any]] = []
    for number, run in enumerate(runs[:MOST_LINES]):
        if (first := run.first) and sum(map(math.isfinite, ys := column(first))) > 1:
            traces.append(line(run.name if len(runs) > 1 else y, _axes(first), ys, number))
    if traces:
        yield Figure(name, title, words, traces, y=y, axes=AXES, log=log)


def curves(runs: Sequence[WholeRun]) -> Iterable[Figure]:
    """Loss, scores, gradient norm, learning rate and throughput of one run or several."""
    yield from _of_first(runs, "loss", "Loss", "The loss of each step's global batch.", "loss",
                         lambda log: [log.steps.loss[row] for row in log.rows], log=True)  # fmt: skip
    yield from _scores(runs)
    yield from _of_first(runs, "throughput", "Throughput", "Samples of the global batch a second, while steps were "
                         "taken.", "samples/s", _rates)  # fmt: skip
    yield from _of_first(runs, "norm", "Gradient norm", "The norm of the gradients before clipping.", "norm",
                         lambda log: [log.steps.norm[row] for row in log.rows], log=True)  # fmt: skip
    yield from _of_first(runs, "lr", "Learning rate", "The learning rate of each step.", "learning rate",
                         lambda log: [log.steps.lr[row] for row in log.rows])  # fmt: skip


def _rates(log: RankLog) -> list[float]:
    """Samples a second over windows, which a single step's noise does not show in."""
    steps, window, found = log.steps, max(1, len(log.rows) // 200), list[float]()
    for number in range(0, len(log.rows), window):
        rows = log.rows[number : number + window]
        seconds = sum(steps.seconds[row] for row in rows)
        found += [sum(steps.samples[row] for row in rows) / seconds if seconds > 0 else math.nan] * len(rows)
    return found


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
            found = [(at, e) for at, e in first.of(Evaluated) if e.split == split and metric in e.metrics]
            if len(found) < 2:  # one alone stands in the results
                continue
            began, samples, _, steps = first.started[0].unix_time, *_axes(first)
            of_step = dict(zip(steps, samples, strict=True))
            axes = [[of_step.get(e.step, 0.0) for _, e in found], [(at - began) / 60 for at, _ in found],
                    [float(e.step) for _, e in found]]  # fmt: skip
            trace = line(run.name if len(runs) > 1 else metric, axes, [e.metrics[metric] for _, e in found], number)
            traces.append(trace | {"markers": True})
        label = clean(f"{split} {metric}")[:60]
        if traces:
            yield Figure(f"score-{index}", label.capitalize(),
                         f"The {label} of each evaluation.", traces, y=label, axes=AXES)  # fmt: skip


def phases(runs: Sequence[WholeRun]) -> Iterable[Figure]:
    """How a step's time is spent: a bar for each rank, or each run."""
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
    """Who waited for whom; `waits` as in Why."""
    ranks = sorted(log.rank for log in run.latest())[:MOST_ROWS]
    if len(ranks) < 3 or not waits:  # of two, the first sentence says it
        return
    total = sum(sum(of.values()) for of in waits.values()) or 1.0
    cells = [[None if a == b else round(100 * waits.get(a, {}).get(b, 0.0) / total, 1) for b in ranks] for a in ranks]
    trace = {"name": "waiting", "z": cells, "y": [f"rank {r}" for r in ranks], "x0": [f"rank {r}" for r in ranks]}
    words = "The row's rank waited for the column's: its part of all waiting."
    yield Figure("waits", "Who waited for whom", words, [trace], x="for", y="waited", kind="matrix")


def devices(run: WholeRun) -> Iterable[Figure]:
    """What the machines did meanwhile: a line for each host, or GPU."""
    began = run.first.started[0].unix_time if run.first and run.first.started else min(
        (found[0].unix_time for found in run.machines.values() if found), default=0.0)  # fmt: skip

    def figure(
        name: str, title: str, y: str, value: Callable[[MachineUse], dict[str, float | None]]
    ) -> Iterable[Figure]:
        columns: dict[str, tuple[list[float], list[float]]] = {}
        for found in run.machines.values():
            for one in found:
                for label, number in value(one).items():
                    if number is not None and len(columns) <= MOST_LINES:
                        xs, ys = columns.setdefault(label, ([], []))
                        xs.append(max(0.0, one.unix_time - began) / 60)
                        ys.append(number)
        traces = [line(label, [xs], ys, n) for n, (label, (xs, ys)) in enumerate([*columns.items()][:MOST_LINES])]
        if any(value and value > NOTHING for trace in traces for value in trace["y"]):
            yield Figure(name, title, "Of each machine, about once a second.", traces, x="minutes", y=y, from_zero=True)

    yield from figure(
        "cores", "Processor", "cores busy", lambda m: {m.host: m.cores_busy, f"{m.host}: cores there are": m.cores}
    )
    yield from figure("memory", "Memory in use", "GB", lambda m: {m.host: m.memory_bytes / 1e9})
    yield from figure("rss", "Memory of each rank", "GB",
                      lambda m: {f"rank {r}": use.memory_bytes / 1e9 for r, use in m.ranks.items()})  # fmt: skip
    yield from figure("network", "Network", "MB/s", lambda m: {
        f"{m.host} sent": m.sent_bytes / 1e6, f"{m.host} received": m.received_bytes / 1e6})  # fmt: skip
    for name, title, y, of, factor in OF_GPUS:
        yield from figure(name, title, y, partial(_of_gpus, of=of, factor=factor))


def _of_gpus(machine: MachineUse, *, of: str, factor: float) -> dict[str, float | None]:
    found = {f"{machine.host} GPU {gpu.index}": getattr(gpu, of) for gpu in machine.gpus}
    return {name: None if number is None else number * factor for name, number in found.items()}
