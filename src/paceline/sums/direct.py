"""Sums over few ranks, straight from each of them to each, that are asked for before they are sent.

With gloo a message leaves when its receiver has asked for it: a trip there and back. In a ring of N ranks 2 (N - 1)
messages follow each other. Here every rank finishes a share of each sum, as in `exchange`: two messages follow each
other, and what asks for those of all buckets goes out when the first one leaves. Between two, no way sends less. Where
more send to each at once, the queues of slow cables fill: so a ring is left alone, but it cannot add in a tree's order.
"""

from collections import deque
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.contract.evidence import Op
from paceline.sums.tree import Forest, tree_sum
from paceline.worker.guard import Guard

MOST_RANKS = 8  # each message costs this process 10 us, which gloo's own all-to-all does not
FIRST_TAG = 1 << 20  # of messages; below are those of the user's own program


class _Place:
    """What all sums over one group have in common; the hang guard counts them by it."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.ranks = tuple(dist.get_process_group_ranks(group))
        self.name = f"{group.group_name} sums"
        self.of_all = len(self.ranks) == dist.get_world_size()
        self.next_tag = FIRST_TAG
        self.sent_bytes = 0


_places: WeakKeyDictionary[dist.ProcessGroup, _Place] = WeakKeyDictionary()


def sent_directly() -> int:
    """Bytes that this process has sent in such sums, over groups that are still there."""
    return sum(place.sent_bytes for place in _places.values())


def goes_direct(forest: Forest, device: torch.device, group: dist.ProcessGroup | None, *, in_order: bool) -> bool:
    """Whether sums over the leaves of `forest`, which the ranks of a group own, can go this way, and gain by it.

    `in_order`: they are added in the order of the tree.
    """
    subtrees = forest.nodes()
    few = 2 <= len(subtrees) <= (MOST_RANKS if in_order else 2) and all(len(own) == 1 for own in subtrees)
    return few and device.type == "cpu" and dist.get_backend(group) == "gloo"


class DirectSums:
    """Some sums that are made again and again. Each time all of them begin, in order, and end."""

    def __init__(
        self, forest: Forest, sizes: Sequence[int], dtypes: Sequence[torch.dtype], names: Sequence[str]
    ) -> None:
        """Over the leaves of `forest`, of so many elements, divisible by the number of ranks. No collective."""
        self._forest, self._sizes, self._dtypes, self._names = forest, sizes, dtypes, names
        self._tag: int | None = None
        self.forget()

    def forget(self) -> None:
        """Let go of what was asked for: after an error."""
        self._asked = deque[DirectSum]()

    def ask(self, group: dist.ProcessGroup | None) -> None:
        """Ask all others for what they will send, if that is not done; all ranks begin all sums after it."""
        if self._asked:
            return
        group = group or dist.group.WORLD
        assert isinstance(group, dist.ProcessGroup)
        place = _places.setdefault(group, _Place(group))
        if self._tag is None:  # ranks make their sums in one order
            self._tag, place.next_tag = place.next_tag, place.next_tag + 2 * len(self._sizes)
        for number, (size, dtype) in enumerate(zip(self._sizes, self._dtypes, strict=True)):
            what = self._names[number], f"[{size}]", str(dtype).removeprefix("torch.")
            parts = [torch.empty(size // len(place.ranks), dtype=dtype) for _ in place.ranks[1:]]
            self._asked.append(DirectSum(self._forest, group, place, parts, what, self._tag + 2 * number))

    def begin(self, flat: Tensor) -> "DirectSum":
        """The next one, (n,), on its way: each rank's `flat` becomes the sum."""
        found = self._asked.popleft()
        found.begin(flat)
        return found


class DirectSum:
    """One sum, of which each other rank sends its part of our share, and then its own share when it is finished."""

    def __init__(
        self,
        forest: Forest,
        group: dist.ProcessGroup,
        place: _Place,
        parts: Sequence[Tensor],
        what: tuple[str, str, str],
        tag: int,
    ) -> None:
        """Ask for the parts, one of each other rank. `what`: its name, shape and type, for the hang guard."""
        self._forest, self._group, self._place, self._tag = forest, group, place, tag
        self._others = [(forest.rank + k) % len(forest.owned) for k in range(1, len(forest.owned))]
        self._parts = dict(zip(self._others, parts, strict=True))
        self._arriving = [group.recv([part], other, tag) for other, part in self._parts.items()]
        self._scatters, self._gathers = (Op(place.name, 0, kind, *what) for kind in ("reduce_scatter", "all_gather"))
        self._gathered = False

    def begin(self, flat: Tensor) -> None:
        """Send everybody their part of `flat`, and ask for the finished shares.

        They may arrive where what is sent lies: nobody finishes a share before ours of it has been read.
        """
        with self._shown(self._scatters):
            self._flat, self._shares = flat, flat.view(len(self._others) + 1, -1)
            group, tag, shares = self._group, self._tag, self._shares
            self._arriving_shares = [group.recv([shares[other]], other, tag + 1) for other in self._others]
            self._leaving = [self._send(shares[other], other, tag) for other in self._others]

    def gather(self) -> None:
        """Wait for the parts of our share, add them up in the tree's order, and send everybody the sum."""
        if self._gathered:
            return
        self._gathered = True
        with self._shown(self._gathers):
            for work in self._arriving:
                work.wait()
            mine = self._parts[self._forest.rank] = self._shares[self._forest.rank]
            parts = {own[0]: self._parts[rank] for rank, own in enumerate(self._forest.nodes())}
            total = tree_sum(parts, Tensor.add_, self._forest.leaves)
            if total is not mine:
                mine.copy_(total)
            self._parts.clear()
            self._leaving += [self._send(mine, other, self._tag + 1) for other in self._others]

    def end(self) -> Tensor:
        """(n,): the sum, on every rank."""
        self.gather()
        with self._shown(self._gathers):  # once more: who has come so far and no further is waited for here
            for work in [*self._arriving_shares, *self._leaving]:
                work.wait()
        return self._flat

    def _send(self, share: Tensor, other: int, tag: int) -> dist.Work:
        self._place.sent_bytes += share.nbytes
        return self._group.send([share], other, tag)

    @contextmanager
    def _shown(self, op: Op) -> Generator[None]:
        """As a collective, for the hang guard: on its way as long as this rank waits in it, as nobody else moves it."""
        guard, place = Guard.of_process(), self._place
        begun = guard.begin_own(place, place.ranks, op, of_all=place.of_all)
        try:
            yield
        except BaseException:
            guard.end_own(begun, failed=True)
            raise
        guard.end_own(begun)
