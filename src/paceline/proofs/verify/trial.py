"""A strategy under verification, with a look at everything that it does in a step."""

import zlib
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from paceline.checkpoint.shards import sha256_of, whole
from paceline.collectives.control import Pending, gather_words
from paceline.data.loader import MicroBatch
from paceline.proofs.verify.causes import Comparison, RankDifferences
from paceline.proofs.verify.reference import Observed, Reference, stream_fingerprint
from paceline.proofs.verify.setup import Setting, apply_strategy, build, without_dropout
from paceline.rank.world import World
from paceline.seeding import Streams
from paceline.stepping.summing import StepResult
from paceline.strategies import Replica
from paceline.verify.spec import Case, Diagnosis

PARAMETER = "model/"  # begins the name of one in a state


@dataclass
class Trial:
    """A strategy under verification: its replica, its batches, and what was seen of its last step."""

    case: Case
    replica: Replica
    batches: Iterator[list[MicroBatch]]
    comparison: Comparison
    start_differs: str | None = None
    """a parameter that differs between ranks, or from one process, before the first step"""
    seen: Observed = field(default_factory=Observed)
    """of the step at hand: streams, and on rank 0, which compares, gradients before and after clipping"""
    gradient_fingerprints: dict[str, int] = field(default_factory=dict[str, int])
    finding: Diagnosis | None = None
    whole: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])
    """shapes of the whole model's parameters and buffers, on the meta device"""


def make_trial(case: Case, setting: Setting, optimizer: type[Optimizer]) -> Trial:
    """Build the model, apply the strategy and prepare its batches (a collective)."""
    seed = setting.spec.seed + setting.world.rank
    model = without_dropout(build(setting.task, seed, setting.world.device), setting.policy)
    everything = (*model.named_parameters(), *model.named_buffers())
    shapes = {name: torch.empty_like(t, device="meta", requires_grad=t.requires_grad) for name, t in everything}
    replica, batches = apply_strategy(setting, case.strategy, case.optimizer, model)
    trial = Trial(case, replica, batches, Comparison(adaptive=not issubclass(optimizer, SGD)), whole=shapes)
    trial.replica = _observed(trial)
    return trial


def _observed(trial: Trial) -> Replica:
    """The trial's replica, with a look at each random stream and at the gradients before they are clipped."""
    inner = trial.replica

    @contextmanager
    def body(batch: MicroBatch, is_last: bool) -> Generator[Streams]:
        with inner.body(batch, is_last) as outside:
            # Under "sync" a rank forwards all its virtual ranks at once, and no random number is drawn.
            if batch.work.counted and trial.case.batchnorm != "sync":
                trial.seen.streams[f"{batch.work.virtual_rank}.{batch.work.part}"] = stream_fingerprint()
            yield outside

    def clip_grad_norm(max_norm: float) -> Pending[float]:
        # not in sync_gradients: hooks on parameters run after it
        gradients = gradients_of(inner)
        trial.gradient_fingerprints = fingerprints(gradients)
        if inner.world.rank == 0:
            trial.seen.gradients = {n: g.clone() for n, g in gradients.items()}
        return inner.clip_grad_norm(max_norm)

    def before_step(*_: object) -> None:
        trial.seen.stepped = gradients_of(inner)

    inner.optimizer.register_step_pre_hook(before_step)
    return replace(inner, body=body, clip_grad_norm=clip_grad_norm)


def compare_starts(trial: Trial, reference: Reference | None) -> None:
    """Compare the parameters before the first step, over ranks and on rank 0 with one process (a collective)."""
    world, mine = trial.replica.world, parameters_of(trial.replica)
    trial.start_differs = _first_difference(fingerprints(mine), world)
    if trial.start_differs is None:
        want = dict(reference.model.named_parameters()) if reference else {}
        off = [name for name, parameter in mine.items() if name in want and not torch.equal(parameter, want[name])]
        trial.start_differs = next(iter(gather_words(off[:1], world)[0]), None)


def observe(trial: Trial, result: StepResult, microbatches: Sequence[MicroBatch]) -> tuple[Observed, RankDifferences]:
    """What the trial's last step looked like, over all ranks (a collective)."""
    replica, world, got, trial.seen = trial.replica, trial.replica.world, trial.seen, Observed()
    counted = [b.work for b in microbatches if b.work.counted and world.leads]  # others may have the same samples
    mine = [i for work in counted for i in work.indices.tolist()]
    got.samples = sorted(i for of_rank in gather_words(mine, world) for i in of_rank)
    got.streams = {k: v for part in gather_words(got.streams, world) for k, v in part.items()}
    got.scalars = {"loss": result.loss, "weight": result.weight, "gradient norm": result.grad_norm or 0.0}
    got.parameters = parameters = parameters_of(replica)
    with replica.merged_buffers():
        got.buffers = buffers = {n: b.detach() for n, b in replica.model.named_buffers()}
        if replica.pipeline is not None:  # of this stage
            got.buffers = buffers = {
                n: t for n, t in replica.weights().items() if n in trial.whole and n not in parameters
            }
    got.state = _optimizer_state(replica, trial.whole)
    gradients_differ = _first_difference(trial.gradient_fingerprints, world)
    after_differs = _first_difference(fingerprints({**parameters, **buffers}), world)
    return got, RankDifferences(trial.start_differs, gradients_differ, after_differs)


def _optimizer_state(replica: Replica, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """As reference.optimizer_state, wherever the strategy keeps it (a collective)."""
    state: dict[str, Tensor] = {}
    for full, value in whole([h for h in replica.state() if h.name.startswith("optimizer/")], replica.world).items():
        name, _, key = full.removeprefix("optimizer/").rpartition("/")
        if value.shape == parameters[name].shape:
            state[f"{key} of {name}"] = value
    return state


def _first_difference(mine: Mapping[str, int], world: World) -> str | None:
    """The first tensor whose fingerprint differs between ranks (a collective)."""
    everybody = gather_words(dict(mine), world)
    names = dict.fromkeys(name for each in everybody for name in each)
    return next((name for name in names if len({each.get(name) for each in everybody}) > 1), None)


def digests_of(replica: Replica) -> tuple[str, str]:
    """SHA-256 of weights with merged buffers, and of the whole state (a collective)."""
    with replica.merged_buffers():
        weights = sha256_of(replica.weights())
    return weights, sha256_of(whole(replica.state(), replica.world))


def fingerprints(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """A checksum of all bits of each tensor."""
    flat = {name: tensor.detach().cpu().contiguous().reshape(-1) for name, tensor in tensors.items()}
    return {n: zlib.crc32(f.view(torch.uint8).numpy()) for n, f in flat.items()}  # pyright: ignore[reportArgumentType]


def parameters_of(replica: Replica) -> dict[str, Tensor]:
    """All parameters, whole, by name (a collective if ranks hold shares); no copies: compare before the next step."""
    if not replica.sharded:
        return {name: parameter.detach() for name, parameter in replica.model.named_parameters()}
    held = [h for h in replica.state() if h.name.startswith(PARAMETER)]
    return {name.removeprefix(PARAMETER): tensor for name, tensor in whole(held, replica.world).items()}


def gradients_of(replica: Replica) -> dict[str, Tensor]:
    """The step's gradients that there are, whole, by name (a collective if ranks hold shares); no copies."""
    held = replica.gradients()
    return whole(held, replica.world) if replica.sharded else {one.name: one.tensor for one in held}
