"""`paceline.session()`: a custom training loop on any number of ranks, with the result of one process.

    with paceline.session() as s:
        model, optimizer, scheduler = s.prepare(Net(), make_optimizer, make_scheduler)
        train = s.loader(train_set, global_batch=64)
        for epoch in s.epochs(14):
            for x, y in train:
                optimizer.zero_grad()
                loss = F.nll_loss(model(x), y)
                s.backward(loss)
                optimizer.step()
                scheduler.step()
            s.log(accuracy=s.mean(hits, count))

It works under `paceline launch`, torchrun and srun. With plain python and in a notebook it is a single process.
"""

import os
import random
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, overload

import numpy
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset

from paceline.collectives.control import all_gather_tensors, error_on_one_rank, raise_on_all_ranks, sum_over_ranks
from paceline.config.strategies import StrategyName
from paceline.data.loader import LoadingOptions
from paceline.data.plan import LastBatch
from paceline.errors import UsageError
from paceline.seeding import preserve_generator_states
from paceline.sessions.arguments import SessionConfig, with_argument_checks
from paceline.sessions.construction import (
    OptimizerLike,
    OptimizersLike,
    SchedulerLike,
    SchedulersLike,
    make_loader,
    prepare_model,
    prepare_optimizer,
)
from paceline.sessions.lifecycle import MIN_RANDOM_SEED, SessionRun, install_exit_hooks, open_sessions
from paceline.sessions.loader import Loader
from paceline.sessions.loop import EvaluationLoop, TrainingLoop
from paceline.sessions.observer import ApplyStrategy, current_observer
from paceline.sessions.prepared import PreparedModel
from paceline.sessions.state import SessionState
from paceline.stepping.micro_step import Reduction
from paceline.strategies import STRATEGIES
from paceline.strategies.optimizers import OptimizerSequence, each_optimizer


