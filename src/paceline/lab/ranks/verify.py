"""A rank of `paceline verify`: `python -m paceline.lab.ranks.verify SPEC REPORT`, with torchrun's variables.

Rank 0 also computes the reference and compares, so the workers return only the report. With --bitwise there is no
reference: the command compares the bits of each step with those of different world sizes.
"""

import gc
from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch

from paceline.checkpoint.shards import hash_tensors
from paceline.collectives.control import all_gather_object, raise_on_all_ranks
from paceline.config.choices import torch_unsupported_reason
from paceline.config.mesh import resolve_mesh
from paceline.config.strategies import STRATEGY_INFO
from paceline.data.loader import MicroBatch
from paceline.errors import ReportedByPeer, UsageError
from paceline.lab.ranks import trial as trials
from paceline.lab.ranks.causes import explain_difference
from paceline.lab.ranks.loop import run_loop_cases
from paceline.lab.ranks.reference import Reference, StepValues, has_batch_norm
from paceline.lab.ranks.trial import OptimizerInfo, StrategyTrial, VerificationSetup
from paceline.lab.verify import (
    TASK_OPTIMIZER,
    BatchNormPolicy,
    CaseResult,
    DigestReport,
    Divergence,
    LoopSpec,
    StepDigests,
    StrategyCase,
    StrategyDigests,
    VerifyReport,
    VerifySpec,
)
from paceline.rank.attach import run_worker
from paceline.rank.world import World, create_mesh_groups, process_group
from paceline.train.determinism import DEFAULT_THREADS, hardware_facts, use_deterministic_kernels
from paceline.train.prepare import make_model
from paceline.train.step import train_step


def verify(spec: VerifySpec, world: World) -> VerifyReport:
    """Run all cases of `spec` on this world (a collective). Use the report of rank 0."""
    world = create_mesh_groups(world, resolve_mesh(spec.mesh or None, world.size))
    with raise_on_all_ranks(world):
        task = trials.load_task_to_verify(spec)
        model = trials.build_float64_model(task, spec.seed, world.device)
        optimizers = trials.optimizers_to_verify(spec, task, model)
    policies: list[BatchNormPolicy] = ["local", "sync"] if has_batch_norm(model) else ["none"]
    if spec.mesh:
        policies = policies[:1]  # synchronised statistics would mix different parts of a model
    notes: list[str] = []
    if len(policies) == 2 and trials.has_dropout(model):
        notes.append("dropout is off with synchronised batch norm: its masks would depend on the world size")
    if TASK_OPTIMIZER in optimizers:
        schedule = ", with the task's schedule over these steps" if task.make_schedule else ""
        notes.append(f"optimizer {TASK_OPTIMIZER}: {optimizers[TASK_OPTIMIZER].names}, created by the task{schedule}")
    results: list[CaseResult] = []
    settings = [trials.make_verification_setup(spec, task, policy, world) for policy in policies]
    for setting in settings:
        for optimizer, verified in optimizers.items():
            gc.collect()  # hooks and closures keep the last models in reference cycles, which may have gigabytes
            results += _verify_strategies(setting, optimizer, verified)
    plan = settings[-1].plan
    return VerifyReport(world.size, plan.global_batch, plan.num_samples, results, notes)


def _verify_strategies(setting: VerificationSetup, optimizer: str, verified: OptimizerInfo) -> list[CaseResult]:
    spec, world, policy = setting.spec, setting.world, setting.batch_norm_policy
    reference = trials.make_reference(setting, optimizer) if world.rank == 0 else None
    results: list[CaseResult] = []
    running: list[StrategyTrial] = []
    for name in spec.strategies:
        case = StrategyCase(name, world.size, policy, optimizer, spec.mesh)
        reason = _skip_reason(name, policy, world, verified)
        if reason:
            results.append(CaseResult(case, {}, [], 0.0, not_run=reason))
        else:
            running.append(trials.make_trial(case, setting, verified))
    for trial in running:
        trials.compare_initial_parameters(trial, reference)
    for number in range(spec.steps):
        want = reference.step(number) if reference else None
        for trial in running:
            if trial.finding is None:
                _step(trial, number, setting, want, reference)
    return [*results, *(trial.comparison.result(trial.case, trial.finding) for trial in running)]


