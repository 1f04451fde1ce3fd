"""Who am I among whom: read once from the environment that the launcher made, and never changed."""

import os
import sys
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cached_property
from typing import Self

import torch
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, Store, distributed_c10d  # pyright: ignore[reportPrivateImportUsage]

from paceline.config.mesh import DIMENSIONS, OF_BATCH, Mesh
from paceline.errors import TrainingError, UsageError
from paceline.host.gpus import show_own_mig
from paceline.worker.device import BACKENDS, check_placement, chosen_backend, chosen_device, go_near, overlooked
from paceline.worker.foreign import ADDRESS, COUNTS, understood
from paceline.worker.guard import Guard
from paceline.worker.meeting import MEETING_SECONDS, meet
from paceline.worker.release import End, abort_nccl

DEFAULT_TIMEOUT_SECONDS = 600.0
TRIES = 10  # to make a group without strangers in it


@dataclass(frozen=True)
class World:
    """This process's place: `rank` of `size` in the world, `local_rank` of `local_size` on its node."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    device: torch.device
    backend: str
    group: dist.ProcessGroup | None = None
    """of torch.distributed, of just these ranks; None: the default one"""
    mesh: Mesh | None = None
    """None: all ranks along data"""
    dimensions: Mapping[str, "World"] = field(default_factory=dict[str, "World"], repr=False, compare=False)
    """see `along`"""

    def along(self, name: str) -> "World":
        """This rank among those that differ from it in this dimension of the mesh only: a world of one without it."""
        return self.dimensions.get(name) or World(0, 1, 0, 1, self.device, self.backend)

    @property
    def data(self) -> "World":
        """This rank among those that work on other samples with the same part of the model: along data and shard.

        Samples are dealt, virtual ranks owned and gradients added up over these. Without a mesh it is the world.
        """
        return self if self.mesh is None else self.along("batch")

    @cached_property
    def leads(self) -> bool:
        """Whether, of the ranks that work on the same samples, this one speaks for all: it is where the loss is."""
        last = self.along("pipeline")
        return last.rank == last.size - 1 and all(self.along(name).rank == 0 for name in ("context", "tensor"))

    @classmethod
    def from_env(
        cls,
        env: Mapping[str, str] | None = None,
        *,
        device: str = "auto",
        backend: str = "auto",
    ) -> Self:
        """The world that torchrun's variables describe, or srun's or mpirun's; a world of one where none is set.

        Args:
            env: the environment, by default this process's.
            device: "auto" (a GPU if there is one), "cpu", "cuda" or "xpu"; the GPU is the one of `local_rank`.
            backend: "auto" (nccl or xccl for GPUs, gloo for CPUs), "nccl", "xccl", "gloo" or "mpi".

        Raises:
            UsageError: when only some of the variables are set (a forgotten one must not become a silent world of
                one), when they contradict each other, or when device or backend are not to be had.
        """
        env = os.environ if env is None else env
        rank, size, local_rank, local_size = _counts({**env, **understood(env)})
        if device != "cpu":
            show_own_mig(local_rank, local_size)
        # local: the global rank is no device index on the second node
        chosen = chosen_device(device, local_rank, local_size, backend)
        if device == "auto" and chosen.type == "cpu" and rank == 0 and (words := overlooked()):
            print(f"WARNING: cpu: {words}; or say --device cpu", file=sys.stderr)
        return cls(rank, size, local_rank, local_size, chosen, chosen_backend(backend, chosen))


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


@contextmanager
def joined(
    world: World,
    *,
    timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
    meeting_seconds: float = MEETING_SECONDS,
) -> Generator[World]:
    """Inside, torch.distributed's default process group is up; it is torn down also on an error.

    Every collective gives up after `timeout_seconds`, and the wait for the other ranks to start after
    `meeting_seconds`. A world of one gets a group too, so that code between the braces need not ask; it opens no port.

    Raises:
        UsageError: another job answers where the ranks meet, or two processes claim one rank.
        TrainingError: not all ranks have come; says which.
    """
    Guard.of_process().watch_torch()  # before the group: its connections are the guard's to cut
    timeout = timedelta(seconds=timeout_seconds)
    if world.device.type != "cpu":
        torch.accelerator.set_device_index(world.device)
        go_near(world.device)
    if world.backend == "mpi":
        dist.init_process_group(world.backend, timeout=timeout)
    else:
        _make_group(world, _store(world, timeout, meeting_seconds), timeout)
    try:
        yield world
    except BaseException:
        if "nccl" in world.backend:  # its shutdown waits for what is on its way, which may never end
            with suppress(Exception):  # never hides the error that ends this
                abort_nccl(distributed_c10d)
        raise
    finally:
        # Also on an error: a peer that waits for this rank then fails at once ("connection closed") instead of hanging.
        dist.destroy_process_group()


def on_mesh(world: World, mesh: Mesh, *, timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS) -> World:
    """`world`, whose group is up, with a process group for each of its dimensions (a collective).

    Ranks that all work on different samples with the whole model need none: then it is `world` as it was.
    """
    if mesh.size == mesh.of("data"):
        return world
    dimensions: dict[str, World] = {}
    wanted = {name: (name,) for name in DIMENSIONS if mesh.of(name) > 1} | {"batch": OF_BATCH}
    for name, along in wanted.items():
        for members in sorted({mesh.peers(rank, along) for rank in range(world.size)}):
            # every rank makes all groups, in one order; one of a single rank too, or None would mean all ranks
            made = dist.new_group(members, timeout=timedelta(seconds=timeout_seconds), group_desc=f"{name} of the mesh")
            if world.rank in members:
                assert isinstance(made, dist.ProcessGroup)
                here = [rank for rank in members if rank // world.local_size == world.rank // world.local_size]
                dimensions[name] = World(
                    members.index(world.rank), len(members), here.index(world.rank), len(here), world.device,
                    world.backend, made,
                )  # fmt: skip
    own = {name: dimensions[name] for name in OF_BATCH if name in dimensions}
    dimensions["batch"] = replace(dimensions["batch"], dimensions=own)
    return replace(world, mesh=mesh, dimensions=dimensions)


def _make_group(world: World, store: Store, timeout: timedelta) -> None:
    """Make the default group; again, where another user of the machine was faster than a rank of ours."""
    if dist.is_initialized():
        raise UsageError(
            "this process already has a process group: `paceline train` makes one for a Task. Start a function that "
            "calls paceline.session as a script: `paceline launch SCRIPT`"
        )
    check_placement(world.rank, world.size, world.device, world.backend, store)
    met: list[str] = []
    for number in range(TRIES):
        attempt = PrefixStore(f"group-{number}", store)
        connections = Guard.of_process().connections
        with connections.tolerating() as strangers:
            dist.init_process_group(
                world.backend,
                store=attempt,
                rank=world.rank,
                world_size=world.size,
                timeout=timeout,
                device_id=world.device if world.backend in BACKENDS.values() else None,
            )
        if world.size == 1:
            return
        far = _unknown(world, attempt, timeout, connections.ends) if world.local_size < world.size else 0
        if _all_among_themselves(world, attempt, timeout, strange=bool(strangers), far=far):
            return
        met += strangers
        dist.destroy_process_group()
    raise UsageError(met[0] if met else "a stranger has connected to a port of another rank, each time")


def _unknown(world: World, store: Store, timeout: timedelta, ends: Sequence[End]) -> int:
    """By how many more connections from other hosts there are that no rank has made than that nobody has taken in.

    Each rank tells its ends in the store, which strangers cannot reach. One that a stranger has made has no other end.
    Of one whose addresses are translated on the way neither end finds the other, which cancels out.
    """
    for end in ends:
        store.set(f"end {end.name}", "")
    _wait_for_all(world, store, timeout, "told")
    alone = [end for end in ends if not store.check([f"end {end.other}"])]
    return sum(1 if end.accepted else -1 for end in alone)


def _all_among_themselves(world: World, store: Store, timeout: timedelta, *, strange: bool, far: int) -> bool:
    """Whether no rank has met a stranger; all of them get the same answer."""
    store.add("strange", int(strange))
    store.add("far", far)
    _wait_for_all(world, store, timeout, "judged")
    return store.add("strange", 0) == 0 and store.add("far", 0) <= 0


def _wait_for_all(world: World, store: Store, timeout: timedelta, word: str) -> None:
    deadline = time.monotonic() + timeout.total_seconds()
    store.add(word, 1)
    while store.add(word, 0) < world.size:
        if time.monotonic() > deadline:
            raise TrainingError(
                f"not all ranks have come out of making their group within {timeout.total_seconds():g} s"
            )
        time.sleep(0.001)


def _store(world: World, timeout: timedelta, meeting_seconds: float) -> Store:
    if world.size == 1:
        return HashStore()
    store = meet(world.rank, world.size, {**os.environ, **understood(os.environ)}, seconds=meeting_seconds)
    store.set_timeout(timeout)
    return store
