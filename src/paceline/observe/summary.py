"""How a run goes on or has ended: by its summary.json, its agent's ended.json, and as people are told."""

import math
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from paceline.disk import writing
from paceline.disk.reading import decode
from paceline.observe.events import Count, Seconds


class Summary(msgspec.Struct, frozen=True, omit_defaults=True):
    """Written once, at the end; a run that failed has what was known by then, and `exit` is not 0."""

    task: str
    exit: Annotated[int, msgspec.Meta(ge=-255, le=255)]
    strategy: str | None = None
    world_size: Count | None = None
    virtual_ranks: Count | None = None
    global_batch: Count | None = None
    epochs: float | None = None
    steps: Count | None = None
    samples_seen: Count | None = None
    test_accuracy: float | None = None
    test_loss: float | None = None
    test_metrics: Mapping[str, float | None] | None = None  # JSON has no NaN and no infinity: null
    validation_metrics: Mapping[str, float | None] | None = None
    best: dict[str, Any] | None = None
    """with --keep-best or --patience: the best evaluation's step, and what it was judged by"""
    ended_early: str | None = None  # why there were fewer steps than planned, though nothing failed
    samples_per_second: float | None = None
    tokens_per_second: float | None = None
    flops_per_sample: float | None = None  # of forward and backward
    flops_per_second: float | None = None
    peak_tflops: float | None = None  # of one device, given or measured
    devices: Count | None = None
    mfu: float | None = None  # FLOPs per second, divided by the peak of all devices
    goodput: float | None = None  # time in steps that counted / time since the first start, over all starts
    seconds: Seconds | None = None
    weights_sha256: str | None = None
    precision: str | None = None
    threads_per_rank: Count | None = None
    allocator: str | None = None  # tuned or system; of rank 0
    data_share: float | None = None
    """the part of the time of all steps that the rank which waits most for its data has waited for them"""
    peak_memory_bytes: Count | None = None  # the largest resident memory of any rank
    peak_gpu_memory_bytes: Count | None = None
    bits_hold_for: dict[str, Any] | None = None
    failure: str | None = None


State = Literal["not started", "queued", "running", "done", "saved", "failed", "cancelled", "lost", "unknown"]

LIVE = ("queued", "running")


class RunState(msgspec.Struct, frozen=True, kw_only=True):
    """What `paceline status --json` prints, and `paceline runs --json` of each run."""

    run_dir: str
    state: State
    words: str = ""  # more about the state
    on: str = "local"
    hosts: tuple[str, ...] = ()
    nodes: str = ""  # where hosts come and go: who is in, waits, was lost
    slurm_job: str = ""
    attempts: int = 0
    step: int | None = None
    total_steps: int | None = None
    samples_per_second: float | None = None
    tokens_per_second: float | None = None
    mfu: float | None = None
    goodput: float | None = None
    checkpoint_step: int | None = None
    task: str = ""
    strategy: str = ""
    world_size: int | None = None
    epochs: float | None = None  # that are done
    metrics: dict[str, float | None] = {}  # the newest; null: not finite
    found: tuple[str, ...] = ()  # by the agent, in the newest start: a slow rank, replicas that drift
    unix_time: float = 0.0  # when it last wrote something

    @property
    def name(self) -> str:
        """Its folder's."""
        return Path(self.run_dir).name


class Ended(msgspec.Struct, frozen=True, omit_defaults=True):
    """How a start ended, by the word of node 0's agent: its exit code, and in a line what it failed of."""

    exit: Annotated[int, msgspec.Meta(ge=-255, le=255)]
    words: str = ""


def write_summary(run_dir: Path, summary: Summary) -> None:
    """Write `run_dir`/summary.json whole, or not at all."""
    encoded = msgspec.json.format(msgspec.json.encode(msgspec.to_builtins(summary)), indent=2) + b"\n"
    writing.replace(run_dir / "summary.json", encoded)


def read_summary(run_dir: Path) -> Summary | None:
    """The summary of a run; None if it has written none that can be read."""
    with suppress(OSError):
        return decode(run_dir / "summary.json", Summary)
    return None


def write_ended(attempt_dir: Path, ended: Ended) -> None:
    """Write attempt-N/ended.json: how the whole start ended, on all nodes, also of any script.

    Whole or not at all; a full disk does not change how a run ends.
    """
    with suppress(OSError):
        writing.replace(attempt_dir / "ended.json", msgspec.json.encode(ended))


def read_ended(attempt_dir: Path) -> Ended | None:
    """What `write_ended` wrote; None where the agent has written none: it still runs, or was killed."""
    with suppress(OSError):
        return decode(attempt_dir / "ended.json", Ended)
    return None


def scores_line(metrics: Mapping[str, float | None]) -> str:
    """'loss 0.0372  accuracy 98.72%'."""
    found = {name: math.nan if value is None else value for name, value in metrics.items()}
    return "  ".join(f"{name} {v:.2%}" if name == "accuracy" else f"{name} {v:.4f}" for name, v in found.items())


def finite(metrics: Mapping[str, float]) -> dict[str, float]:
    """Those that can be written down: JSON has no other numbers."""
    return {name: score for name, score in metrics.items() if math.isfinite(score)}
