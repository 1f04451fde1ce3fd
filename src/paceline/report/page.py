"""The HTML page of a run, or of several runs side by side: one file without other resources or requests."""

import base64
import hashlib
import shlex
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from importlib.resources import files
from statistics import mean
from typing import Any

import msgspec
from jinja2 import Environment
from markupsafe import Markup

from paceline.errors import plural
from paceline.report import figures, outcome
from paceline.report.figures import Diagram, Figure
from paceline.report.log_analysis import figures_from_logs
from paceline.report.outcome import Bottleneck
from paceline.report.run import RunData
from paceline.runs.console import format_duration, format_timestamp, remove_control_characters
from paceline.runs.summary import Summary, format_metrics
from paceline.runs.utilization import explain_mfu, goodput

CAUSE_COLOURS = {"computing": "blue", "waiting for data": "orange", "waiting for the slowest rank": "red",
             "the exchange": "green", "between steps": "yellow", "not explained": "grey"}  # fmt: skip
PAGE_MARK = "a page of paceline report"  # `paceline report` may overwrite files with this mark
GOOD, BAD = ("done", "saved", "running", "queued"), ("failed", "lost", "cancelled")
MAX_ROWS, MAX_CELL_CHARS = 500, 300
MEMORY_KINDS = ("weights", "gradients", "optimizer")
SHARDED_KINDS_BY_STRATEGY = {  # whether a strategy shards weights, gradients and optimizer state (docs/memory.md)
    "unsharded": (False, False, False), "zero": (False, True, True), "fsdp": (True, True, True),
}  # fmt: skip


@dataclass(frozen=True)
class Table:
    title: str
    head: Sequence[str]
    rows: list[list[str]] = field(default_factory=list[list[str]])
    caption: str = ""
    numbers: bool = False  # whether all columns except the first are numbers
    folded: bool = False  # initially collapsed


@dataclass
class Section:
    id: str
    name: str
    figures: list[Figure] = field(default_factory=list[Figure])
    tables: list[Table] = field(default_factory=list[Table])
    texts: list[str] = field(default_factory=list[str])
    codes: list[str] = field(default_factory=list[str])
    drawings: list[Diagram] = field(default_factory=list[Diagram])

    def __bool__(self) -> bool:
        return bool(self.figures or self.tables or self.texts or self.codes or self.drawings)


