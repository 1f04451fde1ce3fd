"""The state of a run: its summary.json, the state that commands print, and its scores (no torch here)."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from paceline.runs import writing
from paceline.runs.events import Count, Seconds
from paceline.runs.reading import read_json_if_readable


class Summary(msgspec.Struct, frozen=True, omit_defaults=True):
    """The summary, written once at the end of a run. For a failed run, fields may be missing, and `exit` is not 0."""

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
    best: dict[str, Any] | None = None  # the step and scores of the best evaluation (with --keep-best or --patience)
    ended_early: str | None = None  # the reason for fewer steps than planned, without a failure
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
    """The fraction of step time spent waiting for data, on the rank with the longest wait."""
    peak_memory_bytes: Count | None = None  # the largest resident memory of any rank
    peak_gpu_memory_bytes: Count | None = None
    bits_hold_for: dict[str, Any] | None = None
    failure: str | None = None


State = Literal["not started", "queued", "running", "done", "saved", "failed", "cancelled", "lost", "unknown"]

LIVE_STATES = ("queued", "running")


class StatusReport(msgspec.Struct, frozen=True, kw_only=True):
    """The output of `paceline status --json`, and of `paceline runs --json` for each run."""

    run_dir: str
    state: State
    words: str = ""  # more about the state
    on: str = "local"
    hosts: tuple[str, ...] = ()
    nodes: str = ""  # if hosts can join and leave: the state of each
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
    epochs: float | None = None  # completed
    metrics: dict[str, float | None] = {}  # the newest; null: not finite
    found: tuple[str, ...] = ()  # the agent's findings in the newest start: a slow rank, replicas that drift
    unix_time: float = 0.0  # of the last write

    @property
    def name(self) -> str:
        return Path(self.run_dir).name


def write_summary(run_dir: Path, summary: Summary) -> None:
    encoded = msgspec.json.format(msgspec.json.encode(msgspec.to_builtins(summary)), indent=2) + b"\n"
    writing.replace_file(run_dir / "summary.json", encoded)


def read_summary(run_dir: Path) -> Summary | None:
    return read_json_if_readable(run_dir / "summary.json", Summary)


def format_metrics(metrics: Mapping[str, float | None]) -> str:
    """'loss 0.0372  accuracy 98.72%'."""
    scores = {name: math.nan if value is None else value for name, value in metrics.items()}
    return "  ".join(f"{name} {v:.2%}" if name == "accuracy" else f"{name} {v:.4f}" for name, v in scores.items())


def finite_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    """The finite scores, because JSON has no NaN or infinity."""
    return {name: score for name, score in metrics.items() if math.isfinite(score)}
