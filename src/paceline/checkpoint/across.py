"""What only ranks of other hosts hold of a state, brought here now and then, so that each host has the whole.

Of most strategies every rank holds all, and nothing is sent. Where ranks hold shares (zero, fsdp, a mesh), or each host
has something of its own (what compression holds back), the ranks with the same number on their hosts exchange theirs:

    hosts      rank 0 holds a, rank 1 b      rank 2 holds c, rank 3 d
    after      rank 0 holds a c, rank 1 b d  rank 2 holds a c, rank 3 b d
"""

import math
import time
from collections.abc import Sequence

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from paceline.checkpoint.format import Piece
from paceline.checkpoint.shards import TYPES, fill, layout
from paceline.checkpoint.snapshots import SENT_BYTES
from paceline.checkpoint.state import Held
from paceline.collectives.control import gather_words
from paceline.collectives.torch_collectives import gather_over_torch, start_gather
from paceline.host.cgroup import free_memory
from paceline.worker.world import World

MOST_SHARE = 0.05  # of the time of training: on a slow network not every snapshot is taken
COPIES = 2.5  # of the whole state: two snapshots, and what is on its way


class OtherHosts:
    """The ranks that have this rank's number on other hosts."""

    def __init__(self, held: Sequence[Held], world: World) -> None:
        """A collective; `held` is this rank's state."""
        self._world = world
        self._group: dist.ProcessGroup | None = None
        self._tries, self._pause, self._since = 0, 0, -math.inf  # nothing is known before the first time
        own, local = sum(one.tensor.nbytes for one in _own(held)), world.local_size
        of_all = sum(one.tensor.nbytes for one in held if one.replicated)
        told = gather_words([world.local_rank, local, own, free_memory(), of_all], world)
        whole = sum(one[2] for one in told) + told[0][4]
        self.why_not = ""
        """why there can be no snapshots, in words; the same on all ranks"""
        if any(one[2] for one in told):
            if any(one[:2] != [rank % local, local] for rank, one in enumerate(told)) or world.group is not None:
                self.why_not = "hosts with unequal numbers of ranks hold parts of the state"
            elif any(one[3] is not None and one[3] < COPIES * whole for one in told):
                self.why_not = f"every host would need {COPIES * whole / 1e9:.1f} GB, {COPIES:g} times the whole state"
            else:
                groups = [dist.new_group([*range(n, world.size, local)], group_desc="snapshots") for n in range(local)]
                own_group = groups[world.local_rank]
                assert isinstance(own_group, dist.ProcessGroup)  # this rank is a member
                self._group = own_group
                gather_over_torch(None, len(told) // local, world.device, own_group)  # it connects: this is not timed

    def bring(self, held: Sequence[Held]) -> list[Held] | None:
        """What they hold, and nobody here; None: not this time, it would take too long (a collective)."""
        if self._group is None:
            return []
        self._tries += 1
        if self._tries <= self._pause:
            return None
        began = time.perf_counter()
        others = self._exchanged(held)
        ended = time.perf_counter()
        times = gather_words([ended - began, (began - self._since) / self._tries], self._world)
        took, every = max(one[0] for one in times), times[0][1]  # one clock, or ranks would pause differently
        self._tries, self._pause, self._since = 0, max(0, math.ceil(took / (MOST_SHARE * every)) - 1), ended
        return others

    def _exchanged(self, held: Sequence[Held]) -> list[Held]:
        world, group = self._world, self._group
        part, places = layout(_own(held))
        mine = torch.empty(places.total_bytes, dtype=torch.uint8)
        fill(mine, part, places, {})
        offsets = [places.header_bytes + offset for offset in places.offsets]
        hosts, number = world.size // world.local_size, world.rank // world.local_size
        told = gather_over_torch([msgspec.to_builtins(places.pieces), offsets, len(mine)], hosts, world.device, group)
        every = [torch.empty(one[2], dtype=torch.uint8) for one in told]
        for at in range(0, max(map(len, every)), SENT_BYTES):
            size = min(SENT_BYTES, max(map(len, every)) - at)
            sent = torch.zeros(size, dtype=torch.uint8, device=world.device)
            sent[: max(0, len(mine) - at)] = mine[at : at + size].to(world.device)
            for whole, some in zip(every, start_gather(sent, "a snapshot", group)(), strict=True):
                rest = whole[at : at + size]
                rest.copy_(some[: len(rest)])
        return [
            _held(msgspec.convert(piece, Piece), whole, offset)
            for host, (one, whole) in enumerate(zip(told, every, strict=True))
            for piece, offset in zip(one[0], one[1], strict=True)
            if host != number
        ]


def _own(held: Sequence[Held]) -> list[Held]:
    """What this rank alone has to save."""
    return [one for one in held if not (one.replicated or one.spare)]


def _held(piece: Piece, data: Tensor, at: int) -> Held:
    """The tensor that lies there, as the rank that has sent it holds it."""
    kind, shape = TYPES[piece.dtype], torch.Size(piece.shape)
    values = data[at : at + piece.elements * kind.itemsize].view(kind)
    if piece.key == piece.name:
        return Held(piece.name, values.view(shape), replicated=False)
    return Held(piece.name, values, shape, piece.start, replicated=False, count=piece.count, apart=piece.apart)
