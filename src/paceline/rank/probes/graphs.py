"""What `--check` reads off the graph that autograd has built, and off the script's own lines.

Of a graph: constants at its root, and parameters that it reaches. Of lines: what divides an argument by the world.
"""

from __future__ import annotations

import ast
import linecache
import math
import re
from itertools import islice
from types import FrameType
from typing import Any

MAX_FACTORS = 4
MAX_NAMES = 4  # that are followed to where they were given their values
RANKS = re.compile(r"world|num_processes|num_replicas|n_?gpus|nproc", re.IGNORECASE)


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


def divided_by_world(frame: FrameType | None, argument: str, place: int) -> str:
    """How an argument of the call that this frame is in is divided by the number of ranks, as the script has it."""
    if frame is None:
        return ""
    here = next(islice(frame.f_code.co_positions(), frame.f_lasti // 2, None), None)
    try:
        nodes = [*ast.walk(ast.parse("".join(linecache.getlines(frame.f_code.co_filename))))]
    except (SyntaxError, ValueError):
        return ""
    calls = (one for one in nodes if isinstance(one, ast.Call))
    call = next(
        (one for one in calls if here == (one.lineno, one.end_lineno, one.col_offset, one.end_col_offset)), None
    )
    if call is None:
        return ""
    before = sorted(
        (one for one in nodes if isinstance(one, ast.Assign) and one.lineno < call.lineno), key=lambda one: one.lineno
    )
    given = {ast.unparse(target): one.value for one in before for target in one.targets}  # the last value counts
    values = [*[one.value for one in call.keywords if one.arg == argument], *call.args[place : place + 1]][:1]
    for _ in range(MAX_NAMES):
        parts = [part for value in values for part in ast.walk(value)]
        if divided := next(filter(_by_ranks, parts), None):
            return ast.unparse(divided)
        names = {ast.unparse(part) for part in parts if isinstance(part, (ast.Name, ast.Attribute))}
        values = [given[name] for name in names if name in given]
    return ""


def _by_ranks(node: ast.AST) -> bool:
    if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Div | ast.FloorDiv):
        return False
    return RANKS.search(ast.unparse(node.right)) is not None
