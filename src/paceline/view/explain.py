"""How a run works, drawn from that very run (`paceline report --explain`): for a class to look at beside the code."""

import math
from collections.abc import Iterator
from statistics import median

from paceline.ladder import middle
from paceline.observe.events import Traced
from paceline.observe.terminal import clean
from paceline.view.drawing import Canvas, Drawing, colour_of_rank
from paceline.view.figures import PHASE_COLOURS
from paceline.view.run import WholeRun
from paceline.view.tables import HOLDS, KINDS

MOST_RANKS, MOST_LEAVES, MOST_BOXES = 8, 32, 300
WIDTH, LABEL = 880.0, 74.0
EXACT_TREE = ("exact", "zero")
UPDATES = {"zero": "updates its share, gets the others'", "fsdp": "updates the share that it keeps"}


def drawings(run: WholeRun) -> list[Drawing]:
    """All that can be drawn of it."""
    steps = _typical(run)
    return [*_stages(run, steps), *_one_step(run, steps), *_who_saw_what(run), *_tree(run), *_who_keeps_what(run)]


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
    return f"{1e3 * seconds:,.1f} ms" if seconds < 1 else f"{seconds:,.2f} s"


def _lasts(one: Traced, phase: str) -> float:
    return sum(seconds for name, _, seconds in one.phases if name == phase)


def _stages(run: WholeRun, steps: dict[int, Traced]) -> Iterator[Drawing]:
    """Construct, forward, backward and optimizer, as on every diagram of data parallelism, with this run's numbers."""
    anatomy = run.first.anatomy if run.first else None
    if not steps or anatomy is None:
        return
    ranks, lane = [*steps][:4], (WIDTH - LABEL) / min(4, len(steps))
    canvas = Canvas(WIDTH, 398)
    number = sum(_product(shape) for _, shape, _ in anatomy.parameters)
    batch = run.first.steps.samples[-1] if run.first and run.first.steps.samples else 0
    each = max(1, round(batch / max(1, run.world_size)))
    exchanged = max((call for one in steps.values() for call in one.calls), key=lambda call: call[3], default=None)
    rows = [
        ("construct", 24, [f"{len(anatomy.parameters)} tensors, {number:,.0f} numbers", "alike on every rank"]),
        ("forward", 108, []), ("backward", 192, []), ("optimizer", 334, []),
    ]  # fmt: skip
    for name, top, words in rows:
        canvas.text(0, top + 28, name)
        for place, rank in enumerate(ranks):
            left, one = LABEL + place * lane, steps[rank]
            canvas.box(left + 4, top, lane - 12, 56, PHASE_COLOURS.get(name, "card"), outlined=True)
            lines = (
                words
                or {
                    "forward": [
                        f"rank {rank}: about {each} samples",
                        f"loss of its own, {_ms(_lasts(one, 'forward'))}",
                    ],
                    "backward": ["gradients of its own samples", _ms(_lasts(one, "backward"))],
                    "optimizer": [
                        UPDATES.get(run.strategy, "the same update everywhere"),
                        _ms(_lasts(one, "optimizer")),
                    ],
                }[name]
            )
            for index, line in enumerate(lines):
                canvas.text(left + 14, top + 24 + 18 * index, line, on=name != "construct")
            if name != "optimizer":
                canvas.arrow(
                    left + lane / 2 - 4, top + 56, left + lane / 2 - 4, top + 84 if name != "backward" else 268
                )
            else:
                canvas.arrow(left + lane / 2 - 4, 312, left + lane / 2 - 4, top)
    canvas.box(LABEL + 4, 268, len(ranks) * lane - 12, 44, "grey", outlined=True)
    what = (
        f"{clean(exchanged[0])[:40]}: {exchanged[3] / 1e6:,.2f} MB in {_ms(max(0.0, exchanged[2]))}"
        if exchanged
        else ""
    )
    alone = "one rank alone exchanges nothing"
    canvas.text(LABEL + 16, 287, "the exchange: gradients are added up over ranks, and divided", on=True)
    canvas.text(LABEL + 16, 304, what if run.world_size > 1 else alone, on=True)
    canvas.text(0, 294, "sync")
    more = f" Ranks 0 to 3 of {run.world_size}." if run.world_size > 4 else ""
    yield Drawing(
        "The four stages of a step", "What each rank does for itself, and where they meet." + more, canvas.svg()
    )


