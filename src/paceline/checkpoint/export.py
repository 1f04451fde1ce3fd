"""Exports a model's state_dict from a saved state: under all its names, with buffers merged over virtual ranks."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor, nn

from paceline.checkpoint import buffer_reductions
from paceline.checkpoint.shards import ShardFileSource
from paceline.checkpoint.state import PrefixedSource, StateSource
from paceline.errors import UsageError, unknown_name_error
from paceline.runs.checkpoint_format import DamagedCheckpoint, Manifest

BUFFER_NAME_PATTERN = re.compile(r"buffers/(?:([0-9]{1,9})/)?(.+)")  # of one virtual rank, or of all
REDUCTION_NAME_PATTERN = re.compile(r"reduction/([a-z]+)/(.+)")


def saved_names_by_state_dict_name(model: nn.Module) -> dict[str, str]:
    """By name in the state_dict, the name under which a tensor is saved: tied ones have one. "": it is not saved."""
    saved = {id(tensor): name for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    return {name: saved.get(id(tensor), "") for name, tensor in model.state_dict(keep_vars=True).items()}


def state_dict_names_by_saved_name(model: nn.Module) -> dict[str, list[str]]:
    """The inverse of `saved_names_by_state_dict_name`, for tensors with names other than the saved one.

    A tied parameter has several names, a buffer that is not persistent has none.
    """
    names: dict[str, list[str]] = {name: [] for name, _ in (*model.named_parameters(), *model.named_buffers())}
    for name, saved in saved_names_by_state_dict_name(model).items():
        names.setdefault(saved, []).append(name)
    return {saved: exported for saved, exported in names.items() if exported != [saved]}


def state_dict_from_checkpoint(path: Path, manifest: Manifest, model_index: int = 1) -> dict[str, Tensor]:
    """The state_dict of a model in a checkpoint. `model`: its number in a session with several models."""
    names: list[dict[str, list[str]]] = manifest.scalars.get("names", [{}])  # older checkpoints have no names
    if model_index > len(names):
        raise unknown_name_error("model", str(model_index), [str(number + 1) for number in range(len(names))])
    source = ShardFileSource.from_checkpoint(path, manifest)
    return state_dict_from_source(
        PrefixedSource(source, f"{model_index}/") if model_index > 1 else source,
        names[model_index - 1],
        manifest.virtual_ranks,
    )


def state_dict_from_source(
    source: StateSource, names: Mapping[str, Sequence[str]], virtual_ranks: int
) -> dict[str, Tensor]:
    """The state_dict of a model from its saved state, bit for bit as if the run ended at this step.

    `names`: see `state_dict_names_by_saved_name`.
    """
    if "" in names:
        what = f"{names[''][0]} of the model's state_dict"
        raise DamagedCheckpoint(f"{what} is not a parameter or buffer, and was not saved")
    exported: dict[str, Tensor] = {}
    buffers: dict[str, dict[int, Tensor]] = {}
    reductions: dict[str, tuple[str, Tensor]] = {}
    for full_name in source.names(""):
        tensor = source.tensor(full_name) if full_name.startswith(("model/", "buffers/", "reduction/")) else None
        if tensor is None:
            continue
        if match := REDUCTION_NAME_PATTERN.fullmatch(full_name):
            reductions[match[2]] = (match[1], tensor)
        elif match := BUFFER_NAME_PATTERN.fullmatch(full_name):
            buffers.setdefault(match[2], {})[int(match[1] or 0)] = tensor
        else:
            exported[full_name.removeprefix("model/")] = tensor
    for name, by_rank in buffers.items():
        first = by_rank[min(by_rank)]
        # no saved reduction: a buffer of a normalization layer, or an older checkpoint
        default = "mean" if first.is_floating_point() else "first"
        reduction, initial = reductions.get(name, (default, first))
        if reduction == buffer_reductions.UNDECLARED:
            reduction = buffer_reductions.infer_saved_reduction(source, name, by_rank, initial)
            if not reduction:
                fitting, *others = buffer_reductions.reductions_for_dtype(first)
                raise UsageError(
                    code="export-undeclared-buffer", name=name, leaf=name.rpartition(".")[2], count=len(by_rank),
                    fitting=fitting, others=others,
                )  # fmt: skip
            reduction = "first" if reduction == buffer_reductions.UNCHANGED else reduction
        exported[name] = buffer_reductions.reduce_in_process(by_rank, reduction, initial, virtual_ranks)
    return {name: tensor for saved_name, tensor in exported.items() for name in names.get(saved_name, [saved_name])}
