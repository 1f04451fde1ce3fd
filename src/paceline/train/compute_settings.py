"""Resolves threads, precision and memory settings on all ranks before the first step."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import torch
from torch import nn
from torch.utils.data import Dataset

from paceline.collectives.control import all_gather_object, raise_on_all_ranks
from paceline.compute.compiling import compile_model, graph_model
from paceline.compute.forward import recompute
from paceline.compute.precision import (
    MIN_BF16_SPEEDUP,
    bf16_unsupported_reason,
    half_precision_forward,
    in_bf16,
    in_fp16,
    set_float32_mode,
    tf32_unsupported_reason,
    time_alternatives,
)
from paceline.compute.resources import CpuAllocation, current_cpu_allocation, keep_memory, thread_warnings, threads_for
from paceline.data.loader import Loading, fetch_pairs
from paceline.errors import OptionRenderer, UsageError, format_option
from paceline.host.cgroup import free_memory
from paceline.rank.world import World
from paceline.seeding import preserve_generator_states
from paceline.tasks.task import Task, call_model
from paceline.train.evaluate import eval_mode
from paceline.train.step import weighted_losses

if TYPE_CHECKING:
    from paceline.config.settings import ComputeConfig

STATE_COPIES = 4  # weights, gradients and two optimizer states for each weight

Precision = Literal["fp32", "tf32", "bf16", "fp16"]


@dataclass(frozen=True)
class ResolvedCompute:
    """The resolved compute settings, equal on all ranks except for the allocator."""

    precision: Precision = "fp32"
    allocator: Literal["tuned", "system"] = "system"
    notices: list[str] = field(default_factory=list[str])
    """Lines for the user."""


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
        seat if fixed else msgspec.structs.replace(seat, threads=min(seat.threads, threads_for(seats, rank)))
        for rank, (seat, (_, fixed)) in enumerate(zip(seats, gathered, strict=True))
    ]
    if planned[world.rank].threads != local_seat.threads:
        torch.set_num_threads(planned[world.rank].threads)
    return thread_warnings(planned, may_idle=world.device.type != "cpu", write=write)


def resolve_compute(
    config: ComputeConfig, model: nn.Module, task: Task, dataset: Dataset[Any], loading: Loading, samples: int,
    world: World,
) -> ResolvedCompute:  # fmt: skip
    """Resolve the `auto` settings, and set up `model` in place (collective). No strategy is applied yet.

    `--precision auto` measures steps of the task on a micro-batch of `samples` samples, the largest of the run.
    """
    seconds: dict[str, float] = {}
    why_no_bf16 = ""
    set_precision(config.precision, world)
    with raise_on_all_ranks(world):
        why_no_bf16 = bf16_unsupported_reason(world.device) if config.precision == "auto" else ""
        if config.checkpoint_activations:
            recompute(model, config.checkpoint_activations)
        if config.precision == "auto" and not why_no_bf16:
            seconds = _measure_precisions(model, task, dataset, loading, samples)
    notices = list[str]()
    if config.precision == "auto":
        precision, notice = _choose_precision(all_gather_object([why_no_bf16, seconds], world))
        notices.append(notice)
    else:
        precision = config.precision
    with raise_on_all_ranks(world):
        apply_precision(precision, model, world.device)
        if config.cuda_graphs:
            graph_model(model, world.device)
        if config.compile:
            compile_model(model, world.device)
        allocator, notice = _set_allocator(config, model, world)
    return ResolvedCompute(precision, allocator, notices + notice)


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


def apply_precision(precision: str | None, model: nn.Module, device: torch.device) -> None:
    if precision == "bf16":
        in_bf16(model, device)
    elif precision == "fp16":
        in_fp16(model, device)


def check_precision(precision: str, device: torch.device) -> None:
    why = (
        bf16_unsupported_reason(device)
        if precision == "bf16"
        else tf32_unsupported_reason(device)
        if precision == "tf32"
        else ""
    )
    if why:
        raise UsageError(code="precision-not-there", value=precision, why=why)


def _choose_precision(measured: list[Any]) -> tuple[Precision, str]:
    """Choose by the slowest rank, because all ranks wait for it. `measured`: for each rank, (why no bf16, seconds)."""
    lacking = next((f"on rank {rank} {why}" for rank, (why, _) in enumerate(measured) if why), "")
    if lacking:
        return "fp32", f"--precision auto: fp32, because {lacking}"
    slowest = {name: max(seconds[name] for _, seconds in measured) for name in ("fp32", "bf16")}
    gain = slowest["fp32"] / slowest["bf16"]
    chosen: Precision = "bf16" if gain >= MIN_BF16_SPEEDUP else "fp32"
    rounding = "; it rounds differently" if chosen == "bf16" else ""
    return chosen, f"--precision auto: {chosen}. A step in bf16 is {gain:.2f} times as fast as in fp32{rounding}"


def _measure_precisions(
    model: nn.Module, task: Task, dataset: Dataset[Any], loading: Loading, samples: int
) -> dict[str, float]:
    """Seconds of forward and backward on the first `samples` samples, by precision. The model does not change."""
    indices = torch.arange(min(samples, len(dataset)))  # pyright: ignore[reportArgumentType]
    forward_in_bf16 = half_precision_forward(model, loading.device, torch.bfloat16)
    with preserve_generator_states(), eval_mode(model), torch.enable_grad():
        (batch,) = fetch_pairs(dataset, [(0, indices)], 0, replace(loading, num_workers=0))

        def in_bf16_once(*args: Any, **kwargs: Any) -> Any:
            return forward_in_bf16(model, args, kwargs)

        def step(bf16: bool) -> None:
            outputs = call_model(model, batch[0], in_bf16_once if bf16 else None)
            losses, _ = weighted_losses(task.loss, outputs, batch[1])
            if losses.requires_grad:
                losses.sum().backward()
            model.zero_grad(set_to_none=True)

        return time_alternatives({"fp32": partial(step, False), "bf16": partial(step, True)}, loading.device)


def _set_allocator(
    config: ComputeConfig, model: nn.Module, world: World
) -> tuple[Literal["tuned", "system"], list[str]]:
    if config.allocator == "system" or world.device.type != "cpu":
        return "system", []
    free = free_memory()
    state = STATE_COPIES * sum(p.nbytes for p in model.parameters())
    why = keep_memory(free_bytes=None if free is None else free // world.local_size, state_bytes=state)
    return ("system", [f"--allocator tuned is not used: {why}"]) if why else ("tuned", [])