def _product(shape: list[int]) -> float:
    return math.prod(shape, start=1.0)  # of floats: a stranger's numbers may have thousands of digits


def _one_step(run: WholeRun, steps: dict[int, Traced]) -> Iterator[Drawing]:
    """One step of all ranks on one clock, with the collectives in it."""
    if not steps:
        return
    began = min(one.unix_time for one in steps.values())
    ends = [one.unix_time - began + at + lasts for one in steps.values() for _, at, lasts in one.phases[-1:]]
    scale, lane = (WIDTH - LABEL - 10) / max(*ends, 1e-6), 64.0
    canvas = Canvas(WIDTH, 30 + lane * len(steps) + 40)
    for place, (rank, one) in enumerate(steps.items()):
        top, offset = 8 + place * lane, one.unix_time - began
        canvas.text(0, top + 20, f"rank {rank}")
        for name, at, lasts in one.phases[:MOST_BOXES]:
            left, width = LABEL + (offset + at) * scale, max(1.0, lasts * scale)
            canvas.box(left, top, width, 30, PHASE_COLOURS.get(name, "pink"), told=f"rank {rank}: {name}, {_ms(lasts)}")
            if width > 8 * len(name):
                canvas.text(left + 4, top + 20, name, on=True)
        for name, at, lasts, size in one.calls[:MOST_BOXES]:
            left, width = LABEL + (offset + at) * scale, max(2.0, max(0.0, lasts) * scale)
            words = f"{clean(name)[:60]}: {size / 1e6:,.3f} MB, {_ms(lasts) if lasts >= 0 else 'not over'}"
            canvas.box(left, top + 34 + 9 * (size < 1024), width, 7, "red" if size >= 1024 else "yellow", told=words)
    bottom = 8 + lane * len(steps)
    for tick in range(5):
        at = max(ends) * tick / 4
        canvas.text(LABEL + at * scale - (60 if tick == 4 else 0), bottom + 14, _ms(at), soft=True)
    step = next(iter(steps.values())).step
    keys = [
        *PHASE_COLOURS.items(),
        ("gradients travel", "red"),
        ("small words", "yellow"),
    ]
    canvas.legend(LABEL, bottom + 34, keys)
    clocks = [clock.error_seconds for clock in run.clocks.values()]
    hosts = len({*run.hosts.values()})
    error = f" Clocks of hosts agree within {_ms(max(clocks))}." if clocks else ""
    if hosts > 1 and not clocks:
        error = " The hosts' clocks were not compared."
    yield Drawing(
        f"Step {step:,}, on one clock", "Phases of each rank, and below them what travels." + error, canvas.svg()
    )


def _who_saw_what(run: WholeRun) -> Iterator[Drawing]:
    """The global batch, and which part of it each rank computes."""
    logs = [log for log in run.latest() if log.share and log.rows]
    if not logs:
        return
    virtual = max(log.share[1] for log in logs if log.share)
    if virtual > MOST_BOXES:
        return
    batch, width = logs[0].steps.samples[logs[0].rows[0]], (WIDTH - LABEL) / max(1, virtual)
    canvas = Canvas(WIDTH, 108)
    canvas.text(0, 30, "the batch")
    canvas.text(0, 76, "ranks")
    for log in logs:
        first, stop = log.share or (0, 0)
        colour = colour_of_rank(log.rank)
        for number in range(first, stop):
            canvas.box(LABEL + number * width, 10, max(1.0, width - 2), 32, colour, told=f"virtual rank {number}")
            if width > 30:
                canvas.text(LABEL + number * width + 6, 31, f"v{number}", on=True)
        if stop > first:
            canvas.box(LABEL + first * width, 56, max(1.0, (stop - first) * width - 2), 32, colour, outlined=True)
            if (stop - first) * width > 46:
                canvas.text(LABEL + first * width + 6, 77, f"rank {log.rank}", on=True)
    words = (
        f"A global batch of {batch:,} samples is cut into {virtual} virtual ranks (v0, v1, ...), dealt to the ranks."
    )
    listed = sorted((one.virtual_rank, one.indices) for log in logs for one in log.samples)[:6]
    told = "; ".join(f"v{v}: {', '.join(map(str, found[:6]))}{', ...' * (len(found) > 6)}" for v, found in listed)
    words += f" The first step listed: {told}." if told else " With --record-samples their samples stand here, too."
    yield Drawing("Who sees which sample", words, canvas.svg())


