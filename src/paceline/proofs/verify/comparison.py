"""How far two observations of a step are apart, by kind, and where first.

The error of a tensor is max|a - b| / s, with s the largest magnitude of its kind (gradients, say) in the model: a
gradient of 1e-15 that should be 0 is no difference, while its neighbours are of size 1.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from paceline.proofs.verify.reference import Observed
from paceline.verify.spec import ADAPTIVE_TOLERANCE, KINDS, TOLERANCE

CLIPPED = "clipped gradient"  # counted among the gradients
ROUND_OFF = 1e-11  # a gradient below this share of the largest is what rounding left of zero


@dataclass
class TensorDifference:
    """A tensor that is not what it should be."""

    kind: str
    tensor: str
    error: float


@dataclass
class Comparison:
    """The largest error of each kind so far, and the differences found in the last step, in order of KINDS."""

    adaptive: bool
    errors: dict[str, float] = field(default_factory=lambda: dict.fromkeys(KINDS, 0.0))
    round_off: set[str] = field(default_factory=set[str])
    round_off_error: float = 0.0

    def add(self, got: Observed, want: Observed) -> list[TensorDifference]:
        """Compare one step."""
        found: list[TensorDifference] = []
        for name, value in want.scalars.items():
            self._note(found, "loss", name, abs(got.scalars[name] - value) / max(abs(value), 1e-300), TOLERANCE)
        scale = _largest(want.gradients)
        if self.adaptive:
            self.round_off |= {n for n, g in want.gradients.items() if g is not None and _size(g) < ROUND_OFF * scale}
        loose = ADAPTIVE_TOLERANCE if self.adaptive else TOLERANCE
        self._kind(found, "gradient", got.gradients, want.gradients, TOLERANCE)
        self._kind(found, CLIPPED, got.stepped, want.stepped, TOLERANCE)
        self._kind(found, "optimizer state", got.state, want.state, loose)
        self._kind(found, "parameter", got.parameters, want.parameters, loose)
        # A bias that is nothing but round-off moves the running mean of the batch norm behind it, and only that.
        loose = ADAPTIVE_TOLERANCE if self.round_off else TOLERANCE
        self._kind(found, "buffer", got.buffers, want.buffers, loose)
        return found

    def _kind(
        self,
        found: list[TensorDifference],
        kind: str,
        got: Mapping[str, Tensor | None],
        want: Mapping[str, Tensor | None],
        tolerance: float,
    ) -> None:
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
        self.errors[shown] = max(self.errors[shown], error)
        if not error <= tolerance:
            found.append(TensorDifference(kind, name, error))


def _size(tensor: Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0


def _largest(tensors: Mapping[str, Tensor | None]) -> float:
    return max((_size(t) for t in tensors.values() if t is not None and t.is_floating_point()), default=0.0)