class Session:
    """The training of this process among all ranks, for a custom loop. `paceline.session()` returns it."""

    def __init__(self, config: SessionConfig) -> None:
        self._config, self._run = config, SessionRun(config)
        self.world, self._progress, self._observer = self._run.world, self._run.progress, self._run.observer
        self._state = SessionState(self._run)
        self._loop = TrainingLoop(config, self._run, self._state)
        self._steps = self._loop.step
        self._evaluation = EvaluationLoop(self._run, self._state, self._steps, self._loop.checks)
        # for the hooks of `install_exit_hooks`
        self.explain_error, self.record_exit_code = self._loop.explain_error, self._loop.record_exit_code
        open_sessions.append(self)

    @property
    def rank(self) -> int:
        """The rank of this process, from 0."""
        return self.world.rank

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.world.size

    @property
    def device(self) -> torch.device:
        """The device of this rank."""
        return self.world.device

    @property
    def step(self) -> int:
        """Number of steps since the start of the run. A step is a global batch, with or without an update."""
        return self._progress.step

    @property
    def batch(self) -> int:
        """Number of the current global batch in the epoch, from 0."""
        return self._loop.position.batch

    @property
    def last(self) -> bool:
        """Whether this is the last micro-batch of the step on this rank, for actions once per step."""
        return self._steps.is_final_micro_batch

    @property
    def samples(self) -> int:
        """Number of counted samples of the current batch; 0 for a dummy batch and for one that an audit repeats."""
        micro_step = self._steps.micro_step
        return 0 if micro_step is None or micro_step.work.is_repeated else micro_step.samples

    @property
    def saved(self) -> dict[str, Any]:
        """Values that each checkpoint saves in addition, from rank 0: numbers, strings, lists and dicts of them."""
        return self._state.values

    @saved.setter
    def saved(self, values: dict[str, Any]) -> None:
        self._state.values = values

    @overload
    def prepare(self, model: nn.Module, optimizer: OptimizerLike) -> tuple[nn.Module, Optimizer]: ...
    @overload
    def prepare(
        self, model: nn.Module, optimizer: OptimizerLike, scheduler: SchedulerLike
    ) -> tuple[nn.Module, Optimizer, LRScheduler]: ...
    @overload
    def prepare(self, model: nn.Module, optimizer: OptimizersLike) -> tuple[nn.Module, list[Optimizer]]: ...
    @overload
    def prepare(
        self, model: nn.Module, optimizer: OptimizersLike, scheduler: SchedulersLike
    ) -> tuple[nn.Module, list[Optimizer], list[LRScheduler]]: ...
    def prepare(self, model: nn.Module, optimizer: Any, scheduler: Any = None) -> Any:
        """Make a model, its optimizer and its scheduler this rank's part of the training (a collective).

        The model moves to this rank's device, `s.device`, with its parameters and buffers, as `model.to(s.device)`
        does. The state of an existing optimizer moves with it.

        Args:
            model: a module on any device. All ranks get rank 0's weights.
            optimizer: a torch optimizer over the model's parameters, or a function that makes one from parameters. A
                list for several optimizers of different parameters.
            scheduler: over that optimizer, or a function that makes one from the optimizer. None: no scheduler. With
                several optimizers: a list with one for each, or a function, which is called for each.

        Returns:
            (model, optimizer, scheduler), or (model, optimizer) without a scheduler. Objects that you pass are returned
            themselves. Call the returned model in the loop. With several optimizers: lists of them and the schedulers.

        Raises:
            UsageError: on one rank, if one of them is not supported; ReportedByPeer on the others.
        """
        if self._loop.is_open:
            raise UsageError(code="prepared-too-late")
        if (part := self._state.find_model(model)) is not None:  # another optimizer, for other parameters
            prepared = prepare_optimizer(part, optimizer, scheduler, self.world)
            count = len(each_optimizer(prepared))
            self._state.restore_added_optimizers(part, count)
        else:
            self._check_seed()
            factory = STRATEGIES[self._config.strategy]
            options = self._config.strategy_options
            apply: ApplyStrategy = partial(factory, virtual_ranks=self._run.virtual_ranks, **options)
            if self._observer is not None:
                apply = self._observer.wrap_strategy(self._config.strategy, apply)
            number = len(self._state.models)
            precision = self._run.precision
            part = prepare_model(model, optimizer, scheduler, apply, self.world, number, self._steps, precision)
            self._state.add_model(part)
            if self._observer is not None:
                self._observer.models = self._state.models
            prepared, count = part.replica.optimizer, len(part.optimizers)
        optimizers = [entry.optimizer for entry in part.optimizers[-count:]]
        schedulers = [entry.scheduler for entry in part.optimizers[-count:]]
        if not isinstance(prepared, OptimizerSequence):
            (optimizers,), (schedulers,) = optimizers, schedulers
        result = (part.replica.module, optimizers)
        return result if scheduler is None else (*result, schedulers)

    def _check_seed(self) -> None:
        is_unseeded = self._config.seed is None and torch.initial_seed() >= MIN_RANDOM_SEED
        if self._config.is_exact and is_unseeded and self._progress.origin is None:
            self._state.notes.once(
                "the session has no seed, and torch was not seeded: the initial weights, and so the digest, differ "
                "between runs. Set session(seed=...), or call torch.manual_seed before the model is created"
            )

    def register(self, name: str, thing: Any, *, saved: bool = True) -> None:
        """Save an object with every checkpoint, and restore it if the run resumes, for example an average of the model.

        Args:
            name: its name in checkpoints.
            thing: an object with `state_dict()` and `load_state_dict(state)`; a dict or list of tensors, numbers and
                strings, which is restored in place; or a random generator of torch, numpy or Python. Its state must be
                equal on all ranks.
            saved: False for an object that need not be saved: then paceline does not report that it would be lost.

        Raises:
            UsageError: the name is taken, the object has no state, the checkpoint of a resume does not contain it, or
                the first batch has begun (the last two only with `saved`).
        """
        if self._observer is not None:
            self._observer.on_register(thing)
        if saved and self._loop.is_open:
            raise UsageError(code="registered-too-late")
        self._state.register(name, thing, saved=saved)

    @partial(with_argument_checks, where="s.loader()")
    def loader(
        self,
        data: Dataset[Any] | DataLoader[Any] | Iterable[Any],
        *,
        global_batch: int | None = None,
        batch_size: int | None = None,
        per_rank: bool = False,
        accumulation: int = 1,
        micro_batch: Literal["auto"] | None = None,
        shuffle: bool | None = None,
        last_batch: LastBatch = "keep",
        num_workers: int = 0,
        collate: Callable[[list[Any]], Any] | None = None,
        split: bool = False,
    ) -> Loader:
        """A loader for batches of `data`, distributed over the ranks, on the device of this rank.

        Each tensor of a batch moves to `s.device`, in nested tuples, lists, dicts and dataclasses too. The containers
        keep their types. On a CUDA GPU the copy comes from pinned memory and runs while the previous batch computes.
        Numpy arrays, numbers, strings and objects of other classes are not moved.

        Args:
            data: a map-style dataset; a DataLoader, whose dataset, collate function, workers and order are used; or
                any other iterable, a stream. The batch size of a DataLoader is the global batch.
            global_batch: number of samples per step, over all ranks.
            batch_size: alternative to `global_batch`: samples per micro-batch of each virtual rank.
            per_rank: the batch size of the DataLoader is that of each virtual rank.
            accumulation: number of micro-batches per virtual rank and step.
            micro_batch: "auto" finds the smallest accumulation that fits into the memory of every rank. For this the
                loop body first runs on dummy batches of growing size (s.samples is 0), which change no state of the
                training. A checkpoint contains the result.
            shuffle: whether to shuffle the samples in each epoch (default: True).
            last_batch: for the last, incomplete batch of an epoch: "keep", "drop", or "pad" with repeated samples.
            num_workers: loader processes of each rank.
            collate: samples -> batch. Default: default_collate of torch.
            split: for a stream with shards: each rank reads only those of its virtual ranks. Default: it reads all.

        Raises:
            UsageError: the data or a setting is not supported.
        """
        if split and self._config.virtual_ranks is None:
            raise UsageError(code="split-without-virtual-ranks")
        if micro_batch is not None:
            if accumulation != 1 or batch_size is not None:
                raise UsageError(code="micro-batch-set")
            if self._loop.is_open:
                raise UsageError(code="loader-of-auto-too-late")
        loader = make_loader(
            data, self._batches, self._run, split,
            LoadingOptions(self.device, num_workers, collate, page=self._run.guard.page, ahead=self._steps.ahead),
            shuffle=shuffle, global_batch=global_batch, batch_size=batch_size, per_rank=per_rank,
            accumulation=accumulation, last_batch=last_batch,
        )  # fmt: skip
        loader.is_unsplit = micro_batch is not None
        if self._observer is not None:
            self._observer.on_loader(loader, per_virtual_rank=per_rank or batch_size is not None)
        if not self._loop.is_open:
            self._state.add_loader(loader)
        return loader

    def _batches(self, loader: Loader) -> Iterator[Any]:
        self._loop.check_usable()
        is_training = torch.is_grad_enabled() and any(part.replica.model.training for part in self._state.models)
        return self._loop.batches(loader) if is_training else self._evaluation.batches(loader)

    def epochs(self, count: int) -> Generator[int]:
        """The remaining epochs of `count`: 0, 1, ..., after a resume from the interrupted epoch on.

        Each call begins with epoch 0. After a resume, a call that had ended before the checkpoint yields no epoch.

        Args:
            count: number of epochs of the run, at least 1. It includes the epochs before a resume.

        Yields:
            The number of the epoch, from 0.

        Raises:
            UsageError: when the loop begins, if `count` is below 1; at the start of an epoch, if the session has ended
                or an iterator over a loader is still open.
        """
        return self._loop.epochs(count)

    def backward(
        self,
        loss: Tensor,
        weight: float | Tensor | None = None,
        *,
        reduction: Reduction = "mean",
        more: bool = False,
        only: Optimizer | Iterable[Optimizer] = (),
        retain_graph: bool = False,
    ) -> None:
        """Compute gradients. After the last micro-batch of a step, .grad is that of the mean of the global batch.

        Args:
            loss: the mean over the current batch, (); or one value per sample, (B, ...).
            weight: for a mean: the number of its values, for example mask.sum() for tokens. Default: the samples of the
                batch. For values per sample: a tensor of their shape.
            reduction: "sum" for a loss that is a sum over samples.
            more: True if another backward of this step follows. Gradients are summed over ranks after the last one.
            only: optimizers that need gradients. Gradients of other models are dropped.
            retain_graph: keep the graph for another backward, as in torch.

        Raises:
            UsageError: outside a training loop, or for a loss or weight that cannot be combined over ranks.
            TrainingError: the loss or a gradient is not finite, or the ranks have called different collectives. With
                `local_steps`, errors other than those of gradients may only be raised in the next iteration.
        """
        micro_step = self._steps.micro_step
        if self._observer is not None:
            self._observer.on_backward(loss, weight, reduction, micro_step)
        self._loop.check_usable()
        if self._evaluation.is_running and micro_step is None:
            raise UsageError(code="backward-in-evaluation")
        if self._config.resume and not self._loop.in_epochs:
            raise UsageError(code="loop-without-epochs")
        parts = [] if only == () else self._trained_by([only] if isinstance(only, Optimizer) else only)
        self._steps.backward(loss, weight, reduction, more, parts, retain_graph)
        if self._observer is not None:
            self._observer.on_gradients(micro_step)

    def _trained_by(self, optimizers: Iterable[Optimizer]) -> list[PreparedModel]:
        wanted_ids = {id(optimizer) for optimizer in optimizers}
        part_by_id = {id(prepared.optimizer): part for part in self._state.models for prepared in part.optimizers}
        if not wanted_ids <= {*part_by_id}:
            raise UsageError(code="only-not-prepared")
        return [part for part in self._state.models if any(part_by_id[key] is part for key in wanted_ids)]

    def clip_grad_norm(self, max_norm: float, model: nn.Module | None = None) -> Tensor:
        """Scale the gradients of a model so that their global norm is at most `max_norm`.

        It equals torch's clip_grad_norm_, also if gradients are sharded (a collective then). Before the last
        micro-batch of a step it does nothing and returns 0.

        Args:
            max_norm: the largest norm. Gradients with a smaller norm, or with one that is not finite, do not change.
            model: as `prepare` has returned it. None: the only model.

        Returns:
            The norm before, () on `s.device`.

        Raises:
            UsageError: the model was not prepared, or it is None and the session does not have exactly one.
        """
        if self._steps.micro_step is not None and not self._steps.micro_step.is_last:
            return torch.zeros((), device=self.device)
        norm = self._part(model).replica.clip_grad_norm(max_norm).result()
        return torch.full((), norm, dtype=torch.float64, device=self.device)

    def log(self, values: Mapping[str, float] | None = None, **more: float) -> None:
        """Log numbers of the loop: rank 0 prints them and writes them to the run folder.

        It is not a collective: rank 0 logs the numbers that it has. Add them up over ranks first, with `sum` or `mean`.

        Args:
            values: numbers by name: floats, or tensors with one element.
            more: further numbers as keyword arguments, as in s.log(accuracy=0.9).
        """
        if self._loop.in_trial:
            return
        numbers = {name: float(value) for name, value in {**(values or {}), **more}.items()}
        if self._observer is not None:
            self._observer.on_numbers({f"logged {name}": value for name, value in numbers.items()})
        progress = self._progress
        progress.metrics, progress.evaluated = progress.metrics | numbers, progress.step
        progress.log_evaluation(progress.step, numbers)

    def throughput(self) -> dict[str, float]:
        """The speed of the run over the last 50 steps, by the clock of this rank: `s.log(s.throughput())`.

        Returns:
            The known ones of samples_per_second, tokens_per_second, flops_per_second and mfu (docs/speed.md). Empty in
            the first steps, and under `paceline verify`.
        """
        return (
            {}
            if self._observer is not None
            else self._progress.use.throughput_metrics(self._progress.throughput.recent_rate())
        )

    def weights(self, model: nn.Module | None = None) -> dict[str, Tensor]:
        """The state dict of the whole model, with buffers merged over virtual ranks (a collective).

        Args:
            model: as `prepare` has returned it. None: the only model.

        Returns:
            Parameters and persistent buffers by their names in the model, as copies, on every rank. The parameters are
            whole, also if the strategy shards them. With strategy fsdp they are on the CPU.

        Raises:
            UsageError: the model was not prepared, or it is None and the session does not have exactly one.
            TrainingError: the state differs between ranks, for example after a bit flip.
        """
        return self._weights(self._part(model))

    def _weights(self, part: PreparedModel, names: Collection[str] | None = None) -> dict[str, Tensor]:
        self._state.compare_replicas(self.step)
        with self._evaluation.use_merged_buffers():
            return {name: tensor.detach().clone() for name, tensor in part.replica.weights(names).items()}

    def save(self, model: nn.Module | None, path: str | os.PathLike[str], *, adapter: bool = False) -> None:
        """Save the state dict of the whole model. Rank 0 writes the file atomically (a collective).

        The format is safetensors for a name that ends with .safetensors, otherwise that of torch.save.

        Args:
            model: as `prepare` has returned it. None: the only model.
            path: the file; with `adapter` the folder.
            adapter: save only the adapter of peft, for `PeftModel.from_pretrained(base, path)` or
                `paceline.load_adapter`. Other weights are not gathered.

        Raises:
            UsageError: with `adapter`, if the model has no adapter, or if parameters outside of it were trained.
        """
        from paceline.train.weights import save

        part, target = self._part(model), Path(path)
        if adapter and part.adapters is None:
            error = UsageError(code="no-adapter", kind=type(part.replica.model).__name__)
            raise error_on_one_rank(error, self.world)
        if self._observer is not None:
            return
        if adapter and part.adapters is not None:
            self.main(part.adapters.write, target, self._weights(part, part.adapters.weight_names))
        else:
            self.main(partial(save, pickled=target.suffix != ".safetensors"), self._weights(part), target)

    def _part(self, model: nn.Module | None) -> PreparedModel:
        models = self._state.models
        part = models[0] if model is None and len(models) == 1 else self._state.find_model(model)
        if part is None:
            raise UsageError(code="model-not-named" if model is None else "model-not-prepared", count=len(models))
        return part

    @contextmanager
    def evaluating(self) -> Generator[None]:
        """Inside, each rank has whole models with merged buffers, for a custom evaluation (a collective)."""
        with self._evaluation.use_merged_buffers(), ExitStack() as stack, torch.no_grad():
            for part in self._state.models:
                stack.enter_context(part.replica.gathered())
            yield

    def sum(self, *numbers: float | Tensor) -> Any:
        """The sum of a number over all ranks, as a float. For several numbers, a tuple of sums (a collective).

        All ranks call it from the same line of the program, with the same count of numbers.

        Args:
            numbers: floats, or tensors with one element. They are added in float64.

        Returns:
            The sum, the same on all ranks; for several numbers a tuple with a sum for each.

        Raises:
            UsageError: in a loop body that ranks run different numbers of times. In training, call it under
                `if s.last:`; in an evaluation, after the loop.
            TrainingError: on one rank, if ranks have called it from different lines; ReportedByPeer on the others.
        """
        moment = self._check_collective_position()
        values = [float(number) for number in numbers]
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        sums: list[float] = sum_over_ranks(tensor, "numbers of the loop", where=moment).tolist()
        return sums[0] if len(sums) == 1 else tuple(sums)

    def mean(self, total: float | Tensor, count: float | Tensor) -> float:
        """The sum of `total` over all ranks, divided by that of `count` (a collective).

        Args:
            total: a sum over the samples of this rank, e.g. the number of correct predictions.
            count: the number of these samples; 0 for a rank without samples.

        Returns:
            The mean over the samples of all ranks, the same on all ranks.

        Raises:
            UsageError: all counts are 0; and as `sum`.
            TrainingError: as `sum`.
        """
        total, count = self.sum(total, count)
        if count == 0:
            raise UsageError(code="mean-of-nothing")
        mean = float(total / count)
        if self._observer is not None:
            self._observer.on_numbers({"s.mean": mean})
        return mean

    def any(self, flag: bool | Tensor) -> bool:
        """Whether `flag` is true on any rank; the same result on all ranks (a collective).

        Args:
            flag: the value of this rank, e.g. whether it wants to stop. A tensor must have one element.

        Raises:
            UsageError, TrainingError: as `sum`.
        """
        return self.sum(float(bool(flag))) > 0

    def gather(self, values: Tensor) -> Tensor:
        """(n, ...) on each rank -> (sum of n, ...) on every rank, in rank order, without padding (a collective).

        In an evaluation loop, for one value per sample of the batch, the result is in the order of the batch.

        Args:
            values: (n, ...) on `s.device`. n may differ between ranks and may be 0; the dtype and the other dimensions
                are equal.

        Returns:
            (sum of n, ...), a copy without gradients, the same on all ranks.

        Raises:
            UsageError: `values` has no dimension, or the ranks' dtypes or other dimensions differ; and as `sum`.
            TrainingError: as `sum`.
        """
        from paceline.train.metrics import concatenate_in_sample_order, virtual_rank_order

        moment = self._check_collective_position()
        values = values.detach()
        with raise_on_all_ranks(self.world):
            if values.ndim == 0:
                raise UsageError(code="gather-of-number")
        parts: list[Tensor] = all_gather_tensors(values, self.world, "tensors of the loop", where=moment)
        shapes = [([*part.shape], str(part.dtype)) for part in parts]
        if len({(tuple(shape[1:]), dtype) for shape, dtype in shapes}) > 1:
            raise error_on_one_rank(UsageError(code="gather-shapes-differ", shapes=shapes), self.world)
        return concatenate_in_sample_order(parts, virtual_rank_order(self._evaluation.samples, self.size))

    def _check_collective_position(self) -> tuple[int, ...]:
        samples = self._evaluation.samples
        if 0 < samples < self.size:
            raise UsageError(code="collective-in-evaluation", samples=samples, ranks=self.size)
        self._loop.check_collective_allowed()
        return self._loop.common_position

    def compute(self, metric: Any) -> Any:
        """Compute a torchmetrics object or collection from the states of all ranks (a collective).

        Each rank has updated its object with its samples. The object does not change: reset it before the next
        evaluation.

        Args:
            metric: an object of torchmetrics, or a collection of them, of the same type on all ranks.

        Returns:
            The result of `metric.compute()` on one process, equal on all ranks.

        Raises:
            UsageError: for any other object, and if no rank has updated it.
        """
        from paceline.train.metrics import compute_over_ranks

        return compute_over_ranks(metric, self.world, self._loop.common_position)

    def main(self, act: Callable[..., Any], *arguments: Any) -> Any:
        """Call `act` on rank 0 while the other ranks wait (a collective).

        Args:
            act: a function, which must not call a collective.
            arguments: its positional arguments.

        Returns:
            The result of `act` on rank 0, and None on the other ranks.

        Raises:
            Exception: the error of `act`, on rank 0; ReportedByPeer on the others.
        """
        with raise_on_all_ranks(self.world, prepares=False):
            return act(*arguments) if self.rank == 0 else None

    def print(self, *words: Any) -> None:
        """Print, on rank 0 only.

        Args:
            words: values to print, separated by spaces, as with the built-in print.
        """
        self._run.print(*words)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.is_complete = True
        explained = self.explain_error(error)
        self.close(explained or error)
        if explained is not None:
            raise explained from error
        if error is None and self._loop.failure is not None:
            raise self._loop.failure

    def close(self, error: BaseException | None = None) -> None:
        """End the session, with an error if there is one. Also called at the end of the process.

        A second call does nothing. The end of a `with` block calls it too.

        Args:
            error: the error that has ended the loop, which is recorded as the failure of the run. None: a regular end.
        """
        if self._loop.is_closed or os.getpid() != self._run.pid:  # a worker process of a loader also calls this
            return
        if self._observer is not None and self._loop.is_open and isinstance(error or SystemExit(), SystemExit):
            self._observer.on_end()
        with suppress(ValueError):
            open_sessions.remove(self)
        self._loop.close(error)


