"""Count what keeps the house in order, beside its limits: `python tools/house.py [--list]`.

Counted are the places where a newcomer to the code gets lost: rooms that reach into each other, variables that
carry what an interface should, modules too small to be worth a name.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "paceline"
SMALL_LINES = 60


@dataclass(frozen=True)
class Count:
    """One thing that is counted: what is there, and how many there may be."""

    name: str
    found: list[str]
    limit: int
    total: int | None = None  # where the number is not that of the things found

    @property
    def number(self) -> int:
        """How many there are."""
        return len(self.found) if self.total is None else self.total


class House:
    """The package's modules, and what each imports."""

    def __init__(self, source: Path) -> None:
        self.paths = {_name(path, source): path for path in sorted((source / PACKAGE).rglob("*.py"))}
        self.trees = {name: ast.parse(path.read_text()) for name, path in self.paths.items()}
        self.lines = {name: path.read_text().count("\n") for name, path in self.paths.items()}
        self.imports = {name: set(self._imported(name)) - {name} for name in self.paths}
        self.importers: dict[str, set[str]] = defaultdict(set)
        for name, others in self.imports.items():
            for other in others:
                self.importers[other].add(name)

    def _imported(self, name: str) -> Iterator[str]:
        for node in ast.walk(self.trees[name]):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names if alias.name in self.paths)
            elif isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    whole = f"{node.module}.{alias.name}"
                    if whole in self.paths or node.module in self.paths:
                        yield whole if whole in self.paths else node.module

    def room(self, module: str) -> str:
        """The first part below the package."""
        return module.split(".")[1] if "." in module else ""


def _name(path: Path, source: Path) -> str:
    parts = path.relative_to(source).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def counts(root: Path = ROOT) -> list[Count]:
    """All that is counted."""
    house = House(root / "src")
    contracts = {
        c["id"]: c for c in tomllib.loads((root / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    }
    outside = _rooms(contracts["torchless"]["source_modules"])
    layers = contracts["rooms"]["layers"]
    order = [room.strip() for layer in layers for room in re.split("[|:]", layer)]
    above = set(order[: order.index("worker") + 1]) - {"cli", "__main__"} - outside
    listed = [name for name in contracts["torchless"]["source_modules"] if name.count(".") > 1]
    return [
        Count("imports of rooms outside a rank from rooms inside one", _across(house, outside, above), 0),
        Count(
            "imports of a launcher, an agent or the judge inside a rank",
            _across(house, above - {"proofs"}, {"launch", "agent", "guard"}),
            0,
        ),
        Count("environment variables of ours", _variables(house), 6),
        Count("torch-free modules listed by hand", listed, 0),
        Count("circles of imports", _circles(house), 0),
        Count(f"modules under {SMALL_LINES} lines with one importer", _small(house), 20),
        Count("lines of src", [], 33_500, sum(house.lines.values())),
    ]


def _rooms(modules: list[str]) -> set[str]:
    return {name.split(".")[1] for name in modules}


def _across(house: House, importing: set[str], imported: set[str]) -> list[str]:
    return [
        f"{module} imports {other}"
        for module, others in house.imports.items()
        for other in sorted(others)
        if house.room(module) in importing and house.room(other) in imported
    ]


def _variables(house: House) -> list[str]:
    found = {
        node.value
        for tree in house.trees.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and re.fullmatch("PACELINE_[A-Z_]+", node.value)
    }
    return sorted(found - {"PACELINE_"})


def _circles(house: House) -> list[str]:
    """Modules that reach themselves; each circle once, by its modules."""
    reach: dict[str, set[str]] = {}
    for start in house.imports:
        seen: set[str] = set()
        todo = list(house.imports[start])
        while todo:
            module = todo.pop()
            if module not in seen:
                seen.add(module)
                todo += house.imports[module]
        reach[start] = seen
    circles = {frozenset(b for b in reach[a] if a in reach[b]) for a in reach if a in reach[a]}
    return [" - ".join(sorted(circle)) for circle in circles]


def _small(house: House) -> list[str]:
    return [
        f"{module}: {lines}, for {next(iter(house.importers[module]))}"
        for module, lines in house.lines.items()
        if lines < SMALL_LINES and len(house.importers[module]) == 1 and house.paths[module].name != "__init__.py"
    ]


def main() -> int:
    """Print the table; 1 where a limit is broken."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--list", action="store_true", help="name each thing that is counted")
    parser.add_argument("--root", type=Path, default=ROOT, help="the tree to count in")
    options = parser.parse_args()
    found = counts(options.root)
    for count in found:
        mark = " " if count.number <= count.limit else "!"
        print(f"{mark} {count.number:>6} of {count.limit:>6}  {count.name}")
        if options.list:
            print("".join(f"                    {one}\n" for one in count.found), end="")
    return int(any(count.number > count.limit for count in found))


if __name__ == "__main__":
    sys.exit(main())
