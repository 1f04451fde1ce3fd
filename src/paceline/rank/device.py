"""Which device this rank computes on, and over which backend it exchanges; and why on no other."""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

from paceline.errors import UsageError, plural
from paceline.host.gpus import DEV, SHARE_GPUS, VISIBLE, cores_near

BACKENDS = {"cuda": "nccl", "xpu": "xccl"}
"""of each kind of device; gloo for all others"""


def chosen_device(asked: str, index: int, workers: int, backend: str) -> torch.device:
    """The device of the rank that is number `index` of `workers` on this machine.

    Args:
        asked: "auto" (the accelerator that torch has here, else the CPU), "cpu", or a kind of accelerator: "cuda" (also
            for AMD's, with a torch built for ROCm), "xpu".
        index: counts among the devices that this process sees.
        workers: on a device each, but for a `backend` that lets several share one, or where each is shown another one.

    Raises:
        UsageError: there is no such device, or there are too few.
    """
    found = torch.accelerator.current_accelerator(check_available=True)
    kind = "" if found is None or lacks(found.type) else found.type
    # not torch.accelerator's count: which kind is there is decided when torch is built
    count = torch.cuda.device_count() if kind in ("", "cuda") else torch.accelerator.device_count()
    kind = kind or ("cuda" if count else "")
    if asked == "cpu" or (asked == "auto" and not kind):
        return torch.device("cpu")
    if asked not in ("auto", "cpu", "cuda", "xpu", kind):
        raise UsageError(lacks(asked) or f"unknown device {asked!r}. Choose from: auto, cpu, cuda, xpu")
    if asked not in ("auto", kind):
        has = f"torch has {kind} here" if kind else overlooked() or "torch sees no accelerator here"
        raise UsageError(f"--device {asked}: {has}. Use --device {kind or 'cpu'}")
    if workers > count and backend not in SHARE_GPUS and not (count == 1 and shown_one()):
        raise UsageError(
            f"{workers} processes on this node need {workers} GPUs, torch sees {count}. "
            f"Start at most {plural(count, 'process', 'processes')} per node, let several processes share a GPU "
            "(--backend gloo), or use --device cpu."
        )
    return torch.device(kind, index % count)


def shown_one() -> bool:
    """Whether a variable shows this process one GPU: as `srun --gpus-per-task=1` and wrappers do, each rank another."""
    values = [os.environ.get(name, "").strip() for name in VISIBLE]
    return any(value and "," not in value for value in values)


def identity(device: torch.device) -> str:
    """What tells this GPU from all others, on any machine; empty for a CPU, or where nobody says."""
    if device.type == "cpu":
        return ""
    properties = getattr(torch.get_device_module(device), "get_device_properties", None)
    return str(getattr(properties(device), "uuid", "")) if properties else ""


def check_placement(rank: int, size: int, device: torch.device, backend: str, store: Store) -> None:
    """Compare which GPU each rank has. Two on one are slow over gloo; over NCCL they are an error, or wait for ever.

    Raises:
        UsageError: on the later one of two ranks with one GPU, over a backend that needs one for each.
    """
    mine = identity(device) if size > 1 else ""
    if not mine:
        return
    if store.add(f"ranks on {mine}", 1) == 1:
        store.set(f"first on {mine}", str(rank))
        return
    words = f"ranks {store.get(f'first on {mine}').decode()} and {rank} compute on one GPU, {mine} ({device})"
    if backend not in SHARE_GPUS:
        raise UsageError(
            f"{words}, and {backend} wants one for each: does a launcher or wrapper show both the same "
            "(CUDA_VISIBLE_DEVICES)? Start fewer processes, or let them share it: --backend gloo"
        )
    print(f"WARNING: {words}: they take turns", file=sys.stderr)


def go_near(device: torch.device) -> None:
    """Let this process, and what it starts, run on cores beside its GPU only, if it may run on any of them."""
    own = os.sched_getaffinity(0)
    near = own & cores_near(identity(device))
    if near and near != own:
        os.sched_setaffinity(0, near)


def lacks(kind: str) -> str:
    """Why nothing is trained on such devices, in words; empty if something is."""
    return "paceline does not train on mps, which has no float64 to add up losses in" if kind == "mps" else ""


def overlooked(devices: Path = DEV) -> str:
    """Why torch sees none of the GPUs that the kernel has under `devices`, in words; empty if there are none."""
    nvidia, amd = len([*devices.glob("nvidia[0-9]*")]), (devices / "kfd").exists()
    built = torch.version.cuda or torch.version.hip
    if (nvidia or amd) and not built:
        count = plural(nvidia, "NVIDIA GPU") if nvidia else "AMD GPUs"
        return (
            f"this torch ({torch.__version__}) was built without CUDA and ROCm, but the machine has {count}. Install a "
            "torch for them (pytorch.org)"
        )
    if nvidia and torch.version.cuda and os.environ.get("CUDA_VISIBLE_DEVICES") not in ("", "-1"):
        return (
            f"torch sees no GPU, but the machine has {plural(nvidia, 'NVIDIA GPU')}: `nvidia-smi` tells whether the "
            "driver works"
        )
    hidden = {os.environ.get(name) for name in VISIBLE}
    if amd and torch.version.hip and not hidden & {"", "-1"}:
        return "torch sees no GPU, but the machine has AMD GPUs: `rocminfo` tells whether this user may use them"
    other = torch.accelerator.current_accelerator(check_available=True)
    return lacks(other.type) if other is not None else ""


def device_words(device: torch.device) -> str:
    """What it is: 'cpu', 'cuda (NVIDIA H100)'."""
    if device.type == "cpu":
        return "cpu"
    name = getattr(torch.get_device_module(device), "get_device_name", None)
    return f"{device.type} ({name(device)})" if name else device.type


def chosen_backend(asked: str, device: torch.device) -> str:
    """The backend of torch.distributed for ranks on such a device; `asked` "auto": the one that suits it.

    Raises:
        UsageError: this torch has it not, or it does not serve such a device.
    """
    chosen = BACKENDS.get(device.type, "gloo") if asked == "auto" else asked
    available = {
        "nccl": dist.is_nccl_available(),
        "gloo": dist.is_gloo_available(),
        "xccl": dist.is_xccl_available(),
        "mpi": dist.is_mpi_available(),
    }
    if chosen not in available:
        raise UsageError(f"unknown backend {chosen!r}. Choose from: auto, {', '.join(available)}")
    if not available[chosen]:
        usable = ", ".join(name for name, there in available.items() if there)
        raise UsageError(f"this torch ({torch.__version__}) was built without {chosen}. Available here: {usable}")
    if chosen in BACKENDS.values() and BACKENDS.get(device.type) != chosen:
        raise UsageError(f"backend {chosen} moves GPU memory only; for device {device.type} use gloo (or auto)")
    return chosen
