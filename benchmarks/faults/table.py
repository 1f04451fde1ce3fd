"""The score table: per fault who was named, how fast, and what was left; torchrun's beside it; totals."""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import get_args

from benchmarks.faults.fault import Fault
from benchmarks.faults.run import Launcher, Score
from rich.console import Console
from rich.table import Table

LAUNCHERS: tuple[Launcher, ...] = get_args(Launcher)
HEADS = ("rank", "line", "says", "verdict s", "exit s", "code", "left")


def rows(scores: Sequence[Score], faults: Mapping[str, Fault]) -> list[list[str]]:
    """A line for each fault that has run: its name, the causes, then `HEADS` for each launcher."""
    found: list[list[str]] = []
    for name, fault in faults.items():
        mine = [score for score in scores if score.fault == name]
        if mine:
            row = [name, "all" if fault.tie else ranks(fault.causes)]
            for launcher in launchers(scores):
                row += _cells([score for score in mine if score.launcher == launcher])
            found.append(row)
    return found


def launchers(scores: Sequence[Score]) -> list[Launcher]:
    """Those that ran, in the order of the columns."""
    return [launcher for launcher in LAUNCHERS if any(score.launcher == launcher for score in scores)]


def _cells(scores: Sequence[Score]) -> list[str]:
    if not scores:
        return ["-"] * len(HEADS)
    lines = [score.right_line for score in scores if score.right_line is not None]
    told = [score.verdict_seconds for score in scores if score.verdict_seconds is not None]
    left = sum(len(score.processes_left) + len(score.files_left) for score in scores)
    wrong = sorted({_named(score) for score in scores if not score.right_rank})
    return [
        _share([score.right_rank for score in scores]) + (f" ({'; '.join(wrong)})" if wrong else ""),
        _share(lines) if lines else "-",
        ", ".join(sorted({str(score.end) for score in scores})),
        f"{median(told):.1f}" if told else "-",
        f"{median(score.exit_seconds for score in scores):.1f}",
        ", ".join(sorted({"limit" if score.code is None else str(score.code) for score in scores})),
        str(left),
    ]


def _share(right: Sequence[bool]) -> str:
    if len(right) == 1:
        return "yes" if right[0] else "NO"
    return f"{sum(right)}/{len(right)}"


def _named(score: Score) -> str:
    return f"{ranks(score.named)} at odds" if score.tie else ranks(score.named)


def ranks(numbers: Sequence[int]) -> str:
    """In a cell."""
    return ", ".join(map(str, numbers)) or "nobody"


def totals(scores: Sequence[Score], faults: Mapping[str, Fault]) -> list[str]:
    """One sentence for each thing that is promised, for each launcher."""
    said: list[str] = []
    for launcher in LAUNCHERS:
        for late in (False, True):
            mine = [s for s in scores if s.launcher == launcher and faults[s.fault].late == late]
            if mine:
                kind = "faults written after the judge" if late else "faults"
                runs = f"{len({s.fault for s in mine})} {kind}, {len(mine)} runs"
                said.append(f"{launcher}, {runs}: {_total(mine, faults)}")
    return said


def _total(scores: Sequence[Score], faults: Mapping[str, Fault]) -> str:
    single = [s.right_rank for s in scores if faults[s.fault].single]
    lines = [s.right_line for s in scores if s.right_line is not None]
    codes = [s.right_code for s in scores if s.right_code is not None]
    parts = [f"right rank {_of([s.right_rank for s in scores])}, of the single culprits {_of(single)}"]
    parts += [f"right line {_of(lines)}", f"right class {_of([s.right_end for s in scores])}"]
    parts += [f"right exit code {_of(codes)}"] if codes else []
    for name, fast in (("killed or raised", True), ("others", False)):
        told = [s.verdict_seconds for s in scores if s.verdict_seconds is not None and faults[s.fault].fast is fast]
        if told:
            parts.append(f"{name} told after {median(told):.1f} s (at most {max(told):.1f})")
    parts.append(f"{sum(s.end == 'hung' for s in scores)} hung")
    parts.append(f"{sum(len(s.processes_left) for s in scores)} processes")
    return ", ".join(parts) + f" and {sum(len(s.files_left) for s in scores)} files left"


def _of(right: Sequence[bool]) -> str:
    share = f" ({100 * sum(right) / len(right):.0f} %)" if right else ""
    return f"{sum(right)} of {len(right)}{share}"


def heads(scores: Sequence[Score]) -> list[str]:
    """The names of the columns."""
    return ["fault", "guilty", *(
        head if launcher == "paceline" else f"{launcher}: {head}" for launcher in launchers(scores) for head in HEADS
    )]  # fmt: skip


def print_table(console: Console, scores: Sequence[Score], faults: Mapping[str, Fault]) -> None:
    """For a terminal."""
    found = rows(scores, faults)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for head in heads(scores):
        table.add_column(head, overflow="fold")
    for row in found:
        table.add_row(*row)
    console.print(table)
    for sentence in totals(scores, faults):
        console.print(sentence, soft_wrap=True)


def markdown(scores: Sequence[Score], faults: Mapping[str, Fault]) -> str:
    """For a file."""
    found = rows(scores, faults)
    names = heads(scores)
    lines = [names, ["---"] * len(names), *found]
    table = "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines)
    return table + "\n\n" + "\n".join(f"- {sentence}" for sentence in totals(scores, faults)) + "\n"
