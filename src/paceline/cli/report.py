"""`paceline report RUN [RUN ...]`: one page that explains a run, or compares several."""

import shlex
import webbrowser
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from paceline.cli.commands import command_line
from paceline.cli.finding import find_run, newest_run
from paceline.cli.flags import out_path
from paceline.cli.run_state import standing
from paceline.errors import ExitCode, PacelineError, UsageError
from paceline.report.figures import drawings
from paceline.report.page import MARK, report_page
from paceline.report.run import WholeRun, whole_run
from paceline.runs import writing
from paceline.runs.console import clean
from paceline.runs.owners import note_strangers
from paceline.runs.reading import is_file

MOST_RUNS, MARK_BYTES = 16, 4096


@dataclass(frozen=True)
class ReportConfig:
    """Write an HTML report: outcome, time breakdown and command to repeat a run, or a comparison of runs."""

    runs: tuple[str, ...] = ()
    """run folder, or the beginning of its name under runs/ (default: the newest there); several are compared"""
    out: Path | None = field(default=None, metadata={"short": "-o"})
    """file to write. Default: report.html in the run folder; for several runs or runs of other users, here"""
    explain: bool = False
    """add diagrams of this run: the stages of a step, one step on all ranks, the samples of each rank"""
    open: bool = False
    """show the report in a browser"""


def main(arguments: Sequence[str]) -> int:
    """Run `paceline report ARGUMENTS`."""
    config: ReportConfig = command_line("report").parse(arguments)
    if len(config.runs) > MOST_RUNS:
        raise UsageError(f"name 1 to {MOST_RUNS} runs, got {len(config.runs)}: paceline report RUN [RUN ...]")
    if config.explain and len(config.runs) > 1:
        raise UsageError("--explain draws how one run works: name one")
    folders = [find_run(name) for name in config.runs] or [newest_run()]
    if len({*folders}) < len(folders):
        raise UsageError("a run is named twice: each is compared with others")
    strange = [note_strangers(folder) for folder in folders]
    out = out_path("--out", config.out or Path("report.html") if config.out or len(folders) > 1 or any(strange)
                   else folders[0] / "report.html")  # fmt: skip
    _check_out(out)
    runs = [_read(folder) for folder in folders]
    told = shlex.join(("paceline", "report", *(folder.name for folder in folders)))
    text = report_page(runs, told, drawings(runs[0]) if config.explain else ())
    try:
        writing.replace(out, text.encode("utf-8", "replace"))
    except OSError as error:
        raise UsageError(f"{out} cannot be written: {error.strerror}. Name another file: -o FILE") from None
    print(clean(f"{out}  ({len(text) / 1e6:.1f} MB, opens in any browser)"))
    if config.open and not webbrowser.open(out.as_uri()):
        raise PacelineError(f"the page is written, but there is no browser here to open it: copy {out} to where one is")
    return ExitCode.DONE


def _check_out(out: Path) -> None:
    """Refuse a file that is something else than a page of ours: it would be lost."""
    with suppress(OSError):
        if is_file(out):
            with out.open("rb") as file:
                if MARK.encode() not in file.read(MARK_BYTES):
                    raise UsageError(f"{out} already exists and is not a report. Pass another file")


def _read(folder: Path) -> WholeRun:
    run = whole_run(folder)
    try:
        found = standing(folder)
        run.state, run.words = found.state, found.words
    except PacelineError as error:
        run.state, run.words = "unknown", str(error)
    return run
