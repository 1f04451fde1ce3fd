"""`paceline trace RUN -o trace.json`: every rank's steps, phases and collectives on one clock, for Perfetto."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
import tyro

from paceline.cli.finding import find_run
from paceline.cli.flags import out_path
from paceline.disk import writing
from paceline.disk.owners import note_strangers
from paceline.errors import ExitCode, UsageError
from paceline.observe.terminal import clean
from paceline.view.run import whole_run
from paceline.view.trace import trace_events


@dataclass(frozen=True)
class TraceConfig:
    """Write a run's steps, phases and collectives as a trace; ui.perfetto.dev or chrome://tracing shows it."""

    run: tyro.conf.Positional[str]
    """the run's folder, or the beginning of its name under runs/"""
    out: Annotated[Path, tyro.conf.arg(aliases=["-o"])] = Path("trace.json")
    """the file to write"""
    overwrite: bool = False
    """replace what is there"""


def main(arguments: Sequence[str]) -> int:
    """Run `paceline trace ARGUMENTS`."""
    config = tyro.cli(TraceConfig, prog="paceline trace", args=arguments)
    folder, out = find_run(config.run), out_path("--out", config.out)
    note_strangers(folder)
    if os.path.lexists(out) and not config.overwrite:
        raise UsageError(f"{config.out} is there already: name another file (-o FILE), or replace it: --overwrite")
    run = whole_run(folder)
    found = [*map(msgspec.json.encode, trace_events(run))]  # as bytes: of a large run they are millions
    if not any(one.startswith(b'{"ph":"X"') for one in found):
        raise UsageError(f"{config.run} has no steps yet: there is nothing to trace")
    try:
        writing.replace(out, b'{"displayTimeUnit":"ms","traceEvents":[' + b",\n".join(found) + b"]}\n")
    except OSError as error:
        raise UsageError(f"{config.out} cannot be written: {error.strerror}") from None
    for words in run.missing:
        print(f"left out: {words}")
    print(clean(f"{len(found):,} events written to {config.out}: open it in ui.perfetto.dev or chrome://tracing"))
    return ExitCode.DONE
