"""The head's monitor of a generation: it diagnoses stalls, failures and silent faults, and serves `paceline watch`.

The head decides what happens to the run. An error of the monitor is reported once, and the run continues without it; a
failure is then diagnosed by samples alone.
"""

import os
import re
import shutil
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec
from msgspec.structs import replace

from paceline.errors import ExitCode
from paceline.guard import detectors
from paceline.guard.collect import ANSWER_SECONDS
from paceline.guard.judge import is_deadlocked, judge, judge_samples
from paceline.guard.report import EXIT_CODES, format_failure, format_verdict, format_warning, summarize, write_verdict
from paceline.guard.sentences import clause
from paceline.guard.silent import SilentFaultDetector, calls_of
from paceline.launch.agent.cluster import Generation
from paceline.launch.agent.joining import unreachable
from paceline.protocol.evidence import (
    CHECKPOINT_ASK,
    LIVE,
    WATCHED,
    Evidence,
    Live,
    LiveRank,
    Sample,
    Verdict,
    VerdictKind,
)
from paceline.runs import writing
from paceline.runs.attempt import ScriptNotice, write_notice
from paceline.runs.console import say

HURRIED_SECONDS = 0.3  # for an answer while the run is dying
WARNING_SECONDS = 0.5  # for an answer that only decides about a warning
LEFT_SECONDS = 5.0  # all that run wait, and a rank has left: nothing is learned by waiting longer
REACH_SECONDS = 6.0
PATIENCE_SECONDS = 0.5  # for the calls behind a silent fault
ASK_SECONDS = 1.0
MAX_ASKS = 8  # `paceline hang`, in as many terminals
ASK = re.compile(r"ask-[0-9]{1,10}-([0-9A-Za-z_-]{1,64})")
EARLY = (VerdictKind.LEFT, VerdictKind.NOT_MET, VerdictKind.STOPPED)  # what can be known before the window is over


@dataclass(frozen=True)
class Diagnosis:
    """Why a run is to be ended, and the report of it."""

    verdict: Verdict
    evidence: Sequence[Evidence]
    attempt_dir: str
    waited_seconds: float = 0.0  # how long nothing had moved; 0: a rank has failed
    told: str = ""  # what the screen says, where the failure of a rank is not all there is

    @property
    def unblocked(self) -> tuple[int, ...]:
        """The ranks that only wait for others."""
        return detectors.ranks_to_unblock(self.verdict, self.evidence)

    @property
    def exit_code(self) -> int:
        """The exit code of the run: that of the failed rank, if its failure is the whole diagnosis."""
        failed = next((one for one in self.evidence if one.rank == self.verdict.failed), None)
        return EXIT_CODES.get(self.verdict.kind, ExitCode.STALLED) if failed is None else failed.exit_code

    @property
    def word(self) -> str:
        """The message to the unblocked ranks, as JSON."""
        word = {"kind": self.verdict.kind.name, "page": self.page(), "exit_code": int(self.exit_code)}
        return msgspec.json.encode(word | {"guilty": self.verdict.guilty}).decode()

    @property
    def line(self) -> str:
        """The cause in one line."""
        return self.told.partition("\n")[0] or summarize(self.verdict, self.evidence, self.waited_seconds)

    def page(self, oom_kills: int = 0) -> str:
        """The report for the screen; `oom_kills` is the number of processes that the kernel has killed for memory."""
        return self.told or format_failure(
            self.verdict, self.evidence, oom_kills=oom_kills, attempt_dir=self.attempt_dir
        )


