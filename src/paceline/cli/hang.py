"""`paceline hang RUN`: shows which rank is blocking a run, with the stack of every rank. It works while a run hangs."""

import os
import re
import secrets
import shutil
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec
from rich.console import Console

from paceline.cli import command_line
from paceline.cli.options import print_json
from paceline.cli.run_state import NO_ACCESS, Access, NewestRunFlags, attempts, read_run_status, resolve_run_access
from paceline.errors import ExitCode, UsageError
from paceline.guard.report import DiagnosisRecord, describe_rank, diagnosis_file, format_report, read_diagnosis
from paceline.protocol.evidence import Evidence
from paceline.runs import writing
from paceline.runs.console import clock
from paceline.runs.reading import entry_names

# the coordinator looks for requests every second, and gives every rank three seconds to answer
ANSWER_TIMEOUT_SECONDS = 15.0
POLL_SECONDS = 0.1
RECENT_PROGRESS_SECONDS = 2.0  # a run that made progress within this time does not hang
MAX_SHOWN_OPS = 8
MOST_SHOWN, MOST_LINES, MOST_CHARS = 64, 200, 20_000  # ranks; lines and characters of each rank


@dataclass(frozen=True)
class HangConfig(NewestRunFlags):
    """Show which rank is blocking a run, with the stack of every rank. Exit code 0 for any result."""

    json: bool = False
    """print JSON"""


class HangReport(msgspec.Struct, frozen=True):
    """The output of `paceline hang --json`."""

    run_dir: str
    state: str  # as in `paceline status`
    live: bool  # True: the state at this moment; False: recorded when the run stalled
    message: str
    diagnosis_dir: str
    record: DiagnosisRecord | None


def main(arguments: Sequence[str]) -> int:
    config: HangConfig = command_line("hang").parse(arguments)
    report = _report(*resolve_run_access(config))
    if config.json:
        print_json(report)
    else:
        _show(report)
    return ExitCode.DONE


def _report(run_dir: Path, access: Access) -> HangReport:
    """A new diagnosis of the run's agent, if it runs, may be queried and answers. Otherwise the newest recorded one."""
    state = read_run_status(run_dir, access).state
    starts = attempts(run_dir)
    if not starts:
        raise UsageError(code="not-started", run_dir=run_dir)
    may_ask = access != NO_ACCESS  # a request is a file, and paceline writes no file into a run of another user
    diagnosis = request_diagnosis(starts[-1]) if state == "running" and may_ask else None
    if diagnosis is not None:
        waited = f"{diagnosis.waited_seconds:.1f} s"
        line = f"no progress for {waited}. If this is a stall, its cause is:"
        if diagnosis.waited_seconds < RECENT_PROGRESS_SECONDS:
            line = f"the run is making progress (last {waited} ago). The present stacks of its ranks:"
        return HangReport(str(run_dir), state, True, line, "", diagnosis)
    state = read_run_status(run_dir, access).state  # it may have ended meanwhile
    silence = f"its agent has not answered within {ANSWER_TIMEOUT_SECONDS:g} s"
    no_answer = "" if state != "running" else silence if may_ask else "its agent was not queried"
    folder = _newest_diagnosis(run_dir)
    if folder is None:
        line = f"the run is {state}, and no stall was recorded" + (f"; {no_answer}" if no_answer else "")
        return HangReport(str(run_dir), state, False, line, "", None)
    diagnosis = read_diagnosis(folder)
    earlier = f"; {no_answer}: this report is from an earlier stall" if no_answer else ""
    line = f"{folder.parent.name}, {clock(diagnosis.unix_time) or 'at an unknown time'}{earlier}"
    return HangReport(str(run_dir), state, False, line, str(folder), diagnosis)


def _newest_diagnosis(run_dir: Path) -> Path | None:
    """The folder of the newest diagnosis of all attempts. Folders without a complete diagnosis are skipped."""
    for attempt in reversed(attempts(run_dir)):
        matches = (re.fullmatch(r"(?:diagnosis|verdict)-([0-9]{1,9})", name) for name in entry_names(attempt))
        for _, name in sorted(((int(m[1]), m[0]) for m in matches if m), reverse=True):
            if os.path.lexists(diagnosis_file(attempt / name)):
                return attempt / name
    return None


def request_diagnosis(attempt: Path) -> DiagnosisRecord | None:
    """Request a diagnosis from the coordinator of a running attempt; None if it does not answer."""
    nonce = secrets.token_hex(8)
    question, answer = attempt / f"ask-{os.getpid()}-{nonce}", attempt / f"diagnosis-live-{nonce}"
    try:
        os.close(writing.create_file(question))
    except OSError as error:
        raise UsageError(code="run-cannot-be-asked", question=question, strerror=error.strerror) from error
    deadline = time.monotonic() + ANSWER_TIMEOUT_SECONDS
    try:
        while not diagnosis_file(answer).is_file():
            if time.monotonic() > deadline:
                return None
            time.sleep(POLL_SECONDS)
        return read_diagnosis(answer)
    finally:
        with suppress(OSError):
            question.unlink(missing_ok=True)
        shutil.rmtree(answer, ignore_errors=True)  # no other process needs it


def _shortened(evidence: Evidence) -> Evidence:
    return msgspec.structs.replace(
        evidence,
        native=evidence.native[:MOST_CHARS],
        error_text=evidence.error_text[-MOST_CHARS:],
        stacks=tuple(msgspec.structs.replace(stack, frames=stack.frames[:MOST_LINES]) for stack in evidence.stacks[:1]),
    )


def _show(report: HangReport) -> None:
    console = Console(highlight=False, markup=False, emoji=False, soft_wrap=True)
    console.print(report.message)
    if (record := report.record) is None:
        return
    causes = record.diagnosis.causes
    shown = sorted(record.evidence, key=lambda evidence: (evidence.rank not in causes, evidence.rank))[:MOST_SHOWN]
    if len(shown) < len(record.evidence):
        console.print(f"(showing {MOST_SHOWN} of {len(record.evidence)} ranks; the others are in the folder)")
    shown.sort(key=lambda evidence: evidence.rank)

    def print_block(text: str, style: str) -> None:
        headline, _, rest = text.partition("\n")
        console.print(f"\n{headline}", style=style)
        if rest:
            console.print(rest.rstrip("\n"))

    if not report.live or record.waited_seconds >= RECENT_PROGRESS_SECONDS:
        folder, waited_seconds = report.diagnosis_dir, record.waited_seconds
        text = format_report(record.diagnosis, shown, waited_seconds=waited_seconds, folder=folder, run="")
        print_block(text, "bold red")
    for evidence in shown:
        text = describe_rank(_shortened(evidence), most_ops=MAX_SHOWN_OPS, most_stacks=1)
        lines = text.splitlines()[:MOST_LINES]
        print_block("\n".join(lines), "bold red" if evidence.rank in causes else "bold")
