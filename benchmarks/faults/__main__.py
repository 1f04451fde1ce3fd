"""Injects faults into small trainings, and scores who names the right rank: paceline, or torchrun with its peers.

python -m benchmarks.faults --list
"""

import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.faults.catalogue import FAULTS, chosen
from benchmarks.faults.fault import Fault, Needs
from benchmarks.faults.run import Score, run_fault
from benchmarks.faults.table import LAUNCHERS, markdown, print_table, ranks
from rich.table import Table

from paceline.cli.options import CommandParser, check_out_file, check_positive, parse_names, write_json
from paceline.errors import ExitCode, UsageError
from paceline.protocol.job import HangTimeout
from paceline.runs.console import table_console

ROOT_PROGRAMS = ("unshare", "mount")
TABLE_WIDTH = 160


@dataclass(frozen=True)
class FaultsConfig:
    """Run small trainings with one fault each, and score the diagnoses. Exit code 1 if a wrong rank is named."""

    list: bool = False
    """only list the faults"""
    faults: tuple[str, ...] = ()
    """names of faults (default: all that are possible here)"""
    launchers: str = "paceline"
    """what runs each fault, separated by commas: paceline, torchrun (with DDP), accelerate, fabric; the last three
    have a process-group time-out of 10 s"""
    repeat: int = 1
    """how often"""
    hang_timeout: str = "5"
    """as for train: seconds without progress"""
    out: Path | None = None
    """write the scores: a Markdown table to FILE.md, everything to FILE.json"""
    keep: Path | None = None
    """keep each run's folder in this one (default: those of runs that went wrong, in a temporary one)"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `python -m benchmarks.faults ARGUMENTS`."""
    line = CommandParser(
        "python -m benchmarks.faults", FaultsConfig, ("faults",),
        ("python -m benchmarks.faults --list", "python -m benchmarks.faults sleeps frozen --repeat 3"),
    )  # fmt: skip
    config: FaultsConfig = line.parse(sys.argv[1:] if arguments is None else arguments)
    _check(config)
    faults = chosen(config.faults)
    if config.list:
        _list(faults)
        return ExitCode.DONE
    possible: list[Fault] = []
    for fault in faults:
        if why := missing(fault):
            print(f"{fault.name}: left out, {why}", file=sys.stderr)
        else:
            possible.append(fault)
    scores = _run(config, possible)
    print_table(table_console(TABLE_WIDTH), scores, FAULTS)
    if config.out is not None:
        config.out.with_suffix(".md").write_text(markdown(scores, FAULTS))
        write_json(config.out.with_suffix(".json"), scores)
    own = [score for score in scores if score.launcher == "paceline"]
    return ExitCode.DONE if all(score.right_rank for score in own) else ExitCode.FAILED


def _check(config: FaultsConfig) -> None:
    check_positive(config, "repeat")
    parse_names("launcher", config.launchers, LAUNCHERS)
    if config.out is not None and config.out.suffix not in (".md", ".json"):
        raise UsageError(f"--out must end in .md or .json, got {config.out}")
    check_out_file("--out", config.out)
    HangTimeout.parse(config.hang_timeout)


def missing(fault: Fault) -> str:
    """What keeps this fault from being made here; empty if nothing does."""
    if fault.needs is Needs.HOSTS:
        return "it needs several hosts: `make soak-faults` makes them of network namespaces"
    if fault.needs is Needs.ROOT:
        if os.geteuid() != 0:
            return "it needs root"
        if absent := [name for name in ROOT_PROGRAMS if shutil.which(name) is None]:
            return f"it needs {', '.join(absent)}"
    return ""


def _run(config: FaultsConfig, faults: Sequence[Fault]) -> list[Score]:
    scores: list[Score] = []
    root = (config.keep or Path(tempfile.mkdtemp(prefix="paceline-faults-"))).resolve()
    launchers = parse_names("launcher", config.launchers, LAUNCHERS)
    for turn in range(config.repeat):
        for fault in faults:
            for launcher in launchers if fault.beside else [name for name in launchers if name == "paceline"]:
                folder = root / f"{fault.name}-{launcher}-{turn + 1}"
                score = run_fault(fault, launcher, folder, hang_timeout=config.hang_timeout)
                scores.append(score)
                print(score_line(score, fault), file=sys.stderr, flush=True)
                if config.keep is None and (score.right_rank or launcher != "paceline"):
                    shutil.rmtree(folder)
    if config.keep is None and not any(root.iterdir()):
        root.rmdir()
    else:
        print(f"run folders: {root}", file=sys.stderr)
    return scores


def score_line(score: Score, fault: Fault) -> str:
    """How one run went, in a sentence."""
    truth = "both, or neither" if fault.tie else ranks(fault.causes)
    right = "right" if score.right_rank else f"WRONG (it was {truth})"
    said = f"after {score.verdict_seconds:.1f} s" if score.verdict_seconds is not None else "never"
    return (
        f"{score.fault} with {score.launcher}: named {ranks(score.named)}, {right}, {score.end}, {said}; ended after "
        f"{score.exit_seconds:.1f} s with {score.code}"
    )


def _list(faults: Sequence[Fault]) -> None:
    console = table_console(TABLE_WIDTH)
    heads = ("fault", "ranks", "causes", "what it does", "right answer", "needs")
    table = Table(*heads, box=None, pad_edge=False, header_style="bold")
    for fault in faults:
        causes = "both, or neither" if fault.tie else ranks(fault.causes)
        needs = "" if fault.needs is Needs.NOTHING else str(fault.needs)
        table.add_row(fault.name, str(fault.world), causes, fault.does, " or ".join(fault.ends), needs)
    console.print(table)
    console.print(f"{len(faults)} faults")


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UsageError as error:
        print(f"faults: {error}", file=sys.stderr)
        sys.exit(int(error.exit_code))
