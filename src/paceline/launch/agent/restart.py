"""Is another start worth it? Pure: from the failures so far to a restart, perhaps with fewer ranks, or to the end.

What comes from outside (a killed process, memory that ran out, a network that broke) is worth another try. What the
program does by itself it would do again, and the try would only hide the error and burn hours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.errors import ExitCode
from paceline.launch.failure import Kind


@dataclass(frozen=True)
class Failed:
    """How one generation failed: its first failure, and how far it had come."""

    kind: Kind
    rank: int
    exit_code: int
    exception: str  # the type's name; empty without a record
    step: int  # steps done by the rank that had come furthest
    nproc: int
    loader_killed: bool = False  # the exception only says that a DataLoader worker was killed: memory ran out, say
    ended_well: frozenset[int] = frozenset()  # exit codes of ranks that had ended in good order before

    @property
    def what(self) -> tuple[Kind, int, int]:
        """What makes two failures the same one."""
        return self.kind, self.rank, self.exit_code


@dataclass(frozen=True)
class Restart:
    """Start again, with so many ranks."""

    nproc: int


@dataclass(frozen=True)
class Stop:
    """The end, and the sentence that says why; empty where nobody has asked for restarts."""

    sentence: str


def decide(history: Sequence[Failed], *, nproc: int, min_nproc: int, max_restarts: int) -> Restart | Stop:
    """What to do after the last failure of `history`, which holds one failure per generation, the oldest first.

    Args:
        history: not empty; every failure but the last was followed by a restart.
        nproc: ranks of the first generation.
        min_nproc: ranks that must be left; 0 means nproc.
        max_restarts: restarts allowed in all.

    Example: 4 ranks, min_nproc 3. Rank 1 is killed at step 40, restart; again at step 40, restart with 3 ranks, which
    are a new start to the count; rank 1 of them is killed at step 40, restart; again at step 40, the end.
    """
    last = history[-1]
    if max_restarts == 0:
        return Stop("")
    if reason := _not_worth_it(last):
        return Stop(f"not restarted: {reason}")
    fewer = _is_repeated(history)
    if fewer and last.nproc - 1 < max(1, min_nproc or nproc):
        return Stop(
            f"not restarted: the same failure at the same step twice: rank {last.rank}, exit code {last.exit_code}, "
            f"after step {last.step}"
        )
    if len(history) > max_restarts:
        return Stop(f"not restarted: {max_restarts} of {max_restarts} restarts are used up")
    return Restart(last.nproc - 1 if fewer else last.nproc)


def without_lost_nodes(here: int, *, nodes: int, min_nodes: int, nproc: int) -> Restart | Stop:
    """What to do when nodes are lost and `here` of `nodes` are left: a lost node costs none of the restarts."""
    if here >= min_nodes and min_nodes < nodes:
        return Restart(nproc)
    asked = f"--nodes {nodes}" if min_nodes >= nodes else f"--nodes {min_nodes}:{nodes}"
    advice = " (over ssh, --nodes MIN:MAX goes on with fewer)" if min_nodes >= nodes else ""
    return Stop(
        f"not restarted: {here} of {nodes} nodes {'is' if here == 1 else 'are'} left, {asked} asks for more{advice}"
    )


def _is_repeated(history: Sequence[Failed]) -> bool:
    if len(history) < 2:
        return False
    before, last = history[-2:]
    # a restart goes back to a checkpoint: failing before the old step is reached again is no progress either
    return before.nproc == last.nproc and before.what == last.what and last.step <= before.step


def _not_worth_it(last: Failed) -> str:
    """Why a restart would only meet the same again; empty where it may help."""
    if ExitCode.SAVED in last.ended_well:
        return "a rank had saved its state and stopped, so the run was to end"
    if last.exit_code == ExitCode.USAGE:
        return "this is wrong use, which a restart does not change"
    if last.kind is Kind.EXCEPTION and not last.loader_killed:
        return f"{last.exception} is an error of the program, which a restart would only meet again"
    if last.kind is Kind.EXIT:
        return f"the program itself ended with exit code {last.exit_code}, and would do so again"
    if last.kind is Kind.VICTIM and last.ended_well:
        return "a rank ended while others ran, which is an error of the program"
    return ""
