"""The head's part of the hang guard: it finds a standstill and who is to blame, and writes that down.

What becomes of the run is the head's business. The guard is never the cause of anything: what goes wrong in here is
reported once, and the run goes on without a guard.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec
from msgspec.structs import replace

from paceline.agent.gather import unreachable
from paceline.agent.generation import Generation
from paceline.contract.evidence import Evidence, Verdict, VerdictKind
from paceline.errors import ExitCode
from paceline.guard import story
from paceline.guard.collect import ANSWER_SECONDS
from paceline.guard.deaths import Kind, Observation
from paceline.guard.judge import judge
from paceline.guard.pace import Alarm, Pace, RankPace
from paceline.guard.pulse import Pulse, sample_seconds
from paceline.guard.slow import Slowness
from paceline.guard.standing import paces, stands_still, to_free, waits
from paceline.guard.wording import called_from, named, told, verb
from paceline.observe.terminal import say

HURRIED_SECONDS = 0.3  # for an answer while the run is dying
WARNING_SECONDS = 0.5  # for an answer that only decides about a warning
LEFT_SECONDS = 5.0  # all that run wait, and a rank has left: nothing is learned by waiting longer
REACH_SECONDS = 6.0
ASK_SECONDS = 1.0
MAX_ASKS = 8  # `paceline hang`, in as many terminals
ASK = re.compile(r"ask-[0-9]{1,10}-([0-9A-Za-z_-]{1,64})")
EARLY = (VerdictKind.LEFT, VerdictKind.NOT_MET, VerdictKind.STOPPED)  # what can be known before the window is over
PROGRAM_ERRORS = (VerdictKind.MISMATCH, VerdictKind.DEADLOCK)
BETTER_THAN_VICTIMS = (
    *PROGRAM_ERRORS,
    VerdictKind.BEHIND,
    VerdictKind.STOPPED,
    VerdictKind.UNINTERRUPTIBLE,
    VerdictKind.LOADER,
)


class UnseenError(Exception):
    """A rank into which the guard does not see: nobody can be judged."""


@dataclass(frozen=True)
class Stall:
    """A run that is to be ended, and why."""

    verdict: Verdict
    page: str
    freed: tuple[int, ...]  # ranks that only wait for others

    @property
    def exit_code(self) -> ExitCode:
        """By its class."""
        if self.verdict.kind is VerdictKind.LEFT:
            return ExitCode.FAILED
        return ExitCode.MISMATCH if self.verdict.kind in PROGRAM_ERRORS else ExitCode.STALLED

    @property
    def word(self) -> str:
        """What the freed ranks learn, as JSON."""
        word = {"kind": self.verdict.kind.name, "page": self.page, "exit_code": int(self.exit_code)}
        return msgspec.json.encode(word | {"guilty": self.verdict.guilty}).decode()


class Guarding:
    """The guard of one generation."""

    def __init__(self, generation: Generation) -> None:
        self._generation, self._plan = generation, generation.plan
        self._windows = self._plan.stall_after
        self._pace = Pace(self._windows)
        self._slowness = Slowness({o.rank: o.host for o in generation.observe()})
        self._looked_seconds = self._asked_seconds = self._early_seconds = 0.0
        self._off = self._windows.off

    @property
    def look_seconds(self) -> float:
        """How often to look."""
        return sample_seconds(self._windows)

    def look(self) -> Stall | None:
        """Do what is to be done now; a stall, if there is one."""
        if self._off or time.monotonic() < self._looked_seconds + self.look_seconds / 2:
            return None
        try:
            self._looked_seconds = time.monotonic()
            return self._look()
        except Exception as error:
            return self._give_up(error)

    def explain(self, primary: Observation) -> tuple[Stall | None, str]:
        """When `primary` has failed: a better explanation, if there is one; and the last collective of that rank."""
        if self._off:
            return None, ""
        try:
            return self._explain(primary)
        except Exception as error:
            self._give_up(error)
            return None, ""

    def _give_up(self, error: Exception) -> None:
        self._off = True
        unseen = isinstance(error, UnseenError)
        why = f"is off: {error}" if unseen else f"has failed, and is off: {type(error).__name__}: {error}"
        say(f"warning: the hang guard {why}")

    def _look(self) -> Stall | None:
        pulses = self._generation.pulses()
        alarm = self._pace.see(time.monotonic(), paces(pulses, self._plan.world_size))
        for words in (self._pace.notice, self._slowness.see(pulses)):
            if words:
                say(words)
        self._pace.notice = ""
        self._answer_asks()
        alarm = alarm or self._early_alarm(pulses)
        if alarm is None:
            return None
        warned_only = alarm.kind == "warn"
        evidence = self._generation.ask(WARNING_SECONDS if warned_only else ANSWER_SECONDS)
        if blind := [one.rank for one in evidence if not one.watched]:
            raise UnseenError(f"{named(blind)} {verb(blind, 'has', 'have')} become another program (exec)")
        if self._generation.interrupted or not stands_still(evidence, alarm, self._windows):
            return None
        if not warned_only:
            return self._stall(evidence, alarm)
        ranks = [RankPace(e.rank, e.still_seconds, e.phase, e.step, waits(e)) for e in evidence if e.code is None]
        say(story.warning(ranks, still_seconds=alarm.still_seconds, window_seconds=alarm.window_seconds))
        return None

    def _early_alarm(self, pulses: Sequence[Pulse]) -> Alarm | None:
        """An alarm before the window is over, where looking closer shows all that waiting could.

        A rank has ended with code 0 and all others wait; or, in a window of the user's, ranks have not met.
        """
        now, still_seconds = time.monotonic(), min((pulse.still_seconds for pulse in pulses), default=0.0)
        if now < self._early_seconds:
            return None
        asked_seconds, met = self._windows.seconds, any(pulse.met for pulse in pulses)
        apart = self._plan.world_size > 1 and not met and asked_seconds is not None and still_seconds >= asked_seconds
        left = still_seconds >= LEFT_SECONDS and all(pulse.waiting for pulse in pulses)
        if not apart and not (left and any(o.code == ExitCode.DONE for o in self._generation.observe())):
            return None
        self._early_seconds = now + still_seconds  # less and less often, where it is nothing
        return Alarm("stall", still_seconds, 0.0)

    def _stall(self, evidence: Sequence[Evidence], alarm: Alarm) -> Stall | None:
        verdict = judge(evidence)
        if not alarm.window_seconds and verdict.kind not in EARLY:
            return None
        if verdict.kind is VerdictKind.NETWORK:
            apart = unreachable(self._generation.crew, REACH_SECONDS, lambda: self._generation.interrupted)
            verdict = replace(verdict, sentences=(*verdict.sentences, *apart[:8]))
            if self._generation.interrupted:
                return None
        return self._written(verdict, evidence, max(one.still_seconds for one in evidence))

    def _written(self, verdict: Verdict, evidence: Sequence[Evidence], waited_seconds: float) -> Stall:
        folder = next(_free_folders(Path(self._plan.attempt_dir)))
        shown = run = ""
        try:
            story.write_verdict(folder, verdict, evidence, waited_seconds=waited_seconds)
            shown, run = _short(folder), _short(Path(self._plan.run_dir)) if self._plan.run_dir else ""
        except OSError:  # a full disk does not keep anybody from being named
            shutil.rmtree(folder, ignore_errors=True)
        page = story.page(verdict, evidence, waited_seconds=waited_seconds, folder=shown, run=run)
        return Stall(verdict, page, to_free(verdict, evidence))

    def _explain(self, primary: Observation) -> tuple[Stall | None, str]:
        evidence = self._generation.ask(HURRIED_SECONDS, to_its_end=True)
        ops = next((one.ops for one in evidence if one.rank == primary.rank), ())
        last = f"its last collective: {told(ops[-1])}{called_from(ops[-1])}" if ops else ""
        aborted = primary.kind is Kind.SIGNAL and primary.code == -signal.SIGABRT
        if primary.kind is not Kind.VICTIM and not aborted:
            return None, last
        verdict = judge(evidence)
        better = verdict.kind in BETTER_THAN_VICTIMS or (aborted and verdict.kind is VerdictKind.LEFT)
        if not better or not (verdict.guilty or verdict.tie):
            return None, last
        return self._written(verdict, evidence, 0.0), last

    def _answer_asks(self) -> None:
        """Answer `paceline hang`, which puts a file into the attempt's folder and waits for a verdict."""
        if time.monotonic() < self._asked_seconds + ASK_SECONDS:
            return
        self._asked_seconds = time.monotonic()
        folder = Path(self._plan.attempt_dir)
        for nonce in _take_asks(folder)[:MAX_ASKS]:
            evidence = self._generation.ask(ANSWER_SECONDS)
            waited_seconds = min((one.still_seconds for one in evidence if one.code is None), default=0.0)
            with suppress(OSError):
                place = folder / f"verdict-live-{nonce}"
                story.write_verdict(place, judge(evidence), evidence, waited_seconds=waited_seconds)


def _take_asks(folder: Path) -> list[str]:
    found: list[str] = []
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            match = ASK.fullmatch(entry.name)
            if match is not None and stat.S_ISREG(entry.stat(follow_symlinks=False).st_mode):
                Path(entry.path).unlink()
                found.append(match[1])
    return found


def _free_folders(attempt_dir: Path) -> Iterator[Path]:
    return (path for n in range(1, 1000) if not (path := attempt_dir / f"verdict-{n}").exists())


def _short(path: Path) -> str:
    """As people here would type it."""
    try:
        return str(path.relative_to(Path.cwd()))
    except (OSError, ValueError):  # the folder that it was started in is gone; or the path is elsewhere
        return str(path)
