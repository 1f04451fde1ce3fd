"""Who am I among whom: read once from the environment that the launcher made, and never changed."""

from __future__ import annotations

import os
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, Store, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from paceline.errors import UsageError

COUNTS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
ADDRESS = ("MASTER_ADDR", "MASTER_PORT")
DEFAULT_TIMEOUT_SECONDS = 600.0


@dataclass(frozen=True)
class World:
    """This process's place: `rank` of `size` in the world, `local_rank` of `local_size` on its node."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    device: torch.device
    backend: str

    @classmethod
    def from_env(
        cls,
        env: Mapping[str, str] | None = None,
        *,
        device: str = "auto",
        backend: str = "auto",
    ) -> World:
        """The world that torchrun's variables describe; a world of one where none of them is set.

        Args:
            env: the environment, by default this process's.
            device: "auto" (a GPU if there is one), "cpu" or "cuda"; the GPU is the one of `local_rank`.
            backend: "auto" (nccl for GPUs, gloo for CPUs), "nccl", "gloo" or "mpi".

        Raises:
            UsageError: when only some of the variables are set (a forgotten one must not become a silent world of
                one), when they contradict each other, or when device or backend are not to be had.
        """
        env = os.environ if env is None else env
        rank, size, local_rank, local_size = _counts(env)
        chosen = _device(device, local_rank, local_size)
        return cls(rank, size, local_rank, local_size, chosen, _backend(backend, chosen))


def _counts(env: Mapping[str, str]) -> tuple[int, int, int, int]:
    names = [*COUNTS, *ADDRESS]
    present = [name for name in COUNTS if name in env]
    if not present:
        return 0, 1, 0, 1
    missing = [name for name in names if name not in env]
    if missing:
        raise UsageError(
            f"the environment sets {', '.join(present)} but not {', '.join(missing)}. A launcher (paceline --nproc, "
            f"torchrun) sets all of {', '.join(names)}; for a single process unset them all."
        )
    values: list[int] = []
    for name in COUNTS:
        try:
            values.append(int(env[name]))
        except ValueError:
            raise UsageError(f"{name} must be a whole number, got {env[name]!r}") from None
    rank, size, local_rank, local_size = values
    if not (0 <= rank < size and 0 <= local_rank < local_size <= size):
        raise UsageError(
            f"the environment contradicts itself: RANK={rank} of WORLD_SIZE={size}, "
            f"LOCAL_RANK={local_rank} of LOCAL_WORLD_SIZE={local_size}"
        )
    return rank, size, local_rank, local_size


def _device(asked: str, local_rank: int, local_size: int) -> torch.device:
    gpus = torch.cuda.device_count()
    if asked == "cpu" or (asked == "auto" and gpus == 0):
        return torch.device("cpu")
    if asked not in ("auto", "cuda"):
        raise UsageError(f"unknown device {asked!r}. Choose from: auto, cpu, cuda")
    if local_size > gpus:
        raise UsageError(
            f"{local_size} processes on this node need {local_size} GPUs, torch sees {gpus}. "
            f"Start at most {gpus} processes per node, or use --device cpu."
        )
    return torch.device("cuda", local_rank)  # local: the global rank is no device index on the second node


def _backend(asked: str, device: torch.device) -> str:
    chosen = {"cuda": "nccl", "cpu": "gloo"}[device.type] if asked == "auto" else asked
    available = {
        "nccl": dist.is_nccl_available(),
        "gloo": dist.is_gloo_available(),
        "mpi": dist.is_mpi_available(),
    }
    if chosen not in available:
        raise UsageError(f"unknown backend {chosen!r}. Choose from: auto, {', '.join(available)}")
    if not available[chosen]:
        usable = ", ".join(name for name, there in available.items() if there)
        raise UsageError(f"this torch ({torch.__version__}) was built without {chosen}. Available here: {usable}")
    if chosen == "nccl" and device.type == "cpu":
        raise UsageError("backend nccl moves GPU memory only; for device cpu use gloo (or auto)")
    return chosen


@contextmanager
def joined(world: World, *, timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS) -> Generator[World]:
    """Inside, torch.distributed's default process group is up; it is torn down also on an error.

    Every collective gives up after `timeout_seconds`. A world of one gets a group too, so that code between the
    braces need not ask; it opens no port.
    """
    timeout = timedelta(seconds=timeout_seconds)
    if world.device.type == "cuda":
        torch.cuda.set_device(world.device)
    dist.init_process_group(
        world.backend,
        store=None if world.backend == "mpi" else _store(world, timeout),
        rank=-1 if world.backend == "mpi" else world.rank,
        world_size=-1 if world.backend == "mpi" else world.size,
        timeout=timeout,
        device_id=world.device if world.backend == "nccl" else None,
    )
    try:
        yield world
    finally:
        # Also on an error: a peer that waits for this rank then fails at once ("connection closed") instead of hanging.
        dist.destroy_process_group()


def _store(world: World, timeout: timedelta) -> Store:
    """The store the ranks meet in, under a prefix that is new for every restart.

    Without the prefix a restarted group reads the dead group's addresses out of a store that survived it.
    """
    if world.size == 1:
        return HashStore()
    env = os.environ
    inherited = env.get("PACELINE_STORE_FD")  # the agent has bound the port already: nobody can take it meanwhile
    agent_hosts_store = env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # started by torchrun
    is_host = world.rank == 0 and not agent_hosts_store
    store = TCPStore(
        env["MASTER_ADDR"],
        int(env["MASTER_PORT"]),
        world_size=world.size,
        is_master=is_host,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=int(inherited) if inherited and is_host else None,
    )
    generation = env.get("PACELINE_GENERATION", env.get("TORCHELASTIC_RESTART_COUNT", "0"))
    return PrefixStore(f"paceline/generation-{generation}", store)
