"""The report of `launch --check`: the mistakes of a script, with the line and the fix."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from typing import NamedTuple

import msgspec

from paceline.lab.check.data_rules import data_findings
from paceline.lab.check.findings import LEVELS, Finding, Level
from paceline.lab.check.step_rules import session_findings, step_findings, synced_steps
from paceline.protocol.facts import ScriptFacts
from paceline.runs.attempt import ScriptNotice

WIDTH = 110


class NoticeFindingTemplate(NamedTuple):
    level: Level
    fix: str = ""
    explained_by: frozenset[str] = frozenset()  # a finding of one of these rules is the cause, and is sufficient


NOTICE_RULES = {
    "diverged": NoticeFindingTemplate(
        "wrong",
        "the same number of steps on all ranks; do not change weights or optimizer settings on one rank only",
        frozenset({"gradients", "different start", "replicas", "uneven steps"}),
    ),
    "mismatch": NoticeFindingTemplate(
        "wrong", "the same collectives in the same order on all ranks", frozenset({"uneven steps", "swallowed"})
    ),
    "not finite": NoticeFindingTemplate(
        "wrong", "if not torch.isfinite(loss): raise; then correct the reported batch or rate"
    ),
    "swallowed": NoticeFindingTemplate("wrong", "raise, or correct the cause: skip a batch on all ranks or on none"),
    "thread": NoticeFindingTemplate("wrong", "correct the error that ends this thread"),
    "stale": NoticeFindingTemplate("wrong", "the same steps on all ranks, each with a batch and a backward()"),
    "few steps": NoticeFindingTemplate(
        "wrong", "the same number of batches on each rank: DistributedSampler", frozenset({"uneven steps"})
    ),
    # --check shortens epochs, Join supports ranks with fewer batches, and speed depends on other load of the machine
    **dict.fromkeys(("shadowed", "slow", "left", "round-off"), NoticeFindingTemplate("note")),
}


def collect_findings(ranks: Sequence[ScriptFacts], notices: Sequence[ScriptNotice] = ()) -> list[Finding]:
    """All findings, the worst level first; `notices` are those that paceline reported while the script ran.

    A rule reports only its worst finding for a line: several loaders, replicas or optimizers may come from there.
    """
    worst: dict[tuple[str, str], Finding] = {}
    in_session = any(facts.session for facts in ranks)
    for finding in session_findings(ranks) if in_session else (*data_findings(ranks), *step_findings(ranks)):
        current = worst.setdefault((finding.rule, finding.site), finding)
        if LEVELS.index(finding.level) < LEVELS.index(current.level):
            worst[finding.rule, finding.site] = finding
    wrong_rules = {finding.rule for finding in worst.values() if finding.level == "wrong"}
    # DDP sends buffers only after a forward that it reduces; a schedule over the loader's length follows that length
    dependent_rules = {"batch norm"} if wrong_rules & {"gradients", "last window", "replicas"} else set[str]()
    dependent_rules |= {"replicas"} if "uneven steps" in wrong_rules else set[str]()
    findings = [msgspec.structs.replace(f, level="note") if f.rule in dependent_rules else f for f in worst.values()]
    findings += _notice_findings(notices, wrong_rules)
    return sorted(findings, key=lambda finding: LEVELS.index(finding.level))


def _notice_findings(notices: Sequence[ScriptNotice], wrong_rules: AbstractSet[str]) -> Iterator[Finding]:
    reported = wrong_rules | {notice.kind for notice in notices}
    for notice in notices:
        if not notice.kind:
            continue
        rule = NOTICE_RULES.get(notice.kind, NoticeFindingTemplate("wrong"))
        level = "note" if rule.explained_by & reported else rule.level
        yield Finding(notice.kind, level, notice.words, "", rule.fix if level == "wrong" else "")


def count_mistakes(findings: Sequence[Finding]) -> int:
    return sum(finding.level in ("wrong", "costs") for finding in findings)


def render_report(script: str, ranks: Sequence[ScriptFacts], findings: Sequence[Finding], code: int = 0) -> str:
    counts = {level: sum(finding.level == level for finding in findings) for level in LEVELS}
    steps = max((len(synced_steps(facts)) for facts in ranks), default=0)
    mistakes = f"{counts['wrong']} wrong, {counts['costs']} slower than necessary" if count_mistakes(findings) else ""
    result = mistakes or "nothing wrong"
    if code:
        result = f"incomplete, the script ended with exit code {code}" + (f"; {mistakes}" if mistakes else "")
    lines = [f"CHECK {script}, {ranks[0].world} ranks, {steps} steps: {result}"]
    for finding in findings[: len(findings) - counts["right"]]:  # sorted by level, "right" is the last
        lines += ["", *textwrap.wrap(f"{finding.level.upper():6} {finding.words}", WIDTH, subsequent_indent=" " * 7)]
        for label, text in (("at", finding.site), ("seen", finding.seen), ("fix", finding.type_instead)):
            first, *snippet = text.split("\n")
            if text:
                lines += textwrap.wrap(f"{label}: {first}", WIDTH, initial_indent=" " * 7, subsequent_indent=" " * 9)
            lines += [" " * 9 + line for line in snippet]  # code to copy is never wrapped
    right = [f"right  {f.words}" + (f" ({f.site})" if f.site else "") for f in findings if f.level == "right"]
    return "\n".join([*lines, *([""] if right else []), *right])
