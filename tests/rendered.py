"""Compare what a test renders with a reviewed file of its folder: a change of wording changes that file, and no test.

`RENDERED=write pytest -n 0 tests/guard` writes tests/guard/rendered.txt anew. Review the difference before the commit.
"""

import difflib
import os
import re
from collections.abc import Iterable
from pathlib import Path

SECTION = re.compile(r"=== (.+)\n((?:(?!=== ).*\n)*)")


def rendered(text: str | Iterable[str]) -> None:
    """Assert that rendered.txt has this text, or these lines, for the test that runs."""
    test = os.environ["PYTEST_CURRENT_TEST"].removesuffix(" (call)")
    path, _, name = test.partition("::")
    source = Path(__file__).parents[1] / path
    file, name = source.with_name("rendered.txt"), f"{source.name}::{name}"
    found = (text if isinstance(text, str) else "\n".join(text)) + "\n"
    if os.environ.get("RENDERED") == "write":
        kept = sections(file) | {name: found}
        file.write_text("".join(f"=== {name}\n{kept[name]}" for name in sorted(kept)))
    reviewed = sections(file).get(name, "")
    difference = "\n".join(difflib.ndiff(reviewed.splitlines(), found.splitlines()))
    assert found == reviewed, f"{difference}\nif this is right: RENDERED=write pytest -n 0 '{test}'"


def sections(file: Path) -> dict[str, str]:
    return dict(SECTION.findall(file.read_text())) if file.exists() else {}
