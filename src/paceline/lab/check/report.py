"""The report of `launch --check`: the mistakes of a script, with its line and the code to type instead."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from typing import NamedTuple

import msgspec

from paceline.lab.check.data_rules import data_findings
from paceline.lab.check.findings import LEVELS, Level, Remark
from paceline.lab.check.step_rules import joint_steps, session_findings, step_findings
from paceline.protocol.facts import ScriptFacts
from paceline.runs.attempt import ScriptNotice

WIDTH = 110


class Kind(NamedTuple):
    """How a report of one kind counts."""

    level: Level
    type_instead: str = ""
    explained_by: frozenset[str] = frozenset()  # rules: a finding of one of these is the cause, and is enough


KINDS = {
    "diverged": Kind(
        "wrong",
        "the same number of steps on all ranks; weights and optimizer settings that no rank changes alone",
        frozenset({"gradients", "different start", "replicas", "uneven steps"}),
    ),
    "mismatch": Kind(
        "wrong", "the same collectives in the same order on all ranks", frozenset({"uneven steps", "swallowed"})
    ),
    "not finite": Kind("wrong", "if not torch.isfinite(loss): raise; then correct the batch or the rate that is named"),
    "swallowed": Kind("wrong", "raise, or correct the cause: a batch must be left out on all ranks or on none"),
    "thread": Kind("wrong", "correct the error that ends this thread"),
    "stale": Kind("wrong", "the same steps on all ranks, each with a batch and a backward() of its own"),
    "few steps": Kind(
        "wrong", "the same number of batches on each rank: DistributedSampler", frozenset({"uneven steps"})
    ),
    "shadowed": Kind("note"),  # epochs are cut, and Join is meant for ranks with fewer batches
    "slow": Kind("note"),  # depends on what else the machine does
    "left": Kind("note"),
    "round-off": Kind("note"),
}
OTHER = Kind("wrong")


def judged(ranks: Sequence[ScriptFacts], noted: Sequence[ScriptNotice] = ()) -> list[Remark]:
    """All findings, what is wrong first; `noted` is what was reported while the script ran.

    A rule says one thing of a line, the worst: several loaders, replicas or optimizers may come from there.
    """
    found: dict[tuple[str, str], Remark] = {}
    in_session = any(facts.session for facts in ranks)
    for one in session_findings(ranks) if in_session else (*data_findings(ranks), *step_findings(ranks)):
        said = found.setdefault((one.rule, one.site), one)
        if LEVELS.index(one.level) < LEVELS.index(said.level):
            found[one.rule, one.site] = one
    wrong = {one.rule for one in found.values() if one.level == "wrong"}
    # DDP sends buffers only after a forward that it reduces; a schedule over the loader's length follows that length
    follows = {"batch norm"} if wrong & {"gradients", "last window", "replicas"} else set[str]()
    follows |= {"replicas"} if "uneven steps" in wrong else set[str]()
    told = [msgspec.structs.replace(one, level="note") if one.rule in follows else one for one in found.values()]
    told += _run_findings(noted, wrong)
    return sorted(told, key=lambda one: LEVELS.index(one.level))


def _run_findings(noted: Sequence[ScriptNotice], wrong: AbstractSet[str]) -> Iterator[Remark]:
    """One finding for each report on the script; `wrong` are the rules that found a mistake."""
    reported = wrong | {one.kind for one in noted}
    for one in noted:
        if not one.kind:
            continue
        kind = KINDS.get(one.kind, OTHER)
        level = "note" if kind.explained_by & reported else kind.level
        yield Remark(one.kind, level, one.words, "", kind.type_instead if level == "wrong" else "")


def mistakes(findings: Sequence[Remark]) -> int:
    """How many of them count."""
    return sum(one.level in ("wrong", "costs") for one in findings)


def script_page(script: str, ranks: Sequence[ScriptFacts], findings: Sequence[Remark], code: int = 0) -> str:
    """In words; `code` is the exit code of the script."""
    number = {level: sum(one.level == level for one in findings) for level in LEVELS}
    steps = max((len(joint_steps(facts)) for facts in ranks), default=0)
    found = f"{number['wrong']} wrong, {number['costs']} slower than need be" if mistakes(findings) else "nothing wrong"
    if code:
        found = f"not complete, the script ended with exit code {code}" + (f"; {found}" if mistakes(findings) else "")
    lines = [f"CHECK {script}, {ranks[0].world} ranks, {steps} steps: {found}"]
    for one in findings:
        if one.level == "right":
            lines.append(f"right  {one.words}" + (f" ({one.site})" if one.site else ""))
            continue
        lines += ["", *textwrap.wrap(f"{one.level.upper():6} {one.words}", WIDTH, subsequent_indent=" " * 7)]
        for label, words in (("at", one.site), ("seen", one.seen), ("type", one.type_instead)):
            first, *snippet = words.split("\n")
            if words:
                lines += textwrap.wrap(f"{label}: {first}", WIDTH, initial_indent=" " * 7, subsequent_indent=" " * 9)
            lines += [" " * 9 + line for line in snippet]  # is copied: never wrapped
    first_right = next((n for n, line in enumerate(lines) if line.startswith("right")), None)
    if first_right is not None:
        lines.insert(first_right, "")
    return "\n".join(lines)
