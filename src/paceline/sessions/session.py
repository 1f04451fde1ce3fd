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

import inspect
import os
from collections.abc import Callable, Generator, Iterable, Mapping
from functools import partial, wraps
from numbers import Integral, Real
from pathlib import Path
from types import UnionType
from typing import Any, Literal, ParamSpec, TypeVar, Union, get_args, get_origin, get_type_hints, overload

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset

from paceline.collectives.control import raise_on_all_ranks
from paceline.config.choices import check_not_renamed
from paceline.config.strategies import StrategyName
from paceline.data.loader import Loading
from paceline.data.plan import LastBatch
from paceline.errors import UsageError, unknown
from paceline.seeding import preserved_streams
from paceline.sessions.construction import OptimizerLike, SchedulerLike, make_loader, prepare_model, prepare_optimizer
from paceline.sessions.lifecycle import SessionLifecycle, install, open_sessions
from paceline.sessions.loader import Loader
from paceline.sessions.observer import Apply, current_observer
from paceline.sessions.order import global_streams, put_global_streams
from paceline.sessions.prepared import PreparedModel
from paceline.stepping.micro_step import Reduction
from paceline.strategies import STRATEGIES
from paceline.train.weights import save

AT_LEAST = {
    "virtual_ranks": 1, "threads": 1, "checkpoint_every": 1, "keep_checkpoints": 2, "check_replicas_every": 0,
    "timeout": 1, "batch_size": 1, "num_workers": 0,
}  # fmt: skip
P = ParamSpec("P")
T = TypeVar("T")


def _checks_arguments(function: Callable[P, T], where: str) -> Callable[P, T]:
    """Raise an error for an unknown keyword, and for a value that the annotation or AT_LEAST does not allow."""
    positions = [*inspect.signature(function).parameters]
    names = [name for name in positions if name != "self"]

    @wraps(function)
    def checked(*arguments: P.args, **keywords: P.kwargs) -> T:
        if unknown_names := [name for name in keywords if name not in names]:
            check_not_renamed(where, unknown_names[0], names)
            raise unknown(f"argument of {where}", unknown_names[0], names)
        hints = get_type_hints(function) | {"data": Any}  # any object that behaves like a dataset
        for name, value in {**dict(zip(positions, arguments, strict=False)), **keywords}.items():
            hint = hints.get(name, Any)  # self has none
            if not _is_allowed(value, hint):
                parts = [part for part in (hint, *get_args(hint)) if get_origin(part) is Literal]
                if parts and isinstance(value, str):
                    raise unknown(name, value, get_args(parts[0]))
                allowed = inspect.formatannotation(hint)
                raise UsageError(code="argument-type", where=where, name=name, value=value, allowed=allowed)
            if name in AT_LEAST and isinstance(value, Real) and value < AT_LEAST[name]:
                raise UsageError(code="argument-too-small", where=where, name=name, value=value, least=AT_LEAST[name])
        return function(*arguments, **keywords)

    return checked


def _is_allowed(value: object, hint: Any) -> bool:
    """Whether an argument has the annotated type. A number of numpy is a number, a bool is none."""
    origin, choices = get_origin(hint), get_args(hint)
    if hint is Any or origin is Literal:
        return hint is Any or value in choices
    if origin in (Union, UnionType):
        return any(_is_allowed(value, choice) for choice in choices)
    if hint in (int, float):
        return type(value) is not bool and isinstance(value, Integral if hint is int else Real)
    return isinstance(value, origin or hint)


