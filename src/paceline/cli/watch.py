"""`paceline watch RUN`: shows a run live, rank by rank. Keys show stacks, save a checkpoint and stop the run."""

import os
import secrets
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.cli import command_line, run_state
from paceline.cli.cancel import ask_to_stop
from paceline.cli.hang import request_diagnosis
from paceline.errors import ExitCode, UsageError
from paceline.guard.report import describe_rank
from paceline.launch.output import find_last_lines, read_lines
from paceline.protocol.evidence import CHECKPOINT_ASK
from paceline.report.live import LiveReader, RunSnapshot
from paceline.report.watch_lines import summary_line
from paceline.runs import writing
from paceline.runs.console import remove_controls
from paceline.runs.summary import LIVE_STATES, RunState

STATE_SECONDS = 5.0  # between reads of the complete state
END_CHECK_SECONDS = 2.0  # between checks whether the run has ended: test its lock, or query its host
LINE_INTERVAL_SECONDS = 10.0  # between lines without a terminal
LOG_LINES, MOST_CHARS = 40, 20_000


@dataclass(frozen=True)
class WatchConfig(run_state.NewestRunFlags):
    """Watch a run live, rank by rank, until it ends.

    Keys show stacks and logs, save a checkpoint and stop the run. q leaves the view; the run continues.
    """


def main(arguments: Sequence[str]) -> int:
    config: WatchConfig = command_line("watch").parse(arguments)
    run_dir, access = run_state.resolve_run_access(config)
    run = _Run(run_dir, access)
    try:
        if run.standing.state in LIVE_STATES:
            if sys.stdout.isatty() and sys.stdin.isatty():
                _on_terminal(run)
            else:
                _print_changes(run)
        now, state = run.read_view()
    except KeyboardInterrupt:
        print("no longer watching; the run continues", file=sys.stderr)
        return ExitCode.DONE
    _say(summary_line(now, state))
    if state.state not in LIVE_STATES:
        _say(f"see paceline status {run_dir}")
    return ExitCode.DONE


class _Run:
    def __init__(self, run_dir: Path, access: run_state.Access) -> None:
        self.run_dir, self.access, self.may_act = run_dir, access, access != run_state.NO_ACCESS
        self._reader = LiveReader(run_dir, may_ask=self.may_act)
        self.standing = self._standing()

    def read_view(self) -> tuple[RunSnapshot, RunState]:
        """The run now. Call it from one thread at a time."""
        now = time.monotonic()
        if now > self._stood_seconds + STATE_SECONDS or (
            now > self._ended_seconds + END_CHECK_SECONDS and self._ended(now)
        ):
            self.standing = self._standing()
        return self._reader.read(self._attempt), self.standing

    def _ended(self, now: float) -> bool:
        self._ended_seconds = now
        return run_state.read_run_status(self.run_dir, self.access).state not in LIVE_STATES

    def _standing(self) -> RunState:
        self._attempt = next(reversed(run_state.attempts(self.run_dir)), None)
        self._stood_seconds = self._ended_seconds = time.monotonic()
        return run_state.run_state(self.run_dir, self.access)

    def stack(self, rank: int) -> str:
        diagnosis = request_diagnosis(self._newest())
        if diagnosis is None:
            raise UsageError(
                "the agent of the run does not answer. Runs under torchrun and single-process runs have no agent"
            )
        evidence = next((evidence for evidence in diagnosis.evidence if evidence.rank == rank), None)
        if evidence is None:
            return f"rank {rank} is not running"
        return describe_rank(evidence, most_ops=5, most_stacks=1)[:MOST_CHARS]

    def log(self, rank: int) -> str:
        if self._attempt is None:
            return "nothing yet"
        path = self._attempt / f"rank-{rank}.log"
        start, end = find_last_lines(path, LOG_LINES)
        return "\n".join(line.text for line in read_lines(path, start, end))[-MOST_CHARS:] or "nothing yet"

    def save(self) -> str:
        if self._reader.read(self._attempt).step is None:
            raise UsageError("cannot request a checkpoint: the run has no step yet, or its script saves by itself")
        try:
            os.close(writing.create_file(self._newest() / f"{CHECKPOINT_ASK}{secrets.token_hex(8)}"))
        except OSError as error:
            raise UsageError(f"cannot request a checkpoint: {error.strerror}") from error
        return "checkpoint requested: the run saves after the next step"

    def stop(self) -> str:
        self._newest()
        ask_to_stop(self.run_dir, self.access)
        return "stop requested: the run saves its state first"

    def _newest(self) -> Path:
        if not self.may_act or self._attempt is None:
            raise UsageError("other users could have written this run folder, so paceline only displays the run")
        return self._attempt


def _on_terminal(run: _Run) -> None:
    from paceline.report.watch_app import KeyActions, WatchApp  # textual takes a third of a second

    app = WatchApp(KeyActions(run.read_view, run.stack, run.log, run.save, run.stop, run.may_act))
    app.run()
    if app.failure is not None:
        raise app.failure


def _print_changes(run: _Run) -> None:
    """Without a terminal: print a line after each change, at most every ten seconds, until the end."""
    shown = ""
    while run.standing.state in LIVE_STATES:
        line = summary_line(*run.read_view())
        if line != shown:
            shown = line
            _say(line)
        due = time.monotonic() + LINE_INTERVAL_SECONDS
        while time.monotonic() < due and run.standing.state in LIVE_STATES:
            time.sleep(1.0)
            run.read_view()


def _say(line: str) -> None:
    print(remove_controls(line), flush=True)
