"""The lines and cells of `paceline watch`; `watch_app` draws them."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from rich.text import Text

from paceline.report.live import RankSnapshot, RunSnapshot
from paceline.runs.console import format_duration, format_size, shorten, sparkline
from paceline.runs.machine import GpuUtilization
from paceline.runs.summary import LIVE_STATES, StatusReport
from paceline.runs.utilization import speed_texts

MIN_NO_PROGRESS_SECONDS = 5.0  # shorter times without progress are normal
MIN_WAITING_FRACTION = 0.02
PHASE_STYLES = {"sync": "yellow", "data": "magenta", "evaluate": "cyan", "checkpoint": "cyan", "init": "dim"}
STATE_STYLES = {"running": "cyan", "queued": "cyan", "done": "green", "saved": "yellow", "failed": "red", "lost": "red"}


def title_line(state: StatusReport) -> Text:
    text = Text(shorten(state.name, 60), "bold")
    parts = [shorten(part, 40) for part in (Path(state.task).name, state.strategy) if part]
    ranks = f"{state.world_size} ranks" if state.world_size else ""
    text.append("  " + "  ".join(part for part in (*parts, ranks) if part), "not bold")
    text.append(f"  {shorten(state.state, 20)}", STATE_STYLES.get(state.state, ""))
    if state.words:
        text.append(f": {shorten(state.words, 200)}", "not bold")
    return text


def progress_line(now: RunSnapshot, state: StatusReport, width: int = 0) -> Text:
    """Step, loss, speed and metrics, with a curve of the loss if it fits into `width`."""
    step = now.step if now.step is not None else state.step
    parts: list[str] = []
    if step is not None:
        parts.append(f"step {step:,}" + (f" of {state.total_steps:,}" if state.total_steps else ""))
    elif now.ranks:
        parts.append(f"{sum(not rank.end_description for rank in now.ranks)} of {len(now.ranks)} ranks running")
    if now.losses:
        parts.append(f"loss {now.losses[-1]:.4g}")
    running = state.state == "running"
    if now.samples_per_second and running:
        parts.append(f"{now.samples_per_second:,.0f} samples/s")
        parts += speed_texts(state)
    if now.steps_per_second and running and state.total_steps and step is not None:
        parts.append(f"{format_duration(max(0, state.total_steps - step) / now.steps_per_second)} left")
    saved = now.saved_step if now.saved_step is not None else state.checkpoint_step
    if saved is not None:
        parts.append(f"saved at {saved:,}")
    scores = islice(state.metrics.items(), 2)
    parts += [f"test {shorten(name, 20)} {score:.4g}" for name, score in scores if score is not None]
    while width and len(parts) > 1 and len("  ".join(parts)) > width:
        parts.pop()
    line = "  ".join(parts)
    room = min(60, width - len(line) - 9)
    if room >= 10 and len(now.losses) > 1:
        line += f"  loss {sparkline(now.losses, room)}"
    return Text(line)


def notes_text(now: RunSnapshot, *, may_act: bool) -> Text:
    notes = [now.slow_rank_message] if now.slow_rank_message else []
    for node, machine in sorted(now.machines.items()):
        slow_gpus = [f"GPU {gpu.index} {gpu.held_back}" for gpu in machine.gpus if gpu.held_back]
        if slow_gpus:
            notes.append(f"node {node} ({shorten(machine.host, 30)}): {shorten('; '.join(slow_gpus), 80)}")
        if machine.memory_total_bytes and machine.memory_bytes > 0.95 * machine.memory_total_bytes:
            notes.append(f"node {node} ({shorten(machine.host, 30)}): its memory is full")
    if not now.is_reported_by_agent:
        notes.append("from the recorded steps of each rank" if may_act else "run of a different user: read only")
    return Text("  ·  ".join(notes), "yellow" if now.slow_rank_message else "dim")


Cell = str | Text | tuple[str, str]  # (text, style)


@dataclass(frozen=True)
class Column:
    title: str
    make_cell: Callable[[RankSnapshot], Cell]
    is_right_aligned: bool = False
    min_terminal_width: int = 0  # of a terminal that shows the column


def _phase(rank: RankSnapshot) -> Cell:
    if rank.end_description:
        return shorten(rank.end_description, 12), "green" if rank.end_description == "done" else "bold red"
    return shorten(rank.phase, 12), PHASE_STYLES.get(rank.phase, "")


def _work(rank: RankSnapshot) -> Cell:
    duration = format_duration(rank.work_seconds[-1]) if rank.work_seconds else ""
    return duration, "yellow" if rank.is_slowest else ""


def _waiting_cell(rank: RankSnapshot) -> Cell:
    if rank.waiting_fraction is None:
        return ""
    percent = f"{rank.waiting_fraction:.0%}" if rank.waiting_fraction >= MIN_WAITING_FRACTION else "-"
    return percent, "" if rank.waiting_fraction < 0.3 else "yellow"


def _no_progress_cell(rank: RankSnapshot) -> Cell:
    still = rank.no_progress_seconds if not rank.end_description else 0.0
    return format_duration(still) if still >= MIN_NO_PROGRESS_SECONDS else "", "bold red" if still > 60 else "red"


def format_gpu_use(gpu: GpuUtilization) -> Text:
    values = [
        f"{format_size(gpu.memory_bytes)} of {format_size(gpu.memory_total_bytes or 0)}" if gpu.memory_bytes else "",
        f"{gpu.watts:.0f} W" if gpu.watts is not None else "",
        f"{gpu.degrees:.0f} °C" if gpu.degrees is not None else "",
        f"{gpu.mhz:,.0f} MHz" if gpu.mhz is not None else "",
        shorten(gpu.held_back, 40),
    ]
    return Text("  ".join(value for value in values if value), "red" if gpu.held_back else "")


COLUMNS = (
    Column(" rank", lambda rank: (f"▶{rank.rank}", "bold yellow") if rank.is_slowest else f" {rank.rank}"),
    Column("host", lambda rank: shorten(rank.host, 14)),
    Column("phase", _phase),
    Column("step", lambda rank: f"{rank.step:,}" if rank.step else "", is_right_aligned=True),
    Column("virtual", lambda rank: f"{rank.virtual_ranks or ''}", is_right_aligned=True, min_terminal_width=90),
    Column("work", _work, is_right_aligned=True),
    Column("history", lambda rank: (sparkline(rank.work_seconds, 12), "yellow" if rank.is_slowest else "cyan")),
    Column("waits", _waiting_cell, is_right_aligned=True),
    Column("still", _no_progress_cell, is_right_aligned=True),
    Column("cores", lambda rank: f"{rank.resource_use.cores:.1f}" if rank.resource_use else "", is_right_aligned=True),
    Column("memory", lambda rank: format_size(rank.resource_use.memory_bytes) if rank.resource_use else "",
           is_right_aligned=True),
    Column("GPU", lambda rank: f"{rank.gpu.busy:.0%}" if rank.gpu and rank.gpu.busy is not None else "",
           is_right_aligned=True),
    Column("GPU memory, power, heat, clock", lambda rank: format_gpu_use(rank.gpu) if rank.gpu else "",
           min_terminal_width=120),
)  # fmt: skip

ORDERS: tuple[tuple[str, Callable[[RankSnapshot], tuple[float, ...]]], ...] = (
    ("rank", lambda rank: (rank.rank,)),
    ("slowest first", lambda rank: (-(rank.work_seconds[-1] if rank.work_seconds else 0.0), rank.rank)),
    ("longest waiting", lambda rank: (-(rank.waiting_fraction or 0.0), rank.rank)),
    ("longest without progress", lambda rank: (-rank.no_progress_seconds, rank.rank)),
    ("most memory", lambda rank: (-(rank.resource_use.memory_bytes if rank.resource_use else 0), rank.rank)),
)


def summary_line(now: RunSnapshot, state: StatusReport) -> str:
    running = [rank for rank in now.ranks if not rank.end_description]
    ranks = [rank for rank in running if rank.no_progress_seconds >= MIN_NO_PROGRESS_SECONDS]
    is_live = state.state in (*LIVE_STATES, "unknown")
    still = f"  {len(ranks)} of {len(now.ranks)} ranks without progress" if ranks and is_live else ""
    slow = f"  {shorten(now.slow_rank_message, 120)}" if now.slow_rank_message and state.state == "running" else ""
    return f"{title_line(state).plain}  {progress_line(now, state).plain}{still}{slow}"
