"""`paceline ledger`: checks that each sample of each epoch was used exactly once, over all attempts of a run."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from paceline.cli import make_parser
from paceline.cli.options import check_out_file, write_json
from paceline.config.settings import check_values, load, resolve_batch_sizes
from paceline.errors import ExitCode, UsageError, plural
from paceline.runs.console import remove_control_characters, table_console
from paceline.runs.owners import warn_if_shared
from paceline.runs.reading import is_folder, real_path

if TYPE_CHECKING:
    from paceline.lab.ranks.ledger import LedgerReport

MAX_SHOWN = 20  # findings


@dataclass(frozen=True)
class LedgerConfig:
    """Check from a run's events that each sample was used exactly once per epoch. Exit code 1 if not."""

    run: Path
    """run folder; the run may have been killed or may be running"""
    json: Path | None = None
    """also write the results to this file"""


def main(arguments: Sequence[str]) -> int:
    config: LedgerConfig = make_parser("ledger").parse(arguments)
    check_out_file("--json", config.json)
    run_dir = real_path(config.run)
    if is_folder(run_dir):
        warn_if_shared(run_dir)
    settings = run_dir / "config.toml"
    if not os.path.lexists(settings):
        problem = "has no config.toml" if is_folder(run_dir) else "is not a folder"
        raise UsageError(code="ledger-no-run", run=config.run, what=problem)
    # untrusted: only its numbers are used, and no code that it names is run
    train_config = load(settings, must_own=False)
    check_values(train_config)

    from paceline.lab.ranks.ledger import check_sample_use
    from paceline.train.prepare import make_batch_plan  # imports torch

    # All settings are in config.toml: no default depends on the world size
    one_process = resolve_batch_sizes(train_config.data, world_size=1)
    result = check_sample_use(run_dir, partial(make_batch_plan, train_config, one_process))
    if config.json:
        write_json(config.json, result)
    _print(result)
    return ExitCode.FAILED if result.findings else ExitCode.DONE


def _diagnosis(result: LedgerReport) -> str:
    if result.findings:
        return f"NOT proven: {plural(len(result.findings), 'finding')}"
    complete = [epoch for epoch in result.epochs if epoch.steps == result.steps_per_epoch]
    facts: list[str] = []
    if result.is_stream:
        numbers, complete = ", ".join(f"{epoch.once:,}" for epoch in result.epochs), result.epochs
        facts.append(f"each sample taken from the stream was used exactly once, {numbers} in {_each(len(complete))}")
    elif complete and result.last_batch == "keep":
        facts.append(f"each of {result.num_samples:,} samples was used exactly once in {_each(len(complete))}")
    elif complete:
        once, never, repeatedly = complete[0].once, complete[0].never, complete[0].repeatedly
        facts.append(
            f"of {result.num_samples:,} samples {once:,} were used once, {never:,} never and {repeatedly:,} repeatedly "
            f"in {_each(len(complete))}, as --last-batch {result.last_batch} requires"
        )
    if len(complete) < len(result.epochs):
        rest = result.epochs[-1]
        steps = f"{rest.steps} of {result.steps_per_epoch} steps of epoch {rest.epoch}"
        facts.append(f"no sample was used twice in the {steps}")
    starts = result.incarnations
    ranks = ", ".join(str(start.world_size) for start in starts)
    text = "clean: " + ", and ".join(facts)
    text += f", over {plural(len(starts), 'generation')} ({ranks} {'rank' if ranks == '1' else 'ranks'})"
    if skipped := len(result.left_out):
        text += f"; {plural(skipped, 'step')} of these {'was' if skipped == 1 else 'were'} skipped"
    if lost := sum(start.thrown_away for start in starts):
        done = sum(epoch.steps for epoch in result.epochs)
        again = " and repeated" if all(start.last_step <= done for start in starts) else ""
        text += f"; {plural(lost, 'step')} {'was' if lost == 1 else 'were'} discarded{again}"
    return text


def _print(result: LedgerReport) -> None:
    console = table_console()
    table = Table("attempt", "generation", "ranks", "hosts", "began after step", "logged steps", "count", "discarded")
    for start in result.incarnations:
        logged = f"{start.first_step} to {start.last_step}" if start.last_step else "none"
        cells = (start.attempt, start.generation, start.world_size, " ".join(start.hosts), start.start_step, logged)
        texts = map(str, (*cells, start.counted, start.thrown_away))
        table.add_row(*(Text(remove_control_characters(text)) for text in texts))
    console.print(table)
    table = Table("epoch", "steps", "samples used once", "never", "repeatedly")
    for (steps, *counts), group in groupby(result.epochs, lambda e: (e.steps, e.once, e.never, e.repeatedly)):
        epochs = [epoch.epoch for epoch in group]
        name = str(epochs[0]) if len(epochs) == 1 else f"{epochs[0]} to {epochs[-1]}"
        of_steps = str(steps) if result.is_stream else f"{steps} of {result.steps_per_epoch}"
        table.add_row(name, of_steps, *("?" if number is None else f"{number:,}" for number in counts))
    if result.epochs:
        console.print(table)
    for note in result.notes:
        console.print(remove_control_characters(f"note: {note}"), markup=False, soft_wrap=True)
    for finding in result.findings[:MAX_SHOWN]:
        console.print(remove_control_characters(finding), style="bold", markup=False, soft_wrap=True)
    if len(result.findings) > MAX_SHOWN:
        console.print(f"... and {len(result.findings) - MAX_SHOWN} more: --json FILE writes all of them")
    console.print(_diagnosis(result), markup=False, soft_wrap=True)


def _each(epochs: int) -> str:
    return "1 epoch" if epochs == 1 else f"each of {epochs} epochs"
