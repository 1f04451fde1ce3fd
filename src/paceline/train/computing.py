"""Settles threads, precision and memory, on all ranks together, before the first step."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import torch
from torch import nn
from torch.utils.data import Dataset

from paceline.collectives.control import gather_words, together
from paceline.compute.compiling import compile_model, graph_model
from paceline.compute.forward import recompute
from paceline.compute.precision import GAIN, compared, half_of, in_bf16, in_fp16, lacks_bf16, lacks_tf32, take_float32
from paceline.compute.resources import Seat, complaints, keep_memory, own_seat, share
from paceline.data.loader import Loading, fetch
from paceline.errors import UsageError, Write, flag
from paceline.host.cgroup import free_memory
from paceline.rank.world import World
from paceline.seeding import preserved_streams
from paceline.tasks.task import Task, call
from paceline.train.evaluate import evaluating
from paceline.train.step import weighted_losses

if TYPE_CHECKING:
    from paceline.config.settings import ComputeConfig

STATE_COPIES = 4  # weights, gradients, and two numbers that an optimizer keeps for each weight

Precision = Literal["fp32", "tf32", "bf16", "fp16"]


@dataclass(frozen=True)
class Settled:
    """How the run is computed; the same on all ranks but for the allocator."""

    precision: Precision = "fp32"
    allocator: Literal["tuned", "system"] = "system"
    notices: list[str] = field(default_factory=list[str])
    """what the user should be told"""


def take_threads(asked: int | None, world: World, *, write: Write = flag) -> list[str]:
    """Give this rank its threads (a collective); return what is wrong with their number, in words.

    What the user has set, --threads-per-rank or OMP_NUM_THREADS, stays. Otherwise a rank gets its part of the cores
    that it shares with others, but not more than torch would take. `write`: how an option is written.
    """
    if asked:
        torch.set_num_threads(asked)
    mine = own_seat(torch.get_num_threads())
    told = gather_words([msgspec.to_builtins(mine), bool(asked or "OMP_NUM_THREADS" in os.environ)], world)
    seats = [msgspec.convert(seat, Seat) for seat, _ in told]
    planned = [
        seat if fixed else msgspec.structs.replace(seat, threads=min(seat.threads, share(seats, rank)))
        for rank, (seat, (_, fixed)) in enumerate(zip(seats, told, strict=True))
    ]
    if planned[world.rank].threads != mine.threads:
        torch.set_num_threads(planned[world.rank].threads)
    return complaints(planned, may_idle=world.device.type != "cpu", write=write)


def settle(
    wish: ComputeConfig,
    model: nn.Module,
    task: Task,
    dataset: Dataset[Any],
    loading: Loading,
    samples: int,
    world: World,
) -> Settled:
    """Settle what `wish` leaves open, and set up `model` for it, in place (a collective). No strategy is applied yet.

    A probe step, where one is needed, computes the task's loss on the largest micro-batch, `samples` samples.

    Raises:
        UsageError: what is asked for is not possible here; raised on one rank, ReportedByPeer on the others.
    """
    seconds: dict[str, float] = {}
    why = ""
    with together(world):
        check_precision(wish.precision, world.device)
        take_float32(wish.precision, world.device)
        why = lacks_bf16(world.device) if wish.precision == "auto" else ""
        if wish.checkpoint_activations:
            recompute(model, wish.checkpoint_activations)
        if wish.precision == "auto" and not why:
            seconds = _probed(model, task, dataset, loading, samples)
    notices = list[str]()
    if wish.precision == "auto":
        precision, notice = _chosen(gather_words([why, seconds], world))
        notices.append(notice)
    else:
        precision = wish.precision
    with together(world):
        if precision == "bf16":
            in_bf16(model, world.device)
        elif precision == "fp16":
            in_fp16(model, world.device)
        if wish.cuda_graphs:
            graph_model(model, world.device)
        if wish.compile:
            compile_model(model, world.device)
        allocator, notice = _memory(wish, model, world)
    return Settled(precision, allocator, notices + notice)


def check_precision(asked: str, device: torch.device) -> None:
    """Raise UsageError if `device` cannot compute in the precision `asked`."""
    why = lacks_bf16(device) if asked == "bf16" else lacks_tf32(device) if asked == "tf32" else ""
    if why:
        raise UsageError(code="precision-not-there", value=asked, why=why)


def _chosen(told: list[Any]) -> tuple[Precision, str]:
    """From what all ranks have found out; the slowest counts, as all wait for it."""
    lacking = next((f"on rank {rank} {why}" for rank, (why, _) in enumerate(told) if why), "")
    if lacking:
        return "fp32", f"--precision auto: fp32, because {lacking}"
    slowest = {name: max(seconds[name] for _, seconds in told) for name in ("fp32", "bf16")}
    gain = slowest["fp32"] / slowest["bf16"]
    chosen: Precision = "bf16" if gain >= GAIN else "fp32"
    words = "; it rounds otherwise than fp32" if chosen == "bf16" else ""
    return chosen, f"--precision auto: {chosen}. Tried, a step in bf16 is {gain:.2f} times as fast as in fp32{words}"


def _probed(model: nn.Module, task: Task, dataset: Dataset[Any], loading: Loading, samples: int) -> dict[str, float]:
    """Seconds of forward and backward on the first `samples` samples, in each precision; changes nothing."""
    indices = torch.arange(min(samples, len(dataset)))  # pyright: ignore[reportArgumentType]
    around = half_of(model, loading.device, torch.bfloat16)
    with preserved_streams(), evaluating(model), torch.enable_grad():
        (batch,) = fetch(dataset, [(0, indices)], 0, replace(loading, num_workers=0))

        def in_bf16_once(*args: Any, **kwargs: Any) -> Any:
            return around(model, args, kwargs)

        def step(bf16: bool) -> None:
            outputs = call(model, batch[0], in_bf16_once if bf16 else None)
            losses, _ = weighted_losses(task.loss, outputs, batch[1])
            if losses.requires_grad:
                losses.sum().backward()
            model.zero_grad(set_to_none=True)

        return compared({"fp32": partial(step, False), "bf16": partial(step, True)}, loading.device)


def _memory(wish: ComputeConfig, model: nn.Module, world: World) -> tuple[Literal["tuned", "system"], list[str]]:
    if wish.allocator == "system" or world.device.type != "cpu":
        return "system", []
    free = free_memory()
    state = STATE_COPIES * sum(p.nbytes for p in model.parameters())
    why = keep_memory(free_bytes=None if free is None else free // world.local_size, state_bytes=state)
    return ("system", [f"the allocator is left as it is: {why}"]) if why else ("tuned", [])