class Monitor:
    """The guard of one generation."""

    def __init__(self, generation: Generation) -> None:
        self._generation, self._plan = generation, generation.plan
        self._windows = self._plan.stall_after
        self._stalls = detectors.StallDetector(self._windows)
        self._stragglers = detectors.StragglerDetector({one.rank: one.host for one in generation.samples()})
        self.look_seconds = detectors.sample_seconds(self._windows)  # how often to look
        self._looked_seconds = self._asked_seconds = self._early_seconds = 0.0
        self._silent = SilentFaultDetector(
            self._plan.ranks.world_size, generation.own.names, lambda: calls_of(generation.ask(PATIENCE_SECONDS))
        )
        self._sleep, self._unmet = detectors.SleepDetector(self._windows), detectors.DeadlockDetector(self._windows)
        self._off = self._windows.off

    def look(self) -> Diagnosis | None:
        """Run the detectors that are due; a diagnosis if the run is to be ended."""
        if self._off or time.monotonic() < self._looked_seconds + self.look_seconds / 2:
            return None
        try:
            self._looked_seconds = time.monotonic()
            return self._look()
        except Exception as error:
            return self._give_up(error)

    def look_last(self) -> Diagnosis | None:
        """Look for silent faults after all ranks have ended in good order."""
        try:
            return None if self._off else self._look_for_silent_faults(last=True)
        except Exception as error:
            return self._give_up(error)

    def judge_failure(self, samples: Sequence[Sample]) -> Diagnosis:
        """Judge a generation of which, as `samples` show, some ranks have failed."""
        if not self._off:
            try:
                evidence = self._generation.ask(HURRIED_SECONDS, to_its_end=True)
                return self._judged(judge(evidence), evidence, 0.0)
            except Exception as error:
                self._give_up(error)
        return Diagnosis(judge_samples(samples), [Evidence.of(one) for one in samples], self._plan.attempt_dir)

    def _give_up(self, error: Exception) -> None:
        self._off = True
        words = f"{type(error).__name__}: {error}"
        say(f"warning: the hang guard crashed and is disabled; training continues without hang detection: {words}")

    def _look(self) -> Diagnosis | None:
        running = self._generation.running()
        self.look_seconds = detectors.heartbeat_seconds(self._windows, self._plan.nodes, running)
        alarm = self._stalls.see(time.monotonic(), detectors.assume_waiting(running, self._plan.ranks.world_size))
        for kind, words in (("", self._stalls.notice), ("slow", self._slow(running))):
            if words:
                self._notify(words, kind=kind)
        self._stalls.notice = ""
        if wrong := self._look_for_silent_faults():
            return wrong
        self._answer_asks()
        if unmet := self._never_meeting(running):
            return unmet
        alarm = alarm or self._early_alarm(running)
        if alarm is None:
            return None
        warned_only = alarm.kind == "warn"
        evidence = self._generation.ask(WARNING_SECONDS if warned_only else ANSWER_SECONDS)
        if blind := [one.rank for one in evidence if not one.watched]:
            self._off = True  # into that nobody sees: nobody can be judged
            who = f"{clause(blind, 'has', 'have')}"
            say(f"warning: the hang guard is off: {who} become another program (exec)")
            return None
        if self._generation.interrupted or not detectors.is_stalled(evidence, alarm, self._windows):
            return None
        if not warned_only:
            return self._stall(evidence, alarm)
        ranks = [replace(one, waiting=detectors.is_waiting(one)) for one in evidence if one.runs]
        say(format_warning(ranks, still_seconds=alarm.still_seconds, window_seconds=alarm.window_seconds))
        return None

    def _look_for_silent_faults(self, *, last: bool = False) -> Diagnosis | None:
        """Report silent faults of a script; a diagnosis if the run is to be ended."""
        samples = self._generation.samples()
        if not any(one.script for one in samples):
            return None
        found = self._silent.see(samples, last=last)
        stops, step = self._plan.on_drift == "stop", max(one.step for one in samples)
        for notice in self._silent.notices:
            self._notify(notice.words, step, kind=notice.kind)
        self._silent.notices.clear()
        for one in found[:1] if stops else found:
            name = one.kind.name.replace("_", " ")
            words = f"{name}{f' at step {one.step}' if one.step else ''}: {'; '.join(one.sentences)}"
            self._notify(words, one.step or step, kind=name.lower(), aloud=not stops)  # else its page follows
        return self._judged(found[0], self._generation.ask(PATIENCE_SECONDS), 0.0) if stops and found else None

    def _notify(self, words: str, step: int = 0, *, kind: str = "", aloud: bool = True) -> None:
        """Report it on the screen and in the attempt's folder."""
        if aloud:
            say(words)
        if self._plan.attempt_dir:
            write_notice(Path(self._plan.attempt_dir), ScriptNotice(round(time.time(), 3), words, step, kind))

    def _slow(self, running: Sequence[Sample]) -> str:
        """The warning of a slow rank, with the trouble of its GPU; empty if there is none."""
        words = self._stragglers.see(running)
        if words and self._stragglers.rank is not None:
            evidence = self._generation.ask(WARNING_SECONDS)
            words += "".join(f". {one.gpu}" for one in evidence if one.rank == self._stragglers.rank and one.gpu)
        return words

    def _never_meeting(self, running: Sequence[Sample]) -> Diagnosis | None:
        """A diagnosis of ranks that wait in collectives which can never complete, before the window is over."""
        if not self._unmet.due(time.monotonic(), running):
            return None
        evidence = self._generation.ask(WARNING_SECONDS)
        if self._generation.interrupted or not is_deadlocked(evidence):
            return None
        verdict = judge(evidence)
        if verdict.kind not in (VerdictKind.MISMATCH, VerdictKind.DEADLOCK):
            return None
        return self._judged(verdict, evidence, max(one.still_seconds for one in evidence if one.runs))

    def _early_alarm(self, running: Sequence[Sample]) -> detectors.Alarm | None:
        """An alarm before the window is over, if details now show as much as they would at its end.

        A rank has ended with code 0 and all others wait; or, in a window of the user's, ranks have not met.
        """
        now, still_seconds = time.monotonic(), min((one.still_seconds for one in running), default=0.0)
        if now < self._early_seconds:
            return None
        asked_seconds, met = self._windows.seconds, any(one.met for one in running)
        several = self._plan.ranks.world_size > 1
        apart = several and not met and asked_seconds is not None and still_seconds >= asked_seconds
        left = still_seconds >= LEFT_SECONDS and all(one.waiting for one in running)
        if self._sleep.due(running):
            return detectors.Alarm("stall", still_seconds, 0.0)
        if not apart and not (left and any(one.code == ExitCode.DONE for one in self._generation.samples())):
            return None
        self._early_seconds = now + still_seconds  # less and less often, where it is nothing
        return detectors.Alarm("stall", still_seconds, 0.0)

    def _stall(self, evidence: Sequence[Evidence], alarm: detectors.Alarm) -> Diagnosis | None:
        verdict = judge(evidence)
        proof = self._sleep.proves(verdict, evidence)
        if not alarm.window_seconds and not (verdict.kind in EARLY if proof is None else proof):
            return None
        if verdict.kind is VerdictKind.NETWORK:
            apart = unreachable(self._generation.cluster, REACH_SECONDS, lambda: self._generation.interrupted)
            verdict = replace(verdict, sentences=(*verdict.sentences, *apart[:8]))
            if self._generation.interrupted or time.monotonic() < self._generation.cluster.settled_seconds:
                return None  # of a cable that carries again connections come back by themselves, but not at once
        return self._judged(verdict, evidence, max(one.still_seconds for one in evidence))

    def _judged(self, verdict: Verdict, evidence: Sequence[Evidence], waited_seconds: float) -> Diagnosis:
        """Write the verdict into a folder, unless it is only a failure."""
        if verdict.failed is not None:
            return Diagnosis(verdict, evidence, self._plan.attempt_dir)
        shown = run = ""
        if self._plan.attempt_dir:  # else it is watched without a folder: the page is all there is
            folders = (Path(self._plan.attempt_dir) / f"verdict-{n}" for n in range(1, 1000))
            folder = next(folder for folder in folders if not folder.exists())
            try:
                write_verdict(folder, verdict, evidence, waited_seconds=waited_seconds)
                shown, run = _short(folder), _short(Path(self._plan.run_dir)) if self._plan.run_dir else ""
            except OSError:  # a full disk does not keep anybody from being named
                shutil.rmtree(folder, ignore_errors=True)
        told = format_verdict(verdict, evidence, waited_seconds=waited_seconds, folder=shown, run=run)
        return Diagnosis(verdict, evidence, self._plan.attempt_dir, waited_seconds, told)

    def _answer_asks(self) -> None:
        """Answer `paceline hang`, which puts a file into the attempt's folder and waits for a verdict."""
        if time.monotonic() < self._asked_seconds + ASK_SECONDS or not self._plan.attempt_dir:
            return
        self._asked_seconds = time.monotonic()
        folder = Path(self._plan.attempt_dir)
        nonces: list[str] = []
        with suppress(OSError):  # what was taken before is answered
            nonces.extend(take_asks(folder, ASK))
        for nonce in nonces[:MAX_ASKS]:
            evidence = self._generation.ask(ANSWER_SECONDS)
            waited_seconds = min((one.still_seconds for one in evidence if one.code is None), default=0.0)
            with suppress(OSError):
                place = folder / f"verdict-live-{nonce}"
                write_verdict(place, judge(evidence), evidence, waited_seconds=waited_seconds)


