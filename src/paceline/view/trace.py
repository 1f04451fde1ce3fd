"""A run as a trace that Chrome (chrome://tracing) and Perfetto (ui.perfetto.dev) show: every rank on one clock.

Format: Chrome's Trace Event Format, complete events (`X`) in microseconds; a process is a host, a thread a rank.
"""

from collections.abc import Iterator
from typing import Any

from paceline.observe.events import Checkpointed, Evaluated
from paceline.observe.terminal import clean
from paceline.view.rank_log import PHASES, RankLog
from paceline.view.run import WholeRun, thinned

MOST_STEPS = 4000  # of a rank; in a longer run, steps are left out evenly, those in detail never
MICRO = 1e6  # microseconds in a second


def trace_events(run: WholeRun) -> Iterator[dict[str, Any]]:
    """All events of the trace, in no particular order."""
    hosts = [*dict.fromkeys(run.hosts.values())]
    began = min((log.started[0].unix_time for log in run.ranks.values() if log.started), default=0.0)
    for number, host in enumerate(hosts):
        yield {"ph": "M", "name": "process_name", "pid": number, "args": {"name": clean(host)}}
    for rank, log in run.ranks.items():
        if not log.started:
            continue
        host = log.started[-1].host
        where = {"pid": hosts.index(host) if host in hosts else len(hosts), "tid": 2 * rank}
        yield {"ph": "M", "name": "thread_name", **where, "args": {"name": f"rank {rank}"}}
        yield {
            "ph": "M",
            "name": "thread_name",
            **where,
            "tid": 2 * rank + 1,
            "args": {"name": f"rank {rank}: collectives"},
        }
        for name, at, seconds, kind, args in (*_of_steps(log), *_beside_steps(log)):
            where["tid"] = 2 * rank + (kind == "collective")
            times = {"ts": round((at - began) * MICRO, 1), "dur": round(max(0.0, seconds) * MICRO, 1)}
            yield {"ph": "X", "name": clean(name)[:120], "cat": kind, **where, **times, "args": args}
    for node, found in run.machines.items():
        for one in found:
            counters = {"cores busy": one.cores_busy, "memory GB": one.memory_bytes / 1e9}
            for name, value in counters.items():
                yield {
                    "ph": "C",
                    "name": name,
                    "pid": node,
                    "ts": round((one.unix_time - began) * MICRO, 1),
                    "args": {name: value},
                }


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
    for at, event in log.told:
        if isinstance(event, Evaluated):
            yield f"evaluation of {event.split}", at, event.seconds, "evaluation", dict(event.metrics)
        elif isinstance(event, Checkpointed):
            told = {"failure": event.failure, "bytes": event.size_bytes}
            yield f"checkpoint of step {event.step}", at, event.stall_seconds, "checkpoint", told
