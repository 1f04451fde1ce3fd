"""Saves weights, whole or not at all, and elsewhere when the disk is full."""

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from paceline.disk import writing
from paceline.disk.owners import Unreadable, opened
from paceline.strategies.base import Replica


def save(weights: Mapping[str, Tensor], path: Path, *, pickled: bool = False) -> None:
    """Write a model's state as safetensors, or as torch.save does.

    As safetensors a tensor with two names (tied weights) is there once, as `load_model` expects.

    Raises:
        OSError: if it cannot be written; an older file of that name is then still there.
    """
    try:
        with writing.replacing(path) as (folder, partial):
            if pickled:
                torch.save(dict(weights), f"/proc/self/fd/{folder}/{partial}")
            else:
                tensors, ties = _unique(weights)
                save_file(tensors, f"/proc/self/fd/{folder}/{partial}", {"format": "pt", **ties})
            os.chmod(partial, writing.FILE, dir_fd=folder)
    except Exception as error:  # safetensors has an exception of its own for input/output errors, torch a RuntimeError
        raise OSError(f"{path} cannot be written: {error}") from error


def load(path: Path, *, ours: bool) -> dict[str, Tensor]:
    """What `save` wrote, under all names. OSError: it is not there, damaged or, with `ours`, not to be trusted."""
    try:
        with opened(path, ours=ours) as it, safe_open(f"/proc/self/fd/{it.descriptor}", "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
            ties = {name: tensors[kept] for name, kept in (file.metadata() or {}).items() if kept in tensors}
    except SafetensorError as error:
        raise Unreadable(path, f"is damaged: {error}") from None
    return ties | tensors


def _unique(weights: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The state by name, each tensor once and in memory of its own; and for each other name of a tensor, that one."""
    kept: dict[object, str] = {}
    tensors: dict[str, Tensor] = {}
    ties: dict[str, str] = {}
    for name, tensor in sorted(weights.items()):
        identity = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype) if tensor.numel() else name
        if identity in kept:
            ties[name] = kept[identity]
            continue
        kept[identity] = name
        # parameters that a strategy has laid into one flat tensor share their memory: safetensors refuses that
        alone = tensor.untyped_storage().nbytes() == tensor.nbytes
        tensors[name] = tensor.contiguous() if alone else tensor.clone(memory_format=torch.contiguous_format)
    return tensors, ties


def rescue_alone(replica: Replica, run_dir: Path) -> str:
    """As `rescue`, without the other ranks: no collective."""
    if replica.world.size > 1 and any(h.name.startswith("model/") and not h.replicated for h in replica.state()):
        advice = "go on from the newest checkpoint (--resume auto)"
        return f"the weights are cut over all ranks, and none can save them alone: {advice}"
    return rescue(replica.weights(), run_dir)


def rescue(weights: Mapping[str, Tensor], run_dir: Path) -> str:
    """Save the weights wherever there is room, and say where: a full disk must not cost the training."""
    for folder in (run_dir, Path.cwd(), Path(tempfile.gettempdir()), Path("/dev/shm"), Path.home()):
        path = folder.resolve() / f"{run_dir.name}-rescued.safetensors"
        try:
            save(weights, path)
        except OSError:
            continue
        return f"the weights were rescued to {path}"
    return "and the weights could not be saved anywhere: they are LOST"
