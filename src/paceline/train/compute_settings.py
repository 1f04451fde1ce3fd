"""Resolves threads and precision on all ranks before the first step, for tasks and sessions."""

import os

import msgspec
import torch
from torch import nn

from paceline.collectives.control import all_gather_object, raise_on_all_ranks
from paceline.compute.precision import (
    autocast_bf16,
    autocast_fp16,
    bf16_unsupported_reason,
    set_float32_mode,
    tf32_unsupported_reason,
)
from paceline.compute.resources import CpuAllocation, current_cpu_allocation, recommended_thread_count, thread_warnings
from paceline.errors import OptionRenderer, UsageError, format_option
from paceline.rank.world import World


def set_threads(requested: int | None, world: World, *, write: OptionRenderer = format_option) -> list[str]:
    """Set the number of CPU threads of this rank (collective). Return warnings about the number.

    `requested` (`--threads-per-rank`) and OMP_NUM_THREADS take precedence. Otherwise the ranks of a node divide its
    cores, and no rank gets more threads than torch would use by default. `write` formats an option in a warning.
    """
    if requested:
        torch.set_num_threads(requested)
    local_seat = current_cpu_allocation(torch.get_num_threads())
    is_fixed = bool(requested or "OMP_NUM_THREADS" in os.environ)
    gathered = all_gather_object([msgspec.to_builtins(local_seat), is_fixed], world)
    seats = [msgspec.convert(seat, CpuAllocation) for seat, _ in gathered]
    planned = [
        seat
        if fixed
        else msgspec.structs.replace(seat, threads=min(seat.threads, recommended_thread_count(seats, rank)))
        for rank, (seat, (_, fixed)) in enumerate(zip(seats, gathered, strict=True))
    ]
    if planned[world.rank].threads != local_seat.threads:
        torch.set_num_threads(planned[world.rank].threads)
    return thread_warnings(planned, may_idle=world.device.type != "cpu", write=write)


def set_precision(precision: str, world: World) -> None:
    """Check that all devices support `precision`, and enable or disable tf32 (a collective)."""
    with raise_on_all_ranks(world):
        check_precision(precision, world.device)
        set_float32_mode(precision, world.device)


def resolve_session_precision(precision: str | None, world: World) -> tuple[str | None, list[str]]:
    """The precision of a session, and messages (a collective). "auto" is bf16 if all ranks support it, else fp32.

    bf16 is allowed without support, because scripts for GPUs are tested on CPUs.
    """
    if precision is None:
        return None, []
    set_precision("fp32" if precision == "bf16" else precision, world)
    if precision not in ("auto", "bf16"):
        return precision, []
    by_rank = enumerate(all_gather_object(bf16_unsupported_reason(world.device), world))
    lacking = next((f"on rank {rank} {why}" for rank, why in by_rank if why), "")
    if precision == "bf16":
        return "bf16", [f'precision="bf16" is slow here: {lacking}'] if lacking else []
    if lacking:
        return "fp32", [f'precision="auto": fp32, because {lacking}']
    return "bf16", ['precision="auto": bf16, which all ranks support. It rounds differently']


def apply_autocast(precision: str | None, model: nn.Module, device: torch.device) -> None:
    if precision == "bf16":
        autocast_bf16(model, device)
    elif precision == "fp16":
        autocast_fp16(model, device)


def check_precision(precision: str, device: torch.device) -> None:
    reasons = {"bf16": bf16_unsupported_reason, "tf32": tf32_unsupported_reason}
    if why := reasons[precision](device) if precision in reasons else "":
        raise UsageError(code="precision-not-there", value=precision, why=why)
