"""From a difference to its likely cause: by what was observed directly, and by taking the gradient apart.

One process keeps what each micro-batch adds to the gradient. A wrong gradient is then almost always a wrong mixture of
these parts, and the mixture, found by least squares, says what was done: all shares by the same wrong factor (a wrong
mean), each by its own size (a mean of means), some not at all (left out), or nothing that fits.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import nan
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.lab.ranks.reference import Named, Observed, Reference, at_probes, has_batch_norm
from paceline.lab.verify import ADAPTIVE_TOLERANCE, TOLERANCES, Case, Diagnosis, Result

CLIPPED = "clipped gradient"  # counted among the gradients
ROUND_OFF = 1e-11  # a gradient below this share of the largest is what rounding left of zero
NORM = "gradient norm"
OTHER_FACTOR = 2.0**20  # of a loss, to see whether its gradient path is linear
SAME = 1e-6  # two factors found by least squares are one
Explanation = tuple[str, str, str]
"""(a key of verify.spec.CAUSES, the tensor that shows it, details)"""


@dataclass
class TensorDifference:
    """A tensor that is not what it should be."""

    kind: str
    tensor: str
    error: float


@dataclass
class Comparison:
    """The largest error of each kind that was compared so far, and the differences found in the last step.

    The error of a tensor is max|a - b| / s, with s the largest magnitude of its kind (gradients, say) in the model: a
    gradient of 1e-15 that should be 0 is no difference, while its neighbours are of size 1.
    """

    adaptive: bool
    precision: str = "float64"
    """a key of TOLERANCES"""
    moved: float = 0.0
    """the distance to which an adaptive optimizer may turn the rounding of a lower precision in the steps so far"""
    errors: dict[str, float] = field(default_factory=dict[str, float])
    round_off: set[str] = field(default_factory=set[str])
    round_off_error: float = 0.0

    def add(self, got: Observed, want: Observed) -> list[TensorDifference]:
        """Compare one step."""
        found: list[TensorDifference] = []
        tolerance = self.tolerance
        for name, value in want.scalars.items():
            error = abs(got.scalars.get(name, nan) - value) / max(abs(value), 1e-300)
            self._note(found, "loss", name, error, tolerance)
        scale = _largest(want.gradients)
        if self.adaptive and self.precision == "float64":
            self.round_off |= {n for n, g in want.gradients.items() if g is not None and _size(g) < ROUND_OFF * scale}
        loose = max(tolerance, ADAPTIVE_TOLERANCE) if self.adaptive else tolerance
        self._kind(found, "gradient", got.gradients, want.gradients, tolerance)
        self._kind(found, CLIPPED, got.stepped, want.stepped, tolerance)
        self._kind(found, "optimizer state", got.state, want.state, loose)
        moved = self.moved / max(_largest(want.parameters), 1e-300)
        self._kind(found, "parameter", got.parameters, want.parameters, loose + moved)
        # A bias that is nothing but round-off moves the running mean of the batch norm behind it, and only that.
        self._kind(found, "buffer", got.buffers, want.buffers, ADAPTIVE_TOLERANCE if self.round_off else tolerance)
        return found

    @property
    def tolerance(self) -> float:
        """For all but parameters and state under an adaptive optimizer."""
        return TOLERANCES[self.precision]

    def result(self, case: Case, finding: Diagnosis | None) -> Result:
        """The result of all steps so far."""
        return Result(case, self.errors, sorted(self.round_off), self.round_off_error, finding)

    def _kind(self, found: list[TensorDifference], kind: str, got: Named, want: Named, tolerance: float) -> None:
        scale = max(_largest(want), 1e-300)
        for name in {**want, **got}:
            a, b = got.get(name), want.get(name)
            if a is None and b is None:
                continue
            if a is None or b is None or a.shape != b.shape:
                self._note(found, kind, name, float("inf"), tolerance)
                continue
            absolute = _size(a.double() - b.double())
            if kind == "parameter" and name in self.round_off:
                self.round_off_error = max(self.round_off_error, absolute)
                if not absolute <= ADAPTIVE_TOLERANCE:
                    found.append(TensorDifference(kind, name, absolute))
                continue
            self._note(found, kind, name, absolute / scale, tolerance)

    def _note(self, found: list[TensorDifference], kind: str, name: str, error: float, tolerance: float) -> None:
        error = error if error == error else float("inf")  # NaN is no agreement
        shown = "gradient" if kind == CLIPPED else kind
        self.errors[shown] = max(self.errors.get(shown, 0.0), error)
        if not error <= tolerance:
            found.append(TensorDifference(kind, name, error))


def _size(tensor: Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0


def _largest(tensors: Named) -> float:
    return max((_size(t) for t in tensors.values() if t is not None and t.is_floating_point()), default=0.0)


class RankDifferences(NamedTuple):
    """Tensors that differ between ranks."""

    start_differs: str | None  # or from one process, before the step
    gradients_differ: str | None  # after synchronisation
    after_differs: str | None  # a parameter or merged buffer, after the step


def explain(
    got: Observed, want: Observed, found: Sequence[TensorDifference], ranks: RankDifferences, reference: Reference
) -> Explanation:
    """What made the first step that is not as it should be."""
    kinds = {d.kind: d for d in reversed(found)}
    loss, clipped = kinds.get("loss"), kinds.get(CLIPPED)
    if got.samples != want.samples:
        return "samples", "samples", sample_difference(got.samples, want.samples)
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
        held = "None" if want.gradients[absent[0]] is None else "a tensor"
        return "none", absent[0], f"one process has {held} here"
    keys = list(ref.weights)
    there = {n: g for n, g in want.gradients.items() if g is not None}
    values, wanted = at_probes({n: got.gradients.get(n) for n in there}, there), at_probes(there, there)
    scale = float(values.abs().max()) or 1.0
    if (factor := factor_between(values, wanted)) is not None:
        return "mean", first.tensor, f"every gradient is {ratio_words(factor)} what it should be"
    basis = ref.apart([[key] for key in keys], [1.0] * len(keys))  # (probes, parts)
    mixture = torch.linalg.lstsq(basis, values.unsqueeze(1), driver="gelsd").solution[:, 0]  # all 1 if right
    residual = float((basis @ mixture - values).abs().max()) / scale
    if residual > 1e-7:
        wrong = sum(_differs(got.gradients[n], g) for n, g in there.items())
        details = f"{wrong} of {len(want.gradients)} gradients differ, up to {first.error:.1e}"
        if _is_linear(basis.sum(1), ref):
            return "gradient", first.tensor, details
        if told := _other_scale(values, ref):
            return "scale", first.tensor, told
        return "gradient", first.tensor, f"{details}. The gradient path is not linear{_hooked(ref)}"
    if all(abs(m - 1) < SAME for m in mixture.tolist()):  # right parts, which do not add up to the whole gradient
        return "scale", first.tensor, f"each micro-batch's part is right, alone{_hooked(ref)}"
    told = ", ".join(f"{k}: {ratio_words(float(m))}" for k, m in zip(keys, mixture, strict=True))
    cause = _cause_of_mixture(dict(zip(keys, mixture.tolist(), strict=True)), want, ref)
    return cause, first.tensor, f"parts by virtual rank.micro-batch enter {told}"


def factor_between(got: Tensor, want: Tensor, tolerance: float = 1e-9) -> float | None:
    """The factor by which all values differ, if there is one."""
    factor = float(got @ want / (want @ want)) if bool(want.any()) else 0.0
    return factor if float((got - factor * want).abs().max()) <= tolerance * float(got.abs().max()) else None


def _is_linear(once: Tensor, ref: Reference) -> bool:
    """Whether a backward of k times the loss gives k times the gradient: no hook or function clips it, say."""
    keys = [*ref.weights]
    many = ref.apart([[key] for key in keys], [OTHER_FACTOR] * len(keys)).sum(1)
    few = ref.apart([[key] for key in keys], [1 / OTHER_FACTOR] * len(keys)).sum(1)
    allowed = 1e-9 * float(once.abs().max())
    return all(float((other - once).abs().max()) <= allowed for other in (many, few))


def _other_scale(values: Tensor, ref: Reference) -> str:
    """If a backward of something else than the global batch's mean gives this gradient, what was back-propagated."""
    by_rank: dict[str, list[str]] = {}
    for key in ref.weights:
        by_rank.setdefault(key.split(".")[0], []).append(key)
    total = sum(ref.weights.values())
    powers = [2.0**k for k in range(17)]
    for words, groups in (("micro-batch", [[key] for key in ref.weights]), ("virtual rank", [*by_rank.values()])):
        own = [sum(ref.weights[key] for key in group) for group in groups]
        for of, factors in (
            (f"the part of each {words} in the mean, alone", [1.0] * len(own)),
            (f"the sum of the losses of each {words}", [total] * len(own)),
            (f"the mean of the losses of each {words}", [total / max(weight, 1e-300) for weight in own]),
            *((f"the losses of each {words}, times {power:g}", [power] * len(own)) for power in powers),
            *((f"the sum of the losses of each {words}, / {power:g}", [total / power] * len(own)) for power in powers),
        ):
            found = ref.apart(groups, factors).sum(1)
            if float((found - values).abs().max()) <= 1e-9 * float(values.abs().max()):
                return f"it is the gradient of a backward of {of}{_hooked(ref)}"
    return ""


