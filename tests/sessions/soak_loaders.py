"""Kills at random moments of loops over streamed, length-grouped and packed data: is each sample used once?

    PYTHONPATH=. python tests/sessions/soak_loaders.py --kills 200 --out benchmarks/results/loaders.json

A run of loaders.py is killed several times. Each start has 1 to 3 ranks, and a random rank is killed at a random time.
After the last kill the run ends. It is right if the samples of each step are those of the plain loop in one process,
if the weights are equal to 1e-12 in float64, and if `paceline ledger` finds each sample once in each epoch.

The number of a run determines its data, the seed and the number the rest. Runs that are in the file already are left
out. The exit code is 1 if a run is not right.
"""

import argparse
import importlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stdout
from datetime import UTC, datetime
from io import StringIO
from itertools import chain, count, pairwise, zip_longest
from pathlib import Path
from typing import Any

import torch
from tests.ended import start_steps
from tests.run_script import free_port
from tests.sessions import loaders

from paceline.cli import ledger

SCRIPT = Path(loaders.__file__)
KINDS = {
    "streaming": ("split", "hf-workers", "split-kept", "bounds", "hf", "hf-shuffled", "split-1"),
    "length-grouped": ("length", "tokens", "length-generator", "hf-map"),
    "packed": ("packed", "blocks-workers", "flattened", "hf-packed-workers", "blocks"),
    "loader processes": ("workers", "init-kept"),
}
TOLERANCE = 1e-12
KILLS_OF_A_RUN = 5
MAX_MILLISECONDS = 40
LIMIT_SECONDS = 170.0
KILLED, HUNG = 128 + signal.SIGKILL, -1

Start = Callable[[int, Path, Sequence[object]], tuple[int, str]]
"""(number of ranks, working folder, arguments of loaders.py) -> exit code and output"""


def start_forks(size: int, folder: Path, words: Sequence[object]) -> tuple[int, str]:
    """Run loaders.py as forks of this process, which has imported everything."""
    port, output = free_port(), folder / "output.txt"
    output.write_text("")
    running = {_fork_rank(rank, size, port, output, words) for rank in range(size)}
    deadline, codes = time.monotonic() + LIMIT_SECONDS, list[int]()
    try:
        while running and time.monotonic() < deadline:
            for pid in [*running]:
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    running.remove(pid)
                    codes.append(os.waitstatus_to_exitcode(status))
            time.sleep(0.005)
    finally:
        for pid in running:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    code = HUNG if running else KILLED if -signal.SIGKILL in codes else max(codes)
    return code, output.read_text(errors="replace")


