"""Judges the steps that count, one by one against the plan, and puts what is wrong into sentences."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.data.consumed import add, fingerprint
from paceline.data.plan import BatchPlan
from paceline.observe.events import Step
from paceline.proofs.ledger.starts import Log, RunStart


@dataclass(frozen=True)
class JudgedStep:
    """One step that counts."""

    step: int
    faults: list[str]
    indices: Tensor | None  # what was used, where that is known
    consumed: int
    fingerprint: int
    epoch: int = 0
    """as the ranks say"""


def judge_step(step: int, start: RunStart, plan: BatchPlan) -> JudgedStep:
    """Compare what the ranks of `start` have logged of `step` with the plan."""
    logs = [log for log in start.logs if step in log.steps]
    lines = [line for log in logs for line in log.steps[step]]
    own = start.first.own_order
    planned = None if own else plan.global_indices(*divmod(step - 1, plan.steps_per_epoch))
    consumed = sum(line.consumed for line in lines)
    faults = list(_faults(step, start, logs, plan)) if logs else [f"missing: {start.name} did not log it"]
    if planned is not None and logs and consumed != len(planned):
        faults.append(f"{consumed} samples were used instead of {len(planned)}")
    if logs and all(log.samples for log in logs):
        indices = torch.tensor([i for log in logs for i in log.samples.get(step, [])], dtype=torch.int64)
    else:
        indices = None if faults else planned
    epoch = lines[0].epoch if lines else 0
    return JudgedStep(step, faults, indices, consumed, add(*map(_fingerprint, lines)), epoch)


def _faults(step: int, start: RunStart, logs: Sequence[Log], plan: BatchPlan) -> Iterator[str]:
    """Where the ranks' share of the step is not what the plan gives them."""
    ranks, size = [log.started.rank for log in logs], start.first.world_size
    if ranks != list(range(size)):
        yield f"logged by ranks {_listed(ranks)} of {size} only"
    shares = sorted(log.steps[step][0].share or (0, 0) for log in logs)
    if [a for a, _ in shares] + [plan.virtual_ranks] != [0] + [b for _, b in shares]:
        told = ", ".join(f"[{a}, {b})" for a, b in shares)
        yield f"its ranks computed the virtual ranks {told}, which do not make up [0, {plan.virtual_ranks})"
    left_out = [rank for rank, log in zip(ranks, logs, strict=True) if log.steps[step][0].skipped]
    if 0 < len(left_out) < len(ranks):
        yield f"left out by ranks {_listed(left_out)} only: the others have changed their parameters"
    for log in logs:
        for text in _rank_faults(step, log, plan):
            yield f"rank {log.started.rank} {text}"


def _rank_faults(step: int, log: Log, plan: BatchPlan) -> Iterator[str]:
    epoch, number = divmod(step - 1, plan.steps_per_epoch)
    line, count = log.steps[step][0], len(log.steps[step])
    if log.started.own_order:
        recorded = torch.tensor(log.samples.get(step, []), dtype=torch.int64)
        if line.consumed != len(recorded) or _fingerprint(line) != fingerprint(recorded):
            yield f"recorded other samples than it used: {len(recorded)} where it used {line.consumed}"
        return
    if count > 1:
        yield f"logged it {count} times"
    if line.epoch != epoch:
        yield f"took it for a step of epoch {line.epoch} instead of {epoch}"
    a, b = line.share or (0, 0)
    if not 0 <= a < b <= plan.virtual_ranks:
        return  # reported with the shares of all ranks
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


def _listed(ranks: Iterable[int]) -> str:
    return ", ".join(map(str, ranks))


def sentences(faults: Iterable[tuple[int, str]]) -> Iterator[str]:
    """One sentence for all consecutive steps with the same fault."""
    spans: list[tuple[int, int, str]] = []
    newest: dict[str, int] = {}
    for step, text in sorted(faults):
        at = newest.get(text)
        if at is not None and spans[at][1] == step - 1:
            spans[at] = (spans[at][0], step, text)
        else:
            newest[text] = len(spans)
            spans.append((step, step, text))
    return (f"{steps_words(first, last)}: {text}" for first, last, text in spans)


def steps_words(first: int, last: int) -> str:
    """Consecutive steps."""
    return f"step {first}" if first == last else f"steps {first} to {last}"
