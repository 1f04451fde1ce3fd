"""A strategy under verification, with a look at everything it does in a step."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, AdamW, Optimizer
from torch.utils.data import Dataset

from paceline.checkpoint.whole import whole
from paceline.compute.recompute import recompute
from paceline.data.loader import Loading, MicroBatch, load_steps
from paceline.data.plan import BatchPlan, ranks_share
from paceline.proofs.causes import Ranks
from paceline.proofs.compared import Comparison
from paceline.proofs.reference import Observed, stream_fingerprint
from paceline.proofs.setup import build, without_dropout
from paceline.strategies import STRATEGIES, Replica
from paceline.sums import gather_words, new_group
from paceline.sums.batchnorm import convert
from paceline.tasks.task import Task
from paceline.train.step import StepResult
from paceline.verify.spec import Case, Finding, Policy, Spec
from paceline.worker.world import World

MakeOptimizer = Callable[[Any], Optimizer]
LR = 1e-3
PARAMETER = "model/"  # begins the name of one in a state
OPTIMIZERS: dict[str, MakeOptimizer] = {
    # fused, as in training: these look at memory, not at strides
    "sgd": partial(SGD, lr=LR, momentum=0.9, weight_decay=1e-2, fused=True),
    "adamw": partial(AdamW, lr=LR, weight_decay=1e-2, fused=True),
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
    """after synchronisation, before clipping; on rank 0 only, which compares"""
    gradient_fingerprints: dict[str, int] = field(default_factory=dict[str, int])
    stepped: dict[str, Tensor | None] = field(default_factory=dict[str, "Tensor | None"])
    """what the optimizer was given"""
    finding: Finding | None = None


def make_candidate(
    case: Case,
    spec: Spec,
    task: Task,
    dataset: Dataset[Any],
    plan: BatchPlan,
    policy: Policy,
    optimizer: str,
    world: World,
) -> Candidate:
    """Build the model, apply the strategy and prepare its batches (a collective)."""
    # Another seed on every rank: only a broadcast from rank 0 makes them start alike.
    model = without_dropout(build(task, spec.seed + world.rank), policy)
    if spec.checkpoint_activations:
        recompute(model, spec.checkpoint_activations)
    if policy == "sync":
        model = convert(model, new_group())
    replica = STRATEGIES[case.strategy](model, OPTIMIZERS[optimizer], world, virtual_ranks=spec.virtual_ranks)
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
        gradients = gradients_of(inner)
        candidate.gradient_fingerprints = fingerprints({n: g for n, g in gradients.items() if g is not None})
        if inner.world.rank == 0:
            candidate.gradients = {n: None if g is None else g.clone() for n, g in gradients.items()}

    def before_step(*_: object) -> None:
        candidate.stepped = gradients_of(inner)

    inner.optimizer.register_step_pre_hook(before_step)
    return replace(inner, microbatch=microbatch, sync_gradients=sync_gradients)


def observe(
    candidate: Candidate,
    result: StepResult,
    microbatches: Sequence[MicroBatch],
    world: World,
    start_differs: str | None,
) -> tuple[Observed, Ranks]:
    """What the candidate's last step looked like, over all ranks (a collective)."""
    replica = candidate.replica
    mine = [i for b in microbatches if b.work.counted for i in b.work.indices.tolist()]
    samples = [i for part in gather_words(mine, world) for i in part]
    streams = {k: v for part in gather_words(candidate.streams, world) for k, v in part.items()}
    candidate.streams.clear()
    with replica.merged_buffers():
        buffers = {n: b.detach() for n, b in replica.model.named_buffers()}
    got = Observed(
        samples=sorted(samples),
        streams=streams,
        scalars={"loss": result.loss, "weight": result.weight, "gradient norm": result.grad_norm or 0.0},
        gradients=candidate.gradients,
        stepped=candidate.stepped,
        parameters=parameters_of(replica),
        buffers=buffers,
        state=_optimizer_state(replica),
    )
    gradients_differ = first_difference(candidate.gradient_fingerprints, world)
    after_differs = first_difference(fingerprints({**got.parameters, **buffers}), world)
    return got, Ranks(start_differs, gradients_differ, after_differs)


def _optimizer_state(replica: Replica) -> dict[str, Tensor]:
    """As reference.optimizer_state, wherever the strategy keeps it (a collective)."""
    shapes = {name: parameter.shape for name, parameter in replica.model.named_parameters()}
    state: dict[str, Tensor] = {}
    for full, value in whole([h for h in replica.state() if h.name.startswith("optimizer/")], replica.world).items():
        name, _, key = full.removeprefix("optimizer/").rpartition("/")
        if value.shape == shapes[name]:
            state[f"{key} of {name}"] = value
    return state


def first_difference(mine: Mapping[str, int], world: World) -> str | None:
    """The first tensor whose fingerprint differs between ranks (a collective)."""
    everybody = gather_words(dict(mine), world)
    names = dict.fromkeys(name for each in everybody for name in each)
    return next((name for name in names if len({each.get(name) for each in everybody}) > 1), None)


def fingerprints(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """A checksum of all bits of each tensor."""
    flat = {name: tensor.detach().cpu().contiguous().reshape(-1) for name, tensor in tensors.items()}
    return {n: zlib.crc32(f.view(torch.uint8).numpy()) for n, f in flat.items()}  # pyright: ignore[reportArgumentType]


def parameters_of(replica: Replica) -> dict[str, Tensor]:
    """All parameters, whole, by name (a collective); no copies: they are compared before the next step changes them."""
    held = [h for h in replica.state() if h.name.startswith(PARAMETER)]
    return {name.removeprefix(PARAMETER): tensor for name, tensor in whole(held, replica.world).items()}


def gradients_of(replica: Replica) -> dict[str, Tensor | None]:
    """The step's gradients, whole, by name (a collective)."""
    found = whole(replica.gradients(), replica.world)
    return {name: found.get(name) for name, p in replica.model.named_parameters() if p.requires_grad}
