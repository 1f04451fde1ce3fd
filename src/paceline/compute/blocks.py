"""Shards a model's weights over ranks, in blocks that are gathered one at a time.

By default the blocks are the repeated layers: the modules of the largest nn.ModuleList, nn.ModuleDict or nn.Sequential
of layers of one class, at any depth. What is outside of them (embeddings, a head) is gathered for the whole forward, so
it may be used anywhere. The blocks of a model without repeated layers are its children.
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

from paceline.compute.forward import matching, override_members
from paceline.config.choices import lacks_torch
from paceline.errors import UsageError, first_few
from paceline.rank.world import World

if TYPE_CHECKING:  # imported where used: it would cost every other strategy a second of start-up
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

MIXED = "mixed torch.Tensor and DTensor"
MAX_NAMED = 8
LEAST_SHARE = 0.1
"""of a model's parameters in its repeated layers; with less in them the blocks are its children"""


def shard_blocks(
    model: nn.Module, rule: str | None, world: World, *, flag: str, rounded: AbstractSet[nn.Parameter]
) -> dict[str, FSDPModule]:
    """Shard the model's parameters over the ranks of `world`, with torch's fully_shard (a collective).

    In a mesh with `shard`, over those ranks only: along `data` the shards are the same.

    Scalars and empty parameters stay whole. A block whose parameters are all `rounded` is gathered in bf16, and its
    gradients, which backward then gives in bf16, are added up in float32. torch takes one type for a block, so the
    other parameters of a block with rounded weights stay whole if they are vectors (e.g. of batch norm, whose kernels
    want float32). With any other parameter the block is sent as it is.

    Returns:
        Its blocks by name, inner ones first, the model itself ("") last.

    Raises:
        UsageError: see `blocks_of` and `check_types`; or torch is too old.
    """
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    if why := lacks_torch("fsdp"):
        raise UsageError(code="torch-too-old", why=why)
    blocks = blocks_of(model, rule, flag=flag)
    check_types(model, blocks)
    for parameter in model.parameters():
        parameter.data = parameter.data.contiguous()  # only such can be cut; each value keeps its place
    group, data, shard = world.group or dist.group.WORLD, world.along("data").group, world.along("shard").group
    assert group is not None  # joined
    if data is not None and shard is not None:
        ranks = torch.tensor(dist.get_process_group_ranks(group)).view(-1, world.along("shard").size)
        mesh = DeviceMesh.from_group([data, shard], world.device.type, ranks, mesh_dim_names=("data", "shard"))
    else:
        mesh = DeviceMesh.from_group(group, world.device.type)
    whole_ones = {p for p in model.parameters() if not (p.ndim and p.numel())}
    if rounded:
        whole_ones |= {p for p in model.parameters() if p.ndim == 1} - rounded
    blocks = {name: block for name, block in blocks.items() if {*block.parameters()} - whole_ones}
    policies = _policies({**blocks, "": model}, whole_ones, rounded)
    _explain_use_outside(model, [*blocks], flag)
    found: dict[str, FSDPModule] = {}
    for name, block in {**blocks, "": model}.items():
        found[name] = cut = fully_shard(
            block, mesh=mesh, reshard_after_forward=True, ignored_params=whole_ones, mp_policy=policies[name]
        )
        cut.set_gradient_divide_factor(1.0)  # a sum: it is divided by the global weight
        cut.set_force_sum_reduction_for_comms(True)  # gloo has no other
        cut.set_reduce_scatter_unused_params(True)  # else ranks that use different parameters would mix them up
    # the first forward, which would do it, may be that of a block: a loop of the user's own calls what it likes
    fully_shard.state(model)._lazy_init()  # pyright: ignore[reportPrivateUsage, reportFunctionMemberAccess]
    return found


def _explain_use_outside(model: nn.Module, names: list[str], flag: str) -> None:
    """Let a call of `model` raise UsageError if it uses a block's parameter while that is sharded."""
    kind: Any = type(model)

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        try:
            return kind.__call__(self, *args, **kwargs)
        except RuntimeError as error:
            if MIXED not in str(error):
                raise
            raise UsageError(
                code="block-parameter-outside", blocks=first_few(names, MAX_NAMED), setting=flag
            ) from error

    override_members(model, __call__=call)


