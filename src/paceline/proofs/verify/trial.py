"""A strategy under verification, with a look at everything that it does in a step."""

import zlib
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from paceline.checkpoint.whole import whole
from paceline.collectives.control import Pending, gather_words
from paceline.data.loader import MicroBatch
from paceline.proofs.verify.causes import Comparison, RankDifferences
from paceline.proofs.verify.reference import Observed, Reference, stream_fingerprint
from paceline.proofs.verify.setup import Setting, apply_strategy, build, without_dropout
from paceline.seeding import Streams
from paceline.stepping.summing import StepResult
from paceline.strategies import Replica
from paceline.verify.spec import Case, Diagnosis
from paceline.worker.world import World

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
    streams: dict[str, str] = field(default_factory=dict[str, str])
    gradients: dict[str, Tensor | None] = field(default_factory=dict[str, "Tensor | None"])
    """after synchronisation and hooks on parameters, before clipping; on rank 0 only, which compares"""
    gradient_fingerprints: dict[str, int] = field(default_factory=dict[str, int])
    stepped: dict[str, Tensor | None] = field(default_factory=dict[str, "Tensor | None"])
    """what the optimizer was given"""
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
                trial.streams[f"{batch.work.virtual_rank}.{batch.work.part}"] = stream_fingerprint()
            yield outside

    def clip_grad_norm(max_norm: float) -> Pending[float]:
        # not in sync_gradients: hooks on parameters run after it
        gradients = _gradients_of(inner, trial.whole)
        trial.gradient_fingerprints = fingerprints({n: g for n, g in gradients.items() if g is not None})
        if inner.world.rank == 0:
            trial.gradients = {n: None if g is None else g.clone() for n, g in gradients.items()}
        return inner.clip_grad_norm(max_norm)

    def before_step(*_: object) -> None:
        trial.stepped = _gradients_of(inner, trial.whole)

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
    replica, world = trial.replica, trial.replica.world
    seen = microbatches if world.leads else ()  # others may have the same samples
    mine = [i for b in seen if b.work.counted for i in b.work.indices.tolist()]
    samples = [i for part in gather_words(mine, world) for i in part]
    streams = {k: v for part in gather_words(trial.streams, world) for k, v in part.items()}
    trial.streams.clear()
    with replica.merged_buffers():
        buffers = {n: b.detach() for n, b in replica.model.named_buffers()}
        if replica.pipeline is not None:  # of this stage
            parameters = parameters_of(replica)
            buffers = {n: t for n, t in replica.weights().items() if n in trial.whole and n not in parameters}
    got = Observed(
        samples=sorted(samples),
        streams=streams,
        scalars={"loss": result.loss, "weight": result.weight, "gradient norm": result.grad_norm or 0.0},
        gradients=trial.gradients,
        stepped=trial.stepped,
        parameters=parameters_of(replica),
        buffers=buffers,
        state=_optimizer_state(replica, trial.whole),
    )
    gradients_differ = _first_difference(trial.gradient_fingerprints, world)
    after_differs = _first_difference(fingerprints({**got.parameters, **buffers}), world)
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


def fingerprints(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """A checksum of all bits of each tensor."""
    flat = {name: tensor.detach().cpu().contiguous().reshape(-1) for name, tensor in tensors.items()}
    return {n: zlib.crc32(f.view(torch.uint8).numpy()) for n, f in flat.items()}  # pyright: ignore[reportArgumentType]


def parameters_of(replica: Replica) -> dict[str, Tensor]:
    """All parameters, whole, by name (a collective); no copies: they are compared before the next step changes them."""
    held = [h for h in replica.state() if h.name.startswith(PARAMETER)]
    return {name.removeprefix(PARAMETER): tensor for name, tensor in whole(held, replica.world).items()}


def _gradients_of(replica: Replica, parameters: Mapping[str, Tensor]) -> dict[str, Tensor | None]:
    """The step's gradients, whole, by name (a collective)."""
    found = whole(replica.gradients(), replica.world)
    return {name: found.get(name) for name, p in parameters.items() if p.requires_grad}
