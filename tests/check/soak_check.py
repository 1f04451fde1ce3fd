"""Check the clean scripts and every planted pitfall; a table of what was found, on which line, and what else was.

python tests/check/soak_check.py [--only WORD] [--out benchmarks/results/check.md]

FILE.json is written beside FILE.md after each run, and what is in it is not run again: repeat the command to continue.
"""

import argparse
import sys
from pathlib import Path

import msgspec
from tests.check.planted_cases import Outcome, cases, checked

HEAD = "| script | planted | found | its line | others | s | what was said |\n|---|---|---|---|---|---|---|"


def row(outcome: Outcome) -> str:
    case = outcome.case
    what = case.plant or "nothing"
    line = "" if not case.rule else "yes" if outcome.on_its_line else "no"
    said = "; ".join(f"{one['words']} ({one['site']})" for one in outcome.counted) or "-"
    others = ", ".join(outcome.others) or "-"
    script = f"{case.script} {case.kind}".strip()
    cells = (script, what, "yes" if outcome.found else "NO", line, others, f"{outcome.seconds:.0f}", said)
    return f"| {' | '.join(cells)} |"


def summary(outcomes: list[Outcome]) -> str:
    planted = [one for one in outcomes if one.case.rule]
    found, lines = sum(one.found for one in planted), sum(one.on_its_line for one in planted)
    clean = [one for one in outcomes if not one.case.rule]
    return (
        f"{found} of {len(planted)} planted pitfalls found, {lines} on their line, "
        f"{sum(len(one.others) for one in planted)} other findings beside them; "
        f"{sum(len(one.counted) for one in clean)} findings in {len(clean)} scripts that are right."
    )


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="")
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    kept = options.out.with_suffix(".json") if options.out else None
    outcomes = msgspec.json.decode(kept.read_bytes(), type=list[Outcome]) if kept and kept.exists() else []
    for case in cases():
        if options.only not in f"{case.script} {case.kind or case.plant}" or any(one.case == case for one in outcomes):
            continue
        if case.missing:
            print(f"skipped: {case.script} {case.kind or case.plant}: {case.missing} is not installed", flush=True)
            continue
        outcomes.append(checked(case, nproc=options.nproc, started=True))
        print(row(outcomes[-1]), flush=True)
        if not outcomes[-1].found:
            print(outcomes[-1].text, file=sys.stderr)
        if kept:
            kept.write_bytes(msgspec.json.encode(outcomes))
            left = len(cases()) - len(outcomes)
            told = summary(outcomes) + (f" Not run yet: {left}." if left else "")
            table = "\n".join(map(row, outcomes))
            title = f"# `paceline launch --check`, {options.nproc} ranks"
            options.out.write_text(f"{title}\n\n{told}\n\n{HEAD}\n{table}\n")
    print(summary(outcomes))
    return int(any(not one.found for one in outcomes))


if __name__ == "__main__":
    sys.exit(main())
