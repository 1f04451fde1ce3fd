"""`paceline analyze LOG|RUN`: throughput and loss, by the log of any training or by a run."""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from paceline.cli.commands import command_line
from paceline.cli.finding import find_run
from paceline.cli.flags import print_json
from paceline.disk.owners import note_strangers
from paceline.disk.reading import is_folder, real_path
from paceline.errors import ExitCode, UsageError, plural
from paceline.guard.wording import in_runs
from paceline.observe.terminal import clean
from paceline.view.analysis import Analysis, Analyzer
from paceline.view.log_lines import EXAMPLES
from paceline.view.words import last_bars

BARS = 60


@dataclass(frozen=True)
class AnalyzeConfig:
    """Print throughput and loss from the log of any training, or from a run.

    Known formats: the lines of torch's examples, progress bars, Hugging Face's Trainer, `loss=0.1` and `loss: 0.1`;
    also of several ranks in one file (srun --label, torchrun --tee).
    """

    logs: tuple[str, ...]
    """log files, or runs: folders, or beginnings of their names under runs/"""
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
    """What a log or a run says.

    Raises:
        UsageError: there is none, it cannot be read, or none of its lines is known.
    """
    analyzer = Analyzer(asked)
    try:
        if os.path.lexists(asked) and not is_folder(Path(asked)):
            analyzer.add_log(real_path(Path(asked)))
        else:
            run_dir = _run(asked)
            note_strangers(run_dir)
            analyzer.add_run(run_dir)
    except OSError as error:
        raise UsageError(code="log-unreadable", asked=asked, strerror=error.strerror) from None
    found = analyzer.result()
    if not found.values:
        expected = "\n".join(f"  {example}" for example in EXAMPLES.values())
        seen = f": {plural(found.lines, 'line')}, the first {analyzer.first!r}" if found.lines else ""
        raise UsageError(code="no-known-line", asked=asked, seen=seen, expected=expected)
    return found


def _run(asked: str) -> Path:
    try:
        return find_run(asked)
    except UsageError as error:
        if os.path.lexists(asked):
            raise
        raise UsageError(code="no-such-log", value=asked, reason=str(error)) from None


def _page(found: Analysis) -> str:
    kinds = ", ".join(f"{name} {count:,}" for name, count in found.formats.items())
    ranks = f"; ranks {in_runs(found.ranks)}" if found.ranks else ""
    lines = [f"{found.name}: {plural(found.lines, 'line')} ({kinds}){ranks}"]
    if not any(name.endswith(("/s", "(counted)")) for name in found.values):
        lines.append("throughput is unknown: no line has samples/s, or a time to count with. Run the script with "
                     "`paceline launch`, which notes the times")  # fmt: skip
    lines += [f"{plural(count, 'loss', 'losses')} not finite{rank and f' on rank {rank}'}"
              for rank, count in found.not_finite.items()]  # fmt: skip
    return "\n".join(lines + [words for item in found.values.items() for words in _curve(*item)])


def _curve(name: str, values: list[float]) -> list[str]:
    """A line of numbers, and the curve in a line of text."""
    finite = [value for value in values if math.isfinite(value)] or [math.nan]
    words = (
        f"{name:13} first {values[0]:.4g}, last {values[-1]:.4g}, median {median(finite):.4g}, "
        f"lowest {min(finite):.4g}, highest {max(finite):.4g}; {plural(len(values), 'value')}"
    )
    bars = last_bars(values[:: max(1, len(values) // BARS)], BARS)
    return [words, *([f"{'':13} {bars}"] if len(values) > 2 else [])]
