"""A rank of `paceline verify my_loop.py:main`: runs a loop as it is, and writes down what it does.

`python -m paceline.proofs.verify.loop SPEC REPORT`, once for each world size. Each rank leaves one file for each case
beside the report that other workers would write.
"""

import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.nn.functional as F

from paceline.contract.failure import is_victim
from paceline.errors import PacelineError
from paceline.proofs.verify.setup import world_on
from paceline.proofs.verify.watched import WatchedSession
from paceline.seeding import derive, seed_streams
from paceline.sessions.life import close_all, made_as
from paceline.tasks import load_function
from paceline.verify.spec import LoopCase, LoopSpec
from paceline.worker.attach import run_worker
from paceline.worker.world import World


def run_case(spec: LoopSpec, case: LoopCase, rank: int) -> dict[str, Any]:
    """Run the loop once; what was noted, and how it ended in words."""
    noted: dict[str, Any] = {"notes": [], "draws": False, "start": {}, "steps": [], "error": "", "victim": False}
    noted |= {"path": [], "beside": []}
    WatchedSession.spec, WatchedSession.case, WatchedSession.noted = spec, case, noted
    made_as[:] = [WatchedSession]
    torch.set_default_dtype(torch.float32 if case.exact else torch.float64)
    seed_streams(derive(spec.seed, "loop", rank))  # only a broadcast makes the ranks alike
    before, folder = set(sys.modules), Path(spec.target.rpartition(":")[0]).resolve().parent
    try:
        with nullcontext() if case.exact else _without_dropout():
            load_function(spec.target)()
            close_all()
    except BaseException as error:
        close_all(error)
        if not isinstance(error, SystemExit) or error.code not in (None, 0):
            kind = "" if isinstance(error, PacelineError) else f"{type(error).__name__}: "
            noted |= {"error": f"{kind}{error}", "victim": is_victim(error)}
            if noted["steps"] and "stepped" not in noted["steps"][-1]:  # optimizer.step() raised it: no step was taken
                noted["steps"].pop()
    for name in set(sys.modules) - before:  # what the loop's own modules keep is not the next run's
        if Path(str(getattr(sys.modules[name], "__file__", ""))).resolve().parent == folder:
            del sys.modules[name]
    return noted


@contextmanager
def _without_dropout() -> Generator[None]:
    """Inside, the functions that modules call for it drop nothing."""
    dropout, attention = F.dropout, F.scaled_dot_product_attention

    def whole(
        query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, *more: Any, **kw: Any
    ) -> Any:
        return attention(query, key, value, attn_mask, 0.0, *more, **kw)

    F.dropout, F.scaled_dot_product_attention = _undropped, whole
    try:
        yield
    finally:
        F.dropout, F.scaled_dot_product_attention = dropout, attention


def _undropped(input: Any, *_: Any, **__: Any) -> Any:
    return input


def main(arguments: Sequence[str]) -> int:
    """Be a rank of the spec in file `arguments[0]`, and write what each case has shown beside file `arguments[1]`."""
    spec = msgspec.json.decode(Path(arguments[0]).read_bytes(), type=LoopSpec)
    run_spec(spec, Path(arguments[1]).parent, world_on(spec.device))
    return 0


def run_spec(spec: LoopSpec, folder: Path, world: World) -> None:
    """Run all cases that this world has ranks for, until one fails."""
    sys.argv[:] = [spec.target.rpartition(":")[0], *spec.words]
    for number, case in enumerate(spec.cases):
        if case.virtual_ranks < world.size:
            continue
        noted = run_case(spec, case, world.rank)
        torch.save(noted, folder / f"{world.size}-{number}-{world.rank}.pt")
        if noted["error"]:
            break


if __name__ == "__main__":
    run_worker(main)
