"""Weights on disk: saved whole or not at all, recognised by their digest, rescued when the disk is full."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from paceline.checkpoint.whole import sha256_of


def digest(model: nn.Module) -> str:
    """SHA-256 over all parameters and persistent buffers: names, types, shapes and every bit."""
    return sha256_of(model.state_dict())


def save(model: nn.Module, path: Path) -> None:
    """Write the model's state as safetensors; a tensor with two names (tied weights) once, as `load_model` expects it.

    Raises:
        OSError: if it cannot be written; an older file of that name is then still there.
    """
    partial = path.with_name(f"{path.name}.partial")
    try:
        tensors, ties = _unique(model)
        save_file(tensors, str(partial), {"format": "pt", **ties})
    except Exception as error:  # safetensors has an exception of its own for input/output errors
        partial.unlink(missing_ok=True)
        raise OSError(f"{path} cannot be written: {error}") from error
    partial.replace(path)


def _unique(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The state by name, each tensor once and in memory of its own; and which other names stand for which of these."""
    kept: dict[object, str] = {}
    tensors: dict[str, Tensor] = {}
    ties: dict[str, str] = {}
    for name, tensor in sorted(model.state_dict().items()):
        identity = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype) if tensor.numel() else name
        if identity in kept:
            ties[name] = kept[identity]
            continue
        kept[identity] = name
        # parameters that a strategy has laid into one flat tensor share their memory: safetensors refuses that
        alone = tensor.untyped_storage().nbytes() == tensor.nbytes
        tensors[name] = tensor.contiguous() if alone else tensor.clone(memory_format=torch.contiguous_format)
    return tensors, ties


def rescue(model: nn.Module, run_dir: Path) -> str:
    """Save the weights wherever there is room, and say where: a full disk must not cost the training."""
    for folder in (run_dir, Path.cwd(), Path(tempfile.gettempdir()), Path("/dev/shm"), Path.home()):
        path = folder / f"{run_dir.name}-rescued.safetensors"
        try:
            save(model, path)
        except OSError:
            continue
        return f"the weights were rescued to {path}"
    return "and the weights could not be saved anywhere: they are LOST"
