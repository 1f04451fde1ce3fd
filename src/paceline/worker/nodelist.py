"""Expands Slurm's short forms. Pure: `n[1-3,7]` names four nodes, `2(x3),1` counts the tasks of four nodes."""

import re
from collections.abc import Iterator
from itertools import product

from paceline.errors import UsageError

MAX_NODES = 100_000  # more is a mistake, and would fill the memory

_PART = re.compile(r"[^,\[\]\s]|\[[0-9,-]+\]")
_RANGE = re.compile(r"([0-9]{1,12})(?:-([0-9]{1,12}))?")
_TASKS = re.compile(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?")


def expand_nodes(text: str) -> list[str]:
    """The nodes of a list as Slurm writes it, in its order: `n[1-3,7],gpu-[01-02]` -> n1 n2 n3 n7 gpu-01 gpu-02.

    Raises:
        UsageError: if it is no such list.
    """
    names: list[str] = []
    for entry in re.split(r",(?![^\[]*\])", text):
        parts = _PART.findall(entry)
        if not entry or "".join(parts) != entry:
            raise UsageError(f"{text!r} is no list of nodes. Slurm writes them as n[1-3,7],gpu-[01-02]")
        choices = [list(_numbers(part[1:-1], text)) if part[0] == "[" else [part] for part in parts]
        for combination in product(*choices):
            names.append("".join(combination))
            if len(names) > MAX_NODES:
                raise UsageError(f"{text!r} names more than {MAX_NODES} nodes")
    return names


def _numbers(text: str, whole: str) -> Iterator[str]:
    for entry in text.split(","):
        match = _RANGE.fullmatch(entry)
        if match is None:
            raise UsageError(f"{whole!r} is no list of nodes: {entry!r} is no number and no range of numbers")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first or last - first >= MAX_NODES:
            raise UsageError(f"{whole!r} is no list of nodes: {entry!r} is empty or too long")
        yield from (str(number).zfill(len(match[1])) for number in range(first, last + 1))


def tasks_of_node(text: str, node: int) -> int:
    """The tasks on node number `node`, counted from 0, out of `2(x3),1`: 2 on each of three nodes, 1 on the fourth."""
    left = node
    for entry in text.split(","):
        match = _TASKS.fullmatch(entry)
        if match is None:
            raise UsageError(f"SLURM_STEP_TASKS_PER_NODE must be like 2(x3),1, got {text!r}")
        left -= int(match[2] or 1)
        if left < 0:
            return int(match[1])
    raise UsageError(f"SLURM_STEP_TASKS_PER_NODE is {text!r}, but SLURM_NODEID says that this is node {node}")
