"""Checks in every step, before parameters change, that all ranks have called the same collectives in the same order.

If a rank swaps two collectives of the same shape, each is paired with the wrong one: no error occurs, and the sums are
wrong. Therefore each rank hashes its calls with their names and source lines. The hashes are a part of the totals of
the step, one slot per rank. If they differ, the ranks exchange the calls.

Source lines may differ for a good reason (`if rank == 0: broadcast(mine) else: broadcast(buffer)`). A line that some
rank has called more often than another belongs to a branch, and is not hashed from then on. But if all ranks have
always called from the same lines, and one rank makes two equal-looking calls from other lines, it may have swapped
them. This is an error as well. If it is intended, name the tensors: names are compared instead of lines
(`tensor.collective = "sum of weights"`).
"""

import hashlib
from collections.abc import Callable, Sequence

import msgspec

from paceline.collectives.control import all_gather_object, error_on_one_rank
from paceline.errors import ExitCode, PacelineError, TrainingError
from paceline.protocol.evidence import Op
from paceline.protocol.marks import CallMismatch, compare_call_orders, compared_call_parts
from paceline.rank.world import World
from paceline.stepping.nonfinite import PARAMETERS_UNCHANGED_TEXT

HASH_BYTES = 6  # a float64 holds it exactly


class CollectiveOrderCheck:
    """The comparison on this rank. All ranks find, and ignore, the same lines."""

    def __init__(
        self, world: World, take: Callable[[], int], taken: Callable[[], list[Op]], notice: Callable[[str], None]
    ) -> None:
        """`take` and `taken`: of the ledger, see `rank.ledger`. `notice` prints a message."""
        self._world, self._take, self._notice = world, take, notice
        self.last_calls = taken
        """Returns this rank's calls in the last `hashes`."""
        self._local: frozenset[str] = frozenset()
        self._known: frozenset[str] = frozenset()  # lines from which all ranks have called
        self._agreed = 0
        # whether the hash of the ledger, which contains every line, was too strict
        self._hashes_itself = False
        self.compared: tuple[int, ...] = ()
        """numbers that must be equal on all ranks in each step; a part of the hash"""
        self.names: Callable[[], Sequence[str]] = tuple
        """the names of these numbers"""
        self.explain: Callable[[dict[str, list[int]]], PacelineError] | None = None
        """(for each name that differs, the numbers of all ranks) -> the error"""

    def hashes(self) -> list[float]:
        """One number per rank, to be summed over ranks: this rank's hash of its calls since the last time, else 0."""
        slots = [0.0] * self._world.size
        mine = self._take()
        own_hash = _hashed(self.last_calls(), self._local) if self._hashes_itself else mine
        if self.compared:
            own_hash = (own_hash + hash(self.compared)) % 2 ** (8 * HASH_BYTES)
        slots[self._world.rank] = float(own_hash)
        return slots

    def check(
        self, hashes: Sequence[float], where: object, *, late: bool = False, calls: Sequence[Op] | None = None
    ) -> None:
        """Compare the `hashes` of all ranks for the step `where`, summed over ranks (a collective if they differ).

        `late`: the parameters have already changed. `calls`: of this rank in these hashes. Default: the last ones.
        """
        own_calls = self.last_calls if calls is None else lambda: calls
        if len(set(hashes)) == 1:
            self._agreed += 1
            if self._agreed & (self._agreed - 1) == 0:  # 1, 2, 4, 8, ...: most steps call from the same lines
                self._known |= {compared_call_parts(op, self._local)[-1] for op in own_calls()}
            return
        mine = dict(zip(self.names(), self.compared, strict=False))  # a model may have been prepared since
        reports = all_gather_object([mine, [msgspec.to_builtins(op) for op in own_calls()]], self._world)
        numbers: list[dict[str, int]] = [by_name for by_name, _ in reports]
        names = {name for by_name in numbers for name in by_name}
        differing = {name: [by_name.get(name, 0) for by_name in numbers] for name in sorted(names)}
        differing = {name: values for name, values in differing.items() if len({*values}) > 1}
        if differing and self.explain is not None:
            raise error_on_one_rank(self.explain(differing), self._world)
        histories = [msgspec.convert(ops, list[Op]) for _, ops in reports]
        outcome = compare_call_orders(histories, self._local, self._known)
        if isinstance(outcome, CallMismatch):
            error = TrainingError(
                code="collectives-differ", exit_code=ExitCode.MISMATCH, place=str(where), what=outcome.words,
                unchanged="" if late else PARAMETERS_UNCHANGED_TEXT,
            )  # fmt: skip
            raise error_on_one_rank(error, self._world, by=min(outcome.minority_ranks, default=0))
        self._hashes_itself = True
        if new := outcome - self._local:
            self._notice(
                f"some ranks call collectives from lines where others do not ({', '.join(sorted(new))}): these lines "
                "are not compared with the order of collectives"
            )
        self._local = outcome


def _hashed(history: Sequence[Op], local: frozenset[str]) -> int:
    """The same hash as that of the ledger: calls are ordered within each group, but not between groups."""
    groups = sorted({op.group for op in history})
    lines = [[compared_call_parts(op, local) for op in history if op.group == group] for group in groups]
    digest = hashlib.blake2b(repr((groups, lines)).encode(), digest_size=HASH_BYTES).digest()
    return int.from_bytes(digest, "little")
