"""A model's state_dict out of a saved state: under all its names, with buffers merged over virtual ranks."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor, nn

from paceline.checkpoint.format import Damaged, Manifest
from paceline.checkpoint.reductions import OPEN, UNCHANGED, reduced, saved_reduction
from paceline.checkpoint.shards import ShardFiles
from paceline.checkpoint.state import PrefixedSource, Source
from paceline.errors import UsageError, unknown

BUFFER = re.compile(r"buffers/(?:([0-9]{1,9})/)?(.+)")  # a virtual rank's, or everybody's
REDUCTION = re.compile(r"reduction/([a-z]+)/(.+)")


def state_names(model: nn.Module) -> dict[str, list[str]]:
    """What the state_dict calls a tensor, where that is not just the name that it is saved under.

    Several names for one that is tied, none for a buffer that is not persistent; "" has those of what is not saved.
    """
    saved = {id(tensor): name for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    names: dict[str, list[str]] = {name: [] for name in saved.values()}
    for name, tensor in model.state_dict(keep_vars=True).items():
        names.setdefault(saved.get(id(tensor), ""), []).append(name)
    return {name: called for name, called in names.items() if called != [name]}


def of_checkpoint(path: Path, manifest: Manifest, model: int = 1) -> dict[str, Tensor]:
    """The state_dict of a model in a checkpoint: as `exported`; of a session with several, the `model`-th.

    Raises:
        UsageError: if it has no such model.
        Damaged: as `exported`.
    """
    names: list[dict[str, list[str]]] = manifest.scalars.get("names", [{}])  # an older one notes no names
    if model > len(names):
        raise unknown("model", str(model), [str(number + 1) for number in range(len(names))])
    source = ShardFiles.of(path, manifest)
    return exported(
        PrefixedSource(source, f"{model}/") if model > 1 else source, names[model - 1], manifest.virtual_ranks
    )


def exported(source: Source, names: Mapping[str, Sequence[str]], virtual_ranks: int) -> dict[str, Tensor]:
    """The state_dict of a model from its saved state, bit for bit as at the end of a run that ends here.

    `names` are those of `state_names`.

    Raises:
        Damaged: if the files do not hold what they should, or the state_dict has something that is never saved.
        UsageError: it cannot be told how the values of a buffer combine.
    """
    if "" in names:
        raise Damaged(f"{names[''][0]} is in the model's state_dict, but no parameter or buffer: it was not saved")
    found: dict[str, Tensor] = {}
    buffers: dict[str, dict[int, Tensor]] = {}
    reductions: dict[str, tuple[str, Tensor]] = {}
    for full in source.names(""):
        tensor = source.tensor(full) if full.startswith(("model/", "buffers/", "reduction/")) else None
        if tensor is None:
            continue
        if match := REDUCTION.fullmatch(full):
            reductions[match[2]] = (match[1], tensor)
        elif match := BUFFER.fullmatch(full):
            buffers.setdefault(match[2], {})[int(match[1] or 0)] = tensor
        else:
            found[full.removeprefix("model/")] = tensor
    for name, of_ranks in buffers.items():
        first = of_ranks[min(of_ranks)]
        # normalization layers', and all of an older checkpoint, say none
        usual = "mean" if first.is_floating_point() else "first"
        reduction, initial = reductions.get(name, (usual, first))
        if reduction == OPEN:
            reduction = saved_reduction(source, name, of_ranks, initial)
            if not reduction:
                raise UsageError(code="export-undeclared-buffer", name=name, count=len(of_ranks))
            reduction = "first" if reduction == UNCHANGED else reduction
        found[name] = reduced(of_ranks, reduction, initial, virtual_ranks)
    return {name: tensor for saved, tensor in found.items() for name in names.get(saved, [saved])}