class Session(SessionLifecycle):
    """The training of this process among all ranks, for a custom loop. `paceline.session()` returns it."""

    @property
    def step(self) -> int:
        """Number of steps since the start of the run. A step is a global batch, with or without an update."""
        return self._progress.step

    @property
    def batch(self) -> int:
        """Number of the current global batch in the epoch, from 0."""
        return self._where["batch"]

    @property
    def last(self) -> bool:
        """Whether this is the last micro-batch of the step on this rank, for actions once per step."""
        return self._steps.is_over

    @property
    def samples(self) -> int:
        """Number of counted samples of the current batch; 0 for the dummy batch of a rank without samples."""
        micro_step = self._steps.micro_step
        return 0 if micro_step is None else micro_step.samples

    @overload
    def prepare(self, model: nn.Module, optimizer: OptimizerLike) -> tuple[nn.Module, Optimizer]: ...
    @overload
    def prepare(
        self, model: nn.Module, optimizer: OptimizerLike, scheduler: SchedulerLike
    ) -> tuple[nn.Module, Optimizer, LRScheduler]: ...
    def prepare(self, model: nn.Module, optimizer: OptimizerLike, scheduler: SchedulerLike | None = None) -> Any:
        """Make a model, its optimizer and its scheduler this rank's part of the training (a collective).

        The model moves to this rank's device, `s.device`, with its parameters and buffers, as `model.to(s.device)`
        does. The state of an existing optimizer moves with it.

        Args:
            model: a module on any device. All ranks get rank 0's weights.
            optimizer: a torch optimizer over the model's parameters, or a function that makes one from parameters.
            scheduler: over that optimizer, or a function that makes one from the optimizer. None: no scheduler.

        Returns:
            (model, optimizer, scheduler), or (model, optimizer) without a scheduler. Objects that you pass are returned
            themselves. Call the returned model in the loop.

        Raises:
            UsageError: on one rank, if one of them is not supported; ReportedByPeer on the others.
        """
        if self._opened:
            raise UsageError(code="prepared-too-late")
        matches = [part for part in self._parts if model in (part.replica.model, part.replica.module)]
        if matches:
            return self._prepare_again(matches[0], optimizer, scheduler)
        self._check_seed()
        apply: Apply = partial(STRATEGIES[self._strategy], virtual_ranks=self._virtual_ranks, **self._options)
        if self._observer is not None:
            apply = self._observer.wrap_strategy(self._strategy, apply)
        part = prepare_model(
            model, optimizer, scheduler, apply, self.world, len(self._parts), self._steps, self._precision
        )
        if (origin := self._progress.origin) is not None:
            with raise_on_all_ranks(self.world):
                if part.number >= len(self._numbers):
                    raise UsageError(code="model-too-many", where=origin.where, saved=len(self._numbers))
                part.load(origin.source)
                part.load_numbers(self._numbers[part.number])
        self._parts.append(part)
        if self._observer is not None:
            self._observer.parts = self._parts
        result = (part.replica.module, part.optimizer)
        return result if part.scheduler is None else (*result, part.scheduler)

    def _prepare_again(self, part: PreparedModel, optimizer: OptimizerLike, scheduler: SchedulerLike | None) -> Any:
        """A second optimizer for other parameters of a model that was prepared before."""
        prepared_optimizer = prepare_optimizer(part, optimizer, scheduler, self.world)
        if self._progress.origin is not None:
            with raise_on_all_ranks(self.world):
                part.load_waiting(prepared_optimizer.optimizer, prepared_optimizer.parameters)
                part.load_numbers(self._numbers[part.number], len(part.optimizers) - 1)
        result = (part.replica.module, prepared_optimizer.optimizer)
        return result if scheduler is None else (*result, prepared_optimizer.scheduler)

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
        models = [part.replica.model for part in self._parts]
        if not saved:
            self._registered.add(name, thing, models, self.device, saved=False)
            return
        if self._opened:
            raise UsageError(code="registered-too-late")
        with raise_on_all_ranks(self.world):
            self._registered.add(name, thing, models, self.device, saved=True)
            if (origin := self._progress.origin) is not None:
                self._registered.load(name, origin.source, origin.where)

    @partial(_checks_arguments, where="s.loader()")
    def loader(
        self,
        data: Dataset[Any] | DataLoader[Any] | Iterable[Any],
        *,
        global_batch: int | None = None,
        batch_size: int | None = None,
        per_rank: bool = False,
        accumulation: int = 1,
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
            shuffle: whether to shuffle the samples in each epoch (default: True).
            last_batch: for the last, incomplete batch of an epoch: "keep", "drop", or "pad" with repeated samples.
            num_workers: loader processes of each rank.
            collate: samples -> batch. Default: default_collate of torch.
            split: for a stream with shards: each rank reads only those of its virtual ranks. Default: it reads all.

        Raises:
            UsageError: the data or a setting is not supported.
        """
        loader = make_loader(
            data, self._iterate, self.world, self._virtual_ranks, self._seed, self.print, self._can_split(split),
            Loading(self.device, num_workers, collate, page=self._guard.page, ahead=self._steps.ahead), shuffle=shuffle,
            global_batch=global_batch, batch_size=batch_size, per_rank=per_rank, accumulation=accumulation,
            last_batch=last_batch,
        )  # fmt: skip
        if self._observer is not None:
            self._observer.on_loader(loader, per_virtual_rank=per_rank or batch_size is not None)
        if not self._opened:
            if (state := self._loader_states.get(str(len(self._loaders)))) is not None:
                loader.put_back_sampler(state)
            self._loaders.append(loader)
        return loader

    def epochs(self, count: int) -> Generator[int]:
        """The remaining epochs of `count`: 0, 1, ..., after a resume from the interrupted epoch on.

        Each call begins with epoch 0. After a resume, a call that had ended before the checkpoint yields no epoch.
        """
        if count < 1:
            raise UsageError(code="no-epochs", value=count)
        phase, self._phases = self._phases, self._phases + 1
        resumed = self._resumed
        if resumed is not None and phase < resumed["phase"]:
            return
        self._epochs = count
        if resumed is None:
            self._where |= {"phase": phase, "epoch": 0}
        self._in_epochs = True
        try:
            for epoch in range(self._where["epoch"], count):
                self._check_whole()
                if self._live:
                    raise UsageError(code="loader-still-open")
                if self._resumed is None:
                    self._where |= {"epoch": epoch, "pass": 0, "batch": 0}
                    self._epoch_streams = global_streams() if self._steps.saves else None
                elif self._epoch_streams is not None:
                    put_global_streams(self._epoch_streams)
                yield epoch
                self._resumed = None
                if self._progress.step >= self._max_steps:
                    return
        finally:
            self._complete, self._in_epochs = True, False

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
        self._check_whole()
        if self._evaluates and micro_step is None:
            raise UsageError(code="backward-in-evaluation")
        if self._resumes and not self._in_epochs:
            raise UsageError(code="loop-without-epochs")
        parts = [] if only == () else self._trained_by([only] if isinstance(only, Optimizer) else only)
        self._steps.backward(loss, weight, reduction, more, parts, retain_graph)
        if self._observer is not None:
            self._observer.on_gradients(micro_step)

    def _trained_by(self, optimizers: Iterable[Optimizer]) -> list[PreparedModel]:
        wanted_ids = {id(optimizer) for optimizer in optimizers}
        part_by_id = {id(prepared.optimizer): part for part in self._parts for prepared in part.optimizers}
        if not wanted_ids <= {*part_by_id}:
            raise UsageError(code="only-not-prepared")
        return [part for part in self._parts if any(part_by_id[key] is part for key in wanted_ids)]

    def clip_grad_norm(self, max_norm: float, model: nn.Module | None = None) -> Tensor:
        """Scale all gradients so that their global norm is at most `max_norm`. Returns the norm before, ().

        It equals torch's clip_grad_norm_, also if gradients are sharded (a collective then). Before the last
        micro-batch of a step it does nothing and returns 0.
        """
        if self._steps.micro_step is not None and not self._steps.micro_step.is_last:
            return torch.zeros((), device=self.device)
        norm = self._part(model).replica.clip_grad_norm(max_norm).result()
        return torch.full((), norm, dtype=torch.float64, device=self.device)

    def log(self, values: Mapping[str, float] | None = None, **more: float) -> None:
        """Log numbers of the loop: rank 0 prints them and writes them to the run folder."""
        numbers = {name: float(value) for name, value in {**(values or {}), **more}.items()}
        if self._observer is not None:
            self._observer.on_numbers({f"logged {name}": value for name, value in numbers.items()})
        self._log(numbers)

    def throughput(self) -> dict[str, float]:
        """The speed of the run over the last 50 steps, by the clock of this rank: `s.log(s.throughput())`.

        Returns:
            The known ones of samples_per_second, tokens_per_second, flops_per_second and mfu (docs/speed.md). Empty in
            the first steps, and under `paceline verify`.
        """
        return {} if self._observer is not None else self._progress.use.speed(self._progress.throughput.recent())

    def weights(self, model: nn.Module | None = None) -> dict[str, Tensor]:
        """The state dict of the whole model, with buffers merged over virtual ranks (a collective)."""
        part = self._part(model)
        self._compare_replicas()
        with self._merged():
            return {name: tensor.detach().clone() for name, tensor in part.replica.weights().items()}

    def save(self, model: nn.Module | None, path: str | os.PathLike[str]) -> None:
        """Save the state dict of the whole model. Rank 0 writes the file atomically (a collective).

        The format is safetensors for a name that ends with .safetensors, otherwise that of torch.save.
        """
        if self._observer is not None:
            return
        weights, file = self.weights(model), Path(path)
        self.main(partial(save, pickled=file.suffix != ".safetensors"), weights, file)

    def _part(self, model: nn.Module | None) -> PreparedModel:
        if model is None and len(self._parts) == 1:
            return self._parts[0]
        matches = [part for part in self._parts if model in (part.replica.model, part.replica.module)]
        if not matches:
            raise UsageError(code="model-not-named")
        return matches[0]


@partial(_checks_arguments, where="session()")
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
        precision: of the models: fp32, tf32, bf16, fp16 with a loss scale, or auto: bf16 if all ranks support it, else
            fp32. Weights, gradients and the loss stay float32. Default: as the script sets it.
        checkpoint_every: steps between checkpoints, or a time such as "10min", in addition to the end of each epoch.
        keep_checkpoints: number of checkpoints to keep, at least 2.
        check_replicas_every: steps between bit-by-bit comparisons of all replicas.
        not_finite: what to do if a loss or gradient is NaN or Inf: "stop" the run or "skip" the step.
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
    install()
    if (observer := current_observer()) is not None:
        run_dir, arguments = None, {**arguments, **observer.options}
    with preserved_streams():  # packages that are imported here may draw from them
        new_session = Session(run_dir, **arguments)
    if seed is not None:
        new_session.seed_streams()
    install()  # again, because torch has installed its hook before ours, which delays output
    return new_session
