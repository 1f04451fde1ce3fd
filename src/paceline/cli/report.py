"""`paceline report` writes an HTML report of one or several runs; `paceline trace` writes a trace for Perfetto."""

import math
import os
import shlex
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from paceline.cli import make_parser
from paceline.cli.options import resolve_output_path
from paceline.cli.run_state import find_run, newest_run, read_run_status
from paceline.errors import ExitCode, PacelineError, UsageError
from paceline.report.figures import make_diagrams
from paceline.report.page import PAGE_MARK, render_html
from paceline.report.run import PHASES, RankEvents, RunData, pick_evenly, read_run
from paceline.runs import writing
from paceline.runs.console import remove_control_characters
from paceline.runs.events import Checkpointed, Evaluated
from paceline.runs.owners import warn_if_shared
from paceline.runs.reading import is_file

MOST_RUNS, MARK_BYTES = 16, 4096
MAX_TRACE_STEPS = 4000  # of each rank in a trace, spread evenly over the run, besides the steps recorded in detail
MICROSECONDS = 1e6  # in a second


@dataclass(frozen=True)
class ReportConfig:
    """Write an HTML report: outcome, time breakdown and command to repeat a run, or a comparison of runs."""

    runs: tuple[str, ...] = ()
    """run folder, or the beginning of its name under runs/ (default: the newest there); several are compared"""
    out: Path | None = field(default=None, metadata={"short": "-o"})
    """file to write. Default: report.html in the run folder; for several runs or runs of other users, here"""
    explain: bool = False
    """add diagrams of this run: the stages of a step, one step on all ranks, the samples of each rank"""
    open: bool = False
    """show the report in a browser"""


@dataclass(frozen=True)
class TraceConfig:
    """Write a run's steps, phases and collectives as a trace for ui.perfetto.dev or chrome://tracing."""

    run: str
    """run folder, or the beginning of its name under runs/"""
    out: Path = field(default=Path("trace.json"), metadata={"short": "-o"})
    """file to write"""
    overwrite: bool = False
    """replace an existing file"""


def main(arguments: Sequence[str]) -> int:
    import webbrowser

    config: ReportConfig = make_parser("report").parse(arguments)
    if len(config.runs) > MOST_RUNS:
        raise UsageError(f"name 1 to {MOST_RUNS} runs, got {len(config.runs)}: paceline report RUN [RUN ...]")
    if config.explain and len(config.runs) > 1:
        raise UsageError("--explain draws diagrams of one run. Specify only one")
    folders = [find_run(name) for name in config.runs] or [newest_run()]
    if len({*folders}) < len(folders):
        raise UsageError("a run is specified twice. Specify each run once")
    are_foreign = [warn_if_shared(folder) for folder in folders]  # not inside `any`: it warns about each folder
    name = "report.html"
    out = config.out or (Path(name) if len(folders) > 1 or any(are_foreign) else folders[0] / name)
    out = resolve_output_path("--out", out)
    _check_out(out)
    runs = [_read(folder) for folder in folders]
    command = shlex.join(("paceline", "report", *(folder.name for folder in folders)))
    text = render_html(runs, command, make_diagrams(runs[0]) if config.explain else ())
    try:
        writing.replace_file(out, text.encode("utf-8", "replace"))
    except OSError as error:
        raise UsageError(f"{out} cannot be written: {error.strerror}. Specify a different file: -o FILE") from None
    print(remove_control_characters(f"{out}  ({len(text) / 1e6:.1f} MB, opens in any browser)"))
    if config.open and not webbrowser.open(out.as_uri()):
        raise PacelineError(f"the report is written, but this machine has no browser. Copy {out} to one that has")
    return ExitCode.DONE


def _check_out(out: Path) -> None:
    """Raise UsageError if the file exists and is not a report, to protect it from being overwritten."""
    with suppress(OSError):
        if is_file(out):
            with out.open("rb") as file:
                if PAGE_MARK.encode() not in file.read(MARK_BYTES):
                    raise UsageError(f"{out} already exists and is not a report. Pass another file")


def _read(folder: Path) -> RunData:
    run = read_run(folder)
    try:
        run.state, run.state_details, *_ = read_run_status(folder)
    except PacelineError as error:
        run.state, run.state_details = "unknown", str(error)
    return run


