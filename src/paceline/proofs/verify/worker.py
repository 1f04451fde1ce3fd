"""A rank of `paceline verify`: trains every strategy beside one process, step by step, and compares.

`python -m paceline.proofs.verify.worker SPEC REPORT`, started with torchrun's variables. Rank 0 also computes the
reference, so nothing but the report leaves the workers.
"""

import gc
from collections.abc import Sequence

import msgspec
import torch
from torch.optim import Optimizer

from paceline.collectives.control import gather_words, together
from paceline.data.loader import MicroBatch
from paceline.errors import ToldElsewhere, UsageError
from paceline.ladder import LADDER
from paceline.mesh import mesh_of
from paceline.proofs.verify import setup
from paceline.proofs.verify.causes import RankDifferences, explain
from paceline.proofs.verify.reference import Observed, Reference
from paceline.proofs.verify.setup import Setting, build, make_setting, task_of, without_dropout, write_report
from paceline.proofs.verify.trial import Trial, compare_starts, make_trial, observe
from paceline.strategies.refusals import ELEMENT_WISE
from paceline.torch_version import lacks_torch
from paceline.train.step import train_step
from paceline.verify.spec import OWN, Case, Diagnosis, Policy, Result, Spec, VerifyReport
from paceline.worker.attach import run_worker
from paceline.worker.world import World, on_mesh


def verify(spec: Spec, world: World) -> VerifyReport:
    """Run every case of `spec` on this world (a collective); rank 0's report counts."""
    world = on_mesh(world, mesh_of(spec.mesh or None, world.size))
    with together(world):
        task = task_of(spec)
        model = build(task, spec.seed, world.device)
        optimizers = setup.optimizers_of(spec, task, model)
    policies: list[Policy] = ["local", "sync"] if setup.has_batch_norm(model) else ["none"]
    if spec.mesh:
        policies = policies[:1]  # its statistics would be of parts of a model
    notes: list[str] = []
    if len(policies) == 2 and setup.has_dropout(model):
        notes.append("dropout is off under synchronised batch norm: its masks would depend on the world size")
    if OWN in optimizers:
        schedule = ", with its schedule over these steps" if task.make_schedule else ""
        notes.append(f"optimizer {OWN}: {optimizers[OWN].__name__}, as the task makes it{schedule}")
    results: list[Result] = []
    settings = [make_setting(spec, task, policy, world) for policy in policies]
    for setting in settings:
        for optimizer, kind in optimizers.items():
            gc.collect()  # the last round's models hang in cycles of hooks and closures, gigabytes of them
            results += _verify_strategies(setting, optimizer, kind)
    plan = settings[-1].plan
    return VerifyReport(world.size, plan.global_batch, plan.num_samples, results, notes)


def _verify_strategies(setting: Setting, optimizer: str, kind: type[Optimizer]) -> list[Result]:
    """All strategies under one batch norm policy and optimizer, in step with one reference."""
    spec, world, policy = setting.spec, setting.world, setting.policy
    reference = _reference(setting, optimizer) if world.rank == 0 else None
    results: list[Result] = []
    trials: list[Trial] = []
    for name in spec.strategies:
        case = Case(name, world.size, policy, optimizer, spec.mesh)
        reason = _not_run(name, policy, world, kind)
        if reason:
            results.append(Result(case, {}, [], 0.0, not_run=reason))
        else:
            trials.append(make_trial(case, setting, kind))
    for trial in trials:
        compare_starts(trial, reference)
    for number in range(spec.steps):
        want = reference.step(number) if reference else None
        for trial in trials:
            if trial.finding is None:
                _step(trial, number, setting, want, reference)
    for trial in trials:
        shown = trial.comparison
        results.append(Result(trial.case, shown.errors, sorted(shown.round_off), shown.round_off_error, trial.finding))
    return results


def _reference(setting: Setting, optimizer: str) -> Reference:
    spec, global_batch = setting.spec, setting.plan.global_batch
    model = without_dropout(build(setting.task, spec.seed, setting.world.device), setting.policy)
    task = setting.task
    made = setup.maker_of(optimizer, task, model)(model.parameters())
    schedule = task.make_schedule if setup.has_schedule(optimizer, task) else None
    scheduler = None if schedule is None else schedule(made, spec.steps)
    union = setting.policy == "sync"
    return Reference(task, model, made, scheduler, setting.dataset, global_batch, spec, union=union)


def _step(trial: Trial, number: int, setting: Setting, want: Observed | None, reference: Reference | None) -> None:
    """Let one strategy take a step, compare it on rank 0, and agree on what was found."""
    world, error, result, microbatches = setting.world, "", None, list[MicroBatch]()
    try:
        with together(world):
            microbatches = next(trial.batches)
            result = train_step(trial.replica, microbatches, setting.task.loss, max_norm=setting.spec.clip_norm)
    except (UsageError, ToldElsewhere) as failed:
        error = str(failed)
    errors = [e for e in gather_words(error, world) if e]
    finding: Diagnosis | None = None
    if errors:
        told = next((e for e in errors if "failed" not in e.split("\n")[0]), errors[0])
        finding = Diagnosis(number, "error", "", told.strip().splitlines()[-2 if "Traceback" in told else -1])
    else:
        assert result is not None
        got, ranks = observe(trial, result, microbatches)
        if want is not None and reference is not None:
            found = trial.comparison.add(got, want)
            wrong = found or got.samples != want.samples or got.streams != want.streams
            if wrong or ranks != RankDifferences(None, None, None):
                finding = Diagnosis(number, *explain(got, want, found, ranks, reference))
    trial.finding = msgspec.convert(gather_words(msgspec.to_builtins(finding), world)[0], Diagnosis | None)


def _not_run(strategy: str, policy: Policy, world: World, optimizer: type[Optimizer]) -> str | None:
    rung = LADDER[strategy]
    if why := lacks_torch(strategy):
        return why.removeprefix(f"strategy {strategy} ")
    if rung.exact and policy == "sync":
        return "has local batch norm only"
    if rung.sharded and optimizer not in ELEMENT_WISE:
        return f"cuts parameters into pieces, and {optimizer.__name__} may look at a whole one"
    if world.mesh is not None and not rung.on_mesh:
        return "cannot train a part of a model"
    if rung.one_process and world.data.size > 1:
        return "is single-process"
    if rung.several_gpus and torch.cuda.device_count() < 2:
        return "needs two GPUs: on one device it only calls the module"
    return None


def main(arguments: Sequence[str]) -> int:
    """Run the spec in file `arguments[0]`; rank 0 writes the report into file `arguments[1]`."""
    return write_report(arguments, verify, timeout_seconds=120)


if __name__ == "__main__":
    run_worker(main)
