"""The world of a rank: its rank and size from the launcher's environment, its device, and its process group."""

import os
import sys
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import Self

import torch
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, Store, distributed_c10d  # pyright: ignore[reportPrivateImportUsage]

from paceline.config.mesh import BATCH_DIMENSIONS, DIMENSIONS, Mesh
from paceline.errors import TrainingError, UsageError, plural
from paceline.host.gpus import (
    DEV,
    GPU_SHARING_BACKENDS,
    VISIBLE_DEVICES_VARIABLES,
    cpu_cores_near_gpu,
    select_mig_instance,
)
from paceline.protocol.balance import assign_virtual_ranks
from paceline.protocol.control import WorkerSpec
from paceline.rank.environment import read_rank_variables, translate_slurm_mpi_variables
from paceline.rank.guard import ConnectionEnd, HangGuard, abort_nccl, other_users_error
from paceline.rank.rendezvous import MEETING_SECONDS, rendezvous

DEFAULT_TIMEOUT_SECONDS = 600.0
MAX_GROUP_ATTEMPTS = 10  # attempts to make a group without foreign users
BACKENDS = {"cuda": "nccl", "xpu": "xccl"}  # the default backend of each kind of device; gloo for all others


@dataclass(frozen=True)
class World:
    """The position of this process: `rank` of `size` in the world, `local_rank` of `local_size` on its node."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    device: torch.device
    """The device of this process."""
    backend: str
    """The backend of torch.distributed: nccl, xccl, gloo or mpi."""
    group: dist.ProcessGroup | None = None
    """The process group of these ranks; None: the default group."""
    speeds: tuple[float, ...] = ()
    """The relative speed of each rank, with `--balance`. Empty: equal."""
    mesh: Mesh | None = None
    """None: all ranks are data parallel."""
    dimensions: Mapping[str, "World"] = field(default_factory=dict[str, "World"], repr=False, compare=False)
    """The world along each dimension of the mesh: see `along`."""

    def along(self, name: str) -> "World":
        """The world of the ranks that differ only in this dimension of the mesh; without it, this rank alone.

        Args:
            name: "pipeline", "data", "shard", "context" or "tensor"; or "batch" for data and shard together.
        """
        return self.dimensions.get(name) or World(0, 1, 0, 1, self.device, self.backend)

    @property
    def data(self) -> "World":
        """The ranks with different samples and the same part of the model; without a mesh the world itself.

        Samples and virtual ranks are split over these ranks, and gradients are summed over them.
        """
        return self if self.mesh is None else self.along("batch")

    def shares(self, virtual_ranks: int) -> list[range]:
        """The virtual ranks that each rank computes, by rank.

        Args:
            virtual_ranks: number of virtual ranks of the run.

        Raises:
            UsageError: with more ranks than virtual ranks.
        """
        return assign_virtual_ranks(virtual_ranks, self.size, self.speeds)

    def share(self, virtual_ranks: int) -> range:
        """The virtual ranks that this rank computes.

        Args:
            virtual_ranks: number of virtual ranks of the run.

        Raises:
            UsageError: with more ranks than virtual ranks.
        """
        return self.shares(virtual_ranks)[self.rank]

    @cached_property
    def is_replica_leader(self) -> bool:
        """Whether this rank computes the loss for the ranks that work on the same samples, and reports for them."""
        pipeline = self.along("pipeline")
        return pipeline.rank == pipeline.size - 1 and all(self.along(name).rank == 0 for name in ("context", "tensor"))

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None, *, device: str = "auto", backend: str = "auto") -> Self:
        """The world from the variables of torchrun, srun or mpirun; a single process if none is set.

        Args:
            env: the environment, by default this process's.
            device: "auto" (a GPU if there is one), "cpu", "cuda" or "xpu"; the GPU is the one of `local_rank`.
            backend: "auto" (nccl or xccl for GPUs, gloo for CPUs), "nccl", "xccl", "gloo" or "mpi".

        Raises:
            UsageError: only some of the variables are set (which must not silently give a single process), they
                contradict each other, or the device or the backend is not available.
        """
        env = os.environ if env is None else env
        rank, size, local_rank, local_size = read_rank_variables(env)
        spec = WorkerSpec.from_environment()
        # not the global rank, because it is not a device index on the second node
        index = spec.devices[local_rank] if spec is not None and spec.devices else local_rank
        if device != "cpu":
            select_mig_instance(index, local_size)
        torch_device = resolve_device(device, index, local_size, backend)
        if device == "auto" and torch_device.type == "cpu" and rank == 0 and (reason := explain_missing_gpus()):
            print(f"WARNING: cpu: {reason}; or use --device cpu", file=sys.stderr)
        speeds = spec.speeds if spec is not None else ()
        backend = resolve_backend(backend, torch_device)
        return cls(rank, size, local_rank, local_size, torch_device, backend, speeds=speeds)


@contextmanager
def process_group(
    world: World, *, timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS, meeting_seconds: float = MEETING_SECONDS
) -> Generator[World]:
    """A context with torch.distributed's default process group, which is destroyed at the end and on an error.

    All ranks must enter it. A single process also gets a group, so that its code can use collectives. That group opens
    no port. A GPU `world.device` becomes the current device, and the process runs on the CPU cores near it.

    Args:
        world: of this process, e.g. from `World.from_env`.
        timeout_seconds: after this time a collective fails.
        meeting_seconds: how long to wait for the other ranks at the start. Not used by backend mpi.

    Yields:
        `world`.

    Raises:
        UsageError: the process already has a group, another job answers at the rendezvous, two processes claim one
            rank, or two ranks have the same GPU and the backend does not support it.
        TrainingError: some ranks have not connected.
    """
    HangGuard.of_process().watch_torch()  # before the group, so that the guard records its connections
    timeout = timedelta(seconds=timeout_seconds)
    if world.device.type != "cpu":
        torch.accelerator.set_device_index(world.device)
        set_cpu_affinity(world.device)
    if world.backend == "mpi":
        dist.init_process_group(world.backend, timeout=timeout)
    else:
        _make_group(world, timeout, meeting_seconds)
    try:
        yield world
    except BaseException:
        if "nccl" in world.backend:  # its shutdown waits for operations in flight, which may never complete
            with suppress(Exception):  # an error here must not hide the original one
                abort_nccl(distributed_c10d)
        raise
    finally:
        # also on an error, so that a waiting peer fails immediately ("connection closed") instead of hanging
        dist.destroy_process_group()


def create_mesh_groups(world: World, mesh: Mesh, *, timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS) -> World:
    """Create a process group for each dimension of the mesh (a collective); return `world` with these groups.

    The default process group must exist. With data parallelism alone, `world` is returned unchanged.
    """
    if mesh.size == mesh.size_of("data"):
        return world
    dimensions: dict[str, World] = {}
    dimensions_by_name = {name: (name,) for name in DIMENSIONS if mesh.size_of(name) > 1} | {"batch": BATCH_DIMENSIONS}
    for name, along in dimensions_by_name.items():
        for members in sorted({mesh.peers(rank, along) for rank in range(world.size)}):
            # Every rank makes all groups in the same order. A single rank also needs a group: None means all ranks.
            pg = dist.new_group(members, timeout=timedelta(seconds=timeout_seconds), group_desc=f"{name} of the mesh")
            if world.rank in members:
                assert isinstance(pg, dist.ProcessGroup)
                on_node = [rank for rank in members if rank // world.local_size == world.rank // world.local_size]
                dimensions[name] = World(
                    members.index(world.rank), len(members), on_node.index(world.rank), len(on_node), world.device,
                    world.backend, pg,
                )  # fmt: skip
    batch_dimensions = {name: dimensions[name] for name in BATCH_DIMENSIONS if name in dimensions}
    dimensions["batch"] = replace(dimensions["batch"], dimensions=batch_dimensions)
    return replace(world, mesh=mesh, dimensions=dimensions)


def _make_group(world: World, timeout: timedelta, meeting_seconds: float) -> None:
    """Make the default group. Retry if another user of the machine has connected in place of a rank."""
    if dist.is_initialized():
        raise UsageError(code="process-group-exists")
    store: Store = HashStore()
    if world.size > 1:
        env = {**os.environ, **translate_slurm_mpi_variables(os.environ)}
        store = rendezvous(world.rank, world.size, env, seconds=meeting_seconds)
        store.set_timeout(timeout)
    check_gpu_placement(world.rank, world.size, world.device, world.backend, store)
    foreign_users: list[list[str]] = []
    for number in range(MAX_GROUP_ATTEMPTS):
        attempt = PrefixStore(f"group-{number}", store)
        connections = HangGuard.of_process().connections
        with connections.tolerate_foreign_users() as foreign:
            dist.init_process_group(
                world.backend, store=attempt, rank=world.rank, world_size=world.size, timeout=timeout,
                device_id=world.device if world.backend in BACKENDS.values() else None,
            )  # fmt: skip
        if world.size == 1:
            return
        if not _has_foreign_users(world, attempt, timeout, connections.ends, here=bool(foreign)):
            return
        foreign_users += foreign
        dist.destroy_process_group()
    raise other_users_error(foreign_users[0]) if foreign_users else UsageError(code="stranger-at-another-rank")


def _has_foreign_users(
    world: World, store: Store, timeout: timedelta, ends: Sequence[ConnectionEnd], *, here: bool
) -> bool:
    """Whether a foreign user has connected to any rank; equal on all ranks. `here`: to this rank, from its host.

    Each rank writes its ends of connections between hosts to the store, which foreign users cannot access. A foreign
    connection has no entry for its other end, so more accepted than initiated connections lack an entry. If addresses
    are translated (NAT), neither end finds the other, and the counts cancel out.
    """
    if world.local_size < world.size:
        for own, peer, _ in ends:
            store.set(f"end {own} {peer}", "")
        _wait_for_all(world, store, timeout, "ends written")
        unmatched = [was_accepted for own, peer, was_accepted in ends if not store.check([f"end {peer} {own}"])]
        store.add("from other hosts", sum(1 if was_accepted else -1 for was_accepted in unmatched))
    store.add("here", int(here))
    _wait_for_all(world, store, timeout, "counted")
    return store.add("here", 0) > 0 or store.add("from other hosts", 0) > 0


def _wait_for_all(world: World, store: Store, timeout: timedelta, key: str) -> None:
    deadline = time.monotonic() + timeout.total_seconds()
    store.add(key, 1)
    while store.add(key, 0) < world.size:
        if time.monotonic() > deadline:
            raise TrainingError(code="group-not-made-by-all", seconds=timeout.total_seconds())
        time.sleep(0.001)


def resolve_device(choice: str, index: int, workers: int, backend: str) -> torch.device:
    """The device of the rank with number `index` of `workers` on this machine; `index` counts the visible devices.

    `choice` is "auto" (the accelerator that torch supports here, else the CPU), "cpu", or a kind of accelerator: "cuda"
    (also for AMD, with a torch built for ROCm), "xpu". Each process needs a device, unless `backend` allows several.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    kind = "" if accelerator is None else accelerator.type
    # torch.accelerator only supports the kind for which torch was built
    count = torch.cuda.device_count() if kind in ("", "cuda") else torch.accelerator.device_count()
    kind = kind or ("cuda" if count else "")
    if choice == "cpu" or (choice == "auto" and not kind):
        return torch.device("cpu")
    if choice not in ("auto", "cpu", "cuda", "xpu", kind):
        raise UsageError(code="device-unknown", value=choice)
    if choice not in ("auto", kind):
        has = f"torch has {kind} here" if kind else explain_missing_gpus() or "torch sees no accelerator here"
        raise UsageError(code="device-not-here", value=choice, has=has, usable=kind or "cpu")
    visible = [os.environ.get(name, "").strip() for name in VISIBLE_DEVICES_VARIABLES]
    sees_one = count == 1 and any(value and "," not in value for value in visible)  # srun --gpus-per-task=1
    if workers > count and backend not in GPU_SHARING_BACKENDS and not sees_one:
        limit = plural(count, "process", "processes")
        raise UsageError(code="processes-without-gpu", processes=workers, count=count, most=limit)
    return torch.device(kind, index % count)


