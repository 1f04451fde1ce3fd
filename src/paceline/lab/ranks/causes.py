"""Finds the likely cause of a difference, from direct observations and by splitting the gradient.

The reference process can compute the part of each micro-batch in the gradient. A wrong gradient is almost always a
wrong linear combination of these parts. Least squares gives its coefficients, which show the cause: the same wrong
factor for all parts (a wrong mean), a factor that depends on the size (a mean of means), or 0 for some parts (skipped
micro-batches). If no combination fits, the cause is unknown.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import nan
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.lab.ranks.reference import NamedTensors, Reference, StepValues, has_batch_norm, pick_gradient_elements
from paceline.lab.verify import ADAPTIVE_TOLERANCE, TOLERANCES, CaseResult, Divergence, StrategyCase

CLIPPED = "clipped gradient"  # reported as a gradient
ROUND_OFF = 1e-11  # a gradient below this fraction of the largest is 0 except for rounding
NORM = "gradient norm"
LINEARITY_FACTOR = 2.0**20  # multiplies a loss, to test whether its gradient path is linear
COEFFICIENT_TOLERANCE = 1e-6  # tolerance for equal coefficients of the least squares
Explanation = tuple[str, str, str]
"""(a key of CAUSES or LOOP_CAUSES in lab/verify.py, the tensor that shows it, details)"""


@dataclass
class TensorDifference:
    kind: str
    tensor: str
    error: float


@dataclass
class ErrorTracker:
    """The largest error of each kind that was compared so far, and the differences found in the last step.

    The error of a tensor is max|a - b| / s. Here s is the largest magnitude of its kind (for example, of all gradients)
    in the model. A gradient of 1e-15 instead of 0 is therefore no difference if other gradients are of size 1.
    """

    adaptive: bool
    precision: str = "float64"  # a key of TOLERANCES
    max_rounding_move: float = 0.0
    """The distance by which an adaptive optimizer may have moved a parameter so far because of rounding."""
    errors: dict[str, float] = field(default_factory=dict[str, float])
    round_off_parameters: set[str] = field(default_factory=set[str])
    round_off_error: float = 0.0

    def compare_step(self, got: StepValues, want: StepValues) -> list[TensorDifference]:
        differences: list[TensorDifference] = []
        tolerance = self.tolerance
        for name, value in want.scalars.items():
            error = abs(got.scalars.get(name, nan) - value) / max(abs(value), 1e-300)
            self._record(differences, "loss", name, error, tolerance)
        scale = _largest(want.gradients)
        if self.adaptive and self.precision == "float64":
            self.round_off_parameters |= {
                n for n, g in want.gradients.items() if g is not None and _max_abs(g) < ROUND_OFF * scale
            }
        loose_tolerance = max(tolerance, ADAPTIVE_TOLERANCE) if self.adaptive else tolerance
        self._compare(differences, "gradient", got.gradients, want.gradients, tolerance)
        self._compare(differences, CLIPPED, got.applied_gradients, want.applied_gradients, tolerance)
        self._compare(differences, "optimizer state", got.state, want.state, loose_tolerance)
        allowed_move = self.max_rounding_move / max(_largest(want.parameters), 1e-300)
        self._compare(differences, "parameter", got.parameters, want.parameters, loose_tolerance + allowed_move)
        # a bias with a round-off gradient moves only the running mean of the next batch norm
        loose_tolerance = ADAPTIVE_TOLERANCE if self.round_off_parameters else tolerance
        self._compare(differences, "buffer", got.buffers, want.buffers, loose_tolerance)
        return differences

    @property
    def tolerance(self) -> float:
        """The tolerance for all tensors except parameters and state with an adaptive optimizer."""
        return TOLERANCES[self.precision]

    def result(self, case: StrategyCase, finding: Divergence | None) -> CaseResult:
        return CaseResult(case, self.errors, sorted(self.round_off_parameters), self.round_off_error, finding)

    def _compare(
        self, diffs: list[TensorDifference], kind: str, got: NamedTensors, want: NamedTensors, tolerance: float
    ) -> None:
        scale = max(_largest(want), 1e-300)
        for name in {**want, **got}:
            a, b = got.get(name), want.get(name)
            if a is None and b is None:
                continue
            if a is None or b is None or a.shape != b.shape:
                self._record(diffs, kind, name, float("inf"), tolerance)
                continue
            absolute = _max_abs(a.double() - b.double())
            if kind == "parameter" and name in self.round_off_parameters:
                self.round_off_error = max(self.round_off_error, absolute)
                if not absolute <= ADAPTIVE_TOLERANCE:
                    diffs.append(TensorDifference(kind, name, absolute))
                continue
            self._record(diffs, kind, name, absolute / scale, tolerance)

    def _record(self, diffs: list[TensorDifference], kind: str, name: str, error: float, tolerance: float) -> None:
        error = error if error == error else float("inf")  # NaN
        reported_kind = "gradient" if kind == CLIPPED else kind
        self.errors[reported_kind] = max(self.errors.get(reported_kind, 0.0), error)
        if not error <= tolerance:
            diffs.append(TensorDifference(kind, name, error))


def _max_abs(tensor: Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0


def _largest(tensors: NamedTensors) -> float:
    return max((_max_abs(t) for t in tensors.values() if t is not None and t.is_floating_point()), default=0.0)


class RankDifferences(NamedTuple):
    first_start_difference: str | None  # between ranks or from one process, before the step
    first_gradient_difference: str | None  # after synchronisation
    first_difference_after_step: str | None  # a parameter or merged buffer, after the step


def explain_difference(
    got: StepValues,
    want: StepValues,
    differences: Sequence[TensorDifference],
    ranks: RankDifferences,
    reference: Reference,
) -> Explanation:
    kinds = {d.kind: d for d in reversed(differences)}
    loss, clipped = kinds.get("loss"), kinds.get(CLIPPED)
    if got.samples != want.samples:
        return "samples", "samples", describe_sample_difference(got.samples, want.samples)
    if ranks.first_start_difference:
        return "start", ranks.first_start_difference, "differs before the step; was the model broadcast?"
    if got.stream_fingerprints != want.stream_fingerprints:
        return "random", "random stream", _stream_difference(got, want)
    if loss and loss.tensor != NORM:  # although samples, weights and random numbers are right
        is_factor = _is_factor(got.scalars[loss.tensor] / want.scalars[loss.tensor])
        batch_norm = loss.tensor == "loss" and has_batch_norm(reference.model) and not is_factor
        return "buffers" if batch_norm else "loss", loss.tensor, _off(got.scalars, want.scalars, loss.tensor)
    if ranks.first_gradient_difference:
        return "sync", ranks.first_gradient_difference, "its gradient differs between ranks after synchronisation"
    if "gradient" in kinds:
        return _explain_gradient(got, want, kinds["gradient"], reference)
    if loss:
        return "clipping", NORM, _off(got.scalars, want.scalars, NORM)
    if clipped:
        return "clipping", clipped.tensor, "its gradient was right before clipping, and wrong after it"
    for kind in ("optimizer state", "parameter"):
        if kind in kinds:
            return "optimizer", kinds[kind].tensor, f"off by {kinds[kind].error:.1e}, although the gradients are right"
    if "buffer" in kinds:
        return "buffers", kinds["buffer"].tensor, f"off by {kinds['buffer'].error:.1e}"
    tensor = str(ranks.first_difference_after_step)
    cause = "optimizer" if tensor in want.parameters else "buffers"  # gradients were equal on all ranks
    return cause, tensor, "differs between ranks after the step"


def _explain_gradient(got: StepValues, want: StepValues, first: TensorDifference, ref: Reference) -> Explanation:
    mismatched = [n for n, g in want.gradients.items() if (g is None) != (got.gradients.get(n) is None)]
    if mismatched:
        expectation = "None" if want.gradients[mismatched[0]] is None else "a tensor"
        return "none", mismatched[0], f"one process has {expectation}"
    keys = list(ref.weights)
    present = {n: g for n, g in want.gradients.items() if g is not None}
    values = pick_gradient_elements({n: got.gradients.get(n) for n in present}, present)
    expected = pick_gradient_elements(present, present)
    scale = float(values.abs().max()) or 1.0
    if (factor := factor_between(values, expected)) is not None:
        return "mean", first.tensor, f"every gradient is {format_ratio(factor)} the right value"
    basis = ref.gradient_parts()  # (probes, parts)
    coefficients = torch.linalg.lstsq(basis, values.unsqueeze(1), driver="gelsd").solution[:, 0]  # all 1 if right
    residual = float((basis @ coefficients - values).abs().max()) / scale
    if residual > 1e-7:
        wrong_count = sum(_differs(got.gradients[n], g) for n, g in present.items())
        details = f"{wrong_count} of {len(want.gradients)} gradients differ, up to {first.error:.1e}"
        if _is_linear(basis.sum(1), ref):
            return "gradient", first.tensor, details
        return "scale", first.tensor, f"{details}. The gradient path is not linear{_hooked(ref)}"
    # but the parts do not add up to the whole gradient
    if all(abs(m - 1) < COEFFICIENT_TOLERANCE for m in coefficients.tolist()):
        return "scale", first.tensor, f"the part of each micro-batch is right, but not their sum{_hooked(ref)}"
    parts = ", ".join(f"{k}: {format_ratio(float(m))}" for k, m in zip(keys, coefficients, strict=True))
    cause = _cause_of_coefficients(dict(zip(keys, coefficients.tolist(), strict=True)), want, ref)
    return cause, first.tensor, f"factors of the parts, by virtual rank.micro-batch: {parts}"


def factor_between(got: Tensor, want: Tensor, tolerance: float = 1e-9) -> float | None:
    factor = float(got @ want / (want @ want)) if bool(want.any()) else 0.0
    return factor if float((got - factor * want).abs().max()) <= tolerance * float(got.abs().max()) else None


def _is_linear(gradient: Tensor, ref: Reference) -> bool:
    """Whether a backward of k times the loss gives k times the gradient, for example without clipping in a hook."""
    others = (ref.gradient_parts(factor).sum(1) for factor in (LINEARITY_FACTOR, 1 / LINEARITY_FACTOR))
    return all(float((other - gradient).abs().max()) <= 1e-9 * float(gradient.abs().max()) for other in others)


def _hooked(ref: Reference) -> str:
    return f"; hooks on {', '.join(ref.hooked_parameters[:3])}" if ref.hooked_parameters else ""


def _cause_of_coefficients(coefficients: dict[str, float], want: StepValues, ref: Reference) -> str:
    """The cause of these factors of the micro-batches, which are not all equal."""
    by_rank, by_part = _grouped(coefficients, 0), _grouped(coefficients, 1)
    if any(abs(f) < COEFFICIENT_TOLERANCE or abs(f - 2) < COEFFICIENT_TOLERANCE for f in coefficients.values()):
        return "accumulation"
    if any(max(factors) - min(factors) > COEFFICIENT_TOLERANCE for factors in by_rank.values()):
        # the same on every rank, but not for every micro-batch
        return "accumulation" if all(max(f) - min(f) < COEFFICIENT_TOLERANCE for f in by_part.values()) else "shares"
    # One factor per rank: 1 / samples for a mean of means, 1 / norm if each rank clips its gradients.
    products = [by_rank[v][0] * sum(weights) for v, weights in _grouped(ref.weights, 0).items()]
    is_averaged = max(products) - min(products) < COEFFICIENT_TOLERANCE * max(map(abs, products))
    return "shares" if is_averaged or want.scalars[NORM] <= ref.spec.clip_norm else "clipping"


def _grouped(values: Mapping[str, float], index: int) -> dict[str, list[float]]:
    """The values by virtual rank (0) or by micro-batch (1). The keys are 'virtual rank.micro-batch'."""
    groups: dict[str, list[float]] = {}
    for key, value in values.items():
        groups.setdefault(key.split(".")[index], []).append(value)
    return groups


def _differs(a: torch.Tensor | None, b: torch.Tensor) -> bool:
    return a is None or float((a - b).abs().max()) > 1e-12 * max(float(b.abs().max()), 1e-300)


def describe_sample_difference(got: Sequence[int], want: Sequence[int]) -> str:
    extra, missing = Counter(got) - Counter(want), Counter(want) - Counter(got)
    return (
        f"this global batch has {len(got)} samples{f' instead of {len(want)}' if len(got) != len(want) else ''}; "
        f"extra: {sorted(extra.elements())[:6] or 'none'}, missing: {sorted(missing.elements())[:6] or 'none'}"
    )


def _stream_difference(got: StepValues, want: StepValues) -> str:
    ours, theirs = got.stream_fingerprints, want.stream_fingerprints
    wrong_keys = sorted(key for key in {**theirs, **ours} if ours.get(key) != theirs.get(key))
    return f"virtual rank.micro-batch {', '.join(wrong_keys[:6])} starts from different random numbers"


def _is_factor(ratio: float) -> bool:
    return any(abs(r - round(r)) < 1e-9 and round(r) > 1 for r in (abs(ratio), 1 / abs(ratio))) if ratio else False


def format_ratio(factor: float) -> str:
    """A factor as text: 2 x, 1/3, 0.7 x."""
    for integer in range(1, 65):
        if abs(factor - integer) < 1e-6 * integer:
            return f"{integer} x"
        if abs(factor * integer - 1) < 1e-6:
            return f"1/{integer}"
    return f"{factor:.6g} x"


def _off(got: dict[str, float], want: dict[str, float], name: str) -> str:
    return f"{name} is {got[name]:.12g}; one process has {want[name]:.12g}"
