"""Weights on disk: saved whole or not at all, recognised by their digest, rescued when the disk is full."""

from __future__ import annotations

import tempfile
from pathlib import Path

from safetensors.torch import save_model
from torch import nn

from paceline.checkpoint.whole import sha256_of


def digest(model: nn.Module) -> str:
    """SHA-256 over all parameters and persistent buffers: names, types, shapes and every bit."""
    return sha256_of(model.state_dict())


def save(model: nn.Module, path: Path) -> None:
    """Write the model's state as safetensors.

    Raises:
        OSError: if it cannot be written; an older file of that name is then still there.
    """
    partial = path.with_name(f"{path.name}.partial")
    try:
        save_model(model, str(partial))
    except Exception as error:  # safetensors has an exception of its own for input/output errors
        partial.unlink(missing_ok=True)
        raise OSError(f"{path} cannot be written: {error}") from error
    partial.replace(path)


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
