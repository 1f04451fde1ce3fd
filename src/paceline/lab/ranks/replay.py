"""Repeats one step of a run on one process, from the nearest checkpoint, and observes it. It writes no file of the run.

The loops are those of the training, of `train.training` for a task and of the user's script for a session. The
instruments replace methods of the strategy and add hooks. They observe only the micro-batches of the requested step.
"""

import math
import pdb
import runpy
import sys
from collections.abc import Callable, Generator, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import cache, partial
from inspect import signature
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from msgspec import structs
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from paceline.checkpoint.manager import Checkpoints
from paceline.checkpoint.resume import find_newest_checkpoint
from paceline.checkpoint.shards import ShardFileSource, gather_full_state, hash_tensors
from paceline.checkpoint.state import LockedRun, ResumePoint, TensorShard
from paceline.collectives.communicator import make_communicator
from paceline.config.definition import CHANGEABLE_SETTINGS, TASK_SETTING_PREFIX, check_definition_changes
from paceline.config.strategies import EXACT_STRATEGIES
from paceline.data.loader import MicroBatch
from paceline.data.plan import MicroBatchPlan
from paceline.errors import PacelineError, UsageError, first_few
from paceline.lab.replay import EXPECTED, NonFiniteValue, ReplayRequest, ReplayResult, ReplaySource, SampleLoss
from paceline.nested import tensors
from paceline.rank.world import World, process_group
from paceline.runs.checkpoint_format import DamagedCheckpoint, read_manifest
from paceline.runs.console import print_to_stderr
from paceline.runs.folder import CHECKPOINTS
from paceline.seeding import preserve_generator_states
from paceline.sessions.lifecycle import MIN_RANDOM_SEED, close_all_sessions
from paceline.sessions.loader import Loader
from paceline.sessions.observer import ApplyStrategy, Observer, use_observer
from paceline.stepping.micro_step import MicroStep, Reduction
from paceline.stepping.nonfinite import nonfinite_samples
from paceline.strategies.base import Strategy
from paceline.tasks.task import Loss
from paceline.train.compute_settings import set_threads
from paceline.train.consistency import REGISTERED_PREFIX
from paceline.train.determinism import hardware_facts, use_deterministic_kernels
from paceline.train.prepare import TrainingComponents, prepare
from paceline.train.step_record import StepRecord
from paceline.train.training import TaskTrainer
from paceline.train.weights import load_initial_weights

SAME_LOSS = 1e-2  # relative difference of a loss and the mean over samples, which bf16 can round
OTHER_SAMPLES = "the run has used different samples in this step: their order has no seed, or the data differ"


def open_source_checkpoints(source: ReplaySource) -> Checkpoints:
    return Checkpoints(source.run_dir / CHECKPOINTS, trust=source.trust)


def read_run_definition(source: ReplaySource) -> Mapping[str, Any]:
    """The definition of the attempt in its first checkpoint. Without one, it has only the hardware."""
    for _, path in reversed(open_source_checkpoints(source).entries()):
        with suppress(DamagedCheckpoint):
            manifest = read_manifest(path, trust=source.trust)
            if manifest.attempt == source.logged.attempt:
                return manifest.definition
    return {"hardware": source.environment.get("bits_hold_for")}


