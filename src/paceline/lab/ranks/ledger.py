"""Proves from what the ranks wrote down that each sample of each epoch was used exactly once.

Each step that counts is compared with the plan, rank by rank (see steps). Each complete epoch is then judged again
without the plan: what the ranks say they used must add up to all samples there are, each once.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path

import torch

from paceline.data.consumed import add, fingerprint
from paceline.data.plan import BatchPlan, Tail
from paceline.data.streams import ENDLESS
from paceline.errors import UsageError
from paceline.lab.ranks.ledger_starts import RunStart, counting, left_out, read_starts
from paceline.lab.ranks.ledger_steps import JudgedStep, judge_step, sentences, steps_words, vouch

MOST_STEPS = 10_000  # that nobody has logged
MOST_SAMPLES, SAMPLES_A_LINE = 10_000_000, 10_000  # whose order is computed; more where many steps are logged
MOST_OF_A_LINE = 256  # steps for which one line may stand, on average
MAX_NAMED = 10  # steps in a note


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
    """How many samples the `steps` steps of one epoch (from 0) used how often; None where nobody can know."""

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
    """steps that count, and whose samples have changed nothing"""
    notes: list[str] = field(default_factory=list[str])
    findings: list[str] = field(default_factory=list[str])
    is_stream: bool = False
    """nobody knows how many samples there are: those that were used are judged by their numbers"""


def audit(run_dir: Path, make_plan: Callable[[int], BatchPlan]) -> Audit:
    """Judge the run in `run_dir`, which may have ended, been killed, or still go on. Reads its events and nothing else.

    Args:
        run_dir: the run folder.
        make_plan: number of samples -> the plan that the run's settings define.

    Raises:
        UsageError: if no rank ever began there, or the settings define no plan for that many samples.
    """
    starts = read_starts(run_dir)
    if not starts:
        raise UsageError(f"{run_dir} holds no events of a rank (events-<rank>.jsonl): nothing was trained there")
    ranges = counting(starts)
    _check_plausible(starts, ranges)
    parts = starts[0].first.stream_parts
    plan = make_plan(ENDLESS if parts else max(1, starts[0].first.num_samples))
    vouched = [words for start in starts for words in vouch(start, plan)]
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
    judged = (judge_step(span, start, plan) for span, start in spans)
    for epoch, group in groupby(judged, lambda one: one.epoch if parts else (one.span[0] - 1) // plan.steps_per_epoch):
        steps = list(group)
        faults += [(one.span, text) for one in steps for text in one.faults]
        result.epochs.append(used := _epoch(epoch, steps, plan.num_samples, parts))
        if parts and (used.never or used.repeatedly):
            words = f"of its stream {used.never} samples were passed over, {used.repeatedly} repeated"
            result.findings.append(f"epoch {epoch}: {words}")
        if not parts and plan.tail == "keep" and used.steps == plan.steps_per_epoch:
            result.findings.extend(_against_all_samples(epoch, steps, plan.num_samples))
    result.findings.extend(sentences(faults))
    if not result.epochs:
        result.findings.append("no step counts: there is nothing to prove")
    result.left_out.extend(left_out(starts, ranges))
    result.notes.extend(_left_out_note(result.left_out))
    result.notes.extend(vouched)
    result.notes.extend(_notes(starts[-1], ranges[-1], plan, result.epochs))
    return result


def _check_plausible(starts: Sequence[RunStart], ranges: Sequence[range]) -> None:
    """Refuse numbers that would take forever to judge, and that no run has written.

    Raises:
        UsageError: says which.
    """
    logs = [log for start in starts for log in start.logs]
    lines = [line for log in logs for found in log.steps.values() for line in found]
    steps, samples = max(counts.stop for counts in ranges), starts[0].first.num_samples
    if steps > MOST_STEPS + 10 * sum(min(line.steps, MOST_OF_A_LINE) for line in lines):
        raise UsageError(f"Event files are inconsistent: {steps:,} steps claimed, {len(lines):,} logged")
    epochs = 1 + steps // max(1, starts[0].first.steps_per_epoch)
    most = MOST_SAMPLES + SAMPLES_A_LINE * len(lines)
    if samples > most or epochs * samples > 10 * most:
        raise UsageError(
            f"the events speak of {samples:,} samples and {epochs:,} epochs, and {len(lines):,} steps are logged: that "
            "is too little to judge them by"
        )


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
        thrown_away=sum(step >= counts.stop for step in steps) + max(len(log.undone) for log in start.logs),
    )


def _disagreements(start: RunStart, plan: BatchPlan) -> Iterator[str]:
    ranks = [log.started.rank for log in start.logs]
    for rank in sorted({rank for rank in ranks if ranks.count(rank) > 1}):
        yield f"{start.name}: rank {rank} began twice"
    for name in ("world_size", "start_step", "num_samples", "steps_per_epoch", "stream_parts"):
        told = sorted({getattr(log.started, name) for log in start.logs})
        planned = None if start.first.stream_parts else getattr(plan, name, None)
        if len(told) > 1:
            yield f"{start.name}: its ranks disagree about {name}: {', '.join(map(str, told))}"
        elif planned is not None and told != [planned]:
            yield f"{start.name}: {name} is {told[0]}, but by config.toml and the first attempt's data it is {planned}"


def _epoch(epoch: int, steps: Sequence[JudgedStep], given: int, parts: int) -> Epoch:
    """The use of `given` samples; or of a stream in parts, of which each gives its samples from the first to the last.

    Sample n * parts + v is the n-th of part v.
    """
    known, count = [one.indices for one in steps if one.indices is not None], sum(len(one.span) for one in steps)
    if len(known) < len(steps) and not parts:
        return Epoch(epoch, count, None, None, None)
    values, counts = torch.cat([*known, torch.empty(0, dtype=torch.int64)]).unique(return_counts=True)
    if parts:
        of_parts = [values[values % parts == v] for v in range(parts)]
        given = sum(int(of_part.max()) // parts + 1 for of_part in of_parts if len(of_part))
    once = int((counts == 1).sum())
    return Epoch(epoch, count, once, given - len(values), len(values) - once)


def _against_all_samples(epoch: int, steps: Sequence[JudgedStep], num_samples: int) -> Iterator[str]:
    """The check that does not use the plan: whoever used a sample, and whenever."""
    consumed = sum(one.consumed for one in steps)
    if consumed != num_samples:
        yield f"epoch {epoch}: {consumed:,} samples were used instead of {num_samples:,}"
    elif add(*(one.fingerprint for one in steps)) != fingerprint(torch.arange(num_samples)):
        yield f"epoch {epoch}: {consumed:,} samples were used, but not each of the {num_samples:,} once"


def _notes(last: RunStart, counts: range, plan: BatchPlan, epochs: Sequence[Epoch]) -> Iterator[str]:
    if epochs and epochs[-1].steps < plan.steps_per_epoch and not last.first.stream_parts:
        yield f"epoch {epochs[-1].epoch} is unfinished: {epochs[-1].steps} of {plan.steps_per_epoch} steps"
    if plan.tail != "keep" and not last.first.stream_parts:
        yield f"tail '{plan.tail}': the steps are compared with the plan only, which does not use each sample once"
    ahead = [log for log in last.logs if log.reached >= counts.stop]
    if ahead:
        steps = steps_words(counts.stop, max(log.reached for log in ahead))
        ranks = ", ".join(str(log.started.rank) for log in ahead)
        yield f"the last {steps}: logged by ranks {ranks} of {last.first.world_size} only: the run ended there"


def _left_out_note(steps: Sequence[int]) -> Iterator[str]:
    """Names the steps that count, but have changed nothing; nothing if there are none."""
    if steps:
        shown = ", ".join(map(str, steps[:MAX_NAMED])) + (", ..." if len(steps) > MAX_NAMED else "")
        words = "step was" if len(steps) == 1 else "steps were"
        yield (
            f"{len(steps)} {words} left out ({shown}): something in it was not finite, so its samples have not changed "
            "the parameters (--not-finite)"
        )
