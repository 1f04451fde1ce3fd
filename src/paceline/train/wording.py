"""The words of a run at its start and end, and its summary."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from paceline.checkpoint.resume import RunLocation
from paceline.data.plan import BatchPlan
from paceline.errors import plural
from paceline.rank.world import device_name
from paceline.runs.summary import Summary, scores_line
from paceline.train.optimizer import scaled_lr

if TYPE_CHECKING:
    from paceline.train.prepare import Parts


def opening_lines(parts: "Parts") -> list[str]:
    """The run's arithmetic, with everything about it that may surprise."""
    plan, config, world = parts.plan, parts.config, parts.replica.world
    lines = [
        f"{config.task}: {plural(world.size, 'process', 'processes')} on {device_name(world.device)}, strategy "
        f"{config.strategy}{f' on {world.mesh}' if world.mesh else ''}, "
        f"{plural(torch.get_num_threads(), 'CPU thread')} each",
        shares_line(plan, world.size),
        f"{plan.size_words}; {_length(parts)}",
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


def shares_line(plan: BatchPlan, world_size: int) -> str:
    """'global batch 128 = 2 ranks x 1 micro-batch x 64'."""
    micro = -(-plan.global_batch // (plan.virtual_ranks * plan.accumulation))
    exact = micro * plan.virtual_ranks * plan.accumulation == plan.global_batch
    ranks = plural(plan.virtual_ranks, "rank" if plan.virtual_ranks == world_size else "virtual rank")
    parts = plural(plan.accumulation, "micro-batch", "micro-batches")
    return f"global batch {plan.global_batch} = {ranks} x {parts} x {'' if exact else 'at most '}{micro}"


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
        see_it(folder),
    ]


def see_it(folder: Path) -> str:
    """The line that makes the page of a run."""
    return f"see it: paceline report {shlex.quote(str(folder))}"


def facts(parts: "Parts", place: RunLocation) -> dict[str, Any]:
    """What the summary says of a task's run, beside what all runs have."""
    compute, known = parts.config.compute, place.definition
    names = ("virtual_ranks", "global_batch", "accumulation", "threads_per_rank", "precision")
    bits = {name: known[name] for name in names} | known["hardware"]  # hold for any world size from 1 to virtual_ranks
    return {
        "task": str(parts.config.task), "strategy": parts.config.strategy, "precision": compute.precision,
        "allocator": parts.settled.allocator, "bits_hold_for": bits if known["unbroken"] else None,
    }  # fmt: skip


def stopped_line(step: int, total_steps: int, folder: Path) -> str:
    """The last line of a run that was asked to stop."""
    command = f"paceline train --resume auto --run-dir {shlex.quote(str(folder))}"
    of = f" of {total_steps}" if total_steps else ""
    return f"asked to stop: saved after step {step}{of}. Go on with: {command}"


def _length(parts: "Parts") -> str:
    total, passes = parts.total_steps, parts.config.run.epochs
    return f"{plural(total, 'step')} in all" if total else f"{plural(passes, 'pass', 'passes')} over it"


def _computed(parts: "Parts") -> str:
    """How it is computed, where that is not the usual way."""
    compute, precision = parts.config.compute, parts.config.compute.precision
    ways = {
        f"forward and backward in {precision} (another run than in fp32: it rounds otherwise)": precision != "fp32",
        f"backward computes {compute.checkpoint_activations} again": compute.checkpoint_activations is not None,
        "compiled": compute.compile,
        "replayed as CUDA graphs": compute.cuda_graphs,
    }
    told = [words for words, so in ways.items() if so]
    return f"computed: {', '.join(told)}" if told else ""
