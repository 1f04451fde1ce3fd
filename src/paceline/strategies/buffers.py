"""Buffers (BatchNorm's running statistics, say) kept per virtual rank, as parameters never need to be.

Each virtual rank sees its own samples, so its buffers drift apart from the others'. Which rank computes a virtual rank
must not matter: its buffers are put into the module before its forward, and taken out after it.
"""

from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from paceline.checkpoint.state import Held, Source, needed
from paceline.compute.graphs import not_recorded
from paceline.data.plan import Work, ranks_share
from paceline.errors import TrainingError
from paceline.sums.batchnorm import SyncBatchNorm
from paceline.sums.exchange import Exchange
from paceline.sums.replicate import broadcast
from paceline.sums.tree import Forest, added
from paceline.worker.world import World

_Buffers = dict[str, Tensor]
ALWAYS_COPIED_BYTES = 1 << 20


class VirtualBuffers:
    """The buffers of this rank's virtual ranks, by virtual rank."""

    def __init__(self, model: nn.Module, world: World, virtual_ranks: int) -> None:
        self._world = world
        self._virtual_ranks = virtual_ranks
        self._model = model
        self._slots = _slots(model)
        self._names_checked = False
        self._synchronised = {n for n, slots in self._slots.items() if isinstance(slots[0][0], SyncBatchNorm)}
        self._initial = {name: buffer.clone() for name, buffer in self._in_module().items()}
        self._of: dict[int, _Buffers] = {}
        self._kept: dict[int, _Buffers] = {}
        self._kept_from: dict[int, _Buffers] = {}
        self._copied: dict[tuple[int, str], tuple[Tensor, int]] = {}  # large ones: of which tensor, and its version

    @torch.no_grad()
    def keep(self) -> None:
        """Remember all buffers as they are, for `put_back`."""
        self._kept = {virtual_rank: self._kept.get(virtual_rank, {}) for virtual_rank in self._of}
        self._kept_from = {virtual_rank: dict(buffers) for virtual_rank, buffers in self._of.items()}
        copies: list[Tensor] = []
        originals: list[Tensor] = []
        for virtual_rank, buffers in self._of.items():
            kept = self._kept[virtual_rank]
            for name, buffer in buffers.items():
                copy = kept.get(name)
                if copy is None or copy.shape != buffer.shape or copy.dtype != buffer.dtype:
                    kept[name] = buffer.clone()
                elif self._may_have_changed(virtual_rank, name, buffer):
                    copies.append(copy)
                    originals.append(buffer)
        if copies:
            torch._foreach_copy_(copies, originals)  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]

    def _may_have_changed(self, virtual_rank: int, name: str, buffer: Tensor) -> bool:
        """Whether to copy it again: large tables that nobody writes into must not cost a copy in each step."""
        if buffer.nbytes <= ALWAYS_COPIED_BYTES:  # batch norm's kernel writes without telling the version
            return True
        copied, now = self._copied.get((virtual_rank, name)), buffer._version  # pyright: ignore[reportPrivateUsage]
        self._copied[virtual_rank, name] = (buffer, now)
        return copied is None or copied[0] is not buffer or copied[1] != now

    @torch.no_grad()
    def put_back(self) -> None:
        """All buffers are again what they were at the last `keep`.

        In the same memory, where the module has not replaced them: a CUDA graph knows nothing else.
        """
        now = self._of
        self._of = {
            v: {n: _put_into(b, self._kept_from[v][n], now.get(v, {}).get(n)) for n, b in kept.items()}
            for v, kept in self._kept.items()
        }
        self._put(next(iter(self._of.values()), {name: b.clone() for name, b in self._initial.items()}))

    @contextmanager
    def of(self, work: Work) -> Generator[None]:
        """Inside, the module has the buffers of this work's virtual rank; a stand-in's changes are forgotten.

        Except those of synchronised batch norm: its statistics are global, so a stand-in's are everybody's.
        """
        own = self._of.get(work.virtual_rank) or {name: buffer.clone() for name, buffer in self._initial.items()}
        if work.counted:
            self._put(own)
        else:
            self._put({n: b if n in self._synchronised else b.clone() for n, b in own.items()})
        yield
        if not self._names_checked:
            self._check_names()
        # Read back: a module may have replaced its buffer instead of writing into it.
        after = self._in_module()
        kept = after if work.counted else {n: after[n] if n in self._synchronised else b for n, b in own.items()}
        # Only what has seen a sample counts in the mean; who runs stand-ins depends on the world size.
        if work.counted or self._synchronised or work.virtual_rank in self._of:
            self._of[work.virtual_rank] = kept

    @contextmanager
    def merged(self) -> Generator[None]:
        """Inside, the module has on every rank the mean of the buffers over all virtual ranks (a collective).

        Only virtual ranks that have seen a sample count; buffers that are no floats are those of the lowest one.
        """
        before = self._in_module()
        self._put(self._mean())
        try:
            yield
        finally:
            self._put(before)

    def hold(self) -> list[Held]:
        """All buffers of this rank's virtual ranks; synchronised ones once for all."""
        held: list[Held] = []
        for virtual_rank, buffers in self._of.items():
            own = {name: b for name, b in buffers.items() if name not in self._synchronised}
            held += [Held(f"buffers/{virtual_rank}/{name}", b, replicated=False) for name, b in own.items()]
        if self._synchronised and self._of:  # forwarded together, on all ranks alike
            common = next(iter(self._of.values()))
            held += [Held(f"buffers/{name}", common[name]) for name in sorted(self._synchronised)]
        return held

    def load(self, source: Source) -> None:
        """Take over the buffers of this rank's virtual ranks; one that has none there has not seen a sample yet."""
        self._of = {}
        share = ranks_share(self._virtual_ranks, self._world.rank, self._world.size)
        for virtual_rank in share if not self._synchronised else share[:1]:
            buffers = {name: self._saved(source, virtual_rank, name) for name in self._slots}
            if any(buffer is not None for buffer in buffers.values()):
                initial = self._initial
                self._of[virtual_rank] = {n: initial[n].clone() if b is None else b for n, b in buffers.items()}
        self._put(next(iter(self._of.values()), self._initial))

    def _saved(self, source: Source, virtual_rank: int, name: str) -> Tensor | None:
        names = [f"buffers/{virtual_rank}/{name}", f"buffers/{name}"]
        if self._synchronised:  # a rank's virtual ranks share one set; another world size had other ones
            names.append(f"buffers/0/{name}")
        for full in names:
            if any(there == full for there in source.names(full)):
                return needed(source, full, self._initial[name], any_type=True).to(self._world.device)
        return None

    def _mean(self) -> _Buffers:
        """In the tree's order, so that the world size does not show; in float64, so that the order hardly matters."""
        floating = {n: b for n, b in self._initial.items() if b.is_floating_point()}
        root = self._tree_sum(floating)
        count = float(root[-1])
        pieces = root[:-1].split([b.numel() for b in floating.values()]) if floating else []
        mean: _Buffers = {}
        for (name, initial), piece in zip(floating.items(), pieces, strict=True):
            mean[name] = (piece / count).reshape(initial.shape).to(initial.dtype) if count else initial.clone()
        own = self._of[min(self._of)] if self._of else self._initial
        lowest = {name: own[name].clone() for name in self._initial if name not in floating}
        # from rank 0: it owns virtual rank 0, which has a share of every global batch
        broadcast([*lowest.values()], group=self._world.group)
        return mean | lowest

    def _tree_sum(self, names: Iterable[str]) -> Tensor:
        """(n + 1,) float64: the sum of all these buffers over virtual ranks, and how many of them there are."""
        forest = forest_of(self._world, self._virtual_ranks)
        sums = forest.partial_sums(added)
        zeros = torch.zeros(1, dtype=torch.float64, device=self._world.device)
        size = sum(self._initial[name].numel() for name in names) + 1
        padding = zeros.expand(forest.padded(size) - size)
        for virtual_rank, buffers in sorted(self._of.items()):
            flat = [buffers[name].flatten().double() for name in names]
            sums.add(virtual_rank, torch.cat([*flat, zeros + 1, padding]))
        nothing = zeros.repeat(forest.padded(size))
        exchange = Exchange(
            forest, [nothing.clone() if own is None else own for own in sums.finish()], self._world.group
        )
        exchange.gather()
        return exchange.end()[:size]

    def _in_module(self) -> _Buffers:
        return {name: getattr(*slots[0]) for name, slots in self._slots.items()}

    def _put(self, buffers: Mapping[str, Tensor]) -> None:
        for name, slots in self._slots.items():
            for owner, leaf in slots:
                setattr(owner, leaf, buffers[name])

    def _check_names(self) -> None:
        """After the first forward: a buffer that was made in it would belong to whoever computed it, and be lost.

        Raises:
            TrainingError: naming it.
        """
        self._names_checked = True
        new = [name for name in _slots(self._model) if name not in self._slots]
        if new:
            raise TrainingError(
                f"buffer {new[0]} was None and was made in the first forward: it cannot be kept for each virtual rank. "
                "Register it with its values, as zeros say."
            )


