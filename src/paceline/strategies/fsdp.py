"""torch's FSDP2 (`fully_shard`): weights, gradients and optimizer state are sharded over ranks.

Ranks gather the parameters of a block before its forward, free them, and gather them again for its backward. Gradients
are reduced as soon as backward has computed them. Each forward and backward is therefore a collective: all ranks run
the same number of them (`Strategy.in_lockstep`). A single rank can call the model only inside `Strategy.gathered`.

The optimizer trains this rank's contiguous elements as plain tensors. Names, checkpoints and resume are those of
`zero`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.checkpoint.export import saved_names_by_state_dict_name
from paceline.checkpoint.state import StateSource, TensorShard, unsharded_parameter_shards
from paceline.collectives.buckets import divide_in_place, sparse_gradient_error
from paceline.collectives.communicator import get_communicator
from paceline.collectives.control import Deferred, sum_over_ranks, to_device_async
from paceline.collectives.owners import LocalShard, ParameterOwners, replace_optimizer_parameters
from paceline.collectives.replicate import broadcast_module
from paceline.collectives.shards import check_assigned_tensor
from paceline.compute.blocks import keep_parameters_unsharded, register_backward_callback, shard_blocks
from paceline.compute.precision import find_autocast_weights
from paceline.data.loader import MicroBatch
from paceline.data.plan import MicroBatchPlan
from paceline.errors import UsageError
from paceline.protocol.evidence import BLOCK_PREFIX
from paceline.rank.world import World
from paceline.strategies.base import MakeOptimizer, Strategy
from paceline.strategies.model_parallel import full_weights, global_norm
from paceline.strategies.optimizer_scope import find_update_scope
from paceline.strategies.optimizers import each_optimizer, load_saved_optimizer_state, optimizer_shards_of_pieces
from paceline.strategies.validation import check_model, check_no_parameter_hooks, check_optimizer_parameters

if TYPE_CHECKING:  # imported where it is used: it would cost every other strategy a second of start-up
    from torch.distributed.fsdp import FSDPModule

# characters of a block's name, from its end, in the names of its collectives: the page keeps 40
MAX_COLLECTIVE_NAME_CHARS = 33


class FSDP(Strategy):
    """Fully sharded data parallelism, equal to one process up to rounding.

    Memory of each rank, for P parameters, N ranks and AdamW: 4P/N, and the block that is being computed. Gradients are
    sharded after each micro-batch, also with accumulation.

    After `autocast_bf16`, ranks gather in bf16 those blocks whose weights autocast would round before each use (torch's
    MixedPrecisionPolicy). This sends half the bytes and gives the same numbers as autocast. Their
    gradients are summed in float32, over micro-batches and ranks, because bf16 has 8 significant bits. The shards of a
    rank and checkpoints stay float32.
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
        """See MakeStrategy for the other arguments.

        Args:
            model: on the world's device. Scalars and empty parameters are not sharded. In bf16, neither are vectors
                that autocast does not round (those of batch norm).
            wrap: the blocks, by name or class. Default: see `compute.blocks`. Parameters outside of blocks are gathered
                for the whole forward and backward.
        """
        check_model(model, "fsdp", world)
        check_no_parameter_hooks(model, "fsdp")
        broadcast_module(model, group=world.group)
        optimizer = make_optimizer(model.parameters())
        scopes = [find_update_scope(opt, "strategy 'fsdp'") for opt in each_optimizer(optimizer)]
        check_optimizer_parameters(model, optimizer)
        names = {parameter: name for name, parameter in model.named_parameters()}
        groups = [[[names[p] for p in g["params"]] for g in opt.param_groups] for opt in each_optimizer(optimizer)]
        self._blocks = shard_blocks(model, wrap, world, flag="fsdp_wrap", rounded=find_autocast_weights(model))
        for name, block in self._blocks.items():
            custom: Any = block  # the argument types are in a private module of torch
            custom.set_custom_all_gather(_AllGather(name))
            custom.set_custom_reduce_scatter(_ReduceScatter(name))
        self._shards = shards = _LocalShards(model, world)
        self._updated: dict[str, LocalShard] = {}
        for opt, scope, members in zip(each_optimizer(optimizer), scopes, groups, strict=True):
            self._updated |= shards.shard_optimizer(opt, members, whole=scope == "parameter")
        self._used, self._reduced_among = _UsedParameters(model, self._blocks, shards.unsharded), world
        parameters = dict(model.named_parameters())
        trained = [[parameters[name] for names in members for name in names] for members in groups]
        super().__init__(model, optimizer, world, virtual_ranks=virtual_ranks, trained=trained)

    def enter(self, batch: MicroBatch, is_last: bool, around: AbstractContextManager[Any] | None = None) -> None:
        super().enter(batch, is_last, self._used.watching(batch.work))

    def begin_backward(self, work: MicroBatchPlan, is_last: bool) -> None:
        self._used.begin_backward()

    def on_gradient(self, act: Callable[[Tensor], None]) -> None:
        register_backward_callback(self._blocks, partial(act, self.parameters[0]))

    def _reduce(self, divisor: float | Tensor) -> None:
        self._used.reduce(self.model, self._reduced_among)
        divide_in_place([shard.tensor for shard in self._gradients()], divisor)

    def _gradients(self) -> list[TensorShard]:
        return self._shards.gradients()

    def _gradient_norm(self, tensors: list[Tensor]) -> Deferred[float]:
        return self._shards.gradient_norm()

    def gathered(self) -> AbstractContextManager[None]:
        return keep_parameters_unsharded(self._blocks)

    def _weights(self, names: Collection[str] | None = None) -> Mapping[str, Tensor]:
        return self._shards.weights(names)

    def _parameter_shards(self) -> list[TensorShard]:
        return self._shards.parameters()

    def _optimizer_shards(self) -> list[TensorShard]:
        shards = self._shards
        return shards.mark_duplicates(optimizer_shards_of_pieces(self._updated, self.optimizer, shards.unsharded))

    def _load_optimizer(self, source: StateSource) -> None:
        load_saved_optimizer_state(self._updated, self.optimizer, source, self._shards.unsharded)