@partial(with_argument_checks, where="session()")
def session(
    run_dir: str | os.PathLike[str] | None = None,
    *,
    resume: bool = False,
    strategy: StrategyName = "bucketed",
    virtual_ranks: int | None = None,
    seed: int | None = None,
    threads: int | None = None,
    precision: Literal["fp32", "tf32", "bf16", "fp16", "auto"] | None = None,
    checkpoint_every: int | str | None = None,
    keep_checkpoints: int = 3,
    check_replicas_every: int = 100,
    not_finite: Literal["stop", "skip"] = "stop",
    audit_every: int | None = None,
    on_audit: Literal["stop", "exclude"] = "stop",
    device: Literal["auto", "cpu", "cuda", "xpu"] = "auto",
    backend: Literal["auto", "nccl", "xccl", "gloo", "mpi"] = "auto",
    timeout: float = 600.0,
    trust: bool = False,
    report_to: str | None = None,
    peak_tflops: float | None = None,
    fsdp_wrap: str | None = None,
    compress: Literal["bf16", "int8", "powersgd"] | None = None,
    powersgd_rank: int | None = None,
    local_steps: int | None = None,
    outer_lr: float | None = None,
    outer_momentum: float | None = None,
) -> Session:
    """Start a session: this process joins the ranks that the launcher started, or is the only rank.

    Args:
        run_dir: folder for checkpoints, events, weights and a summary. None: the session writes no files.
        resume: resume the run in `run_dir` if it has a checkpoint; otherwise start at step 0.
        strategy: single, dp, manual, bucketed, ddp, exact, zero or fsdp: how the ranks share the work.
        virtual_ranks: number of ranks for which the run is defined. Default: the number of ranks.
        seed: seed of the data order and dropout (default 0). A value also seeds torch, numpy and Python's random.
        threads: CPU threads per rank. Default: the launcher's choice, or 1 with strategy exact or zero.
        precision: of the models: fp32, tf32, bf16, fp16, or auto (bf16 or fp32). Default: as the script sets it.
        checkpoint_every: steps between checkpoints, or a time such as "10min", in addition to the end of each epoch.
        keep_checkpoints: number of checkpoints to keep, at least 2.
        check_replicas_every: steps between bit-by-bit comparisons of all replicas.
        not_finite: what to do if a loss or gradient is NaN or Inf: "stop" the run or "skip" the step.
        audit_every: exact and zero only: steps between two audits. A second rank then repeats one micro-batch.
        on_audit: what to do if an audit finds wrong numbers: "stop" the run, or "exclude" the rank and restart.
        device: auto, cpu, cuda or xpu. auto: one GPU per rank if the node has GPUs, otherwise the CPU.
        backend: backend of torch.distributed. auto: nccl on NVIDIA and AMD GPUs, xccl on xpu, gloo on CPUs.
        timeout: seconds after which a collective fails.
        trust: use a run folder that another user owns or can write to.
        report_to: "tensorboard", "wandb" or "mlflow", or several separated by commas: where s.log also reports.
        peak_tflops: peak of one device in TFLOP/s, to report MFU (not under exact and zero). Default: no MFU.
        fsdp_wrap: fsdp only: blocks to shard, by name or class, e.g. "Block". Default: the repeated layers.
        compress: bucketed only: send gradients between nodes as bf16 or int8, or as a PowerSGD approximation.
        powersgd_rank: bucketed with compress="powersgd": rank of the approximation (default 4).
        local_steps: bucketed only: optimizer steps of each node between two averages of the parameters (local SGD).
        outer_lr: bucketed with local_steps: outer learning rate (default 1).
        outer_momentum: bucketed with local_steps: outer Nesterov momentum (default 0).

    Raises:
        UsageError: an unknown argument, an invalid value, or a run folder that cannot be used.
        TrainingError: not all ranks started.
    """
    arguments: dict[str, Any] = {name: value for name, value in locals().items() if name != "run_dir"}
    if checkpoint_every is not None and run_dir is None:
        raise UsageError(code="checkpoints-without-folder")
    if open_sessions:
        if open_sessions[-1].size > 1:
            raise UsageError(code="session-open")
        open_sessions[-1].close()  # a notebook runs a cell again
    install_exit_hooks()
    if (observer := current_observer()) is not None:
        run_dir, arguments = None, {**arguments, **observer.options}
    with preserve_generator_states():  # packages that are imported here may draw from them
        new_session = Session(SessionConfig(run_dir, **arguments))
    if seed is not None:  # so that the script draws the same numbers in each run and on each rank
        torch.manual_seed(seed)
        random.seed(seed)
        numpy.random.seed(seed % 2**32)
    install_exit_hooks()  # again, because torch has installed its hook before ours, which delays output
    return new_session
