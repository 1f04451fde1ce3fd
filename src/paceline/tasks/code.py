"""Do all ranks run the same code of the user's? Machines that do not share a folder may hold another version of it."""

from __future__ import annotations

import hashlib
import sys
import sysconfig
from pathlib import Path

import paceline
from paceline.errors import UsageError
from paceline.sums import gather_words, told_once
from paceline.worker.world import World

SHOWN = 5


def own_code() -> dict[str, str]:
    """Of each imported module that belongs to no installed package: its name and a digest of its file."""
    paths = sysconfig.get_paths()
    installed = {Path(paths[name]).resolve() for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    installed |= {Path(__file__).parents[1]} | {Path(p) for p in paceline.__path__}
    found: dict[str, str] = {}
    for name, module in list(sys.modules.items()):
        path = getattr(module, "__file__", None)
        if not isinstance(path, str) or not path.endswith(".py"):
            continue
        resolved = Path(path).resolve()
        if resolved.is_file() and not any(folder in resolved.parents for folder in installed):
            found[name] = hashlib.sha256(resolved.read_bytes()).hexdigest()[:12]
    return found


def check_code(world: World) -> None:
    """Compare the modules that ranks have in common (a collective): one alone may have imported more than others.

    Raises:
        UsageError: told by one rank: which modules differ, and on which ranks.
    """
    everybody: list[dict[str, str]] = gather_words(own_code(), world)
    differing: list[str] = []
    for name in sorted({name for rank in everybody for name in rank}):
        ranks: dict[str, list[int]] = {}
        for rank, modules in enumerate(everybody):
            if name in modules:
                ranks.setdefault(modules[name], []).append(rank)
        if len(ranks) > 1:
            told = ", ".join(f"{digest} on rank {', '.join(map(str, on))}" for digest, on in ranks.items())
            differing.append(f"{name} ({told})")
    if differing:
        more = f" and {len(differing) - SHOWN} more" if len(differing) > SHOWN else ""
        raise told_once(
            UsageError(
                f"the ranks run different code: {'; '.join(differing[:SHOWN])}{more}. All machines must have the same "
                "files: a shared folder, or --sync"
            ),
            world,
        )
