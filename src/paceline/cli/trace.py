"""`paceline trace RUN -o trace.json`: every rank's steps, phases and collectives on one clock, for Perfetto."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from paceline.cli.commands import command_line
from paceline.cli.finding import find_run
from paceline.cli.flags import out_path
from paceline.errors import ExitCode, UsageError
from paceline.report.run import PHASES, RankLog, WholeRun, thinned, whole_run
from paceline.runs import writing
from paceline.runs.console import clean
from paceline.runs.events import Checkpointed, Evaluated
from paceline.runs.owners import note_strangers

MOST_STEPS = 4000  # of a rank; in a longer run, steps are left out evenly, those in detail never
MICRO = 1e6  # microseconds in a second


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
    """Run `paceline trace ARGUMENTS`."""
    config: TraceConfig = command_line("trace").parse(arguments)
    folder, out = find_run(config.run), out_path("--out", config.out)
    note_strangers(folder)
    if os.path.lexists(out) and not config.overwrite:
        raise UsageError(code="trace-exists", out=config.out)
    run = whole_run(folder)
    found = [*map(msgspec.json.encode, trace_events(run))]  # as bytes: of a large run they are millions
    if not any(one.startswith(b'{"ph":"X"') for one in found):
        raise UsageError(code="nothing-to-trace", run=config.run)
    try:
        writing.replace(out, b'{"displayTimeUnit":"ms","traceEvents":[' + b",\n".join(found) + b"]}\n")
    except OSError as error:
        raise UsageError(code="trace-not-written", out=config.out, strerror=error.strerror) from None
    for words in run.missing:
        print(f"left out: {words}")
    print(clean(f"{len(found):,} events written to {config.out}: open it in ui.perfetto.dev or chrome://tracing"))
    return ExitCode.DONE


def trace_events(run: WholeRun) -> Iterator[dict[str, Any]]:
    """All events of the trace, in no particular order.

    Format: Chrome's Trace Event Format, complete events (`X`) in microseconds; a process is a host, a thread a rank.
    """
    hosts = [*dict.fromkeys(run.hosts.values())]
    began = min((log.started[0].unix_time for log in run.ranks.values() if log.started), default=0.0)
    for number, host in enumerate(hosts):
        yield {"ph": "M", "name": "process_name", "pid": number, "args": {"name": clean(host)}}
    for rank, log in run.ranks.items():
        if not log.started:
            continue
        host = log.started[-1].host
        where = {"pid": hosts.index(host) if host in hosts else len(hosts)}
        for tid, name in ((2 * rank, f"rank {rank}"), (2 * rank + 1, f"rank {rank}: collectives")):
            yield {"ph": "M", "name": "thread_name", **where, "tid": tid, "args": {"name": name}}
        for name, at, seconds, kind, args in (*_of_steps(log), *_beside_steps(log)):
            tid = 2 * rank + (kind == "collective")
            times = {"ts": round((at - began) * MICRO, 1), "dur": round(max(0.0, seconds) * MICRO, 1)}
            yield {"ph": "X", "name": clean(name)[:120], "cat": kind, **where, "tid": tid, **times, "args": args}
    for node, found in run.machines.items():
        for one in found:
            counters = {"cores busy": one.cores_busy, "memory GB": one.memory_bytes / 1e9}
            at = round((one.unix_time - began) * MICRO, 1)
            for name, value in counters.items():
                yield {"ph": "C", "name": name, "pid": node, "ts": at, "args": {name: value}}


Span = tuple[str, float, float, str, dict[str, Any]]


def _of_steps(log: RankLog) -> Iterator[Span]:
    """Steps, their phases, and of those in detail the collectives: name, unix time, seconds, kind, more."""
    steps, seen = log.steps, set[int]()
    for one in log.traced.values():
        lasts = sum(seconds for _, _, seconds in one.phases)
        yield f"step {one.step}", one.unix_time, lasts, "step", {}
        for name, at, seconds in one.phases:
            yield name, one.unix_time + at, seconds, "phase", {}
        for name, at, seconds, size in one.calls:
            yield name, one.unix_time + at, seconds, "collective", {"bytes": size, "seen to be over": seconds >= 0}
        seen.add(one.step)
    for row in thinned(log.rows, MOST_STEPS):
        if steps.step[row] in seen:
            continue
        at = steps.ended[row] - steps.seconds[row]
        told = {"loss": steps.loss[row]} if steps.loss[row] == steps.loss[row] else {}
        yield f"step {steps.step[row]}", at, steps.seconds[row], "step", told
        for name, column in zip(PHASES, steps.phases, strict=True):
            if column[row] > 0:
                yield name, at, column[row], "phase", {}
                at += column[row]


def _beside_steps(log: RankLog) -> Iterator[Span]:
    for at, event in log.events:
        if isinstance(event, Evaluated):
            yield f"evaluation of {event.split}", at, event.seconds, "evaluation", dict(event.metrics)
        elif isinstance(event, Checkpointed):
            told = {"failure": event.failure, "bytes": event.size_bytes}
            yield f"checkpoint of step {event.step}", at, event.stall_seconds, "checkpoint", told
