"""What the lines of a training add up to: throughput, the curve of the loss, and what is out of order (no torch here).

Fed line by line, in bounded memory: curves are thinned as they grow.
"""

import math
import statistics
from dataclasses import dataclass, field

import msgspec

from paceline.view.curves import Curve, Point, Rate, Series
from paceline.view.log_formats import EXCEPTION, Reading

MOST_OF_A_KIND, MOST_RANKS, MOST_CHARS = 8, 4096, 200  # of what is out of order; all are counted
WINDOW_SECONDS = 5.0  # of times to the second: a rate over less would be noise
GAP_SECONDS, GAP_TIMES, DROP = 10.0, 10.0, 0.5
SPIKE_SIGMAS, SPIKE_TIMES, WARM_UP = 8.0, 1.5, 10
PLATEAU_SHARE, PLATEAU_POINTS, PLATEAU_GAIN = 0.3, 30, 0.01


class Anomaly(msgspec.Struct, frozen=True):
    """Something out of order: what kind, where, on which rank (empty: none is named), in words."""

    kind: str
    where: str
    rank: str
    words: str


class Analysis(msgspec.Struct, frozen=True):
    """What `paceline analyze --json` prints."""

    name: str
    lines: int
    formats: dict[str, int]  # kind of line -> how many
    ranks: list[str]
    throughput: list[Rate]
    loss: Curve | None  # of the first rank that tells one
    held_out: dict[str, Curve]  # loss and accuracy of a test or validation
    anomalies: list[Anomaly]  # the first of each kind
    counts: dict[str, int]  # kind -> how many there were


@dataclass
class _Rank:
    """What is known of one rank so far."""

    loss: Series = field(default_factory=Series)
    held_out: dict[str, Series] = field(default_factory=dict[str, Series])
    mean: float = math.nan  # of the last losses, and how far they are from it
    spread: float = 0.0
    best_mean: float = math.inf
    improved: int = 0  # the count of losses when the mean was last a percent better
    improved_at: str = ""
    epoch: float | None = None
    place: tuple[float, float] = (-math.inf, 0.0)  # the furthest: epoch, samples or steps in it
    again: list[tuple[str, tuple[float, float]]] = field(default_factory=list[tuple[str, tuple[float, float]]])
    unix_time: float | None = None
    gap_seconds: float = 0.0
    anchor: tuple[float, float, float | None] | None = None  # time, samples or steps, epoch
    usual: dict[str, float] = field(default_factory=dict[str, float])  # by source: throughput
    slow: set[str] = field(default_factory=set[str])  # which of them is below its half
    traceback: str = ""  # where one began that has not told its error yet


