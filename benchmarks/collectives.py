"""How fast is a sum over the ranks of one host? `python benchmarks/collectives.py`: shared memory, gloo, and memcpy.

All three in the same processes, in turn (A B C A B C ...), so that a busy machine slows all of them; a size counts by
the ratios round by round, of the rounds in which the machine was ours. memcpy is the limit: each rank copies as many
bytes from one place to another, all at once. With --out the result is written there.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
import torch.distributed as dist

from paceline.collectives import shm_communicator
from paceline.collectives.communicator import get_communicator, make_communicator
from paceline.collectives.shared_memory import BULK_BYTES, SharedMemoryGroup
from paceline.collectives.shm_collectives import TreeSum, barrier
from paceline.collectives.sum_tree import LeafPartition
from race.quiet import FOREIGN_SHARE, foreign_share, look, wait_until_idle

SIZES_BYTES = (4 << 10, 64 << 10, 1 << 20, 8 << 20, 25 << 20, 100 << 20)
CHUNK_SECONDS = 0.15  # of the same calls in a row
WAYS = ("shared", "gloo", "memcpy")
PATIENCE_SECONDS = 5.0  # for the machine to become idle, before each of these


def ways(memory: SharedMemoryGroup, size_bytes: int) -> dict[str, Callable[[], object]]:
    """What is compared, ready to be called; the sums are not divided, gloo does not either."""
    mine, copy = torch.zeros(size_bytes // 4), torch.empty(size_bytes // 4)
    partition = LeafPartition.one_leaf_per_rank(memory.size, memory.rank)
    total = TreeSum(memory, [len(mine)], [mine.dtype], partition)
    return {
        "shared": lambda: total.run([[mine]]),
        "gloo": lambda: dist.all_reduce(mine),
        "memcpy": lambda: copy.copy_(mine),
    }


def measure(
    memory: SharedMemoryGroup, rounds: int, sizes: Sequence[int], patience_seconds: float
) -> list[dict[str, Any]]:
    """A row for each size and round, the same on all ranks: microseconds for each way, and whether all was quiet."""
    rows: list[dict[str, Any]] = []
    for size_bytes in sizes:
        calls = ways(memory, size_bytes)
        counts = {name: _count(memory, call) for name, call in calls.items()}
        for _ in range(rounds):
            row: dict[str, Any] = {"bytes": size_bytes, "quiet": True}
            for name, call in calls.items():
                if memory.rank == 0:
                    wait_until_idle(patience_seconds)
                row[name], quiet = _chunk(memory, call, counts[name])
                row["quiet"] &= quiet
            rows.append(row)
    return rows


def _count(memory: SharedMemoryGroup, call: Callable[[], object]) -> int:
    call()
    began = time.perf_counter()
    for _ in range(3):
        call()
    seconds = max(get_communicator().all_gather_object(time.perf_counter() - began, "words")) / 3
    return max(2, int(CHUNK_SECONDS / seconds))


def _chunk(memory: SharedMemoryGroup, call: Callable[[], object], count: int) -> tuple[float, bool]:
    """Microseconds of a call, and whether the machine was ours."""
    barrier(memory)
    before, cpu_before = look(), time.process_time()
    began = time.perf_counter()
    for _ in range(count):
        call()
    microseconds = (time.perf_counter() - began) / count * 1e6
    cpu_seconds = time.process_time() - cpu_before
    told = get_communicator().all_gather_object([microseconds, cpu_seconds], "words")
    foreign = foreign_share(before, look(), sum(cpu for _, cpu in told))
    quiet = get_communicator().all_gather_object(foreign <= FOREIGN_SHARE, "words")[0]
    return max(each for each, _ in told), quiet


def summary(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A line for each size, of its quiet rounds; of all where there are fewer than five."""
    lines: list[dict[str, Any]] = []
    for size_bytes in dict.fromkeys(row["bytes"] for row in rows):
        of_size = [row for row in rows if row["bytes"] == size_bytes]
        quiet = [row for row in of_size if row["quiet"]]
        used = quiet if len(quiet) >= 5 else of_size
        against = {
            "gloo / shared": [row["gloo"] / row["shared"] for row in used],
            "memcpy / shared": [row["memcpy"] / row["shared"] for row in used],
        }
        lines.append(
            {"bytes": size_bytes, "quiet": len(quiet), "rounds": len(of_size)}
            | {way: median(row[way] for row in used) for way in WAYS}
            | {name: quartiles(values) for name, values in against.items()}
        )
    return lines


