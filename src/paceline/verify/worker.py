"""A rank of a verification: trains beside one process, step by step, and compares.

`python -m paceline.verify.worker SPEC REPORT`, started by `paceline verify` with torchrun's variables. Rank 0 also
computes the reference, so nothing but the report leaves the workers.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.utils.data import Dataset, Subset

from paceline.collectives import gather_words, new_group, together
from paceline.data.arrays import ArrayDataset
from paceline.data.loader import Loading, MicroBatch, load_steps
from paceline.data.plan import BatchPlan, ranks_share
from paceline.errors import ToldElsewhere, UsageError
from paceline.launch.tell import tell
from paceline.launch.worker import attach
from paceline.scratch.batchnorm import convert
from paceline.seeding import derive
from paceline.strategies import STRATEGIES, Replica
from paceline.tasks import load_task
from paceline.tasks.task import Task
from paceline.train.step import StepResult, train_step
from paceline.verify.causes import Ranks, explain
from paceline.verify.compare import Comparison
from paceline.verify.reference import Observed, Reference, gradients_of, optimizer_state, stream_fingerprint
from paceline.verify.spec import Case, Finding, Policy, Report, Result, Spec
from paceline.world import World, joined

MakeOptimizer = Callable[[Any], Optimizer]
LR = 1e-3
OPTIMIZERS: dict[str, MakeOptimizer] = {
    "sgd": partial(SGD, lr=LR, momentum=0.9, weight_decay=1e-2),
    "adamw": partial(AdamW, lr=LR, weight_decay=1e-2),
}


@dataclass
class Candidate:
    """A strategy under verification: its replica, its batches, and what was seen of its last step."""

    case: Case
    replica: Replica
    batches: Iterator[list[MicroBatch]]
    comparison: Comparison
    streams: dict[str, str] = field(default_factory=dict[str, str])
    gradients: dict[str, Tensor | None] = field(default_factory=dict[str, "Tensor | None"])
    stepped: dict[str, Tensor | None] = field(default_factory=dict[str, "Tensor | None"])
    finding: Finding | None = None


def verify(spec: Spec, world: World) -> Report:
    """Run every case of `spec` on this world (a collective); rank 0's report counts."""
    with together(world):
        task = load_task(spec.task, _options(spec))
        model = build(task, spec.seed)
    policies: list[Policy] = ["local", "sync"] if _has_batch_norm(model) else ["none"]
    notes: list[str] = []
    if len(policies) == 2 and _draws(model):
        notes.append("dropout is off under synchronised batch norm: its masks would depend on the world size")
    results: list[Result] = []
    sizes = (0, 0)
    for policy in policies:
        for optimizer in spec.optimizers:
            with together(world):
                dataset, global_batch = _data(task, spec, policy)
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
        model = _without_dropout(build(task, spec.seed), policy)
        reference = Reference(
            task, model, OPTIMIZERS[optimizer](model.parameters()), dataset, global_batch, spec.virtual_ranks,
            spec.accumulation, spec.seed, policy == "sync", spec.clip_norm,
        )  # fmt: skip
    results: list[Result] = []
    candidates: list[Candidate] = []
    for name in spec.strategies:
        case = Case(name, world.size, policy, optimizer)
        reason = _not_run(name, world)
        if reason:
            results.append(Result(case, {}, [], 0.0, not_run=reason))
        else:
            candidates.append(_candidate(case, spec, task, dataset, plan, policy, optimizer, world))
    for number in range(spec.steps):
        before = {c.case.strategy: _parameters(c.replica.model) for c in candidates} if number == 0 else {}
        start = _parameters(reference.model) if reference and number == 0 else {}
        want = reference.step(number) if reference else None
        for candidate in candidates:
            if candidate.finding is None:
                differs = _first_difference(before.get(candidate.case.strategy, {}), start, world)
                _step(candidate, number, spec, task, world, want, differs, reference)
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
        got, ranks = _observe(candidate, result, microbatches, world, start_differs)
        if want is not None and reference is not None:
            found = candidate.comparison.add(got, want)
            wrong = found or got.samples != want.samples or got.streams != want.streams
            if wrong or ranks != Ranks(None, None, None):
                finding = explain(number, got, want, found, ranks, reference)
    candidate.finding = msgspec.convert(gather_words(msgspec.to_builtins(finding), world)[0], Finding | None)


def _observe(
    candidate: Candidate,
    result: StepResult,
    microbatches: Sequence[MicroBatch],
    world: World,
    start_differs: str | None,
) -> tuple[Observed, Ranks]:
    replica = candidate.replica
    mine = [i for b in microbatches if b.work.counted for i in b.work.indices.tolist()]
    samples = [i for part in gather_words(mine, world) for i in part]
    streams = {k: v for part in gather_words(candidate.streams, world) for k, v in part.items()}
    candidate.streams.clear()
    with replica.merged_buffers():
        buffers = {n: b.detach().clone() for n, b in replica.model.named_buffers()}
    got = Observed(
        samples=sorted(samples),
        streams=streams,
        scalars={"loss": result.loss, "weight": result.weight, "gradient norm": result.grad_norm or 0.0},
        gradients=candidate.gradients,
        stepped=candidate.stepped,
        parameters=_parameters(replica.model),
        buffers=buffers,
        state=optimizer_state(replica.optimizer, replica.model),
    )
    gradients_differ = _first_difference({n: g for n, g in got.gradients.items() if g is not None}, None, world)
    after_differs = _first_difference({**got.parameters, **buffers}, None, world)
    return got, Ranks(start_differs, gradients_differ, after_differs)


