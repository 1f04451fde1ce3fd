"""How a run went: what happened beside its steps, whether it learned, what broke it, and where its hours went."""

import math
from collections.abc import Iterable, Sequence
from statistics import median

from paceline.errors import ExitCode
from paceline.report.figures import COLOURS, Figure
from paceline.report.run import WholeRun
from paceline.runs.console import clean
from paceline.runs.events import Checkpointed, Ended, Evaluated, Notice, RolledBack, Skipped
from paceline.runs.summary import scores_line

SHORT_SECONDS = 2.0  # of a run over so soon there is nothing to draw
MOST_MARKS = 256  # of a kind
FEW = 10  # steps: of fewer, nothing can be said
FELL = 0.98  # of what it was at first: less has fallen
REMEDIES = {
    ExitCode.NOT_FINITE: "The learning rate was {lr:g}: try a lower one, --clip-norm 1, or look at the samples that "
    "are named here; --not-finite skip leaves such steps out",
    ExitCode.STALLED: "The verdict further down names the rank and its line: start there",
    ExitCode.MISMATCH: "Ranks have called different collectives: the verdict below names the lines",
    ExitCode.DIVERGED: "Replicas have drifted apart: look at the machine that is named below, its memory first",
}


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


def learned(run: WholeRun) -> str:
    """Whether the loss has fallen, and what it has reached, in a sentence; empty where there are no steps."""
    if not (first := run.first) or not first.rows:
        return ""
    losses = [loss for row in first.rows if math.isfinite(loss := first.steps.loss[row])]
    scores = run.summary.test_metrics if run.summary else None
    reached = f"; test {scores_line(scores)}" if scores else ""
    if len(losses) < FEW:
        return f"Training loss {losses[-1]:.4g} after {len(first.rows)} steps{reached}." if losses else ""
    tenth = max(3, len(losses) // 10)
    before, after = median(losses[:tenth]), median(losses[-tenth:])
    fell = "" if after < FELL * before else ": it did not fall"
    return f"Training loss {before:.4g} to {after:.4g} in {len(first.rows):,} steps{fell}{reached}."


def started_again(run: WholeRun) -> str:
    """That it was started more than once, and from where it went on; empty where it was not."""
    again = run.first.started[1:] if run.first else []
    if not again:
        return ""
    steps = ", ".join(f"{start.start_step:,}" for start in again[:5])
    times = "once" if len(again) == 1 else f"{len(again)} times"
    return f"It was started again {times}, and went on after step {steps}."


def breakdowns(run: WholeRun) -> list[tuple[str, str]]:
    """Who failed and of what; not those that only lost another rank."""
    found = [one for one in run.failures if not one.victim] or run.failures
    return [(f"rank {one.rank} ({clean(one.host)})", clean(one.message or one.type)) for one in found[:20]]


def remedy(run: WholeRun) -> list[str]:
    """What to try after a failure."""
    code = run.failures[0].exit_code if run.failures else run.summary.exit if run.summary else 0
    text = REMEDIES.get(ExitCode(code)) if code in {*ExitCode} else None
    if text is None:
        return [f"Read what the ranks said last: paceline logs {run.name}"] if run.state in ("failed", "lost") else []
    rates = run.first.steps.lr if run.first else None
    return [text.format(lr=rates[-1] if rates else math.nan)]
