"""Write docs/environment.md from the table of variables: `python tools/environment.py`; `--check`: is it so?"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from paceline.contract.variables import OURS, SWITCHES, TORCHRUN, Variable

PAGE = Path(__file__).resolve().parents[1] / "docs" / "environment.md"
TEXT = """# Environment variables

Made from the table in `src/paceline/contract/variables.py`, by `python tools/environment.py`.

## Switches

Yours are kept; the agent sets what you have not set.

{switches}

## Who a process is: torchrun's variables

Set by our agent and by torchrun; what srun and mpirun say instead is understood, too. A partly set environment is an
error, never a world of one.

{torchrun}

## Between an agent and its workers

Set by paceline. Those of an outer run do not reach an inner one, but for the switches above.

{ours}
"""


def rows(variables: Sequence[Variable]) -> str:
    """A table for people."""
    lines = [f"| {one.name} | {one.setter} | {one.meaning} |" for one in variables]
    return "\n".join(["| name | set by | says |", "|---|---|---|", *lines])


def main() -> int:
    """Write the page; with --check, 1 if it is stale."""
    text = TEXT.format(switches=rows(SWITCHES), torchrun=rows(TORCHRUN), ours=rows(OURS))
    if "--check" not in sys.argv:
        PAGE.write_text(text)
        return 0
    stale = PAGE.read_text() != text
    print("docs/environment.md is stale: python tools/environment.py" if stale else "docs/environment.md is the table")
    return int(stale)


if __name__ == "__main__":
    sys.exit(main())