class Analyzer:
    """Takes lines one by one; `result` says what they add up to."""

    def __init__(self, name: str) -> None:
        self._name, self.lines = name, 0
        self._formats: dict[str, int] = {}
        self._ranks: dict[str, _Rank] = {}
        self._rates: dict[tuple[str, str], Series] = {}
        self._anomalies: dict[str, list[Anomaly]] = {}
        self._counts: dict[str, int] = {}

    @property
    def knows(self) -> bool:
        """Whether any line was of a known kind."""
        return bool(self._formats or self._counts)

    def add(self, where: str, reading: Reading, *, only_trouble: bool = False) -> None:
        """One more line, and where it stands."""
        self.lines += 1
        label = reading.rank if len(self._ranks) < MOST_RANKS else ""
        rank = self._ranks.setdefault(label, _Rank())
        self._trouble(where, reading, rank)
        if only_trouble:
            return
        if reading.unix_time is not None:
            self._gap(where, reading, rank)
        if reading.format:
            self._formats[reading.format] = self._formats.get(reading.format, 0) + 1
            self._place(where, reading, rank)
            self._speed(where, reading, rank)
            if reading.loss is not None:
                self._loss(where, reading, rank, reading.loss)
            for name, value in reading.held_out.items():
                series = rank.held_out.setdefault(name, Series(highest=name == "accuracy"))
                series.add(Point(where, value, rank.epoch))

    def note(self, kind: str, where: str, rank: str, words: str) -> None:
        """Something out of order."""
        self._counts[kind] = self._counts.get(kind, 0) + 1
        if self._counts[kind] <= MOST_OF_A_KIND:
            self._anomalies.setdefault(kind, []).append(Anomaly(kind, where, rank, words[:MOST_CHARS]))

    def _trouble(self, where: str, reading: Reading, rank: _Rank) -> None:
        if rank.traceback and not reading.text.startswith((" ", "\t")) and EXCEPTION.match(reading.text):
            self.note("traceback", rank.traceback, reading.rank, reading.text)
            rank.traceback = ""
        if reading.trouble == "traceback":
            rank.traceback = where
        elif reading.trouble:
            self.note(reading.trouble, where, reading.rank, reading.text.strip())

    def _gap(self, where: str, reading: Reading, rank: _Rank) -> None:
        now, before = reading.unix_time, rank.unix_time
        rank.unix_time = now
        if now is None or before is None:
            return
        seconds = now - before
        if rank.gap_seconds and seconds > max(GAP_SECONDS, GAP_TIMES * rank.gap_seconds):
            self.note("gap", where, reading.rank, f"no line for {seconds:,.0f} s before this one")
        elif seconds >= 0:
            rank.gap_seconds = max(0.1, 0.9 * rank.gap_seconds + 0.1 * seconds)

    def _place(self, where: str, reading: Reading, rank: _Rank) -> None:
        """How far the rank is; one that goes back has started again."""
        done = reading.samples if reading.samples is not None else reading.step
        if reading.held_out or reading.epoch is None:
            return
        place = (reading.epoch, float(done or 0))
        rank.epoch = reading.epoch
        if place >= rank.place:
            rank.place, rank.again = place, []
        elif not rank.again or place < rank.again[-1][1]:
            rank.again = [(where, place)]
        elif place > rank.again[-1][1]:  # ranks without names are behind now and then, but do not go on there
            rank.again.append((where, place))
            if len(rank.again) == 3:
                self._restarted(reading.rank, rank)

    def _restarted(self, label: str, rank: _Rank) -> None:
        where, place = rank.again[0]
        self.note("restart", where, label, f"goes back from {_at(rank.place)} to {_at(place)}")
        rank.place, rank.again = rank.again[-1][1], []

    def _speed(self, where: str, reading: Reading, rank: _Rank) -> None:
        if reading.samples_per_second is not None:
            self._rate(where, "samples/s", "as the lines say", reading.samples_per_second, reading, rank)
        elif reading.steps_per_second is not None:
            self._rate(where, "steps/s", "as the lines say", reading.steps_per_second, reading, rank)
        done, now = (reading.samples if reading.samples is not None else reading.step), reading.unix_time
        if done is None or now is None or reading.steps_per_second is not None:
            return
        if rank.anchor is None or reading.epoch != rank.anchor[2] or done < rank.anchor[1] or now < rank.anchor[0]:
            rank.anchor = now, done, reading.epoch
        elif now - rank.anchor[0] >= WINDOW_SECONDS and done > rank.anchor[1]:
            unit = "samples/s" if reading.samples is not None else "steps/s"
            rate = (done - rank.anchor[1]) / (now - rank.anchor[0])
            self._rate(where, unit, "from counts and times", rate, reading, rank)
            rank.anchor = now, done, reading.epoch

    def _rate(self, where: str, unit: str, source: str, value: float, reading: Reading, rank: _Rank) -> None:
        series = self._rates.setdefault((unit, source), Series())
        series.add(Point(where, value, rank.epoch))
        usual, kind = rank.usual.get(unit + source, value), unit + source
        if value >= DROP * usual:
            rank.slow.discard(kind)
            rank.usual[kind] = 0.9 * usual + 0.1 * value
        elif kind not in rank.slow and series.count > WARM_UP // 2:  # once, until it is as fast again
            rank.slow.add(kind)
            self.note("slow", where, reading.rank, f"{value:,.4g} {unit}, usually {usual:,.4g}")

    def _loss(self, where: str, reading: Reading, rank: _Rank, loss: float) -> None:
        rank.loss.add(Point(where, loss, rank.epoch))
        if not math.isfinite(loss):
            self.note("not finite", where, reading.rank, f"the loss is {loss}")
            return
        if math.isnan(rank.mean):
            rank.mean = loss
        limit = max(rank.mean + SPIKE_SIGMAS * rank.spread, SPIKE_TIMES * abs(rank.mean))
        if rank.loss.count > WARM_UP and loss > limit:
            self.note("spike", where, reading.rank, f"the loss is {loss:.4g}, before it about {rank.mean:.4g}")
        rank.spread = 0.9 * rank.spread + 0.1 * abs(loss - rank.mean)
        rank.mean = 0.9 * rank.mean + 0.1 * loss
        if rank.mean < rank.best_mean - PLATEAU_GAIN * abs(rank.best_mean) or math.isinf(rank.best_mean):
            rank.best_mean, rank.improved, rank.improved_at = rank.mean, rank.loss.count, where

    def result(self) -> Analysis:
        """What all lines add up to."""
        for label, rank in self._ranks.items():
            if len(rank.again) > 1:
                self._restarted(label, rank)
            if rank.traceback:
                self.note("traceback", rank.traceback, label, "a traceback whose error is not told")
            flat = rank.loss.count - rank.improved
            if flat >= max(PLATEAU_POINTS, PLATEAU_SHARE * rank.loss.count):
                words = f"the last {flat:,} of {rank.loss.count:,} losses are within a percent: {rank.mean:.4g}"
                self.note("plateau", rank.improved_at, label, words)
        self._compare()
        ranks = [rank for _, rank in sorted(self._ranks.items(), key=_by_number)]
        tellers, testers = [rank for rank in ranks if rank.loss.count], [rank for rank in ranks if rank.held_out]
        held_out = {name: series.curve() for name, series in testers[0].held_out.items()} if testers else {}
        rates = [series.rate(*kind) for kind, series in self._rates.items()]
        return Analysis(
            name=self._name,
            lines=self.lines,
            formats=self._formats,
            ranks=[label for label, _ in sorted(self._ranks.items(), key=_by_number) if label],
            throughput=[rate for rate in rates if rate is not None],
            loss=tellers[0].loss.curve() if tellers else None,
            held_out={name: curve for name, curve in held_out.items() if curve is not None},
            anomalies=[one for several in self._anomalies.values() for one in several],
            counts=self._counts,
        )

    def _compare(self) -> None:
        """Which rank is unlike the others, of those that tell as much."""
        tell = {label: rank for label, rank in self._ranks.items() if label and rank.loss.count}
        if len(tell) < 2:
            return
        usual = statistics.median(rank.mean for rank in tell.values())
        most = max(rank.loss.count for rank in tell.values())
        for label, rank in sorted(tell.items(), key=_by_number):
            where = rank.loss.last.where if rank.loss.last is not None else ""
            if rank.loss.count < 0.9 * most - 1:
                words = f"tells {rank.loss.count:,} losses, others {most:,}: it ends at {_at(rank.place)}"
                self.note("ranks differ", where, label, words)
            elif len(tell) > 2 and abs(rank.mean - usual) > 0.5 * abs(usual):
                self.note("ranks differ", where, label, f"its loss is about {rank.mean:.4g}, the others' {usual:.4g}")
        for name in ("loss", "accuracy"):
            ends = {label: rank.held_out[name].last for label, rank in self._ranks.items() if name in rank.held_out}
            values = {point.value for point in ends.values() if point is not None}
            if len(values) > 1:
                told = f"{min(values):.6g} to {max(values):.6g}"
                words = f"the test's {name} differs: {told}. Does each test its own share?"
                self.note("ranks differ", next(point.where for point in ends.values() if point), "", words)


def _by_number(item: tuple[str, object]) -> tuple[int, str]:
    first = item[0].partition("-")[0].partition(",")[0]
    return (int(first) if first.isdigit() else -1, item[0])


def _at(place: tuple[float, float]) -> str:
    return f"epoch {place[0]:g}, {place[1]:,.0f}" if math.isfinite(place[0]) else "a place unknown"
