"""Shards the weights of a model over ranks, in blocks that are gathered one at a time.

By default the blocks are the repeated layers: the modules of the largest nn.ModuleList, nn.ModuleDict or nn.Sequential
of layers of one class, at any depth. Parameters outside of blocks (embeddings, the output layer) are gathered for the
whole forward, so the model can use them anywhere. The blocks of a model without repeated layers are its children.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Mapping
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from paceline.compute.forward import assign_dynamic_subclass, find_matching_modules
from paceline.config.choices import torch_unsupported_reason
from paceline.errors import UsageError, first_few
from paceline.rank.world import World

if TYPE_CHECKING:  # imported where used: it would cost every other strategy a second of start-up
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

MIXED_TENSORS_MESSAGE = "mixed torch.Tensor and DTensor"
MAX_NAMED = 8
MIN_REPEATED_FRACTION = 0.1
"""The least fraction of parameters in repeated layers. With fewer parameters in them, the blocks are the children."""


def shard_blocks(
    model: nn.Module, rule: str | None, world: World, *, flag: str, rounded: AbstractSet[nn.Parameter]
) -> dict[str, FSDPModule]:
    """Shard the model's parameters over the ranks of `world`, with torch's fully_shard (a collective).

    In a mesh with `shard`, parameters are sharded along `shard` only, and the shards are equal along `data`.

    Scalars and empty parameters are not sharded. A block whose parameters are all `rounded` is gathered in bf16. Its
    gradients, which backward computes in bf16, are summed in float32. torch gathers a block in one type. Therefore
    vectors in a block of rounded weights are not sharded (for example of batch norm, whose kernels need float32). If a
    block has any other parameter, it is gathered in its original type.

    Returns the blocks by name: inner ones first, the model itself ("") last.
    """
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    if why := torch_unsupported_reason("fsdp"):
        raise UsageError(code="torch-too-old", why=why)
    blocks = find_blocks(model, rule, flag=flag)
    check_parameter_dtypes(model, blocks)
    for parameter in model.parameters():
        parameter.data = parameter.data.contiguous()  # fully_shard needs contiguous parameters
    group, data, shard = world.group or dist.group.WORLD, world.along("data").group, world.along("shard").group
    assert group is not None  # joined
    if data is not None and shard is not None:
        ranks = torch.tensor(dist.get_process_group_ranks(group)).view(-1, world.along("shard").size)
        mesh = DeviceMesh.from_group([data, shard], world.device.type, ranks, mesh_dim_names=("data", "shard"))
    else:
        mesh = DeviceMesh.from_group(group, world.device.type)
    unsharded = {p for p in model.parameters() if not (p.ndim and p.numel())}
    if rounded:
        unsharded |= {p for p in model.parameters() if p.ndim == 1} - rounded
    blocks = {name: block for name, block in blocks.items() if {*block.parameters()} - unsharded}
    policies = _policies({**blocks, "": model}, unsharded, rounded)
    _explain_use_outside(model, [*blocks], flag)
    sharded: dict[str, FSDPModule] = {}
    for name, block in {**blocks, "": model}.items():
        sharded[name] = module = fully_shard(
            block, mesh=mesh, reshard_after_forward=True, ignored_params=unsharded, mp_policy=policies[name]
        )
        module.set_gradient_divide_factor(1.0)  # a sum: the strategy divides it by the global weight
        module.set_force_sum_reduction_for_comms(True)  # gloo supports sums only
        module.set_reduce_scatter_unused_params(True)  # else ranks that use different parameters would mix them up
    # torch would do this in the first forward of the model, but a custom loop may call a block first
    fully_shard.state(model)._lazy_init()  # pyright: ignore[reportPrivateUsage, reportFunctionMemberAccess]
    return sharded


def _explain_use_outside(model: nn.Module, names: list[str], flag: str) -> None:
    """Let a call of `model` raise UsageError if it uses a block's parameter while that is sharded."""
    cls: Any = type(model)

    def call_and_explain(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        try:
            return cls.__call__(self, *args, **kwargs)
        except RuntimeError as error:
            if MIXED_TENSORS_MESSAGE not in str(error):
                raise
            shown = first_few(names, MAX_NAMED)
            raise UsageError(code="block-parameter-outside", blocks=shown, setting=flag) from error

    assign_dynamic_subclass(model, __call__=call_and_explain)


def _policies(
    blocks: Mapping[str, nn.Module], unsharded: AbstractSet[nn.Parameter], rounded: AbstractSet[nn.Parameter]
) -> dict[str, MixedPrecisionPolicy]:
    """The types in which each block is sent. Inner blocks come first, and include their parameters."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    # inputs are not cast: autocast rounds them if needed, and a leading batch norm needs float32
    bf16 = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    unchanged = MixedPrecisionPolicy()
    policies: dict[str, MixedPrecisionPolicy] = {}
    assigned: set[nn.Parameter] = {*unsharded}
    for name, block in blocks.items():
        parameters = {*block.parameters()} - assigned
        assigned |= parameters
        policies[name] = bf16 if parameters and parameters <= rounded else unchanged
    return policies


@contextmanager
def keep_parameters_unsharded(blocks: Mapping[str, FSDPModule]) -> Generator[None]:
    """Inside, all parameters are gathered; forward and backward do not communicate (entering is a collective)."""
    root = blocks[""]
    for block in blocks.values():
        block.unshard()
    root.set_reshard_after_forward(False)
    root.set_reshard_after_backward(False)
    root.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        root.set_reshard_after_forward(True)
        root.set_reshard_after_backward(True)
        root.set_requires_gradient_sync(True)
        for block in blocks.values():
            block.reshard()


def register_backward_callback(blocks: Mapping[str, FSDPModule], act: Callable[[], None]) -> None:
    """Call `act` in each backward through an output of a block, for all forwards from now on."""

    def at_forward(_block: nn.Module, _inputs: Any, output: Any) -> None:
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(lambda _: act())

    for block in blocks.values():
        block.register_forward_hook(at_forward)  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]


def find_blocks(model: nn.Module, rule: str | None, *, flag: str) -> dict[str, nn.Module]:
    """The blocks inside the plain `model` by name, inner ones first. `rule` and `flag`: see `find_matching_modules`."""
    blocks = _default_blocks(model) if rule is None else find_matching_modules(model, rule, flag=flag)
    if rule is not None and not any(_has_parameters(block) for block in blocks.values()):
        raise UsageError(code="blocks-without-parameters", setting=flag, rule=rule, blocks=", ".join(blocks))
    blocks = {name: block for name, block in blocks.items() if _has_parameters(block)}
    for name in [*blocks]:
        shared = _used_outside(model, name)
        if shared and rule is not None:
            raise UsageError(code="block-shares-parameter", setting=flag, rule=rule, name=name, shared=shared)
        if shared:
            del blocks[name]
    return dict(sorted(blocks.items(), key=lambda item: -item[0].count(".")))


def check_parameter_dtypes(model: nn.Module, blocks: dict[str, nn.Module]) -> None:
    """Raise UsageError if a block, or the model outside blocks, has parameters of several types."""
    types: dict[str, dict[torch.dtype, str]] = defaultdict(dict)
    for name, parameter in model.named_parameters():
        owner = max((block for block in blocks if name.startswith(f"{block}.")), key=len, default="")
        if parameter.requires_grad:
            types[owner].setdefault(parameter.dtype, name)
    for owner, names in types.items():
        if len(names) > 1:
            shown = ", ".join(f"{name} is {str(dtype).removeprefix('torch.')}" for dtype, name in names.items())
            raise UsageError(code="block-of-several-types", block=owner or "the model outside its blocks", types=shown)


def _default_blocks(model: nn.Module) -> dict[str, nn.Module]:
    lists = [layers for layers in _repeated_layers("", model) if not all(_used_outside(model, name) for name in layers)]
    sizes = [[_size(layer) for layer in layers.values()] for layers in lists]
    # a list that is smaller than one block of the largest list saves less memory than that block takes
    min_size = max(max(sizes, key=sum)) if sizes else 0
    large = [layers for layers, of_layers in zip(lists, sizes, strict=True) if sum(of_layers) >= min_size]
    blocks = {name: layer for layers in large for name, layer in layers.items()}
    return _children(model) if sum(map(_size, blocks.values())) < MIN_REPEATED_FRACTION * _size(model) else blocks


def _repeated_layers(name: str, module: nn.Module) -> list[dict[str, nn.Module]]:
    """The layers of each list inside `module`, by name. For nested lists, the layers of the outer one.

    In a list at least half of the parameters are in layers whose class is repeated. If one layer has more than half of
    them, inner lists are preferred: the stages of a network with growing width consist of layers themselves.
    """
    prefix = f"{name}." if name else ""
    inside = [layers for leaf, child in module.named_children() for layers in _repeated_layers(prefix + leaf, child)]
    if not isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.Sequential)):
        return inside
    layers = {leaf: layer for leaf, layer in module.named_children() if _has_parameters(layer)}
    sizes = {leaf: _size(layer) for leaf, layer in layers.items()}
    counts = Counter(map(_kind, layers.values()))
    again = sum(size for leaf, size in sizes.items() if counts[_kind(layers[leaf])] > 1)
    total = sum(sizes.values())
    is_list = all(type(layer).forward is not nn.Module.forward for layer in layers.values()) and 2 * again >= total > 0
    if not is_list or (inside and 2 * max(sizes.values()) > total):
        return inside
    return [{prefix + leaf: layer for leaf, layer in layers.items()}]


def _kind(module: nn.Module) -> tuple[str, str]:
    """The name of its class. `forward.assign_dynamic_subclass` creates a class of the same name for each module."""
    return type(module).__module__, type(module).__qualname__


def _size(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def _children(model: nn.Module) -> dict[str, nn.Module]:
    base, inner = "", model
    while len(children := [(n, m) for n, m in inner.named_children() if _has_parameters(m)]) == 1:
        if any(True for _ in inner.parameters(recurse=False)):
            break
        ((leaf, inner),) = children
        base += f"{leaf}."
    blocks: dict[str, nn.Module] = {}
    for name, module in inner.named_modules():
        parent = inner.get_submodule(name.rpartition(".")[0]) if name else None
        # a module without a forward, for example a list, is not a block: its owner calls the modules inside
        called = type(module).forward is not nn.Module.forward
        if called and (parent is inner or isinstance(parent, nn.ModuleList)):
            blocks[base + name] = module
        elif isinstance(parent, nn.ModuleDict) and name.count(".") == 1:
            blocks[base + name] = module  # a direct child that only holds others
    return blocks


def _has_parameters(module: nn.Module) -> bool:
    return any(p.ndim and p.numel() for p in module.parameters())


def _used_outside(model: nn.Module, name: str) -> str:
    """The name outside the block of a parameter that is also in the block; empty if there is none."""
    inside = {id(p) for p in model.get_submodule(name).parameters()}
    everywhere = model.named_parameters(remove_duplicate=False)
    return next((full for full, p in everywhere if id(p) in inside and not full.startswith(f"{name}.")), "")
