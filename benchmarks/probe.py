"""What does it cost that a script is seen from outside? `python benchmarks/probe.py`, or `make bench-probe`.

Each of the four works of the race is trained by a plain DDP script on two ranks under `paceline launch`. Within one run
the hooks are switched on and off, A B B A A B ..., every few steps on all ranks alike, so that what else the machine
does hits both; the cost is the ratio of the medians. Then the weights after some steps are compared with those under
`--hang-timeout off`: the same bits.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from paceline.rank.guard import HangGuard
from paceline.rank.probes import ScriptHooks
from race.samples import for_peers
from race.works import WORKS, mean_loss

NAMES = ("W1", "W2", "W3", "W3g")
BLOCK, WARM_UP = 5, 5
LIMIT_SECONDS = 1800


def loop(name: str, steps: int, out: str) -> None:
    """A script as people write it; but for the switch."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    work, guard = WORKS[name], HangGuard.of_process()
    model = DistributedDataParallel(work.make_model())
    optimizer = work.make_optimizer(model.parameters())
    data = for_peers(work, dist.get_rank(), dist.get_world_size())
    loader = DataLoader(data, work.batch, sampler=DistributedSampler(data, shuffle=True), drop_last=True)
    marker = guard.ledger.marker
    hooks = next(one for one in gc.get_objects() if type(one) is ScriptHooks) if out else None
    listeners = hooks._listeners if hooks is not None else {}  # pyright: ignore[reportPrivateUsage]
    seconds: dict[str, list[float]] = {"on": [], "off": []}
    done = 0
    while done < steps:
        for x, y in loader:
            key = "on" if (done // BLOCK) % 4 in (0, 3) else "off"
            if hooks is not None:
                hooks._listeners = listeners if key == "on" else {}  # pyright: ignore[reportPrivateUsage]
                guard.ledger.marker = marker if key == "on" else None
            began = time.perf_counter()
            optimizer.zero_grad()
            mean_loss(model(x), y).backward()
            optimizer.step()
            if done >= WARM_UP:
                seconds[key].append(time.perf_counter() - began)
            done += 1
            if done == steps:
                break
    digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
    if dist.get_rank() == 0:
        print("RESULT " + json.dumps({"digest": digest, "seconds": seconds}))
    dist.destroy_process_group()


def run(name: str, steps: int, *, switched: bool, hang_timeout: str) -> dict[str, object]:
    """What rank 0 of a run has found."""
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-m", "paceline", "launch", "--nproc", "2", "--hang-timeout", hang_timeout, "--run-dir",
             f"{folder}/run", "--", str(Path(__file__).resolve()), "--loop", name, "--steps", str(steps),
             *(["--switched"] if switched else [])],
            check=True, capture_output=True, text=True, timeout=LIMIT_SECONDS,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
    line = next(line for line in done.stdout.splitlines() if "RESULT " in line)
    return json.loads(line.partition("RESULT ")[2])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loop", choices=NAMES, help="be the script")
    parser.add_argument("--switched", action="store_true")
    parser.add_argument("--works", nargs="+", default=NAMES)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if arguments.loop:
        loop(arguments.loop, arguments.steps, "out" if arguments.switched else "")
        return
    result: dict[str, object] = {"cores": os.cpu_count(), "steps": arguments.steps}
    for name in arguments.works:
        seconds = run(name, arguments.steps, switched=True, hang_timeout="auto")["seconds"]
        assert isinstance(seconds, dict)
        on, off = median(seconds["on"]), median(seconds["off"])
        digests = [run(name, 20, switched=False, hang_timeout=word)["digest"] for word in ("auto", "off")]
        same = digests[0] == digests[1]
        result[name] = {"ms a step": {"on": 1e3 * on, "off": 1e3 * off}, "ratio": on / off, "same bits": same}
        print(
            f"{name:4} {1e3 * off:8.2f} ms a step, with the hooks x {on / off:.4f}; the same bits: {same}", flush=True
        )
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