@dataclass
class ReplayObserver:
    """Observes the requested step, and fills `result`."""

    request: ReplayRequest
    source: ReplaySource
    result: ReplayResult = field(init=False)
    is_on: bool = False  # whether the requested step is the current one
    replicas: dict[str, Strategy] = field(default_factory=dict[str, Strategy])
    """by the prefix of the names of their parameters"""
    work: MicroBatchPlan | None = None  # the current micro-batch of the requested step
    owners: dict[int, int] = field(default_factory=dict[int, int])
    """the virtual rank of each sample, if one micro-batch has samples of several"""
    samples: dict[tuple[int, int], list[SampleLoss]] = field(default_factory=dict[tuple[int, int], list[SampleLoss]])
    _finite_gradient: tuple[str, str] = "loss", "the loss function"

    def __post_init__(self) -> None:
        self.result = ReplayResult(self.request.step, 0, self.source.logged.loss, without=sorted(self.request.without))
        self.until, self.saved = self._next_checkpoint() or (self.request.step, None)

    def _next_checkpoint(self) -> tuple[int, ShardFileSource] | None:
        """The intact checkpoint to compare the state with, and its step."""
        request, checkpoints = self.request, open_source_checkpoints(self.source)
        for step, path in reversed(checkpoints.entries()):
            if step == request.step or (request.check and step > request.step):
                try:
                    return step, ShardFileSource.from_checkpoint(path, checkpoints.check(path))
                except DamagedCheckpoint as error:
                    print_to_stderr(f"{path.name} cannot be used: {error}")
        if request.check:
            raise UsageError(code="replay-without-later-checkpoint", value=request.step, run_dir=self.source.run_dir)
        return None

    def find_start_checkpoint(self, world: World) -> ResumePoint | None:
        """The newest intact checkpoint before the step; None: the replay begins at the start of the run."""
        origin = find_newest_checkpoint(
            open_source_checkpoints(self.source), world, print_to_stderr, after=0, before=self.request.step
        )
        self.result.start = origin.step if origin else 0
        self.is_on = self.result.start + 1 == self.request.step
        return origin

    def attach(self, replica: Strategy, prefix: str = "") -> None:
        self.replicas[prefix] = replica
        enter, leave, sync_gradients = replica.enter, replica.leave, replica.sync_gradients

        def entered(batch: MicroBatch, is_last: bool) -> None:
            if self.is_on:
                self.before_micro_batch()
            enter(batch, is_last)
            if self.is_on:
                self.on_micro_batch(batch, replica, prefix)

        def left(error: BaseException | None = None) -> None:
            self.work = None
            leave(error)

        def synchronised(divisor: float | Tensor) -> Any:
            result = sync_gradients(divisor)
            if self.is_on:
                self.on_gradients(replica, prefix)
            return result

        vars(replica).update(enter=entered, leave=left, sync_gradients=synchronised)
        for name, module in replica.model.named_modules() if self.request.find_nonfinite else ():
            module.register_forward_hook(partial(self._after_forward, prefix + (name or type(module).__name__)))

    def before_micro_batch(self) -> None:
        pass

    def on_micro_batch(self, batch: MicroBatch, replica: Strategy, prefix: str) -> None:
        self.work = batch.work if batch.work.is_counted else None
        self._finite_gradient = "loss", "the loss function"
        if self.request.pdb and len(self.replicas) == 1:
            self._stop(batch, replica.model, replica.optimizer)

    def on_gradients(self, replica: Strategy, prefix: str) -> None:
        """Record the norm of the gradients of each layer, in the order of the model."""
        trained = (name for name, p in replica.model.named_parameters() if p.requires_grad)
        squares = dict.fromkeys((prefix + name.rpartition(".")[0] for name in trained), 0.0)
        for shard in replica.gradients():
            squares[prefix + shard.name.rpartition(".")[0]] += float(shard.tensor.detach().double().square().sum())
        self.result.layers |= {name or "(the model)": total**0.5 for name, total in squares.items()}

    def _stop(self, batch: MicroBatch, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Stop in the debugger. Its draws of random numbers do not change the step."""
        work = batch.work
        with preserve_generator_states():
            print(
                f"step {self.request.step}, virtual rank {work.virtual_rank}, micro-batch {work.micro_batch}: batch, "
                "model and optimizer are variables; c continues, q ends"
            )
            pdb.Pdb(nosigint=True).set_trace()
            return  # here the debugger stops

    def leave_out_samples(self, work: list[MicroBatchPlan]) -> list[MicroBatchPlan]:
        """The work of a step without the samples to leave out."""
        if not self.is_on:
            return work
        kept = [(w, [index not in self.request.without for index in w.indices.tolist()]) for w in work]
        count, total = sum(sum(keeps) for _, keeps in kept), sum(len(keeps) for _, keeps in kept)
        if total - count != len(self.request.without) or not count:
            raise self._missing_samples({index for w in work for index in w.indices.tolist()})
        return [structs.replace(w, indices=w.indices[keeps], global_samples=count) for w, keeps in kept if any(keeps)]

    def _missing_samples(self, indices: Set[int]) -> UsageError:
        step = self.request.step
        if not (missing := sorted(self.request.without - indices)):
            return UsageError(code="replay-without-all", value=step)
        allowed = first_few([*map(str, sorted(indices))], 50)
        return UsageError(code="replay-sample-not-there", samples=missing, value=step, allowed=allowed)

    def note_losses(self, values: Tensor, weights: Tensor | None = None) -> bool:
        """Record the losses of the current micro-batch, (B, ...). Returns whether there is one per sample."""
        work = self.work
        if work is None:
            return False
        self._note_nonfinite("loss", "the loss function", values, work)
        if not values.ndim or len(values) != len(work.indices):
            return False
        rows = values.detach().double().reshape(len(values), -1)
        shares = torch.ones_like(rows) if weights is None else weights.detach().double().reshape(rows.shape)
        means = (rows * shares).sum(1) / shares.sum(1).where(shares.sum(1) != 0, 1.0)
        self.samples[work.virtual_rank, work.micro_batch] = [
            SampleLoss(loss, index, self.owners.get(index, work.virtual_rank), work.micro_batch)
            for loss, index in zip(means.tolist(), work.indices.tolist(), strict=True)
        ]
        return True

    def _after_forward(self, name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        """Find the first output that is not finite, and the first gradient of an output."""
        work = self.work
        if work is None or self.result.nonfinite:
            return
        kind = type(module).__name__
        for tensor in tensors(output):
            if self._note_nonfinite(name, kind, tensor, work, cause=partial(_nonfinite_cause, module, inputs)):
                return
            if tensor.requires_grad:
                tensor.register_hook(partial(self._on_gradient, name, kind, work))

    def _on_gradient(self, name: str, kind: str, work: MicroBatchPlan, gradient: Tensor) -> None:
        if not self._note_nonfinite(*self._finite_gradient, gradient, work, gradient_of=name):
            self._finite_gradient = name, kind

    def _note_nonfinite(
        self, module: str, kind: str, values: Tensor, work: MicroBatchPlan, *,
        gradient_of: str = "", cause: Callable[[], str] = str,
    ) -> bool:  # fmt: skip
        """Record the first values that are not finite. Returns whether these are."""
        if not self.request.find_nonfinite or self.result.nonfinite:
            return False
        if bad := nonfinite_samples(values, work.indices)[0]:
            samples = tuple(work.indices.tolist() if gradient_of else bad)
            virtual_rank = self.owners.get(samples[0], work.virtual_rank)
            self.result.nonfinite = NonFiniteValue(module, kind, gradient_of, virtual_rank, samples, cause())
        return bool(bad)

    def note_step(self, record: StepRecord) -> bool:
        """A step has ended. Returns whether it was the last one to repeat."""
        request, step, result = self.request, record.step, self.result
        if step == request.step:
            self.is_on = False
            logged = self.source.logged.fingerprint
            result.loss, result.grad_norm = record.result.loss, record.result.grad_norm
            result.failure = "" if record.result.skip_cause is None else record.result.skip_cause.message
            if not request.without and logged is not None and record.fingerprint() != logged:
                result.contradiction = OTHER_SAMPLES
            elif self.source.logged.skipped != bool(result.failure):
                result.contradiction = "one of the run and this replay has skipped the step"
        self.is_on = step + 1 == request.step
        return step >= self.until

    def compare_state(self, shards: Sequence[TensorShard], world: World) -> None:
        """Compare the state after the last step with its checkpoint, if the bits must be equal."""
        saved = self.saved
        if saved is None or self.result.expected or self.request.without:
            return
        state = gather_full_state(shards, world)
        names = {*state, *(name for name in saved.names("") if not name.startswith(REGISTERED_PREFIX))}
        self.result.checkpoint = self.until
        self.result.differing = [n for n in sorted(names) if _bits(state.get(n)) != _bits(saved.tensor(n))]
        self.result.digest = "" if self.result.differing else hash_tensors(state)

    def finish(self, error: PacelineError | None = None) -> ReplayResult:
        """The result. `error`: of the requested step, as in the run."""
        result = self.result
        if error is not None:
            result.failure = str(error)
        losses = [sample for part in self.samples.values() for sample in part]
        result.samples = sorted(losses, key=lambda s: -math.inf if math.isnan(s.loss) else -s.loss)
        why_not = self.source.logged.why_not
        result.failure = result.failure or (f"no logged loss: {why_not}" if why_not else "")
        return result


def is_finite(tensor: Tensor) -> bool:
    return bool(tensor.detach().isfinite().all())


def _nonfinite_cause(module: nn.Module, inputs: Any) -> str:
    """The field `cause` of NonFinite, for a module with these inputs."""
    names = (name for name, parameter in module.named_parameters() if not is_finite(parameter))
    return next(names, "" if all(map(is_finite, tensors(inputs))) else "input")


def _bits(tensor: Tensor | None) -> str:
    return "" if tensor is None else hash_tensors({"": tensor})


def predict_differences(watch: ReplayObserver, now: Mapping[str, Any], origin: ResumePoint | None) -> None:
    """Set the reasons why the bits can differ, and the expected difference."""
    source, request, result = watch.source, watch.request, watch.result
    config = source.config
    saved = origin.trainer_state.definition if origin else {"strategy": config.strategy, **read_run_definition(source)}
    if saved.get("hardware") is None:
        saved = {name: value for name, value in saved.items() if name != "hardware"}
    of_task = [name for name in saved if name.startswith(TASK_SETTING_PREFIX)]
    where = origin.location_text if origin else str(source.run_dir)
    reasons = check_definition_changes(saved, now, [*CHANGEABLE_SETTINGS, *of_task], where)
    reasons = [f"{reason} ({where})" if origin else reason for reason in reasons]
    if config.strategy not in EXACT_STRATEGIES:
        ranks = source.logged.world_size
        reasons.append(f"strategy {config.strategy} guarantees no bits: the run had {ranks} rank{'s' * (ranks > 1)}")
    if config.launch.mesh:
        reasons.append(f"the run has split the model over --mesh {config.launch.mesh}")
    if request.check and reasons:
        raise UsageError(code="replay-check-not-guaranteed", run_dir=source.run_dir, reasons="; ".join(reasons))
    result.reasons = reasons
    result.expected = EXPECTED.get(config.compute.precision, EXPECTED["fp32"]) if reasons else 0.0


# ---- tasks


class _TaskReplay(TaskTrainer):
    """The training loop of a task, until the last step to repeat. It evaluates nothing, and calls no callback."""

    def __init__(
        self, parts: TrainingComponents, place: LockedRun, origin: ResumePoint | None, watch: ReplayObserver
    ) -> None:
        super().__init__(parts, place, origin)
        self._watch = watch

    def repeat(self) -> None:
        self._take_steps()

    def _record_step(self, record: StepRecord) -> None:
        self._progress.step = record.step

    def _after_step(self, record: StepRecord) -> bool:
        return self._watch.note_step(record)


def replay_task(watch: ReplayObserver) -> ReplayResult:
    """Repeat a step of a task."""
    request, source, config = watch.request, watch.source, watch.source.config
    world = World.from_env({}, device=config.launch.device)
    with process_group(world), use_deterministic_kernels() if config.strategy in EXACT_STRATEGIES else nullcontext():
        make_communicator()
        set_threads(config.launch.threads_per_rank, world)
        origin = watch.find_start_checkpoint(world)
        parts = prepare(replace(config, launch=replace(config.launch, mesh=None)), world)
        now = parts.definition
        predict_differences(watch, now, origin)
        if request.without and parts.stream is not None:
            raise UsageError(code="replay-without-in-stream")
        if origin is not None:
            parts.load(origin)
        elif config.model.init_from is not None:
            load_initial_weights(parts.replica, config.model.init_from, trust=source.trust, report=print_to_stderr)
        watch.attach(parts.replica)
        if config.model.batchnorm == "sync" and parts.stream is None:
            place = divmod(request.step - 1, parts.plan.steps_per_epoch)
            samples = parts.plan.global_indices(*place).tolist()
            watch.owners = {index: number % parts.plan.virtual_ranks for number, index in enumerate(samples)}
        loading = (
            replace(parts.loading, num_workers=0, filter_samples=watch.leave_out_samples)
            if request.without
            else parts.loading
        )
        task = replace(parts.task, loss=_watched(parts.task.loss, watch))
        parts = replace(parts, task=task, loading=loading)
        place = LockedRun(source.run_dir, source.logged.attempt, 0, None, now)
        try:
            _TaskReplay(parts, place, origin, watch).repeat()
        except PacelineError as error:
            if not watch.is_on or isinstance(error, UsageError):
                raise
            return watch.finish(error)
        watch.compare_state(parts.replica.state(), world)
    return watch.finish()


def _watched(loss: Loss, watch: ReplayObserver) -> Loss:
    def watched(outputs: Any, targets: Any) -> Any:
        result = loss(outputs, targets)
        values, weights = result if isinstance(result, tuple) else (result, None)
        watch.note_losses(values, weights)
        return result

    return watched


# ---- sessions


class _SessionReplay(Observer):
    """Ends the script after the last step to repeat."""

    def __init__(self, watch: ReplayObserver) -> None:
        config = watch.source.config
        self._watch, self._origin = watch, None
        self.options = {
            "strategy": config.strategy, "virtual_ranks": config.data.virtual_ranks, "resume": False, "report_to": None,
            "checkpoint_every": None, "device": config.launch.device, "backend": "auto",
        }  # fmt: skip
        self.inside = ExitStack()
        self.world: World | None = None

    def resume_point(self, world: World) -> ResumePoint | None:
        self.world = world
        self._origin = self._watch.find_start_checkpoint(world)
        now = {
            "strategy": self._watch.source.config.strategy, "hardware": hardware_facts(world.device),
            "threads_per_rank": torch.get_num_threads(),
        }  # fmt: skip
        predict_differences(self._watch, now, self._origin)
        return self._origin

    def wrap_strategy(self, name: str, apply: ApplyStrategy) -> ApplyStrategy:
        if self._origin is None and torch.initial_seed() >= MIN_RANDOM_SEED:
            raise UsageError(code="replay-unseeded")

        def applied(*arguments: Any, **keywords: Any) -> Strategy:
            replica = apply(*arguments, **keywords)
            number = len(self._watch.replicas)
            self._watch.attach(replica, f"{number + 1}/" if number else "")
            return replica

        return applied

    def on_loader(self, loader: Loader, *, per_virtual_rank: bool) -> None:
        if self._watch.request.without:
            loader.loading = replace(
                loader.loading, num_workers=0, workers={}, filter_samples=self._watch.leave_out_samples
            )

    def on_batch(self, inputs: Any, work: MicroBatchPlan | None) -> Any:
        if work is not None and self._watch.is_on:
            self.inside.enter_context(_LossFunctions(self._watch))
        return inputs

    def on_batch_end(self) -> None:
        self.inside.close()

    def on_backward(
        self, loss: Tensor, weight: float | Tensor | None, reduction: Reduction, micro_step: MicroStep | None
    ) -> None:
        watch = self._watch
        if not watch.is_on or watch.work is None or not isinstance(loss, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
            return
        key = watch.work.virtual_rank, watch.work.micro_batch
        noted = [sample.loss for sample in watch.samples.get(key, [])]
        total = sum(noted) / (1 if reduction == "sum" else len(noted) or 1)
        if watch.note_losses(loss, weight if isinstance(weight, Tensor) and weight.ndim else None):
            return
        value = float(loss.detach()) if loss.numel() == 1 else math.nan
        is_same = math.isclose(total, value, rel_tol=SAME_LOSS, abs_tol=1e-6) or not math.isfinite(total + value)
        if noted and not is_same:
            del watch.samples[key]  # only a part of the loss, or weighted

    def on_step(self, record: StepRecord) -> None:
        if self._watch.note_step(record):
            if record.step == self._watch.until and self.world is not None:
                self._watch.compare_state([shard for part in self.models for shard in part.state()], self.world)
            raise SystemExit(0)

    def on_print(self, words: Sequence[Any]) -> None:
        print(*words)


class _LossFunctions(TorchFunctionMode):
    """Inside, each loss function of torch that reduces a batch also computes the loss of each sample."""

    def __init__(self, watch: ReplayObserver) -> None:
        super().__init__()
        self._watch = watch

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if torch.is_grad_enabled() and (parameters := _reducing().get(func)) is not None:
            bound = parameters.bind(*args, **(kwargs or {}))
            bound.arguments |= {"reduction": "none"}
            for name in ("size_average", "reduce"):  # deprecated arguments that override `reduction`
                bound.arguments.pop(name, None)
            with torch.no_grad(), suppress(RuntimeError):  # some have no deterministic kernel
                self._watch.note_losses(func(*bound.args, **bound.kwargs))
        return result


@cache
def _reducing() -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    for function in vars(F).values():
        with suppress(TypeError, ValueError):  # not a function, or one in C
            if "reduction" in (parameters := signature(function)).parameters:
                found[function] = parameters
    return found


def replay_session(watch: ReplayObserver, script: Path, arguments: Sequence[str]) -> ReplayResult:
    """Repeat a step of a session by running its script."""
    observer = _SessionReplay(watch)
    try:
        with use_observer(observer), observer.inside, _as_program(script, arguments):
            runpy.run_path(str(script), run_name="__main__")
    except SystemExit as end:
        close_all_sessions(end)
    except BaseException as error:
        close_all_sessions(error)
        if not watch.is_on or isinstance(error, UsageError) or not isinstance(error, PacelineError):
            raise
        return watch.finish(error)
    if watch.result.loss is None:
        close_all_sessions()
        raise UsageError(code="replay-step-not-reached", value=watch.request.step, script=script)
    if not watch.samples:
        watch.result.unknown_losses = "not known. Pass one loss per sample to s.backward, or only a loss of torch"
    return watch.finish()


@contextmanager
def _as_program(script: Path, arguments: Sequence[str]) -> Generator[None]:
    before = sys.argv, [*sys.path]
    sys.argv, sys.path[:0] = [str(script), *arguments], [str(script.resolve().parent)]
    try:
        yield
    finally:
        sys.argv, sys.path[:] = before