def _short(path: Path) -> str:
    """The path relative to the working folder, if it is in there."""
    try:
        return str(path.relative_to(Path.cwd()))
    except (OSError, ValueError):  # the folder that it was started in is gone; or the path is elsewhere
        return str(path)


# ---- `paceline watch` ----

LOOK_SECONDS = 0.9  # the head comes by once a second
WATCHED_SECONDS = 15.0  # since the last touch
CHECKPOINT = re.compile(f"{CHECKPOINT_ASK}(.*)", re.DOTALL)


class LiveStatus:
    """The state of a generation, written for `paceline watch` while it looks."""

    def __init__(self, generation: Generation) -> None:
        self._generation = generation
        self._folder = Path(generation.plan.attempt_dir)
        self._looked_seconds = 0.0
        self._touched, self._touched_seconds = 0, float("-inf")  # as its file system has it, and when we saw that
        self._off = not generation.plan.attempt_dir

    def look(self, ranks: Sequence[Sample]) -> None:
        """Write the state, and pass on requests for a checkpoint, once a second."""
        now = time.monotonic()
        if self._off or now < self._looked_seconds + LOOK_SECONDS:
            return
        self._looked_seconds = now
        try:
            if self._is_watched(now):
                live = Live(round(time.time(), 3), self._generation.own.number, tuple(LiveRank.of(r) for r in ranks))
                writing.replace(self._folder / LIVE, msgspec.json.encode(live))
            if [*take_asks(self._folder, CHECKPOINT)]:
                self._generation.own.ask_to_save()  # rank 0 is ours, and votes on it with all others
        except Exception as error:
            self._off = True
            say(f"warning: paceline watch sees this run no more: {type(error).__name__}: {error}")

    def _is_watched(self, now_seconds: float) -> bool:
        """Whether the time of the file has changed lately. The clocks of two machines are not compared."""
        try:
            touched = (self._folder / WATCHED).lstat().st_mtime_ns
        except FileNotFoundError:
            return False
        if touched != self._touched:
            self._touched, self._touched_seconds = touched, now_seconds
        return now_seconds < self._touched_seconds + WATCHED_SECONDS


def take_asks(folder: Path, ask: re.Pattern[str]) -> Iterator[str]:
    """Remove the request files in a folder one by one, and yield the group of `ask` in each name."""
    with os.scandir(folder) as entries:
        for entry in entries:
            match = ask.fullmatch(entry.name)
            if match is not None and stat.S_ISREG(entry.stat(follow_symlinks=False).st_mode):
                Path(entry.path).unlink()
                yield match[1]
