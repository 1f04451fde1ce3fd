"""Measure the structure and the size of the code base: `python tools/metrics.py [--list]`.

Structure: imports between layers, import cycles, environment variables, modules too small to be worth a name. Size:
lines, modules, packages, the lines that one import loads, tests, and assertions on full sentences. Each number has a
limit. The limits of sizes may only be lowered; the target is that of the issue "Shrink the codebase".
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import prose  # a script imports its neighbor; a test imports this file by its path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "paceline"
SMALL_LINES = 60


@dataclass(frozen=True)
class Count:
    """One thing that is counted: what is there, and how many there may be."""

    name: str
    found: list[str]
    limit: int
    total: int | None = None  # if the number is not that of the things found
    target: int | None = None

    @property
    def number(self) -> int:
        """How many there are."""
        return len(self.found) if self.total is None else self.total


class Package:
    """The package's modules, and what each imports."""

    def __init__(self, source: Path) -> None:
        self.paths = {_name(path, source): path for path in sorted((source / PACKAGE).rglob("*.py"))}
        self.trees = {name: ast.parse(path.read_text()) for name, path in self.paths.items()}
        self.lines = {name: path.read_text().count("\n") for name, path in self.paths.items()}
        self.imports = {name: set(self._imported(_statements(tree))) - {name} for name, tree in self.trees.items()}
        self.importers: dict[str, set[str]] = defaultdict(set)
        for name, others in self.imports.items():
            for other in others:
                self.importers[other].add(name)

    def _imported(self, nodes: Iterable[ast.AST]) -> Iterator[str]:
        for node in nodes:
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names if alias.name in self.paths)
            elif isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    whole = f"{node.module}.{alias.name}"
                    if whole in self.paths or node.module in self.paths:
                        yield whole if whole in self.paths else node.module

    def top_level(self, module: str) -> str:
        """The first part below the package."""
        return module.split(".")[1] if "." in module else ""

    def loaded(self, module: str) -> int:
        """The lines of all modules of the package that an import of `module` loads."""
        seen, todo = set[str](), [module]
        while todo:
            name = todo.pop()
            if name in self.paths and name not in seen and name != PACKAGE:
                seen.add(name)
                todo += [*self._imported(_executed(self.trees[name].body)), name.rpartition(".")[0]]
        return sum(self.lines[name] for name in seen)