def _tree(run: WholeRun) -> Iterator[Drawing]:
    """In which order gradients are added up: the same tree on any number of ranks."""
    logs = [log for log in run.latest() if log.share]
    leaves = max((log.share[1] for log in logs if log.share), default=0)
    if run.strategy not in EXACT_TREE or not 2 <= leaves <= MOST_LEAVES:
        return
    owner = {leaf: log.rank for log in logs if log.share for leaf in range(*log.share)}
    width, depth = WIDTH / leaves, (leaves - 1).bit_length()
    canvas = Canvas(WIDTH, 60 + 52 * depth)

    def place(node: tuple[int, int]) -> tuple[float, float]:
        return (node[0] + node[1]) / 2 * width, 24 + 52 * (depth - (node[1] - node[0] - 1).bit_length())

    def draw(node: tuple[int, int]) -> None:
        x, y = place(node)
        ranks = {owner.get(leaf, 0) for leaf in range(*node)}
        if node[1] - node[0] > 1:
            for child in ((node[0], middle(node)), (middle(node), node[1])):
                canvas.edge(x, y, *place(child))
                draw(child)
        told = f"leaves {node[0]} to {node[1] - 1}: " + (f"rank {min(ranks)}" if len(ranks) == 1 else "over ranks")
        canvas.disc(x, y, 11, colour_of_rank(min(ranks)) if len(ranks) == 1 else "card", told=told)
        canvas.text(x - (4 if node[1] - node[0] > 1 else 7), y + 4, "+" if node[1] - node[0] > 1 else f"v{node[0]}",
                    on=len(ranks) == 1)  # fmt: skip

    draw((0, leaves))
    words = (
        f"Leaves are the gradients of {leaves} virtual ranks, in their rank's colour; a plus in a colour is done by "
        "that rank alone, one without is done over ranks. Any number of ranks does the same additions: the same bits."
    )
    yield Drawing("The tree in which gradients are added up", words, canvas.svg())


def _who_keeps_what(run: WholeRun) -> Iterator[Drawing]:
    """Which part of weights, gradients and optimizer state each rank holds between two steps."""
    size = min(run.world_size, MOST_RANKS)
    if run.first is None or run.first.anatomy is None or size < 2:
        return
    shared = HOLDS.get(run.strategy, HOLDS["all on every rank"])
    canvas, lane = Canvas(WIDTH, 34 + 44 * size), (WIDTH - LABEL) / 3
    for place, kind in enumerate(KINDS):
        canvas.text(
            LABEL + place * lane + 4, 14, f"{kind}{': a share each' if shared[place] else ': all, on every rank'}"
        )
    for rank in range(size):
        top = 24 + 44 * rank
        canvas.text(0, top + 20, f"rank {rank}")
        for place, is_shared in enumerate(shared):
            left, width = LABEL + place * lane + 4, lane - 12
            canvas.box(left, top, width, 32, "card", outlined=True)
            part = width / size if is_shared else width
            canvas.box(left + (rank * part if is_shared else 0), top, part, 32, colour_of_rank(rank))
    yield Drawing("Who keeps what", "What each rank holds between two steps, as parts of the whole.", canvas.svg())
