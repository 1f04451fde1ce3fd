"""Count the lines that take each classic single-device script to several processes, by library.

For every script in examples/classic and for paceline, Accelerate, Fabric and (only MNIST) torch's DDP: the lines added
and the lines removed, compared with NAME_single.py by difflib. Blank lines are not counted (like `diff -B`). Prints a
Markdown table.
"""

import argparse
from difflib import SequenceMatcher
from pathlib import Path

HERE = Path(__file__).resolve().parent
CLASSIC = HERE.parent.parent / "examples" / "classic"
NAMES = ("mnist", "vae", "gan", "lm", "classifier")
LIBRARIES = ("paceline", "accelerate", "fabric", "ddp")


def script(library: str, name: str) -> Path:
    return CLASSIC / f"{name}.py" if library == "paceline" else HERE / f"{library}_{name}.py"


def lines_of(path: Path) -> list[str]:
    return [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def changes(before: list[str], after: list[str]) -> tuple[int, int]:
    """Return the lines added to `before` and the lines removed from it to make it `after`."""
    same = sum(block.size for block in SequenceMatcher(None, before, after, autojunk=False).get_matching_blocks())
    return len(after) - same, len(before) - same


def table() -> str:
    rows = [("script", *LIBRARIES), ("---", *("---:" for _ in LIBRARIES))]
    for name in NAMES:
        single = lines_of(CLASSIC / f"{name}_single.py")
        cells = list[str]()
        for path in (script(library, name) for library in LIBRARIES):
            cells.append("{} + {}".format(*changes(single, lines_of(path))) if path.exists() else "-")
        rows.append((name, *cells))
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description="Lines added + removed against NAME_single.py, blank lines aside.")
    parser.add_argument("--out", type=Path, help="write the table to this file too")
    args = parser.parse_args()
    text = table()
    print(text, end="")
    if args.out:
        args.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
