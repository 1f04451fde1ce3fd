"""The tables of a run's page: results, what differs, who holds how much, which samples were used, how to repeat it."""

import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import mean
from typing import Any

from paceline.errors import plural
from paceline.observe.summary import Summary, scores_line
from paceline.observe.terminal import clean, clock
from paceline.observe.utilization import arithmetic, goodput
from paceline.view.happened import wall
from paceline.view.run import WholeRun
from paceline.view.why import sent_bytes
from paceline.view.words import time_words

MOST_ROWS, MOST_CELL = 500, 300
KINDS = ("weights", "gradients", "optimizer")
HOLDS = {  # which part of weights, gradients and optimizer state a rank of N has (docs/memory.md); 1: all
    "all on every rank": (False, False, False), "zero": (False, True, True), "fsdp": (True, True, True),
}  # fmt: skip


@dataclass(frozen=True)
class Table:
    """One table; cells are words."""

    title: str
    head: Sequence[str]
    rows: list[list[str]] = field(default_factory=list[list[str]])
    words: str = ""
    numbers: bool = False  # all but the first column are
    folded: bool = False  # shown when it is asked for


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    text = f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else clean(str(value))
    return text if len(text) <= MOST_CELL else f"{text[: MOST_CELL - 3]}..."


def results(runs: Sequence[WholeRun]) -> list[Table]:
    """What each run is, and what it reached: a column each."""
    columns = [_result(run) for run in runs]
    names = [*dict.fromkeys(name for column in columns for name in column)]
    rows = [[name, *(_cell(column.get(name)) for column in columns)] for name in names]
    return [Table("Results", ["what", *(run.name for run in runs)], rows)]


def _result(run: WholeRun) -> dict[str, Any]:
    summary, first, newest = run.summary or Summary("", 0), run.first, run.newest
    rows = first.rows if first else []
    step = first.steps.step[rows[-1]] if first and rows else summary.steps
    an_epoch = newest.steps_per_epoch if newest else 0
    planned = run.settings.get("steps") or (run.settings.get("epochs") or 0) * an_epoch
    hosts, rate = len({*run.hosts.values()}), summary.samples_per_second
    flops, good = summary.flops_per_sample, summary.goodput or goodput(run.folder)
    seconds = sum(wall(run).values()) or summary.seconds
    found: dict[str, Any] = {
        "task": str(run.settings.get("task") or summary.task).rpartition("/")[2],
        "ranks": f"{run.world_size}{f' on {hosts} hosts' if hosts > 1 else ''}" if run.world_size else None,
        "device": newest.device if newest else None, "strategy": run.strategy,
        "steps": f"{step:,}{f' of {planned:,}' if planned and planned != step else ''}" if step else None,
        "epochs": f"{step / an_epoch:.3g}" if step and an_epoch else None,
        "test": scores_line(summary.test_metrics or {}),
        "last training loss": f"{first.steps.loss[rows[-1]]:.4f}" if first and rows else None,
        "global batch": summary.global_batch or run.settings.get("global_batch"),
        "optimizer": run.settings.get("optimizer"), "learning rate": run.settings.get("lr"),
        "samples/s": f"{rate:,.0f}" if rate else None,
        "tokens/s": f"{summary.tokens_per_second:,.0f}" if summary.tokens_per_second else None,
        "MFU": f"{summary.mfu:.1%}" if summary.mfu else None,
        "FLOP/s": arithmetic(rate or 0, flops or 0, summary.peak_tflops or 0, summary.devices or 0),
        "goodput": f"{good:.1%}" if good else None,
        "took": time_words(seconds) if seconds else None,
        "began": clock(first.started[0].unix_time, "%Y-%m-%d %H:%M") if first else None,
        "peak memory": f"{summary.peak_memory_bytes / 1e9:.2f} GB a rank" if summary.peak_memory_bytes else None,
    }  # fmt: skip
    return {name: value for name, value in found.items() if value}


def setting_differences(runs: Sequence[WholeRun]) -> Iterable[Table]:
    """The settings that are not the same in all runs."""
    names = [*dict.fromkeys(name for run in runs for name in run.settings)]
    told = [[name, *(_cell(run.settings.get(name)) for run in runs)] for name in names]
    rows = [row for row in told if len({*row[1:]}) > 1]
    words = "" if rows else "All settings are the same."
    yield Table("What differs in the settings", ["setting", *(run.name for run in runs)], rows[:MOST_ROWS], words)


def settings_tables(run: WholeRun) -> Iterable[Table]:
    """All settings, and what they ran on."""
    for title, head, found in (("All settings", "setting", run.settings), ("What it ran on", "what", run.environment)):
        if found:
            rows = [[_cell(name), _cell(value)] for name, value in found.items()]
            yield Table(title, [head, "value"], rows[:MOST_ROWS], folded=True)


def repeat(run: WholeRun) -> str:
    """The command that repeats the run."""
    folder, versions = shlex.quote(str(run.folder)), run.environment
    known = [name for name in ("paceline", "torch", "python") if name in versions]
    about = ", ".join(f"{name} {clean(str(versions[name]))[:60]}" for name in known)
    sha256 = run.summary.weights_sha256 if run.summary else None
    digest = f"\n# weights: sha256 {clean(sha256)}" if sha256 else ""
    command = f"paceline train --config {folder}/config.toml --run-dir runs/again"
    if (task := str(run.settings.get("task", ""))) == "session" or task.endswith(".py"):  # `train` starts no script
        command = f"paceline status {folder}"
    return f"{command}\n# {about or 'versions are not known'}{digest}"


