"""torch's FSDP2 (`fully_shard`): weights, gradients and optimizer state cut over ranks, gathered block by block.

A block's parameters are gathered before its forward, thrown away, gathered again for its backward, and its gradients
leave as soon as they are there. So each forward and backward is a collective: all ranks go through equally many
(`Strategy.in_lockstep`), and one rank alone can call the model only inside `Strategy.gathered`.

The optimizer gets this rank's runs of elements as plain tensors: names, checkpoints and resume are those of `zero`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.checkpoint.shards import whole
from paceline.checkpoint.state import Source, TensorShard, whole_parameters
from paceline.collectives.buckets import divide_each, sparse_gradient
from paceline.collectives.communicator import communicator
from paceline.collectives.control import Pending, sent, sum_over_ranks
from paceline.collectives.replicate import broadcast_module
from paceline.collectives.shards import Piece, check_assigned
from paceline.compute.blocks import gathered, on_backward, shard_blocks
from paceline.compute.precision import rounded_by_autocast
from paceline.data.plan import Work
from paceline.errors import UsageError
from paceline.protocol.evidence import BLOCK
from paceline.rank.world import World
from paceline.strategies.base import MakeOptimizer, Strategy
from paceline.strategies.model_parallel import global_norm
from paceline.strategies.optimizer_state import hold_pieces, load_pieces
from paceline.strategies.validation import (
    check_element_wise,
    check_no_gradient_hooks,
    check_no_lazy_parameters,
    check_no_sparse_gradients,
    check_optimizer_parameters,
)

if TYPE_CHECKING:  # imported where it is used: it would cost every other strategy a second of start-up
    from torch.distributed.fsdp import FSDPModule

MAX_NAME = 33  # characters of a block's name, from its end, in the names of its collectives: the box keeps 40


class FSDP(Strategy):
    """Memory of each rank, for P parameters in N ranks and AdamW: 4P/N, and the block that is being computed.

    Equal to one process up to rounding. Gradients are sharded after each micro-batch, also if several are added up.
    After `in_bf16` (`compute.precision`) the blocks whose weights autocast would round before each use are gathered
    rounded, as torch's MixedPrecisionPolicy does it: half the bytes, and the very numbers that autocast computes. Their
    gradients are added up in float32, over micro-batches and ranks: bf16 has 8 bits, of which each sum would lose some.
    What a rank holds, and what is saved, stays float32.

    Raises:
        ValueError: if the ranks' models differ in names, shapes or types.
        UsageError: if `wrap` matches nothing or separates tied parameters; for an optimizer that looks at more than
            one element at a time.
    """

    sharded = True
    in_lockstep = True

    def __init__(
        self,
        model: nn.Module,
        make_optimizer: MakeOptimizer,
        world: World,
        /,
        *,
        virtual_ranks: int | None = None,
        wrap: str | None = None,
    ) -> None:
        """See MakeStrategy.

        Args:
            model: on the world's device. Scalars and empty parameters stay whole on every rank; in bf16 the vectors too
                that autocast does not round (batch norm's).
            make_optimizer: makes the optimizer from the parameters.
            world: the ranks.
            virtual_ranks: see MakeStrategy.
            wrap: the blocks, by name or class; by default those of `compute.blocks`. What is in none of them is
                gathered for the whole forward and backward.
        """
        check_no_lazy_parameters(model)
        check_no_sparse_gradients(model, "fsdp")
        check_no_gradient_hooks(model, "fsdp")
        broadcast_module(model, group=world.group)
        optimizer = make_optimizer(model.parameters())
        check_element_wise("fsdp", optimizer)
        check_optimizer_parameters(model, optimizer)
        names = {parameter: name for name, parameter in model.named_parameters()}
        groups = [[names[p] for p in group["params"]] for group in optimizer.param_groups]
        self._blocks = shard_blocks(model, wrap, world, flag="fsdp_wrap", rounded=rounded_by_autocast(model))
        for name, block in self._blocks.items():
            custom: Any = block  # the types of what it takes are in a private module of torch
            custom.set_custom_all_gather(_AllGather(name))
            custom.set_custom_reduce_scatter(_ReduceScatter(name))
        self._shares = shares = _LocalShards(model, world)
        for group, members in zip(optimizer.param_groups, groups, strict=True):
            group["params"] = [p for name in members if (p := shares.trained(name)) is not None]
        optimizer.register_step_pre_hook(shares.take_gradients)
        optimizer.register_step_post_hook(shares.forget_gradients)
        self._used, self._reduced_among = _UsedParameters(model, self._blocks, shares.unsharded), world
        super().__init__(model, optimizer, world, virtual_ranks=virtual_ranks, shards_optimizer=True)

    def _around(self, work: Work, is_last: bool) -> AbstractContextManager[None]:
        return self._used.watching(work)

    def begin_backward(self, work: Work, is_last: bool) -> None:
        """See Strategy."""
        self._used.begin_backward()

    def on_gradient(self, act: Callable[[], None]) -> None:
        """See Strategy."""
        on_backward(self._blocks, act)

    def _reduce(self, divisor: float | Tensor) -> None:
        self._used.agree(self.model, self._reduced_among)
        divide_each([held.tensor for held in self._gradients()], divisor)

    def _gradients(self) -> list[TensorShard]:
        return self._shares.gradients()

    def _gradient_norm(self, own: list[Tensor]) -> Pending[float]:
        return self._shares.gradient_norm()

    def gathered(self) -> AbstractContextManager[None]:
        """See Strategy."""
        return gathered(self._blocks)

    def _weights(self) -> Mapping[str, Tensor]:
        return self._shares.weights()

    def _hold_parameters(self) -> list[TensorShard]:
        return self._shares.parameters()

    def _hold_optimizer(self) -> list[TensorShard]:
        shares = self._shares
        return shares.spared(hold_pieces(shares.pieces, self.optimizer, shares.unsharded))

    def _load_optimizer(self, source: Source) -> None:
        load_pieces(self._shares.pieces, self.optimizer, source, self._shares.unsharded)


class _Collective:
    """A collective of one block, as `set_custom_all_gather` and `set_custom_reduce_scatter` of FSDP2 take it.

    Through shared memory if the ranks share it, with the bits of gloo. It has the name of its block: ranks that call
    different blocks of one size would otherwise exchange the weights of different blocks without an error. Names are
    compared, in memory at each call, else in each step (`stepping.order`), and the hang guard shows them.
    """

    def __init__(self, name: str) -> None:
        self._name = f"{BLOCK}{name[-MAX_NAME:] or 'the rest of the model'}"

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for what is sent or received."""
        return torch.empty(*size, dtype=dtype, device=device)


class _AllGather(_Collective):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        return communicator(group).all_gather(output_tensor, input_tensor, self._name, async_op=async_op)


class _ReduceScatter(_Collective):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        communicator(group).reduce_scatter(output_tensor, input_tensor, self._name, op)  # over when it returns


class _LocalShards:
    """What this rank holds of a model that is cut: `pieces` of its parameters, and those that are `unsharded`."""

    def __init__(self, model: nn.Module, world: World) -> None:
        from torch.distributed.tensor import DTensor

        self._model, self._world = model, world
        hybrid = world.along("data").size > 1 and world.along("shard").size > 1
        over = world.along("shard") if hybrid else world
        self._again = hybrid and world.along("data").rank > 0
        self.pieces: dict[str, Piece] = {}
        self.unsharded: dict[str, nn.Parameter] = {}
        self._cut: dict[str, Any] = {}
        for name, parameter in model.named_parameters():
            if not isinstance(parameter, DTensor):
                self.unsharded[name] = parameter
                continue
            local: Tensor = parameter.to_local()
            shape = parameter.shape
            first = min(over.rank * -(-shape[0] // over.size), shape[0]) * (shape.numel() // shape[0])
            if local.numel():
                elements = nn.Parameter(local.detach().view(-1))
                self.pieces[name] = Piece(first, first + local.numel(), elements, shape)
                self._cut[name] = parameter
            _keep_in_place(name, parameter)

    def trained(self, name: str) -> nn.Parameter | None:
        """What the optimizer updates of it here."""
        return self.pieces[name].parameter if name in self.pieces else self.unsharded.get(name)

    def take_gradients(self, *_: object) -> None:
        """For an update: the model's .grad, as it is now, becomes the pieces'."""
        for name, piece in self.pieces.items():
            piece.parameter.grad = self._gradient(name)

    def _gradient(self, name: str) -> Tensor | None:
        gradient = self._cut[name].grad
        return None if gradient is None else gradient.to_local().view(-1)

    def forget_gradients(self, *_: object) -> None:
        """Let them go, for the next step's."""
        for piece in self.pieces.values():
            piece.parameter.grad = None
        self._model.zero_grad(set_to_none=True)

    def gradients(self) -> list[TensorShard]:
        """See Strategy."""
        held = [TensorShard(name, p.grad) for name, p in self.unsharded.items() if p.grad is not None]
        for name, piece in self.pieces.items():
            if (gradient := self._gradient(name)) is not None:
                held.append(TensorShard(name, gradient, piece.whole, piece.start, replicated=False))
        return self.spared(held)

    def spared(self, held: list[TensorShard]) -> list[TensorShard]:
        """Pieces that the first along data holds as well are his to save."""
        return [replace(one, spare=not one.replicated) for one in held] if self._again else held

    def gradient_norm(self) -> Pending[float]:
        """The same on all ranks (a collective)."""
        return global_norm(self.gradients(), self._world)

    def parameters(self) -> list[TensorShard]:
        """For a checkpoint."""
        held = whole_parameters(self.unsharded.items())
        for name, piece in self.pieces.items():
            values = piece.parameter.detach()
            held.append(TensorShard(f"model/{name}", values, piece.whole, piece.start, replicated=False))
        return self.spared(held)

    def weights(self) -> dict[str, Tensor]:
        """See Strategy; on the CPU, where there is room for all of them."""
        state: dict[str, Tensor] = self._model.state_dict()
        found = {name.removeprefix("model/"): t.cpu() for name, t in whole(self.parameters(), self._world).items()}
        first = {id(p): name for name, p in self._model.named_parameters()}
        for name, parameter in self._model.named_parameters(remove_duplicate=False):
            state[name] = found[first[id(parameter)]]
        return state


def _keep_in_place(name: str, parameter: Any) -> None:
    """Let `parameter.data = values` write into this rank's share: the optimizer and torch's gathers know that memory.

    torch would drop the values without an error. What is assigned may be cut or whole (all ranks assign the same).
    """
    from torch.distributed.tensor import DTensor

    parameter.named_in_model = name
    if "data" not in vars(DTensor):
        plain: Any = Tensor.data
        DTensor.data = property(plain.__get__, _assign)  # pyright: ignore[reportAttributeAccessIssue]


def _assign(tensor: Any, values: Any) -> None:
    name = getattr(tensor, "named_in_model", None)
    if name is None:
        plain: Any = Tensor.data
        plain.__set__(tensor, values)
        return
    check_assigned(name, values, tensor)
    with torch.no_grad():
        tensor.copy_(_distribute_like(values, tensor))


def _distribute_like(values: Any, like: Any) -> Any:
    """`values`, cut as the DTensor `like` is (a collective if they are cut in another way)."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    if isinstance(values, DTensor):
        return values.redistribute(like.device_mesh, like.placements)
    return distribute_tensor(values, like.device_mesh, like.placements, src_data_rank=None)


class _UsedParameters:
    """Notes which parameters have got a gradient on this rank, and makes a stand-in's gradients zero.

    A gathered parameter is another tensor than the cut one; it is first seen in the first forward.
    """

    def __init__(
        self, model: nn.Module, blocks: Mapping[str, FSDPModule], unsharded: Mapping[str, nn.Parameter]
    ) -> None:
        self._uncut = unsharded
        self._names = [name for name, p in model.named_parameters() if p.requires_grad]
        self._used: set[str] = set()
        self._watched: set[str] = set()
        self._counted: bool | None = None
        self._called: set[str] = set()
        self._recomputed: set[str] = set()
        for name, parameter in unsharded.items():
            self._watch(name, parameter)
        for name, block in blocks.items():
            hook = self._at_forward(f"{name}." if name else "")
            block.register_forward_pre_hook(hook)  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]

    @contextmanager
    def watching(self, work: Work) -> Generator[None]:
        """Around one forward and backward."""
        self._counted = work.counted
        try:
            yield
        finally:
            self._counted = None
            self._called.clear()

    def begin_backward(self) -> None:
        """One backward begins."""
        self._recomputed.clear()

    def _check_recomputed(self, name: str) -> None:
        """At a block's forward: raise UsageError if one backward recomputes the block twice by nested backwards.

        torch's fully_shard then loses gradients. Only reentrant checkpointing first calls the block without gradients.
        """
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        if torch._C._current_graph_task_id() == -1:  # pyright: ignore[reportPrivateUsage] - no backward is running
            self._called.add(name)
        elif name not in self._called:
            if name in self._recomputed:
                raise UsageError(code="fsdp-reentrant", name=name or "the model")
            self._recomputed.add(name)

    def agree(self, model: nn.Module, world: World) -> None:
        """Add up the unsharded gradients, and let those that no rank has used be None (a collective)."""
        unsharded = {name: p for name, p in self._uncut.items() if p.requires_grad}
        flags = [float(name in self._used) for name in self._names]
        values = [(torch.zeros_like(p) if p.grad is None else p.grad).double().view(-1) for p in unsharded.values()]
        summed = sum_over_ranks(
            torch.cat([sent(flags, world.device), *values]), "who uses which parameter", world.group
        )
        # looked at only if this rank did not use all of them itself: on a GPU, looking means waiting
        everywhere = dict(zip(self._names, flags if all(flags) else summed[: len(flags)].tolist(), strict=True))
        sums = iter(summed[len(flags) :].split([p.numel() for p in unsharded.values()]))
        for name, parameter in model.named_parameters():
            if name in unsharded:
                parameter.grad = next(sums).view(parameter.shape).to(parameter.dtype)
            if not everywhere.get(name):
                parameter.grad = None
        self._used.clear()

    def _at_forward(self, prefix: str) -> Callable[[nn.Module, Sequence[Any]], None]:
        from torch.distributed.tensor import DTensor

        def look(block: nn.Module, _: Sequence[Any]) -> None:
            self._check_recomputed(prefix.removesuffix("."))
            if len(self._watched) < len(self._names):
                for name, parameter in block.named_parameters(prefix=prefix.removesuffix(".")):
                    if parameter.requires_grad and not isinstance(parameter, DTensor) and name not in self._watched:
                        self._watch(name, parameter)

        return look

    def _watch(self, name: str, parameter: nn.Parameter) -> None:
        def note(gradient: Tensor) -> Tensor | None:
            if gradient.layout is not torch.strided:
                raise sparse_gradient(f"the gradient of {name} has the layout {gradient.layout}")
            if self._counted:
                self._used.add(name)
            return torch.zeros_like(gradient) if self._counted is False else None

        if parameter.requires_grad:
            self._watched.add(name)
            parameter.register_hook(note)
