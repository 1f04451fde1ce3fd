"""Utilization of devices by a run: tokens and FLOPs per second, MFU, goodput (no torch here).

FLOP/s  = FLOPs of a sample x samples/s                    forward and backward, counted once
MFU     = FLOP/s / (devices x peak of a device)            model FLOPs utilization
goodput = seconds of steps that counted / seconds since the first start, over all starts
"""

from contextlib import suppress
from pathlib import Path

from paceline.runs.events import RolledBack, Started, Step, event_files, read_events

PHASES = ("data", "forward", "backward", "sync", "optimizer")  # a session also records the time before its loop
MOST_EVENT_BYTES = 16 << 20  # about 60,000 steps, which take some tenths of a second


def throughput_and_mfu(
    samples_per_second: float | None, tokens_per_sample: float, flops_per_sample: float, peak_tflops: float,
    devices: int,
) -> dict[str, float]:  # fmt: skip
    """Samples, tokens and FLOPs per second and MFU, by name. Unknown ones (a factor is 0) are missing."""
    rate, peak = samples_per_second or 0.0, peak_tflops * 1e12 * devices
    values = {
        "samples_per_second": rate,
        "tokens_per_second": tokens_per_sample * rate,
        "flops_per_second": flops_per_sample * rate,
        "mfu": flops_per_sample * rate / peak if peak > 0 else 0.0,
    }
    return {name: value for name, value in values.items() if value > 0}


def speed_texts(record: object) -> list[str]:
    """'12,345 tokens/s', 'MFU 38.2%' and 'goodput 95.1%' from the attributes of a record. Unknown ones are missing."""
    formats = {"tokens_per_second": "{:,.0f} tokens/s", "mfu": "MFU {:.1%}", "goodput": "goodput {:.1%}"}
    return [text.format(value) for name, text in formats.items() if (value := getattr(record, name, None))]


def format_flops(flops: float) -> str:
    units = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (0.0, ""))
    size, prefix = next((unit for unit in units if flops >= unit[0]), units[-1])
    return f"{flops / (size or 1):.3g} {prefix}FLOP"


def explain_mfu(samples_per_second: float, flops_per_sample: float, peak_tflops: float, devices: int) -> str:
    if not flops_per_sample:
        return ""
    peak = f" / ({devices} x {format_flops(peak_tflops * 1e12)}/s peak)" if peak_tflops > 0 else ""
    return f"{format_flops(flops_per_sample)} a sample x {samples_per_second:,.0f} samples/s{peak}"


def goodput(run_dir: Path, until: float | None = None) -> float | None:
    """The goodput of a run, in [0, 1], from the events of its first rank.

    `until`: the end, as Unix time; by default the time of the last step. None before the first step, and for a run with
    more than MOST_EVENT_BYTES of events.
    """
    first, last, steps = None, until or 0.0, list[tuple[int, float]]()
    with suppress(OSError):
        path = next(iter(event_files(run_dir).values()), None)
        for event in read_events(path) if path and path.lstat().st_size <= MOST_EVENT_BYTES else ():
            if isinstance(event, Started | RolledBack):
                start_step = event.start_step if isinstance(event, Started) else event.to
                while steps and steps[-1][0] > start_step:  # they are repeated
                    steps.pop()
            if isinstance(event, Step):
                steps.append((event.step, sum(event.phase_seconds.get(phase, 0.0) for phase in PHASES)))
            if isinstance(event, Started | Step):
                first, last = event.unix_time if first is None else first, max(last, event.unix_time)
    if first is None or not steps or last <= first:
        return None
    return min(1.0, sum(seconds for _, seconds in steps) / (last - first))
