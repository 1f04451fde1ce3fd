"""`paceline checkpoint`: lists a run's checkpoints, whether they are whole, and from which one it would go on."""

import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

from paceline.checkpoint.format import Damaged, Manifest
from paceline.checkpoint.manager import Checkpoints, Entry
from paceline.cli.commands import command_line
from paceline.errors import ExitCode, UsageError
from paceline.runs.console import clock, table_console
from paceline.runs.owners import note_strangers
from paceline.runs.reading import is_folder, real_path

MOST = 50


@dataclass(frozen=True)
class CheckpointsConfig:
    """List a run's checkpoints, or verify every byte of them. Exit code 1 if a checkpoint is damaged."""

    action: Literal["list", "verify"]
    """list: compare sizes only, fast; verify: hash every file"""
    run: Path
    """run folder, or its checkpoints folder"""


def main(arguments: Sequence[str]) -> int:
    """Run `paceline checkpoint ARGUMENTS`."""
    words = [word for word in arguments if not word.startswith("-")]
    if words and words[0] not in ("list", "verify") and (len(words) == 1 or is_folder(Path(words[0]))):
        raise UsageError(code="checkpoint-without-action", run=shlex.quote(words[0]), allowed=["list", "verify"])
    config: CheckpointsConfig = command_line("checkpoint").parse(arguments)
    checkpoints, entries, ours = _find(real_path(config.run))
    console = table_console()
    if config.action == "list":
        _list(console, checkpoints, entries)
        return ExitCode.DONE
    return _verify(console, checkpoints, entries, ours=ours)


def _find(run: Path) -> tuple[Checkpoints, list[Entry], bool]:
    """The checkpoints of a run, the newest last, and whether it is the caller's."""
    if not is_folder(run):
        raise UsageError(code="no-such-folder", folder=run)
    root = run / "checkpoints" if is_folder(run / "checkpoints") else run
    shown = note_strangers(root)
    checkpoints = Checkpoints(root, trust=shown)
    try:
        entries = checkpoints.entries()[::-1]
    except OSError as error:
        raise UsageError(code="checkpoints-unreadable", root=checkpoints.root, strerror=error.strerror) from None
    if len(entries) > MOST:
        print(f"of {len(entries):,} checkpoints only the newest {MOST} are checked", file=sys.stderr)
        entries = entries[-MOST:]
    if not entries:
        raise UsageError(code="no-checkpoints", run=run)
    return checkpoints, entries, not shown


def _list(console: Console, checkpoints: Checkpoints, entries: Sequence[Entry]) -> None:
    table = Table("step", "when", "size", "world size", "virtual ranks", "state")
    for step, path in entries:
        found = _judged(checkpoints, path, hashed=False)
        if isinstance(found, Manifest):
            size_bytes = sum(file.bytes for file in found.files)
            numbers = (f"{size_bytes:,} bytes", str(found.world_size), str(found.virtual_ranks))
            table.add_row(str(step), _when(path), *numbers, "sizes are right")
        elif found:
            table.add_row(str(step), _when(path), "", "", "", Text(f"damaged: {found}"))
    console.print(table)
    console.print("`paceline checkpoint verify` reads the contents as well")


def _verify(console: Console, checkpoints: Checkpoints, entries: Sequence[Entry], *, ours: bool) -> int:
    newest_whole: Path | None = None
    damaged = 0
    for _, path in entries:
        found = _judged(checkpoints, path, hashed=True)
        if isinstance(found, Manifest):
            newest_whole = path
            console.print(f"{path.name}  whole")
        elif found:
            damaged += 1
            console.print(Text(f"{path.name}  damaged: {found}"), soft_wrap=True)
    if newest_whole and not ours:
        console.print("they are not yours, or others could have written them: none is resumed from without --trust")
    elif newest_whole:
        console.print(f"a resumed run goes on from {newest_whole.name}")
    else:
        console.print("none of them can be resumed from")
    return ExitCode.FAILED if damaged else ExitCode.DONE


def _judged(checkpoints: Checkpoints, path: Path, *, hashed: bool) -> Manifest | str:
    """The manifest, or what is wrong in words; no words if the run has deleted the checkpoint meanwhile."""
    try:
        return checkpoints.check(path, files=None if hashed else ())
    except Damaged as error:
        return str(error) if os.path.lexists(path) else ""


def _when(path: Path) -> str:
    try:
        return clock(path.lstat().st_mtime)
    except OSError:  # deleted meanwhile
        return ""
