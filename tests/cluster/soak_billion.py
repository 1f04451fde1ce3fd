"""10^9 samples on two hosts: memory and time to the first batch, a kill at sample 7 x 10^8, and the resume there.

    PYTHONPATH=. python tests/cluster/soak_billion.py --out benchmarks/results/billion.json

Sample i is one byte that a hash makes of i, in a file of 1 GB that both hosts map. A step takes 10^7 samples in a
shuffled order; what arrives is added up, and compared with the plan's own order. Root; a quarter of an hour on 2 cores.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from tests.cluster.lab import Lab
from tests.cluster.ssh import SshHosts

SAMPLES, BATCH, KILLED_AT, LAST = 10**9, 10**7, 71, 73

LOOP = f'''
import json, os, resource, signal, sys, time
began = time.monotonic()
import torch, paceline
from paceline.data.arrays import ArrayDataset

rows = torch.from_file("bytes", shared=True, size={SAMPLES}, dtype=torch.uint8)
data = ArrayDataset(rows, torch.zeros(1).expand({SAMPLES}))


def resident():
    """MiB of this process's own; not the file that it maps."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("RssAnon")) / 1024


s = paceline.session("run", resume=True, strategy="exact", virtual_ranks=2, seed=7, checkpoint_every=10)
model, optimizer = s.prepare(torch.nn.Linear(1, 1), lambda parameters: torch.optim.SGD(parameters, lr=1e-4))
train = s.loader(data, global_batch={BATCH})
before, asked = resident(), time.monotonic()
first = True
for epoch in s.epochs(1):
    for x, y in train:
        step = s.step + 1
        if first and s.rank == 0:
            first = False
            print("FIRST", json.dumps({{"step": step, "seconds": time.monotonic() - asked, "since_start": asked - began,
                                        "mib_before": before, "mib_after": resident()}}), flush=True)
        optimizer.zero_grad()
        s.backward((model(x[:, None] / 255)[:, 0] - y).square().mean())
        optimizer.step()
        total = s.sum(float(x.sum(dtype=torch.int64)))
        if s.rank == 0:
            print("STEP", json.dumps([step, total]), flush=True)
        if step == {KILLED_AT} and s.rank == 1 and not os.path.exists("killed"):
            open("killed", "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        if step == {LAST}:
            print("DONE", flush=True)
            os._exit(0)
'''


def samples(indices: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return ((indices.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(56)).astype(np.uint8)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    out: Path = parser.parse_args().out
    with tempfile.TemporaryDirectory() as place, ExitStack() as stack:
        folder = Path(place)
        for name in ("lab", "ssh"):
            (folder / name).mkdir()
        lab = Lab(folder / "lab", 3)
        stack.callback(lab.close)
        ssh = SshHosts.start(lab, folder / "ssh")
        with (folder / "bytes").open("wb") as file:
            for start in range(0, SAMPLES, BATCH):
                file.write(samples(np.arange(start, start + BATCH)).tobytes())
        (folder / "loop.py").write_text(LOOP)
        attempts = [attempt(lab, ssh, folder, number) for number in (1, 2)]
    wrong = [step for one in attempts for step, total in one["steps"] if total != expected(step)]
    resumed = attempts[1]["first"]["step"] if attempts[1]["first"] else None
    result = {
        "samples": SAMPLES, "batch": BATCH, "hosts": 2, "resumed_at_sample": (resumed - 1) * BATCH if resumed else None,
        "first": [one["first"] for one in attempts], "exit_codes": [one["code"] for one in attempts],
        "steps": [len(one["steps"]) for one in attempts], "steps_with_other_samples": wrong,
    }  # fmt: skip
    out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))
    return int(bool(wrong) or resumed is None or resumed < 71)


def attempt(lab: Lab, ssh: SshHosts, folder: Path, number: int) -> dict[str, Any]:
    """One start on n2 and n3: what it has said."""
    command = [
        sys.executable, "-m", "paceline", "launch", "--on", "ssh", "--hosts", "n2,n3", "--ssh", ssh.command, "--nproc",
        "1", "--run-dir", str(folder / f"logs-{number}"), "--", str(folder / "loop.py"),
    ]  # fmt: skip
    started = lab.popen("n1", *command, cwd=folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    said, _ = started.communicate(timeout=3000)
    lines = [line.removeprefix("[rank 0] ").split(" ", 1) for line in said.splitlines()]
    found = {word: [json.loads(rest[0]) for first, *rest in lines if first == word] for word in ("FIRST", "STEP")}
    if not found["STEP"]:
        print(said, file=sys.stderr)
    return {"first": next(iter(found["FIRST"]), None), "steps": found["STEP"], "code": started.returncode}


def expected(step: int) -> float:
    """The sum over all samples of a step, by the plan's order."""
    import torch

    from paceline.data.plan import shuffled_indices

    found = shuffled_indices(slice((step - 1) * BATCH, step * BATCH), SAMPLES, 7, 0)
    assert isinstance(found, torch.Tensor)
    return float(samples(found.numpy()).sum(dtype=np.int64))


if __name__ == "__main__":
    sys.exit(main())