def _executed(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements that an import of the module executes, except bodies of functions and classes."""
    for statement in body:
        if isinstance(statement, ast.If) and "TYPE_CHECKING" in ast.dump(statement.test):
            continue
        yield statement
        if isinstance(statement, ast.If | ast.Try | ast.With):
            yield from _executed([*statement.body, *getattr(statement, "orelse", [])])


def _statements(node: ast.AST) -> Iterator[ast.AST]:
    """All statements in a node. `ast.walk` would take 4 times as long, because it also yields all expressions."""
    for name in ("body", "orelse", "handlers", "cases", "finalbody"):
        for statement in getattr(node, name, ()):
            yield statement
            yield from _statements(statement)


def _name(path: Path, source: Path) -> str:
    parts = path.relative_to(source).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def counts(root: Path = ROOT) -> list[Count]:
    """All that is counted."""
    package = Package(root / "src")
    contracts = {
        c["id"]: c for c in tomllib.loads((root / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    }
    outside = _packages(contracts["torchless"]["source_modules"])
    layers = contracts["packages"]["layers"]
    order = [room.strip() for layer in layers for room in re.split("[|:]", layer)]
    above = {*order[: order.index("rank") + 1], "lab.ranks"} - {"cli", "__main__"} - outside
    listed = [name for name in contracts["torchless"]["source_modules"] if name.removesuffix(".*").count(".") > 1]
    return [
        Count("imports of packages outside a rank from packages inside one", _across(package, outside, above), 0),
        Count(
            "imports of a launcher, an agent or the judge inside a rank",
            _across(package, above, {"launch", "guard"}),
            0,
        ),
        Count("environment variables of ours", _variables(package), 5),
        Count("torch-free modules listed by hand", listed, 0),
        Count("circles of imports", _circles(package), 0),
        Count(f"modules under {SMALL_LINES} lines with one importer", _small(package), 0),
        *_sizes(package, root / "tests"),
    ]


def _sizes(package: Package, tests: Path) -> list[Count]:
    sentences = [where for path in sorted(tests.rglob("*.py")) for where in _sentences(path)]
    packages = {package.top_level(name) for name in package.paths} - {""}
    return [
        Count("lines of src", [], 63_520, sum(package.lines.values()), target=47_000),
        Count("modules", [], 289, len(package.paths), target=300),
        Count("top-level packages and modules", [], 24, len(packages), target=20),
        Count("lines imported by paceline.sessions.session", [], 21_200, package.loaded("paceline.sessions.session")),
        Count("lines imported by paceline.strategies.single", [], 8_690, package.loaded("paceline.strategies.single")),
        Count("lines of tests", [], 76_050, sum(_lines(path) for path in tests.rglob("*.py")), target=58_000),
        Count("assertions on full sentences", sentences, 17, target=60),
        *_prose(tests.parent),
    ]


def _prose(root: Path) -> list[Count]:
    pages, modules = prose.files(root)
    return [
        Count("habits of language in README and docs", prose.hits(pages, root), 106),
        Count("habits of language in src", prose.hits(modules, root), 108),
        Count("sentences over 35 words in README and docs", prose.long_sentences(pages, root), 0),
    ]


def _lines(path: Path) -> int:
    return path.read_text().count("\n")


def _sentences(path: Path) -> Iterator[str]:
    """The assertions of a test that contain a text of four words or more."""
    for node in _statements(ast.parse(path.read_text())):
        if isinstance(node, ast.Assert) and any(
            isinstance(part, ast.Constant)
            and isinstance(part.value, str)
            and " " in part.value.strip()  # not the code of an error
            and len(re.findall("[A-Za-z]{2,}", part.value)) > 3
            for part in ast.walk(node)
        ):
            yield f"{path.name}:{node.lineno}"


def _packages(modules: list[str]) -> set[str]:
    return {name.split(".")[1] for name in modules}


def _across(package: Package, importing: set[str], imported: set[str]) -> list[str]:
    return [
        f"{module} imports {other}"
        for module, others in package.imports.items()
        for other in sorted(others)
        if _side(module) in importing and _side(other) in imported
    ]


def _side(module: str) -> str:
    """The package of a module. The part of `lab` that imports torch counts as a package."""
    parts = module.split(".")[1:]
    return ".".join(parts[:2] if parts[:2] == ["lab", "ranks"] else parts[:1])


def _variables(package: Package) -> list[str]:
    found = {
        node.value
        for name, tree in package.trees.items()
        if "PACELINE_" in package.paths[name].read_text()
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and re.fullmatch("PACELINE_[A-Z_]+", node.value)
    }
    return sorted(found - {"PACELINE_"})


def _circles(package: Package) -> list[str]:
    """Modules that reach themselves; each circle once, by its modules."""
    reach: dict[str, set[str]] = {}
    for start in package.imports:
        seen: set[str] = set()
        todo = list(package.imports[start])
        while todo:
            module = todo.pop()
            if module not in seen:
                seen.add(module)
                todo += package.imports[module]
        reach[start] = seen
    circles = {frozenset(b for b in reach[a] if a in reach[b]) for a in reach if a in reach[a]}
    return [" - ".join(sorted(circle)) for circle in circles]


def _small(package: Package) -> list[str]:
    return [
        f"{module}: {lines}, for {next(iter(package.importers[module]))}"
        for module, lines in package.lines.items()
        if lines < SMALL_LINES and len(package.importers[module]) == 1 and package.paths[module].name != "__init__.py"
    ]


def main() -> int:
    """Print the table. The exit code is 1 if a number is over its limit."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--list", action="store_true", help="name each thing that is counted")
    parser.add_argument("--root", type=Path, default=ROOT, help="the tree to count in")
    options = parser.parse_args()
    found = counts(options.root)
    for count in found:
        mark = " " if count.number <= count.limit else "!"
        target = f" (target {count.target})" if count.target else ""
        print(f"{mark} {count.number:>6} of {count.limit:>6}  {count.name}{target}")
        if options.list:
            print("".join(f"                    {one}\n" for one in count.found), end="")
    return int(any(count.number > count.limit for count in found))


if __name__ == "__main__":
    sys.exit(main())
