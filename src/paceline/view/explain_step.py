"""One step, drawn from a run: the stages of each rank and where they meet, and the same on one clock."""

from collections import Counter
from collections.abc import Iterator
from math import prod
from statistics import median

from paceline.errors import plural
from paceline.observe.events import Traced
from paceline.observe.terminal import clean
from paceline.view.drawing import LABEL, WIDTH, Canvas, Drawing
from paceline.view.figures import PHASE_COLOURS
from paceline.view.run import WholeRun

MOST_RANKS, MOST_LANES, MOST_NAMES, MOST_BOXES = 8, 4, 3, 300
SMALL_BYTES = 1024
ROWS = 2  # below the phases, for tensors that travel at one time
OPTIMIZER = {"zero": ("updates its share", "sends it, "), "fsdp": ("updates its share", "")}
TRAVELS = {"zero": "gradients and weights travel", "fsdp": "weights and gradients travel"}
UNSEEN = "DDP's buckets leave during backward; torch does not say when"


def step_drawings(run: WholeRun) -> Iterator[Drawing]:
    """Both, of a step that took about as long as most."""
    if steps := _typical(run):
        yield from _stages(run, steps)
        yield from _one_step(run, steps)


def _typical(run: WholeRun) -> dict[int, Traced]:
    """The step in detail that took about as long as most, by rank; it is the same step on all of them."""
    logs = run.latest()[:MOST_RANKS]
    common = set(logs[0].traced).intersection(*(log.traced for log in logs[1:])) if logs else set[int]()
    common = {step for step in common if all(log.traced[step].phases for log in logs)}
    late = [step for step in sorted(common) if step > logs[0].started[-1].start_step + 5] or sorted(common)
    if not late:
        return {}
    lasts = {step: max(sum(p[2] for p in log.traced[step].phases) for log in logs) for step in late}
    usual = median(lasts.values())
    step = min(late, key=lambda one: abs(lasts[one] - usual))
    return {log.rank: log.traced[step] for log in logs}


def _ms(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:,.2f} s"
    return f"{1e3 * seconds:.0f} ms" if seconds >= 0.01 or not seconds else f"{1e3 * seconds:.1f} ms"


def _lasts(one: Traced, phase: str) -> float:
    return sum(seconds for name, _, seconds in one.phases if name == phase)


def _needed(one: Traced, at: float) -> float:
    """When a collective that has begun then is over at the latest: nothing goes on after `sync` without it."""
    ends = [begins + lasts for name, begins, lasts in one.phases if name == "sync" and begins + lasts > at]
    return ends[0] if ends else max(at, *(begins + lasts for _, begins, lasts in one.phases))


def _in_rows(one: Traced) -> Iterator[tuple[int, str, float, float, str]]:
    """The collectives, with when they end: tensors in rows in which none hides another, below them totals and votes."""
    free = [0.0] * ROWS
    for name, at, lasts, size in one.calls:
        until = min(at + lasts, _needed(one, at)) if lasts >= 0 else _needed(one, at)
        row = ROWS
        if not _is_small(name, size):
            row = next((n for n, end in enumerate(free) if end <= at), 0)
            free[row] = max(free[row], until)
        words = f"{size / 1e6:,.3f} MB, {_ms(lasts) if lasts >= 0 else 'seen to be over later'}"
        yield row, clean(name)[:60], at, until, words


def _is_small(name: str, size: int) -> bool:
    """Whether it is about the step (totals, votes; they have names in words), and no tensor of the model's."""
    return size < SMALL_BYTES and " " in name


def _exchange(run: WholeRun, one: Traced) -> str:
    if run.world_size < 2:
        return "one rank alone exchanges nothing"
    if run.strategy == "ddp":
        return UNSEEN
    sent = [(name, size) for name, _, _, size in one.calls if not _is_small(name, size)]
    if not sent:
        return ""
    often = Counter(clean(name)[:24] for name, _ in sent).most_common()
    names = ", ".join(f"{count} x {name}" if count > 1 else name for name, count in often[:MOST_NAMES])
    more = ", ..." * (len(often) > MOST_NAMES)
    return f"{names}{more}: {sum(size for _, size in sent) / 1e6:,.2f} MB"