def time_spent(run: WholeRun) -> Iterable[Table]:
    """Where the hours of the clock went."""
    found = wall(run)
    if (total := sum(found.values())) > 0:
        rows = [[name, time_words(seconds), f"{seconds / total:.1%}"] for name, seconds in found.items() if seconds > 0]
        yield Table("Where the whole run's time went", ["what", "time", "share"], rows, numbers=True)


def exchange(run: WholeRun) -> Iterable[Table]:
    """What ranks exchange in a step: bytes, how often, how long, and how much of it while backward computes."""
    log = run.first
    traced = [*log.traced.values()][-100:] if log else []
    calls: dict[str, list[tuple[float, float, int, float]]] = {}
    for one in traced:
        backward = next(((at, at + lasts) for name, at, lasts in one.phases if name == "backward"), (0.0, 0.0))
        for name, at, lasts, size in one.calls:
            over = max(0.0, min(at + lasts, backward[1]) - max(at, backward[0])) if lasts > 0 else 0.0
            calls.setdefault(name, []).append((at, max(0.0, lasts), size, over))
    rows: list[list[str]] = []
    for name, each in [*calls.items()][:MOST_ROWS]:
        _, lasts, size, over = (mean(column) for column in zip(*each, strict=True))
        speed = f"{size / lasts / 1e6:,.0f}" if lasts > 0 and size > 1e4 else ""
        hidden = f"{over / lasts:.0%}" if lasts > 0 else "-"
        rows.append(
            [_cell(name), f"{len(each) / len(traced):.3g}", f"{size / 1e6:,.3f}", f"{1e3 * lasts:,.2f}", speed, hidden]
        )
    size = sent_bytes(run)
    if rows:
        words = (
            "A collective is a call in which all ranks take part. Times include waiting for a late rank. The gradients "
            f"of a step are {size / 1e6:,.2f} MB on a rank."
        )
        head = ["collective", "times a step", "MB", "ms", "MB/s", "overlapped with backward"]
        yield Table("What ranks exchange in a step", head, rows, words, numbers=True)


def held(run: WholeRun) -> Iterable[Table]:
    """What a rank holds, by kind, and what it would hold under strategies that share it out."""
    anatomy = run.first.anatomy if run.first else None
    if anatomy is None:
        return
    size, own = run.world_size, (anatomy.weight_bytes, anatomy.gradient_bytes, anatomy.optimizer_bytes)
    shared = HOLDS.get(run.strategy, (False, False, False))
    whole = [b * (size if is_shared else 1) for b, is_shared in zip(own, shared, strict=True)]
    rows = [["this run", *(f"{b / 1e6:,.2f}" for b in own), f"{sum(own) / 1e6:,.2f}"]]
    for name, parts in HOLDS.items():
        each = [b / (size if is_shared else 1) for b, is_shared in zip(whole, parts, strict=True)]
        rows.append([name, *(f"{b / 1e6:,.2f}" for b in each), f"{sum(each) / 1e6:,.2f}"])
    words = (
        f"MB of tensors on each of {plural(size, 'rank')} between two steps: counted in the first row, "
        "computed in the others. zero shares out gradients and optimizer state, fsdp the weights, too. Not counted: "
        "activations and libraries."
    )
    yield Table("What a rank holds", ["strategy", *KINDS, "together"], rows, words, numbers=True)


def ledger(run: WholeRun) -> Iterable[Table]:
    """How many samples each epoch has used, over all ranks."""
    used: dict[int, list[int]] = {}
    for log in run.ranks.values():
        for row in log.rows:
            one = used.setdefault(log.steps.epoch[row], [0, 0])
            one[0] += log.steps.consumed[row]
    if run.first:
        for row in run.first.rows:
            used[run.first.steps.epoch[row]][1] += 1
    of = run.newest.num_samples if run.newest else 0
    rows = [[f"{epoch + 1}", f"{steps:,}", f"{samples:,}", f"{of:,}" if of else "-"]
            for epoch, (samples, steps) in sorted(used.items())]  # fmt: skip
    if rows:
        thrown = run.first.thrown_away if run.first else 0
        words = f"{thrown:,} steps were thrown away, and taken again. " if thrown else ""
        words += f"To prove that none was used twice: paceline ledger {run.name}"
        yield Table("Samples used", ["epoch", "steps", "samples used", "of"], rows[:MOST_ROWS], words, numbers=True)


def moments(found: Sequence[tuple[float, str, str]]) -> Iterable[Table]:
    """What happened beside steps, in order."""
    rows = [[time_words(max(0.0, at)), kind, words] for at, kind, words in found]
    if len(rows) > MOST_ROWS:
        half = MOST_ROWS // 2
        rows = [*rows[:half], ["", "", f"{len(rows) - MOST_ROWS:,} more are left out here"], *rows[-half:]]
    if rows:
        yield Table("Event list", ["after", "what", "in words"], rows, folded=len(rows) > 40)