def _hooked(ref: Reference) -> str:
    return f"; hooks on {', '.join(ref.hooked[:3])}" if ref.hooked else ""


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


def sample_difference(got: Sequence[int], want: Sequence[int]) -> str:
    """Which samples of a global batch are too many and which are missing, in words."""
    more, less = Counter(got) - Counter(want), Counter(want) - Counter(got)
    return (
        f"this global batch has {len(got)} samples{f' instead of {len(want)}' if len(got) != len(want) else ''}; "
        f"too many: {sorted(more.elements())[:6] or 'none'}, missing: {sorted(less.elements())[:6] or 'none'}"
    )


def _stream_difference(got: Observed, want: Observed) -> str:
    wrong = [key for key in {**want.streams, **got.streams} if got.streams.get(key) != want.streams.get(key)]
    return f"virtual rank.micro-batch {', '.join(sorted(wrong)[:6])} starts from other random numbers"


def _is_factor(ratio: float) -> bool:
    """Whether a ratio is a small whole number or one over it: a sum taken for a mean, or the like."""
    return any(abs(r - round(r)) < 1e-9 and round(r) > 1 for r in (abs(ratio), 1 / abs(ratio))) if ratio else False


def ratio_words(factor: float) -> str:
    """A factor in words: 2 x, 1/3, 0.7 x."""
    for whole in range(1, 65):
        if abs(factor - whole) < 1e-6 * whole:
            return f"{whole} x"
        if abs(factor * whole - 1) < 1e-6:
            return f"1/{whole}"
    return f"{factor:.6g} x"


def _off(got: dict[str, float], want: dict[str, float], name: str) -> str:
    return f"{name} is {got[name]:.12g}, one process has {want[name]:.12g}"
