"""Checks in every step, before parameters change, that all ranks have called the same collectives in the same order.

Two collectives of one shape that a rank calls in the other order are paired wrongly: nothing fails, and the sums are
wrong. So each rank hashes what it calls, with names and source lines. The hashes ride in the step's totals, one slot
for each rank, and only where they differ do the ranks exchange what they have called.

Source lines alone may differ for good reason (`if rank == 0: broadcast(mine) else: broadcast(buffer)`): a line that
some rank has called more often than another belongs to a branch, and is left out of the hash from then on. But where
all ranks have always called from the same lines, and one leaves them for two calls that look alike, it may have
exchanged the two: that is an error, too. Code that means it gives the tensors names, which are compared instead of
lines (`tensor.collective = "sum of weights"`).
"""

import hashlib
from collections.abc import Callable, Sequence

import msgspec

from paceline.collectives.control import gather_words, told_once
from paceline.errors import ExitCode, PacelineError, TrainingError
from paceline.protocol.evidence import Op
from paceline.protocol.marks import Mismatch, compare_orders, order_label
from paceline.rank.world import World
from paceline.stepping.nonfinite import UNCHANGED

HASH_BYTES = 6  # a float64 holds it exactly


class CallOrder:
    """This rank's side of the comparison. All ranks find, and so leave out, the same lines."""

    def __init__(
        self,
        world: World,
        take: Callable[[], int],
        taken: Callable[[], list[Op]],
        notice: Callable[[str], None],
    ) -> None:
        """`take` and `taken` are those of the guard, see `rank.guard`."""
        self._world, self._take, self._taken, self._notice = world, take, taken, notice
        self._local: frozenset[str] = frozenset()
        self._known: frozenset[str] = frozenset()  # lines from which all ranks have called
        self._agreed = 0
        # True once the guard's hash, which contains every line, was too strict.
        self._hashes_itself = False
        self.compared: tuple[int, ...] = ()
        """numbers that must be the same on all ranks in each step: they are a part of the hash"""
        self.names: Callable[[], Sequence[str]] = tuple
        """of these numbers"""
        self.explain: Callable[[dict[str, list[int]]], PacelineError] | None = None
        """(the numbers that differ, by name, of all ranks) -> the error"""

    def hashes(self) -> list[float]:
        """One number for each rank, to be added up: this rank's hash of all it has called since the last time."""
        if self._world.size == 1:
            return []
        slots = [0.0] * self._world.size
        mine = self._take()
        own = _hashed(self._taken(), self._local) if self._hashes_itself else mine
        if self.compared:
            own = (own + hash(self.compared)) % 2 ** (8 * HASH_BYTES)
        slots[self._world.rank] = float(own)
        return slots

    def check(self, hashes: Sequence[float], where: str, *, late: bool = False) -> None:
        """Compare all ranks' `hashes` of the step `where`, added up over ranks (a collective where they differ).

        `late`: the step has been taken.

        Raises:
            TrainingError: with MISMATCH, told by a rank in the minority; ReportedByPeer on the others.
        """
        if not hashes:
            return
        if len(set(hashes)) == 1:
            self._agreed += 1
            if self._agreed & (self._agreed - 1) == 0:  # 1, 2, 4, 8, ...: soon knows what every step does
                self._known |= {order_label(op, self._local)[-1] for op in self._taken()}
            return
        mine = dict(zip(self.names(), self.compared, strict=False))  # a model may have been prepared since
        told = gather_words([mine, [msgspec.to_builtins(op) for op in self._taken()]], self._world)
        numbers: list[dict[str, int]] = [of_rank for of_rank, _ in told]
        names = {name for of_rank in numbers for name in of_rank}
        differing = {name: [of_rank.get(name, 0) for of_rank in numbers] for name in sorted(names)}
        differing = {name: values for name, values in differing.items() if len({*values}) > 1}
        if differing and self.explain is not None:
            raise told_once(self.explain(differing), self._world)
        histories = [msgspec.convert(words, list[Op]) for _, words in told]
        found = compare_orders(histories, self._local, self._known)
        if isinstance(found, Mismatch):
            error = TrainingError(
                code="collectives-differ", exit_code=ExitCode.MISMATCH, place=where, what=found.words,
                unchanged="" if late else UNCHANGED,
            )  # fmt: skip
            raise told_once(error, self._world, by=min(found.odd, default=0))
        self._hashes_itself = True
        if new := found - self._local:
            self._notice(
                f"some ranks call collectives from lines where others do not ({', '.join(sorted(new))}): these lines "
                "are left out when the order of collectives is compared"
            )
        self._local = found


def _hashed(history: Sequence[Op], local: frozenset[str]) -> int:
    """As the guard's own hash: ordered within each group, whatever the order between groups."""
    groups = sorted({op.group for op in history})
    lines = [[order_label(op, local) for op in history if op.group == group] for group in groups]
    digest = hashlib.blake2b(repr((groups, lines)).encode(), digest_size=HASH_BYTES).digest()
    return int.from_bytes(digest, "little")