def trace(arguments: Sequence[str]) -> int:
    config: TraceConfig = make_parser("trace").parse(arguments)
    folder, out = find_run(config.run), resolve_output_path("--out", config.out)
    warn_if_shared(folder)
    if os.path.lexists(out) and not config.overwrite:
        raise UsageError(code="trace-exists", out=config.out)
    run = read_run(folder)
    events = [*map(msgspec.json.encode, trace_events(run))]  # as bytes: a large run has millions
    if not any(event.startswith(b'{"ph":"X"') for event in events):
        raise UsageError(code="nothing-to-trace", run=config.run)
    try:
        writing.replace_file(out, b'{"displayTimeUnit":"ms","traceEvents":[' + b",\n".join(events) + b"]}\n")
    except OSError as error:
        raise UsageError(code="trace-not-written", out=config.out, strerror=error.strerror) from None
    for missing in run.unreadable_parts:
        print(f"skipped: {missing}")
    where = f"{config.out}: open it in ui.perfetto.dev or chrome://tracing"
    print(remove_control_characters(f"{len(events):,} events written to {where}"))
    return ExitCode.DONE


def trace_events(run: RunData) -> Iterator[dict[str, Any]]:
    """All events of the trace, in no particular order.

    The format is Chrome's Trace Event Format with complete events (`X`) in microseconds. A node is a process in it, and
    a rank is a thread.
    """
    hosts = [*dict.fromkeys(run.hosts.values())]
    began = min((log.start_events[0].unix_time for log in run.ranks.values() if log.start_events), default=0.0)
    for number, host in enumerate(hosts):
        yield {"ph": "M", "name": "process_name", "pid": number, "args": {"name": remove_control_characters(host)}}
    for rank, log in run.ranks.items():
        if not log.start_events:
            continue
        host = log.start_events[-1].host
        process = {"pid": hosts.index(host) if host in hosts else len(hosts)}
        for tid, name in ((2 * rank, f"rank {rank}"), (2 * rank + 1, f"rank {rank}: collectives")):
            yield {"ph": "M", "name": "thread_name", **process, "tid": tid, "args": {"name": name}}
        for name, at, seconds, category, args in (*_step_spans(log), *_other_spans(log)):
            where = {**process, "tid": 2 * rank + (category == "collective")}
            begin, duration = ((at - began) * MICROSECONDS, max(0.0, seconds) * MICROSECONDS)
            times = {"ts": round(begin, 1), "dur": round(duration, 1)}
            label = remove_control_characters(name)[:120]
            yield {"ph": "X", "name": label, "cat": category, **where, **times, "args": args}
    for node, samples in run.machines.items():
        for sample in samples:
            counters = {"cores busy": sample.cores_busy, "memory GB": sample.memory_bytes / 1e9}
            at = round((sample.unix_time - began) * MICROSECONDS, 1)
            for name, value in counters.items():
                yield {"ph": "C", "name": name, "pid": node, "ts": at, "args": {name: value}}


Span = tuple[str, float, float, str, dict[str, Any]]
"""Name, Unix time, seconds, category, further arguments."""


def _step_spans(log: RankEvents) -> Iterator[Span]:
    steps, detailed = log.steps, set[int]()
    for step in log.traced.values():
        yield f"step {step.step}", step.unix_time, sum(seconds for _, _, seconds in step.phases), "step", {}
        for name, at, seconds in step.phases:
            yield name, step.unix_time + at, seconds, "phase", {}
        for name, at, seconds, size in step.calls:
            args = {"bytes": size, "seen to be over": seconds >= 0}
            yield name, step.unix_time + at, seconds, "collective", args
        detailed.add(step.step)
    for row in pick_evenly(log.valid_rows, MAX_TRACE_STEPS):
        if steps.step[row] in detailed:
            continue
        at, loss = steps.ended[row] - steps.seconds[row], steps.loss[row]
        yield f"step {steps.step[row]}", at, steps.seconds[row], "step", {} if math.isnan(loss) else {"loss": loss}
        for name, column in zip(PHASES, steps.phases, strict=True):
            if column[row] > 0:
                yield name, at, column[row], "phase", {}
                at += column[row]


def _other_spans(log: RankEvents) -> Iterator[Span]:
    for at, event in log.events:
        if isinstance(event, Evaluated):
            yield f"evaluation of {event.split}", at, event.seconds, "evaluation", dict(event.metrics)
        elif isinstance(event, Checkpointed):
            args = {"failure": event.failure, "bytes": event.size_bytes}
            yield f"checkpoint of step {event.step}", at, event.stall_seconds, "checkpoint", args
