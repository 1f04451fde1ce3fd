"""Judges the steps that count, one by one against the plan, and puts what is wrong into sentences."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.data.consumed import add, fingerprint
from paceline.data.plan import BatchPlan
from paceline.proofs.ledger.starts import Log, RunStart, covered
from paceline.runs.events import Step


@dataclass(frozen=True)
class JudgedStep:
    """One step that counts; or several, of which the ranks have written down only what they come to together."""

    span: range
    faults: list[str]
    indices: Tensor | None  # what was used, where that is known
    consumed: int
    fingerprint: int
    epoch: int = 0
    """as the ranks say"""


def judge_step(span: range, start: RunStart, plan: BatchPlan) -> JudgedStep:
    """Compare what the ranks of `start` have logged of a step, or of a span of them, with the plan."""
    logs = [log for log in start.logs if any(step in log.steps for step in span)]
    own = start.first.own_order
    lines = [line for log in logs for line in _lines(span, log)]
    planned = None if own else torch.cat([_planned(step, plan) for step in span])
    consumed = sum(line.consumed for line in lines)
    faults = list(_faults(span, start, logs, plan)) if logs else [f"missing: {start.name} did not log it"]
    if planned is not None and logs and consumed != len(planned):
        faults.append(f"{consumed} samples were used instead of {len(planned)}")
    if logs and all(log.samples for log in logs):
        indices = torch.tensor([i for log in logs for s in span for i in log.samples.get(s, [])], dtype=torch.int64)
    else:
        indices = None if faults else planned
    epoch = lines[0].epoch if lines else 0
    return JudgedStep(span, faults, indices, consumed, add(*map(_fingerprint, lines)), epoch)


def vouch(start: RunStart, plan: BatchPlan) -> Iterator[str]:
    """Add to logs what another rank vouches for: their own shares, or what the plan gives to nobody else; say so."""
    for step, absent in start.unwritten().items() if not start.first.own_order else ():
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
                _add(log, missing, share, start, plan)
        ranks = ", ".join(str(log.started.rank) for log in absent)
        who = f"{'rank' if len(absent) == 1 else 'ranks'} {ranks}"
        when, them = (f"steps {since} to {step}", "them") if since < step else (f"step {step}", "it")
        yield (
            f"{when}: {who} took part in {them}, and did not live to write {them} down. So says "
            "the rank that saved the state, or goes on from it; what they used is what the plan gives to nobody else"
        )


def _add(log: Log, step: int, share: tuple[int, int], start: RunStart, plan: BatchPlan) -> None:
    """Write down for a rank that it has done its share of a step."""
    others = [line for other in start.logs for line in other.steps.get(step, ())]
    used = _share_of(share, range(step, step + 1), plan) if share[1] else torch.empty(0, dtype=torch.int64)
    epoch, told = (step - 1) // plan.steps_per_epoch, f"{fingerprint(used):016x}"
    skipped = any(line.skipped for line in others)
    log.steps[step] = [Step(step, epoch, 0.0, 0, 0.0, 0.0, 0.0, 0.0, None, share, len(used), told, skipped=skipped)]
    if any(one.samples for one in start.logs):
        log.samples[step] = used.tolist()


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
    """Where the ranks' share of the step is not what the plan gives them."""
    ranks, size = [log.started.rank for log in logs], start.first.world_size
    lines = [_lines(span, log) for log in logs]
    if ranks != list(range(size)):
        yield f"logged by ranks {', '.join(map(str, ranks))} of {size} only"
    shares = sorted(share or (0, 0) for found in lines for share in {line.share for line in found})
    if [a for a, _ in shares] + [plan.virtual_ranks] != [0] + [b for _, b in shares]:
        told = ", ".join(f"[{a}, {b})" for a, b in shares)
        yield f"its ranks computed the virtual ranks {told}, which do not make up [0, {plan.virtual_ranks})"
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


def sentences(faults: Iterable[tuple[range, str]]) -> Iterator[str]:
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
    return (f"{steps_words(first, last)}: {text}" for first, last, text in spans)


def steps_words(first: int, last: int) -> str:
    """Consecutive steps."""
    return f"step {first}" if first == last else f"steps {first} to {last}"
