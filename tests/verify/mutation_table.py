"""Plant every bug of mutations.py and see what verify says: `python tests/verify/mutation_table.py [--out FILE.md]`.

Three ranks, so that shares are uneven and the last global batch does not reach all of them.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from tests.run_ranks import run_ranks
from tests.verify.mutations import CONTROL, MUTATIONS, Mutation

from paceline.collectives.handshake import SWITCH
from paceline.verify.spec import Result, Spec
from paceline.verify.worker import verify
from paceline.world import World

TASKS = Path(__file__).with_name("tasks_under_test.py")
WORLD_SIZE = 3
CLIP_NORM = 0.1  # below every gradient norm here, so that clipping does something


def findings(rank: int, world_size: int, names: Sequence[str]) -> dict[str, list[Result]]:
    """Each named mutation's results for the strategies and policies it affects (run by every rank)."""
    os.environ[SWITCH] = "off"  # the bugs are planted into the reducers over torch.distributed
    world = World(rank, world_size, rank, world_size, torch.device("cpu"), "gloo")
    known = {m.name: m for m in [CONTROL, *MUTATIONS]}
    found: dict[str, list[Result]] = {}
    for mutation in (known[name] for name in names):
        spec = Spec(f"{TASKS}:{mutation.task}", {}, list(mutation.strategies), ["sgd"], world_size, 2, 4, 0, CLIP_NORM,
                    short_tail=True)  # fmt: skip
        with mutation.plant():
            results = verify(spec, world).results
        found[mutation.name] = [r for r in results if r.case.batchnorm in mutation.policies]
    return found


def judge(mutation: Mutation, results: Sequence[Result]) -> str:
    """'named', or what is wrong with the findings."""
    missed = [str(r.case) for r in results if r.finding is None]
    misnamed = [
        f"{r.case}: {r.finding.cause} ({r.finding.detail})"
        for r in results
        if r.finding and r.finding.cause not in mutation.causes
    ]
    if not results:
        return "NOT RUN"
    if missed:
        return "MISSED by " + "; ".join(missed)
    return "MISNAMED " + "; ".join(misnamed) if misnamed else "named"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="also write the table to this Markdown file")
    parser.add_argument("--only", nargs="*", help="names of mutations")
    arguments = parser.parse_args()
    chosen = [m for m in [CONTROL, *MUTATIONS] if not arguments.only or m.name in arguments.only]
    began = time.monotonic()
    from tests.verify.mutation_table import findings as in_module  # the ranks cannot import it from __main__

    with tempfile.TemporaryDirectory() as folder:
        found = run_ranks(in_module, WORLD_SIZE, Path(folder), [m.name for m in chosen], timeout=3000)[0]
    lines = ["| planted bug | known from | right names | verify said | verdict |", "|---|---|---|---|---|"]
    named = 0
    for mutation in chosen:
        results = found[mutation.name]
        if mutation is CONTROL:
            verdict = "FALSE ALARM" if any(r.finding for r in results) else "no finding, right"
        else:
            verdict = judge(mutation, results)
            named += verdict == "named"
        said = ", ".join(sorted({r.finding.cause for r in results if r.finding})) or "-"
        right = ", ".join(sorted(mutation.causes)) or "-"
        lines.append(f"| {mutation.name} | {mutation.source} | {right} | {said} | {verdict} |")
    planted = len(chosen) - (CONTROL in chosen)
    lines.append(
        f"\n{named} of {planted} bugs caught and named, in {time.monotonic() - began:.0f} s on {WORLD_SIZE} ranks."
    )
    text = "\n".join(lines) + "\n"
    print(text)
    if arguments.out:
        arguments.out.write_text("# What verify says of planted bugs\n\nMade by `make soak-mutations`.\n\n" + text)
    return named != planted


if __name__ == "__main__":
    raise SystemExit(main())
