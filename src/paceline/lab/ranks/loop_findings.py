"""Compares the records of a loop's ranks with those of one process: the first different step, and its cause."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from paceline.errors import UsageError, plural
from paceline.lab.ranks import causes
from paceline.lab.ranks.loop import LoopRun, LoopStep, least_precise_dtype, read_loop_runs
from paceline.lab.ranks.reference import NamedTensors
from paceline.lab.verify import (
    CaseResult,
    DigestReport,
    Divergence,
    LoopCase,
    LoopSpec,
    StrategyCase,
    StrategyDigests,
    VerifyReport,
)

Run = Sequence[LoopRun]  # by rank
Steps = Sequence[LoopStep]
Differences = Sequence[Sequence[causes.TensorDifference]]


def make_verify_reports(
    folder: Path, spec: LoopSpec, ranks: Sequence[int], ended: Mapping[int, str]
) -> tuple[VerifyReport, list[DigestReport]]:
    """The results of all runs. There are no bits if a run did not finish."""
    runs = {(n, i): read_loop_runs(folder, n, i) for n in {1, *ranks} for i in range(len(spec.cases))}
    reference = runs[1, 0]
    if reference and reference[0].trains_at_import:
        raise UsageError(code="session-at-import", script=spec.target.rpartition(":")[0])
    if reference and not (reference[0].error or any(step.updates for step in reference[0].steps)):
        raise UsageError(code="verify-no-step", target=spec.target, batches=len(reference[0].steps))
    notes = {note for run in runs.values() for rank_run in run for note in rank_run.notes}
    has_draws = any(rank_run.draws_random_numbers for rank_run in reference)
    if has_draws:
        notes.add(
            "the loop draws random numbers, which depend on the virtual ranks: the reference process computes all "
            f"{spec.virtual_ranks} of them"
        )
    precision = least_precise_dtype(rank_run.precision for run in runs.values() for rank_run in run)
    if precision != "float64":
        notes.add(
            f"the loss is computed in {precision}, although parameters and inputs are float64: the loop or the model "
            "casts it, like many Hugging Face models (logits.float()). The rounding depends on the shapes of the "
            f"micro-batches, so the comparison uses the tolerance of {precision}"
        )
    is_broken = not reference or bool(reference[0].error)
    results = [
        CaseResult(
            StrategyCase(case.strategy, n, "none", "-"),
            {},
            [],
            0.0,
            not_run=f"{plural(n, 'rank')}: an earlier case failed",
        )
        if not runs[n, i] and any(rank_run.error for earlier in range(i) for rank_run in runs[n, earlier])
        else _compared(runs[n, i], runs[1, i] if has_draws else reference, case, precision, n, ended[n])
        for n in ([1] if is_broken else ranks)
        for i, case in enumerate(spec.cases)
        if not case.exact and (i > 0) != is_broken
    ]
    last = len(spec.cases) - 1
    failed = {n: failure for n in ranks if (failure := _failure(runs[n, last], n, ended[n]))}
    if not any(result.finding for result in results):  # otherwise the exact case may not have run
        results += [
            CaseResult(StrategyCase("exact", n, "none", "-"), {}, [], 0.0, failure) for n, failure in failed.items()
        ]
    bits = [] if failed else [DigestReport(n, 0, 0, [_bits_of(runs[n, last])], {}) for n in ranks]
    return VerifyReport(max(ranks), 0, 0, results, sorted(notes), precision), bits


def _compared(run: Run, reference: Run, case: LoopCase, precision: str, size: int, ended: str) -> CaseResult:
    first = next((rank_run for rank_run in run if rank_run.optimizer != "-"), LoopRun(case.strategy))
    comparison = causes.ErrorTracker(adaptive=first.optimizer != "SGD", precision=precision)
    finding = _compare(run, reference, comparison, size, ended)
    return comparison.result(StrategyCase(first.strategy, size, "none", first.optimizer), finding)


def _bits_of(run: Run) -> StrategyDigests:
    """The exact results of a run, without the numbers that the loop logs: they depend on the number of ranks."""
    first = run[0]
    weights, state = (" ".join(digests) for digests in zip(*(first.digests or [("", "")]), strict=True))
    agree = all((rank_run.digests, rank_run.bits) == (first.digests, first.bits) for rank_run in run)
    return StrategyDigests(first.strategy, first.optimizer, weights, state, first.bits, agree)


def _compare(run: Run, reference: Run, comparison: causes.ErrorTracker, size: int, ended: str) -> Divergence | None:
    steps = list(zip(*(rank_run.steps for rank_run in run), strict=False)) if len(run) == size else []
    for name in run[0].start_fingerprints if len(run) == size else ():
        values = [rank_run.start_fingerprints.get(name) for rank_run in run]
        if len({str(value) for value in values}) > 1:
            return Divergence(0, "start", name, f"it is {', '.join(map(str, values))} on ranks 0 to {size - 1}")
    for number, (ranks, want) in enumerate(zip(steps, reference[0].steps, strict=False)):
        if comparison.adaptive and comparison.precision != "float64":  # a round-off gradient can cause a full step
            comparison.max_rounding_move += 2 * max(map(float, want.rates), default=0.0)
        differences = [comparison.compare_step(rank, want) for rank in ranks]
        samples = sorted(index for rank in ranks for index in rank.samples)
        numbers = [(rank.rates, rank.scalars) for rank in ranks]
        is_equal = all(pair == numbers[0] for pair in numbers) and numbers[0][1].keys() == want.scalars.keys()
        if is_equal and samples == want.samples and not any(differences):
            continue
        if samples != want.samples:
            orders_differ = size > 1 and _has_repeats(run, want.epoch) and not _has_repeats(reference, want.epoch)
            cause = "order" if orders_differ else "samples"
            return Divergence(number, cause, "", causes.describe_sample_difference(samples, want.samples))
        path = list(dict.fromkeys(hook for rank_run in [*reference, *run] for hook in rank_run.gradient_path_hooks))
        return Divergence(number, *_explain(ranks, want, differences, path, comparison.tolerance))
    if failure := _failure(run, size, ended):
        return failure
    lengths = [len(rank_run.steps) for rank_run in [*run, *reference]]
    if len({*lengths}) > 1:
        return Divergence(min(lengths), "ways", "", f"steps of ranks 0 to {size - 1} and of one process: {lengths}")
    return None


def _has_repeats(run: Run, epoch: int) -> bool:
    """Whether an epoch has a sample twice, over all ranks, because each rank uses a different order."""
    samples = [i for rank_run in run for step in rank_run.steps if step.epoch == epoch for i in step.samples]
    return len({*samples}) < len(samples)


def _failure(run: Run, size: int, ended: str) -> Divergence | None:
    errors = [rank_run.error for rank_run in sorted(run, key=lambda rank_run: rank_run.victim) if rank_run.error]
    if not errors and len(run) == size:
        return None
    message, steps = [*errors, ended][0], min((len(rank_run.steps) for rank_run in run), default=0)
    return Divergence(steps, "refused" if errors and "collectives" not in message else "ways", "", message)


def _explain(
    ranks: Steps, want: LoopStep, differences: Differences, path: Sequence[str], tolerance: float
) -> causes.Explanation:
    """The first difference from one process, in the order of a step."""
    got = ranks[0]
    if any(rank.rates != want.rates for rank in ranks):
        rates = ", ".join(str(rank.rates[0]) for rank in ranks)
        return "settings", "", f"learning rates {rates}; one process {want.rates[0]}"
    # padded differently in each micro-batch: the sums differ
    is_padded = sum(rank.sums["values"] for rank in ranks) != want.sums["values"]
    for name in () if is_padded else ("input", "output"):
        total, expected = sum(rank.sums.get(name, 0.0) for rank in ranks), want.sums.get(name, 0.0)
        if not abs(total - expected) <= max(1e-8, tolerance) * max(1.0, abs(expected)):  # also if NaN
            return name, "", f"the sum over all samples is {total:.12g}; one process has {expected:.12g}"
    loss, expected = got.scalars["loss"], want.scalars["loss"]
    if abs(loss - expected) > tolerance * abs(expected):
        return "weights", "", f"the loss is {loss:.12g}; one process has {expected:.12g}"
    for kind, description in (
        ("gradient", "the gradient after s.backward"),
        (causes.CLIPPED, "the gradient at optimizer.step()"),
        ("parameter", "a parameter after the step"),
    ):
        matching = [[difference for difference in row if difference.kind == kind] for row in differences]
        if not (first := next((difference for row in matching for difference in row), None)):
            continue
        ranks_differ = any(row != matching[0] for row in matching)
        text = f"{description} differs{' between ranks' if ranks_differ else ''}"
        if kind == "gradient":
            return _explain_gradient(ranks, want, first.tensor, text, path, tolerance, ranks_differ=ranks_differ)
        # as clipping does
        is_scaled = all(_factor(rank.applied_gradients, rank.gradients) is not None for rank in ranks)
        return "outside" if kind == "parameter" else "changed" if is_scaled else "beside", first.tensor, text
    logged, wanted = got.scalars, want.scalars
    if any(rank.scalars != logged for rank in ranks):
        numbers = [[*rank.scalars.values()][1:] for rank in ranks]
        return "own number", "", f"on ranks 0 to {len(ranks) - 1}: {numbers}"
    wrong = [n for n in logged if n in wanted and abs(logged[n] - wanted[n]) > tolerance * abs(wanted[n])]
    return "number", ", ".join(wrong), f"{[logged[n] for n in wrong]}; one process has {[wanted[n] for n in wrong]}"


def _explain_gradient(
    ranks: Steps, want: LoopStep, tensor: str, text: str, path: Sequence[str], tolerance: float, *, ranks_differ: bool
) -> causes.Explanation:
    """The cause of a wrong gradient after s.backward, if samples and losses are right."""
    changed = sorted({name for rank in ranks for name in rank.externally_changed_grads})
    if max(rank.micro_batches for rank in ranks) > 1 and any(rank.has_change_between_backwards for rank in ranks):
        return "between", tensor, text
    if changed:
        return "beside", tensor, f"{text}; .grad changed before s.backward: {', '.join(changed[:4])}"
    if ranks_differ:
        return "sync", tensor, text
    if path:
        return "scale", tensor, f"{text}; hooks and functions on the gradient path: {', '.join(path[:4])}"
    if (factor := _factor(ranks[0].gradients, want.gradients, max(1e-9, tolerance))) is not None:
        return "mean", tensor, f"every gradient is {causes.format_ratio(factor)} the right value"
    return "gradient", tensor, text


def _factor(got: NamedTensors, want: NamedTensors, tolerance: float = 1e-9) -> float | None:
    pairs = [(a, b) for name, a in got.items() if a is not None and (b := want.get(name)) is not None]
    if got.keys() != want.keys() or not pairs:
        return None
    sides = (torch.cat([tensor.double() for tensor in side]) for side in zip(*pairs, strict=True))
    return causes.factor_between(*sides, tolerance=tolerance)
