"""Reads from the screen, as a person would, whom a launcher blames, and for what. Pure."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks.faults.fault import Fate

from paceline.errors import ExitCode
from paceline.protocol.evidence import Diagnosis

Lines = Sequence[tuple[float, str]]


@dataclass(frozen=True)
class Said:
    """The answer that a person takes away. `seconds` on the clock of the lines; None where nothing was said."""

    end: Fate
    named: tuple[int, ...] = ()
    tie: bool = False  # these are at odds, and nobody is blamed
    seconds: float | None = None
    words: str = ""  # the first line of it, and some more


RANKS = r"ranks? (?P<ranks>\d+(?:(?:, | and |-)\d+)*)"
RELAYED = re.compile(r"^\[rank \d+\] ")  # a rank's own output
KIND = r"^(?P<kind>STALL|DIED|LEFT|MISMATCH|DEADLOCK|NETWORK)\b"  # the judge's headlines
CAUSE = re.compile(rf"{KIND}.*CAUSE: {RANKS}")
NOBODY = re.compile(rf"{KIND}.*No rank identified as the cause")
TIE = re.compile(r"^RANKS DISAGREE: ")
FAILED = re.compile(rf"^(?:{RANKS}|all (?P<all>\d+) ranks) \([^)]*\) failed: ")
LEFT = re.compile(rf"^{RANKS} \([^)]*\) had already ended, with code 0")
LOST = re.compile(rf"^it ran {RANKS};")
# where several hosts take part here, node n holds rank n
LOST_NODE = re.compile(r"(?:has lost node|^node) (?P<ranks>\d+) \([^)]*\)(?:: it has| is lost)")
SLOW = re.compile(rf"{RANKS}\b.* is slow")
# in the words of a rank that speaks for all; the first one counts
ACCUSES = re.compile(rf"{RANKS}(?: has |: samples? | called |, against the majority)")
HOLDS = re.compile(r"[0-9a-f]{12} on rank (?P<ranks>\d+\b(?:, \d+\b)*)")  # which version of a file
ENDS: dict[int | None, Fate] = {
    ExitCode.USAGE: Fate.REFUSED, ExitCode.MISMATCH: Fate.MISMATCH, ExitCode.NOT_FINITE: Fate.NOT_FINITE,
    ExitCode.DIVERGED: Fate.DIVERGED,
}  # fmt: skip
ROOT_CAUSE = "Root Cause (first observed failure)"
PAGE_LINES = 16


def said_by_paceline(lines: Lines, code: int | None, diagnosis: Diagnosis | None, pattern: str = "") -> Said:
    """What paceline said, by the screen (with the seconds at which each line came) and by the written diagnosis.

    `code` is None if the run had to be ended; `pattern` is what is to be said where no rank is to be named.
    """
    if pattern:
        return _told(lines, code, pattern)
    found = next(_answers(lines, code), None)
    if found is None:
        return Said(_unsaid(code))
    if diagnosis is not None and found.end is not Fate.SLOW:  # the same answer, without a guess at its class
        named = tuple(sorted({rank for party in diagnosis.tie for rank in party})) or diagnosis.causes
        return Said(Fate[diagnosis.kind.name], named, bool(diagnosis.tie), found.seconds, found.words)
    return found


def said_by_torchrun(lines: Lines, code: int | None, pattern: str = "") -> Said:
    """What torchrun said: the rank below its root cause."""
    if pattern:
        return _told(lines, code, pattern)
    begins = next((number for number, (_, line) in enumerate(lines) if ROOT_CAUSE in line), None)
    if begins is not None:
        below = [line for _, line in lines[begins : begins + 8]]
        ranks = [int(match[1]) for line in below if (match := re.search(r"rank +: (\d+)", line))]
        return Said(Fate.DIED, tuple(ranks[:1]), False, lines[begins][0], "\n".join(below[1:]))
    return Said(_unsaid(code))


def _told(lines: Lines, code: int | None, pattern: str) -> Said:
    for at, line in lines:
        if re.search(pattern, line):
            return Said(Fate.REFUSED if code == ExitCode.USAGE else Fate.TOLD, (), False, at, line)
    return Said(_unsaid(code))


def _answers(lines: Lines, code: int | None) -> Iterator[Said]:
    """What names somebody, in the order of the screen."""
    for number, (at, line) in enumerate(lines):
        if RELAYED.match(line):
            continue
        below = [text for _, text in lines[number : number + PAGE_LINES]]
        words = "\n".join(below)
        if match := CAUSE.search(line):
            yield Said(_class(match["kind"]), rank_numbers(match["ranks"]), False, at, words)
        elif match := NOBODY.search(line):
            yield Said(_class(match["kind"]), (), False, at, words)
        elif TIE.search(line):
            parties = tuple(sorted({rank for m in re.finditer(RANKS, line) for rank in rank_numbers(m["ranks"])}))
            yield Said(Fate.MISMATCH, parties, True, at, words)
        elif match := LEFT.match(line):
            yield Said(Fate.LEFT, rank_numbers(match["ranks"]), False, at, words)
        elif match := LOST.match(line):
            yield Said(Fate.LOST, rank_numbers(match["ranks"]), False, at, "\n".join(t for _, t in lines[number - 1 :]))
        elif match := LOST_NODE.search(line):
            yield Said(Fate.LOST, rank_numbers(match["ranks"]), False, at, words)
        elif match := FAILED.match(line):
            ranks = tuple(range(int(match["all"]))) if match["all"] else rank_numbers(match["ranks"])
            yield Said(ENDS.get(code, Fate.DIED), (_accused(words) if code in ENDS else ()) or ranks, False, at, words)
        elif match := SLOW.search(line):
            yield Said(Fate.SLOW, rank_numbers(match["ranks"]), False, at, words)


def _accused(words: str) -> tuple[int, ...]:
    """Whom a rank that speaks for all of them accuses: nobody, if it speaks of itself."""
    if parties := [rank_numbers(match["ranks"]) for match in HOLDS.finditer(words)]:
        return min(parties, key=len)
    match = ACCUSES.search(words)
    return rank_numbers(match["ranks"]) if match else ()


def _class(kind: str) -> Fate:
    """The judge's word on the page; STALL holds several classes, which only the written diagnosis tells apart."""
    return Fate.BEHIND if kind == "STALL" else Fate(kind.lower())


def _unsaid(code: int | None) -> Fate:
    return Fate.HUNG if code is None else Fate.QUIET if code == 0 else Fate.ENDED


def rank_numbers(text: str) -> tuple[int, ...]:
    """`0, 1, 3-7` and `0 and 1` as numbers."""
    found: list[int] = []
    for part in re.split(r", | and ", text):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return tuple(found)