def render_html(runs: Sequence[RunData], command: str, drawings: Sequence[Diagram] = ()) -> str:
    """The page of one run, or the comparison of several, as HTML. `command`: what creates the page, for display."""
    bottlenecks = [outcome.find_bottleneck(run) for run in runs]
    body = [section for section in _sections(runs, bottlenecks[0], drawings) if section]
    drawn = {figure.name: asdict(figure) for section in body for figure in section.figures}
    title = _page_title(runs[0]) if len(runs) == 1 else f"{len(runs)} runs compared"
    data = msgspec.json.encode({"name": runs[0].name if len(runs) == 1 else "compared", "figures": drawn}).decode()
    plotly = (files("plotly") / "package_data" / "plotly.min.js").read_text(encoding="utf-8")
    plotly = plotly.replace("</script", "<\\/script")  # it must not end the script element
    js = _template("report.js")
    digests = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in (plotly, js)]
    hashes = " ".join(f"'sha256-{digest}'" for digest in digests)
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(_template("report.html")).render(
        policy=f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'",
        title=title, command=command, mark=PAGE_MARK,
        runs=[_header_values(run, bottleneck) for run, bottleneck in zip(runs, bottlenecks, strict=True)],
        sections=[(section.id, section.name) for section in body], body=body, css=Markup(_template("report.css")),
        data=Markup(data.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")),
        plotly=Markup(plotly), js=Markup(js),
    )  # fmt: skip


def _sections(runs: Sequence[RunData], bottleneck: Bottleneck, drawings: Sequence[Diagram]) -> list[Section]:
    run, several = runs[0], len(runs) > 1
    learning = Section("learning", "Learning", [*figures.training_curve_figures(runs)])
    speed = [figure for figure in learning.figures if figure.name == "throughput"]
    learning.figures = [figure for figure in learning.figures if figure.name != "throughput"]
    if several:
        return [
            Section("compared", "Comparison", tables=[results_table(runs), setting_differences(runs)]),
            learning,
            Section("speed", "Speed", [*speed, *figures.phase_figures(runs)]),
        ]
    events, (from_logs, sentence) = outcome.run_events(run), figures_from_logs(run)
    learning.figures += from_logs
    learning.texts = [sentence] if sentence else []
    waiting = figures.waiting_figures(run, bottleneck.parts.wait_seconds if bottleneck.parts else {})
    return [
        learning,
        Section("speed", "Speed", [*speed, *figures.phase_figures(runs), *waiting],
                [*wall_time_table(run), *collectives_table(run)]),
        Section("explained", "How it works", drawings=[*drawings],
                texts=["The times, parameters and ranks are those of this run."] if drawings else []),
        Section("memory", "Memory", tables=[*memory_by_strategy(run)]),
        Section("machines", "Machines", [*figures.device_figures(run)]),
        Section("happened", "Events", [*outcome.timeline_figures(events)], [*event_table(events)]),
        Section("samples", "Samples", tables=[*epoch_table(run)]),
        Section("repeat", "Reproduce", tables=[*settings_tables(run)],
                codes=[repeat_command(run)] if run.settings else []),
    ]  # fmt: skip


def _page_title(run: RunData) -> str:
    task = str(run.settings.get("task") or "").rpartition("/")[2]
    return f"{run.name}: {remove_control_characters(task)[:80]}" if task and task not in run.name else run.name


def _header_values(run: RunData, bottleneck: Bottleneck) -> dict[str, Any]:
    tone = "good" if run.state in GOOD else "bad" if run.state in BAD else ""
    late = bottleneck.parts.slowest if bottleneck.parts and bottleneck.parts.slow_phase == "data" else None
    names = {"waiting for data": "data", "waiting for the slowest rank": f"waiting for rank {late}'s data"}
    shares = [
        {
            "name": names.get(name, name) if late is not None else name,
            "percent": f"{share:.0%}" if share >= 0.01 else "<1%", "grow": f"{share:.4f}",
            "colour": "orange" if late is not None and "slowest" in name else CAUSE_COLOURS[name],
        }
        for name, share in bottleneck.cause_fractions.items()
        if share > 0.004
    ]  # fmt: skip
    failed = run.state in BAD
    return {
        "name": run.name, "state": run.state or "unknown", "tone": tone, "shares": shares,
        "details": "" if failed and run.failures else run.state_details,
        "failed": outcome.root_failures(run) if failed else [], "restarts": outcome.restart_summary(run),
        "learning": outcome.learning_summary(run), "bottleneck": bottleneck.summary,
        "advice": [*outcome.failure_remedies(run), *bottleneck.advice] if failed else bottleneck.advice,
        "missing": run.unreadable_parts, "tiles": [row[:2] for row in results_table([run]).rows],
        "shares_words": ", ".join(f"{share['name']} {share['percent']}" for share in shares),
    }  # fmt: skip


def _template(name: str) -> str:
    return (files("paceline.report") / "templates" / name).read_text(encoding="utf-8")


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    is_count = isinstance(value, int) and not isinstance(value, bool)
    text = f"{value:,}" if is_count else remove_control_characters(str(value))
    return text if len(text) <= MAX_CELL_CHARS else f"{text[: MAX_CELL_CHARS - 3]}..."


def results_table(runs: Sequence[RunData]) -> Table:
    columns = [_result_values(run) for run in runs]
    names = dict.fromkeys(name for column in columns for name in column)
    rows = [[name, *(_cell(column.get(name)) for column in columns)] for name in names]
    return Table("Results", ["value", *(run.name for run in runs)], rows)


def _result_values(run: RunData) -> dict[str, Any]:
    summary, first, newest = run.summary or Summary("", 0), run.first_rank_log, run.newest_start
    rows = first.valid_rows if first else []
    step = first.steps.step[rows[-1]] if first and rows else summary.steps
    an_epoch = newest.steps_per_epoch if newest else 0
    planned = run.settings.get("steps") or (run.settings.get("epochs") or 0) * an_epoch
    shares = [stop - first for log in run.newest_rank_logs() for first, stop in [log.virtual_ranks or (0, 0)]]
    hosts, rate = len({*run.hosts.values()}), summary.samples_per_second
    flops, good = summary.flops_per_sample, summary.goodput or goodput(run.folder)
    seconds = sum(outcome.wall_seconds_by_use(run).values()) or summary.seconds
    values: dict[str, Any] = {
        "task": str(run.settings.get("task") or summary.task).rpartition("/")[2],
        "ranks": f"{run.world_size}{f' on {hosts} hosts' if hosts > 1 else ''}" if run.world_size else None,
        "virtual ranks of each rank": ", ".join(map(str, shares)) if max(shares, default=0) > 1 else None,
        "device": newest.device if newest else None, "strategy": run.strategy,
        "steps": f"{step:,}{f' of {planned:,}' if planned and planned != step else ''}" if step else None,
        "epochs": f"{step / an_epoch:.3g}" if step and an_epoch else None,
        "test": format_metrics(summary.test_metrics or {}),
        "last training loss": f"{first.steps.loss[rows[-1]]:.4f}" if first and rows else None,
        "global batch": summary.global_batch or run.settings.get("global_batch"),
        "optimizer": run.settings.get("optimizer"), "learning rate": run.settings.get("lr"),
        "samples/s": f"{rate:,.0f}" if rate else None,
        "tokens/s": f"{summary.tokens_per_second:,.0f}" if summary.tokens_per_second else None,
        "MFU": f"{summary.mfu:.1%}" if summary.mfu else None,
        "FLOP/s": explain_mfu(rate or 0, flops or 0, summary.peak_tflops or 0, summary.devices or 0),
        "goodput": f"{good:.1%}" if good else None,
        "duration": format_duration(seconds) if seconds else None,
        "started": format_timestamp(first.start_events[0].unix_time, "%Y-%m-%d %H:%M") if first else None,
        "peak memory": f"{summary.peak_memory_bytes / 1e9:.2f} GB per rank" if summary.peak_memory_bytes else None,
    }  # fmt: skip
    return {name: value for name, value in values.items() if value}


def setting_differences(runs: Sequence[RunData]) -> Table:
    names = dict.fromkeys(name for run in runs for name in run.settings)
    rows = [[name, *(_cell(run.settings.get(name)) for run in runs)] for name in names]
    rows = [row for row in rows if len({*row[1:]}) > 1]
    caption = "" if rows else "All settings are the same."
    return Table("Different settings", ["setting", *(run.name for run in runs)], rows[:MAX_ROWS], caption)


def settings_tables(run: RunData) -> Iterable[Table]:
    for title, head, table in (("All settings", "setting", run.settings), ("Environment", "name", run.environment)):
        if table:
            rows = [[_cell(name), _cell(value)] for name, value in table.items()]
            yield Table(title, [head, "value"], rows[:MAX_ROWS], folded=True)


def repeat_command(run: RunData) -> str:
    folder, versions = shlex.quote(str(run.folder)), run.environment
    names = [name for name in ("paceline", "torch", "python") if name in versions]
    about = ", ".join(f"{name} {remove_control_characters(str(versions[name]))[:60]}" for name in names)
    sha256 = run.summary.weights_sha256 if run.summary else None
    digest = f"\n# weights: sha256 {remove_control_characters(sha256)}" if sha256 else ""
    command = f"paceline train --config {folder}/config.toml --run-dir runs/again"
    if (task := str(run.settings.get("task", ""))) == "session" or task.endswith(".py"):  # `train` starts no script
        command = f"paceline status {folder}"
    return f"{command}\n# {about or 'versions are unknown'}{digest}"


def wall_time_table(run: RunData) -> Iterable[Table]:
    spent = outcome.wall_seconds_by_use(run)
    if (total := sum(spent.values())) > 0:
        rows = [[name, format_duration(s), f"{s / total:.1%}"] for name, s in spent.items() if s > 0]
        yield Table("Wall time of the run", ["part", "time", "fraction"], rows, numbers=True)


def collectives_table(run: RunData) -> Iterable[Table]:
    traced = [*run.first_rank_log.traced.values()][-100:] if run.first_rank_log else []
    calls: dict[str, list[tuple[float, int, float]]] = {}
    for step in traced:
        begin, end = next(((at, at + duration) for name, at, duration in step.phases if name == "backward"), (0.0, 0.0))
        for name, at, duration, size in step.calls:
            over = max(0.0, min(at + duration, end) - max(at, begin)) if duration > 0 else 0.0
            calls.setdefault(name, []).append((max(0.0, duration), size, over))
    rows: list[list[str]] = []
    for name, occurrences in [*calls.items()][:MAX_ROWS]:
        duration, size, over = (mean(column) for column in zip(*occurrences, strict=True))
        speed = f"{size / duration / 1e6:,.0f}" if duration > 0 and size > 1e4 else ""
        overlap = f"{over / duration:.0%}" if duration > 0 else "-"
        numbers = (f"{len(occurrences) / len(traced):.3g}", f"{size / 1e6:,.3f}", f"{1e3 * duration:,.2f}")
        rows.append([_cell(name), *numbers, speed, overlap])
    if rows:
        caption = (
            "A collective is a call in which all ranks take part. Times include waiting for a late rank. The gradients "
            f"of a step have {outcome.gradient_bytes_per_rank(run) / 1e6:,.2f} MB on a rank."
        )
        head = ["collective", "calls per step", "MB", "ms", "MB/s", "overlap with backward"]
        yield Table("Collectives in a step", head, rows, caption, numbers=True)


def memory_by_strategy(run: RunData) -> Iterable[Table]:
    """The measured memory of a rank's tensors, and the computed memory with strategies that shard them."""
    memory = run.first_rank_log.memory if run.first_rank_log else None
    if memory is None:
        return
    size, measured = run.world_size, (memory.weight_bytes, memory.gradient_bytes, memory.optimizer_bytes)
    sharded = SHARDED_KINDS_BY_STRATEGY.get(run.strategy, (False, False, False))
    unsharded = [b * (size if is_sharded else 1) for b, is_sharded in zip(measured, sharded, strict=True)]
    by_strategy: dict[str, Sequence[float]] = {"this run": measured}
    for name, parts in SHARDED_KINDS_BY_STRATEGY.items():
        by_strategy[name] = [b / (size if is_sharded else 1) for b, is_sharded in zip(unsharded, parts, strict=True)]
    rows = [[name, *(f"{b / 1e6:,.2f}" for b in (*parts, sum(parts)))] for name, parts in by_strategy.items()]
    caption = (
        f"MB of tensors on each of {plural(size, 'rank')} between two steps: measured in the first row, computed in "
        "the others. zero shards gradients and optimizer state. fsdp also shards the weights. Activations and "
        "libraries are not included."
    )
    yield Table("Memory of a rank", ["strategy", *MEMORY_KINDS, "total"], rows, caption, numbers=True)


def epoch_table(run: RunData) -> Iterable[Table]:
    samples, steps = Counter[int](), Counter[int]()
    for log in run.ranks.values():
        for row in log.valid_rows:
            samples[log.steps.epoch[row]] += log.steps.consumed[row]
    if run.first_rank_log:
        steps.update(run.first_rank_log.steps.epoch[row] for row in run.first_rank_log.valid_rows)
    dataset_size = run.newest_start.num_samples if run.newest_start else 0
    rows = [[f"{epoch + 1}", f"{steps[epoch]:,}", f"{used:,}", f"{dataset_size:,}" if dataset_size else "-"]
            for epoch, used in sorted(samples.items())]  # fmt: skip
    if rows:
        discarded = run.first_rank_log.discarded if run.first_rank_log else 0
        caption = f"{discarded:,} steps were discarded and repeated. " if discarded else ""
        caption += f"To check that each sample was used once: paceline ledger {run.name}"
        yield Table("Samples used", ["epoch", "steps", "samples used", "of"], rows[:MAX_ROWS], caption, numbers=True)


def event_table(events: Sequence[tuple[float, str, str]]) -> Iterable[Table]:
    rows = [[format_duration(max(0.0, at)), kind, text] for at, kind, text in events]
    if len(rows) > MAX_ROWS:
        half = MAX_ROWS // 2
        rows = [*rows[:half], ["", "", f"{len(rows) - MAX_ROWS:,} more events"], *rows[-half:]]
    if rows:
        yield Table("Event list", ["time", "event", "description"], rows, folded=len(rows) > 40)