def forest_of(world: World, virtual_ranks: int) -> Forest:
    """Which leaves of the tree over all virtual ranks belong to which rank."""
    shares = [ranks_share(virtual_ranks, rank, world.size) for rank in range(world.size)]
    return Forest([(share.start, share.stop) for share in shares], world.rank)


def _put_into(values: Tensor, before: Tensor, now: Tensor | None) -> Tensor:
    """A copy of `values`, in the memory of the buffer that they are from, if it is still the same buffer."""
    same = now is before and before.shape == values.shape and before.dtype == values.dtype
    return before.copy_(values) if same else values.clone()


def _slots(model: nn.Module) -> dict[str, list[tuple[nn.Module, str]]]:
    """Every buffer by its first name, and where it hangs: one that two modules share stays one."""
    by_identity: dict[int, str] = {}
    slots: dict[str, list[tuple[nn.Module, str]]] = {}
    for prefix, owner in model.named_modules():
        for leaf, buffer in owner.named_buffers(recurse=False):
            name = by_identity.setdefault(id(buffer), f"{prefix}.{leaf}" if prefix else leaf)
            slots.setdefault(name, []).append((owner, leaf))
    return slots


@contextmanager
def uncounted(model: nn.Module, parameters: list[nn.Parameter]) -> Generator[None]:
    """Inside, backward gives zeros for gradients, whatever it computes, and synchronised batch norm counts nobody.

    Replaced, not multiplied by zero: 0 x inf would be NaN on every rank.
    """
    hooks = [p.register_hook(torch.zeros_like) for p in parameters]
    synchronised = [m for m in model.modules() if isinstance(m, SyncBatchNorm)]
    for module in synchronised:
        module.counted = False
    try:
        with not_recorded():
            yield
    finally:
        for module in synchronised:
            module.counted = True
        for hook in hooks:
            hook.remove()
