"""Checks that all ranks run the same user code, and that their replicas stay bit-identical."""

import hashlib
import os
import sys
import sysconfig
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch.optim import Optimizer

from paceline.checkpoint.shards import checksum
from paceline.checkpoint.state import TensorShard
from paceline.collectives.control import all_gather_object, error_on_one_rank
from paceline.errors import ExitCode, TrainingError, UsageError, first_few
from paceline.rank.world import World
from paceline.train.json_values import param_group_settings

MAX_NAMED = 3
MAX_MODULES = 5
REGISTERED_PREFIX = "registered/"


def check_replicas(state: Sequence[TensorShard], world: World, step: int, optimizers: Iterable[Optimizer] = ()) -> None:
    """Compare the checksums of all replicated tensors over the ranks (collective, one message).

    A bit flip in the memory of one rank silently spreads into every result. State that only one rank holds (buffers of
    a virtual rank, a shard of `zero`'s optimizer state) cannot be compared. A fault in it shows once it has changed a
    parameter.
    """
    compared = state if world.mesh is not None else [shard for shard in state if shard.replicated]
    if world.size == 1 or not (compared or world.mesh):
        return
    local: list[int] = torch.stack([checksum(shard.tensor) for shard in compared]).tolist() if compared else []
    checksums: dict[str, dict[int, int]] = {}  # by tensor and rank
    if world.mesh is None:
        for shard, values in zip(compared, zip(*all_gather_object(local, world), strict=True), strict=True):
            checksums[shard.name] = dict(enumerate(values))
    else:  # ranks hold different shards: compare the ranks that hold the same shard
        names = [f"{shard.name}{f' from element {shard.start} on' if shard.start else ''}" for shard in compared]
        for rank, values in enumerate(all_gather_object(dict(zip(names, local, strict=True)), world)):
            for name, value in values.items():
                checksums.setdefault(name, {})[rank] = value
    different = {name: values for name, values in checksums.items() if len({*values.values()}) > 1}
    if not different:
        return
    if all(name.startswith(REGISTERED_PREFIX) for name in different):
        named = first_few([name.removeprefix(REGISTERED_PREFIX) for name in different], MAX_NAMED)
        raise error_on_one_rank(UsageError(code="registered-differs-between-ranks", named=named), world)
    names, where = first_few([*different], MAX_NAMED), _minority_text(different)
    groups = [group for optimizer in optimizers for group in param_group_settings(optimizer)]
    local_settings = [f"{name}={value}" for group in groups for name, value in group.items()]
    by_rank: list[list[str]] = all_gather_object(local_settings, world)
    settings = next((", ".join(values) for values in zip(*by_rank, strict=False) if len({*values}) > 1), "")
    error = TrainingError(
        code="replicas-differ-by-settings" if settings else "replicas-differ",
        exit_code=ExitCode.DIVERGED, step=step, names=names, where=where, settings=settings,
    )  # fmt: skip
    raise error_on_one_rank(error, world)


def _minority_text(different: dict[str, dict[int, int]]) -> str:
    minority: set[int] = set()
    for values in different.values():
        (common, votes), *_ = Counter(values.values()).most_common()
        if votes * 2 <= len(values):
            pair_text = f"ranks {' and '.join(map(str, values))}, and two cannot tell which is right"
            return f"between {pair_text if len(values) == 2 else 'all ranks, without a majority'}"
        minority |= {rank for rank, value in values.items() if value != common}
    holders = next(iter(different.values()))
    return f"on rank {', '.join(map(str, sorted(minority)))}, against the majority of {len(holders)} ranks"


def check_user_code(world: World) -> None:
    """Compare the user's code on all ranks (collective): nodes without a shared folder can have different versions.

    Only modules that several ranks have imported are compared, because a rank may import more than others.
    """
    by_rank: list[dict[str, str]] = all_gather_object(_user_code(), world)
    differing: list[str] = []
    for name in sorted({name for rank_modules in by_rank for name in rank_modules}):
        ranks: dict[str, list[int]] = {}
        for rank, modules in enumerate(by_rank):
            if name in modules:
                ranks.setdefault(modules[name], []).append(rank)
        if len(ranks) > 1:
            versions = ", ".join(f"{digest} on rank {', '.join(map(str, on))}" for digest, on in ranks.items())
            differing.append(f"{name} ({versions})")
    if differing:
        modules = first_few(differing, MAX_MODULES, "; ")
        raise error_on_one_rank(UsageError(code="code-differs", modules=modules), world)


def _user_code() -> dict[str, str]:
    paths = sysconfig.get_paths()
    roots = [paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    roots.append(str(Path(__file__).parents[1]))  # paceline itself
    installed = tuple(os.path.realpath(root) + os.sep for root in roots)
    resolved: dict[str, str] = {}  # cache of folders: a process has thousands of modules, and all ranks wait here
    digests: dict[str, str] = {}
    for name, module in list(sys.modules.items()):
        path = getattr(module, "__file__", None)
        if not isinstance(path, str) or not path.endswith(".py"):
            continue
        if os.path.islink(path):  # noqa: PTH114 - creating a Path for each of 2,000 modules would take most of the time
            path = os.path.realpath(path)
        folder = path.rpartition(os.sep)[0]
        if folder not in resolved:
            resolved[folder] = os.path.realpath(folder) + os.sep
        if not resolved[folder].startswith(installed) and Path(path).is_file():
            digests[name] = hashlib.sha256(Path(path).read_bytes()).hexdigest()[:12]
    return digests
