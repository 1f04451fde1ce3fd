"""Time and memory of `paceline report` on a large run: 64 ranks, 1,000,000 events, made by replaying a real run's.

    python benchmarks/report.py RUN [--events 1000000] [--ranks 64] [--out benchmarks/results/report.json]

RUN is the folder of a real run of `paceline train`. Its records are written again and again, with other ranks, steps
and times, into a temporary folder; the page of that is made in a process of its own, whose peak memory is the kernel's.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec

from paceline.runs.events import Event, Started, Step, TracedStep, event_files, read_events
from paceline.runs.writers import EventWriter


def replay(source: Path, folder: Path, ranks: int, events: int) -> int:
    """Write the folder of a large run; how many events it has."""
    for name in ("config.toml", "environment.json", "summary.json"):
        shutil.copy(source / name, folder / name)
    (folder / "attempt-1").mkdir(mode=0o700)
    found = [[*read_events(path)] for path in event_files(source).values()]
    total = 0
    for rank in range(ranks):
        records = found[rank % len(found)]
        started = next(one for one in records if isinstance(one, Started))
        body = [one for one in records if isinstance(one, Step | TracedStep)]
        encode, lines = msgspec.json.Encoder().encode, list[bytes]()

        def add(event: Event, encode=encode, lines=lines) -> None:
            lines.append(encode(event))

        add(msgspec.structs.replace(started, rank=rank, world_size=ranks, host=f"n{rank // 8}"))
        step, shift = 0, 0.0
        while len(lines) < events // ranks:
            first = step
            for one in body:
                if len(lines) >= events // ranks:
                    break
                changed = {"step": first + one.step, "unix_time": one.unix_time + shift}
                if isinstance(one, Step):
                    changed["share"] = (rank, rank + 1)
                    step = first + one.step
                add(msgspec.structs.replace(one, **changed))
            times = [one.unix_time for one in body if isinstance(one, Step)]
            shift += times[-1] - times[0] + 0.3
        with EventWriter(folder / f"events-{rank}.jsonl"):
            pass
        (folder / f"events-{rank}.jsonl").write_bytes(b"\n".join(lines) + b"\n")
        total += len(lines)
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--events", type=int, default=1_000_000)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "large"
        folder.mkdir(mode=0o700)
        events = replay(asked.run, folder, asked.ranks, asked.events)
        size = sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
        page = folder / "report.html"
        began = time.monotonic()
        process = subprocess.Popen(
            [sys.executable, "-m", "paceline", "report", str(folder), "--explain", "-o", str(page)]
        )
        _, status, usage = os.wait4(process.pid, 0)
        found = {
            "events": events, "ranks": asked.ranks, "folder_bytes": size, "exit": os.waitstatus_to_exitcode(status),
            "seconds": round(time.monotonic() - began, 2), "peak_bytes": usage.ru_maxrss * 1024,
            "page_bytes": page.stat().st_size,
        }  # fmt: skip
    print(msgspec.json.format(msgspec.json.encode(found), indent=2).decode())
    if asked.out:
        asked.out.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=2) + b"\n")


if __name__ == "__main__":
    main()