class _Collective:
    """A collective of one block, for FSDP2's `set_custom_all_gather` and `set_custom_reduce_scatter`.

    It uses shared memory if the ranks have it, with the bits of gloo. Its name is that of its block. Otherwise ranks
    that call different blocks of the same size would exchange wrong weights without an error. Ranks compare the names:
    in shared memory at each call, else once in each step (`stepping.order`). The hang guard prints them.
    """

    def __init__(self, name: str) -> None:
        self._name = f"{BLOCK_PREFIX}{name[-MAX_COLLECTIVE_NAME_CHARS:] or 'the rest of the model'}"

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _AllGather(_Collective):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        return get_communicator(group).all_gather(output_tensor, input_tensor, self._name, async_op=async_op)


class _ReduceScatter(_Collective):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        assert op == dist.ReduceOp.SUM  # see `shard_blocks`
        get_communicator(group).reduce_scatter(output_tensor, input_tensor, self._name)  # complete on return


class _LocalShards:
    """This rank's shards of a model: `pieces` of parameters, and parameters that are `unsharded`."""

    def __init__(self, model: nn.Module, world: World) -> None:
        from torch.distributed.tensor import DTensor

        self._model, self._world = model, world
        self._parameters = dict(model.named_parameters())
        is_hybrid = world.along("data").size > 1 and world.along("shard").size > 1
        self._shard_world = shard_world = world.along("shard") if is_hybrid else world
        self._is_copy = is_hybrid and world.along("data").rank > 0  # a different rank holds the same shards
        self.pieces: dict[str, LocalShard] = {}
        self.unsharded: dict[str, nn.Parameter] = {}
        for name, parameter in model.named_parameters():
            if not isinstance(parameter, DTensor):
                self.unsharded[name] = parameter
                continue
            local: Tensor = parameter.to_local()
            start, stop = self._range(parameter.shape, shard_world.rank)
            if start < stop:
                self.pieces[name] = LocalShard(start, stop, nn.Parameter(local.detach().view(-1)), parameter.shape)
            _redirect_data_writes(name, parameter)

    def _range(self, shape: torch.Size, rank: int) -> tuple[int, int]:
        """The elements of a rank: torch divides the rows of a parameter."""
        rows = -(-shape[0] // self._shard_world.size)
        first, end = (min(number * rows, shape[0]) for number in (rank, rank + 1))
        return first * (shape.numel() // shape[0]), end * (shape.numel() // shape[0])

    def shard_optimizer(
        self, optimizer: Optimizer, groups: Sequence[Sequence[str]], *, whole: bool
    ) -> dict[str, LocalShard]:
        """Make an `optimizer` of parameters with these names update this rank's pieces, or `whole` ones as an owner.

        Returns what this rank updates, by the names of the parameters; without the unsharded ones.
        """
        trained = {name: self._parameters[name] for names in groups for name in names}
        updated = {name: self.pieces[name] for name in trained if name in self.pieces}
        optimizer.register_step_pre_hook(partial(self.take_gradients, [*updated]))
        if whole and (divided := {n: p for n, p in trained.items() if n not in self.unsharded}):
            updated = self._owners(divided).attach_to(optimizer)
        parameters = {name: shard.parameter for name, shard in updated.items()}
        replace_optimizer_parameters(optimizer, groups, self.unsharded | parameters)
        optimizer.register_step_post_hook(partial(self.release_gradients, [*trained]))
        return updated

    def _owners(self, trained: Mapping[str, nn.Parameter]) -> ParameterOwners:
        world = self._shard_world
        ranges = [
            {n: span for n, p in trained.items() if (span := self._range(p.shape, rank))[0] < span[1]}
            for rank in range(world.size)
        ]
        return ParameterOwners(
            trained, ranges, self.pieces, world.rank, group=world.group,
            has_gradient=lambda name: trained[name].grad is not None, holds_values=False,
        )  # fmt: skip

    def take_gradients(self, names: Sequence[str], *_: object) -> None:
        """Before an update: set the gradients of these pieces to the current .grad of the model."""
        for name in names:
            self.pieces[name].parameter.grad = self._gradient(name)

    def _gradient(self, name: str) -> Tensor | None:
        gradient: Any = self._parameters[name].grad
        return None if gradient is None else gradient.to_local().view(-1)

    def release_gradients(self, names: Sequence[str], *_: object) -> None:
        for name in names:
            self._parameters[name].grad = None
            if name in self.pieces:
                self.pieces[name].parameter.grad = None

    def gradients(self) -> list[TensorShard]:
        shards = [TensorShard(name, p.grad) for name, p in self.unsharded.items() if p.grad is not None]
        for name, piece in self.pieces.items():
            if (gradient := self._gradient(name)) is not None:
                shards.append(TensorShard(name, gradient, piece.full_shape, piece.start, replicated=False))
        return self.mark_duplicates(shards)

    def mark_duplicates(self, held: list[TensorShard]) -> list[TensorShard]:
        """Mark pieces that the first rank along data also holds: that rank saves them."""
        return [replace(shard, is_saved_elsewhere=not shard.replicated) for shard in held] if self._is_copy else held

    def gradient_norm(self) -> Deferred[float]:
        return global_norm(self.gradients(), self._world)

    def parameters(self) -> list[TensorShard]:
        shards = unsharded_parameter_shards(self.unsharded.items())
        for name, piece in self.pieces.items():
            values = piece.parameter.detach()
            shards.append(TensorShard(f"model/{name}", values, piece.full_shape, piece.start, replicated=False))
        return self.mark_duplicates(shards)

    def weights(self, names: Collection[str] | None = None) -> dict[str, Tensor]:
        """See Strategy. The weights are on the CPU, because they may not fit on the device."""
        state: dict[str, Tensor] = self._model.state_dict()
        saved = saved_names_by_state_dict_name(self._model)
        wanted = {f"model/{saved[name]}" for name in (state if names is None else names)}
        shards = [shard for shard in self.parameters() if shard.name in wanted]
        return state | {name: t.cpu() for name, t in full_weights(self._model, shards, self._world).items()}


def _redirect_data_writes(name: str, parameter: Any) -> None:
    """Let `parameter.data = values` write into this rank's shard, which the optimizer and torch's all-gathers use.

    torch would drop the values without an error. They may be sharded, or whole and equal on all ranks.
    """
    from torch.distributed.tensor import DTensor

    parameter.named_in_model = name
    if "data" not in vars(DTensor):
        plain: Any = Tensor.data
        DTensor.data = property(plain.__get__, _assign)  # pyright: ignore[reportAttributeAccessIssue]


def _assign(tensor: Any, values: Any) -> None:
    from torch.distributed.tensor import DTensor, distribute_tensor

    name = getattr(tensor, "named_in_model", None)
    if name is None:
        plain: Any = Tensor.data
        plain.__set__(tensor, values)
        return
    check_assigned_tensor(name, values, tensor)
    with torch.no_grad():
        if isinstance(values, DTensor):
            tensor.copy_(values.redistribute(tensor.device_mesh, tensor.placements))
        else:
            tensor.copy_(distribute_tensor(values, tensor.device_mesh, tensor.placements, src_data_rank=None))


class _UsedParameters:
    """Records which parameters received a gradient on this rank, and replaces the gradients of dummy batches by zeros.

    A gathered parameter is a different tensor than its shard. It exists from the first forward on.
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
    def watching(self, work: MicroBatchPlan) -> Generator[None]:
        self._counted = work.is_counted
        try:
            yield
        finally:
            self._counted = None
            self._called.clear()

    def begin_backward(self) -> None:
        self._recomputed.clear()

    def _check_recomputed(self, name: str) -> None:
        """Called at a block's forward: raise UsageError if nested backwards recompute the block twice in one backward.

        torch's fully_shard would lose gradients. Only reentrant checkpointing first calls the block without gradients.
        """
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        if torch._C._current_graph_task_id() == -1:  # pyright: ignore[reportPrivateUsage] - no backward is running
            self._called.add(name)
        elif name not in self._called:
            if name in self._recomputed:
                raise UsageError(code="fsdp-reentrant", name=name or "the model")
            self._recomputed.add(name)

    def reduce(self, model: nn.Module, world: World) -> None:
        """Sum the unsharded gradients over ranks. Unused gradients become None (a collective)."""
        unsharded = {name: p for name, p in self._uncut.items() if p.requires_grad}
        flags = [float(name in self._used) for name in self._names]
        values = [(torch.zeros_like(p) if p.grad is None else p.grad).double().view(-1) for p in unsharded.values()]
        sent = torch.cat([to_device_async(flags, world.device), *values])
        summed = sum_over_ranks(sent, "who uses which parameter", world.group)
        # read only if this rank did not use all of them: on a GPU, reading means waiting
        used = dict(zip(self._names, flags if all(flags) else summed[: len(flags)].tolist(), strict=True))
        sums = iter(summed[len(flags) :].split([p.numel() for p in unsharded.values()]))
        for name, parameter in model.named_parameters():
            if name in unsharded:
                parameter.grad = next(sums).view(parameter.shape).to(parameter.dtype)
            if not used.get(name):
                parameter.grad = None
        self._used.clear()

    def _at_forward(self, prefix: str) -> Callable[[nn.Module, Sequence[Any]], None]:
        from torch.distributed.tensor import DTensor

        def hook(block: nn.Module, _: Sequence[Any]) -> None:
            self._check_recomputed(prefix.removesuffix("."))
            if len(self._watched) < len(self._names):
                for name, parameter in block.named_parameters(prefix=prefix.removesuffix(".")):
                    if parameter.requires_grad and not isinstance(parameter, DTensor) and name not in self._watched:
                        self._watch(name, parameter)

        return hook

    def _watch(self, name: str, parameter: nn.Parameter) -> None:
        def hook(gradient: Tensor) -> Tensor | None:
            if gradient.layout is not torch.strided:
                raise sparse_gradient_error(f"the gradient of {name} has the layout {gradient.layout}")
            if self._counted:
                self._used.add(name)
            return torch.zeros_like(gradient) if self._counted is False else None

        if parameter.requires_grad:
            self._watched.add(name)
            parameter.register_hook(hook)
            vars(parameter)["named_in_model"] = name  # see Step.foreign_leaves