def _policies(
    blocks: Mapping[str, nn.Module], whole_ones: AbstractSet[nn.Parameter], rounded: AbstractSet[nn.Parameter]
) -> dict[str, MixedPrecisionPolicy]:
    """The types in which each block is sent. Inner ones come first: their parameters do not belong to outer ones."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    # inputs stay as they are: autocast rounds them where it should, and a leading batch norm needs them in float32
    bf16 = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    as_it_is = MixedPrecisionPolicy()
    policies: dict[str, MixedPrecisionPolicy] = {}
    taken: set[nn.Parameter] = {*whole_ones}
    for name, block in blocks.items():
        own = {*block.parameters()} - taken
        taken |= own
        policies[name] = bf16 if own and own <= rounded else as_it_is
    return policies


@contextmanager
def gathered(blocks: Mapping[str, FSDPModule]) -> Generator[None]:
    """Inside, all of the model is whole, and forward and backward send nothing (entering is a collective)."""
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


def on_backward(blocks: Mapping[str, FSDPModule], act: Callable[[], None]) -> None:
    """Call `act` in each backward that goes through what a block has given from now on."""

    def at_forward(_block: nn.Module, _inputs: Any, output: Any) -> None:
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(lambda _: act())

    for block in blocks.values():
        block.register_forward_hook(at_forward)  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]


def blocks_of(model: nn.Module, rule: str | None, *, flag: str) -> dict[str, nn.Module]:
    """The blocks inside the plain `model` by name, inner ones first; `rule` and `flag` as in `forward.matching`.

    Raises:
        UsageError: if `rule` matches nothing, or a block of it holds a parameter that is also used outside.
    """
    found = _by_default(model) if rule is None else matching(model, rule, flag=flag)
    if rule is not None and not any(_has_parameters(block) for block in found.values()):
        raise UsageError(code="blocks-without-parameters", setting=flag, rule=rule, blocks=", ".join(found))
    found = {name: block for name, block in found.items() if _has_parameters(block)}
    for name in [*found]:
        shared = _used_outside(model, name)
        if shared and rule is not None:
            raise UsageError(code="block-shares-parameter", setting=flag, rule=rule, name=name, shared=shared)
        if shared:
            del found[name]
    return dict(sorted(found.items(), key=lambda item: -item[0].count(".")))


def check_types(model: nn.Module, blocks: dict[str, nn.Module]) -> None:
    """Raise UsageError if a block, or the rest of the model, has parameters of several types: it is sent in one."""
    types: dict[str, dict[torch.dtype, str]] = defaultdict(dict)
    for name, parameter in model.named_parameters():
        owner = max((block for block in blocks if name.startswith(f"{block}.")), key=len, default="")
        if parameter.requires_grad:
            types[owner].setdefault(parameter.dtype, name)
    for owner, kinds in types.items():
        if len(kinds) > 1:
            told = ", ".join(f"{name} is {str(kind).removeprefix('torch.')}" for kind, name in kinds.items())
            raise UsageError(code="block-of-several-types", block=owner or "the model outside its blocks", told=told)


def _by_default(model: nn.Module) -> dict[str, nn.Module]:
    lists = [one for one in _repeated("", model) if not all(_used_outside(model, name) for name in one)]
    sizes = [[_size(layer) for layer in one.values()] for one in lists]
    # a list that is smaller than one block of the largest list saves less memory than that block takes
    least = max(max(sizes, key=sum)) if sizes else 0
    found = [one for one, of_layers in zip(lists, sizes, strict=True) if sum(of_layers) >= least]
    if sum(map(_size, (layer for one in found for layer in one.values()))) < LEAST_SHARE * _size(model):
        return _children(model)
    return {name: layer for one in found for name, layer in one.items()}


def _repeated(name: str, module: nn.Module) -> list[dict[str, nn.Module]]:
    """The layers of each list inside `module`, by name; of lists within lists the outer one.

    In a list at least half of the parameters are in layers whose class occurs again. If one layer has more than half
    of them, lists inside the layers are preferred: stages of a network that grow in width consist of layers themselves.
    """
    prefix = f"{name}." if name else ""
    inside = [one for leaf, child in module.named_children() for one in _repeated(prefix + leaf, child)]
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
    """Its class; `forward.override_members` makes a class of the same name for each module."""
    return type(module).__module__, type(module).__qualname__


def _size(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def _children(model: nn.Module) -> dict[str, nn.Module]:
    """The children of the model, or of the module that it only wraps, and the modules of every ModuleList in it."""
    base, inner = "", model
    while len(children := [(n, m) for n, m in inner.named_children() if _has_parameters(m)]) == 1:
        if any(True for _ in inner.parameters(recurse=False)):
            break
        ((leaf, inner),) = children
        base += f"{leaf}."
    found: dict[str, nn.Module] = {}
    for name, module in inner.named_modules():
        parent = inner.get_submodule(name.rpartition(".")[0]) if name else None
        # a module without a forward, e.g. a list, is no block: its owner uses what is in it
        called = type(module).forward is not nn.Module.forward
        if called and (parent is inner or isinstance(parent, nn.ModuleList)):
            found[base + name] = module
        elif isinstance(parent, nn.ModuleDict) and name.count(".") == 1:
            found[base + name] = module  # a direct child that only holds others
    return found


def _has_parameters(module: nn.Module) -> bool:
    return any(p.ndim and p.numel() for p in module.parameters())


def _used_outside(model: nn.Module, name: str) -> str:
    """A parameter of the block that has another name outside it; empty if there is none."""
    inside = {id(p) for p in model.get_submodule(name).parameters()}
    everywhere = model.named_parameters(remove_duplicate=False)
    return next((full for full, p in everywhere if id(p) in inside and not full.startswith(f"{name}.")), "")
