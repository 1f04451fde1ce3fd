"""Takes the weights that a training begins with from a file or another run: `--init-from`, for fine-tuning."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor

from paceline.checkpoint.exported import of_checkpoint
from paceline.checkpoint.state import Held
from paceline.checkpoint.whole import sha256_of
from paceline.disk.reading import real_path
from paceline.errors import UsageError, first_few
from paceline.observe.folder import CHECKPOINTS, WEIGHTS, check_is_run
from paceline.store.store import Checkpoints
from paceline.strategies.base import Replica
from paceline.sums import check_equal, together
from paceline.train.weights import load

MOST = 5  # names in a line

Report = Callable[[str], None]


def begin_with(replica: Replica, path: Path, *, trust: bool, report: Report) -> str:
    """Fill the model with the weights in `path`, by name (a collective); their SHA-256.

    `report` is told what fitted. What does not fit, or is not there, is left as it was initialised.

    Raises:
        UsageError: on one rank: it cannot be read, or nothing of it fits; ToldElsewhere on the others.
    """
    with together(replica.world):
        weights = read_weights(path, trust=trust, report=report)
        fitting = _fitting(replica, weights, path, report)
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
            return _of_checkpoint(Checkpoints(run_dir / CHECKPOINTS, trust=trust), path, report)
    try:
        if path.suffix != ".safetensors":
            return _of_pickle(torch.load(path, map_location="cpu", weights_only=True), path)
        return load(real_path(path), ours=False)  # it holds no code
    except (OSError, UnpicklingError, RuntimeError, EOFError) as error:
        raise UsageError(f"--init-from {path} cannot be read: {str(error).splitlines()[0]}") from None


def _of_pickle(found: Any, path: Path) -> dict[str, Tensor]:
    found = found.get("state_dict", found) if isinstance(found, Mapping) else {}
    if not found or not all(isinstance(value, Tensor) for value in found.values()):
        keys = f" (it has {first_few([str(key) for key in found], MOST)})" if found else ""
        raise UsageError(f"--init-from {path} is no state_dict: save model.state_dict() alone{keys}")
    return dict(found)


def _of_checkpoint(checkpoints: Checkpoints, path: Path, report: Report) -> dict[str, Tensor]:
    newest = checkpoints.newest_valid(report)
    if newest is None:
        raise UsageError(f"--init-from {path.parent}: the run has neither {WEIGHTS} nor a checkpoint that is whole")
    report(f"--init-from: the run's newest checkpoint, {newest[0].name}")
    return of_checkpoint(*newest)


class _Fitting:
    """The weights that fit, beside what the replica has of all others: a `checkpoint.state.Source`."""

    def __init__(self, values: Mapping[str, Tensor], held: Iterable[Held]) -> None:
        self._values, self._held = values, {one.name: one for one in held}

    def names(self, prefix: str) -> list[str]:
        return [name for name in {**self._held, **self._values} if name.startswith(prefix)]

    def shape(self, name: str) -> torch.Size:
        return self._values[name].shape if name in self._values else self._held[name].shape

    def tensor(self, name: str, start: int = 0, stop: int | None = None) -> Tensor | None:
        if name in self._values:
            return self._values[name] if stop is None else self._values[name].reshape(-1)[start:stop]
        return self._held[name].tensor.detach().cpu().clone() if name in self._held else None


def _fitting(replica: Replica, weights: Mapping[str, Tensor], path: Path, report: Report) -> _Fitting:
    model = replica.model
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    wanted = {name: first[id(p)] for name, p in model.named_parameters(remove_duplicate=False)}  # tied ones: the first
    kinds = {name: (p.shape, p.dtype, f"model/{name}") for name, p in model.named_parameters()}
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
        raise UsageError(
            f"--init-from {path}: nothing of it fits the model. It has {first_few([*weights], MOST)}; the model has "
            f"{first_few([*kinds], MOST)}" + (f"; shapes differ: {first_few(differ, MOST)}" if differ else "")
        )
    report(f"begins with {len(fits)} of the model's {len(kinds)} tensors from {path}")
    missing = [name for name, (*_, full) in kinds.items() if full not in fits and not any(name in d for d in differ)]
    unused = [name for name in weights if wanted.get(name, name) not in kinds]
    told = {
        "shapes differ, left as initialised": differ,
        "not in it, left as initialised": missing,
        "taken by nobody": unused,
    }
    for words, which in told.items():
        if which:
            report(f"--init-from: {words}: {first_few(which, MOST)}")
    return _Fitting(fits, replica.state())
