"""Stands in for Python on the nodes of a job: an agent as Slurm sees it, without workers. Run by the batch script.

It notes in RUN/agents.txt how it was started and what it was told, and ends as the plan's argv says: (seconds, code).
Told to stop, it ends with 75 after 1.5 s, on node 1 after 2 s, as a node that writes its checkpoint slowly; told twice,
at once.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

told = []


def main() -> int:
    for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: told.append(number))
    words = sys.argv[1:]
    plan = json.loads(Path(words[words.index("--plan") + 1]).read_text())
    node, run, turn = int(os.environ["SLURM_NODEID"]), Path(plan["run_dir"]), os.environ.get("SLURM_RESTART_COUNT", "0")
    seconds, code = float(plan["argv"][0]), int(plan["argv"][1])

    def note(text: object) -> None:
        with (run / "agents.txt").open("a") as file:
            file.write(f"{turn} {node} {text}\n")

    note(f"started {os.environ['SLURM_CPUS_PER_TASK']} {' '.join(words[words.index('--node0') :])}")
    print(f"output of node {node}", flush=True)
    deadline = time.monotonic() + (seconds if turn == "0" else 0)
    while time.monotonic() < deadline:
        time.sleep(0.02)
        if told:
            note(f"told {signal.Signals(told[0]).name}")
            return save(note, 1.5 + 0.5 * node)
    if code:  # node 1 ends first, and not before node 0 can be told: srun tells all to end as soon as one has failed
        if node == 0:
            time.sleep(1)
        while (run / "agents.txt").read_text().count(f"{turn} 0 started") == 0:
            time.sleep(0.02)
    note(f"ended {code}")
    return code if turn == "0" else 0


def save(note: Callable[[object], None], seconds: float) -> int:
    """75 after so many seconds; a second signal ends it earlier, but for the last half second: all is decided then."""
    deadline = time.monotonic() + seconds
    while (left := deadline - time.monotonic()) > 0:
        time.sleep(0.02)
        if len(told) > 1 and left > 0.6:
            note("killed")
            return 143
    note("saved")
    return 75


sys.exit(main())
