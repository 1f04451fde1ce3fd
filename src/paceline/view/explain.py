"""How a run works, drawn from that very run (`paceline report --explain`): for a class to look at beside the code."""

from collections.abc import Iterator

from paceline.ladder import EXACT, middle
from paceline.view.drawing import LABEL, WIDTH, Canvas, Drawing, colour_of_rank
from paceline.view.explain_step import MOST_RANKS, step_drawings
from paceline.view.run import WholeRun
from paceline.view.tables import HOLDS, KINDS

MOST_LEAVES, MOST_BOXES = 32, 300


def drawings(run: WholeRun) -> list[Drawing]:
    """All that can be drawn of it."""
    return [*step_drawings(run), *_who_saw_what(run), *_tree(run), *_who_keeps_what(run)]


def _rank_boxes(canvas: Canvas, shares: dict[int, tuple[int, int]], left: float, width: float, top: float) -> None:
    """Which leaves each rank has, below them."""
    for rank, (first, stop) in shares.items():
        if stop > first:
            x, wide = left + first * width, max(1.0, (stop - first) * width - 4)
            canvas.box(x, top, wide, 32, colour_of_rank(rank), outlined=True)
            if wide > 46:
                canvas.text(x + 10, top + 21, f"rank {rank}", on=True)


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
    drawn = 0
    for log in logs:
        first, stop = log.share or (0, 0)
        if first < drawn:  # each is one rank's
            continue
        drawn = stop
        for number in range(first, stop):
            left = LABEL + number * width
            canvas.box(left, 10, max(1.0, width - 4), 32, colour_of_rank(log.rank), told=f"virtual rank {number}")
            if width > 30:
                canvas.text(left + (10 if width > 60 else 5), 31, f"v{number}", on=True)
    _rank_boxes(canvas, {log.rank: log.share or (0, 0) for log in logs}, LABEL, width, 56)
    words = f"There is one virtual rank, v0: the whole global batch of {batch:,} samples is its."
    if virtual > 1:
        words = (
            f"{batch:,} samples, a global batch, are cut into {virtual} virtual ranks (v0, v1, ...), dealt to ranks."
        )
    listed = sorted((one.virtual_rank, one.indices) for log in logs for one in log.samples)[:6]
    told = "; ".join(f"v{v}: {', '.join(map(str, found[:6]))}{', ...' * (len(found) > 6)}" for v, found in listed)
    words += f" The first step listed: {told}." if told else " With --record-samples their samples stand here, too."
    yield Drawing("Who sees which sample", words, canvas.svg())


def _tree(run: WholeRun) -> Iterator[Drawing]:
    """In which order gradients are added up: the same tree on any number of ranks."""
    logs = [log for log in run.latest() if log.share]
    leaves = max((log.share[1] for log in logs if log.share), default=0)
    if run.strategy not in EXACT or not 2 <= leaves <= MOST_LEAVES:
        return
    owner = {leaf: log.rank for log in logs if log.share for leaf in range(*log.share)}
    width, depth = WIDTH / leaves, (leaves - 1).bit_length()
    canvas = Canvas(WIDTH, 92 + 52 * depth)

    def place(node: tuple[int, int]) -> tuple[float, float]:
        return (node[0] + node[1]) / 2 * width - 2, 18 + 52 * (depth - (node[1] - node[0] - 1).bit_length())

    def draw(node: tuple[int, int]) -> None:
        x, y = place(node)
        ranks = {owner.get(leaf, 0) for leaf in range(*node)}
        if node[1] - node[0] > 1:
            for child in ((node[0], middle(node)), (middle(node), node[1])):
                canvas.edge(x, y, *place(child))
                draw(child)
        told = f"leaves {node[0]} to {node[1] - 1}: " + (f"rank {min(ranks)}" if len(ranks) == 1 else "over ranks")
        canvas.disc(x, y, 13, colour_of_rank(min(ranks)) if len(ranks) == 1 else "card", told=told)
        words = "+" if node[1] - node[0] > 1 else f"v{node[0]}"
        canvas.text(x - (4 if words == "+" else 3.6 * len(words)), y + 4, words, on=len(ranks) == 1)

    draw((0, leaves))
    _rank_boxes(canvas, {log.rank: log.share for log in logs if log.share}, 0, width, 48 + 52 * depth)
    words = (
        f"Leaves are the gradients of {leaves} virtual ranks, in their rank's colour; a plus in a colour is done by "
        "that rank alone, one without is done over ranks. Any number of ranks does the same additions: the same bits."
    )
    yield Drawing("The tree in which gradients are added up", words, canvas.svg())


def _who_keeps_what(run: WholeRun) -> Iterator[Drawing]:
    """Which part of weights, gradients and optimizer state each rank holds between two steps."""
    size, anatomy = run.world_size, run.first.anatomy if run.first else None
    if anatomy is None or size < 2:
        return
    shared = HOLDS.get(run.strategy, HOLDS["all on every rank"])
    own = (anatomy.weight_bytes, anatomy.gradient_bytes, anatomy.optimizer_bytes)
    shown, lane = min(size, MOST_RANKS), (WIDTH - LABEL) / 3
    canvas = Canvas(WIDTH, 34 + 44 * shown)
    for place, kind in enumerate(KINDS):
        held = f"{kind}: {'a share each' if shared[place] else 'all on each'}, {own[place] / 1e6:,.1f} MB"
        canvas.text(LABEL + place * lane + 4, 14, held)
    for rank in range(shown):
        top = 24 + 44 * rank
        canvas.text(0, top + 20, f"rank {rank}")
        for place, is_shared in enumerate(shared):
            left, width = LABEL + place * lane + 4, lane - 12
            canvas.box(left, top, width, 32, "card", outlined=True)
            part = width / size if is_shared else width
            canvas.box(left + (rank * part if is_shared else 0), top, part, 32, colour_of_rank(rank))
            if part > 30:
                words = f"1/{size}" if is_shared else "all"
                canvas.text(left + (rank * part if is_shared else 0) + 8, top + 21, words, on=True)
    words = "What each rank holds between two steps, as parts of the whole; MB as counted on rank 0."
    words += f" Ranks 0 to {shown - 1} of {size}." if size > shown else ""
    yield Drawing("Who keeps what", words, canvas.svg())
