"""Run a function of a test module as W ranks: W fresh processes in one gloo group.

    def averages(rank: int, world_size: int, offset: float) -> float: ...

    def test_averages(tmp_path):
        assert run_ranks(averages, 2, tmp_path, 3.0) == [3.5, 3.5]

Fresh processes through tests/warm.py, not `multiprocessing`: its spawn leaves a resource tracker process behind, and
tensors in its arguments would be shared memory.
"""

import os
import pickle
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests import warm

POLL_SECONDS = 0.02
LEAST_PATIENCE_SECONDS = 30.0  # for the others, in a collective
LAST_LINES = 40  # of a failed rank's output, in the error


class RankFailedError(AssertionError):
    """A rank raised, died or did not end in time; the message holds its traceback or last lines."""


def run_ranks(
    function: Callable[..., Any], world_size: int, tmp_path: Path, *args: Any, timeout: float = 150.0
) -> list[Any]:
    """Call `function(rank, world_size, *args)` on every rank; return the results by rank.

    Args:
        function: at the top level of its module; it finds the process group up (default group, gloo, CPU).
        world_size: how many processes.
        tmp_path: an existing folder; each call makes a new one inside.
        args: whatever can be pickled.
        timeout: seconds after which what still runs is killed.

    Raises:
        RankFailedError: with the traceback of the first rank that failed; the other ranks are then killed.
    """
    folder = tmp_path / f"ranks-{len(list(tmp_path.glob('ranks-*')))}"
    folder.mkdir()
    # The module by name, not the function: a test file is imported in the child as pytest imported it here.
    call = (function.__module__, function.__qualname__, sys.path)
    patience = max(LEAST_PATIENCE_SECONDS, timeout / 2)  # a soak shares its machine: ranks start far apart
    (folder / "call.pickle").write_bytes(pickle.dumps(call) + pickle.dumps(args) + pickle.dumps(patience))
    processes = [_start(folder, rank, world_size) for rank in range(world_size)]
    try:
        _wait(processes, folder, time.monotonic() + timeout)
    finally:
        for process in processes:  # on success they have ended; otherwise nobody else would end them
            if process.poll() is None:
                process.kill()
            process.wait()
    return [pickle.loads((folder / f"result-{rank}").read_bytes()) for rank in range(world_size)]


def _start(folder: Path, rank: int, world_size: int) -> warm.Popen:
    with (folder / f"output-{rank}").open("wb") as output:
        return warm.call(
            "tests.run_ranks:rank_of", str(folder), rank, world_size, rank=rank, stdout=output,
            stderr=subprocess.STDOUT, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip


def _wait(processes: Sequence[warm.Popen], folder: Path, deadline: float) -> None:
    while any(process.poll() is None for process in processes):
        # A rank writes its error before its connections close: of several, the first is the cause, not its victims.
        if any(process.poll() for process in processes):
            break
        if time.monotonic() > deadline:
            running = [rank for rank, process in enumerate(processes) if process.poll() is None]
            tails = "\n".join(f"rank {rank}:\n{_tail(folder / f'output-{rank}')}" for rank in running)
            raise RankFailedError(f"ranks {running} still ran at the time limit\n{tails}")
        time.sleep(POLL_SECONDS)
    failed = [rank for rank, process in enumerate(processes) if process.poll()]
    if failed:
        errors = {rank: path for rank in range(len(processes)) if (path := folder / f"error-{rank}").exists()}
        if errors:
            rank = min(errors, key=lambda rank: errors[rank].stat().st_mtime_ns)
            raise RankFailedError(f"rank {rank} of {len(processes)} failed:\n{errors[rank].read_text()}")
        rank = failed[0]
        code = processes[rank].returncode
        raise RankFailedError(f"rank {rank} ended with code {code}:\n{_tail(folder / f'output-{rank}')}")


def _tail(path: Path) -> str:
    return "\n".join(path.read_text(errors="replace").splitlines()[-LAST_LINES:])


def rank_of(folder_name: str, rank: int, world_size: int) -> None:
    import importlib
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    folder = Path(folder_name)
    torch.set_num_threads(1)
    try:
        with (folder / "call.pickle").open("rb") as file:
            module, name, sys.path[:] = pickle.load(file)
            function = getattr(importlib.import_module(module), name)
            args, patience = pickle.load(file), timedelta(seconds=pickle.load(file))
        store = dist.FileStore(str(folder / "store"), world_size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=patience)
        # gloo may still be connecting the other ranks: a rank that destroys the group, or ends, would break that
        store.set(f"met-{rank}", "")
        store.wait([f"met-{other}" for other in range(world_size)], patience)
        try:
            result = function(rank, world_size, *args)
        except BaseException:
            _write(folder / f"error-{rank}", traceback.format_exc().encode())  # now: the others will fail next
            raise
        finally:
            with suppress(Exception):  # never hides the function's own error
                dist.destroy_process_group()
        _write(folder / f"result-{rank}", pickle.dumps(result))
    except BaseException:
        if not (folder / f"error-{rank}").exists():
            _write(folder / f"error-{rank}", traceback.format_exc().encode())
        sys.exit(1)


def _write(path: Path, content: bytes) -> None:
    whole = path.with_suffix(".part")
    whole.write_bytes(content)
    whole.rename(path)  # a reader sees all of it or nothing
