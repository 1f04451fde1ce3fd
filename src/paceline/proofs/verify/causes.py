"""From a difference to its likely cause: by what was observed directly, and by taking the gradient apart.

One process keeps what each micro-batch adds to the gradient. A wrong gradient is then almost always a wrong mixture of
these parts, and the mixture, found by least squares, says what was done: all shares by the same wrong factor (a wrong
mean), each by its own size (a mean of means), some not at all (left out), or nothing that fits.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from paceline.proofs.verify.comparison import CLIPPED, TensorDifference
from paceline.proofs.verify.reference import Observed, Reference, at_probes
from paceline.proofs.verify.setup import has_batch_norm

NORM = "gradient norm"
SAME = 1e-6  # two factors found by least squares are one
Explanation = tuple[str, str, str]
"""(a key of verify.spec.CAUSES, the tensor that shows it, details)"""


@dataclass(frozen=True)
class RankDifferences:
    """What only a look at all ranks shows, before and after the step."""

    start_differs: str | None
    """a tensor that differs between ranks, or from one process, before the step"""
    gradients_differ: str | None
    """a tensor whose synchronised gradient differs between ranks"""
    after_differs: str | None
    """a parameter or merged buffer that differs between ranks after the step"""


def explain(
    got: Observed, want: Observed, found: Sequence[TensorDifference], ranks: RankDifferences, reference: Reference
) -> Explanation:
    """What made the first step that is not as it should be."""
    kinds = {d.kind: d for d in reversed(found)}
    loss, clipped = kinds.get("loss"), kinds.get(CLIPPED)
    if got.samples != want.samples:
        return "samples", "samples", _sample_difference(got.samples, want.samples)
    if ranks.start_differs:
        return "start", ranks.start_differs, "differs before the step; was the model broadcast?"
    if got.streams != want.streams:
        return "random", "random stream", _stream_difference(got, want)
    if loss and loss.tensor != NORM:  # samples, weights and random numbers are right, yet the loss is another
        return _explain_loss(got, want, loss, reference)
    if ranks.gradients_differ:
        return "sync", ranks.gradients_differ, "its gradient differs between ranks after synchronisation"
    if "gradient" in kinds:
        return _explain_gradient(got, want, kinds["gradient"], reference)
    if loss:
        return "clipping", NORM, _off(got.scalars, want.scalars, NORM)
    if clipped:
        return "clipping", clipped.tensor, "its gradient was right, but not what clipping made of it"
    for kind in ("optimizer state", "parameter"):
        if kind in kinds:
            return "optimizer", kinds[kind].tensor, f"off by {kinds[kind].error:.1e} after right gradients"
    if "buffer" in kinds:
        return "buffers", kinds["buffer"].tensor, f"off by {kinds['buffer'].error:.1e}"
    where = str(ranks.after_differs)
    cause = "optimizer" if where in want.parameters else "buffers"  # gradients were equal on all ranks
    return cause, where, "differs between ranks after the step"


def _explain_loss(got: Observed, want: Observed, loss: TensorDifference, reference: Reference) -> Explanation:
    ratio = got.scalars[loss.tensor] / want.scalars[loss.tensor]
    batch_norm = loss.tensor == "loss" and has_batch_norm(reference.model) and not _is_factor(ratio)
    return "buffers" if batch_norm else "loss", loss.tensor, _off(got.scalars, want.scalars, loss.tensor)


def _explain_gradient(got: Observed, want: Observed, first: TensorDifference, ref: Reference) -> Explanation:
    absent = [n for n, g in want.gradients.items() if (g is None) != (got.gradients.get(n) is None)]
    if absent:
        there = "None" if want.gradients[absent[0]] is None else "a tensor"
        return "none", absent[0], f"one process has {there} here"
    keys = list(ref.parts)
    basis = torch.stack([ref.parts[k] for k in keys], 1)  # (probes, parts)
    values = at_probes(got.gradients, {n: g for n, g in want.gradients.items() if g is not None})
    total = want.scalars["weight"]
    scale = float(values.abs().max()) or 1.0
    wanted = at_probes(want.gradients, {n: g for n, g in want.gradients.items() if g is not None})
    factor = float(values @ wanted / (wanted @ wanted))
    if float((values - factor * wanted).abs().max()) <= 1e-9 * scale:
        return "mean", first.tensor, f"every gradient is {_ratio(factor)} what it should be"
    mixture = torch.linalg.lstsq(basis, values.unsqueeze(1), driver="gelsd").solution[:, 0] * total  # all 1 if right
    residual = float((basis @ (mixture / total) - values).abs().max()) / scale
    if residual > 1e-7:
        wrong = sum(1 for n, g in want.gradients.items() if g is not None and _differs(got.gradients[n], g))
        detail = f"{wrong} of {len(want.gradients)} gradients differ, up to {first.error:.1e}"
        return "gradient", first.tensor, detail
    told = ", ".join(f"{k}: {_ratio(float(m))}" for k, m in zip(keys, mixture, strict=True))
    cause = _cause_of_mixture(dict(zip(keys, mixture.tolist(), strict=True)), want, ref)
    return cause, first.tensor, f"parts by virtual rank.micro-batch enter {told}"


def _cause_of_mixture(mixture: dict[str, float], want: Observed, ref: Reference) -> str:
    """What makes the micro-batches enter with these factors, which are not all alike."""
    by_rank: dict[str, list[float]] = {}
    for key, factor in mixture.items():
        by_rank.setdefault(key.split(".")[0], []).append(factor)
    if any(abs(f) < SAME or abs(f - 2) < SAME for f in mixture.values()):
        return "accumulation"
    if any(max(factors) - min(factors) > SAME for factors in by_rank.values()):
        by_part: dict[str, list[float]] = {}
        for key, factor in mixture.items():
            by_part.setdefault(key.split(".")[1], []).append(factor)
        # The same on every rank, but not for every micro-batch.
        return "accumulation" if all(max(f) - min(f) < SAME for f in by_part.values()) else "shares"
    # One factor a rank. A mean of means weighs by 1 / share; anything else, where gradients are clipped, by 1 / norm.
    weights = {v: sum(w for k, w in ref.weights.items() if k.split(".")[0] == v) for v in by_rank}
    products = [factors[0] * weights[v] for v, factors in by_rank.items()]
    averaged = max(products) - min(products) < SAME * max(map(abs, products))
    return "shares" if averaged or want.scalars[NORM] <= ref.spec.clip_norm else "clipping"


def _differs(a: torch.Tensor | None, b: torch.Tensor) -> bool:
    return a is None or float((a - b).abs().max()) > 1e-12 * max(float(b.abs().max()), 1e-300)


def _sample_difference(got: Sequence[int], want: Sequence[int]) -> str:
    more, less = Counter(got) - Counter(want), Counter(want) - Counter(got)
    return (
        f"this global batch has {len(got)} samples instead of {len(want)}; "
        f"too many: {sorted(more.elements())[:6] or 'none'}, missing: {sorted(less.elements())[:6] or 'none'}"
    )


def _stream_difference(got: Observed, want: Observed) -> str:
    wrong = [key for key in {**want.streams, **got.streams} if got.streams.get(key) != want.streams.get(key)]
    return f"virtual rank.micro-batch {', '.join(sorted(wrong)[:6])} starts from other random numbers"


def _is_factor(ratio: float) -> bool:
    """Whether a ratio is a small whole number or one over it: a sum taken for a mean, or the like."""
    return any(abs(r - round(r)) < 1e-9 and round(r) > 1 for r in (abs(ratio), 1 / abs(ratio))) if ratio else False


def _ratio(factor: float) -> str:
    for whole in range(1, 65):
        if abs(factor - whole) < 1e-6 * whole:
            return f"{whole} x"
        if abs(factor * whole - 1) < 1e-6:
            return f"1/{whole}"
    return f"{factor:.6g} x"


def _off(got: dict[str, float], want: dict[str, float], name: str) -> str:
    return f"{name} is {got[name]:.12g}, one process has {want[name]:.12g}"