def device_uuid(device: torch.device) -> str:
    """The unique identifier of a GPU; empty for a CPU, or if unknown."""
    if device.type == "cpu":
        return ""
    properties = getattr(torch.get_device_module(device), "get_device_properties", None)
    return str(getattr(properties(device), "uuid", "")) if properties else ""


def check_gpu_placement(rank: int, size: int, device: torch.device, backend: str, store: Store) -> None:
    """Check that each rank has a different GPU. Two ranks on one GPU are slow with gloo, and fail or hang with NCCL."""
    uuid = device_uuid(device) if size > 1 else ""
    if not uuid:
        return
    if store.add(f"ranks on {uuid}", 1) == 1:
        store.set(f"first on {uuid}", str(rank))
        return
    first, gpu = store.get(f"first on {uuid}").decode(), f"{uuid} ({device})"
    if backend not in GPU_SHARING_BACKENDS:
        raise UsageError(code="gpu-shared", first=first, second=rank, gpu=gpu, backend=backend)
    print(f"WARNING: ranks {first} and {rank} use the same GPU, {gpu}, which is slow", file=sys.stderr)


def set_cpu_affinity(device: torch.device) -> None:
    """Restrict this process and its children to the cores near its GPU, if any of them is available."""
    available = os.sched_getaffinity(0)
    near_cores = available & cpu_cores_near_gpu(device_uuid(device))
    if near_cores and near_cores != available:
        os.sched_setaffinity(0, near_cores)


