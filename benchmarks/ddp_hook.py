"""What does `paceline launch --collectives shared` bring a DDP script? `python benchmarks/ddp_hook.py`.

One script, torch's DDP as its tutorial writes it (benchmarks/race/loops/vanilla.py), under the same launcher with and
without, as `peers.py` races its contenders: both stand at a gate before a step, and laps of some steps go A B, B A, ...
After the first steps both must have the same loss, to the last bit. Ratios are taken round by round.

On a machine that others use, laps are never quiet: --patience 0 counts them all, and the record says that it was busy.
"""

from __future__ import annotations

import sys

from race.duel import WAYS, duel
from race.starter import HERE, Contender, Launch
from race.works import WORKS


def contender(name: str, work: str, ranks: int) -> Contender:
    """The script with this way of adding up gradients."""
    options = ["--collectives", WAYS[name], "--nproc", str(ranks), "--threads-per-rank", "1"]
    script = ["--run-dir", "{RACE_FOLDER}/run", "--", str(HERE / "loops" / "vanilla.py"), work]
    command = [sys.executable, "-m", "paceline", "launch", *options, *script]
    return Contender(name, [Launch(command)], ranks, ranks * WORKS[work].batch)


if __name__ == "__main__":
    sys.exit(duel(__doc__, contender))
