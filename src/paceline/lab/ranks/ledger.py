"""Checks from the events of a run that each sample of each epoch was used exactly once, over all attempts.

A run may be killed, resumed (a new attempt) and restarted (a new generation), each time on another number of ranks.
Each start begins after the step of its checkpoint. Later steps of earlier starts are thrown away:

    attempt 1, 2 ranks: begins after step 0, logs steps 1 to 9: 1 to 6 count, 7 to 9 are thrown away
    attempt 2, 3 ranks: begins after step 6, logs steps 7 to 20: all count

Each step that counts is compared with the batch plan, rank by rank. Each complete epoch is checked again without the
plan: the samples that the ranks report must be all samples, each once.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path

import torch
from torch import Tensor

from paceline.data.plan import BatchPlan, Tail, add_fingerprints, fingerprint
from paceline.data.streams import ENDLESS
from paceline.errors import UsageError
from paceline.runs.events import Ended, RolledBack, Samples, Started, Step, UnloggedStep, event_files, read_events

MOST_STEPS = 10_000  # that no rank has logged
MOST_SAMPLES, SAMPLES_A_LINE = 10_000_000, 10_000  # whose order is computed; more if many steps are logged
MOST_OF_A_LINE = 256  # steps for which one line may stand, on average
MAX_NAMED = 10  # steps in a note


@dataclass
class Log:
    """The events of one rank in one start."""

    started: Started
    steps: dict[int, list[Step]] = field(default_factory=dict[int, list[Step]])  # by their last step, see Step.steps
    samples: dict[int, list[int]] = field(default_factory=dict[int, list[int]])  # step -> indices, if recorded
    ended: int = -1  # the last step, if the rank wrote that it ended
    undone: int = 0  # how many steps were rolled back
    vouched: dict[int, list[int]] = field(default_factory=dict[int, list[int]])  # step -> ranks, see UnloggedStep

    def roll_back(self, to: int) -> None:
        """Forget the steps after `to`: they are taken once more."""
        for step in [step for step in self.steps if step > to]:
            self.undone += len(covered(self.steps.pop(step)[0]))
            self.samples.pop(step, None)

    @property
    def reached(self) -> int:
        """The last step that is logged completely: a rank may be killed between a step and its samples."""
        last = max(self.steps, default=self.started.start_step)
        if self.ended >= 0:
            return max(last, self.ended)
        if self.samples and last in self.steps and len(self.samples.get(last, ())) < self.steps[last][0].consumed:
            return last - 1
        return last


@dataclass(frozen=True)
class RunStart:
    """The logs of all ranks of one (attempt, generation), in the order of ranks; at least one."""

    logs: list[Log]

    @property
    def first(self) -> Started:
        """The start as the lowest rank describes it; the others should agree."""
        return self.logs[0].started

    @property
    def name(self) -> str:
        """The start in messages."""
        generation = f", generation {self.first.generation}" if self.first.generation else ""
        return f"attempt {self.first.attempt}{generation}"

    def _records(self) -> Iterator[Step]:
        return (record for log in self.logs for records in log.steps.values() for record in records)

    def steps(self) -> list[int]:
        """All steps that any rank logged, ascending."""
        return sorted({step for record in self._records() for step in covered(record)})

    def spans(self, counts: range) -> Iterator[range]:
        """Split `counts` so that no record covers steps of two spans. Most spans are single steps."""
        several = deque(sorted((covered(record)[0], record.step) for record in self._records() if record.steps > 1))
        begin = counts.start
        while begin < counts.stop:
            while several and several[0][1] < begin:
                several.popleft()
            end = begin
            while several and several[0][0] <= end:  # another rank's may overlap
                end = max(end, several.popleft()[1])
            end = min(end, counts.stop - 1)
            yield range(begin, end + 1)
            begin = end + 1


@dataclass(frozen=True)
class Incarnation:
    """One (attempt, generation): it logged `first_step` to `last_step` (0: none), from the state after `start_step`."""

    attempt: int
    generation: int
    world_size: int
    hosts: list[str]
    start_step: int
    first_step: int
    last_step: int
    counted: int
    thrown_away: int


@dataclass(frozen=True)
class Epoch:
    """How many samples the `steps` steps of one epoch (from 0) used how often; None if this is unknown."""

    epoch: int
    steps: int
    once: int | None
    never: int | None
    repeatedly: int | None


@dataclass(frozen=True)
class Audit:
    """How a run used its samples. It is clean if there are no findings."""

    num_samples: int
    steps_per_epoch: int
    tail: Tail
    incarnations: list[Incarnation]
    epochs: list[Epoch] = field(default_factory=list[Epoch])
    left_out: list[int] = field(default_factory=list[int])
    """steps that count, but whose samples did not change the parameters"""
    notes: list[str] = field(default_factory=list[str])
    findings: list[str] = field(default_factory=list[str])
    is_stream: bool = False
    """the number of samples is unknown: the used ones are checked by their numbers"""


@dataclass(frozen=True)
class _CheckedStep:
    """A step that counts; or a span of steps of which the ranks have logged only the totals."""

    span: range
    faults: list[str]
    indices: Tensor | None  # of the used samples, if known
    consumed: int
    fingerprint: int
    epoch: int  # as the ranks report it


def audit(run_dir: Path, make_plan: Callable[[int], BatchPlan]) -> Audit:
    """Check the run in `run_dir`, which may have ended, been killed, or still be running. Reads only its events.

    Args:
        run_dir: the run folder.
        make_plan: number of samples -> the plan that the run's settings define.

    Raises:
        UsageError: if no rank ever began there, or the settings define no plan for that many samples.
    """
    starts = _read_starts(run_dir)
    if not starts:
        raise UsageError(code="ledger-no-events", run_dir=run_dir)
    ranges = _counting(starts)
    _check_plausible(starts, ranges)
    parts = starts[0].first.stream_parts
    plan = make_plan(ENDLESS if parts else max(1, starts[0].first.num_samples))
    vouched = [note for start in starts for note in _add_vouched(start, plan)]
    incarnations = [_incarnation(start, counts) for start, counts in zip(starts, ranges, strict=True)]
    result = Audit(plan.num_samples, plan.steps_per_epoch, plan.tail, incarnations, is_stream=parts > 0)
    if parts:
        result = replace(result, num_samples=0, steps_per_epoch=0)
    elif older := [start.name for start in starts if any(log.started.num_samples == 0 for log in start.logs)]:
        result.findings.append(
            f"this run was written by an older paceline: {', '.join(older)} did not write down which samples a rank "
            "used, so that each was used once cannot be proven"
        )
        return result
    result.findings.extend(text for start in starts for text in _disagreements(start, plan))
    faults = [
        (range(step, step + 1), f"{start.name} logged it, although it began after step {start.first.start_step}")
        for start in starts for step in start.steps() if step <= start.first.start_step
    ]  # fmt: skip
    begin = min(start.first.start_step for start in starts)
    faults += [(range(1, begin + 1), "missing: every attempt began after it")] if begin else []
    spans = ((span, start) for start, counts in zip(starts, ranges, strict=True) for span in start.spans(counts))
    checked = (_check_step(span, start, plan) for span, start in spans)
    for epoch, group in groupby(checked, lambda s: s.epoch if parts else (s.span[0] - 1) // plan.steps_per_epoch):
        steps = list(group)
        faults += [(step.span, text) for step in steps for text in step.faults]
        result.epochs.append(used := _epoch(epoch, steps, plan.num_samples, parts))
        if parts and (used.never or used.repeatedly):
            result.findings.append(
                f"epoch {epoch}: of its stream {used.never} samples were passed over, {used.repeatedly} repeated"
            )
        if not parts and plan.tail == "keep" and used.steps == plan.steps_per_epoch:
            result.findings.extend(_check_epoch(epoch, steps, plan.num_samples))
    result.findings.extend(_merged(faults))
    if not result.epochs:
        result.findings.append("no step counts: there is nothing to prove")
    result.left_out.extend(_left_out(starts, ranges))
    result.notes.extend([*vouched, *_notes(result, starts[-1], ranges[-1])])
    return result


def _read_starts(run_dir: Path) -> list[RunStart]:
    """All starts of the run, in their order; none if no rank ever began."""
    logs: list[Log] = []
    for path in event_files(run_dir).values():
        log = None
        for event in read_events(path):
            if isinstance(event, Started):
                logs.append(log := Log(event))
            elif log is None:
                continue  # belongs to no start, and so is missing where it counts
            elif isinstance(event, Step):
                log.steps.setdefault(event.step, []).append(event)
            elif isinstance(event, RolledBack):
                log.roll_back(event.to)
            elif isinstance(event, Samples):
                log.samples.setdefault(event.step, []).extend(event.indices)
            elif isinstance(event, UnloggedStep):
                log.vouched[event.step] = event.ranks
            elif isinstance(event, Ended):
                log.ended = max(log.ended, event.step)
    logs.sort(key=lambda log: (*_order(log), log.started.rank))
    return [RunStart(list(group)) for _, group in groupby(logs, _order)]


def _order(log: Log) -> tuple[int, int]:
    return log.started.attempt, log.started.generation


def _counting(starts: Sequence[RunStart]) -> list[range]:
    """For each start the steps that count: those that no later start repeats. Together they have no gap.

    The last start counts as far as all its ranks have come: a step that a rank did not log cannot have been saved.
    """
    end = max(starts[-1].first.start_step, min(log.reached for log in starts[-1].logs))
    ranges: list[range] = []
    for start in reversed(starts):
        begin = start.first.start_step
        ranges.append(range(begin + 1, max(begin, end) + 1))
        end = min(begin, end)
    return ranges[::-1]


def _left_out(starts: Sequence[RunStart], ranges: Sequence[range]) -> list[int]:
    """The steps that count, but have changed nothing."""
    logs = ((log, counts) for start, counts in zip(starts, ranges, strict=True) for log in start.logs)
    return sorted({s for log, counts in logs for s, lines in log.steps.items() if s in counts and lines[0].skipped})


def _check_plausible(starts: Sequence[RunStart], ranges: Sequence[range]) -> None:
    """Raise a UsageError for numbers that would take forever to check, and that no run has written."""
    lines = [line for start in starts for log in start.logs for found in log.steps.values() for line in found]
    steps, samples = max(counts.stop for counts in ranges), starts[0].first.num_samples
    if steps > MOST_STEPS + 10 * sum(min(line.steps, MOST_OF_A_LINE) for line in lines):
        raise UsageError(code="ledger-steps-implausible", steps=steps, logged=len(lines))
    epochs = 1 + steps // max(1, starts[0].first.steps_per_epoch)
    most = MOST_SAMPLES + SAMPLES_A_LINE * len(lines)
    if samples > most or epochs * samples > 10 * most:
        raise UsageError(code="ledger-samples-implausible", samples=samples, epochs=epochs, logged=len(lines))


def _incarnation(start: RunStart, counts: range) -> Incarnation:
    first, steps = start.first, start.steps()
    return Incarnation(
        first.attempt,
        first.generation,
        first.world_size,
        hosts=sorted({log.started.host for log in start.logs}),
        start_step=first.start_step,
        first_step=min(steps, default=0),
        last_step=max(steps, default=0),
        counted=sum(step in counts for step in steps),
        thrown_away=sum(step >= counts.stop for step in steps) + max(log.undone for log in start.logs),
    )


def _disagreements(start: RunStart, plan: BatchPlan) -> Iterator[str]:
    ranks = [log.started.rank for log in start.logs]
    for rank in sorted({rank for rank in ranks if ranks.count(rank) > 1}):
        yield f"{start.name}: rank {rank} began twice"
    for name in ("world_size", "start_step", "num_samples", "steps_per_epoch", "stream_parts"):
        given = sorted({getattr(log.started, name) for log in start.logs})
        planned = None if start.first.stream_parts else getattr(plan, name, None)
        if len(given) > 1:
            yield f"{start.name}: its ranks disagree about {name}: {', '.join(map(str, given))}"
        elif planned is not None and given != [planned]:
            yield f"{start.name}: {name} is {given[0]}, but by config.toml and the first attempt's data it is {planned}"


def _add_vouched(start: RunStart, plan: BatchPlan) -> Iterator[str]:
    """Complete the logs of ranks that took part in a step, by the report of another rank, but did not live to log it.

    A rank used its own portion of the plan, if that is known, else the portion that no other rank has. Yields a note
    for each such step.
    """
    for step in sorted({step for log in start.logs for step in log.vouched}) if not start.first.own_order else ():
        named = {rank for log in start.logs for rank in log.vouched.get(step, ())}
        absent = [
            log for log in start.logs
            if log.started.rank in named and log.started.start_step < step and max(log.steps, default=0) < step
        ]  # fmt: skip
        if not absent:
            continue
        first = {number: next(iter(log.steps.values()))[:1] for number, log in enumerate(start.logs) if log.steps}
        own = {number: line.share for number, lines in first.items() for line in lines if line.share}
        shares = sorted(share for share in own.values() if share[0] < share[1])
        begins, ends = [*(a for a, _ in shares), plan.virtual_ranks], [0, *(b for _, b in shares)]
        gaps = ((end, begin) for end, begin in zip(ends, begins, strict=True) if end < begin)
        since = step
        for log in absent:
            share = own.get(start.logs.index(log)) or next(gaps, (0, 0))
            first_missing = 1 + max(log.steps, default=log.started.start_step)
            since = min(since, first_missing)
            for missing in range(first_missing, step + 1):
                _add_step(log, missing, share, start, plan)
        who = f"rank{'s' if len(absent) > 1 else ''} {', '.join(str(log.started.rank) for log in absent)}"
        when, them = (f"steps {since} to {step}", "them") if since < step else (f"step {step}", "it")
        yield (
            f"{when}: {who} took part in {them}, and did not live to write {them} down. So says "
            "the rank that saved the state, or goes on from it; what they used is what the plan gives to nobody else"
        )


def _add_step(log: Log, step: int, share: tuple[int, int], start: RunStart, plan: BatchPlan) -> None:
    """Log for a rank that it has done its portion of a step."""
    used = _share_of(share, range(step, step + 1), plan) if share[1] else torch.empty(0, dtype=torch.int64)
    epoch, digest = (step - 1) // plan.steps_per_epoch, f"{fingerprint(used):016x}"
    skipped = any(line.skipped for other in start.logs for line in other.steps.get(step, ()))
    log.steps[step] = [Step(step, epoch, 0.0, 0, 0.0, 0.0, 0.0, 0.0, None, share, len(used), digest, skipped=skipped)]
    if any(other.samples for other in start.logs):
        log.samples[step] = used.tolist()


def _check_step(span: range, start: RunStart, plan: BatchPlan) -> _CheckedStep:
    """Compare the logs of a step, or of a span of steps, with the plan."""
    logs = [log for log in start.logs if any(step in log.steps for step in span)]
    lines = [line for log in logs for line in _lines(span, log)]
    planned = None if start.first.own_order else torch.cat([_planned(step, plan) for step in span])
    consumed = sum(line.consumed for line in lines)
    faults = list(_faults(span, start, logs, plan)) if logs else [f"missing: {start.name} did not log it"]
    if planned is not None and logs and consumed != len(planned):
        faults.append(f"{consumed} samples were used instead of {len(planned)}")
    if logs and all(log.samples for log in logs):
        indices = torch.tensor([i for log in logs for s in span for i in log.samples.get(s, [])], dtype=torch.int64)
    else:
        indices = None if faults else planned
    epoch = lines[0].epoch if lines else 0
    return _CheckedStep(span, faults, indices, consumed, add_fingerprints(*map(_fingerprint, lines)), epoch)


def covered(record: Step) -> range:
    """The steps that a record covers."""
    return range(record.step - record.steps + 1, record.step + 1)


def _lines(span: range, log: Log) -> list[Step]:
    return [line for step in span for line in log.steps.get(step, [])]


def _share_of(share: tuple[int, int], steps: range, plan: BatchPlan) -> Tensor:
    """The samples that the plan gives to these virtual ranks."""
    a, b = share
    parts: list[Tensor] = []
    for step in steps:
        whole = _planned(step, plan)
        parts += [whole[v :: plan.virtual_ranks] for v in range(a, min(b, max(a + 1, len(whole))))]  # later have none
    return torch.cat(parts)


def _planned(step: int, plan: BatchPlan) -> Tensor:
    return plan.global_indices(*divmod(step - 1, plan.steps_per_epoch))


def _faults(span: range, start: RunStart, logs: Sequence[Log], plan: BatchPlan) -> Iterator[str]:
    ranks, size = [log.started.rank for log in logs], start.first.world_size
    lines = [_lines(span, log) for log in logs]
    if ranks != list(range(size)):
        yield f"logged by ranks {', '.join(map(str, ranks))} of {size} only"
    shares = sorted(share or (0, 0) for found in lines for share in {line.share for line in found})
    if [a for a, _ in shares] + [plan.virtual_ranks] != [0] + [b for _, b in shares]:
        computed = ", ".join(f"[{a}, {b})" for a, b in shares)
        yield f"its ranks computed the virtual ranks {computed}, which do not make up [0, {plan.virtual_ranks})"
    skipped = [{line.step for line in found if line.skipped} for found in lines]
    if different := [rank for rank, steps in zip(ranks, skipped, strict=True) if steps != skipped[0]]:
        left_out = different if not skipped[0] else [rank for rank in ranks if rank not in different]
        yield f"left out by ranks {', '.join(map(str, left_out))} only: the others have changed their parameters"
    for log in logs:
        for text in _rank_faults(span, log, plan):
            yield f"rank {log.started.rank} {text}"


def _rank_faults(span: range, log: Log, plan: BatchPlan) -> Iterator[str]:
    lines = _lines(span, log)
    if log.started.own_order:
        for line in lines:
            recorded = torch.tensor([i for s in covered(line) for i in log.samples.get(s, [])], dtype=torch.int64)
            if line.consumed != len(recorded) or _fingerprint(line) != fingerprint(recorded):
                yield f"recorded other samples than it used: {len(recorded)} where it used {line.consumed}"
        return
    if len(span) == 1 and len(lines) > 1:
        yield f"logged it {len(lines)} times"
    elif len(span) > 1 and [step for line in lines for step in covered(line)] != [*span]:
        yield "logged them together with others, or not all of them once: which samples were used nobody can tell"
        return
    for line in lines[:1] if len(span) == 1 else lines:
        yield from _line_faults(line, log, plan)


def _line_faults(line: Step, log: Log, plan: BatchPlan) -> Iterator[str]:
    epoch = (line.step - 1) // plan.steps_per_epoch
    if line.epoch != epoch:
        yield f"took it for a step of epoch {line.epoch} instead of {epoch}"
    a, b = line.share or (0, 0)
    if not 0 <= a < b <= plan.virtual_ranks:
        return  # reported with the shares of all ranks
    expected = _share_of((a, b), covered(line), plan)
    if line.consumed != len(expected) or _fingerprint(line) != fingerprint(expected):
        yield f"used other samples than the plan's: {line.consumed} where there are {len(expected)}"
    if log.samples and line.steps == 1 and sorted(log.samples.get(line.step, [])) != sorted(expected.tolist()):
        yield "recorded other samples than the plan's"


def _fingerprint(line: Step) -> int:
    try:
        return int(line.fingerprint, 16)
    except ValueError:
        return -1  # of no samples at all


def _epoch(epoch: int, steps: Sequence[_CheckedStep], given: int, parts: int) -> Epoch:
    """The use of `given` samples; or of a stream in parts, each of which gives its samples from the first to the last.

    Sample n * parts + v is the n-th of part v.
    """
    known = [step.indices for step in steps if step.indices is not None]
    count = sum(len(step.span) for step in steps)
    if len(known) < len(steps) and not parts:
        return Epoch(epoch, count, None, None, None)
    values, counts = torch.cat([*known, torch.empty(0, dtype=torch.int64)]).unique(return_counts=True)
    if parts:
        of_parts = [values[values % parts == v] for v in range(parts)]
        given = sum(int(of_part.max()) // parts + 1 for of_part in of_parts if len(of_part))
    once = int((counts == 1).sum())
    return Epoch(epoch, count, once, given - len(values), len(values) - once)


def _check_epoch(epoch: int, steps: Sequence[_CheckedStep], num_samples: int) -> Iterator[str]:
    """The check that does not use the plan: any rank may have used a sample, in any step."""
    consumed = sum(step.consumed for step in steps)
    if consumed != num_samples:
        yield f"epoch {epoch}: {consumed:,} samples were used instead of {num_samples:,}"
    elif add_fingerprints(*(step.fingerprint for step in steps)) != fingerprint(torch.arange(num_samples)):
        yield f"epoch {epoch}: {consumed:,} samples were used, but not each of the {num_samples:,} once"


def _merged(faults: Iterable[tuple[range, str]]) -> Iterator[str]:
    """One sentence for all consecutive steps with the same fault."""
    spans: list[tuple[int, int, str]] = []
    newest: dict[str, int] = {}
    for steps, text in sorted(faults, key=lambda fault: (fault[0].start, fault[1])):
        at = newest.get(text)
        if at is not None and spans[at][1] == steps.start - 1:
            spans[at] = (spans[at][0], steps.stop - 1, text)
        else:
            newest[text] = len(spans)
            spans.append((steps.start, steps.stop - 1, text))
    return (f"{_name_steps(first, last)}: {text}" for first, last, text in spans)


def _name_steps(first: int, last: int) -> str:
    return f"step {first}" if first == last else f"steps {first} to {last}"


def _notes(result: Audit, last: RunStart, counts: range) -> Iterator[str]:
    if result.left_out:
        shown = ", ".join(map(str, result.left_out[:MAX_NAMED])) + (", ..." if len(result.left_out) > MAX_NAMED else "")
        words = "step was" if len(result.left_out) == 1 else "steps were"
        yield (
            f"{len(result.left_out)} {words} left out ({shown}): something in it was not finite, so its samples have "
            "not changed the parameters (--not-finite)"
        )
    if not result.is_stream:
        if result.epochs and (done := result.epochs[-1].steps) < result.steps_per_epoch:
            yield f"epoch {result.epochs[-1].epoch} is unfinished: {done} of {result.steps_per_epoch} steps"
        if result.tail != "keep":
            plan = "the plan only, which does not use each sample once"
            yield f"tail '{result.tail}': the steps are compared with {plan}"
    if ahead := [log for log in last.logs if log.reached >= counts.stop]:
        steps = _name_steps(counts.stop, max(log.reached for log in ahead))
        ranks = ", ".join(str(log.started.rank) for log in ahead)
        yield f"the last {steps}: logged by ranks {ranks} of {last.first.world_size} only: the run ended there"
