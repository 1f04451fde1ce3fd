"""torch's DistributedDataParallel, under the same step as every other strategy."""

from collections.abc import Generator, Mapping
from contextlib import contextmanager, nullcontext
from inspect import signature
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.parallel import DistributedDataParallel

from paceline.collectives.buckets import trainable
from paceline.collectives.control import Pending
from paceline.collectives.replicate import broadcast_module
from paceline.data.plan import Work
from paceline.errors import UsageError
from paceline.rank.world import World
from paceline.strategies.base import MakeOptimizer, Replica, replica, scale_gradients
from paceline.strategies.refusals import refuse_lazy


def ddp(
    model: nn.Module,
    make_optimizer: MakeOptimizer,
    world: World,
    /,
    *,
    virtual_ranks: int | None = None,
    find_unused_parameters: bool = False,
    gradient_as_bucket_view: bool = True,
) -> Replica:
    """Wrap the model in DDP.

    Args:
        model: on the world's device.
        make_optimizer: makes the optimizer from the parameters.
        world: this rank's place.
        virtual_ranks: see Strategy.
        find_unused_parameters: DDP's option for models that do not use all parameters in every forward; bind it with
            functools.partial.
        gradient_as_bucket_view: DDP's option: saves a copy of all gradients, but the next step writes over them. A loop
            of the user's own may want to add to them, or keep them.

    Raises:
        ValueError: if the ranks' models differ in names, shapes or types.
    """
    refuse_lazy(model)
    broadcast_module(model)  # DDP would too, but would not name the rank that differs
    parameters = trainable(model)
    # No broadcast of buffers before each forward: they belong to virtual ranks, and are merged when they are needed.
    # (torch 2.13 renamed the option.)
    renamed = "forward_sync_buffers" in signature(DistributedDataParallel).parameters
    buffers_stay: dict[str, Any] = {"forward_sync_buffers" if renamed else "broadcast_buffers": False}
    wrapped = DistributedDataParallel(
        model,
        device_ids=None if world.device.type in ("cpu", "meta") else [world.device],
        init_sync=False,
        find_unused_parameters=find_unused_parameters,
        gradient_as_bucket_view=gradient_as_bucket_view,
        **buffers_stay,
    )

    known = {p: get_gradient_edge(p).node for p in parameters}
    pointers = [p.data_ptr() for p in parameters]

    def sync_gradients(total_weight: float | Tensor) -> Pending[bool]:
        nonlocal pointers
        if (now := [*map(Tensor.data_ptr, parameters)]) != pointers:
            _check_hooked(model, known)
            pointers = now
        # DDP has already divided the sum by the world size
        return scale_gradients(parameters, world.size / total_weight, world.device)

    return replica(
        model,
        make_optimizer(model.parameters()),
        world,
        virtual_ranks=virtual_ranks,
        module=wrapped,
        sync_gradients=sync_gradients,
        backward=_explaining_sparse,
        around=lambda _, is_last: nullcontext() if is_last else wrapped.no_sync(),
    )


@contextmanager
def _explaining_sparse(_work: Work, _is_last: bool) -> Generator[None]:
    """DDP learns from the modules which gradients are sparse."""
    try:
        yield
    except NotImplementedError as error:
        if "SparseTensorImpl" not in str(error):
            raise
        raise UsageError(code="ddp-sparse-gradient") from error


def _check_hooked(model: nn.Module, known: Mapping[nn.Parameter, object]) -> None:
    """Raise UsageError if a parameter has another gradient accumulator than when DDP put its hooks there."""
    for name, parameter in model.named_parameters():
        if parameter in known and get_gradient_edge(parameter).node is not known[parameter]:
            raise UsageError(code="ddp-parameter-replaced", name=name)
