"""The loops of a session over data: their position in the run, the work between steps, and their end."""

import math
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase  # pyright: ignore[reportPrivateUsage]
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer

from paceline.checkpoint.shards import layout
from paceline.collectives.control import all_gather_object, raise_on_all_ranks, report_on_one_rank
from paceline.compute.flops import can_count
from paceline.config.choices import current_name
from paceline.config.definition import check_same
from paceline.data.fingerprint import CHANGING
from paceline.data.loader import MicroBatch
from paceline.data.plan import BatchPlan, rank_work, ranks_share
from paceline.errors import ExitCode, UsageError
from paceline.protocol.evidence import Phase
from paceline.rank.guard import Guard
from paceline.rank.world import World
from paceline.runs.progress import ProgressRecord, ProgressWriter
from paceline.seeding import preserved_streams, remembered_streams
from paceline.sessions.assumptions import COUNT, DATA, GRADIENTS, ORDER, PARAMETERS, PLACE
from paceline.sessions.collectives import SessionCollectives
from paceline.sessions.foreign_tensors import ForeignTensors
from paceline.sessions.loader import Loader
from paceline.sessions.prepared import COMPARED, PreparedModel
from paceline.sessions.registered import RegisteredObjects, check_no_scaler
from paceline.sessions.session_step import SessionStep
from paceline.sessions.wording import compare, json_copy, startup_message, write_session_settings
from paceline.stepping.totals import Votes
from paceline.train.consistency import check_replicas
from paceline.train.determinism import hardware_facts
from paceline.train.fit import PhaseClock, StepRecord
from paceline.train.progress import TrainingProgress

TRACK_EVERY = 50  # steps between two reports of the loss
SLOW_SECONDS = 1.0  # if reading a few samples takes longer, they are read only once

SAME_RATIO = 1e-6  # counts are sums in float32
CHANGED_DATA = (
    "If the loop draws or changes its data, the data must be the same after a resume. Draw them from the number of the "
    "epoch, random.Random(epoch), or at the start of the epoch from torch's, Python's or numpy's global generator"
)


