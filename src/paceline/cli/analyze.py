"""`paceline analyze LOG|RUN`: throughput, loss, and what is out of order, by the log of any training or by a run."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.cli.commands import command_line
from paceline.cli.finding import find_run
from paceline.cli.flags import print_json
from paceline.disk.owners import note_strangers
from paceline.disk.reading import is_folder, real_path
from paceline.errors import ExitCode, PacelineError, UsageError, plural
from paceline.guard.wording import in_runs
from paceline.observe.terminal import clean
from paceline.view.analysis import Analysis, Analyzer
from paceline.view.analyzed import UnknownFormat, add_log, add_run
from paceline.view.curves import Curve, Point, sparkline
from paceline.view.log_formats import FORMATS, VALUES

MOST_SHOWN_CHARS = 120


@dataclass(frozen=True)
class AnalyzeConfig:
    """Find throughput, loss and anomalies in the log of any training, or in a run.

    Known formats: the lines of torch's examples, progress bars, Hugging Face's Trainer, `loss=0.1` and `loss: 0.1`;
    also of several ranks in one file (srun --label, torchrun --tee). Exit code 0 even if there are anomalies.
    """

    logs: tuple[str, ...]
    """log files, or runs: folders, or beginnings of their names under runs/"""
    json: bool = False
    """print a JSON list with an entry per log"""


def main(arguments: Sequence[str]) -> int:
    """Run `paceline analyze ARGUMENTS`."""
    config: AnalyzeConfig = command_line("analyze").parse(arguments)
    if not config.logs:
        raise UsageError("name a log or a run: paceline analyze train.log")
    found = [_analyzed(asked) for asked in config.logs]
    if config.json:
        print_json(found)
    else:
        print("\n\n".join(clean(_page(one)) for one in found))
    return ExitCode.DONE


def _analyzed(asked: str) -> Analysis:
    analyzer = Analyzer(asked)
    try:
        if os.path.lexists(asked) and not is_folder(Path(asked)):
            add_log(analyzer, real_path(Path(asked)))
        else:
            run_dir = _run(asked)
            note_strangers(run_dir)
            add_run(analyzer, run_dir)
    except UnknownFormat as error:
        raise UsageError(_unknown(asked, error)) from None
    except PacelineError:
        raise
    except OSError as error:
        raise UsageError(f"{asked} cannot be read: {error.strerror}") from None
    return analyzer.result()


def _run(asked: str) -> Path:
    try:
        return find_run(asked)
    except UsageError as error:
        if os.path.lexists(asked):
            raise
        raise UsageError(f"there is no log file {asked!r}; and as a run: {error}") from None


def _unknown(asked: str, error: UnknownFormat) -> str:
    expected = "\n".join(f"  {form.example}" for form in (*FORMATS, VALUES))
    if not error.number:
        return f"{asked} says nothing yet: no line was found. Expected are lines like\n{expected}"
    shown = error.line if len(error.line) <= MOST_SHOWN_CHARS else f"{error.line[:MOST_SHOWN_CHARS]}..."
    return (
        f"none of the {plural(error.lines, 'line')} of {asked} is of a known kind. The first is line {error.number}:\n"
        f"  {shown}\nExpected are lines like\n{expected}"
    )


def _page(found: Analysis) -> str:
    kinds = ", ".join(f"{name} {count:,}" for name, count in found.formats.items())
    ranks = f"; ranks {in_runs(found.ranks)}" if found.ranks else ""
    lines = [f"{found.name}: {plural(found.lines, 'line')} ({kinds or 'none tells a loss'}){ranks}"]
    for rate in found.throughput:
        lines.append(
            f"throughput    {_speed(rate.median)} {rate.unit} (median of {rate.count:,}, {rate.source}); lowest "
            f"{_fast(rate.lowest)}, highest {_fast(rate.highest)}"
        )
    if not found.throughput and found.loss is not None:
        lines.append(
            "throughput    not known: the lines tell no samples/s, and no times to count with. Put a time in front "
            "of each, or run the script by `paceline launch`, which notes them"
        )
    if found.loss is not None:
        lines += _curve("loss", found.loss, percent=False)
    for name, curve in found.held_out.items():
        lines += _curve(f"test {name}", curve, percent=name == "accuracy")
    lines.append(_out_of_order(found))
    return "\n".join(lines)


def _curve(name: str, curve: Curve, *, percent: bool) -> list[str]:
    def shown(point: Point) -> str:
        return f"{point.value:.2%}" if percent else f"{point.value:.4g}"

    best = f"best {shown(curve.best)}{_where(curve.best)}" if curve.best is not None else "never finite"
    words = f"{name:13} first {shown(curve.first)}, last {shown(curve.last)}, {best}; {curve.count:,} told"
    return [words, *([f"{'':13} {sparkline(curve)}"] if curve.count > 2 else [])]


def _fast(point: Point) -> str:
    return f"{_speed(point.value)}{_where(point)}"


def _speed(rate: float) -> str:
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"


def _where(point: Point) -> str:
    epoch = f", epoch {point.epoch:g}" if point.epoch is not None else ""
    return f" ({_place(point.where)}{epoch})"


def _place(where: str) -> str:
    return f"line {where}" if where.isdecimal() else where


def _out_of_order(found: Analysis) -> str:
    if not found.anomalies:
        return "nothing out of order was found"
    lines = [f"out of order: {', '.join(f'{kind} {count:,}' for kind, count in found.counts.items())}"]
    for one in found.anomalies:
        who = f"rank {one.rank}, " if one.rank else ""
        lines.append(f"  {_place(one.where)}: {who}{one.kind}: {one.words}")
    return "\n".join(lines)
