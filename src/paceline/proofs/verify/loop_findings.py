"""What the ranks of a loop have noted, beside one process: the first step that differs, and what made it so."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from paceline.errors import UsageError, plural
from paceline.proofs.verify.causes import CLIPPED, Comparison, ratio_words, sample_difference
from paceline.proofs.verify.reference import Observed
from paceline.verify.spec import Bits, BitsReport, Case, Diagnosis, LoopCase, LoopSpec, Result, StepBits, VerifyReport

Run = list[dict[str, Any]]
"""what each rank has noted"""
BITS = ("gradients bits", "parameters bits")  # the loop adds up numbers itself, in an order that follows the ranks
ACROSS = {  # what ranks must have alike, in the order in which one makes the next
    "rates": ("settings", "the learning rate"),
    "gradients bits": ("sync", "the gradient after s.backward"),
    "stepped bits": ("changed", "the gradient that optimizer.step() is given"),
    "parameters bits": ("outside", "a parameter after the step"),
    "numbers": ("own number", "what the loop logs"),
}


def findings(
    folder: Path, spec: LoopSpec, ranks: Sequence[int], ended: Mapping[int, str]
) -> tuple[VerifyReport, list[BitsReport]]:
    """All that the runs have shown; no bits where not all have come to their end.

    Raises:
        UsageError: the function has trained nothing.
    """
    runs = {(n, i): _read(folder, n, i) for n in {1, *ranks} for i in range(len(spec.cases))}
    alone = runs[1, 0]
    if alone and not (alone[0]["error"] or any("stepped" in step for step in alone[0]["steps"])):
        raise UsageError(
            f"{spec.target} has taken no optimizer.step() in a paceline.session(), in {len(alone[0]['steps'])} "
            "batches: there is nothing to verify. For more batches, in longer epochs: --steps"
        )
    notes = {note for run in runs.values() for noted in run for note in noted["notes"]}
    draws = any(noted["draws"] for noted in alone)
    if draws:
        notes.add(
            "the loop draws random numbers, which belong to virtual ranks: the one process that all are compared with "
            f"is {spec.virtual_ranks} of these"
        )
    broken = not alone or alone[0]["error"]
    results = [
        _not_run(case, n)
        if not runs[n, i] and any(noted["error"] for earlier in range(i) for noted in runs[n, earlier])
        else _compared(runs[n, i], runs[1, i] if draws else alone, case, n, ended[n])
        for n in ([1] if broken else ranks)
        for i, case in enumerate(spec.cases)
        if not case.exact and (i > 0) != bool(broken)
    ]
    last = len(spec.cases) - 1
    failed = {n: found for n in ranks if (found := _failed(runs[n, last], n, ended[n]))}
    if not any(result.finding for result in results):  # else a failure of theirs has left the bits out
        results += [Result(Case("exact", n, "none", "-"), {}, [], 0.0, found) for n, found in failed.items()]
    bits = [] if failed else [BitsReport(n, 0, 0, [_bits_of(runs[n, last])], {}) for n in ranks]
    return VerifyReport(max(ranks), 0, 0, results, sorted(notes)), bits


def _read(folder: Path, size: int, number: int) -> Run:
    """What the ranks of a world have noted of a case; none of a rank that has not come to its end."""
    files = [folder / f"{size}-{number}-{rank}.pt" for rank in range(size)]
    return [torch.load(file, weights_only=True) for file in files if file.is_file()]


def _compared(run: Run, one: Run, case: LoopCase, size: int, ended: str) -> Result:
    optimizer = next((noted["optimizer"] for noted in run if "optimizer" in noted), "-")
    strategy = next((noted["strategy"] for noted in run if "strategy" in noted), case.strategy)
    comparison = Comparison(adaptive=optimizer != "SGD")
    finding = _compare(run, one, comparison, size, ended)
    title = Case(strategy, size, "none", optimizer)
    return Result(title, comparison.errors, sorted(comparison.round_off), comparison.round_off_error, finding)


def _not_run(case: LoopCase, size: int) -> Result:
    title = Case(case.strategy, size, "none", "-")
    return Result(title, {}, [], 0.0, not_run=f"an earlier case on {plural(size, 'rank')} ended with an error")


def _bits_of(run: Run) -> Bits:
    """A run as bits, to be compared with those of other world sizes."""
    first = run[0]
    texts = [[str(sorted(step.get(key, {}).items())) for key in BITS] for step in first["steps"]]
    steps = [StepBits(step["loss"].hex(), "", *text) for step, text in zip(first["steps"], texts, strict=True)]
    agree = all(noted["weights"] == first["weights"] for noted in run)
    weights, state = (" ".join(first[key]) for key in ("weights", "state"))
    return Bits(first["strategy"], first["optimizer"], weights, state, steps, agree)


def _compare(run: Run, one: Run, comparison: Comparison, size: int, ended: str) -> Diagnosis | None:
    steps = list(zip(*(noted["steps"] for noted in run), strict=False)) if len(run) == size else []
    for name in run[0]["start"] if len(run) == size else ():
        values = [noted["start"].get(name) for noted in run]
        if len({str(value) for value in values}) > 1:
            return Diagnosis(0, "start", name, f"it is {', '.join(map(str, values))} on ranks 0 to {size - 1}")
    for number, (ranks, want) in enumerate(zip(steps, one[0]["steps"], strict=False)):
        got = ranks[0]
        samples = sorted(i for rank in ranks for i in rank["samples"])
        found = comparison.add(_observed(got, samples), _observed(want, want["samples"]))
        apart = next((key for key in ACROSS if any(rank.get(key) != got.get(key) for rank in ranks)), "")
        if not (found or apart or samples != want["samples"] or got["numbers"].keys() != want["numbers"].keys()):
            continue
        tensor = found[0].tensor if found else ""
        path = list(dict.fromkeys(what for noted in [*one, *run] for what in noted["path"]))
        own_orders = size > 1 and _repeats(run, got["epoch"]) and not _repeats(one, want["epoch"])
        return Diagnosis(number, *_explained(ranks, want, apart, {f.kind for f in found}, tensor, path, own_orders))
    if failed := _failed(run, size, ended):
        return failed
    lengths = [len(noted["steps"]) for noted in [*run, *one]]
    if len({*lengths}) > 1:
        return Diagnosis(min(lengths), "ways", "", f"steps of ranks 0 to {size - 1} and of one process: {lengths}")
    return None


def _repeats(run: Run, epoch: int) -> bool:
    """Whether an epoch has a sample twice, over all ranks: each takes its share of an order of its own."""
    samples = [i for noted in run for step in noted["steps"] if step["epoch"] == epoch for i in step["samples"]]
    return len({*samples}) < len(samples)


def _failed(run: Run, size: int, ended: str) -> Diagnosis | None:
    errors = [noted["error"] for noted in sorted(run, key=lambda noted: noted["victim"]) if noted["error"]]
    if not errors and len(run) == size:
        return None
    words, steps = [*errors, ended][0], min((len(noted["steps"]) for noted in run), default=0)
    return Diagnosis(steps, "refused" if errors and "collectives" not in words else "ways", "", words)


def _observed(step: dict[str, Any], samples: list[int]) -> Observed:
    return Observed(
        samples, {}, {"loss": step["loss"], **step["numbers"]}, step.get("gradients", {}), step.get("stepped", {}),
        step["parameters"], {}, {},
    )  # fmt: skip


def _explained(
    ranks: Any, want: Any, apart: str, kinds: set[str], tensor: str, path: Sequence[str], own_orders: bool
) -> tuple[str, str, str]:
    """(cause, tensor, details) of the first thing that is not as on one process, in the order of a step."""
    got, samples = ranks[0], sorted(i for rank in ranks for i in rank["samples"])
    if samples != want["samples"]:
        return "order" if own_orders else "samples", "", sample_difference(samples, want["samples"])
    if apart == "rates" or got["rates"] != want["rates"]:
        rates = ", ".join(str(rank["rates"][0]) for rank in ranks)
        return "settings", "", f"learning rates {rates}; alone {want['rates'][0]}"
    for what in ("input", "output"):
        total = sum(rank[what] for rank in ranks)
        if not abs(total - want[what]) <= 1e-8 * max(1.0, abs(want[what])):  # nor is NaN
            return what, "", f"added up over all samples {total:.12g}, alone {want[what]:.12g}"
    if abs(got["loss"] - want["loss"]) > 1e-12 * abs(want["loss"]):
        return "weights", "", f"the loss is {got['loss']:.12g}, alone {want['loss']:.12g}"
    if apart == "gradients bits" or "gradient" in kinds:
        return _of_gradient(ranks, want, apart, tensor, path)
    for key, kind in (("stepped bits", CLIPPED), ("parameters bits", "parameter")):
        if apart == key or kind in kinds:
            cause = "beside" if key == "stepped bits" and not _scaled(got) else ACROSS[key][0]
            return cause, tensor, f"{ACROSS[key][1]} differs" + (" between ranks" if apart == key else "")
    if apart == "numbers":
        return "own number", "", f"on ranks 0 to {len(ranks) - 1}: {[list(rank['numbers'].values()) for rank in ranks]}"
    mine, alone = got["numbers"], want["numbers"]
    wrong = [n for n in mine.keys() & alone if abs(mine[n] - alone[n]) > 1e-12 * abs(alone[n])]
    return "number", ", ".join(wrong), f"{[mine[n] for n in wrong]}, alone {[alone[n] for n in wrong]}"


def _of_gradient(ranks: Any, want: Any, apart: str, tensor: str, path: Sequence[str]) -> tuple[str, str, str]:
    """(cause, tensor, details) of a gradient that is wrong after s.backward, though samples and losses are right."""
    beside = sorted({name for rank in ranks for name in rank["beside"]})
    differs = "the gradient after s.backward differs" + (" between ranks" if apart == "gradients bits" else "")
    several = max(rank["bodies"] for rank in ranks) > 1
    if several and any(rank["between"] for rank in ranks):
        return "between", tensor, differs
    if beside:
        return "beside", tensor, f"{differs}; .grad has changed before s.backward: {', '.join(beside[:4])}"
    if apart == "gradients bits":
        return "sync", tensor, differs
    if path:
        return "scale", tensor, f"{differs}; on its path: {', '.join(path[:4])}"
    factor = _factor(ranks[0].get("gradients", {}), want.get("gradients", {}))
    if factor is not None:
        return "mean", tensor, f"every gradient is {ratio_words(factor)} what it should be"
    return "gradient", tensor, differs


def _scaled(step: dict[str, Any]) -> bool:
    """Whether the gradients that the optimizer was given are those after s.backward times one factor, as clipping."""
    return _factor(step.get("stepped", {}), step.get("gradients", {})) is not None


def _factor(got: Mapping[str, Any], want: Mapping[str, Any]) -> float | None:
    """The factor between all tensors of two sets, if there is one."""
    if got.keys() != want.keys() or not got:
        return None
    a, b = (torch.cat([named[name].double().flatten() for name in got]) for named in (got, want))
    factor = float(a @ b / (b @ b)) if bool(b.any()) else 0.0
    return factor if float((a - factor * b).abs().max()) <= 1e-9 * float(a.abs().max()) else None
