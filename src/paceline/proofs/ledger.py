"""Was each sample of each epoch used exactly once in the updates that count? Judged from what the ranks wrote down.

Each step that counts is compared with the plan, rank by rank. Each complete epoch is then judged again without the
plan: what the ranks say they used must add up to all samples there are, each once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

import torch
from torch import Tensor

from paceline.data.consumed import add, fingerprint
from paceline.data.plan import BatchPlan, Tail
from paceline.errors import UsageError
from paceline.observe.events import Step
from paceline.proofs.sentences import left_out_note, sentences, steps_words
from paceline.proofs.starts import Log, Start, counting, left_out, read_starts

MOST_STEPS = 10_000  # that nobody has logged
MOST_SAMPLES, SAMPLES_A_LINE = 10_000_000, 10_000  # whose order is computed; more where many steps are logged


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
    """What is known about a run's use of samples. It is clean if there are no findings."""

    num_samples: int
    steps_per_epoch: int
    tail: Tail
    incarnations: list[Incarnation]
    epochs: list[Epoch] = field(default_factory=list[Epoch])
    left_out: list[int] = field(default_factory=list[int])
    """steps that count, and whose samples have changed nothing"""
    notes: list[str] = field(default_factory=list[str])
    findings: list[str] = field(default_factory=list[str])


def audit(run_dir: Path, make_plan: Callable[[int], BatchPlan]) -> Audit:
    """Judge the run in `run_dir`, which has ended, was killed, or still goes on. Reads its events and nothing else.

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
    plan = make_plan(max(1, starts[0].first.num_samples))
    incarnations = [_incarnation(start, counts) for start, counts in zip(starts, ranges, strict=True)]
    result = Audit(plan.num_samples, plan.steps_per_epoch, plan.tail, incarnations)
    if older := [start.name for start in starts if any(log.started.num_samples == 0 for log in start.logs)]:
        result.findings.append(
            f"this run was written by an older paceline: {', '.join(older)} did not write down which samples a rank "
            "used, so that each was used once cannot be proven"
        )
        return result
    result.findings.extend(text for start in starts for text in _disagreements(start, plan))
    faults = [fault for start in starts for fault in _out_of_place(start)]
    begin = min(start.first.start_step for start in starts)
    faults += [(step, "missing: every attempt began after it") for step in range(1, begin + 1)]
    judged = (_judge(step, start, plan) for start, counts in zip(starts, ranges, strict=True) for step in counts)
    for epoch, group in groupby(judged, lambda one: (one.step - 1) // plan.steps_per_epoch):
        steps = list(group)
        faults += [(one.step, text) for one in steps for text in one.faults]
        result.epochs.append(_epoch(epoch, steps, plan.num_samples))
        if plan.tail == "keep" and len(steps) == plan.steps_per_epoch:
            result.findings.extend(_against_all_samples(epoch, steps, plan.num_samples))
    result.findings.extend(sentences(faults))
    if not result.epochs:
        result.findings.append("no step counts: there is nothing to prove")
    result.left_out.extend(left_out(starts, ranges))
    result.notes.extend(left_out_note(result.left_out))
    result.notes.extend(_notes(starts[-1], ranges[-1], plan, result.epochs))
    return result


def _check_plausible(starts: Sequence[Start], ranges: Sequence[range]) -> None:
    """Refuse numbers that would take for ever to judge, and that no run has written.

    Raises:
        UsageError: says which.
    """
    logs = [log for start in starts for log in start.logs]
    lines = [line for log in logs for found in log.steps.values() for line in found]
    steps, samples = max(counts.stop for counts in ranges), starts[0].first.num_samples
    if steps > MOST_STEPS + 10 * len(lines):
        raise UsageError(f"the events speak of {steps:,} steps, of which {len(lines):,} are logged: no run wrote that")
    epochs = 1 + steps // max(1, starts[0].first.steps_per_epoch)
    most = MOST_SAMPLES + SAMPLES_A_LINE * len(lines)
    if samples > most or epochs * samples > 10 * most:
        raise UsageError(
            f"the events speak of {samples:,} samples and {epochs:,} epochs, and {len(lines):,} steps are logged: that "
            "is too little to judge them by"
        )


def _incarnation(start: Start, counts: range) -> Incarnation:
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


def _disagreements(start: Start, plan: BatchPlan) -> Iterator[str]:
    """What the ranks of one incarnation must have in common, with each other and with the plan."""
    ranks = [log.started.rank for log in start.logs]
    for rank in sorted({rank for rank in ranks if ranks.count(rank) > 1}):
        yield f"{start.name}: rank {rank} began twice"
    for name in ("world_size", "start_step", "num_samples", "steps_per_epoch"):
        told = sorted({getattr(log.started, name) for log in start.logs})
        planned = getattr(plan, name, None)
        if len(told) > 1:
            yield f"{start.name}: its ranks disagree about {name}: {', '.join(map(str, told))}"
        elif planned is not None and told != [planned]:
            yield f"{start.name}: {name} is {told[0]}, but by config.toml and the first attempt's data it is {planned}"


def _out_of_place(start: Start) -> Iterator[tuple[int, str]]:
    begin = start.first.start_step
    for step in start.steps():
        if step <= begin:
            yield step, f"{start.name} logged it, although it began after step {begin}"


@dataclass(frozen=True)
class _Judged:
    """One step that counts."""

    step: int
    faults: list[str]
    indices: Tensor | None  # what was used, where that is known
    consumed: int
    fingerprint: int


def _judge(step: int, start: Start, plan: BatchPlan) -> _Judged:
    logs = [log for log in start.logs if step in log.steps]
    lines = [line for log in logs for line in log.steps[step]]
    planned = plan.global_indices(*divmod(step - 1, plan.steps_per_epoch))
    consumed = sum(line.consumed for line in lines)
    faults = list(_faults(step, start, logs, plan)) if logs else [f"missing: {start.name} did not log it"]
    if logs and consumed != len(planned):
        faults.append(f"{consumed} samples were used instead of {len(planned)}")
    if logs and all(log.samples for log in logs):
        indices = torch.tensor([i for log in logs for i in log.samples.get(step, [])], dtype=torch.int64)
    else:
        indices = None if faults else planned
    return _Judged(step, faults, indices, consumed, add(*map(_fingerprint, lines)))


def _faults(step: int, start: Start, logs: Sequence[Log], plan: BatchPlan) -> Iterator[str]:
    """Where the ranks' share of the step is not what the plan gives them."""
    ranks, size = [log.started.rank for log in logs], start.first.world_size
    if len(ranks) != size or ranks != list(range(size)):
        yield f"logged by ranks {', '.join(map(str, ranks))} of {size} only"
    shares = sorted(log.steps[step][0].share or (0, 0) for log in logs)
    if [a for a, _ in shares] + [plan.virtual_ranks] != [0] + [b for _, b in shares]:
        told = ", ".join(f"[{a}, {b})" for a, b in shares)
        yield f"its ranks computed the virtual ranks {told}, which do not make up [0, {plan.virtual_ranks})"
    left_out = [rank for rank, log in zip(ranks, logs, strict=True) if log.steps[step][0].skipped]
    if 0 < len(left_out) < len(ranks):
        yield f"left out by ranks {', '.join(map(str, left_out))} only: the others have changed their parameters"
    for log in logs:
        for text in _rank_faults(step, log, plan):
            yield f"rank {log.started.rank} {text}"


