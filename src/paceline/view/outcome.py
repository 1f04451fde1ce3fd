"""How a run went, apart from its speed: whether it learned, what broke it, and what to do about that."""

import math
from statistics import median

from paceline.errors import ExitCode
from paceline.observe.summary import scores_line
from paceline.observe.terminal import clean
from paceline.view.run import WholeRun

FEW = 10  # steps: of fewer, nothing can be said
FELL = 0.98  # of what it was at first: less has fallen
REMEDIES = {
    ExitCode.NOT_FINITE: "The learning rate was {lr:g}: try a lower one, --clip-norm 1, or look at the samples that "
    "are named here; --not-finite skip leaves such steps out",
    ExitCode.STALLED: "The verdict further down names the rank and its line: start there",
    ExitCode.MISMATCH: "Ranks have called different collectives: the verdict below names the lines",
    ExitCode.DIVERGED: "Replicas have drifted apart: look at the machine that is named below, its memory first",
}


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
