"""The faults of the catalogue in a script under `paceline watchover`: who is named, started by whom.

    PYTHONPATH=. python tests/cluster/soak_watchover.py --out benchmarks/results/watchover        # root

Writes FILE.json after each run and FILE.md from it. What was interrupted goes on: runs that are in the file already are
left out. --minutes ends it in good order. The exit code is 1 if a wrong rank was named, or a process is left.
"""

import argparse
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import msgspec
from benchmarks.faults.catalogue import HANGS, LATE, MISMATCHES, QUIET, SUDDEN
from benchmarks.faults.fault import Fault, Needs, Way
from benchmarks.faults.run import Score
from benchmarks.faults.table import ranks
from tests.cluster.fault_hosts import Hosts
from tests.cluster.lab import Lab
from tests.cluster.slurm import Slurm
from tests.cluster.soak_faults import anonymous, machine
from tests.cluster.ssh import SshHosts
from tests.cluster.watched import WAYS, run_watched

WANTED = ("killed", "raises", "raises-and-cleans-up", "exits-early", "fewer-batches")  # of those that are no hangs
FAULTS = {
    fault.name: fault
    for fault in (*HANGS, *MISMATCHES, *LATE, *SUDDEN, *QUIET)
    if fault.way is Way.SCRIPT and fault.needs is Needs.NOTHING and (fault not in SUDDEN or fault.name in WANTED)
}
HEAD = """# Watchover: who is named under other launchers

Made by `make soak-watchover`. Each fault strikes a plain DDP script of 2 to 4 gloo ranks that torchrun, srun or mpirun
has started, with `paceline watchover --hang-timeout 5 --end` before its name. The first torchrun is alone on its host;
else there are two: rank 0 is on one (under srun every second rank), the others on the other. In a cell: right rank, the
right line of the source (-: there is none to be named), the seconds from the fault to the diagnosis. Processes and
temporary files left are counted when the launcher has ended, without the folder `torchelastic_*` that torchrun leaves.

{about}

"""


class Soak(msgspec.Struct):
    machine: dict[str, str]
    runs: dict[str, Score] = {}  # "fault, way"


def cell(score: Score | None) -> str:
    if score is None:
        return "not run"
    rank = "yes" if score.right_rank else f"NO ({ranks(score.named)}, {score.end})"
    line = "-" if score.right_line is None else "yes" if score.right_line else "NO"
    seconds = "" if score.verdict_seconds is None else f", {score.verdict_seconds:.1f} s"
    return f"{rank}, {line}{seconds}{f', LEFT {len(left(score))}' if left(score) else ''}"


def left(score: Score) -> list[str]:
    files = [
        name for name in score.files_left if not name.startswith(("torchelastic_", "/dev/shm/"))
    ]  # others use that
    return [*score.processes_left, *files]


def total(way: str, scores: Sequence[Score]) -> str:
    lines = [score.right_line for score in scores if score.right_line is not None]
    return (
        f"- {way}: right rank {sum(s.right_rank for s in scores)} of {len(scores)}, right line "
        f"{sum(map(bool, lines))} of {len(lines)}, left {sum(len(left(s)) for s in scores)}"
    )


def markdown(done: Soak) -> str:
    head = HEAD.format(about=", ".join(f"{name} {value}" for name, value in done.machine.items()))
    lines = [["fault", "causes", *WAYS], ["---"] * (2 + len(WAYS))]
    for name, fault in FAULTS.items():
        cells = [cell(done.runs.get(f"{name}, {way}")) for way in WAYS]
        lines.append([name, "all" if fault.tie else ranks(fault.causes), *cells])
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    totals = [total(way, [s for key, s in done.runs.items() if key.endswith(f", {way}")]) for way in WAYS]
    return f"{head}{table}\n\n" + "\n".join(totals) + "\n"


def write(out: Path, done: Soak) -> None:
    out.with_suffix(".json").write_bytes(msgspec.json.format(msgspec.json.encode(done), indent=1))
    out.with_suffix(".md").write_text(markdown(done))


def soak(told: argparse.Namespace, hosts: Hosts, slurm: Slurm, root: Path) -> Soak:
    """All runs that are not yet in the file, which is written after each."""
    out, deadline = Path(told.out), time.monotonic() + 60 * told.minutes
    kept = out.with_suffix(".json")
    done = msgspec.json.decode(kept.read_bytes(), type=Soak) if kept.exists() else Soak(machine())
    wanted: list[tuple[Fault, str]] = [(fault, way) for fault in FAULTS.values() for way in told.ways]
    for fault, way in wanted:
        key = f"{fault.name}, {way}"
        if key in done.runs or (told.only and fault.name not in told.only):
            continue
        if time.monotonic() > deadline:
            print("out of time: repeat the command to continue", flush=True)
            break
        folder = root / key.replace(", ", "-").replace(" ", "-")
        result = run_watched(fault, way, hosts, slurm, folder)
        done.runs[key] = msgspec.structs.replace(result, words=anonymous(result.words, root))
        write(out, done)
        print(f"{key}: {cell(result)}; {os.getloadavg()[0]:.1f}", flush=True)
        if result.right_rank and result.right_line is not False and not left(result):
            shutil.rmtree(folder)
    return done


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, help="FILE: FILE.json and FILE.md are written")
    parser.add_argument("--minutes", type=float, default=80.0, help="begin no run after that")
    parser.add_argument("--only", nargs="*", default=[], help="names of faults")
    parser.add_argument("--ways", nargs="*", default=list(WAYS), help="how the script is started")
    told = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="soak-watchover-"))
    with ExitStack() as stack:
        for name in ("lab", "ssh", "slurm"):
            (root / name).mkdir()
        lab = Lab(root / "lab", 4)
        stack.callback(lab.close)
        hosts = Hosts(lab, SshHosts.start(lab, root / "ssh"))
        done = soak(told, hosts, Slurm.start(lab, root / "slurm"), root)
    wrong = sorted(key for key, score in done.runs.items() if not score.right_rank or left(score))
    print(f"{len(done.runs)} runs; wrong: {'; '.join(wrong) or 'none'}; folders of what was wrong: {root}")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