def _fork_rank(rank: int, size: int, port: int, output: Path, words: Sequence[object]) -> int:
    if pid := os.fork():
        return pid
    code = 1
    try:
        with output.open("a") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        os.environ |= {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
        sys.argv = [str(SCRIPT), *map(str, words)]
        loaders.main()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def expected(kind: str, folder: Path, start: Start = start_forks) -> dict[str, Any]:
    """The batches and weights of the plain loop."""
    code, output = start(1, folder, [folder / "plain", kind])
    assert code == 0, output
    return torch.load(folder / "plain" / f"{kind}.pt")


def killed_run(kind: str, whole: dict[str, Any], kills: int, dice: random.Random, folder: Path,
               start: Start = start_forks) -> dict[str, Any]:  # fmt: skip
    """Kill a run several times, and let it end."""
    run, starts, num_killed, output = folder / "run", list[set[Path]](), 0, ""
    steps = sorted(dice.randrange(len(whole["batches"])) for _ in range(kills))
    sizes = [dice.randint(1, 3) for _ in range(kills + 1)]
    code, known = -1, set[Path]()
    for size, step in zip(sizes, [*steps, None], strict=True):
        kill = [] if step is None else [step, dice.randrange(size), dice.randrange(MAX_MILLISECONDS)]
        code, output = start(size, folder, [run, kind, *kill])
        seen = {*run.glob("seen-*")}
        starts.append(seen - known)
        known = seen
        num_killed += code == KILLED
        if code != KILLED:
            break
    faults = [f"exit code {code}: {output[-3000:]}"] if code else [*_faults(run, whole, starts)]
    return {"kind": kind, "kills": num_killed, "ranks": sizes[: len(starts)], "faults": faults}


def _faults(run: Path, whole: dict[str, Any], starts: Sequence[set[Path]]) -> Iterator[str]:
    used = used_samples(run, starts)
    batches = [sorted(used[step]) for step in range(max(used) + 1)]
    if batches != whole["batches"]:
        different = [n for n, (a, b) in enumerate(zip(batches, whole["batches"], strict=False)) if a != b]
        yield f"{len(batches)} batches, not {len(whole['batches'])}; others in steps {different}"
    weights = torch.load(run / "model.pt")
    distance = max(float((weights[name] - value).abs().max()) for name, value in whole["weights"].items())
    if distance > TOLERANCE:
        yield f"weights differ by {distance}"
    said, counts = epochs(run)
    if said or any(epoch["never"] or epoch["repeatedly"] for epoch in counts) or len(counts) != loaders.EPOCHS:
        yield f"paceline ledger: {said or counts}"


def used_samples(run: Path, starts: Sequence[set[Path]]) -> dict[int, list[int]]:
    """The samples of each step that counts, from the files that the ranks of each start have written."""
    used = defaultdict[int, list[int]](list)
    for files, (first, end) in zip(starts, pairwise([*start_steps(run), sys.maxsize]), strict=True):
        for line in (line for file in files for line in file.read_text().splitlines()):
            step, samples = json.loads(line)
            if first <= step < end:
                used[step] += samples
    return used


def epochs(run: Path) -> tuple[str, list[dict[str, Any]]]:
    """What `paceline ledger` prints if it finds a fault, and its epochs."""
    found = run.with_suffix(".json")
    with redirect_stdout(StringIO()) as said:
        code = ledger.main([str(run), "--json", str(found)])
    return said.getvalue() if code else "", json.loads(found.read_bytes())["epochs"]


def result(record: dict[str, Any]) -> dict[str, Any]:
    runs = [*record["runs"].values()]
    kills = {name: sum(one["kills"] for one in runs if one["kind"] in kinds) for name, kinds in KINDS.items()}
    ranks = Counter(size for one in runs for size in one["ranks"])
    right = sum(not one["faults"] for one in runs)
    return {
        "runs": len(runs),
        "right": right,
        "kills": sum(kills.values()),
        "kills by data": kills,
        "starts by ranks": ranks,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=1e6, help="start no run after this time")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    for module in ("transformers.trainer_pt_utils", "transformers", "datasets"):
        importlib.import_module(module)
    record: dict[str, Any] = {"seed": options.seed, "runs": {}}
    if options.out and options.out.exists():
        record = json.loads(options.out.read_text())
    began, kinds, whole = time.monotonic(), [*chain(*zip_longest(*KINDS.values()))], dict[str, dict[str, Any]]()
    kinds, this_commit = [kind for kind in kinds if kind], commit()
    with tempfile.TemporaryDirectory(prefix="soak-loaders-") as name:
        for number in count():
            is_late = time.monotonic() > began + 60 * options.minutes
            if is_late or sum(one["kills"] for one in record["runs"].values()) >= options.kills:
                break
            if str(number) in record["runs"]:
                continue
            kind, dice = kinds[number % len(kinds)], random.Random(f"{options.seed}-{number}")
            if kind not in whole:
                whole[kind] = expected(kind, Path(name))
            folder = Path(name, str(number))
            folder.mkdir()
            record["runs"][str(number)] = found = killed_run(kind, whole[kind], KILLS_OF_A_RUN, dice, folder)
            print(number, found, flush=True)
            record |= {"commit": this_commit, "date": f"{datetime.now(UTC):%Y-%m-%d}", "result": result(record)}
            if options.out:
                options.out.write_text(json.dumps(record, indent=1) + "\n")
            shutil.rmtree(folder)
    return int(any(one["faults"] for one in record["runs"].values()))


def commit() -> str:
    words = ["git", "-C", str(SCRIPT.parent), "describe", "--always", "--dirty", "--exclude=*"]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