def _step(
    trial: StrategyTrial, number: int, setting: VerificationSetup, want: StepValues | None, reference: Reference | None
) -> None:
    """Take a step with one strategy, compare it on rank 0, and send the finding to all ranks."""
    world, error, result, microbatches = setting.world, "", None, list[MicroBatch]()
    try:
        with raise_on_all_ranks(world):
            microbatches = next(trial.batches)
            result = train_step(trial.replica, microbatches, setting.task.loss, max_norm=setting.spec.clip_norm)
    except (UsageError, ReportedByPeer) as failure:
        error = str(failure)
    errors = [e for e in all_gather_object(error, world) if e]
    finding: Divergence | None = None
    if errors:
        message = next((e for e in errors if "failed" not in e.split("\n")[0]), errors[0])
        finding = Divergence(number, "error", "", message.strip().splitlines()[-2 if "Traceback" in message else -1])
    else:
        assert result is not None
        got, ranks = trials.collect_step_values(trial, result, microbatches)
        if want is not None and reference is not None:
            differences = trial.comparison.compare_step(got, want)
            is_wrong = differences or got.samples != want.samples or got.stream_fingerprints != want.stream_fingerprints
            if is_wrong or any(ranks):
                finding = Divergence(number, *explain_difference(got, want, differences, ranks, reference))
    trial.finding = msgspec.convert(all_gather_object(msgspec.to_builtins(finding), world)[0], Divergence | None)


def _skip_reason(strategy: str, policy: BatchNormPolicy, world: World, optimizer: OptimizerInfo) -> str | None:
    info = STRATEGY_INFO[strategy]
    if reason := torch_unsupported_reason(strategy):
        return reason.removeprefix(f"strategy {strategy} ")
    if info.exact and policy == "sync":
        return "has local batch norm only"
    if info.sharded and optimizer.why_not_sharded:
        return optimizer.why_not_sharded
    if world.mesh is not None and not info.supports_mesh:
        return "does not support parts of a model"
    if info.single_process and world.data.size > 1:
        return "is single-process"
    if info.splits_over_gpus and torch.cuda.device_count() < 2:
        return "needs two GPUs; on one device it only calls the module"
    return None


def collect_bit_digests(spec: VerifySpec, world: World) -> DigestReport:
    with raise_on_all_ranks(world):
        task = trials.load_task_to_verify(spec)
        model = make_model(task, spec.seed, world)
        optimizers = trials.optimizers_to_verify(spec, task, model)
        policy = "local" if has_batch_norm(model) else "none"
    setting = trials.make_verification_setup(spec, task, policy, world)
    bits = [_bits_of(setting, strategy, optimizer) for strategy in spec.strategies for optimizer in optimizers]
    plan, hardware = setting.plan, hardware_facts(world.device)
    return DigestReport(world.size, plan.global_batch, plan.num_samples, bits, hardware)


def _bits_of(setting: VerificationSetup, strategy: str, optimizer: str) -> StrategyDigests:
    gc.collect()
    spec, world = setting.spec, setting.world
    model = make_model(setting.task, spec.seed + world.rank, world)
    replica, batches = trials.apply_strategy(setting, strategy, optimizer, model)
    steps: list[StepDigests] = []
    for microbatches in batches:
        result = train_step(replica, microbatches, setting.task.loss, max_norm=spec.clip_norm)
        norm = float(result.grad_norm or 0.0).hex()
        gradients, parameters = (
            hash_tensors(trials.full_gradients(replica)),
            hash_tensors(trials.full_parameters(replica)),
        )
        steps.append(StepDigests(result.loss.hex(), norm, gradients, parameters))
    weights, state = trials.digest_weights_and_state(replica)
    by_rank = all_gather_object([weights, [msgspec.to_builtins(step) for step in steps]], world)
    is_equal = all(digests == by_rank[0] for digests in by_rank)
    return StrategyDigests(strategy, optimizer, weights, state, steps, is_equal)


def main(arguments: Sequence[str]) -> int:
    spec = msgspec.json.decode(Path(arguments[0]).read_bytes(), type=VerifySpec | LoopSpec)
    world, report = trials.make_world(spec.device), Path(arguments[1])
    if isinstance(spec, LoopSpec):
        run_loop_cases(spec, report.parent, world)
        return 0
    torch.set_num_threads(DEFAULT_THREADS)
    with process_group(world, timeout_seconds=300 if spec.bitwise else 120):
        result = use_deterministic_kernels()(collect_bit_digests)(spec, world) if spec.bitwise else verify(spec, world)
        if world.rank == 0:
            report.write_bytes(msgspec.json.encode(result))
    return 0


if __name__ == "__main__":
    run_worker(main)
