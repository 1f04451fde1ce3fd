"""Weights in files: saved whole or not at all, rescued, and taken from elsewhere to begin with (`--init-from`)."""

import json
import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from paceline.checkpoint.export import of_checkpoint
from paceline.checkpoint.manager import Checkpoints, Report
from paceline.checkpoint.shards import sha256_of, whole
from paceline.checkpoint.state import TensorShard
from paceline.collectives.control import check_equal, together
from paceline.errors import UsageError, first_few
from paceline.runs import writing
from paceline.runs.folder import CHECKPOINTS, WEIGHTS, check_is_run
from paceline.runs.owners import Unreadable, opened
from paceline.runs.reading import real_path
from paceline.strategies.base import Strategy

MOST = 5  # names in a line
COMPLEX = "paceline.complex"
"""the key of the metadata of safetensors that lists complex tensors, each saved as real numbers with a last dimension
of 2: the format has no complex128, and older versions have no complex64"""


def save(weights: Mapping[str, Tensor], path: Path, *, pickled: bool = False) -> None:
    """Write a model's state as safetensors, or as torch.save does.

    As safetensors a tensor with two names (tied weights) is there once, as `load_model` expects; a complex one has
    its real and imaginary parts in a last dimension of 2 (`torch.view_as_complex` gives it back).

    Raises:
        OSError: if it cannot be written; an older file of that name is then still there.
    """
    try:
        with writing.replacing(path) as (folder, partial):
            if pickled:
                torch.save(dict(weights), f"/proc/self/fd/{folder}/{partial}")
            else:
                tensors, ties = _unique(weights)
                pairs = {name: torch.view_as_real(t) for name, t in tensors.items() if t.is_complex()}
                noted = {COMPLEX: json.dumps([*pairs])} if pairs else {}
                save_file(tensors | pairs, f"/proc/self/fd/{folder}/{partial}", {"format": "pt", **ties, **noted})
            os.chmod(partial, writing.FILE, dir_fd=folder)
    except Exception as error:  # safetensors has an exception of its own for input/output errors, torch a RuntimeError
        raise OSError(f"{path} cannot be written: {error}") from error


