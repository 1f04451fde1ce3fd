"""What nobody has measured: more ranks on this machine, more machines over a stated network, and how sure that is.

A range is what the model predicts when it is fitted without each number of ranks in turn, made wider by the largest
error that it then makes on the one left out. It covers chance and the model's form, not what it leaves out.
"""

from collections.abc import Callable, Sequence

import msgspec
from rich.table import Table

from paceline.bench.compare import make_table
from paceline.bench.fit import Points, fit_model, hold_out
from paceline.bench.model import Machine, Model, Network, Sent, ring_messages
from paceline.bench.runs import At
from paceline.errors import plural

MACHINES = (2, 4, 8, 16, 64, 512)  # for which a stated network is extrapolated to
SLOW_MACHINES = (2, 8)  # for which what helps on slow networks is
LOCAL_STEPS = 16
INT8_SHARE = (1 + 4 / 512) / 4  # a byte for each number, and a scale for each 512
COLUMNS = ("scaling", "ranks", "batch each", "step ms", "range", "samples/s", "efficiency", "on")


class Ahead(msgspec.Struct, frozen=True):
    """A step that nobody has measured."""

    mode: str
    at: At
    where: str
    step_seconds: float
    efficiency: float
    range_seconds: tuple[float, float] | None
    """None: too few numbers of ranks were measured to say"""


def ahead_of(
    parts: Points, machine: Machine, weak: int | None, strong: int | None, network: Network | None
) -> list[Ahead]:
    """Twice the most ranks measured, on this machine; with a network, more machines like it, and what helps there."""
    model, found = fit_model(parts, machine), list[Ahead]()
    ranks = sorted({at.ranks for at in parts} - {1})
    others = [fit_model({at: one for at, one in parts.items() if at.ranks != left}, machine) for left in ranks]
    others = others if len(ranks) > 1 else []
    error = max((abs(one.error) for one in hold_out(parts, machine)), default=0.0)

    def add(ranks: int, where: str, mode: str, batch: int | None, step: Callable[[Model, int], float]) -> None:
        own = batch // (1 if mode == "weak" else ranks) if batch else 0
        if batch and own:
            seconds, tried = step(model, own), [step(one, own) for one in (model, *others)]
            ideal = model.step(1, batch) / (1 if mode == "weak" else ranks)
            wide = (min(tried) / (1 + error), max(tried) * (1 + error)) if others else None
            found.append(Ahead(mode, At(ranks, own), where, seconds, ideal / seconds if seconds > 0 else 0.0, wide))

    most = 2 * max(at.ranks for at in parts)
    here = max((at.ranks for at in parts if machine.crowd(at.ranks) <= 1.0), default=1)
    for mode, batch in (("weak", weak), ("strong", strong)):
        add(most, "this machine", mode, batch, lambda model, own: model.step(most, own))
    if network is None:
        return found
    for count in MACHINES:
        where = f"{count} machines like this one, {plural(here, 'rank')} each"
        for mode, batch in (("weak", weak), ("strong", strong)):
            add(count * here, where, mode, batch,
                lambda model, own, many=count * here: model.step_on_many(many, own, here, network))  # fmt: skip
    for count in SLOW_MACHINES:
        for words, sent in ways(machine, count):
            add(count * here, f"{count} machines with one link each, {words}", "weak", weak,
                lambda model, own, count=count, sent=sent: model.step_between(
                    count, here, own, network, sent))  # fmt: skip
    return found


def ways(machine: Machine, count: int) -> list[tuple[str, Sent]]:
    """What may leave each of so many hosts, in words and numbers.

    What is not known (powersgd's share depends on the shapes of the weights) is left out.
    """
    ring = ring_messages(count)
    found = [("all is sent", Sent(1.0, ring))]
    if machine.in_parts:  # which are sent as they are
        return found
    found += [("--compress bf16", Sent(0.5, 2)), ("--compress int8", Sent(INT8_SHARE, 2))]
    if machine.low_rank_bytes:
        sums = 2 * (1 if count == 2 else ring)  # of few numbers; between two each sends the other its own
        found += [("--compress powersgd", Sent(machine.low_rank_bytes / machine.weight_bytes, sums))]
    return [*found, (f"--local-steps {LOCAL_STEPS}", Sent(1.0, ring, LOCAL_STEPS))]


def ahead_table(rows: Sequence[Ahead]) -> Table:
    """For people."""
    table = make_table(COLUMNS, "EXTRAPOLATED, not measured (the model: docs/scaling.md)")
    for row in rows:
        rate = row.at.ranks * row.at.batch / row.step_seconds
        wide = "-".join(f"{1000 * one:.1f}" for one in row.range_seconds) if row.range_seconds else "unknown"
        numbers = (f"{row.step_seconds * 1000:.1f}", wide, f"{rate:,.0f}", f"{row.efficiency:.2f}", row.where)
        table.add_row(row.mode, str(row.at.ranks), str(row.at.batch), *numbers)
    return table
