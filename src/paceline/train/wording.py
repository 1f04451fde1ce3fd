"""The lines that a run prints at its start and end, and the fields of its summary."""

import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from paceline.checkpoint.state import LockedRun
from paceline.data.arrays import batch_gatherer
from paceline.data.plan import BatchPlan
from paceline.data.workers import has_batched_getitems
from paceline.errors import plural
from paceline.host.cgroup import usable_cores
from paceline.protocol.control import WorkerSpec
from paceline.rank.world import World, device_name
from paceline.runs.summary import Summary, format_metrics
from paceline.train.optimizer import scaled_lr

if TYPE_CHECKING:
    from paceline.train.prepare import TrainingComponents

DATA_WAIT_REPORTED_FROM = 0.1  # of the time of a step


def opening_lines(parts: "TrainingComponents") -> list[str]:
    plan, config, world, total = parts.plan, parts.config, parts.replica.world, parts.total_steps
    lines = [
        f"{config.task}: {plural(world.size, 'process', 'processes')} on {device_name(world.device)}, strategy "
        f"{config.strategy}{f' on {world.mesh}' if world.mesh else ''}, "
        f"{plural(torch.get_num_threads(), 'CPU thread')} each",
        batch_line(plan, world.size),
        f"{plan.epoch_size_text}; {plural(total, 'step') + ' in all' if total else plural(config.run.epochs, 'epoch')}",
    ]
    if line := _compute_line(parts):
        lines.append(line)
    lines += parts.notices
    if (every := config.guard.audit_every) is not None:
        lines += describe_audits(every, config.guard.on_audit, world)
    o = config.optimizer
    if o.lr_scaling != "none":
        peak_lr = scaled_lr(o.lr, o.lr_scaling, plan.global_batch, o.lr_base_batch)
        lines.append(
            f"learning rate {peak_lr:.3g} = {o.lr:.3g} x {o.lr_scaling} scaling by "
            f"{plan.global_batch}/{o.lr_base_batch}"
        )
    if plan.global_batch > plan.num_samples and plan.last_batch == "keep":
        lines.append(f"the global batch is larger than the data: each epoch is one step on {plan.num_samples} samples")
    idle = plan.virtual_ranks - min(plan.global_batch, plan.num_samples)
    if idle > 0:
        virtual_ranks = plural(plan.virtual_ranks, "virtual rank")
        lines.append(f"the batch is too small: {idle} of {virtual_ranks} never get a sample")
    return lines


def describe_audits(every: int, on_audit: str, world: World) -> list[str]:
    if world.size == 1:
        return ["no audits, because one rank is left"]
    lines = [f"audit every {'step' if every == 1 else f'{every} steps'}"]
    spec, nodes = WorkerSpec.from_environment(), int(os.environ.get("GROUP_WORLD_SIZE", "1"))
    if on_audit == "exclude" and spec is not None and 1 < nodes <= spec.min_nodes:
        lines.append(
            f"WARNING: an audit cannot exclude a whole node, because --nodes {nodes}:MAX requires all {nodes} nodes "
            "that train now. If it names one other than node 0, the run ends"
        )
    return lines


def batch_line(plan: BatchPlan, world_size: int) -> str:
    """'global batch 128 = 2 ranks x 1 micro-batch x 64'."""
    micro = -(-plan.global_batch // (plan.virtual_ranks * plan.accumulation))
    is_exact = micro * plan.virtual_ranks * plan.accumulation == plan.global_batch
    ranks = plural(plan.virtual_ranks, "rank" if plan.virtual_ranks == world_size else "virtual rank")
    parts = plural(plan.accumulation, "micro-batch", "micro-batches")
    return f"global batch {plan.global_batch} = {ranks} x {parts} x {'' if is_exact else 'at most '}{micro}"


def closing_lines(summary: Summary, folder: Path) -> list[str]:
    rate = f", {summary.samples_per_second:,.0f} samples/s" if summary.samples_per_second else ""
    bits = f", the same for 1 to {summary.virtual_ranks} processes" if summary.bits_hold_for else ""
    scores = {"validation": summary.validation_metrics, "test": summary.test_metrics}
    known = {split: metrics for split, metrics in scores.items() if metrics is not None}
    results = "; ".join(f"{split} {format_metrics(metrics)}" for split, metrics in known.items())
    return [
        f"done: {results}{rate}",
        f"weights {str(summary.weights_sha256)[:16]}...{bits}",
        f"run folder {folder}",
        report_hint(folder),
    ]


def report_hint(folder: Path) -> str:
    return f"see it: paceline report {shlex.quote(str(folder))}"


def summary_values(parts: "TrainingComponents", place: LockedRun) -> dict[str, Any]:
    compute, facts = parts.config.compute, place.definition
    names = ("virtual_ranks", "global_batch", "accumulation", "threads_per_rank", "precision")
    bits = {name: facts[name] for name in names} | facts["hardware"]  # the same for 1 to virtual_ranks processes
    return {
        "task": str(parts.config.task), "strategy": parts.config.strategy, "precision": compute.precision,
        "allocator": parts.allocator, "bits_hold_for": bits if facts["unbroken"] else None,
    }  # fmt: skip


def stopped_line(step: int, total_steps: int, folder: Path) -> str:
    command = f"paceline train --resume auto --run-dir {shlex.quote(str(folder))}"
    of_total = f" of {total_steps}" if total_steps else ""
    return f"asked to stop: saved after step {step}{of_total}. Resume with: {command}"


def _compute_line(parts: "TrainingComponents") -> str:
    compute, precision = parts.config.compute, parts.config.compute.precision
    options = {
        f"forward and backward in {precision} (results differ from fp32)": precision != "fp32",
        f"activation checkpointing of {compute.checkpoint_activations}": compute.checkpoint_activations is not None,
        "torch.compile": compute.compile,
        "CUDA graphs": compute.cuda_graphs,
    }
    enabled = [text for text, is_enabled in options.items() if is_enabled]
    return f"compute: {', '.join(enabled)}" if enabled else ""


def data_wait_lines(summary: Summary, rank: int, parts: "TrainingComponents") -> list[str]:
    """One line about the time that `rank` waited for data, with possible remedies; none if the time is short."""
    if summary.data_share is None or summary.data_share < DATA_WAIT_REPORTED_FROM:
        return []
    dataset, num_workers, world = parts.train_set, parts.loading.num_workers, parts.replica.world
    subject = f"rank {rank}" if world.size > 1 else "the process"
    message = f"{subject} waited for data during {summary.data_share:.0%} of the step time"
    if parts.stream is not None:
        return [f"{message}{'' if num_workers else '. Try: --num-workers 1, to read ahead'}"]
    spare_cores = usable_cores() - world.local_size * (num_workers + 1)
    if batch_gatherer(dataset) is not None:
        return [f"{message}. It gathers whole batches, so the time is spent in the transform"]
    batched = "" if has_batched_getitems(dataset) else "add __getitems__ to the dataset, to load a whole batch at once"
    workers = f"--num-workers {max(1, 2 * num_workers)}" if spare_cores > 0 or world.device.type != "cpu" else ""
    remedies = [r for r in (workers, batched, "use an ArrayDataset, if the data fit into memory") if r]
    return [f"{message}. Try: {', or '.join(remedies)} (docs/speed.md)"]
