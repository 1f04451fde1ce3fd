"""The words of a run at its start and end, and its summary."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from paceline.errors import ExitCode, plural
from paceline.observe.summary import Summary, scores_line
from paceline.train.keeping import Place
from paceline.train.optimizer import scaled_lr
from paceline.train.prepare import Parts


def opening_lines(parts: Parts) -> list[str]:
    """The run's arithmetic, with everything about it that may surprise."""
    plan, config, world = parts.plan, parts.config, parts.replica.world
    micro = -(-plan.global_batch // (plan.virtual_ranks * plan.accumulation))
    exact = micro * plan.virtual_ranks * plan.accumulation == plan.global_batch
    ranks = plural(plan.virtual_ranks, "rank" if plan.virtual_ranks == world.size else "virtual rank")
    lines = [
        f"{config.task}: {plural(world.size, 'process', 'processes')} on {world.device.type}, strategy "
        f"{config.strategy}, {plural(torch.get_num_threads(), 'CPU thread')} each",
        f"global batch {plan.global_batch} = {ranks} x {plural(plan.accumulation, 'micro-batch', 'micro-batches')} x "
        f"{'' if exact else 'at most '}{micro}",
        f"{plan.num_samples:,} samples = {plural(plan.steps_per_epoch, 'step')} an epoch; "
        f"{plural(parts.total_steps, 'step')} in all",
    ]
    if told := _computed(parts):
        lines.append(told)
    lines += parts.settled.notices
    o = config.optimizer
    if o.lr_scaling != "none":
        peak_lr = scaled_lr(o.lr, o.lr_scaling, plan.global_batch, o.lr_base_batch)
        lines.append(
            f"learning rate {peak_lr:.3g} = {o.lr:.3g} x {o.lr_scaling} scaling by "
            f"{plan.global_batch}/{o.lr_base_batch}"
        )
    if plan.global_batch > plan.num_samples and plan.tail == "keep":
        lines.append(f"the global batch is larger than the data: each epoch is one step on {plan.num_samples} samples")
    idle = plan.virtual_ranks - min(plan.global_batch, plan.num_samples)
    if idle > 0:
        lines.append(
            f"{plural(idle, 'virtual rank')} of {plan.virtual_ranks} never get a sample: the batch is too small"
        )
    return lines


def closing_lines(summary: Summary, folder: Path) -> list[str]:
    """How it ended, and where everything lies."""
    rate = f", {summary.samples_per_second:,.0f} samples/s" if summary.samples_per_second else ""
    bits = f", the same for 1 to {summary.virtual_ranks} processes" if summary.bits_hold_for else ""
    scores = {"validation": summary.validation_metrics, "test": summary.test_metrics}
    told = "; ".join(f"{split} {scores_line(found)}" for split, found in scores.items() if found is not None)
    return [
        f"done: {told}{rate}",
        f"weights {str(summary.weights_sha256)[:16]}...{bits}",
        f"run folder {folder}",
    ]


def summary_of(
    parts: Parts, place: Place, code: ExitCode, steps: int, samples: int, found: Mapping[str, Any]
) -> Summary:
    """The summary of a run that ends in good order after `steps` steps, without its speed and weights.

    `found`: what its evaluations have to say.
    """
    return Summary(
        task=str(parts.config.task),
        exit=int(code),
        strategy=parts.config.strategy,
        world_size=parts.replica.world.size,
        virtual_ranks=parts.plan.virtual_ranks,
        global_batch=parts.plan.global_batch,
        epochs=steps / parts.plan.steps_per_epoch,
        steps=steps,
        samples_seen=samples,
        bits_hold_for=bits_hold_for(place.definition) if place.definition["unbroken"] else None,
        precision=parts.config.compute.precision,
        threads_per_rank=torch.get_num_threads(),
        allocator=parts.settled.allocator,
        **found,
    )


def stopped_line(step: int, total_steps: int, folder: Path) -> str:
    """The last line of a run that was asked to stop."""
    command = f"paceline train --resume auto --run-dir {shlex.quote(str(folder))}"
    return f"asked to stop: saved after step {step} of {total_steps}. Go on with: {command}"


def bits_hold_for(definition: Mapping[str, Any]) -> dict[str, Any]:
    """What the digest of an exact run holds for, any world size from 1 to virtual_ranks."""
    names = ("virtual_ranks", "global_batch", "accumulation", "threads_per_rank", "precision")
    return {name: definition[name] for name in names} | definition["hardware"]


def _computed(parts: Parts) -> str:
    """How it is computed, where that is not the usual way."""
    compute = parts.config.compute
    ways = {
        "forward and backward in bf16 (another run than in fp32: it rounds otherwise)": compute.precision == "bf16",
        f"backward computes {compute.checkpoint_activations} again": compute.checkpoint_activations is not None,
        "compiled": compute.compile,
        "replayed as CUDA graphs": compute.cuda_graphs,
    }
    told = [words for words, so in ways.items() if so]
    return f"computed: {', '.join(told)}" if told else ""


def finite(metrics: Mapping[str, float]) -> dict[str, float]:
    """Those that can be written down: JSON has no other numbers."""
    return {name: score for name, score in metrics.items() if math.isfinite(score)}
