"""How fast on one GPU, and how far from what it can do? `python benchmarks/gpu.py --out benchmarks/results/gpu.json`.

`paceline train` against torch's DDP as the tutorials write it with 8 loader processes, one rank each, the same batch
and precision in each pair: fp32 against fp32, bf16 (autocast) against bf16. Turns, laps and losses as in
benchmarks/peers.py. The roofline is measured in the same run: the rate of large matrix products in that format, and of
a copy in the GPU's memory; a work's floating point operations are counted, and its share of that rate is shown.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from race.contenders import BASE, TORCHRUN, train, understands
from race.figures import Row, rates, rows_of, table, write
from race.heats import FIRST_STEPS, Pace, race
from race.starter import HERE, Contender, Launch
from race.works import WORKS, mean_loss

LOADERS = 8
SIDE = 8192  # of the matrices
COPIED_BYTES = 1 << 30
FORMATS = {"fp32": torch.float32, "bf16": torch.bfloat16}
VARIANTS = {"default": (), "cuda-graphs": ("--cuda-graphs",), "compile": ("--compile",)}
LAP_STEPS = 200  # a step takes a millisecond or less


def contenders(work: str, precision: str) -> list[Contender]:
    """The base first; of paceline what this version has."""
    batch = WORKS[work].batch
    script = [str(HERE / "loops" / "vanilla.py"), work, "--device", "cuda", "--workers", str(LOADERS)]
    base = [*TORCHRUN, "--nproc-per-node=1", *script, *(["--bf16"] if precision == "bf16" else [])]
    exact = precision == "fp32"
    found = [Contender(BASE, [Launch(base)], 1, batch, exact=exact)]
    precise = ["--precision", precision] if understands("--precision") else []
    for name, flags in VARIANTS.items():
        if all(understands(flag) for flag in flags) and (precise or exact):
            command = train(work, "run", ["--nproc", "1", "--device", "cuda", *precise, *flags])
            # A captured graph calls neither hooks nor the loss: the gate stands where batches are made, and the loss
            # cannot be heard.
            launch, seen = Launch(command, {"RACE_GATE": "data"}), name != "cuda-graphs"
            found.append(Contender(name, [launch], 1, batch, exact=exact, compared=seen))
    return found


def flops_a_sample(work: str) -> float:
    """Of a training step's forward and backward."""
    model, dataset = WORKS[work].make_model(), WORKS[work].make_dataset()
    samples = [dataset[index] for index in range(2)]
    inputs, targets = (torch.stack([torch.as_tensor(part) for part in parts]) for parts in zip(*samples, strict=True))
    counter = FlopCounterMode(display=False)
    with counter:
        mean_loss(model(inputs), targets).backward()
    return counter.get_total_flops() / len(samples)


def seconds_of(call: Callable[[], object], times: int = 20) -> float:
    """One call on the GPU, after a few to warm up."""
    for _ in range(3):
        call()
    began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    began.record()
    for _ in range(times):
        call()
    ended.record()
    torch.cuda.synchronize()
    return began.elapsed_time(ended) / 1000 / times


def roofline() -> dict[str, float]:
    """What this GPU reaches: TFLOP/s of matrix products in each format, GB/s of memory read and written."""
    found: dict[str, float] = {}
    for name, dtype in FORMATS.items():
        a, b = (torch.randn(SIDE, SIDE, device="cuda", dtype=dtype) for _ in range(2))
        found[f"{name} TFLOP/s"] = 2 * SIDE**3 / seconds_of(lambda a=a, b=b: a @ b) / 1e12
    source = torch.empty(COPIED_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    found["copy GB/s"] = 2 * COPIED_BYTES / seconds_of(lambda: target.copy_(source)) / 1e9
    return {name: round(value, 1) for name, value in found.items()}


def shares(rows: list[Row], precision: str, limits: dict[str, float], flops: float) -> list[str]:
    """How much of the GPU's rate each contender used, at its best."""
    peak = limits[f"{precision} TFLOP/s"]
    lines: list[str] = []
    for row in rows:
        best = max(rates(row), default=0.0) * flops / 1e12
        lines.append(f"{row.contender:14} {best:8.2f} TFLOP/s = {100 * best / peak:5.1f} % of {peak:.0f}")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", nargs="+", choices=WORKS, default=["W1", "W2", "W3g"])
    parser.add_argument("--precision", nargs="+", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--quick", action="store_true", help="a tiny model, 2 rounds of 2 steps: does it work?")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print(f"no CUDA device: torch {torch.__version__} sees none. This benchmark needs one GPU.", file=sys.stderr)
        return 2
    # the GPU is ours, and a machine that has one has more processors than we use: no waiting for quiet
    pace = Pace(2, 2, 0.0) if arguments.quick else Pace(arguments.rounds, LAP_STEPS, 0.0)
    limits = roofline()
    rows: list[Row] = []
    faults: list[str] = []
    about: dict[str, Any] = {"loaders": LOADERS, "rounds": pace.rounds, "roofline": limits, "works": {}}
    for work in ["tiny"] if arguments.quick else arguments.work:
        flops = flops_a_sample(work)
        for precision in arguments.precision:
            taking_part = contenders(work, precision)
            outcome = race(taking_part, pace)
            found = rows_of(f"{work} {precision}", taking_part, outcome)
            rows += found
            faults += [f"{work} {precision}, {fault}" for fault in outcome.faults]
            about["versions"] = outcome.versions
            about["works"][f"{work} {precision}"] = {
                "mflop_a_sample": round(flops / 1e6, 1), "steps_a_lap": outcome.steps,
                f"loss_after_{FIRST_STEPS}_steps": outcome.losses,
            }  # fmt: skip
            print("\n".join([table(found), *shares(found, precision, limits, flops)]) if found else "", end="\n\n")
            if arguments.out:
                write(arguments.out, about, rows)
    for fault in faults:
        print(f"FAULT: {fault}", file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
