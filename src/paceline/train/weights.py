"""Saves weights, whole or not at all, and elsewhere when the disk is full."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from paceline.contract.evidence import Phase
from paceline.disk import writing
from paceline.disk.owners import Unreadable, opened
from paceline.errors import TrainingError
from paceline.strategies.base import Replica


def save(weights: Mapping[str, Tensor], path: Path) -> None:
    """Write a model's state as safetensors; a tensor with two names (tied weights) once, as `load_model` expects.

    Raises:
        OSError: if it cannot be written; an older file of that name is then still there.
    """
    try:
        tensors, ties = _unique(weights)
        with writing.replacing(path) as (folder, partial):
            save_file(tensors, f"/proc/self/fd/{folder}/{partial}", {"format": "pt", **ties})
            os.chmod(partial, writing.FILE, dir_fd=folder)
    except Exception as error:  # safetensors has an exception of its own for input/output errors
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


def save_pickled(weights: Mapping[str, Tensor], path: Path) -> None:
    """Write a model's state as torch.save does.

    Raises:
        OSError: if it cannot be written; an older file of that name is then still there.
    """
    try:
        with writing.replacing(path) as (folder, partial):
            torch.save(dict(weights), f"/proc/self/fd/{folder}/{partial}")
            os.chmod(partial, writing.FILE, dir_fd=folder)
    except Exception as error:  # torch raises RuntimeError where a file cannot be opened
        raise OSError(f"{path} cannot be written: {error}") from error


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


@contextmanager
def surviving(
    replica: Replica, run_dir: Path, steps: Callable[[], tuple[int, int]], phase: Callable[[], int]
) -> Generator[None]:
    """Inside, a file that cannot be written ends the run, after the weights have been saved elsewhere.

    `steps`: after which step this start began, and which one is done. `phase`: what the rank is doing; an OSError of
    the task's own code, a sample that cannot be read say, passes.

    Raises:
        TrainingError: says where they are.
    """
    try:
        yield
    except OSError as error:
        if phase() in (Phase.DATA, Phase.FORWARD, Phase.BACKWARD, Phase.EVALUATE):
            raise
        start, step = steps()
        where = rescue_alone(replica, run_dir) if step > start else "nothing was trained yet"
        words = f"rank {replica.world.rank} cannot go on after step {step}: {error}; {where}"
        raise TrainingError(words) from error
