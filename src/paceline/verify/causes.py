"""From a difference to its likely cause: by what was observed directly, and by taking the gradient apart.

One process keeps what each micro-batch adds to the gradient. A wrong gradient is then almost always a wrong mixture of
these parts, and the mixture, found by least squares, says what was done: all shares by the same wrong factor (a wrong
mean), each by its own size (a mean of means), some not at all (left out), or nothing that fits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from paceline.verify.compare import Difference
from paceline.verify.reference import Observed, Reference, at_probes
from paceline.verify.spec import Finding

@dataclass(frozen=True)
class Ranks:
    """What only a look at all ranks shows, before and after the step."""

    start_differs: str | None
    """a tensor that differs between ranks, or from one process, before the step"""
    gradients_differ: str | None
    """a tensor whose synchronised gradient differs between ranks"""
    after_differs: str | None
    """a parameter or merged buffer that differs between ranks after the step"""


def explain(
    number: int, got: Observed, want: Observed, found: Sequence[Difference], ranks: Ranks, reference: Reference
) -> Finding:
    """The finding for the first step that is not as it should be."""

    def finding(cause: str, tensor: str, detail: str) -> Finding:
        return Finding(number, cause, tensor, detail)

    first = found[0] if found else Difference("", "", 0.0)
    if got.samples != want.samples:
        return finding("samples", "samples", _sample_difference(got.samples, want.samples))
    if ranks.start_differs:
        return finding("start", ranks.start_differs, "differs before the step; was the model broadcast?")
    if got.streams != want.streams:
        return finding("random", "random stream", _stream_difference(got, want))
    kinds = {d.kind: d for d in reversed(found)}
    if "loss" in kinds and kinds["loss"].tensor in ("loss", "weight"):
        # Samples, weights and random numbers are right, yet the forward gives another loss.
        if number > 0 and _has_batch_norm(reference) and kinds["loss"].tensor == "loss" and "gradient" not in kinds:
            return finding("buffers", kinds["loss"].tensor, f"loss off by {kinds['loss'].error:.1e}")
        cause = "buffers" if _has_batch_norm(reference) and kinds["loss"].tensor == "loss" else "loss"
        if cause == "buffers" and _is_factor(got.scalars["loss"] / want.scalars["loss"]):
            cause = "loss"
        return finding(cause, kinds["loss"].tensor, _off(got.scalars, want.scalars, kinds["loss"].tensor))
    if ranks.gradients_differ:
        return finding("sync", ranks.gradients_differ, "its gradient differs between ranks after synchronisation")
    if "gradient" in kinds:
        return _explain_gradient(number, got, want, kinds["gradient"], reference)
    if "gradient norm" in {d.tensor for d in found}:
        return finding("clipping", "gradient norm", _off(got.scalars, want.scalars, "gradient norm"))
    if "optimizer state" in kinds or "parameter" in kinds:
        d = kinds.get("optimizer state", kinds.get("parameter", first))
        clipped = want.scalars["gradient norm"] > reference.max_norm
        if clipped and _looks_unclipped(got, want, reference):
            return finding("clipping", d.tensor, "the step was taken along a gradient that was not clipped as it should")
        return finding("optimizer", d.tensor, f"off by {d.error:.1e}, although the gradients are right")
    if "buffer" in kinds:
        return finding("buffers", kinds["buffer"].tensor, f"off by {kinds['buffer'].error:.1e}")
    if ranks.after_differs:
        return finding("sync", ranks.after_differs, "differs between ranks after the step")
    return finding("optimizer", first.tensor, f"off by {first.error:.1e}")


def _explain_gradient(number: int, got: Observed, want: Observed, first: Difference, ref: Reference) -> Finding:
    absent = [n for n, g in want.gradients.items() if (g is None) != (got.gradients.get(n) is None)]
    if absent:
        there = "None" if want.gradients[absent[0]] is None else "a tensor"
        return Finding(number, "none", absent[0], f"one process has {there} here")
    keys = list(ref.parts)
    basis = torch.stack([ref.parts[k] for k in keys], 1)  # (probes, parts)
    values = at_probes(got.gradients, {n: g for n, g in want.gradients.items() if g is not None})
    total = want.scalars["weight"]
    scale = float(values.abs().max()) or 1.0
    wanted = at_probes(want.gradients, {n: g for n, g in want.gradients.items() if g is not None})
    factor = float(values @ wanted / (wanted @ wanted))
    if float((values - factor * wanted).abs().max()) <= 1e-9 * scale:
        return Finding(number, "mean", first.tensor, f"every gradient is {_ratio(factor)} what it should be")
    mixture = torch.linalg.lstsq(basis, values.unsqueeze(1), driver="gelsd").solution[:, 0] * total  # all 1 if right
    residual = float((basis @ (mixture / total) - values).abs().max()) / scale
    if residual > 1e-7:
        wrong = sum(1 for n, g in want.gradients.items() if g is not None and _differs(got.gradients[n], g))
        return Finding(
            number, "gradient", first.tensor, f"{wrong} of {len(want.gradients)} gradients differ, up to {first.error:.1e}"
        )
    told = ", ".join(f"{k}: {_ratio(float(m))}" for k, m in zip(keys, mixture, strict=True))
    if bool((mixture.abs() < 1e-6).any()) or bool(((mixture - 2).abs() < 1e-6).any()):
        return Finding(number, "accumulation", first.tensor, f"parts by virtual rank.micro-batch enter {told}")
    return Finding(number, "shares", first.tensor, f"parts by virtual rank.micro-batch enter {told}")


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


def _has_batch_norm(reference: Reference) -> bool:
    return any(isinstance(m, torch.nn.modules.batchnorm._BatchNorm) for m in reference.model.modules())  # pyright: ignore[reportPrivateUsage]


def _looks_unclipped(got: Observed, want: Observed, reference: Reference) -> bool:
    """Whether the optimizer's running mean of gradients is off by one factor: clipping is such a factor."""
    key = next((k for k in want.state if k.startswith(("momentum_buffer", "exp_avg of"))), None)
    if key is None or key not in got.state:
        return False
    a, b = got.state[key].reshape(-1), want.state[key].reshape(-1)
    norm = float(b @ b)
    factor = float(a @ b) / norm if norm else 1.0
    return abs(factor - 1) > 1e-9 and float((a - factor * b).abs().max()) <= 1e-6 * max(float(a.abs().max()), 1e-300)


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
