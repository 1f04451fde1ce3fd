"""What all ranks must have alike: the user's code before the first step, and their replicas now and then."""

import hashlib
import os
import sys
import sysconfig
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.optim import Optimizer

from paceline.checkpoint.state import TensorShard
from paceline.collectives.control import gather_words, told_once
from paceline.errors import ExitCode, TrainingError, UsageError, first_few
from paceline.rank.world import World
from paceline.train.numbers import settings_of

MAX_NAMED = 3
REGISTERED = "registered/"
MAX_MODULES = 5  # in a message


def check_replicas(held: Sequence[TensorShard], world: World, step: int, optimizers: Iterable[Optimizer] = ()) -> None:
    """Compare what all ranks hold, or several of a mesh (a collective); one message with a number for each tensor.

    A bit that flips in one rank's memory spreads silently into every result. What a single rank holds (a virtual rank's
    buffers, a share of `zero`'s state) has nothing to be compared with, until it has changed a parameter.

    Raises:
        TrainingError: with DIVERGED if a tensor differs, naming it and the rank in the minority (a tie accuses none),
            and a setting of the `optimizers` that differs; ReportedByPeer on the other ranks.
    """
    compared = held if world.mesh is not None else [h for h in held if h.replicated]
    if world.size == 1 or not (compared or world.mesh):
        return
    mine: list[int] = torch.stack([checksum(h.tensor) for h in compared]).tolist() if compared else []
    found: dict[str, dict[int, int]] = {}
    if world.mesh is None:
        for h, prints in zip(compared, zip(*gather_words(mine, world), strict=True), strict=True):
            found[h.name] = dict(enumerate(prints))
    else:  # ranks hold different parts: of two that hold the same piece each must have the same
        names = [f"{h.name}{f' from element {h.start} on' if h.start else ''}" for h in compared]
        for rank, prints in enumerate(gather_words(dict(zip(names, mine, strict=True)), world)):
            for name, value in prints.items():
                found.setdefault(name, {})[rank] = value
    found = {name: prints for name, prints in found.items() if len({*prints.values()}) > 1}
    if not found:
        return
    if all(name.startswith(REGISTERED) for name in found):
        named = first_few([name.removeprefix(REGISTERED) for name in found], MAX_NAMED)
        raise told_once(UsageError(code="registered-differs-between-ranks", named=named), world)
    names, where = first_few([*found], MAX_NAMED), _odd(found)
    own = [f"{name}={value}" for one in optimizers for group in settings_of(one) for name, value in group.items()]
    by_rank: list[list[str]] = gather_words(own, world)
    settings = next((", ".join(told) for told in zip(*by_rank, strict=False) if len({*told}) > 1), "")
    error = TrainingError(
        code="replicas-differ-by-settings" if settings else "replicas-differ",
        exit_code=ExitCode.DIVERGED, step=step, names=names, where=where, settings=settings,
    )  # fmt: skip
    raise told_once(error, world)


def checksum(tensor: Tensor) -> Tensor:
    """() int64: the sum of all bits as 64-bit numbers, modulo 2**64.

    A single flipped bit changes it by a power of two, so it is always seen.
    """
    flat = tensor.detach().contiguous().reshape(-1)
    data = flat.as_strided(flat.shape, (1,)).view(torch.uint8)  # one element alone may have any stride
    if data.storage_offset() % 8:
        data = data.clone()
    whole = len(data) // 8 * 8
    rest = torch.nn.functional.pad(data[whole:], (0, 8 - (len(data) - whole)))
    return data[:whole].view(torch.int64).sum() + rest.view(torch.int64).sum()


def _odd(found: dict[str, dict[int, int]]) -> str:
    """Which ranks differ from the others, in words."""
    odd: set[int] = set()
    for prints in found.values():
        (common, votes), *_ = Counter(prints.values()).most_common()
        if votes * 2 <= len(prints):  # no majority: no rank is accused
            two = f"ranks {' and '.join(map(str, prints))}, and two cannot tell which is right"
            return f"between {two if len(prints) == 2 else 'all ranks, without a majority'}"
        odd |= {rank for rank, value in prints.items() if value != common}
    holders = next(iter(found.values()))
    return f"on rank {', '.join(map(str, sorted(odd)))}, against the majority of {len(holders)} ranks"


def check_code(world: World) -> None:
    """Compare the user's code on all ranks (a collective): machines without a shared folder may hold other versions.

    Compared are the modules that ranks have in common, as a rank may import more than others.

    Raises:
        UsageError: on one rank, naming the modules that differ, and the ranks; ReportedByPeer on the others.
    """
    by_rank: list[dict[str, str]] = gather_words(_own_code(), world)
    differing: list[str] = []
    for name in sorted({name for rank in by_rank for name in rank}):
        ranks: dict[str, list[int]] = {}
        for rank, modules in enumerate(by_rank):
            if name in modules:
                ranks.setdefault(modules[name], []).append(rank)
        if len(ranks) > 1:
            told = ", ".join(f"{digest} on rank {', '.join(map(str, on))}" for digest, on in ranks.items())
            differing.append(f"{name} ({told})")
    if differing:
        modules = first_few(differing, MAX_MODULES, "; ")
        raise told_once(UsageError(code="code-differs", modules=modules), world)


def _own_code() -> dict[str, str]:
    """Of each imported module that belongs to no installed package, a digest of its file, by name."""
    paths = sysconfig.get_paths()
    roots = [paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    roots.append(str(Path(__file__).parents[1]))  # ours
    installed = tuple(os.path.realpath(root) + os.sep for root in roots)
    resolved: dict[str, str] = {}  # folders: there are thousands of modules, and every rank is waited for
    found: dict[str, str] = {}
    for name, module in list(sys.modules.items()):
        path = getattr(module, "__file__", None)
        if not isinstance(path, str) or not path.endswith(".py"):
            continue
        if os.path.islink(path):  # noqa: PTH114 - a Path for each of 2,000 modules takes longer than all else here
            path = os.path.realpath(path)
        folder = path.rpartition(os.sep)[0]
        if folder not in resolved:
            resolved[folder] = os.path.realpath(folder) + os.sep
        if not resolved[folder].startswith(installed) and Path(path).is_file():
            found[name] = hashlib.sha256(Path(path).read_bytes()).hexdigest()[:12]
    return found
