"""Check eleven clean scripts and every planted pitfall; a table of what was found, on which line, and what else was.

python tests/check/soak_check.py [--only WORD] [--out benchmarks/results/check.md]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tests.check.planted_cases import Outcome, cases, checked


def row(outcome: Outcome) -> str:
    case = outcome.case
    what = case.plant or "nothing"
    line = "" if not case.rule else "yes" if outcome.on_its_line else "no"
    said = "; ".join(f"{one['words']} ({one['site']})" for one in outcome.counted) or "-"
    others = ", ".join(outcome.others) or "-"
    cells = (case.script, what, "yes" if outcome.found else "NO", line, others, f"{outcome.seconds:.0f}", said)
    return f"| {' | '.join(cells)} |"


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="")
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    outcomes: list[Outcome] = []
    for case in cases():
        if options.only in f"{case.script} {case.plant}":
            outcomes.append(checked(case, nproc=options.nproc))
            print(row(outcomes[-1]), flush=True)
            if not outcomes[-1].found:
                print(outcomes[-1].text, file=sys.stderr)
    planted = [one for one in outcomes if one.case.rule]
    found, lines = sum(one.found for one in planted), sum(one.on_its_line for one in planted)
    clean = [one for one in outcomes if not one.case.rule]
    told = (
        f"{found} of {len(planted)} planted pitfalls found, {lines} on their line, "
        f"{sum(len(one.others) for one in planted)} other findings beside them; "
        f"{sum(len(one.counted) for one in clean)} findings in {len(clean)} scripts that are right."
    )
    print(told)
    if options.out:
        head = "| script | planted | found | its line | others | s | what was said |\n|---|---|---|---|---|---|---|"
        table = "\n".join(map(row, outcomes))
        options.out.write_text(f"# `paceline launch --check`, {options.nproc} ranks\n\n{told}\n\n{head}\n{table}\n")
    return int(found < len(planted) or any(one.counted for one in clean))


if __name__ == "__main__":
    sys.exit(main())
