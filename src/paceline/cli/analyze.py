"""`paceline analyze LOG|RUN`: throughput and loss, from the log of any training or from a run."""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from paceline.cli.commands import command_line
from paceline.cli.finding import find_run
from paceline.cli.flags import print_json
from paceline.errors import ExitCode, UsageError, plural
from paceline.report.analysis import EXAMPLES, Analysis, Analyzer
from paceline.runs.console import clean, sparkline
from paceline.runs.owners import note_strangers
from paceline.runs.reading import is_folder, real_path


@dataclass(frozen=True)
class AnalyzeConfig:
    """Print throughput and loss from the log of any training, or from a run."""

    logs: tuple[str, ...]
    """log files (torch's examples, progress bars, Hugging Face's Trainer, `loss=0.1`), or runs"""
    json: bool = False
    """print a JSON list with an entry per log"""


def main(arguments: Sequence[str]) -> int:
    """Run `paceline analyze ARGUMENTS`."""
    config: AnalyzeConfig = command_line("analyze").parse(arguments)
    if not config.logs:
        raise UsageError(code="no-log-named")
    found = [analyzed(asked) for asked in config.logs]
    if config.json:
        print_json(found)
    else:
        print("\n\n".join(clean(_page(one)) for one in found))
    return ExitCode.DONE


def analyzed(asked: str) -> Analysis:
    """The values of a log or a run; UsageError if there are none."""
    analyzer = Analyzer(asked)
    try:
        if os.path.lexists(asked) and not is_folder(Path(asked)):
            analyzer.add_log(real_path(Path(asked)))
        else:
            run_dir = find_run(asked)
            note_strangers(run_dir)
            analyzer.add_run(run_dir)
    except OSError as error:
        raise UsageError(code="log-unreadable", asked=asked, strerror=error.strerror) from None
    if not (found := analyzer.result).values:
        expected = "\n  ".join(EXAMPLES.values())
        seen = f": {plural(found.lines, 'line')}, the first {found.first_line!r}" if found.lines else ""
        raise UsageError(code="no-known-line", asked=asked, seen=seen, expected=expected)
    return found


def _page(found: Analysis) -> str:
    kinds = ", ".join(f"{name} {count:,}" for name, count in found.formats.items())
    lines = [f"{found.name}: {plural(found.lines, 'line')} ({kinds}); {plural(len(found.ranks), 'rank')}"]
    if not any(name.endswith(("/s", "(counted)")) for name in found.values):
        lines.append("no throughput: no line has samples/s. `paceline launch` records the times of lines to count with")
    lines += [f"{rank and f'rank {rank}: '}{plural(count, 'loss', 'losses')} not finite"
              for rank, count in found.not_finite.items()]  # fmt: skip
    for name, values in found.values.items():
        finite = [value for value in values if math.isfinite(value)] or [math.nan]
        told = f"median {median(finite):.4g}, lowest {min(finite):.4g}, highest {max(finite):.4g}"
        lines.append(f"{name:13} first {values[0]:.4g}, last {values[-1]:.4g}, {told}; {plural(len(values), 'value')}")
        lines.append(f"{'':13} {sparkline(values[:: max(1, len(values) // 60)], 60)}")
    return "\n".join(lines)
