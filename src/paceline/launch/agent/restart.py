"""Decides whether another start is worth it. Pure: from the failures so far to a restart, perhaps smaller, or none.

What comes from outside (a killed process, memory that ran out, a network that broke) is worth another try. What the
program does by itself it would do again, and the try would only hide the error and burn hours.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from paceline.contract.evidence import Sample, Verdict, VerdictKind
from paceline.contract.failure import LOADER_KILLED
from paceline.errors import ExitCode
from paceline.guard.deaths import RankEnd, end_of
from paceline.guard.report import same_verdict


@dataclass(frozen=True)
class FailedGeneration:
    """How one generation failed: its first failure, and how far it had come."""

    end: RankEnd | None  # of the rank that failed first; None: ranks stood still, or were at odds
    rank: int
    exit_code: int
    exception: str  # the type's name; empty without a record
    step: int  # steps done by the rank that had come furthest
    nproc: int
    loader_killed: bool = False  # the exception only says that a DataLoader worker was killed: memory ran out, say
    verdict: Verdict | None = None  # the hang guard's, where that has ended it
    ended_well: frozenset[int] = frozenset()  # exit codes of ranks that had ended in good order before

    @classmethod
    def of(cls, verdict: Verdict, ranks: Sequence[Sample], exit_code: int, *, step: int, nproc: int) -> Self:
        """A generation that ended with this verdict on its ranks."""
        first = next((one for one in ranks if one.rank == verdict.failed), None)
        if first is None:
            rank = verdict.guilty[0] if verdict.guilty else -1
            return cls(None, rank, exit_code, "", step, nproc, verdict=verdict)
        failure = first.failure
        return cls(
            end=end_of(first),
            rank=first.rank,
            exit_code=exit_code,
            exception=failure.type if failure else "",
            step=step,
            nproc=nproc,
            loader_killed=bool(failure and LOADER_KILLED.search(failure.message)),
            ended_well=frozenset(one.code for one in ranks if one.code is not None and not one.ended_badly),
        )

    @property
    def progress(self) -> tuple[int, int]:
        """How far it had come; a script, which counts no steps, by the number of the collective that it stood in."""
        op = None if self.verdict is None else self.verdict.op
        return self.step, 0 if self.step or op is None else op.seq

    def is_like(self, other: Self) -> bool:
        """Whether the other one was the same failure."""
        if self.verdict is not None and other.verdict is not None:
            return same_verdict(self.verdict, other.verdict)
        return (self.end, self.rank, self.exit_code) == (other.end, other.rank, other.exit_code)


@dataclass(frozen=True)
class Restart:
    """Start again, with so many ranks."""

    nproc: int


@dataclass(frozen=True)
class NoRestart:
    """The end, and the sentence that says why; empty where nobody has asked for restarts."""

    sentence: str


@dataclass(frozen=True)
class Change:
    """How many nodes the next generation has, and how many of the last one's are gone or new ones came."""

    came: int
    gone: int
    nodes: int

    def words(self, ranks: int, number: str, *, fewer: bool) -> str:
        """What is said of its start; `number` is that of a restart, `fewer` whether there is a rank less."""
        counted = f"{ranks} rank{'s' * (ranks > 1)}"
        if not self.came and not self.gone:
            why = " (one fewer, for the same failure came twice at the same step)" if fewer else ""
            return f"restart {number}: {counted}{why}" if number else f"going on: {counted}"
        told = [f"with {self.came} more"] if self.came else []
        told += ["without it" if self.gone == 1 else f"without {self.gone} of them"] if self.gone else []
        return f"going on {' and '.join(told)}: {counted} on {self.nodes} node{'s' * (self.nodes > 1)}"


def decide(
    history: Sequence[FailedGeneration], *, nproc: int, min_nproc: int, max_restarts: int
) -> Restart | NoRestart:
    """What to do after the last failure of `history`, which holds one failure per generation, the oldest first.

    `nproc` are the ranks of the first generation; `min_nproc`, 0 for as many, must be left.

    Example: 4 ranks, min_nproc 3. Rank 1 is killed at step 40, restart; again at step 40, restart with 3 ranks, which
    are a new start to the count; rank 1 of them is killed at step 40, restart; again at step 40, the end.
    """
    last = history[-1]
    if max_restarts == 0:
        return NoRestart("")
    if reason := _not_worth_it(last):
        return NoRestart(f"not restarted: {reason}")
    fewer = _is_repeated(history)
    if fewer and last.nproc - 1 < max(1, min_nproc or nproc):
        who = f"rank {last.rank}, " if last.rank >= 0 else ""
        after = f", after step {last.step}" if last.step else ""
        return NoRestart(
            f"not restarted: the same failure at the same step twice: {who}exit code {last.exit_code}{after}"
        )
    if len(history) > max_restarts:
        return NoRestart(f"not restarted: {max_restarts} of {max_restarts} restarts are used up")
    return Restart(last.nproc - 1 if fewer else last.nproc)


def without_lost_nodes(here: int, *, nodes: int, min_nodes: int, nproc: int) -> Restart | NoRestart:
    """What to do when nodes are lost and `here` of `nodes` are left: a lost node costs none of the restarts."""
    if here >= min_nodes and min_nodes < nodes:
        return Restart(nproc)
    asked = f"--nodes {nodes}" if min_nodes >= nodes else f"--nodes {min_nodes}:{nodes}"
    advice = " (over ssh, --nodes MIN:MAX goes on with fewer)" if min_nodes >= nodes else ""
    return NoRestart(
        f"not restarted: {here} of {nodes} nodes {'is' if here == 1 else 'are'} left, {asked} asks for more{advice}"
    )


def _is_repeated(history: Sequence[FailedGeneration]) -> bool:
    if len(history) < 2:
        return False
    before, last = history[-2:]
    # a restart goes back to a checkpoint: failing before the old step is reached again is no progress either
    return before.nproc == last.nproc and last.is_like(before) and last.progress <= before.progress


def _not_worth_it(last: FailedGeneration) -> str:
    """Why a restart would only meet the same again; empty where it may help."""
    if ExitCode.SAVED in last.ended_well:
        return "a rank had saved its state and stopped, so the run was to end"
    if last.exit_code == ExitCode.USAGE:
        return "this is wrong use, which a restart does not change"
    if last.verdict is not None and last.verdict.kind in (VerdictKind.MISMATCH, VerdictKind.DEADLOCK):
        return "that ranks call different collectives is an error of the program, which a restart would only meet again"
    if last.exit_code in (ExitCode.NOT_FINITE, ExitCode.DIVERGED):
        return "wrong results are an error of the program, or of a machine, which a restart would only meet again"
    left = last.verdict is not None and last.verdict.kind is VerdictKind.LEFT
    if left or (last.end is RankEnd.VICTIM and last.ended_well):
        return "a rank ended while others ran, which is an error of the program"
    if last.end is RankEnd.EXCEPTION and not last.loader_killed:
        return f"{last.exception} is an error of the program, which a restart would only meet again"
    if last.end is RankEnd.EXIT:
        return f"the program itself ended with exit code {last.exit_code}, and would do so again"
    return ""
