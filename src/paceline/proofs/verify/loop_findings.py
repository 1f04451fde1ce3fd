"""What the ranks of a loop have recorded, beside one process: the first step that differs, and what made it so."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from paceline.errors import UsageError, plural
from paceline.proofs.verify.causes import (
    CLIPPED,
    Comparison,
    Explanation,
    factor_between,
    ratio_words,
    sample_difference,
)
from paceline.proofs.verify.loop import LoopRun, LoopStep, read_run
from paceline.proofs.verify.reference import Named
from paceline.verify.spec import Bits, BitsReport, Case, Diagnosis, LoopCase, LoopSpec, Result, StepBits, VerifyReport

Run = Sequence[LoopRun]
"""what each rank has recorded"""
ACROSS = {  # what ranks must have alike, in the order in which one makes the next
    "rates": ("settings", "the learning rate"),
    "gradients": ("sync", "the gradient after s.backward"),
    "stepped": ("changed", "the gradient that optimizer.step() is given"),
    "parameters": ("outside", "a parameter after the step"),
    "scalars": ("own number", "what the loop logs"),
}


def findings(
    folder: Path, spec: LoopSpec, ranks: Sequence[int], ended: Mapping[int, str]
) -> tuple[VerifyReport, list[BitsReport]]:
    """All that the runs have shown; no bits where not all have come to their end.

    Raises:
        UsageError: the function has trained nothing.
    """
    runs = {(n, i): read_run(folder, n, i) for n in {1, *ranks} for i in range(len(spec.cases))}
    alone = runs[1, 0]
    if alone and not (alone[0].error or any(step.bits.get("stepped") for step in alone[0].steps)):
        raise UsageError(
            f"{spec.target} has taken no optimizer.step() in a paceline.session(), in {len(alone[0].steps)} "
            "batches: there is nothing to verify. For more batches, in longer epochs: --steps"
        )
    notes = {note for run in runs.values() for of_rank in run for note in of_rank.notes}
    draws = any(of_rank.draws for of_rank in alone)
    if draws:
        notes.add(
            "the loop draws random numbers, which belong to virtual ranks: the one process that all are compared with "
            f"is {spec.virtual_ranks} of these"
        )
    broken = not alone or bool(alone[0].error)
    results = [
        _not_run(case, n)
        if not runs[n, i] and any(of_rank.error for earlier in range(i) for of_rank in runs[n, earlier])
        else _compared(runs[n, i], runs[1, i] if draws else alone, case, n, ended[n])
        for n in ([1] if broken else ranks)
        for i, case in enumerate(spec.cases)
        if not case.exact and (i > 0) != broken
    ]
    last = len(spec.cases) - 1
    failed = {n: found for n in ranks if (found := _failed(runs[n, last], n, ended[n]))}
    if not any(result.finding for result in results):  # else a failure of theirs has left the bits out
        results += [Result(Case("exact", n, "none", "-"), {}, [], 0.0, found) for n, found in failed.items()]
    bits = [] if failed else [BitsReport(n, 0, 0, [_bits_of(runs[n, last])], {}) for n in ranks]
    return VerifyReport(max(ranks), 0, 0, results, sorted(notes)), bits


def _compared(run: Run, one: Run, case: LoopCase, size: int, ended: str) -> Result:
    first = next((of_rank for of_rank in run if of_rank.optimizer != "-"), LoopRun(case.strategy))
    comparison = Comparison(adaptive=first.optimizer != "SGD")
    finding = _compare(run, one, comparison, size, ended)
    title = Case(first.strategy, size, "none", first.optimizer)
    return Result(title, comparison.errors, sorted(comparison.round_off), comparison.round_off_error, finding)


def _not_run(case: LoopCase, size: int) -> Result:
    title = Case(case.strategy, size, "none", "-")
    return Result(title, {}, [], 0.0, not_run=f"an earlier case on {plural(size, 'rank')} ended with an error")


def _bits_of(run: Run) -> Bits:
    """A run as bits, to be compared with those of other world sizes. Numbers of the loop follow the order of ranks."""
    first = run[0]
    texts = [
        [str(sorted(step.bits.get(what, {}).items())) for what in ("gradients", "parameters")] for step in first.steps
    ]
    steps = [StepBits(step.scalars["loss"].hex(), "", *text) for step, text in zip(first.steps, texts, strict=True)]
    weights, state = (" ".join(of_models) for of_models in zip(*(first.digests or [("", "")]), strict=True))
    agree = all(of_rank.digests == first.digests for of_rank in run)
    return Bits(first.strategy, first.optimizer, weights, state, steps, agree)


def _compare(run: Run, one: Run, comparison: Comparison, size: int, ended: str) -> Diagnosis | None:
    steps = list(zip(*(of_rank.steps for of_rank in run), strict=False)) if len(run) == size else []
    for name in run[0].start if len(run) == size else ():
        values = [of_rank.start.get(name) for of_rank in run]
        if len({str(value) for value in values}) > 1:
            return Diagnosis(0, "start", name, f"it is {', '.join(map(str, values))} on ranks 0 to {size - 1}")
    for number, (ranks, want) in enumerate(zip(steps, one[0].steps, strict=False)):
        got, samples = ranks[0], _samples(ranks)
        found = comparison.add(got, want)
        apart = next((what for what in ACROSS if any(_told(rank, what) != _told(got, what) for rank in ranks)), "")
        if not (found or apart or samples != want.samples or got.scalars.keys() != want.scalars.keys()):
            continue
        if samples != want.samples:
            own_orders = size > 1 and _repeats(run, got.epoch) and not _repeats(one, want.epoch)
            return Diagnosis(number, "order" if own_orders else "samples", "", sample_difference(samples, want.samples))
        path = list(dict.fromkeys(what for of_rank in [*one, *run] for what in of_rank.path))
        kinds = {f.kind for f in found}
        return Diagnosis(number, *_explained(ranks, want, apart, kinds, found[0].tensor if found else "", path))
    if failed := _failed(run, size, ended):
        return failed
    lengths = [len(of_rank.steps) for of_rank in [*run, *one]]
    if len({*lengths}) > 1:
        return Diagnosis(min(lengths), "ways", "", f"steps of ranks 0 to {size - 1} and of one process: {lengths}")
    return None


def _samples(ranks: Sequence[LoopStep]) -> list[int]:
    return sorted(i for rank in ranks for i in rank.samples)


def _told(step: LoopStep, what: str) -> object:
    """What must be the same on all ranks: of tensors the checksums."""
    return getattr(step, what) if what in ("rates", "scalars") else step.bits.get(what)


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


def _explained(
    ranks: Sequence[LoopStep], want: LoopStep, apart: str, kinds: set[str], tensor: str, path: Sequence[str]
) -> Explanation:
    """The first thing that is not as on one process, in the order of a step."""
    got = ranks[0]
    if apart == "rates" or got.rates != want.rates:
        rates = ", ".join(str(rank.rates[0]) for rank in ranks)
        return "settings", "", f"learning rates {rates}; alone {want.rates[0]}"
    for what in ("input", "output"):
        total, alone = sum(getattr(rank, what) for rank in ranks), getattr(want, what)
        if not abs(total - alone) <= 1e-8 * max(1.0, abs(alone)):  # nor is NaN
            return what, "", f"added up over all samples {total:.12g}, alone {alone:.12g}"
    loss, alone = got.scalars["loss"], want.scalars["loss"]
    if abs(loss - alone) > 1e-12 * abs(alone):
        return "weights", "", f"the loss is {loss:.12g}, alone {alone:.12g}"
    if apart == "gradients" or "gradient" in kinds:
        return _of_gradient(ranks, want, apart, tensor, path)
    for what, kind in (("stepped", CLIPPED), ("parameters", "parameter")):
        if apart == what or kind in kinds:
            is_scaled = _factor(got.stepped, got.gradients) is not None  # as clipping does
            cause = "beside" if what == "stepped" and not is_scaled else ACROSS[what][0]
            return cause, tensor, f"{ACROSS[what][1]} differs" + (" between ranks" if apart == what else "")
    if apart == "scalars":
        numbers = [[*rank.scalars.values()][1:] for rank in ranks]
        return "own number", "", f"on ranks 0 to {len(ranks) - 1}: {numbers}"
    mine, alone = got.scalars, want.scalars
    wrong = [n for n in mine if n in alone and abs(mine[n] - alone[n]) > 1e-12 * abs(alone[n])]
    return "number", ", ".join(wrong), f"{[mine[n] for n in wrong]}, alone {[alone[n] for n in wrong]}"


def _of_gradient(
    ranks: Sequence[LoopStep], want: LoopStep, apart: str, tensor: str, path: Sequence[str]
) -> Explanation:
    """What makes a gradient wrong after s.backward, though samples and losses are right."""
    beside = sorted({name for rank in ranks for name in rank.beside})
    differs = f"{ACROSS['gradients'][1]} differs" + (" between ranks" if apart == "gradients" else "")
    if max(rank.bodies for rank in ranks) > 1 and any(rank.between for rank in ranks):
        return "between", tensor, differs
    if beside:
        return "beside", tensor, f"{differs}; .grad has changed before s.backward: {', '.join(beside[:4])}"
    if apart == "gradients":
        return "sync", tensor, differs
    if path:
        return "scale", tensor, f"{differs}; on its path: {', '.join(path[:4])}"
    if (factor := _factor(ranks[0].gradients, want.gradients)) is not None:
        return "mean", tensor, f"every gradient is {ratio_words(factor)} what it should be"
    return "gradient", tensor, differs


def _factor(got: Named, want: Named) -> float | None:
    """The factor between all tensors of two sets, if there is one."""
    pairs = [
        (a.double().flatten(), b.double().flatten())
        for n, a in got.items()
        if (b := want.get(n)) is not None and a is not None
    ]
    if got.keys() != want.keys() or not pairs:
        return None
    return factor_between(*(torch.cat(side) for side in zip(*pairs, strict=True)))
