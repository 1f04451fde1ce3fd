"""Compares the user's code on all ranks."""

import hashlib
import sys
import sysconfig
from pathlib import Path

from paceline.errors import UsageError, first_few
from paceline.sums import gather_words, told_once
from paceline.worker.world import World

MAX_MODULES = 5  # in a message


def check_code(world: World) -> None:
    """Compare the user's code on all ranks (a collective): machines without a shared folder may hold other versions.

    Compared are the modules that ranks have in common, as a rank may import more than others.

    Raises:
        UsageError: on one rank, naming the modules that differ, and the ranks; ToldElsewhere on the others.
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
        words = f"the ranks run different code: {first_few(differing, MAX_MODULES, '; ')}"
        advice = "All machines must have the same files: a shared folder, or --sync"
        raise told_once(UsageError(f"{words}. {advice}"), world)


def _own_code() -> dict[str, str]:
    """Of each imported module that belongs to no installed package, a digest of its file, by name."""
    paths = sysconfig.get_paths()
    installed = {Path(paths[name]).resolve() for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    installed.add(Path(__file__).resolve().parents[1])  # ours
    found: dict[str, str] = {}
    for name, module in list(sys.modules.items()):
        path = getattr(module, "__file__", None)
        if not isinstance(path, str) or not path.endswith(".py"):
            continue
        resolved = Path(path).resolve()
        if resolved.is_file() and not any(folder in resolved.parents for folder in installed):
            found[name] = hashlib.sha256(resolved.read_bytes()).hexdigest()[:12]
    return found
