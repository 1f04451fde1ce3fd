"""Find habits of language that make text hard to read: `python tools/prose.py [--list]`.

It reads Markdown outside of code blocks, the strings and docstrings of src, and the messages. A hit is a place to look
at, not always an error. `tools/metrics.py` limits the numbers of hits and of sentences over 35 words.
"""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MOST_WORDS = 35
HABITS = {
    "clause in place of a noun": r"""\bwhat\ (?:is|was|are|were|has|have|it|they|each|all|one|only|others?|nobody|ranks?
        |these|then|else|goes|comes|stands|lies|must|can|may|runs?|differs|depends|follows|remains|belongs)\b""",
    "passive verb without an actor": r"""\b(?:is|are|was|were|be|been)\ (?:told|named|said|noted|left\ out|shown|seen
        |asked|found|meant|known|given|taken|refused|looked\ at)\b""",
    "a tool that says or tells": r"\b(?:[Ss](?:ay|ays|aid)|tells?|told)\b",
    "own": r"\bown\b",
    "where for if": r"""\b[Ww]here\ (?:a|an|it|they|there|that|each|you|all|ranks|one|several|no|others|nothing|nobody
        |both|two|only|some|any|none|losses|gradients|data)\b""",
    "share or cut for shard": r"\bshares?\b(?!\ memory)|\bcuts?\b",
    "go on for continue": r"\b(?:[Gg]o|[Gg]oes|[Gg]oing|went|gone)\ on\b",
    "nobody, whoever": r"\b(?:[Nn]obody|[Ee]verybody|[Ss]omebody|[Ww]hoever|[Ww]hatever|[Ww]hichever)\b",
    "as many": r"\b(?:equally\ many|as\ many|so\ many)\b",
    "another for different": r"""\b[Aa]nother\ (?:one|order|result|digest|value|number|way|size|precision|training|world
        |is)\b|\bother\ (?:bits|data|batches|samples|roundings)\b""",
    "things that stand or travel": r"\b(?:stands?|stood|lies|lay|travels?|travelled)\b",
    "say, too, beside, anew": r""",\ say\b|,\ too\b|\bbeside\b|\banew\b|\bas\ ever\b|\bfor\ ever\b|\bmended\b
        |\blikewise\b|\bbut\ for\b|\bin\ words\b""",
    "sentence that begins with Of": r"""(?:^|[.;:|(]\ ?)Of\ (?:a|an|the|each|all|every|many|several|one|two|what|some
        |which|these|those)\b""",
    "words of a court": r"\b(?:GUILTY|guilty|judge[sd]?|culprit|innocent|witness|vouched?|blamed?)\b",
}


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """The texts of a file, with their lines."""
    source = path.read_text()
    if path.suffix == ".py":
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
                yield node.lineno, node.value
        return
    is_code = False
    for number, line in enumerate(source.splitlines(), 1):
        is_code ^= line.lstrip().startswith("```")
        if not is_code:
            yield number, re.sub(r"`[^`]*`", "`x`", line)


def hits(paths: list[Path], root: Path = ROOT) -> list[str]:
    """Each hit: its place, the habit, and the words."""
    return [
        f"{path.relative_to(root)}:{number}: {name}: {hit.strip()}"
        for path in paths
        for number, text in texts(path)
        for name, pattern in HABITS.items()
        for hit in re.findall(pattern, text, re.MULTILINE | re.VERBOSE)
    ]


def long_sentences(paths: list[Path], root: Path = ROOT) -> list[str]:
    """The sentences of Markdown files with more than 35 words, without tables and headings."""
    found: list[str] = []
    for path in paths:
        prose = "\n".join("" if re.match(r"\s*(\||#|$)", text) else text for _, text in texts(path))
        for paragraph in re.split(r"\n\s*\n|\n\s*[-*] |\n\s*\d+\. ", prose):
            for sentence in re.split(r"(?<=[.!?:;])\s", paragraph.replace("\n", " ")):
                if len(sentence.split()) > MOST_WORDS:
                    found.append(f"{path.relative_to(root)}: {' '.join(sentence.split()[:8])} ...")
    return found


def files(root: Path = ROOT) -> tuple[list[Path], list[Path]]:
    """(Markdown files for users and developers, modules and messages)."""
    pages = [root / "README.md", root / "CONTRIBUTING.md", *sorted((root / "docs").rglob("*.md"))]
    source = root / "src"
    return pages, [*sorted(source.rglob("*.py")), *sorted(source.rglob("*.toml"))]


def main() -> None:
    """Print the numbers, and with --list each hit."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--list", action="store_true", help="print each hit")
    is_list = parser.parse_args().list
    pages, modules = files()
    for name, found in (
        ("documentation", hits(pages)), ("src", hits(modules)), ("long sentences", long_sentences(pages)),
    ):  # fmt: skip
        print(f"{len(found):6d}  {name}")
        print("".join(f"        {one}\n" for one in found) if is_list else "", end="")


if __name__ == "__main__":
    main()
