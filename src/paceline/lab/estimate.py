"""Estimates a step on several machines from measured work, the bytes sent, and the latency and rate of a stated link.

    step = work + exchange on one machine + 2 (M-1) * latency + 2 (M-1)/M * bytes / rate

for M machines like this one with one link each. The first two terms are measured (`shares`), the others are a ring's.
docs/scaling.md says what the estimate leaves out.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import linear_regression, mean

import msgspec
from rich.table import Table

from paceline.errors import UsageError, plural
from paceline.lab.compare import make_table
from paceline.lab.runs import At
from paceline.view.step_parts import StepParts

Points = Mapping[At, StepParts]  # the mean step on so many ranks with so many samples each
MACHINES = (2, 4, 8, 16, 64, 512)
COMPARED_MACHINES = (2, 8)  # for which what reduces traffic is estimated
LOCAL_STEPS = 16
INT8_SHARE = (1 + 4 / 512) / 4  # a byte for each number, and a scale for each 512
COLUMNS = ("scaling", "ranks", "batch each", "step ms", "samples/s", "efficiency", "on")
EXAMPLES = "100Gbit,5us   10Gbit,30us   12.5GB,2us   1Gbit"
_SCALE = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30}
_RATE = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?(k|K|M|m|G|g|T|t|Ki|Mi|Gi)?(bit|bps|B)(?:/s|ps)?")
_TIME = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?(ns|us|\u00b5s|\u03bcs|ms|s)")  # two letters look like a Greek mu
_SECONDS = {"ns": 1e-9, "us": 1e-6, "\u00b5s": 1e-6, "\u03bcs": 1e-6, "ms": 1e-3, "s": 1.0}


@dataclass(frozen=True)
class Network:
    """The link of one machine."""

    bytes_per_second: float
    latency_seconds: float = 0.0


@dataclass(frozen=True)
class Sent:
    """What a machine sends to the others."""

    share: float  # of all bytes
    messages: float  # that follow each other; what is sent to all at once is one
    every: int = 1  # so many steps


@dataclass(frozen=True)
class Machine:
    """What all measured points share."""

    cores: int
    threads: int  # of each rank
    weight_bytes: int  # what ranks exchange in a step
    over_network: bool = False  # whether the measured ranks exchange over a network
    in_parts: bool = False  # whether a rank is a copy of the model that several processes share
    low_rank_bytes: int = 0  # what they exchange with --compress powersgd; 0: unknown
    over_gloo: bool = True  # whose receiver asks for each message first: a message takes the latency twice

    def crowd(self, ranks: int) -> float:
        """How many threads there are for each core, at least 1."""
        return max(1.0, ranks * self.threads / self.cores)


class Estimate(msgspec.Struct, frozen=True):
    """A step that is estimated, not measured."""

    mode: str
    at: At
    where: str
    step_seconds: float
    efficiency: float


def estimates_of(points: Points, machine: Machine, weak: int | None, strong: int | None, link: Network
                 ) -> list[Estimate]:  # fmt: skip
    """More machines like this one over `link`; for `weak` also with what reduces traffic."""
    found = list[Estimate]()
    here = _ranks_each(points, machine)

    def add(count: int, mode: str, batch: int, sent: Sent, where: str) -> None:
        work = 1 if mode == "weak" else count * here
        if own := batch // work:
            seconds = estimated_step(points, machine, count, own, link, sent)
            alone = _work_alone(points, batch) / work
            found.append(Estimate(mode, At(count * here, own), where, seconds, alone / seconds if seconds else 0.0))

    for count in MACHINES:
        for mode, batch in (("weak", weak), ("strong", strong)):
            if batch:
                where = f"{count} machines, {plural(here, 'rank')} each"
                add(count, mode, batch, Sent(1.0, ring_messages(count)), where)
    for count in COMPARED_MACHINES if weak else ():
        for words, sent in less_traffic(machine, count):
            add(count, "weak", weak or 0, sent, f"{count} machines, {words}")
    return found


def estimated_step(points: Points, machine: Machine, count: int, batch: int, link: Network, sent: Sent | None = None
                   ) -> float:  # fmt: skip
    """Seconds of a step on so many machines, each of whose ranks has `batch` samples."""
    here, sent = _ranks_each(points, machine), sent or Sent(1.0, ring_messages(count))
    work, inside = _work_alone(points, batch), 0.0
    if here > 1:  # ranks of one machine slow each other down, and wait for the slowest
        beside = {at: one for at, one in points.items() if at.ranks == here}
        inside = mean(one.exchange for one in beside.values())
        work *= mean((one.step - one.exchange) / _work_alone(points, at.batch) for at, one in beside.items())
    latency = link.latency_seconds * (2 if machine.over_gloo else 1)
    between = sent.messages * latency + ring_volume(count) * sent.share * machine.weight_bytes / link.bytes_per_second
    return work + inside + between / sent.every


def _ranks_each(points: Points, machine: Machine) -> int:
    """The most ranks measured that have cores of their own."""
    return max((at.ranks for at in points if machine.crowd(at.ranks) <= 1 and not machine.over_network), default=1)


def _work_alone(points: Points, batch: int) -> float:
    """Seconds that one rank takes for `batch` samples: measured, or on the line through what was measured."""
    alone = {at.batch: one.step for at, one in points.items() if at.ranks == 1}
    if batch in alone:
        return alone[batch]
    if len(alone) == 1:
        [(size, seconds)] = alone.items()
        return seconds * batch / size
    slope, start = linear_regression(list(alone), list(alone.values()))
    return max(slope * batch + start, min(seconds * batch / size for size, seconds in alone.items()))


def less_traffic(machine: Machine, count: int) -> list[tuple[str, Sent]]:
    """The settings that reduce what so many machines send, by name; without those whose bytes are unknown."""
    if machine.in_parts:  # sent as they are
        return []
    found = [("--compress bf16", Sent(0.5, 2)), ("--compress int8", Sent(INT8_SHARE, 2))]
    if machine.low_rank_bytes:
        sums = 2 * (1 if count == 2 else ring_messages(count))  # two machines send each other theirs
        found += [("--compress powersgd", Sent(machine.low_rank_bytes / machine.weight_bytes, sums))]
    return [*found, (f"--local-steps {LOCAL_STEPS}", Sent(1.0, ring_messages(count), LOCAL_STEPS))]


def ring_messages(ranks: int) -> float:
    """How many messages of a ring follow each other."""
    return 2.0 * (ranks - 1)


def ring_volume(ranks: int) -> float:
    """How many times its gradients each rank of a ring sends."""
    return 2.0 * (ranks - 1) / ranks


def estimate_table(rows: Sequence[Estimate]) -> Table:
    """For people."""
    table = make_table(COLUMNS, "ESTIMATED, not measured (docs/scaling.md)")
    for row in rows:
        rate = row.at.ranks * row.at.batch / row.step_seconds
        numbers = (f"{row.step_seconds * 1000:.1f}", f"{rate:,.0f}", f"{row.efficiency:.2f}", row.where)
        table.add_row(row.mode, str(row.at.ranks), str(row.at.batch), *numbers)
    return table


def parse_network(text: str) -> Network:
    """The link that `text` describes: a rate, and after a comma the latency of one message (default 0).

    Raises:
        UsageError: says what is not understood, with examples.
    """
    rate, comma, latency = (word.strip() for word in text.partition(","))
    if (found := _RATE.fullmatch(rate)) is None or float(found[1]) <= 0:
        raise _refused(text, f"{rate!r} is no rate above 0: a number, then Gbit, Mbit, GB, MB (bits or bytes a second)")
    # k, m, g, t in either case, as tc and people write them: a rate is never in thousandths
    prefix = found[2] or ""
    prefix = prefix if len(prefix) == 2 else {"K": "k", "m": "M", "g": "G", "t": "T"}.get(prefix, prefix)
    size = _SCALE[prefix] * (1.0 if found[3] == "B" else 1 / 8)
    if not comma:
        return Network(float(found[1]) * size)
    if (time := _TIME.fullmatch(latency)) is None:
        raise _refused(text, f"{latency!r} is no time: a number, then us, ms or ns")
    return Network(float(found[1]) * size, float(time[1]) * _SECONDS[time[2]])


def _refused(text: str, why: str) -> UsageError:
    return UsageError(code="network-not-understood", value=text, reason=why, examples=EXAMPLES)
