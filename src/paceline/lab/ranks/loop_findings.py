"""What the ranks of a loop have recorded, beside one process: the first step that differs, and what made it so."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from paceline.errors import UsageError, plural
from paceline.lab.ranks.causes import (
    CLIPPED,
    Comparison,
    Explanation,
    TensorDifference,
    factor_between,
    ratio_words,
    sample_difference,
)
from paceline.lab.ranks.loop import LoopRun, LoopStep, least_precise, read_run
from paceline.lab.ranks.reference import Named
from paceline.lab.verify import Bits, BitsReport, Case, Diagnosis, LoopCase, LoopSpec, Result, VerifyReport

Run = Sequence[LoopRun]
"""what each rank has recorded"""
Steps = Sequence[LoopStep]
Differences = Sequence[Sequence[TensorDifference]]


def findings(
    folder: Path, spec: LoopSpec, ranks: Sequence[int], ended: Mapping[int, str]
) -> tuple[VerifyReport, list[BitsReport]]:
    """All that the runs have shown; no bits where not all have come to their end.

    Raises:
        UsageError: the function has trained nothing.
    """
    runs = {(n, i): read_run(folder, n, i) for n in {1, *ranks} for i in range(len(spec.cases))}
    alone = runs[1, 0]
    if alone and not (alone[0].error or any(step.updates for step in alone[0].steps)):
        raise UsageError(code="verify-no-step", target=spec.target, batches=len(alone[0].steps))
    notes = {note for run in runs.values() for of_rank in run for note in of_rank.notes}
    draws = any(of_rank.draws for of_rank in alone)
    if draws:
        notes.add(
            "the loop draws random numbers, which belong to virtual ranks: the one process that all are compared with "
            f"is {spec.virtual_ranks} of these"
        )
    precision = least_precise(of_rank.precision for run in runs.values() for of_rank in run)
    if precision != "float64":
        notes.add(
            f"the loss is computed in {precision}, although parameters and inputs are float64: the loop or the model "
            "casts, as many Hugging Face models do (logits.float()). Its rounding depends on the shapes of the "
            f"micro-batches, so the comparison uses the tolerance of {precision}"
        )
    broken = not alone or bool(alone[0].error)
    results = [
        Result(Case(case.strategy, n, "none", "-"), {}, [], 0.0, not_run=f"{plural(n, 'rank')}: an earlier case failed")
        if not runs[n, i] and any(of_rank.error for earlier in range(i) for of_rank in runs[n, earlier])
        else _compared(runs[n, i], runs[1, i] if draws else alone, case, precision, n, ended[n])
        for n in ([1] if broken else ranks)
        for i, case in enumerate(spec.cases)
        if not case.exact and (i > 0) != broken
    ]
    last = len(spec.cases) - 1
    failed = {n: found for n in ranks if (found := _failed(runs[n, last], n, ended[n]))}
    if not any(result.finding for result in results):  # else a failure of theirs has left the bits out
        results += [Result(Case("exact", n, "none", "-"), {}, [], 0.0, found) for n, found in failed.items()]
    bits = [] if failed else [BitsReport(n, 0, 0, [_bits_of(runs[n, last])], {}) for n in ranks]
    return VerifyReport(max(ranks), 0, 0, results, sorted(notes), precision), bits


def _compared(run: Run, one: Run, case: LoopCase, precision: str, size: int, ended: str) -> Result:
    first = next((of_rank for of_rank in run if of_rank.optimizer != "-"), LoopRun(case.strategy))
    comparison = Comparison(adaptive=first.optimizer != "SGD", precision=precision)
    finding = _compare(run, one, comparison, size, ended)
    return comparison.result(Case(first.strategy, size, "none", first.optimizer), finding)


def _bits_of(run: Run) -> Bits:
    """A run as bits, to be compared with those of other world sizes. Numbers of the loop follow the order of ranks."""
    first = run[0]
    weights, state = (" ".join(of_models) for of_models in zip(*(first.digests or [("", "")]), strict=True))
    agree = all((of_rank.digests, of_rank.bits) == (first.digests, first.bits) for of_rank in run)
    return Bits(first.strategy, first.optimizer, weights, state, first.bits, agree)


def _compare(run: Run, one: Run, comparison: Comparison, size: int, ended: str) -> Diagnosis | None:
    steps = list(zip(*(of_rank.steps for of_rank in run), strict=False)) if len(run) == size else []
    for name in run[0].start if len(run) == size else ():
        values = [of_rank.start.get(name) for of_rank in run]
        if len({str(value) for value in values}) > 1:
            return Diagnosis(0, "start", name, f"it is {', '.join(map(str, values))} on ranks 0 to {size - 1}")
    for number, (ranks, want) in enumerate(zip(steps, one[0].steps, strict=False)):
        if comparison.adaptive and comparison.precision != "float64":  # a gradient that is rounding is a whole step
            comparison.moved += 2 * max(map(float, want.rates), default=0.0)
        found, samples = [comparison.add(rank, want) for rank in ranks], sorted(i for r in ranks for i in r.samples)
        told = [(rank.rates, rank.scalars) for rank in ranks]
        alike = all(one == told[0] for one in told) and told[0][1].keys() == want.scalars.keys()
        if alike and samples == want.samples and not any(found):
            continue
        if samples != want.samples:
            own_orders = size > 1 and _repeats(run, want.epoch) and not _repeats(one, want.epoch)
            return Diagnosis(number, "order" if own_orders else "samples", "", sample_difference(samples, want.samples))
        path = list(dict.fromkeys(what for of_rank in [*one, *run] for what in of_rank.path))
        return Diagnosis(number, *_explained(ranks, want, found, path, comparison.tolerance))
    if failed := _failed(run, size, ended):
        return failed
    lengths = [len(of_rank.steps) for of_rank in [*run, *one]]
    if len({*lengths}) > 1:
        return Diagnosis(min(lengths), "ways", "", f"steps of ranks 0 to {size - 1} and of one process: {lengths}")
    return None


def _repeats(run: Run, epoch: int) -> bool:
    """Whether an epoch has a sample twice, over all ranks: each takes its share of an order of its own."""
    samples = [i for of_rank in run for step in of_rank.steps if step.epoch == epoch for i in step.samples]
    return len({*samples}) < len(samples)


def _failed(run: Run, size: int, ended: str) -> Diagnosis | None:
    errors = [of_rank.error for of_rank in sorted(run, key=lambda of_rank: of_rank.victim) if of_rank.error]
    if not errors and len(run) == size:
        return None
    words, steps = [*errors, ended][0], min((len(of_rank.steps) for of_rank in run), default=0)
    return Diagnosis(steps, "refused" if errors and "collectives" not in words else "ways", "", words)


def _explained(ranks: Steps, want: LoopStep, found: Differences, path: Sequence[str], tolerance: float) -> Explanation:
    """The first thing that is not as on one process, in the order of a step."""
    got = ranks[0]
    if any(rank.rates != want.rates for rank in ranks):
        rates = ", ".join(str(rank.rates[0]) for rank in ranks)
        return "settings", "", f"learning rates {rates}; alone {want.rates[0]}"
    is_padded = sum(rank.values for rank in ranks) != want.values  # by micro-batch: the sums tell nothing
    for what in () if is_padded else ("input", "output"):
        total, alone = sum(getattr(rank, what) for rank in ranks), getattr(want, what)
        if not abs(total - alone) <= max(1e-8, tolerance) * max(1.0, abs(alone)):  # nor is NaN
            return what, "", f"added up over all samples {total:.12g}, alone {alone:.12g}"
    loss, alone = got.scalars["loss"], want.scalars["loss"]
    if abs(loss - alone) > tolerance * abs(alone):
        return "weights", "", f"the loss is {loss:.12g}, alone {alone:.12g}"
    for kind, words in (
        ("gradient", "the gradient after s.backward"),
        (CLIPPED, "the gradient that optimizer.step() is given"),
        ("parameter", "a parameter after the step"),
    ):
        of_ranks = [[one for one in of_rank if one.kind == kind] for of_rank in found]
        if not (first := next((one for of_rank in of_ranks for one in of_rank), None)):
            continue
        apart = any(of_rank != of_ranks[0] for of_rank in of_ranks)
        differs = f"{words} differs{' between ranks' if apart else ''}"
        if kind == "gradient":
            return _of_gradient(ranks, want, first.tensor, differs, path, tolerance, apart=apart)
        is_scaled = all(_factor(rank.stepped, rank.gradients) is not None for rank in ranks)  # as clipping does
        return "outside" if kind == "parameter" else "changed" if is_scaled else "beside", first.tensor, differs
    mine, others = got.scalars, want.scalars
    if any(rank.scalars != mine for rank in ranks):
        numbers = [[*rank.scalars.values()][1:] for rank in ranks]
        return "own number", "", f"on ranks 0 to {len(ranks) - 1}: {numbers}"
    wrong = [n for n in mine if n in others and abs(mine[n] - others[n]) > tolerance * abs(others[n])]
    return "number", ", ".join(wrong), f"{[mine[n] for n in wrong]}, alone {[others[n] for n in wrong]}"


def _of_gradient(
    ranks: Steps, want: LoopStep, tensor: str, differs: str, path: Sequence[str], tolerance: float, *, apart: bool
) -> Explanation:
    """What makes a gradient wrong after s.backward, though samples and losses are right."""
    beside = sorted({name for rank in ranks for name in rank.beside})
    if max(rank.micro_batches for rank in ranks) > 1 and any(rank.between for rank in ranks):
        return "between", tensor, differs
    if beside:
        return "beside", tensor, f"{differs}; .grad has changed before s.backward: {', '.join(beside[:4])}"
    if apart:
        return "sync", tensor, differs
    if path:
        return "scale", tensor, f"{differs}; on its path: {', '.join(path[:4])}"
    if (factor := _factor(ranks[0].gradients, want.gradients, max(1e-9, tolerance))) is not None:
        return "mean", tensor, f"every gradient is {ratio_words(factor)} what it should be"
    return "gradient", tensor, differs


def _factor(got: Named, want: Named, tolerance: float = 1e-9) -> float | None:
    """The factor between all tensors of two sets, if there is one."""
    pairs = [(a, b) for name, a in got.items() if a is not None and (b := want.get(name)) is not None]
    if got.keys() != want.keys() or not pairs:
        return None
    sides = (torch.cat([one.double() for one in side]) for side in zip(*pairs, strict=True))
    return factor_between(*sides, tolerance=tolerance)
