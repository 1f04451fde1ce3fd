"""Is any random damage to a checkpoint ever accepted, or one whose writer was killed at a random byte?

    PYTHONPATH=. python tests/checkpoint/soak_fuzz.py --count 200 --seed 0 --out build/fuzz.json

The results so far are in --out: the same command goes on where it was stopped. The exit code is 1 if any was accepted,
or told without the name of the file.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

from tests.checkpoint.checkpoint_harness import saved
from tests.checkpoint.damage import kill_trial, trial


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    results = {"seed": options.seed, "done": 0, "failures": []}
    if options.out.exists():
        results = json.loads(options.out.read_text())
        if results["seed"] != options.seed:
            parser.error(f"{options.out} is of seed {results['seed']}: name another --out")
    with tempfile.TemporaryDirectory() as folder:
        template = Path(folder) / "template"
        saved(template, 1, 2)
        while results["done"] < options.count:
            seed = f"{options.seed}-{results['done']}"
            failures = [one(template, Path(folder) / "trial", seed) for one in (trial, kill_trial)]
            results["failures"] += [failure for failure in failures if failure]
            results["done"] += 1
            partial = options.out.with_suffix(".partial")
            partial.write_text(json.dumps(results, indent=1))
            partial.replace(options.out)
    print(f"{results['done']} damaged, {results['done']} writers killed, {len(results['failures'])} failures")
    return 1 if results["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