def quartiles(values: Sequence[float]) -> list[float]:
    """The lower one, the median, the upper one."""
    return [*quantiles(values, n=4, method="inclusive")] if len(values) > 1 else [values[0]] * 3


def show(lines: Sequence[Mapping[str, Any]]) -> None:
    """The table."""
    heads = [f"{way + ' us':>10}" for way in ("gloo", "shared", "memcpy")]
    print(f"{'size':>10} {' '.join(heads)} {'gloo / shared':>22} {'of memcpy':>18}  quiet")
    for line in lines:
        size = f"{line['bytes'] >> 10} KiB" if line["bytes"] < 1 << 20 else f"{line['bytes'] >> 20} MiB"
        against = " / ".join(f"{value:.1f}" for value in line["gloo / shared"])
        of_memcpy = " / ".join(f"{value:.2f}" for value in line["memcpy / shared"])
        few = "" if line["quiet"] >= 5 else "  (too few: not measured)"
        print(
            f"{size:>10} {line['gloo']:>10.1f} {line['shared']:>10.1f} {line['memcpy']:>10.1f} {against:>22} "
            f"{of_memcpy:>18}  {line['quiet']}/{line['rounds']}{few}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--bulk-mib", type=float, default=BULK_BYTES / (1 << 20), help="what a rank hands over at once")
    parser.add_argument("--sizes", help="in bytes, separated by commas")
    parser.add_argument("--patience", type=float, default=PATIENCE_SECONDS, help="seconds for the machine to get idle")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--quick", action="store_true", help="two rounds of two sizes, to see that it works")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--meet", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank is not None:
        act(arguments)
        return
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, *sys.argv, "--meet", folder, "--rank"]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        started = [subprocess.Popen([*command, str(rank)], env=env) for rank in range(arguments.ranks)]
        codes = [process.wait() for process in started]
    if any(codes):
        raise SystemExit(f"ranks ended with {codes}")


def act(arguments: argparse.Namespace) -> None:
    """As one rank."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{arguments.meet}/store", arguments.ranks)  # pyright: ignore[reportPrivateImportUsage]
    dist.init_process_group("gloo", store=store, rank=arguments.rank, world_size=arguments.ranks)
    shm_communicator.BULK_BYTES = int(arguments.bulk_mib * (1 << 20))
    memory = make_communicator("shared").memory
    assert memory is not None
    sizes = [int(size) for size in arguments.sizes.split(",")] if arguments.sizes else SIZES_BYTES
    rounds = 2 if arguments.quick else arguments.rounds
    rows = measure(
        memory, rounds, sizes[:2] if arguments.quick else sizes, 0.0 if arguments.quick else arguments.patience
    )
    if arguments.rank == 0:
        lines = summary(rows)
        print(f"{arguments.ranks} ranks on {os.cpu_count()} cores, torch {torch.__version__}, quartiles round by round")
        show(lines)
        if arguments.out is not None:
            machine = {"cores": os.cpu_count(), "processor": _processor(), "torch": str(torch.__version__),
                       "python": platform.python_version(), "kernel": platform.release()}  # fmt: skip
            found = {"ranks": arguments.ranks, "bulk_bytes": int(arguments.bulk_mib * (1 << 20)), "machine": machine,
                     "lines": lines, "rows": rows}  # fmt: skip
            arguments.out.write_text(json.dumps(found, indent=1) + "\n")
    barrier(memory)
    dist.destroy_process_group()


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


if __name__ == "__main__":
    main()
