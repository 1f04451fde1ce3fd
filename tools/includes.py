"""Write what pages include of other files: `python tools/includes.py`; `--check`: is it what the files say?

    <!-- diff BEFORE AFTER -->                two files, or what PATH::NAME defines in each, without its docstring
    <!-- code PATH::NAME -->                  what is defined there
    <!-- measured RECORD NAME,NAME -->        rows of a record of `paceline compare` in benchmarks/results/
    <!-- picture FILE WORDS -->               docs/pictures/FILE, if there is one

stand in front of it; paths are the repository's.
"""

from __future__ import annotations

import ast
import difflib
import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
MB = 1e6
FENCED = re.compile(r"(<!-- (diff|code) (.*?) -->\n\n```\w+\n)(.*?)(^```$)", re.MULTILINE | re.DOTALL)
OPEN = re.compile(r"(<!-- (measured|picture) ?(.*?) -->\n)(.*?)(^<!-- end -->$)", re.MULTILINE | re.DOTALL)

ROWS: dict[str, Callable[[dict[str, Any]], str]] = {
    "processes": lambda row: f"{row['world_size']}",
    "speed, one process = 1": lambda row: _range(row["ratio"]),
    "sent by a rank in a step": lambda row: _megabytes(row["sent_bytes"]),
    "weights": lambda row: _megabytes(row["memory"]["weights"]),
    "gradients": lambda row: _megabytes(row["memory"]["gradients"]),
    "optimizer": lambda row: _megabytes(row["memory"]["optimizer"]),
    "on the way between ranks": lambda row: _megabytes(row["memory"]["exchange"]),
    "all tensors, at the peak": lambda row: _megabytes(row["memory"]["peak"]),
    "the same bits as": lambda row: row["bits"],
}


def _range(found: dict[str, float]) -> str:
    low, median, high = (f"{found[key]:.2f}" for key in ("low", "median", "high"))
    return median if low == high else f"{median} ({low} to {high})"


def _megabytes(count: float) -> str:
    return "0" if count == 0 else "below 0.1 MB" if count < MB / 10 else f"{count / MB:,.1f} MB"


def lines_of(place: str) -> list[str]:
    """A file's, or those of what PATH::NAME defines."""
    path, _, name = place.partition("::")
    text = (ROOT / path).read_text()
    if not name:
        return text.splitlines()
    (node,) = (n for n in ast.parse(text).body if isinstance(n, ast.FunctionDef | ast.ClassDef) and n.name == name)
    lines = text.splitlines()
    first = node.body[0]
    said = range(first.lineno - 1, first.end_lineno or 0) if ast.get_docstring(node) is not None else range(0)
    if said and not lines[said.stop]:
        said = range(said.start, said.stop + 1)  # the empty line after a class's docstring
    return [lines[i] for i in range(node.lineno - 1, node.end_lineno or 0) if i not in said]


def between(words: str) -> str:
    """Of whole files as `diff -U1 BEFORE AFTER` says it, without the times; of functions all lines."""
    before, after = words.split()
    context = 1 if "::" not in words else 99
    found = difflib.unified_diff(lines_of(before), lines_of(after), before, after, n=context, lineterm="")
    return "".join(f"{line}\n" for line in found if "::" not in words or not line.startswith("@@"))


def code(words: str) -> str:
    """The lines themselves."""
    return "\n".join(lines_of(words)) + "\n"


def measured(words: str) -> str:
    """A column for each strategy; the first row of a strategy counts, as one process stands there twice."""
    record, names = words.split(maxsplit=1)
    found: dict[str, dict[str, Any]] = {}
    for row in json.loads((ROOT / "benchmarks" / "results" / record).read_text())["rows"]:
        found.setdefault(row["strategy"], row)
    columns = [name.strip() for name in names.split(",")]
    table = [["what", *columns], ["---"] * (len(columns) + 1)]
    table += [[title, *(show(found[name]) for name in columns)] for title, show in ROWS.items()]
    return "\n" + "".join(f"| {' | '.join(cells)} |\n" for cells in table) + "\n"


def picture(words: str, page: Path) -> str:
    """A link to it, or nothing."""
    name, said = words.split(maxsplit=1)
    path = DOCS / "pictures" / name
    return f"\n![{said}]({Path(os.path.relpath(path, page.parent)).as_posix()})\n\n" if path.is_file() else "\n"


def filled(text: str, page: Path) -> str:
    """The page's text with what belongs into it."""
    fenced = {"diff": between, "code": code}
    text = FENCED.sub(lambda m: f"{m[1]}{fenced[m[2]](m[3])}{m[5]}", text)
    shown: dict[str, Callable[[str], str]] = {"measured": measured, "picture": lambda words: picture(words, page)}
    return OPEN.sub(lambda m: f"{m[1]}{shown[m[2]](m[3])}{m[5]}", text)


def main(words: list[str]) -> int:
    """1 if --check finds a page that includes something else."""
    stale = 0
    for page in sorted(DOCS.rglob("*.md")):
        text = page.read_text()
        now = filled(text, page)
        if now != text and "--check" in words:
            print(f"{page.name} does not include what the files say: python tools/includes.py")
            stale = 1
        elif now != text:
            page.write_text(now)
    return stale


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