def _rank_faults(step: int, log: Log, plan: BatchPlan) -> Iterator[str]:
    epoch, number = divmod(step - 1, plan.steps_per_epoch)
    line, count = log.steps[step][0], len(log.steps[step])
    if count > 1:
        yield f"logged it {count} times"
    if line.epoch != epoch:
        yield f"took it for a step of epoch {line.epoch} instead of {epoch}"
    a, b = line.share or (0, 0)
    if not 0 <= a < b <= plan.virtual_ranks:
        return  # told with the shares of all ranks
    whole = plan.global_indices(epoch, number)
    share = range(a, min(b, max(a + 1, len(whole))))  # later virtual ranks have nothing of it
    expected = torch.cat([whole[v :: plan.virtual_ranks] for v in share])
    if line.consumed != len(expected) or _fingerprint(line) != fingerprint(expected):
        yield f"used other samples than the plan's: {line.consumed} where there are {len(expected)}"
    if log.samples and sorted(log.samples.get(step, [])) != sorted(expected.tolist()):
        yield "recorded other samples than the plan's"


def _fingerprint(line: Step) -> int:
    try:
        return int(line.fingerprint, 16)
    except ValueError:
        return -1  # of no samples at all


def _epoch(epoch: int, steps: Sequence[_Judged], num_samples: int) -> Epoch:
    known = [one.indices for one in steps if one.indices is not None]
    if len(known) < len(steps):
        return Epoch(epoch, len(steps), None, None, None)
    values, counts = torch.cat(known).unique(return_counts=True)
    once = int((counts == 1).sum())
    return Epoch(epoch, len(steps), once, num_samples - len(values), len(values) - once)


def _against_all_samples(epoch: int, steps: Sequence[_Judged], num_samples: int) -> Iterator[str]:
    """The check that does not know the plan: used is used, whoever was to use it when."""
    consumed = sum(one.consumed for one in steps)
    if consumed != num_samples:
        yield f"epoch {epoch}: {consumed:,} samples were used instead of {num_samples:,}"
    elif add(*(one.fingerprint for one in steps)) != fingerprint(torch.arange(num_samples)):
        yield f"epoch {epoch}: {consumed:,} samples were used, but not each of the {num_samples:,} once"


def _notes(last: Start, counts: range, plan: BatchPlan, epochs: Sequence[Epoch]) -> Iterator[str]:
    if epochs and epochs[-1].steps < plan.steps_per_epoch:
        yield f"epoch {epochs[-1].epoch} is unfinished: {epochs[-1].steps} of {plan.steps_per_epoch} steps"
    if plan.tail != "keep":
        yield f"tail '{plan.tail}': the steps are compared with the plan only, which does not use each sample once"
    ahead = [log for log in last.logs if log.reached >= counts.stop]
    if ahead:
        steps = steps_words(counts.stop, max(log.reached for log in ahead))
        ranks = ", ".join(str(log.started.rank) for log in ahead)
        yield f"the last {steps}: logged by ranks {ranks} of {last.first.world_size} only: the run ended there"
