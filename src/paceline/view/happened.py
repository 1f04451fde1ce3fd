"""What happened in a run beside its steps, and where the hours of the clock went."""

from collections.abc import Iterable, Sequence

from paceline.observe.events import Checkpointed, Ended, Evaluated, Notice, RolledBack, Skipped
from paceline.observe.terminal import clean
from paceline.view.figures import COLOURS, Figure
from paceline.view.outcome import breakdowns
from paceline.view.run import WholeRun

SHORT_SECONDS = 2.0  # of a run over so soon there is nothing to draw
MOST_MARKS = 256  # of a kind


def happenings(run: WholeRun) -> list[tuple[float, str, str]]:
    """What happened beside steps: seconds since the beginning, kind, words; in order."""
    first = run.first
    elsewhere = min((one.unix_time for one in (*run.verdicts, *run.noted)), default=0.0)
    began = first.started[0].unix_time if first else elsewhere
    found: list[tuple[float, str, str]] = []
    for number, start in enumerate(first.started if first else ()):
        kind = "start" if not number else "restart" if start.generation else "resume"
        found.append((start.unix_time - began, kind, f"{start.world_size} ranks go on after step {start.start_step:,}"
                      if start.start_step else f"{start.world_size} ranks begin"))  # fmt: skip
    for at, event in first.told if first else ():
        match event:
            case Checkpointed():
                words = f"after step {event.step:,}: {event.failure or f'{event.size_bytes / 1e6:,.1f} MB'}"
                found.append((at - began, "checkpoint failed" if event.failure else "checkpoint", words))
            case Evaluated():
                scores = ", ".join(f"{name} {score:.4g}" for name, score in event.metrics.items())
                found.append((at - began, "evaluation", f"{event.split} after step {event.step:,}: {scores}"))
            case Skipped():
                found.append((at - began, "step left out", f"step {event.step:,}: {event.reason}"))
            case RolledBack():
                found.append((at - began, "went back", f"from step {event.step:,} to {event.to:,}"))
            case Notice():
                found.append((at - began, "notice", event.text))
            case _:
                pass
    last = max((at for at, _, _ in found), default=0.0)
    found += [(last, "failed", f"{who}: {what}") for who, what in breakdowns(run)]
    for told in run.verdicts:
        found.append((told.unix_time - began, "verdict", " ".join(told.verdict.sentences)))
    found += [(one.unix_time - began, "found", one.words) for one in run.noted]
    if (newest := run.newest) and first:
        ended = [at for at, event in first.told if isinstance(event, Ended)]
        if ended and ended[-1] >= newest.unix_time:
            found.append((ended[-1] - began, "end", run.state or "ended"))
    return [(at, kind, clean(words)[:400]) for at, kind, words in sorted(found, key=lambda one: one[0])]


def timeline(found: Sequence[tuple[float, str, str]]) -> Iterable[Figure]:
    """The same as marks over time."""
    kinds = [*dict.fromkeys(kind for _, kind, _ in found if kind != "notice")]
    traces = [
        {"name": kind, "colour": COLOURS[n % len(COLOURS)], "marks": n,
         "x0": [round(at / 60, 3) for at, k, _ in found if k == kind][:MOST_MARKS],
         "y": [kind] * min(MOST_MARKS, sum(k == kind for _, k, _ in found)),
         "text": [words[:120] for _, k, words in found if k == kind][:MOST_MARKS]}
        for n, kind in enumerate(kinds)
    ]  # fmt: skip
    if len(traces) > 1 and max(at for at, _, _ in found) > SHORT_SECONDS:
        yield Figure("timeline", "What happened when", "Starts, checkpoints, evaluations and what went wrong.", traces,
                     x="minutes", kind="marks")  # fmt: skip


def wall(run: WholeRun) -> dict[str, float]:
    """Where the hours of the clock went, in seconds: steps, evaluations, checkpoints, work thrown away, the rest."""
    if not (first := run.first) or not first.rows:
        return {}
    steps, started = first.steps, first.started
    last = max(steps.ended[first.rows[-1]], *(at for at, _ in first.told[-50:] or [(0.0, None)]))
    total, kept = last - started[0].unix_time, sum(steps.seconds[row] for row in first.rows)
    thrown = sum(steps.seconds) - kept
    evaluated = sum(event.seconds for _, event in first.of(Evaluated))
    stalls = sum(event.stall_seconds for _, event in first.of(Checkpointed))
    gaps = first.idle_seconds
    rest = total - kept - thrown - evaluated - stalls - gaps
    return {"steps": kept, "evaluations": evaluated, "checkpoints": stalls, "steps thrown away": thrown,
            "time between two starts": gaps, "start-up and other": max(0.0, rest)}  # fmt: skip
