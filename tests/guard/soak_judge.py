"""Many random worlds: whom does the judge name, by kind of mutation?

    python tests/guard/soak_judge.py --count 20000 --out benchmarks/results/judge.json

The exit code is 1 if an innocent rank was blamed, or a tie was said where a majority stands against the wrong rank.
"""

import argparse
import json
import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # as pytest does: this file is also a program

from tests.guard.judge_world import FAIR, make_case, outcome

from paceline.guard.judge import diagnose

CLASSES = (*FAIR, "wrong", "unseen")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=20000)
    parser.add_argument("--seed", type=int, default=0, help="of the first world; the others follow")
    parser.add_argument("--out", type=Path, help="write the counts as JSON")
    arguments = parser.parse_args()
    counts: dict[str, Counter[str]] = {}
    wrong: list[dict[str, object]] = []
    for seed in range(arguments.seed, arguments.seed + arguments.count):
        case = make_case(seed)
        said = "unseen" if case.finished else outcome(case, diagnose(case.evidence))
        counts.setdefault(case.mutation, Counter())[said if said in CLASSES else "wrong"] += 1
        if said not in CLASSES:
            wrong.append({"seed": seed, "mutation": case.mutation, "world": len(case.evidence), "said": said})
    print("mutation   " + "".join(f"{name:>8}" for name in CLASSES))
    for mutation, found in sorted(counts.items()):
        print(f"{mutation:11}" + "".join(f"{found[name]:8}" for name in CLASSES))
    for one in wrong[:20]:
        print(one)
    if arguments.out:
        content = {
            "count": arguments.count,
            "first_seed": arguments.seed,
            "mutations": {
                mutation: {name: found[name] for name in CLASSES} for mutation, found in sorted(counts.items())
            },
            "wrong": wrong,
        }
        arguments.out.write_text(json.dumps(content, indent=2) + "\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