def load(path: Path, *, ours: bool) -> dict[str, Tensor]:
    """What `save` wrote, under all names. OSError: it is not there, damaged or, with `ours`, not to be trusted."""
    try:
        with opened(path, ours=ours) as it, safe_open(f"/proc/self/fd/{it.descriptor}", "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
            metadata: dict[str, str] = file.metadata() or {}
            for name in json.loads(metadata.pop(COMPLEX, "[]")):
                tensors[name] = torch.view_as_complex(tensors[name])
            ties = {name: tensors[kept] for name, kept in metadata.items() if kept in tensors}
    except (SafetensorError, ValueError, LookupError, TypeError, RuntimeError) as error:
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


def rescue_alone(replica: Strategy, run_dir: Path) -> str:
    """As `rescue`, without the other ranks: no collective."""
    if replica.world.size > 1 and any(h.name.startswith("model/") and not h.replicated for h in replica.state()):
        advice = "resume from the newest checkpoint"
        return f"the weights are sharded over all ranks, and no rank can save them alone: {advice}"
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


def begin_with(replica: Strategy, path: Path, *, trust: bool, report: Report) -> str:
    """Fill the model with the weights in `path`, by name (a collective); their SHA-256.

    `report` is told what fitted. What does not fit, or is not there, is left as it was initialised.

    Raises:
        UsageError: on one rank: it cannot be read, or nothing of it fits; ReportedByPeer on the others.
    """
    held = replica.state()
    if replica.world.data is not replica.world:  # pieces of parameters
        held = [TensorShard(name, tensor) for name, tensor in whole(held, replica.world).items()]
    with together(replica.world):
        weights = read_weights(path, trust=trust, report=report)
        fitting = _fitting(replica, held, weights, path, report)
    digest = sha256_of(weights)
    check_equal("weights to begin with", digest, replica.world)
    with together(replica.world):
        replica.load(fitting)
    return digest


def read_weights(path: Path, *, trust: bool, report: Report) -> dict[str, Tensor]:
    """A state by the model's names, on the CPU: of a file, or of a run's final weights or newest checkpoint.

    Raises:
        UsageError: it cannot be read, holds something else, or is a run that others could have written.
    """
    if path.is_dir():
        run_dir = real_path(path)
        check_is_run(run_dir, trust=trust)
        path = run_dir / WEIGHTS
        if not path.is_file():
            newest = Checkpoints(run_dir / CHECKPOINTS, trust=trust).newest_valid(report)
            if newest is None:
                raise UsageError(code="init-from-no-weights", folder=run_dir, weights=WEIGHTS)
            report(f"--init-from: the run's newest checkpoint, {newest[0].name}")
            return of_checkpoint(*newest)
    try:
        if path.suffix != ".safetensors":
            return _of_pickle(torch.load(path, map_location="cpu", weights_only=True), path)
        return load(real_path(path), ours=False)  # it holds no code
    except (OSError, UnpicklingError, RuntimeError, EOFError) as error:
        raise UsageError(code="init-from-unreadable", path=path, reason=str(error).splitlines()[0]) from None


def _of_pickle(found: Any, path: Path) -> dict[str, Tensor]:
    found = found.get("state_dict", found) if isinstance(found, Mapping) else {}
    if not found or not all(isinstance(value, Tensor) for value in found.values()):
        keys = f" (it has {first_few([str(key) for key in found], MOST)})" if found else ""
        raise UsageError(code="init-from-no-state-dict", path=path, keys=keys)
    return dict(found)


class _Fitting:
    """The weights that fit, beside what the replica has of all others: a `checkpoint.state.Source`."""

    def __init__(self, values: Mapping[str, Tensor], held: Iterable[TensorShard]) -> None:
        self._values, self._held = values, {one.name: one for one in held}

    def names(self, prefix: str) -> list[str]:
        return [name for name in {**self._held, **self._values} if name.startswith(prefix)]

    def shape(self, name: str) -> torch.Size:
        return self._values[name].shape if name in self._values else self._held[name].shape

    def tensor(self, name: str, start: int = 0, stop: int | None = None) -> Tensor | None:
        if name in self._values:
            return self._values[name] if stop is None else self._values[name].reshape(-1)[start:stop]
        if name not in self._held:
            return None
        own = self._held[name].tensor.detach().cpu().clone()  # of a piece that is what will be asked for
        return own if stop is None or self._held[name].whole is not None else own.reshape(-1)[start:stop]


def _fitting(
    replica: Strategy, held: Sequence[TensorShard], weights: Mapping[str, Tensor], path: Path, report: Report
) -> _Fitting:
    model = replica.model
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    wanted = {name: first[id(p)] for name, p in model.named_parameters(remove_duplicate=False)}  # tied ones: the first
    shapes = {one.name: one.shape for one in held}
    kinds = {n: (shapes.get(f"model/{n}", p.shape), p.dtype, f"model/{n}") for n, p in model.named_parameters()}
    state = set(model.state_dict())
    kinds |= {n: (b.shape, b.dtype, f"buffers/{n}") for n, b in model.named_buffers() if n in state}
    fits: dict[str, Tensor] = {}
    differ: list[str] = []
    for name, value in weights.items():
        known = kinds.get(wanted.get(name, name))
        if known and value.shape == known[0]:
            fits[known[2]] = value.to(known[1])
        elif known:
            differ.append(f"{name} {tuple(known[0])} here, {tuple(value.shape)} there")
    if not any(name.startswith("model/") for name in fits):
        shapes = f"; shapes differ: {first_few(differ, MOST)}" if differ else ""
        has, needed = first_few([*weights], MOST), first_few([*kinds], MOST)
        raise UsageError(code="init-from-does-not-fit", path=path, has=has, needed=needed, shapes=shapes)
    whose = "the model's" if replica.pipeline is None else "the first stage's"
    report(f"begins with {len(fits)} of {whose} {len(kinds)} tensors from {path}")
    missing = [name for name, (*_, full) in kinds.items() if full not in fits and not any(name in d for d in differ)]
    others = replica.pipeline.called if replica.pipeline else ()  # what is another stage's
    unused = [name for name in weights if wanted.get(name, name) not in kinds and name not in others]
    told = {
        "shapes differ, left as initialised": differ,
        "not in it, left as initialised": missing,
        "taken by nobody": unused,
    }
    for words, which in told.items():
        if which:
            report(f"--init-from: {words}: {first_few(which, MOST)}")
    return _Fitting(fits, held)
