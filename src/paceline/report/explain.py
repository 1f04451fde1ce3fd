"""How a run works, drawn with its own numbers (`paceline report --explain`): templates/explain.svg, filled in."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from statistics import median
from typing import Any

from jinja2 import Environment, PackageLoader
from markupsafe import Markup

from paceline.errors import plural
from paceline.report.figures import COLOURS, PHASE_COLOURS
from paceline.report.run import WholeRun
from paceline.runs.console import clean
from paceline.runs.events import Traced

MOST_RANKS, MOST_LANES, MOST_BOXES = 8, 4, 300
SMALL_BYTES = 1024  # of collectives that carry no tensor of the model
UPDATES = {"zero": "updates its shard, sends it", "fsdp": "updates its shard"}


@dataclass(frozen=True)
class Drawing:
    """A drawing, its title, and a sentence about it."""

    title: str
    words: str
    svg: Markup


def drawings(run: WholeRun) -> list[Drawing]:
    """All that can be drawn of the run."""
    steps = _typical(run)
    return [*(_stages(run, steps) if steps else ()), *(_one_step(run, steps) if steps else ()), *_samples(run)]


def _draw(name: str, **values: object) -> Markup:
    environment = Environment(
        loader=PackageLoader("paceline.report"), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    return getattr(environment.get_template("explain.svg").module, name)(**values)


def _typical(run: WholeRun) -> dict[int, Traced]:
    """The same detailed step of each rank, of about median duration."""
    logs = run.latest()[:MOST_RANKS]
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
    anatomy = run.first.anatomy if run.first else None
    if run.first is None or anatomy is None:
        return
    several, batch = run.world_size > 1, run.first.steps.samples[-1] if run.first.rows else 0
    numbers = sum(prod(shape, start=1.0) for _, shape, _ in anatomy.parameters)  # floats: a stranger's may be long
    copies = ("; a shard on each rank" if run.strategy == "fsdp" else "; a copy on each rank") * several
    ranks = [
        {"rank": rank, "samples": max(1, round(batch / max(1, run.world_size))),
         **{phase: _ms(sum(lasts for name, _, lasts in one.phases if name == phase)) for phase in PHASE_COLOURS}}
        for rank, one in [*steps.items()][:MOST_LANES]
    ]  # fmt: skip
    sent = sum(size for name, _, _, size in next(iter(steps.values())).calls if not _is_control(name, size))
    svg = _draw(
        "stages", ranks=ranks, colours=PHASE_COLOURS, updates=UPDATES.get(run.strategy, "updates the weights"),
        model=f"{plural(len(anatomy.parameters), 'tensor')}, {numbers:,.0f} numbers{copies}",
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
