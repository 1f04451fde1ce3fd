"""What `--check` reads off the graph that autograd has built: constants at its root, and parameters that it reaches."""

from __future__ import annotations

import math
from typing import Any

MAX_FACTORS = 4


def factors_of(losses: Any) -> list[float]:
    """By which constants it was multiplied last, the reciprocals of those that it was divided by."""
    found: list[float] = []
    node = getattr(losses, "grad_fn", None)
    while node is not None and len(found) < MAX_FACTORS and node.name() in ("DivBackward0", "MulBackward0"):
        own, other = node._saved_self, node._saved_other
        constant = other if own is None else own if other is None else None
        if constant is None or constant.numel() != 1:
            break
        value = float(constant)
        if value and math.isfinite(value):
            found.append(1 / value if node.name() == "DivBackward0" else value)
        node = next((following for following, _ in node.next_functions if following is not None), None)
    return found


def roots_of(output: Any, depth: int = 0) -> list[Any]:
    """The nodes that computed the tensors of an output."""
    if getattr(output, "grad_fn", None) is not None:
        return [output.grad_fn]
    inner = output.values() if isinstance(output, dict) else output if isinstance(output, (list, tuple)) else ()
    return [root for value in inner for root in roots_of(value, depth + 1)] if depth < 4 else []


def parameters_reached(nodes: list[Any]) -> set[int]:
    """The parameters from which an output was computed, by identity."""
    seen, found = set[Any](), set[int]()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if (variable := getattr(node, "variable", None)) is not None:
            found.add(id(variable))
        nodes += [following for following, _ in node.next_functions]
    return found