def _stages(run: WholeRun, steps: dict[int, Traced]) -> Iterator[Drawing]:
    """Construct, forward, backward and optimizer, as on every diagram of data parallelism, with this run's numbers."""
    anatomy = run.first.anatomy if run.first else None
    if anatomy is None:
        return
    ranks, lane = [*steps][:MOST_LANES], (WIDTH - LABEL) / min(MOST_LANES, len(steps))
    canvas, whole = Canvas(WIDTH, 374), len(ranks) * lane - 12
    number = sum(prod(shape, start=1.0) for _, shape, _ in anatomy.parameters)  # floats: a stranger's may be long
    batch = run.first.steps.samples[-1] if run.first and run.first.rows else 0
    each = max(1, round(batch / max(1, run.world_size)))
    alike = "" if run.world_size < 2 else "; a share each" if run.strategy == "fsdp" else "; the same on every rank"
    tensors = plural(len(anatomy.parameters), "tensor")
    canvas.box(LABEL + 4, 8, whole, 36, "card", outlined=True)
    canvas.text(LABEL + 16, 30, f"{tensors}, {number:,.0f} numbers{alike}")
    canvas.box(LABEL + 4, 240, whole, 48, "grey", outlined=True)
    meets = "gradients are added up over ranks, and divided" if run.world_size > 1 else "nothing to wait for"
    canvas.text(LABEL + 16, 260, meets, on=True)
    canvas.text(LABEL + 16, 278, _exchange(run, steps[ranks[0]]), on=True)
    for name, y in (("construct", 30), ("forward", 104), ("backward", 188), ("sync", 268), ("optimizer", 344)):
        canvas.text(0, y, name)
    usual = "the same update" if run.world_size > 1 else "updates the weights"
    updates, sends = OPTIMIZER.get(run.strategy, (usual, ""))
    for place, rank in enumerate(ranks):
        left, one = LABEL + place * lane, steps[rank]
        middle = left + lane / 2 - 2
        stages = (
            (72, "forward", f"rank {rank}: {each:,} samples", f"its loss, {_ms(_lasts(one, 'forward'))}"),
            (156, "backward", "its own gradients", _ms(_lasts(one, "backward"))),
            (312, "optimizer", updates, sends + _ms(_lasts(one, "optimizer"))),
        )
        for top, name, above, below in stages:
            canvas.box(left + 4, top, lane - 12, 56, PHASE_COLOURS[name], outlined=True)
            canvas.text(left + 16, top + 24, above, on=True)
            canvas.text(left + 16, top + 42, below, on=True)
        for top, bottom in ((44, 72), (128, 156), (212, 240), (288, 312)):
            canvas.arrow(middle, top, middle, bottom)
    more = f" Ranks 0 to {MOST_LANES - 1} of {run.world_size}." if run.world_size > MOST_LANES else ""
    words = "What each rank does for itself, and where they meet." if run.world_size > 1 else "What the one rank does."
    yield Drawing("The four stages of a step", words + more, canvas.svg())


def _one_step(run: WholeRun, steps: dict[int, Traced]) -> Iterator[Drawing]:
    """One step of all ranks on one clock, with the collectives in it."""
    began = min(one.unix_time for one in steps.values())
    ends = [one.unix_time - began + at + lasts for one in steps.values() for _, at, lasts in one.phases[-1:]]
    calls = {rank: [*_in_rows(one)] if run.world_size > 1 else [] for rank, one in steps.items()}
    rows = max((row + 1 for found in calls.values() for row, *_ in found if row < ROWS), default=0)
    scale, lane = (WIDTH - LABEL - 10) / max(*ends, 1e-6), 52.0 + 10 * rows if run.world_size > 1 else 42.0
    canvas = Canvas(WIDTH, 50 + lane * len(steps))
    for place, (rank, one) in enumerate(steps.items()):
        top, offset = 8 + place * lane, one.unix_time - began
        canvas.text(0, top + 20, f"rank {rank}")
        for name, at, lasts in one.phases[:MOST_BOXES]:
            left, width = LABEL + (offset + at) * scale, max(1.0, lasts * scale)
            canvas.box(left, top, width, 30, PHASE_COLOURS.get(name, "pink"), told=f"rank {rank}: {name}, {_ms(lasts)}")
            if width > 8 * len(name):
                canvas.text(left + 4, top + 20, name, on=True)
        for row, name, at, until, words in calls[rank][:MOST_BOXES]:
            left, width = LABEL + (offset + at) * scale, max(2.0, (until - at) * scale)
            colour = "yellow" if row == ROWS else "red"
            canvas.box(left, top + 34 + 10 * min(row, rows), width, 7, colour, told=f"{name}: {words}")
    bottom = 8 + lane * len(steps)
    for tick in range(5):
        at = max(ends) * tick / 4
        canvas.text(LABEL + at * scale - (44 if tick == 4 else 0), bottom + 14, _ms(at), soft=True)
    travels = [("totals, votes", "yellow")]
    if run.strategy != "ddp":
        travels.insert(0, (TRAVELS.get(run.strategy, "gradients travel"), "red"))
    canvas.legend(LABEL, bottom + 34, [*PHASE_COLOURS.items(), *(travels if run.world_size > 1 else [])])
    words = "Its phases."
    if run.world_size > 1:
        words = "Phases of each rank, and below them what travels, until it was seen to be over or was needed."
        words += f" {UNSEEN}." if run.strategy == "ddp" else ""
    clocks = [clock.error_seconds for clock in run.clocks.values()]
    words += f" Clocks of hosts agree within {_ms(max(clocks))}." if clocks else ""
    if len({*run.hosts.values()}) > 1 and not clocks:
        words += " The hosts' clocks were not compared."
    yield Drawing(f"Step {next(iter(steps.values())).step:,}, on one clock", words, canvas.svg())