def explain_missing_gpus(devices: Path = DEV) -> str:
    """Why torch sees none of the GPUs that the kernel lists under `devices`; empty without GPUs."""
    nvidia, amd = len([*devices.glob("nvidia[0-9]*")]), (devices / "kfd").exists()
    gpu_version = torch.version.cuda or torch.version.hip
    if (nvidia or amd) and not gpu_version:
        count = plural(nvidia, "NVIDIA GPU") if nvidia else "AMD GPUs"
        return (
            f"this torch ({torch.__version__}) was built without CUDA and ROCm, but the machine has {count}. Install a "
            "torch build for them (pytorch.org)"
        )
    if nvidia and torch.version.cuda and os.environ.get("CUDA_VISIBLE_DEVICES") not in ("", "-1"):
        return (
            f"torch sees no GPU, but the machine has {plural(nvidia, 'NVIDIA GPU')}: `nvidia-smi` shows whether the "
            "driver works"
        )
    visible_values = {os.environ.get(name) for name in VISIBLE_DEVICES_VARIABLES}
    if amd and torch.version.hip and not visible_values & {"", "-1"}:
        return "torch sees no GPU, but the machine has AMD GPUs: `rocminfo` shows whether this user may use them"
    return ""


def device_name(device: torch.device) -> str:
    """The name of a device in messages: 'cpu', 'cuda (NVIDIA H100)'."""
    if device.type == "cpu":
        return "cpu"
    name = getattr(torch.get_device_module(device), "get_device_name", None)
    return f"{device.type} ({name(device)})" if name else device.type


def resolve_backend(choice: str, device: torch.device) -> str:
    """The backend of torch.distributed for ranks on such a device; for "auto" the default of the device."""
    backend = BACKENDS.get(device.type, "gloo") if choice == "auto" else choice
    available = {name: getattr(dist, f"is_{name}_available")() for name in ("nccl", "gloo", "xccl", "mpi")}
    if backend not in available:
        raise UsageError(code="backend-unknown", value=backend, allowed=["auto", *available])
    if not available[backend]:
        usable = [name for name, is_built in available.items() if is_built]
        raise UsageError(code="backend-not-built", value=backend, version=torch.__version__, allowed=usable)
    if backend in BACKENDS.values() and BACKENDS.get(device.type) != backend:
        raise UsageError(code="backend-of-gpus", value=backend, device=device.type)
    return backend
