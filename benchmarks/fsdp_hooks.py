"""What does shared memory bring strategy `fsdp`? `python benchmarks/fsdp_hooks.py`, `make bench-fsdp-hooks`.

`paceline train --strategy fsdp` with --collectives torch (FSDP2's all-gather and reduce-scatter over gloo) and with
--collectives shared (the same through memory, by FSDP2's public hooks). Both stand at a gate before a step, and laps
of some steps go A B, B A, ... After the first steps both must have the same loss, to the last bit. Ratios are taken
round by round.

On a machine that others use, laps are never quiet: --patience 0 counts them all, and the record says that it was busy.
"""

from __future__ import annotations

import sys

from race.contenders import train
from race.duel import WAYS, duel
from race.starter import Contender, Launch
from race.works import WORKS


def contender(name: str, work: str, ranks: int) -> Contender:
    """The training with this way of exchanging weights and gradients."""
    flags = ["--strategy", "fsdp", "--collectives", WAYS[name], "--nproc", str(ranks), "--threads-per-rank", "1"]
    return Contender(name, [Launch(train(work, "run", flags))], ranks, ranks * WORKS[work].batch)


if __name__ == "__main__":
    sys.exit(duel(__doc__, contender))