class SessionLoop(SessionCollectives):
    """The methods of a session that iterate over data."""

    _seed: int
    _share: range
    _steps: SessionStep
    _progress: TrainingProgress
    _guard: Guard
    _clock: PhaseClock
    _report_to: str | None
    _parts: list[PreparedModel]
    _numbers: list[dict[str, Any]]
    _settings: dict[str, Any]
    _others: dict[str, Any]  # arguments that do not define the run
    _strategy: str
    _name: str
    _exact: bool
    _precision: str | None  # of the models; None: as the script sets it
    _virtual_ranks: int
    _where: dict[str, int]
    _resumed: dict[str, int] | None  # the position at which the run resumes, until the loop reaches it
    _streams: dict[str, Any] | None
    _loader: Loader | None = None  # the loader of the current or last training loop
    _loaders: list[Loader]  # created before the first step, in order
    _fingerprints: dict[int, tuple[Any, dict[str, Any], int | None]]
    """(dataset, fingerprint, probe) by id of the dataset, after the comparison over ranks; see `_check_data`"""
    _data: dict[str, Any]  # the part of the run's definition that describes the data of the current loop
    _saved_data: dict[str, Any] | None  # the same of the loop in which the run was saved
    _evaluates = False
    _is_damaged = False  # whether the state must not be saved, because an update was wrong or the state is incomplete
    saved: dict[str, Any]
    """additional values that each checkpoint saves (from rank 0): numbers, strings, lists and dictionaries of them"""
    _loader_states: dict[str, dict[str, Any]]  # the state of samplers in the checkpoint, by the number of the loader
    _registered: RegisteredObjects
    _foreign_tensors: ForeignTensors
    _epoch_streams: dict[str, str] | None  # the random streams at the beginning of the current epoch
    _phases = 0  # calls of s.epochs so far
    _in_epochs = False
    _max_steps: float  # the training ends after it: the limit of an observer or of `launch --check`
    _resumes = False
    _live = 0  # number of open iterators over training data
    _epochs = 0
    _opened = _closed = _stopped = False
    _broken: Exception | None = None

    @property
    def _moment(self) -> tuple[int, ...]:
        return self._progress.step, self._where["epoch"], int(self._in_epochs)

    def _check_all_here(self) -> None:
        """See SessionCollectives. Also for a training loop body that ranks run different numbers of times."""
        super()._check_all_here()
        micro_step, loader = self._steps.micro_step, self._loader
        if self.size == 1 or micro_step is None or micro_step.is_last or loader is None:
            return
        plan, work = loader.dealt, micro_step.work
        shares = (ranks_share(self._virtual_ranks, rank, self.size) for rank in range(self.size))
        if plan is not None and len({len(rank_work(plan, work.epoch, work.step, share)) for share in shares}) > 1:
            raise UsageError(code="collective-in-body")

    @contextmanager
    def evaluating(self) -> Generator[None]:
        """Inside, each rank has whole models with merged buffers, for a custom evaluation (a collective)."""
        with self._merged(), ExitStack() as stack, torch.no_grad():
            for part in self._parts:
                stack.enter_context(part.replica.gathered())
            yield

    def _iterate(self, loader: Loader) -> Iterator[Any]:
        self._check_whole()
        training = torch.is_grad_enabled() and any(part.replica.model.training for part in self._parts)
        return self._train(loader) if training else self._evaluate(loader)

    def _check_data(self, loader: Loader) -> dict[str, Any]:
        """The fingerprint of its data. The first call compares it over ranks (a collective)."""
        data = loader.dataset
        if (record := self._fingerprints.get(id(data))) is not None:
            if record[2] is None:
                return record[1]
            with preserved_streams():
                if (probe := loader.probe()) != record[2]:  # the loop has changed it
                    self._fingerprints[id(data)] = record = (data, loader.fingerprint(), probe)
            return record[1]
        began = time.perf_counter()
        with preserved_streams(), raise_on_all_ranks(self.world):
            fingerprint = loader.fingerprint()
        is_slow = time.perf_counter() - began > SLOW_SECONDS and "checksum of all of them" not in fingerprint
        by_rank: list[tuple[dict[str, Any], bool]] = all_gather_object((fingerprint, is_slow), self.world)
        texts = [str(rank_fingerprint) for rank_fingerprint, _ in by_rank]
        if len({*texts}) > 1:
            raise report_on_one_rank(
                DATA.error("; ".join(f"rank {rank} has {text}" for rank, text in enumerate(texts))), self.world
            )
        # a stream has no number of samples
        can_probe = "samples" in fingerprint and CHANGING not in fingerprint.values()
        can_probe = can_probe and not any(is_slow for _, is_slow in by_rank)
        with preserved_streams():
            self._fingerprints[id(data)] = (data, fingerprint, loader.probe() if can_probe else None)
        return fingerprint

    def _compare_replicas(self) -> None:
        if self.size > 1 and self._parts and self._progress.step and self._parts[0].replica.host is None:
            shards = [shard for part in self._parts for shard in part.state()]
            check_replicas(shards, self.world, self._progress.step, [part.replica.optimizer for part in self._parts])

    def _evaluate(self, loader: Loader) -> Generator[Any]:
        self._evaluates = True
        try:
            yield from self._evaluated(loader)
        finally:
            self._evaluates = False

    def _evaluated(self, loader: Loader) -> Generator[Any]:
        micro_step = self._steps.micro_step
        if not self._steps.is_over:
            raise UsageError(code="evaluation-inside-step")
        outside = self._steps.stream.outside if micro_step is not None else None
        restore = remembered_streams() if micro_step is not None else lambda: None
        self._check_data(loader)
        with nullcontext() if outside is None else outside.current():  # as a loop without a session draws
            plan = loader.drawn(self.world, None)
            loader.draw_ahead(plan)
        with self._merged(), self._guard.phase(Phase.EVALUATE), self._statistics_watched():
            try:
                for batch, samples in loader.evaluation(plan, self.world):
                    self._steps.check_evaluated(samples, self.size)
                    self._evaluated_batch = samples
                    yield batch if self._observer is None else self._observer.on_batch(batch, None)
                    self._guard.page.tick()
            finally:
                self._evaluated_batch = 0
                restore()

    def _train(self, loader: Loader) -> Generator[Any]:
        if self._progress.step >= self._max_steps:
            raise SystemExit(0)
        self._steps.check_only_loop()
        where, start = self._where, 0
        resumed = self._resumed
        if resumed is not None:
            if not self._in_epochs:  # for example to inspect a batch: s.backward raises an error here
                plan = loader.drawn(self.world, None)
                for micro_batches in loader.training(plan, self._share, where["passes"], 0):
                    yield from (batch.inputs for batch in micro_batches)
                return
            if self._skipped < resumed["pass"]:  # this loop had ended before the checkpoint
                self._skipped += 1
                return
            start = resumed["batch"]
        plan = loader.drawn(self.world, self._streams if resumed is not None else None, start, trains=True)
        with preserved_streams():
            self._open(loader, plan)
        self._resumed, where["batch"], self._loader, self._at_end = None, start, loader, False
        self._live += 1
        self._steps.keeps_stream = self._observer is None and loader.draws_nothing
        try:
            yield from self._passed(loader, plan, start)
        finally:
            self._live -= 1
            self._leave_stream()
            self._steps.keeps_stream = False

    def _passed(self, loader: Loader, plan: BatchPlan, start: int) -> Generator[Any]:
        where, steps, observer = self._where, self._steps, self._observer
        for part in self._parts:
            part.check_parameters()
        one_each = plan.virtual_ranks == self.size and plan.accumulation == 1
        self._clock(Phase.DATA)
        for micro_batches in loader.training(plan, self._share, where["passes"], start):
            if self.size > 1:
                self._compare_place(loader)
            for batch in steps.run(self._at, micro_batches, one_each=one_each):
                try:
                    yield batch.inputs if observer is None else observer.on_batch(batch.inputs, batch.work)
                except GeneratorExit:
                    self._left(loader, micro_batches, plan)
                    raise
                if observer is not None:
                    observer.on_batch_end()
            self._between(loader, micro_batches, plan)
            if self._progress.step >= self._max_steps:
                break
            self._stop_if_asked()
            self._clock(Phase.DATA)
        if not self._at_end and where["batch"]:  # the end of the epoch was not known before
            self._progress.after_step(Votes(), partial(self._loop_state, self.world), save=True, wait=True)
        self._next_pass()

    def _leave_stream(self) -> None:
        """Let random numbers come from the streams outside of micro-batches, if they do not yet."""
        if self._steps.micro_step is None and not self._closed:
            self._steps.stream.leave()

    def _compare_place(self, loader: Loader) -> None:
        """Compare values that must be equal on all ranks in this step. `_compared_names` has their names."""
        where, batch = self._where, self._where["batch"]
        data = self._fingerprints[id(loader.dataset)][2] or 0
        numbers = (where["epoch"], where["passes"], batch, data, loader.order_hash(batch))
        for part in self._parts:
            numbers += part.compared()
        self._progress.order.compared = numbers

    def _compared_names(self) -> list[str]:
        part_names = [f"{name} {part.number}" for part in self._parts for name in COMPARED]
        return ["epoch", "loop", "batch", "data", "order", *part_names]

    def _explain(self, differing: dict[str, list[int]]) -> UsageError:
        places = [name for name in ("epoch", "loop", "batch") if name in differing]
        gradients = [part for part in self._parts if f"gradients {part.number}" in differing]
        if places:
            positions = "; ".join(f"{name} {', '.join(map(str, differing[name]))}" for name in places)
            return PLACE.error(f"{positions} on ranks 0 to {self.size - 1}")
        if "order" in differing:
            return ORDER.error(f"at {self._at} of a loop over the data")
        if gradients:
            self._is_damaged = True
            return GRADIENTS.error(gradients[0].differing_gradients())
        if "data" in differing:
            return DATA.error(f"at {self._at}: the loop changed it differently on each rank")
        if any(name.startswith("trained") for name in differing):
            self._is_damaged = True
            return PARAMETERS.error(f"some ranks have frozen parameters that others train, at {self._at}")
        if any(name.startswith("learning rates") for name in differing):
            self._is_damaged = True
            return UsageError(code="learning-rates-differ", place=self._at)
        return UsageError(code="hooks-differ", place=self._at, counts=next(iter(differing.values())))

    def _check_optimizer(self, optimizer: Optimizer, *_: Any) -> None:
        """Hook of torch before each optimizer step: raise UsageError for an optimizer that was not prepared.

        This holds if losses of s.backward depend on a tensor that it trains outside of prepared models.
        """
        micro_step = self._steps.micro_step
        if (
            id(optimizer) in self._steps.optimizers
            or micro_step is None
            or not micro_step.weights
            or (self.size == 1 and self._steps.phases.alone)
        ):
            return
        trained = {id(p) for group in optimizer.param_groups for p in group["params"] if p.grad is not None}
        if trained & {id(leaf) for leaf in self._steps.foreign_leaves()}:
            raise PARAMETERS.error(
                f"a {type(optimizer).__name__} that was not prepared trains a tensor that the loss depends on"
            )

    @contextmanager
    def _statistics_watched(self) -> Generator[None]:
        """Inside, a model that was not prepared must not collect batch norm statistics, which would be per rank."""
        prepared = {id(module) for part in self._parts for module in part.replica.model.modules()}

        def watch(module: nn.Module, _: Any) -> None:
            collects = isinstance(module, _NormBase) and module.training and module.track_running_stats
            if collects and module.momentum is None and id(module) in prepared:
                raise UsageError(code="update-bn-of-prepared")
            if self.size > 1 and collects and id(module) not in prepared:
                raise UsageError(code="update-bn-of-share")

        hook = register_module_forward_pre_hook(watch)
        try:
            yield
        finally:
            hook.remove()

    @property
    def _at(self) -> str:
        return f"epoch {self._where['epoch'] + 1}, batch {self._where['batch'] + 1}"

    def _left(self, loader: Loader, micro_batches: Sequence[MicroBatch], plan: BatchPlan) -> None:
        """The loop is left by break or return in a body. An error here is raised at the next call."""
        steps = self._steps
        try:
            if steps.untouched:
                steps.give_up()
            elif steps.is_whole:
                steps.leave()  # after its last backward the step is complete
                self._between(loader, micro_batches, plan, was_left=True)
                self._clock(Phase.USER)
            else:
                self._broken = UsageError(code="loop-left-in-step", place=self._at)
        except Exception as error:
            self._broken = error
        # not yet `_next_pass`: if an error has ended this one, the run resumes here
        self._was_left = True

    def _next_pass(self) -> None:
        self._where |= {"pass": self._where["pass"] + 1, "passes": self._where["passes"] + 1, "batch": 0}
        self._clock(Phase.USER)

    _at_end = False  # whether the last step was known to be the last of its loop, so that the state is already saved
    _was_left = False  # whether the last loop was left before its end
    _skipped = 0  # loops over data in the resumed epoch that had ended before the checkpoint

    def _open(self, loader: Loader, plan: BatchPlan) -> None:
        if not self._parts:
            raise UsageError(code="loop-without-model")
        batch = {"global_batch": plan.global_batch, "last_batch": plan.last_batch, "accumulation": plan.accumulation}
        self._data = {**batch, "data": {"training data": self._check_data(loader)}}
        if self._opened:
            return
        self._opened = True
        self._progress.order.explain, self._progress.order.names = self._explain, self._compared_names
        definition: dict[str, Any] = {
            **self._settings, "task": self._name, **self._data, "batchnorm": "local",
            "optimizer": [type(part.optimizer).__name__ for part in self._parts],
            "hardware": hardware_facts(self.device),
            "threads_per_rank": torch.get_num_threads() if self._exact else None,
            "precision": self._precision or "fp32",
        }  # fmt: skip
        if (origin := self._progress.origin) is not None and self._saved_data is not None:
            # the definition is that of the first loop; the interrupted loop may be a different one
            try:
                check_same(self._saved_data, self._data, (), origin.where)
            except UsageError as error:
                raise UsageError.of(error, after=f" {CHANGED_DATA}") from None
            saved = {current_name(name): value for name, value in origin.content.definition.items()}
            definition |= {name: saved[name] for name in self._data}
        compare(definition, self._progress.origin, len(self._parts), len(self._numbers), self.world, exact=self._exact)
        self.print(startup_message(plan, self.world, self._strategy, self._name))
        progress = self._progress
        models = [model for part in self._parts for model in (part.replica.model, part.replica.module)]
        if self._observer is None and progress.use.given and not self._exact and can_count(models):
            self._steps.flops = progress.use.count
        self._registered.check_all_there()
        for part in self._parts:
            part.numbers()  # raises an error if its state cannot be saved
        if self._steps.saves:
            self._look_around(self._registered.look_around)
            self._registered.check_schedulers([optimizer for part in self._parts for optimizer in part.optimizers])
            for part in self._parts:
                layout(part.state())  # raises an error if a checkpoint cannot store its state
        if plan.virtual_ranks > self.size or plan.accumulation > 1 or any(p.replica.sharded for p in self._parts):
            check_no_scaler()
        if progress.place is not None:
            progress.place = replace(progress.place, definition=definition)
            settings = {"task": self._name, **self._settings, **batch, "epochs": self._epochs or 1, **self._others}
            write_session_settings(progress.place, settings)
        progress.open(
            self._parts, plan, self._share, self._facts,
            listed=plan.own_order, report_to=self._report_to, others=self._registered.state,
        )  # fmt: skip

    def _facts(self) -> dict[str, Any]:
        metrics = self._progress.metrics
        results = {"test_metrics": metrics or None, "test_accuracy": metrics.get("accuracy")}
        return {"task": self._name, "strategy": self._strategy, **results}

    def _between(
        self, loader: Loader, micro_batches: Sequence[MicroBatch], plan: BatchPlan, *, was_left: bool = False
    ) -> None:
        self._check_periodically()
        done = self._steps.end()
        batch = self._where["batch"]
        samples = loader.samples(micro_batches[0].work)
        self._where["batch"] += 1
        progress, lr = self._progress, float(self._parts[0].optimizer.param_groups[0]["lr"])
        record = StepRecord(progress.step + 1, done, lr, micro_batches, self._clock.take(), self._clock.borders)
        progress.record_step(record, samples, tracked=record.step % TRACK_EVERY == 0)
        progress.rollback_point(record)
        if self._observer is not None:
            self._observer.on_step(record)
        if ProgressWriter.here is not None:
            ProgressWriter.here.step(self._where["batch"], plan.known_steps, lambda: self._report(plan, done.loss))
        self._stopped = done.votes.stop > 0
        self._at_end = is_end = loader.is_end(batch, done.votes.coming) and not was_left
        for part in self._parts:
            part.stepped()
        if self._steps.saves:
            if self._registered.step_ended():
                self._leave_stream()
                self._look_around(self._registered.look_again)
            if self.saved:
                json_copy(self.saved, strict=True)
        progress.after_step(
            done.votes, partial(self._loop_state, self.world), save=self._stopped or is_end, wait=is_end
        )

    def _check_periodically(self) -> None:
        """In steps 1, 2, 4, 8, ... and the step after each: check foreign tensors and the weights of losses."""
        step = self._progress.step + 1
        begins, follows = step & (step - 1) == 0, (step - 1) & (step - 2) == 0
        if not (begins or follows) or (self.size == 1 and self._steps.phases.alone):
            return
        leaves = self._steps.foreign_leaves()
        try:
            self._foreign_tensors.compare(leaves if follows else ())
            self._check_weights()
        except UsageError:
            self._is_damaged = True
            raise
        self._foreign_tensors.keep(leaves if begins else ())

    def _check_weights(self) -> None:
        """Raise UsageError if losses are means over targets, and their weights are not proportional to the targets."""
        targets = [None if count is None else (float(count), float(weight)) for count, weight in self._steps.targets]
        by_rank: list[list[Any]] = all_gather_object(targets, self.world)
        if any(target is None for rank_targets in by_rank for target in rank_targets):
            return  # a different loss, or several: their weights cannot be checked
        ratios = [count / weight for rank_targets in by_rank for count, weight in rank_targets if weight]
        if ratios and max(ratios) - min(ratios) > SAME_RATIO * max(ratios):
            counts = "; ".join(
                f"rank {rank}: " + ", ".join(f"{count:g} (weight {weight:g})" for count, weight in rank_targets)
                for rank, rank_targets in enumerate(by_rank)
            )
            raise report_on_one_rank(COUNT.error(counts), self.world)

    def _report(self, plan: BatchPlan, loss: float) -> ProgressRecord:
        step, steps = self._where["batch"], plan.known_steps
        epoch = self._where["epoch" if self._epochs else "passes"]
        remaining = max(0, steps - step) * plan.global_batch
        rate, finite_loss = self._progress.throughput.recent(), loss if math.isfinite(loss) else None
        return ProgressRecord(epoch, self._epochs, step, steps, finite_loss, rate, remaining)

    def _stop_if_asked(self) -> None:
        if self._stopped:
            raise SystemExit(int(ExitCode.SAVED))

    def _check_whole(self) -> None:
        if self._closed:
            raise UsageError(code="session-has-ended")
        if self._broken is not None:
            raise self._broken
        self._stop_if_asked()
        if self._was_left:
            self._was_left = False
            self._next_pass()

    @contextmanager
    def _merged(self) -> Generator[None]:
        with ExitStack() as stack:
            was_merged, self._steps.merged = self._steps.merged, True
            try:
                if not was_merged:
                    for part in self._parts:
                        stack.enter_context(part.replica.merged_buffers())
                yield
            finally:
                self._steps.merged = was_merged

    def _votes(self) -> Any:
        return self._progress.votes(coming=0.0 if self._loader is None else self._loader.coming)

    def _loop_state(self, world: World | None = None) -> dict[str, Any]:
        """With a `world` a collective; without, as far as this rank knows."""
        self._leave_stream()
        if world is not None:
            self._look_around(self._registered.look_around)
        state: dict[str, Any] = {"where": dict(self._where), "parts": [part.numbers() for part in self._parts]}
        state["saved"] = json_copy(self.saved, strict=world is not None)
        state["epoch_streams"] = self._epoch_streams
        state["data"], state["registered"] = self._data, self._registered.numbers(world)
        samplers = {str(n): other.sampler_state for n, other in enumerate(self._loaders) if other is not self._loader}
        state["loaders"] = {number: sampler for number, sampler in samplers.items() if sampler is not None}
        streams = None if self._loader is None else self._loader.position(self._where, world)
        return state if streams is None else state | {"streams": streams}

    def _look_around(self, look: Callable[..., None]) -> None:
        """Raise UsageError, and let nothing be saved, if the loop has state that would be lost."""
        optimizers = [prepared.optimizer for part in self._parts for prepared in part.optimizers]
        try:
            look([part.replica.model for part in self._parts], optimizers, self._steps.notes.once)
        except UsageError:
            self._is_damaged = True
            raise
