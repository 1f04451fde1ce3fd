"""torch's DistributedDataParallel, with the same training step as all other strategies."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from inspect import signature
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.parallel import DistributedDataParallel

from paceline.collectives.control import Deferred, scale_and_check_gradients
from paceline.collectives.replicate import broadcast_module
from paceline.data.loader import MicroBatch
from paceline.errors import UsageError
from paceline.rank.world import World
from paceline.strategies.base import MakeOptimizer, Strategy
from paceline.strategies.validation import check_model


class DDP(Strategy):
    module: DistributedDataParallel
    can_defer_read = True

    def __init__(
        self,
        model: nn.Module,
        make_optimizer: MakeOptimizer,
        world: World,
        /,
        *,
        virtual_ranks: int | None = None,
        find_unused_parameters: bool = False,
        gradient_as_bucket_view: bool = True,
    ) -> None:
        """See MakeStrategy for the other arguments. Bind these options with functools.partial.

        Args:
            find_unused_parameters: DDP's option for models that do not use all parameters in every forward.
            gradient_as_bucket_view: DDP's option. It saves a copy of all gradients, but the next step overwrites
                them. A custom loop may need to keep them, or add to them.
        """
        check_model(model, "ddp", world)
        broadcast_module(model)  # DDP also broadcasts, but its error does not name the rank that differs
        # No broadcast of buffers before each forward: buffers belong to virtual ranks, and are merged for evaluation
        # and checkpoints. (torch 2.13 renamed the option.)
        is_renamed = "forward_sync_buffers" in signature(DistributedDataParallel).parameters
        keep_buffers: dict[str, Any] = {"forward_sync_buffers" if is_renamed else "broadcast_buffers": False}
        wrapped = DistributedDataParallel(
            model,
            device_ids=None if world.device.type in ("cpu", "meta") else [world.device],
            init_sync=False,
            find_unused_parameters=find_unused_parameters,
            gradient_as_bucket_view=gradient_as_bucket_view,
            **keep_buffers,
        )
        optimizer = make_optimizer(model.parameters())
        super().__init__(model, optimizer, world, virtual_ranks=virtual_ranks, module=wrapped)
        self._ranks = world.size
        self._accumulators = {p: get_gradient_edge(p).node for p in self.parameters}
        self._pointers = [p.data_ptr() for p in self.parameters]

    def enter(self, batch: MicroBatch, is_last: bool, around: AbstractContextManager[Any] | None = None) -> None:
        super().enter(batch, is_last, None if is_last else self.module.no_sync())

    def end_backward(self, error: BaseException | None = None) -> None:
        if isinstance(error, NotImplementedError) and "SparseTensorImpl" in str(error):
            raise UsageError(code="ddp-sparse-gradient") from error

    def _reduce(self, divisor: float | Tensor) -> bool | Deferred[bool]:
        if (pointers := [*map(Tensor.data_ptr, self.parameters)]) != self._pointers:
            _check_hooked(self.model, self._accumulators)
            self._pointers = pointers
        try:
            self.module._check_reducer_finalized()  # pyright: ignore[reportPrivateUsage]
        except RuntimeError as error:  # otherwise only the next forward would raise it
            unused = [name for name, p in self.model.named_parameters() if p.requires_grad and p.grad is None]
            raise UsageError(code="ddp-unused-parameters", names=", ".join(unused[:8]) or "some") from error
        # DDP has already divided the sum by the world size
        return scale_and_check_gradients(self.parameters, self._ranks / divisor, self.world.device)


def _check_hooked(model: nn.Module, nodes: Mapping[nn.Parameter, object]) -> None:
    for name, parameter in model.named_parameters():
        if parameter in nodes and get_gradient_edge(parameter).node is not nodes[parameter]:
            raise UsageError(code="ddp-parameter-replaced", name=name)
