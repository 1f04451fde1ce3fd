"""A rank of a verification: trains beside one process, step by step, and compares.

`python -m paceline.proofs.verify_worker SPEC REPORT`, started by `paceline verify` with torchrun's variables. Rank 0
also computes the reference, so nothing but the report leaves the workers.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor
from torch.utils.data import Dataset

from paceline.data.loader import MicroBatch
from paceline.data.plan import BatchPlan
from paceline.errors import ToldElsewhere, UsageError
from paceline.ladder import LADDER
from paceline.proofs.causes import Ranks, explain
from paceline.proofs.reference import Observed, Reference
from paceline.proofs.setup import build, has_batch_norm, has_dropout, task_options, uneven_data, without_dropout
from paceline.proofs.verified import (
    OPTIMIZERS,
    Candidate,
    fingerprints,
    first_difference,
    make_candidate,
    observe,
    parameters_of,
)
from paceline.sums import gather_words, together
from paceline.tasks import load_task
from paceline.tasks.task import Task
from paceline.train.step import train_step
from paceline.verify.spec import Case, Finding, Policy, Report, Result, Spec
from paceline.worker.tell import run_worker
from paceline.worker.world import World, joined


def verify(spec: Spec, world: World) -> Report:
    """Run every case of `spec` on this world (a collective); rank 0's report counts."""
    with together(world):
        task = load_task(spec.task, task_options(spec))
        model = build(task, spec.seed)
    policies: list[Policy] = ["local", "sync"] if has_batch_norm(model) else ["none"]
    notes: list[str] = []
    if len(policies) == 2 and has_dropout(model):
        notes.append("dropout is off under synchronised batch norm: its masks would depend on the world size")
    results: list[Result] = []
    sizes = (0, 0)
    for policy in policies:
        for optimizer in spec.optimizers:
            gc.collect()  # the last round's models hang in cycles of hooks and closures, gigabytes of them
            with together(world):
                dataset, global_batch = uneven_data(task, spec, policy)
            sizes = (global_batch, len(dataset))  # pyright: ignore[reportArgumentType]
            results += _verify_policy(spec, task, dataset, global_batch, policy, optimizer, world)
    return Report(world.size, *sizes, results, notes)


def _verify_policy(
    spec: Spec, task: Task, dataset: Dataset[Any], global_batch: int, policy: Policy, optimizer: str, world: World
) -> list[Result]:
    """All strategies of one batch norm policy and optimizer, in step with one reference."""
    plan = BatchPlan(
        len(dataset), global_batch, spec.virtual_ranks, spec.accumulation, spec.seed  # pyright: ignore[reportArgumentType]
    )  # fmt: skip
    reference = None
    if world.rank == 0:
        model = without_dropout(build(task, spec.seed), policy)
        reference = Reference(
            task, model, OPTIMIZERS[optimizer](model.parameters()), dataset, global_batch, spec.virtual_ranks,
            spec.accumulation, spec.seed, policy == "sync", spec.clip_norm,
        )  # fmt: skip
    results: list[Result] = []
    candidates: list[Candidate] = []
    for name in spec.strategies:
        case = Case(name, world.size, policy, optimizer)
        reason = _not_run(name, policy, world)
        if reason:
            results.append(Result(case, {}, [], 0.0, not_run=reason))
        else:
            candidates.append(make_candidate(case, spec, task, dataset, plan, policy, optimizer, world))
    start = dict(reference.model.named_parameters()) if reference else {}
    starts = [first_difference(fingerprints(parameters_of(c.replica)), world) for c in candidates]
    starts = [differs or _not_started_from(c, start, world) for differs, c in zip(starts, candidates, strict=True)]
    for number in range(spec.steps):
        want = reference.step(number) if reference else None
        for candidate, differs in zip(candidates, starts, strict=True):
            if candidate.finding is None:
                _step(candidate, number, spec, task, world, want, None if number else differs, reference)
    for c in candidates:
        shown = c.comparison
        results.append(Result(c.case, shown.errors, sorted(shown.round_off), shown.round_off_error, c.finding))
    return results


def _step(
    candidate: Candidate,
    number: int,
    spec: Spec,
    task: Task,
    world: World,
    want: Observed | None,
    start_differs: str | None,
    reference: Reference | None,
) -> None:
    """Let a candidate take a step, compare it on rank 0, and agree on what was found."""
    error, result, microbatches = "", None, list[MicroBatch]()
    try:
        with together(world):
            microbatches = next(candidate.batches)
            result = train_step(candidate.replica, microbatches, task.loss, max_norm=spec.clip_norm)
    except (UsageError, ToldElsewhere) as failed:
        error = str(failed)
    errors = [e for e in gather_words(error, world) if e]
    finding: Finding | None = None
    if errors:
        told = next((e for e in errors if "failed" not in e.split("\n")[0]), errors[0])
        finding = Finding(number, "error", "", told.strip().splitlines()[-2 if "Traceback" in told else -1])
    else:
        assert result is not None
        got, ranks = observe(candidate, result, microbatches, world, start_differs)
        if want is not None and reference is not None:
            found = candidate.comparison.add(got, want)
            wrong = found or got.samples != want.samples or got.streams != want.streams
            if wrong or ranks != Ranks(None, None, None):
                finding = explain(number, got, want, found, ranks, reference)
    candidate.finding = msgspec.convert(gather_words(msgspec.to_builtins(finding), world)[0], Finding | None)


def _not_started_from(candidate: Candidate, start: Mapping[str, Tensor], world: World) -> str | None:
    """A parameter that on rank 0 is not what one process starts from (a collective)."""
    off = [n for n, p in parameters_of(candidate.replica).items() if n in start and not torch.equal(p, start[n])]
    return next(iter(gather_words(off[:1], world)[0]), None)


def _not_run(strategy: str, policy: Policy, world: World) -> str | None:
    rung = LADDER[strategy]
    if rung.exact and policy == "sync":
        return "has local batch norm only"
    if rung.one_process and world.size > 1:
        return "lives in one process"
    if rung.several_gpus and torch.cuda.device_count() < 2:
        return "needs two GPUs: on one device it only calls the module"
    return None


def main(arguments: Sequence[str]) -> int:
    """Run the spec in file `arguments[0]`; rank 0 writes the report into file `arguments[1]`."""
    spec = msgspec.json.decode(Path(arguments[0]).read_bytes(), type=Spec)
    torch.set_num_threads(1)
    world = World.from_env(device="cpu")
    with joined(world, timeout_seconds=120):
        report = verify(spec, world)
        if world.rank == 0:
            Path(arguments[1]).write_bytes(msgspec.json.encode(report))
    return 0


if __name__ == "__main__":
    run_worker(main)
