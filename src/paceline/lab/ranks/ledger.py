"""Checks from the events of a run that each sample of each epoch was used exactly once, over all attempts.

A run may be killed, resumed (a new attempt) and restarted (a new generation), each time on a different number of ranks.
Each start begins after the step of its checkpoint, and discards later steps of earlier starts:

    attempt 1, 2 ranks: begins after step 0, logs steps 1 to 9: 1 to 6 count, 7 to 9 are discarded
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

from paceline.data.plan import BatchPlan, LastBatch, combine_fingerprints, fingerprint_indices
from paceline.data.streams import ENDLESS_NUM_SAMPLES
from paceline.errors import UsageError, plural
from paceline.runs.events import (
    Ended,
    RolledBack,
    SampleIndices,
    Started,
    Step,
    UnloggedRanks,
    event_files,
    read_events,
)

MAX_UNLOGGED_STEPS = 10_000
MAX_SAMPLES, SAMPLES_PER_RECORD = 10_000_000, 10_000  # whose order is computed; more if many steps are logged
MAX_STEPS_PER_RECORD = 256  # on average
MAX_NAMED = 10  # steps in a note


@dataclass
class RankLog:
    started: Started
    steps: dict[int, list[Step]] = field(default_factory=dict[int, list[Step]])  # by last step, see Step.steps
    samples: dict[int, list[int]] = field(default_factory=dict[int, list[int]])  # step -> indices, if recorded
    end_step: int = -1  # the last step, if the rank recorded its end
    rolled_back_steps: int = 0  # number of steps that were rolled back
    unlogged: dict[int, list[int]] = field(default_factory=dict[int, list[int]])  # step -> ranks, see UnloggedRanks

    def roll_back(self, to: int) -> None:
        """Forget the steps after `to`, because the run repeats them."""
        for step in [step for step in self.steps if step > to]:
            self.rolled_back_steps += len(steps_of_record(self.steps.pop(step)[0]))
            self.samples.pop(step, None)

    @property
    def last_complete_step(self) -> int:
        """The last complete step: a rank may be killed between the record of a step and that of its samples."""
        last = max(self.steps, default=self.started.start_step)
        if self.end_step >= 0:
            return max(last, self.end_step)
        if self.samples and last in self.steps and len(self.samples.get(last, ())) < self.steps[last][0].consumed:
            return last - 1
        return last


@dataclass(frozen=True)
class GenerationLogs:
    """The logs of all ranks of one (attempt, generation), sorted by rank; at least one."""

    logs: list[RankLog]

    @property
    def start_event(self) -> Started:
        """The `Started` event of the lowest rank. Those of the other ranks should agree."""
        return self.logs[0].started

    @property
    def label(self) -> str:
        generation = f", generation {self.start_event.generation}" if self.start_event.generation else ""
        return f"attempt {self.start_event.attempt}{generation}"

    def records(self) -> Iterator[Step]:
        return (record for log in self.logs for records in log.steps.values() for record in records)

    def steps(self) -> list[int]:
        return sorted({step for record in self.records() for step in steps_of_record(record)})

    def step_ranges(self, counts: range) -> Iterator[range]:
        """Split `counts` into spans so that each record is in one span. Most spans are single steps."""
        long_records = (record for record in self.records() if record.steps > 1)
        long_spans = deque(sorted((steps_of_record(record)[0], record.step) for record in long_records))
        begin = counts.start
        while begin < counts.stop:
            while long_spans and long_spans[0][1] < begin:
                long_spans.popleft()
            end = begin
            while long_spans and long_spans[0][0] <= end:  # records of other ranks may overlap
                end = max(end, long_spans.popleft()[1])
            end = min(end, counts.stop - 1)
            yield range(begin, end + 1)
            begin = end + 1


@dataclass(frozen=True)
class GenerationSummary:
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
class EpochSampleUse:
    epoch: int
    steps: int
    once: int | None
    never: int | None
    repeatedly: int | None


@dataclass(frozen=True)
class LedgerReport:
    """The use of samples in a run. It is correct if there are no findings."""

    num_samples: int
    steps_per_epoch: int
    last_batch: LastBatch
    incarnations: list[GenerationSummary]
    epochs: list[EpochSampleUse] = field(default_factory=list[EpochSampleUse])
    left_out: list[int] = field(default_factory=list[int])
    """The skipped steps: they count, but their samples did not change the parameters."""
    notes: list[str] = field(default_factory=list[str])
    findings: list[str] = field(default_factory=list[str])
    is_stream: bool = False  # the number of samples is unknown, so the audit checks the numbers of the used samples


@dataclass(frozen=True)
class _CheckedStep:
    """A step that counts, or a span of steps for which the ranks logged only totals."""

    span: range
    faults: list[str]
    indices: Tensor | None  # the used samples, if known
    consumed: int
    fingerprint: int
    epoch: int  # according to the ranks


def check_sample_use(run_dir: Path, make_plan: Callable[[int], BatchPlan]) -> LedgerReport:
    """Check a run, which may have been killed or be running. `make_plan`: from a number of samples."""
    starts = _read_starts(run_dir)
    if not starts:
        raise UsageError(code="ledger-no-events", run_dir=run_dir)
    ranges = _counted_step_ranges(starts)
    _check_plausible(starts, ranges)
    first = starts[0].start_event
    parts = first.stream_parts
    plan = make_plan(ENDLESS_NUM_SAMPLES if parts else max(1, starts[0].start_event.num_samples))
    unlogged = [note for start in starts for note in _add_unlogged_steps(start, plan)]
    incarnations = [_incarnation(start, counts) for start, counts in zip(starts, ranges, strict=True)]
    result = LedgerReport(plan.num_samples, plan.steps_per_epoch, plan.last_batch, incarnations, is_stream=parts > 0)
    if parts:
        result = replace(result, num_samples=0, steps_per_epoch=0)
    elif first.own_order:  # of a sampler, whose batches can have other sizes than those of the plan
        result = replace(result, steps_per_epoch=first.steps_per_epoch)
    result.findings.extend(text for start in starts for text in _disagreements(start, plan))
    faults = [
        (range(step, step + 1), f"{start.label} logged it, although it started after step "
         f"{start.start_event.start_step}")
        for start in starts for step in start.steps() if step <= start.start_event.start_step
    ]  # fmt: skip
    begin = min(start.start_event.start_step for start in starts)
    faults += [(range(1, begin + 1), "missing: every attempt started after it")] if begin else []
    spans = ((span, start) for start, counts in zip(starts, ranges, strict=True) for span in start.step_ranges(counts))
    checked_steps = (_check_step(span, start, plan) for span, start in spans)
    for epoch, group in groupby(
        checked_steps, lambda s: s.epoch if first.own_order else (s.span[0] - 1) // plan.steps_per_epoch
    ):
        steps = list(group)
        faults += [(step.span, text) for step in steps for text in step.faults]
        result.epochs.append(usage := _epoch(epoch, steps, plan.num_samples, parts))
        if parts and (usage.never or usage.repeatedly):
            result.findings.append(
                f"epoch {epoch}: {usage.never} samples of the stream were skipped, {usage.repeatedly} repeated"
            )
        if not parts and plan.last_batch == "keep" and usage.steps == plan.steps_per_epoch:
            result.findings.extend(_check_epoch(epoch, steps, plan.num_samples))
    result.findings.extend(_merged(faults))
    if not result.epochs:
        result.findings.append("no step counts, so there is nothing to check")
    result.left_out.extend(_skipped_steps(starts, ranges))
    result.notes.extend([*unlogged, *_notes(result, starts[-1], ranges[-1])])
    return result


def _read_starts(run_dir: Path) -> list[GenerationLogs]:
    logs: list[RankLog] = []
    for path in event_files(run_dir).values():
        log = None
        for event in read_events(path):
            if isinstance(event, Started):
                logs.append(log := RankLog(event))
            elif log is None:
                continue  # belongs to no start, so the audit reports its step as missing
            elif isinstance(event, Step):
                log.steps.setdefault(event.step, []).append(event)
            elif isinstance(event, RolledBack):
                log.roll_back(event.to)
            elif isinstance(event, SampleIndices):
                log.samples.setdefault(event.step, []).extend(event.indices)
            elif isinstance(event, UnloggedRanks):
                log.unlogged[event.step] = event.ranks
            elif isinstance(event, Ended):
                log.end_step = max(log.end_step, event.step)
    logs.sort(key=lambda log: (*_order(log), log.started.rank))
    return [GenerationLogs(list(group)) for _, group in groupby(logs, _order)]


def _order(log: RankLog) -> tuple[int, int]:
    return log.started.attempt, log.started.generation


def _counted_step_ranges(starts: Sequence[GenerationLogs]) -> list[range]:
    """For each start the steps that count, which are those that no later start repeats. They have no gap.

    In the last start, the steps count that all ranks have logged: no checkpoint can contain later steps.
    """
    end = max(starts[-1].start_event.start_step, min(log.last_complete_step for log in starts[-1].logs))
    ranges: list[range] = []
    for start in reversed(starts):
        begin = start.start_event.start_step
        ranges.append(range(begin + 1, max(begin, end) + 1))
        end = min(begin, end)
    return ranges[::-1]


def _skipped_steps(starts: Sequence[GenerationLogs], ranges: Sequence[range]) -> list[int]:
    logs = ((log, counts) for start, counts in zip(starts, ranges, strict=True) for log in start.logs)
    return sorted({s for log, counts in logs for s, lines in log.steps.items() if s in counts and lines[0].skipped})


def _check_plausible(starts: Sequence[GenerationLogs], ranges: Sequence[range]) -> None:
    """Raise a UsageError for implausible numbers, which no run has written and which would take forever to check."""
    records = [record for start in starts for record in start.records()]
    steps, samples = max(counts.stop for counts in ranges), starts[0].start_event.num_samples
    if steps > MAX_UNLOGGED_STEPS + 10 * sum(min(record.steps, MAX_STEPS_PER_RECORD) for record in records):
        raise UsageError(code="ledger-steps-implausible", steps=steps, logged=len(records))
    epochs = 1 + steps // max(1, starts[0].start_event.steps_per_epoch)
    limit = MAX_SAMPLES + SAMPLES_PER_RECORD * len(records)
    if samples > limit or epochs * samples > 10 * limit:
        raise UsageError(code="ledger-samples-implausible", samples=samples, epochs=epochs, logged=len(records))


def _incarnation(start: GenerationLogs, counts: range) -> GenerationSummary:
    first, steps = start.start_event, start.steps()
    return GenerationSummary(
        first.attempt,
        first.generation,
        first.world_size,
        hosts=sorted({log.started.host for log in start.logs}),
        start_step=first.start_step,
        first_step=min(steps, default=0),
        last_step=max(steps, default=0),
        counted=sum(step in counts for step in steps),
        thrown_away=sum(step >= counts.stop for step in steps) + max(log.rolled_back_steps for log in start.logs),
    )


def _disagreements(start: GenerationLogs, plan: BatchPlan) -> Iterator[str]:
    ranks = [log.started.rank for log in start.logs]
    for rank in sorted({rank for rank in ranks if ranks.count(rank) > 1}):
        yield f"{start.label}: rank {rank} started twice"
    for name in ("world_size", "start_step", "num_samples", "steps_per_epoch", "stream_parts"):
        values = sorted({getattr(log.started, name) for log in start.logs})
        is_planned = not start.start_event.own_order or (name == "num_samples" and not start.start_event.stream_parts)
        planned = getattr(plan, name, None) if is_planned else None
        if len(values) > 1:
            yield f"{start.label}: ranks disagree about {name}: {', '.join(map(str, values))}"
        elif planned is not None and values != [planned]:
            yield f"{start.label}: {name} is {values[0]}, but {planned} according to config.toml and the first attempt"


def _add_unlogged_steps(start: GenerationLogs, plan: BatchPlan) -> Iterator[str]:
    """Complete the logs of ranks that ended before they recorded a step. A different rank reports that they took it.

    Such a rank used its usual portion of the plan, if that is known, otherwise the portion of no other rank. If the
    order is that of a sampler or a stream, it recorded its samples before the exchange of the step. Yields a note for
    each such step.
    """
    for step in sorted({step for log in start.logs for step in log.unlogged}):
        reported = {rank for log in start.logs for rank in log.unlogged.get(step, ())}
        incomplete = [
            log for log in start.logs
            if log.started.rank in reported and log.started.start_step < step and max(log.steps, default=0) < step
        ]  # fmt: skip
        if not incomplete:
            continue
        used = [log.samples.get(missing) for log in incomplete for missing in _missing_steps(log, step)]
        if start.start_event.own_order and None in used:
            continue  # an older version has not recorded them, or they were lost with the host
        initial = {number: next(iter(log.steps.values()))[:1] for number, log in enumerate(start.logs) if log.steps}
        shares = {number: record.share for number, records in initial.items() for record in records if record.share}
        portions = sorted(portion for portion in shares.values() if portion[0] < portion[1])
        begins, ends = [*(a for a, _ in portions), plan.virtual_ranks], [0, *(b for _, b in portions)]
        gaps = ((end, begin) for end, begin in zip(ends, begins, strict=True) if end < begin)
        first_step = step
        for log in incomplete:
            portion = shares.get(start.logs.index(log)) or next(gaps, (0, 0))
            first_step = min(first_step, (missing := _missing_steps(log, step)).start)
            for missing_step in missing:
                _add_step(log, missing_step, portion, start, plan)
        ranks = f"rank{'s' if len(incomplete) > 1 else ''} {', '.join(str(log.started.rank) for log in incomplete)}"
        steps, them = (f"steps {first_step} to {step}", "them") if first_step < step else (f"step {step}", "it")
        yield (
            f"{steps}: {ranks} took part in {them}, but ended before recording {them}. The rank that saved or loaded "
            "the checkpoint reported this. The audit assumes the samples that "
            f"{'it had recorded' if start.start_event.own_order else 'the plan gives to no other rank'}"
        )


def _missing_steps(log: RankLog, until: int) -> range:
    return range(1 + max(log.steps, default=log.started.start_step), until + 1)


def _add_step(log: RankLog, step: int, portion: tuple[int, int], start: GenerationLogs, plan: BatchPlan) -> None:
    others = [record for other in start.logs for record in other.steps.get(step, ())]
    if start.start_event.own_order:
        used, epoch = torch.tensor(log.samples[step], dtype=torch.int64), others[0].epoch if others else 0
    else:
        used = _portion_samples(portion, range(step, step + 1), plan) if portion[1] else torch.empty(0).long()
        epoch = (step - 1) // plan.steps_per_epoch
    digest, skipped = f"{fingerprint_indices(used):016x}", any(record.skipped for record in others)
    log.steps[step] = [Step(step, epoch, 0.0, 0, 0.0, 0.0, 0.0, 0.0, None, portion, len(used), digest, skipped=skipped)]
    if any(other.samples for other in start.logs):
        log.samples[step] = used.tolist()


def _check_step(span: range, start: GenerationLogs, plan: BatchPlan) -> _CheckedStep:
    logs = [log for log in start.logs if any(step in log.steps for step in span)]
    records = [record for log in logs for record in _records(span, log)]
    planned = None if start.start_event.own_order else torch.cat([_planned(step, plan) for step in span])
    consumed = sum(record.consumed for record in records)
    faults = list(_faults(span, start, logs, plan)) if logs else [f"missing: {start.label} did not log it"]
    if planned is not None and logs and consumed != len(planned):
        faults.append(f"{consumed} samples were used instead of {len(planned)}")
    if logs and all(log.samples for log in logs):
        indices = torch.tensor([i for log in logs for s in span for i in log.samples.get(s, [])], dtype=torch.int64)
    else:
        indices = None if faults else planned
    epoch = records[0].epoch if records else 0
    return _CheckedStep(span, faults, indices, consumed, combine_fingerprints(*map(_fingerprint, records)), epoch)


def steps_of_record(record: Step) -> range:
    return range(record.step - record.steps + 1, record.step + 1)


def _records(span: range, log: RankLog) -> list[Step]:
    return [record for step in span for record in log.steps.get(step, [])]


def _portion_samples(portion: tuple[int, int], steps: range, plan: BatchPlan) -> Tensor:
    a, b = portion
    parts: list[Tensor] = []
    for step in steps:
        planned = _planned(step, plan)
        parts += [planned[v :: plan.virtual_ranks] for v in range(a, min(b, max(a + 1, len(planned))))]  # rest: none
    return torch.cat(parts)


def _planned(step: int, plan: BatchPlan) -> Tensor:
    return plan.global_indices(*divmod(step - 1, plan.steps_per_epoch))


def _faults(span: range, start: GenerationLogs, logs: Sequence[RankLog], plan: BatchPlan) -> Iterator[str]:
    ranks, size = [log.started.rank for log in logs], start.start_event.world_size
    by_rank = [_records(span, log) for log in logs]
    if ranks != list(range(size)):
        yield f"logged by ranks {', '.join(map(str, ranks))} of {size} only"
    portions = sorted(portion or (0, 0) for records in by_rank for portion in {record.share for record in records})
    if [a for a, _ in portions] + [plan.virtual_ranks] != [0] + [b for _, b in portions]:
        computed = ", ".join(f"[{a}, {b})" for a, b in portions)
        yield f"its ranks computed the virtual ranks {computed}, which do not add up to [0, {plan.virtual_ranks})"
    skipped_steps = [{record.step for record in records if record.skipped} for records in by_rank]
    if different := [rank for rank, steps in zip(ranks, skipped_steps, strict=True) if steps != skipped_steps[0]]:
        skipping = different if not skipped_steps[0] else [rank for rank in ranks if rank not in different]
        yield f"skipped only by ranks {', '.join(map(str, skipping))}: the other ranks changed their parameters"
    for log in logs:
        for text in _rank_faults(span, log, plan):
            yield f"rank {log.started.rank} {text}"


def _rank_faults(span: range, log: RankLog, plan: BatchPlan) -> Iterator[str]:
    records = _records(span, log)
    if log.started.own_order:
        for record in records:
            indices = [i for step in steps_of_record(record) for i in log.samples.get(step, [])]
            recorded = torch.tensor(indices, dtype=torch.int64)
            if record.consumed != len(recorded) or _fingerprint(record) != fingerprint_indices(recorded):
                yield f"recorded different samples from those it used: {len(recorded)} instead of {record.consumed}"
        return
    if len(span) == 1 and len(records) > 1:
        yield f"logged it {len(records)} times"
    elif len(span) > 1 and [step for record in records for step in steps_of_record(record)] != [*span]:
        yield "logged them together with others, or not all of them once: the used samples are unknown"
        return
    for record in records[:1] if len(span) == 1 else records:
        yield from _record_faults(record, log, plan)


def _record_faults(record: Step, log: RankLog, plan: BatchPlan) -> Iterator[str]:
    epoch = (record.step - 1) // plan.steps_per_epoch
    if record.epoch != epoch:
        yield f"logged it in epoch {record.epoch} instead of {epoch}"
    a, b = record.share or (0, 0)
    if not 0 <= a < b <= plan.virtual_ranks:
        return  # reported with the portions of all ranks
    expected = _portion_samples((a, b), steps_of_record(record), plan)
    if record.consumed != len(expected) or _fingerprint(record) != fingerprint_indices(expected):
        yield f"did not use the samples of the plan: {record.consumed} samples instead of {len(expected)}"
    if log.samples and record.steps == 1 and sorted(log.samples.get(record.step, [])) != sorted(expected.tolist()):
        yield "did not record the samples of the plan"


def _fingerprint(record: Step) -> int:
    try:
        return int(record.fingerprint, 16)
    except ValueError:
        return -1  # no samples have this fingerprint


def _epoch(epoch: int, steps: Sequence[_CheckedStep], num_samples: int, parts: int) -> EpochSampleUse:
    """The use of `num_samples` samples, or of a stream in parts, each of which is read from its first sample.

    Sample n * parts + v is the n-th sample of part v.
    """
    indices = [step.indices for step in steps if step.indices is not None]
    count = sum(len(step.span) for step in steps)
    if len(indices) < len(steps) and not parts:
        return EpochSampleUse(epoch, count, None, None, None)
    values, counts = torch.cat([*indices, torch.empty(0, dtype=torch.int64)]).unique(return_counts=True)
    if parts:
        values_by_part = [values[values % parts == v] for v in range(parts)]
        num_samples = sum(int(part_values.max()) // parts + 1 for part_values in values_by_part if len(part_values))
    once = int((counts == 1).sum())
    return EpochSampleUse(epoch, count, once, num_samples - len(values), len(values) - once)


def _check_epoch(epoch: int, steps: Sequence[_CheckedStep], num_samples: int) -> Iterator[str]:
    consumed = sum(step.consumed for step in steps)
    if consumed != num_samples:
        yield f"epoch {epoch}: {consumed:,} samples were used instead of {num_samples:,}"
    elif combine_fingerprints(*(step.fingerprint for step in steps)) != fingerprint_indices(torch.arange(num_samples)):
        yield f"epoch {epoch}: {consumed:,} samples were used, but not each of the {num_samples:,} once"


def _merged(faults: Iterable[tuple[range, str]]) -> Iterator[str]:
    """One message for all consecutive steps with the same fault."""
    by_text: dict[str, list[range]] = {}
    for steps, text in sorted(faults, key=lambda fault: fault[0].start):
        spans = by_text.setdefault(text, [])
        if spans and spans[-1].stop == steps.start:
            steps = range(spans.pop().start, steps.stop)
        spans.append(steps)
    merged = [(span, text) for text, spans in by_text.items() for span in spans]
    for span, text in sorted(merged, key=lambda fault: (fault[0].start, fault[1])):
        yield f"{_name_steps(span.start, span.stop - 1)}: {text}"


def _name_steps(first: int, last: int) -> str:
    return f"step {first}" if first == last else f"steps {first} to {last}"


def _notes(result: LedgerReport, last: GenerationLogs, counts: range) -> Iterator[str]:
    if result.left_out:
        shown = ", ".join(map(str, result.left_out[:MAX_NAMED])) + (", ..." if len(result.left_out) > MAX_NAMED else "")
        yield (
            f"{plural(len(result.left_out), 'step')} skipped ({shown}): a loss or gradient was not finite, so the "
            "samples did not change the parameters (--not-finite)"
        )
    if not result.is_stream:
        if result.epochs and (done := result.epochs[-1].steps) < result.steps_per_epoch:
            yield f"epoch {result.epochs[-1].epoch} is unfinished: {done} of {result.steps_per_epoch} steps"
        if result.last_batch != "keep":
            yield f"last batch '{result.last_batch}': checked only with the plan, which does not use each sample once"
    if logs_ahead := [log for log in last.logs if log.last_complete_step >= counts.stop]:
        steps = _name_steps(counts.stop, max(log.last_complete_step for log in logs_ahead))
        ranks = ", ".join(str(log.started.rank) for log in logs_ahead)
        yield f"the last {steps}: logged only by ranks {ranks} of {last.start_event.world_size}: the run ended there"