def _candidate(
    case: Case,
    spec: Spec,
    task: Task,
    dataset: Dataset[Any],
    plan: BatchPlan,
    policy: Policy,
    optimizer: str,
    world: World,
) -> Candidate:
    # Another seed on every rank: only a broadcast from rank 0 makes them start alike.
    model = _without_dropout(build(task, spec.seed + world.rank), policy)
    if policy == "sync":
        model = convert(model, new_group())
    replica = STRATEGIES[case.strategy](model, OPTIMIZERS[optimizer], world)
    replica.model.train()
    share = ranks_share(spec.virtual_ranks, world.rank, world.size)
    batches = load_steps(
        dataset, plan, share, Loading(world.device, 0, task.collate), start=0, stop=spec.steps, merged=policy == "sync"
    )
    candidate = Candidate(case, replica, batches, Comparison(adaptive=optimizer == "adamw"))
    candidate.replica = _observed(candidate)
    return candidate


def _observed(candidate: Candidate) -> Replica:
    """The candidate's replica, with a look at each random stream and at the gradients before they are clipped."""
    inner = candidate.replica

    @contextmanager
    def microbatch(batch: MicroBatch, is_last: bool) -> Generator[None]:
        with ExitStack() as stack:
            stack.enter_context(inner.microbatch(batch, is_last))
            # Under "sync" a rank forwards all its virtual ranks at once, and no random number is drawn.
            if batch.work.counted and candidate.case.batchnorm != "sync":
                candidate.streams[f"{batch.work.virtual_rank}.{batch.work.part}"] = stream_fingerprint()
            yield

    def sync_gradients(total_weight: Tensor) -> None:
        inner.sync_gradients(total_weight)
        candidate.gradients = gradients_of(inner.model)

    def before_step(*_: object) -> None:
        candidate.stepped = gradients_of(inner.model)

    inner.optimizer.register_step_pre_hook(before_step)
    return replace(inner, microbatch=microbatch, sync_gradients=sync_gradients)


def build(task: Task, seed: int) -> nn.Module:
    """The task's model in float64; its inputs are cast to it, whatever the data are."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive(seed, "verify"))
        model = task.make_model().double()
    model.register_forward_pre_hook(lambda _, inputs: tuple(_cast(i) for i in inputs))
    return model


def _cast(batch: Any) -> Any:
    if isinstance(batch, Tensor):
        return batch.double() if batch.is_floating_point() else batch
    if isinstance(batch, dict):
        return {key: _cast(value) for key, value in batch.items()}
    return [_cast(value) for value in batch] if isinstance(batch, (list, tuple)) else batch


def _data(task: Task, spec: Spec, policy: Policy) -> tuple[Dataset[Any], int]:
    """The first samples of the training data, as many as make every kind of uneven step; and the global batch.

    Two global batches whose shares differ by one, and a last, smaller one.
    """
    batch_size = spec.batch_size or (3 if policy == "none" else 8)
    short_tail = policy == "none" if spec.short_tail is None else spec.short_tail
    ranks, share = spec.virtual_ranks, spec.accumulation * batch_size
    global_batch = max(2, ranks * share - 1)
    tail = max(2, ranks - 1) if short_tail else ranks * (share - 3) + 1
    needed = 2 * global_batch + tail
    dataset = task.make_dataset("train")
    there = len(dataset)  # pyright: ignore[reportArgumentType]
    if there < needed:
        raise UsageError(f"verify needs {needed} training samples for {ranks} virtual ranks, the task has {there}")
    if isinstance(dataset, ArrayDataset):  # keep the fast path in the test
        return ArrayDataset(dataset.inputs[:needed], dataset.targets[:needed], dataset.transform), global_batch
    return Subset(dataset, range(needed)), global_batch


def _first_difference(mine: dict[str, Tensor], start: dict[str, Tensor] | None, world: World) -> str | None:
    """The first tensor that differs between ranks, or on rank 0 from `start` where given (a collective)."""
    digests = gather_words({n: _bits(t) for n, t in mine.items()}, world)
    for name, value in digests[0].items():
        if any(other.get(name) != value for other in digests):
            return name
    off = [n for n, t in (start or {}).items() if n in mine and not torch.equal(t, mine[n])]
    return gather_words(off[:1], world)[0][0] if gather_words(bool(off), world)[0] else None


def _bits(tensor: Tensor) -> int:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return zlib.crc32(flat.view(torch.uint8).numpy())  # pyright: ignore[reportArgumentType]


def _parameters(model: nn.Module) -> dict[str, Tensor]:
    return {n: p.detach().clone() for n, p in model.named_parameters()}


def _has_batch_norm(model: nn.Module) -> bool:
    return any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in model.modules())  # pyright: ignore[reportPrivateUsage]


def _draws(model: nn.Module) -> bool:
    return any(isinstance(m, nn.modules.dropout._DropoutNd) and m.p > 0 for m in model.modules())  # pyright: ignore[reportPrivateUsage]


def _without_dropout(model: nn.Module, policy: Policy) -> nn.Module:
    if policy == "sync":
        for module in model.modules():
            if isinstance(module, nn.modules.dropout._DropoutNd):  # pyright: ignore[reportPrivateUsage]
                module.p = 0.0
    return model


def _not_run(strategy: str, world: World) -> str | None:
    if strategy in ("single", "dp") and world.size > 1:
        return "lives in one process"
    if strategy == "dp" and torch.cuda.device_count() < 2:
        return "needs two GPUs: on one device it only calls the module"
    return None


def _options(spec: Spec) -> dict[str, Any]:
    return {k: Path(v) if k == "data_dir" else v for k, v in spec.options.items()}


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
    attach()
    try:
        sys.exit(main(sys.argv[1:]))
    except Exception as error:
        sys.exit(tell(error))
