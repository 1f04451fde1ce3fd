"""The lines and cells of `paceline watch`; `watch_app` draws them."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from rich.text import Text

from paceline.report.live import RankNow, RunNow
from paceline.runs.console import format_duration, format_size, one_line, sparkline
from paceline.runs.machine import GpuUse
from paceline.runs.summary import LIVE, RunState
from paceline.runs.utilization import format_speed

STILL_SECONDS = 5.0  # below it a rank moves
WAITS_LITTLE = 0.02
PHASE_STYLES = {"sync": "yellow", "data": "magenta", "evaluate": "cyan", "checkpoint": "cyan", "init": "dim"}
STATE_STYLES = {"running": "cyan", "queued": "cyan", "done": "green", "saved": "yellow", "failed": "red", "lost": "red"}


def title(standing: RunState) -> Text:
    """The run and its state."""
    text = Text(one_line(standing.name, 60), "bold")
    words = [one_line(word, 40) for word in (Path(standing.task).name, standing.strategy) if word]
    ranks = f"{standing.world_size} ranks" if standing.world_size else ""
    text.append("  " + "  ".join(word for word in (*words, ranks) if word), "not bold")
    text.append(f"  {one_line(standing.state, 20)}", STATE_STYLES.get(standing.state, ""))
    if standing.words:
        text.append(f": {one_line(standing.words, 200)}", "not bold")
    return text


def progress(now: RunNow, standing: RunState, width: int = 0) -> Text:
    """Step, loss, speed and scores; with a curve of the loss if `width` has room for it."""
    step = now.step if now.step is not None else standing.step
    parts: list[str] = []
    if step is not None:
        parts.append(f"step {step:,}" + (f" of {standing.total_steps:,}" if standing.total_steps else ""))
    elif now.ranks:
        parts.append(f"{sum(not one.ended for one in now.ranks)} of {len(now.ranks)} ranks run")
    if now.losses:
        parts.append(f"loss {now.losses[-1]:.4g}")
    running = standing.state == "running"
    if now.samples_per_second and running:
        parts.append(f"{now.samples_per_second:,.0f} samples/s")
        parts += format_speed(standing)
    if now.steps_per_second and running and standing.total_steps and step is not None:
        parts.append(f"{format_duration(max(0, standing.total_steps - step) / now.steps_per_second)} left")
    saved = now.saved_step if now.saved_step is not None else standing.checkpoint_step
    if saved is not None:
        parts.append(f"saved at {saved:,}")
    scores = islice(standing.metrics.items(), 2)
    parts += [f"test {one_line(name, 20)} {score:.4g}" for name, score in scores if score is not None]
    while width and len(parts) > 1 and len("  ".join(parts)) > width:
        parts.pop()
    line = "  ".join(parts)
    room = min(60, width - len(line) - 9)
    if room >= 10 and len(now.losses) > 1:
        line += f"  loss {sparkline(now.losses, room)}"
    return Text(line)


def footnote(now: RunNow, *, may_act: bool) -> Text:
    """The slow rank, problems of the machines, and the source of the numbers."""
    said = [now.words] if now.words else []
    for node, machine in sorted(now.machines.items()):
        held = [f"GPU {gpu.index} {gpu.held_back}" for gpu in machine.gpus if gpu.held_back]
        if held:
            said.append(f"node {node} ({one_line(machine.host, 30)}): {one_line('; '.join(held), 80)}")
        if machine.memory_total_bytes and machine.memory_bytes > 0.95 * machine.memory_total_bytes:
            said.append(f"node {node} ({one_line(machine.host, 30)}): its memory is full")
    if not now.live:
        said.append("each rank's last step, as it has written it down" if may_act else "not yours: only looked at")
    return Text("  ·  ".join(said), "yellow" if now.words else "dim")


@dataclass(frozen=True)
class Column:
    """A column of the table."""

    title: str
    cell: Callable[[RankNow], Text]
    right: bool = False
    least_width: int = 0  # of the terminal, in which it is shown


def _name(one: RankNow) -> Text:
    return Text(f"{'▶' if one.slowest else ' '}{one.rank}", "bold yellow" if one.slowest else "")


def _phase(one: RankNow) -> Text:
    if one.ended:
        return Text(one_line(one.ended, 12), "green" if one.ended == "done" else "bold red")
    return Text(one_line(one.phase, 12), PHASE_STYLES.get(one.phase, ""))


def _work(one: RankNow) -> Text:
    return Text(format_duration(one.work_seconds[-1]) if one.work_seconds else "", "yellow" if one.slowest else "")


def _waits(one: RankNow) -> Text:
    if one.waits is None:
        return Text()
    return Text(f"{one.waits:.0%}" if one.waits >= WAITS_LITTLE else "-", "" if one.waits < 0.3 else "yellow")


def _still(one: RankNow) -> Text:
    still = one.still_seconds if not one.ended else 0.0
    return Text(format_duration(still) if still >= STILL_SECONDS else "", "bold red" if still > 60 else "red")


def _gpu(one: RankNow) -> Text:
    return Text("" if one.gpu is None or one.gpu.busy is None else f"{one.gpu.busy:.0%}")


def gpu_words(gpu: GpuUse) -> Text:
    """Memory, power, temperature, clock, and the reason for a reduced clock."""
    words = [
        f"{format_size(gpu.memory_bytes)} of {format_size(gpu.memory_total_bytes or 0)}" if gpu.memory_bytes else "",
        f"{gpu.watts:.0f} W" if gpu.watts is not None else "",
        f"{gpu.degrees:.0f} °C" if gpu.degrees is not None else "",
        f"{gpu.mhz:,.0f} MHz" if gpu.mhz is not None else "",
        one_line(gpu.held_back, 40),
    ]
    return Text("  ".join(word for word in words if word), "red" if gpu.held_back else "")


COLUMNS = (
    Column(" rank", _name),
    Column("host", lambda one: Text(one_line(one.host, 14))),
    Column("phase", _phase),
    Column("step", lambda one: Text(f"{one.step:,}" if one.step else ""), right=True),
    Column("own work", _work, right=True),
    Column("lately", lambda one: Text(sparkline(one.work_seconds, 12), "yellow" if one.slowest else "cyan")),
    Column("waits", _waits, right=True),
    Column("still", _still, right=True),
    Column("cores", lambda one: Text(f"{one.use.cores:.1f}" if one.use else ""), right=True),
    Column("memory", lambda one: Text(format_size(one.use.memory_bytes) if one.use else ""), right=True),
    Column("GPU", _gpu, right=True),
    Column("GPU memory, power, heat, clock", lambda one: gpu_words(one.gpu) if one.gpu else Text(), least_width=120),
)

ORDERS: tuple[tuple[str, Callable[[RankNow], tuple[float, ...]]], ...] = (
    ("rank", lambda one: (one.rank,)),
    ("slowest first", lambda one: (-(one.work_seconds[-1] if one.work_seconds else 0.0), one.rank)),
    ("who waits most", lambda one: (-(one.waits or 0.0), one.rank)),
    ("who has stood still longest", lambda one: (-one.still_seconds, one.rank)),
    ("most memory", lambda one: (-(one.use.memory_bytes if one.use else 0), one.rank)),
)


def summary_line(now: RunNow, standing: RunState) -> str:
    """The state in one plain line."""
    ranks = [one for one in now.ranks if one.still_seconds >= STILL_SECONDS and not one.ended]
    goes_on = standing.state in (*LIVE, "unknown")
    still = f"  {len(ranks)} of {len(now.ranks)} ranks stand still" if ranks and goes_on else ""
    slow = f"  {one_line(now.words, 120)}" if now.words and standing.state == "running" else ""
    return f"{title(standing).plain}  {progress(now, standing).plain}{still}{slow}"
