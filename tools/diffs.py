"""Write the diffs of docs/from-*.md: `python tools/diffs.py`, or `--check` whether they are those of the scripts.

<!-- diff BEFORE AFTER --> stands above each; the paths are the repository's.
"""

from __future__ import annotations

import difflib
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PLACE = re.compile(r"(<!-- diff (\S+) (\S+) -->\n\n```diff\n)(.*?)(^```$)", re.MULTILINE | re.DOTALL)


def between(before: str, after: str) -> str:
    """As `diff -U1 BEFORE AFTER` says it, without the times."""
    one, other = ((ROOT / path).read_text().splitlines() for path in (before, after))
    return "".join(f"{line}\n" for line in difflib.unified_diff(one, other, before, after, n=1, lineterm=""))


def main(words: list[str]) -> int:
    """1 if --check finds a diff that is not the scripts'."""
    stale = 0
    for page in sorted((ROOT / "docs").glob("from-*.md")):
        text = page.read_text()
        now = PLACE.sub(lambda m: f"{m[1]}{between(m[2], m[3])}{m[5]}", text)
        if not PLACE.search(text):
            print(f"{page.name} has no diff")
            stale = 1
        elif now != text:
            print(f"{page.name}: the diff is not that of its scripts: python tools/diffs.py")
            stale = 1
            if "--check" not in words:
                page.write_text(now)
    return stale if "--check" in words else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
