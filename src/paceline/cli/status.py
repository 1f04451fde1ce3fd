"""`paceline status RUN`: shows how a run goes on or has ended, wherever it was started."""

import os
import shlex
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from paceline.cli.commands import command_line
from paceline.cli.finding import NewestRunFlags, existing_run
from paceline.cli.flags import print_json
from paceline.cli.run_state import MOST_CHARS, run_state
from paceline.config import load
from paceline.errors import ExitCode, PacelineError
from paceline.observe.events import event_files
from paceline.observe.folder import AVERAGE_WEIGHTS, BEST_WEIGHTS, CONFIG, WEIGHTS
from paceline.observe.summary import LIVE, RunState, scores_line
from paceline.observe.terminal import clean
from paceline.observe.utilization import speed_words
from paceline.tasks import TASKS
from paceline.view.run import whole_run
from paceline.view.why import why

GLANCE_BYTES = 64 << 20  # of events: read within a second or two


@dataclass(frozen=True)
class StatusConfig(NewestRunFlags):
    """Show the state of a run: queued, running at a step, or its outcome. Exit code 0 for any state."""

    json: bool = False
    """print JSON"""


def main(arguments: Sequence[str]) -> int:
    """Run `paceline status ARGUMENTS`."""
    config: StatusConfig = command_line("status").parse(arguments)
    found = run_state(*existing_run(config))
    if config.json:
        print_json(found)
    else:
        print("\n".join(f"{name:10}{clean(text)[:MOST_CHARS]}" for name, text in _lines(found)))
    return ExitCode.DONE


def _lines(found: RunState) -> Iterator[tuple[str, str]]:
    """What a person is shown: (name, text) of each line."""
    yield "run", found.run_dir
    yield "state", found.state + (f": {found.words}" if found.words else "")
    if found.step is not None:
        total = f" of {found.total_steps}" if found.total_steps else ""
        rate = f", {found.samples_per_second:,.0f} samples/s" if found.samples_per_second else ""
        yield "step", f"{found.step}{total}{rate}"
    if use := speed_words(found):
        yield "use", ", ".join(use)
    job = f", job {found.slurm_job}" if found.slurm_job else ""
    yield "where", f"{found.on}{job}" + (f", on {', '.join(found.hosts)}" if found.hosts else "")
    if found.nodes:
        yield "nodes", found.nodes
    yield "starts", str(found.attempts)
    if found.metrics:
        yield "scores", scores_line(found.metrics)
    yield from (("found", words) for words in found.found)
    yield "saved", _saved(found)
    if found.state not in LIVE and (words := _time_spent(Path(found.run_dir))):
        yield "time", words
    if hint := _hint(found):
        yield "next", hint


def _saved(found: RunState) -> str:
    """The weights of a run that is done, and its newest checkpoint."""
    folder = Path(found.run_dir)
    weights = [name for name in (WEIGHTS, BEST_WEIGHTS, AVERAGE_WEIGHTS) if os.path.lexists(folder / name)]
    steps = [] if found.checkpoint_step is None else [f"checkpoint of step {found.checkpoint_step}"]
    return ", ".join([*weights, *steps]) or ("nothing yet" if found.state in LIVE else "nothing")


def _time_spent(run_dir: Path) -> str:
    """What held it up, in a sentence; empty where there is too much to read for a glance, or nothing."""
    with suppress(PacelineError, OSError):
        files = event_files(run_dir).values()
        if files and sum(path.lstat().st_size for path in files) <= GLANCE_BYTES:
            return why(whole_run(run_dir)).first
    return ""


def _again(run_dir: Path) -> str:
    """How a run is gone on with; empty for a script that finds its state by itself."""
    if not os.path.lexists(run_dir / CONFIG):
        return ""
    with suppress(PacelineError, OSError):
        task = str(load(run_dir / CONFIG, ours=False).task)
        if task not in TASKS and ":" not in task:
            return f"start {task} again, with session(..., resume=True)"
    return f"paceline train --resume auto --run-dir {shlex.quote(str(run_dir))}"


def _hint(found: RunState) -> str:
    run = shlex.quote(found.run_dir)
    match found.state:
        case "queued" | "running":
            return f"paceline logs {run} --follow, or paceline cancel {run}"
        case "saved" | "lost" | "failed" | "cancelled":
            again = f"; to go on: {words}" if (words := _again(Path(found.run_dir))) else ""
            return f"paceline logs {run}{again}"
        case "done":
            return f"paceline report {run}"
        case _:
            return ""
