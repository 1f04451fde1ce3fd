"""Plant every bug of mutations.py and see what verify says: `python FOLDER/mutation_table.py [--out FILE.md]`.

Three ranks, so that shares are uneven and the last global batch does not reach all of them.
"""

import argparse
import os
import tempfile
import time
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from tests.lab.ranks.memory_mutations import BULK_BYTES, MEMORY_MUTATIONS, OTHER_ORDER
from tests.lab.ranks.mutations import CONTROL, CONTROLS_OF_SCALE, MUTATIONS, Mutation, planted
from tests.run_ranks import run_ranks

from paceline.collectives import shm_collectives, shm_communicator
from paceline.collectives.communicator import make_communicator
from paceline.lab.ranks.verify import collect_bit_digests, verify
from paceline.lab.verify import CaseResult, Divergence, StrategyCase, VerifySpec
from paceline.protocol.control import SHARED_MEMORY
from paceline.rank.world import World

TASKS = Path(__file__).with_name("tasks_under_test.py")
WORLD_SIZE = 3
CLIP_NORM = 0.1  # below every gradient norm here, so that clipping does something
IN_MEMORY = replace(CONTROL, name="memory-control", strategies=("bucketed", "exact", "zero"))
CONTROLS = (CONTROL, *CONTROLS_OF_SCALE, IN_MEMORY)
OVER_TORCH = [CONTROL, *CONTROLS_OF_SCALE, *MUTATIONS]
THROUGH_MEMORY = [IN_MEMORY, *MEMORY_MUTATIONS]


def findings(rank: int, world_size: int, names: Sequence[str]) -> dict[str, list[CaseResult]]:
    """Each named mutation's results for the strategies and policies it affects (run by every rank)."""
    os.environ[SHARED_MEMORY] = "off"  # these bugs are planted into the reducers over torch.distributed
    world = World(rank, world_size, rank, world_size, torch.device("cpu"), "gloo")
    return {m.name: _verified(m, world) for m in OVER_TORCH if m.name in names}


def findings_in_memory(rank: int, world_size: int, names: Sequence[str]) -> dict[str, list[CaseResult]]:
    """The same for bugs in shared memory; the control, too, goes through it."""
    world = World(rank, world_size, rank, world_size, torch.device("cpu"), "gloo")
    shm_communicator.BULK_BYTES = BULK_BYTES
    assert make_communicator("shared").memory is not None
    with planted((shm_collectives, "MAX_DIRECT_SUM_BYTES", 0)):  # as gradients of any size that matters
        return {
            m.name: (_bits_of if m is OTHER_ORDER else _verified)(m, world) for m in THROUGH_MEMORY if m.name in names
        }


def all_findings(names: Collection[str], folder: Path, timeout: float) -> dict[str, list[CaseResult]]:
    from tests.lab.ranks import mutation_table as in_module  # the ranks cannot import it from __main__

    found: dict[str, list[CaseResult]] = {}
    for function, mutations in ((in_module.findings, OVER_TORCH), (in_module.findings_in_memory, THROUGH_MEMORY)):
        if chosen := [m.name for m in mutations if m.name in names]:
            found |= run_ranks(function, WORLD_SIZE, folder, chosen, timeout=timeout)[0]
    return found


def _verified(mutation: Mutation, world: World) -> list[CaseResult]:
    with mutation.plant():
        results = verify(_spec(mutation, world.size), world).results
    return [r for r in results if r.case.batchnorm in mutation.policies]


def _bits_of(mutation: Mutation, world: World) -> list[CaseResult]:
    """What `verify --bitwise` sees: whether the bits are those that other world sizes have."""
    spec = _spec(mutation, world.size + 2)  # virtual ranks: with fewer, the tree is the order of ranks
    right = collect_bit_digests(spec, world)
    with mutation.plant():
        planted_one = collect_bit_digests(spec, world)
    (name,), case = mutation.strategies, StrategyCase(mutation.strategies[0], world.size, "none", "sgd")
    differ = planted_one.bits != right.bits
    return [CaseResult(case, {}, [], 0.0, Divergence(0, "bits", name, "other bits") if differ else None)]


def _spec(mutation: Mutation, virtual_ranks: int) -> VerifySpec:
    return VerifySpec(f"{TASKS}:{mutation.task}", {}, list(mutation.strategies), ["sgd"], virtual_ranks, 2, 4, 0,
                CLIP_NORM, short_tail=True)  # fmt: skip


def judge(mutation: Mutation, results: Sequence[CaseResult]) -> str:
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
    chosen = [m for m in [*OVER_TORCH, *THROUGH_MEMORY] if not arguments.only or m.name in arguments.only]
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        found = all_findings([m.name for m in chosen], Path(folder), timeout=3000)
    lines = ["| planted bug | known from | right names | verify said | verdict |", "|---|---|---|---|---|"]
    named = 0
    for mutation in chosen:
        results = found[mutation.name]
        if mutation in CONTROLS:
            verdict = "FALSE ALARM" if any(r.finding for r in results) else "no finding, right"
        else:
            verdict = judge(mutation, results)
            named += verdict == "named"
        said = ", ".join(sorted({r.finding.cause for r in results if r.finding})) or "-"
        right = ", ".join(sorted(mutation.causes)) or "-"
        lines.append(f"| {mutation.name} | {mutation.source} | {right} | {said} | {verdict} |")
    bugs = sum(mutation not in CONTROLS for mutation in chosen)
    lines.append(
        f"\n{named} of {bugs} bugs caught and named, in {time.monotonic() - began:.0f} s on {WORLD_SIZE} ranks."
    )
    text = "\n".join(lines) + "\n"
    print(text)
    if arguments.out:
        arguments.out.write_text("# What verify says of planted bugs\n\nMade by `make soak-mutations`.\n\n" + text)
    return named != bugs


if __name__ == "__main__":
    raise SystemExit(main())
