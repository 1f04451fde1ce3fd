"""`paceline.session()`: a training loop of your own, on any number of ranks, with the same result on each.

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

It works under `paceline launch`, torchrun, srun, plain python and in a notebook, where it is a world of one.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset, IterableDataset

from paceline.contract.evidence import Phase
from paceline.data.fingerprint import data_fingerprint
from paceline.data.loader import Loading, MicroBatch, naming_lost_processes
from paceline.data.plan import BatchPlan, Tail, ranks_share
from paceline.definition import BITS_ONLY, check_same
from paceline.disk import writing
from paceline.errors import ExitCode, PacelineError, UsageError, unknown
from paceline.ladder import EXACT, LADDER
from paceline.seeding import preserved_streams, remembered_streams
from paceline.sessions.course import Course, Holders, opening, origin_of, script_name
from paceline.sessions.existing import check_taken, covers_all, keeps_order, own_collate
from paceline.sessions.loader import Loader
from paceline.sessions.prepared import Prepared, made_optimizer
from paceline.sessions.steps import Reduction, Steps
from paceline.strategies import STRATEGIES
from paceline.sums import check_equal, gather_words, sum_over_ranks, together, told_once
from paceline.sums.sharing import memory_or_hosts
from paceline.train.computing import take_threads
from paceline.train.determinism import DEFAULT_THREADS, deterministic, holds_for
from paceline.train.fit import PhaseClock
from paceline.train.keeping import Rhythm
from paceline.train.nonfinite import LeftOut
from paceline.train.order import CallOrder
from paceline.train.placing import placed
from paceline.train.preemption import StopRequest, noticing
from paceline.train.weights import save
from paceline.worker.attach import attach, leave, record_failure
from paceline.worker.guard import Guard
from paceline.worker.tell import tell
from paceline.worker.world import DEFAULT_TIMEOUT_SECONDS, World, joined

NOT_HERE = ("fsdp",)  # whose forwards are collectives: a loop of one's own cannot promise equally many
WATCH_EVERY = 100


class Session:
    """A training among ranks, for a loop of one's own. Make one with `session`."""

    def __init__(
        self,
        run_dir: str | os.PathLike[str] | None = None,
        *,
        resume: bool = False,
        strategy: str = "bucketed",
        virtual_ranks: int | None = None,
        seed: int = 0,
        threads: int | None = None,
        checkpoint_every: int | None = None,
        keep: int = 2,
        watch_every: int = WATCH_EVERY,
        not_finite: Literal["stop", "skip"] = "stop",
        device: str = "auto",
        backend: str = "auto",
        timeout: float = DEFAULT_TIMEOUT_SECONDS,
        trust: bool = False,
    ) -> None:
        """See `session`."""
        if strategy not in LADDER or strategy in NOT_HERE:
            raise unknown("strategy for a session", strategy, [name for name in LADDER if name not in NOT_HERE])
        if resume and run_dir is None:
            raise UsageError("session(resume=True) needs the folder of the run: session('runs/mine', resume=True)")
        if not_finite not in ("stop", "skip"):
            raise unknown("not_finite", str(not_finite), ["stop", "skip"])
        attach()
        self._guard = Guard.of_process()
        self._guard.box.enter(Phase.INIT)
        self._stack, self._closed, self._complete, self._stopped = ExitStack(), False, False, False
        self._name, self._seed, self._strategy, self._exact = script_name(), seed, strategy, strategy in EXACT
        self._broken: Exception | None = None
        try:
            world = World.from_env(device=device, backend=backend)
            self.world = self._stack.enter_context(joined(world, timeout_seconds=timeout))
            self._stack.enter_context(naming_lost_processes(self._guard.box, world.rank))
            self._virtual_ranks = virtual_ranks or world.size
            if self._virtual_ranks < world.size:
                words = (
                    f"session(virtual_ranks={self._virtual_ranks}): there are {world.size} ranks, and each needs one"
                )
                raise told_once(UsageError(words), world)
            self._share = ranks_share(self._virtual_ranks, world.rank, world.size)
            folder = None if run_dir is None else Path(run_dir)
            place = None
            if folder is not None:
                place = self._stack.enter_context(placed(world, folder, self._name, resume=resume, trust=trust))
            memory_or_hosts("auto")
            self._stack.enter_context(deterministic() if self._exact else nullcontext())
            notices = take_threads(threads or (DEFAULT_THREADS if self._exact else None), world)
            origin = origin_of(place, world, resume=resume, trust=trust) if place is not None else None
            self._settings = {"virtual_ranks": self._virtual_ranks, "seed": seed, "strategy": strategy}
            check_equal("session settings", {**self._settings, "resume": resume, "threads": threads}, world)
            rhythm = Rhythm(watch_every, 10**9, checkpoint_every)
            self._course = Course(place, origin, world, self._name, rhythm, keep, self.print)
            self._steps = Steps(world, self._virtual_ranks, self._enter, self._exact)
            self._steps.votes = self._votes
            self._steps.order = CallOrder(world, self._guard.take_order, self._guard.taken, self.print)
            self._steps.may_leave_out = not_finite != "stop"
            self._left_out = LeftOut(not_finite, world, self.print)
            self._clock = PhaseClock(self._guard.box.enter)
            self._request: StopRequest | None = self._stack.enter_context(noticing()) if place is not None else None
            for line in notices:
                self.print(line)
        except BaseException as error:
            self._stack.__exit__(type(error), error, error.__traceback__)
            raise
        loop = origin.content.loop if origin else {}
        self._where: dict[str, int] = {"epoch": 0, "pass": 0, "passes": 0, "batch": 0, **loop.get("where", {})}
        self._resumed: dict[str, int] | None = dict(self._where) if origin else None
        self._streams: dict[str, str] | None = loop.get("streams")
        self._numbers: list[dict[str, Any]] = list(loop.get("parts", []))
        self._parts = self._steps.parts
        self._opened, self._epochs = False, 0
        self._work: list[Any] = []
        self._enter(Phase.USER)
        _open_sessions.append(self)

    # what a loop asks

    @property
    def rank(self) -> int:
        """This process's number, from 0."""
        return self.world.rank

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return self.world.size

    @property
    def device(self) -> torch.device:
        """Where this rank computes."""
        return self.world.device

    @property
    def step(self) -> int:
        """Optimizer steps done, over the whole run."""
        return self._course.step

    @property
    def batch(self) -> int:
        """Which global batch of the epoch this is, from 0."""
        return self._where["batch"]

    @property
    def last(self) -> bool:
        """Whether this is the step's last micro-batch on this rank: what is due once a step belongs here."""
        return self._steps.is_over

    @property
    def samples(self) -> int:
        """How many samples of the batch at hand count: 0 for a stand-in, where a rank has no share of a small batch."""
        body = self._steps.body
        return len(body.work.indices) if body is not None and body.work.counted else 0

    def prepare(
        self, model: nn.Module, optimizer: Any, scheduler: Any = None
    ) -> tuple[Any, Any, Any] | tuple[Any, Any]:
        """Make a model, its optimizer and its scheduler this rank's part of the training (a collective).

        Args:
            model: with the same weights on all ranks or not: they become rank 0's.
            optimizer: a torch optimizer over the model's parameters, or a function that makes one from parameters.
            scheduler: one over that optimizer, or a function that makes one from the optimizer; None: none.

        Returns:
            The model that the loop calls, the optimizer and the scheduler: the objects that were given, where they
            were; only (model, optimizer) without a scheduler.

        Raises:
            UsageError: on one rank, if one of them does not fit; ToldElsewhere on the others.
        """
        world, number = self.world, len(self._parts)
        if self._opened:
            raise UsageError("s.prepare after the first batch: prepare all models before the loop")
        with together(world):
            if not isinstance(model, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise UsageError(f"s.prepare takes a torch module first, not a {type(model).__name__}")
            if not any(p.requires_grad for p in model.parameters()):
                raise UsageError("the model has no parameter that requires a gradient: there is nothing to train")
            make = made_optimizer(model, optimizer)
            model = model.to(world.device)
        replica = STRATEGIES[self._strategy](model, make, world, virtual_ranks=self._virtual_ranks)
        with together(world):
            if callable(scheduler) and not hasattr(scheduler, "state_dict"):
                scheduler = scheduler(replica.optimizer)
            part = Prepared(replica, scheduler, number, self._steps)
            origin = self._course.origin
            if origin is not None:
                if number >= len(self._numbers):
                    raise UsageError(f"{origin.where} holds {len(self._numbers)} models, and this is one more")
                part.load(origin.source)
                part.load_numbers(self._numbers[number])
        self._parts.append(part)
        found = (replica.module, replica.optimizer)
        return found if scheduler is None else (*found, scheduler)

    def loader(
        self,
        data: Dataset[Any] | DataLoader[Any],
        *,
        global_batch: int | None = None,
        batch_size: int | None = None,
        per_rank: bool = False,
        accumulation: int = 1,
        shuffle: bool | None = None,
        tail: Tail = "keep",
        num_workers: int = 0,
        collate: Callable[[list[Any]], Any] | None = None,
    ) -> Loader:
        """Batches of `data`, shared out among ranks.

        Args:
            data: a map-style dataset; or a DataLoader, whose dataset, collate function, workers and own order of
                batches are taken over. Its batch size is then the global batch, as in the single-device script.
            global_batch: samples of a step, over all ranks.
            batch_size: instead of it, samples of each virtual rank's micro-batch.
            per_rank: the DataLoader's batch size is that of each virtual rank.
            accumulation: micro-batches that each virtual rank's share is processed in.
            shuffle: whether each epoch has an order of its own; by default it has.
            tail: of an epoch's last, incomplete batch: keep it, drop it, or pad it with repeats.
            num_workers: loader processes of each rank.
            collate: samples -> batch, by default torch's default_collate.

        Raises:
            UsageError: for what cannot be shared out.
        """
        existing: DataLoader[Any] | None = None
        dataset: Any = data
        if isinstance(data, DataLoader):
            check_taken(data)
            given = {"shuffle": shuffle, "num_workers": num_workers or None, "collate": collate,
                     "global_batch": global_batch, "batch_size": batch_size}  # fmt: skip
            if twice := [name for name, value in given.items() if value is not None]:
                raise UsageError(f"s.loader(DataLoader, {twice[0]}=...): the DataLoader says that already")
            existing, dataset = data, data.dataset
            num_workers, collate = data.num_workers, own_collate(data)
            batch = data.batch_size or max(len(dataset) // max(1, len(data)), 1)
            global_batch = batch * self._virtual_ranks * accumulation if per_rank else batch
            if per_rank:
                if data.batch_size is None or not covers_all(data):
                    raise UsageError("s.loader(DataLoader, per_rank=True): its sampler has an order of its own")
                existing, shuffle = None, not keeps_order(data)
            tail = "drop" if data.drop_last or not covers_all(data) else tail
        elif isinstance(data, IterableDataset) or not hasattr(data, "__getitem__"):
            raise UsageError(f"s.loader takes a map-style dataset or a DataLoader, not a {type(data).__name__}")
        if (global_batch is None) == (batch_size is None):
            raise UsageError("s.loader(dataset, ...) needs one of global_batch= and batch_size=")
        size: int = len(dataset)
        if size == 0:
            raise UsageError("s.loader: the dataset is empty")
        batch = global_batch or (batch_size or 0) * self._virtual_ranks * accumulation
        plan = BatchPlan(size, batch, self._virtual_ranks, accumulation, self._seed, shuffle is not False, tail)
        loading = Loading(self.device, num_workers, collate, box=self._guard.box)
        return Loader(self._iterate, dataset, plan, loading, existing)

    def epochs(self, count: int) -> Generator[int]:
        """The epochs that are left of `count`: 0, 1, ..., or after a resume from the one it broke off in."""
        if count < 1:
            raise UsageError(f"s.epochs({count}): there must be one at least")
        self._epochs = count
        try:
            for epoch in range(self._where["epoch"], count):
                self._check_whole()
                if self._resumed is None:
                    self._where |= {"epoch": epoch, "pass": 0, "batch": 0}
                yield epoch
                self._resumed = None
        finally:
            self._complete = True

    def backward(
        self,
        loss: Tensor,
        weight: float | Tensor | None = None,
        *,
        reduction: Reduction = "mean",
        more: bool = False,
        only: Optimizer | Iterable[Optimizer] = (),
    ) -> None:
        """Compute gradients; after a step's last micro-batch, .grad is the gradient of the global batch's mean.

        Args:
            loss: the mean over the batch at hand, (); or one value for each sample (B, ...).
            weight: of a mean: what it is the mean of; by default the samples of the batch, mask.sum() for tokens. Of
                values per sample: a tensor of their shape.
            reduction: "sum" for a loss that adds up its samples instead of averaging them.
            more: another backward of this step follows: gradients are exchanged after the last only.
            only: the optimizers whose gradients are wanted; gradients of other models are dropped.

        Raises:
            UsageError: outside a training loop, or for a loss or weight that cannot be put together over ranks.
            TrainingError: if the loss or a gradient is not finite, or the ranks have called different collectives.
        """
        self._check_whole()
        asked = {id(one) for one in ([only] if isinstance(only, Optimizer) else only)}
        chosen = [part for part in self._parts if id(part.optimizer) in asked]
        if len(chosen) != len(asked):
            raise UsageError("s.backward(loss, only=...) names an optimizer that was not prepared")
        self._steps.backward(loss, weight, reduction, more, chosen)

    def clip_grad_norm(self, max_norm: float, model: nn.Module | None = None) -> Tensor:
        """Scale all gradients so that their global norm is at most `max_norm`; return the norm before.

        As torch's clip_grad_norm_, and right also where ranks hold shares of the gradients (a collective there). Before
        a step's last micro-batch it does nothing and returns 0.
        """
        if self._steps.body is not None and not self._steps.body.is_last:
            return torch.zeros((), device=self.device)
        return self._part(model).replica.clip_grad_norm(max_norm)

    # what ranks tell each other

    def sum(self, *numbers: float | Tensor) -> Any:
        """Each number added up over all ranks, as a float; several come back as a tuple (a collective)."""
        values = [float(number) for number in numbers]
        found = sum_over_ranks(torch.tensor(values, dtype=torch.float64, device=self.device), "numbers of the loop")
        added: list[float] = found.tolist()
        return added[0] if len(added) == 1 else tuple(added)

    def mean(self, total: float | Tensor, count: float | Tensor) -> float:
        """The sum of `total` over all ranks, divided by that of `count` (a collective)."""
        total, count = self.sum(total, count)
        if count == 0:
            raise UsageError("s.mean: the counts of all ranks add up to 0")
        return float(total / count)

    def any(self, flag: bool | Tensor) -> bool:
        """Whether any rank says so: all get the same answer (a collective)."""
        return self.sum(float(bool(flag))) > 0

    def gather(self, values: Tensor) -> Tensor:
        """(n, ...) of each rank -> (sum of n, ...) on every rank, in the order of ranks, nothing padded (a collective).

        In an evaluation loop, where they are one for each sample of the batch: in the order of the batch.
        """
        values = values.detach().contiguous()
        with together(self.world):
            if values.ndim == 0:
                raise UsageError("s.gather takes a tensor with a first dimension; for one number use s.sum or s.mean")
        shapes: list[Any] = gather_words([list(values.shape), str(values.dtype)], self.world)
        if len({(tuple(shape[1:]), kind) for shape, kind in shapes}) > 1:
            raise told_once(
                UsageError(f"s.gather: the ranks' tensors differ in more than their length: {shapes}"), self.world
            )
        most = max(shape[0] for shape, _ in shapes)
        padded = values.new_zeros(most, *values.shape[1:])
        padded[: len(values)] = values
        if self.size == 1:
            return values
        parts = [torch.empty_like(padded) for _ in range(self.size)]
        torch.distributed.all_gather(parts, padded)
        joined_up = torch.cat([part[: shape[0]] for part, (shape, _) in zip(parts, shapes, strict=True)])
        sizes = [shape[0] for shape, _ in shapes]
        if self._evaluated_batch and sum(sizes) == self._evaluated_batch:
            places = [torch.arange(rank, sum(sizes), self.size) for rank in range(self.size)]
            ordered = torch.empty_like(joined_up)
            ordered[torch.cat(places).to(joined_up.device)] = joined_up
            return ordered
        return joined_up

    _evaluated_batch = 0
    """samples of the batch that is evaluated; 0: none is"""

    def main(self, act: Callable[..., Any], *arguments: Any) -> Any:
        """Call `act` on rank 0 while the others wait; its result there, None elsewhere (a collective)."""
        with together(self.world):
            return act(*arguments) if self.rank == 0 else None

    def print(self, *words: Any) -> None:
        """Print, on rank 0 only."""
        if self.world.rank == 0:
            print(*words, flush=True)

    def log(self, values: Mapping[str, float] | None = None, **more: float) -> None:
        """Numbers found by the loop: rank 0 prints them, the run folder records them."""
        self._course.log({name: float(value) for name, value in {**(values or {}), **more}.items()})

    def weights(self, model: nn.Module | None = None) -> dict[str, Tensor]:
        """The whole model's state, by its own names, with buffers merged over virtual ranks (a collective)."""
        with self._merged():
            return {name: tensor.detach().clone() for name, tensor in self._part(model).replica.weights().items()}

    def save(self, model: nn.Module | None, path: str | os.PathLike[str]) -> None:
        """Write the whole model's state, whole or not at all, by rank 0 while the others wait (a collective).

        A name that ends with .safetensors gets that format; any other torch.save's.
        """
        found, where = self.weights(model), Path(path)

        def write() -> None:
            if where.suffix == ".safetensors":
                save(found, where)
                return
            with writing.replacing(where) as (folder, partial):
                torch.save(found, f"/proc/self/fd/{folder}/{partial}")
                os.chmod(partial, writing.FILE, dir_fd=folder)

        self.main(write)

    @contextmanager
    def evaluating(self) -> Generator[None]:
        """Inside, models have the buffers of all virtual ranks, merged: to evaluate in your own way (a collective)."""
        with self._merged(), torch.no_grad():
            yield

    # the end

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._complete = True
        self.close(error)
        if error is None and self._broken is not None:
            raise self._broken

    def close(self, error: BaseException | None = None) -> None:
        """End in good order, or with the error that ends the loop. Also called at the process's end."""
        if self._closed:
            return
        self._closed = True
        if isinstance(error, SystemExit) and (self._stopped or not error.code):
            error = None  # an end in good order
        error = error or self._broken
        try:
            if error is not None:
                self._fail(error)
            elif self._stopped:
                self._course.stop()
            elif self._complete:
                self._guard.box.enter(Phase.CLOSE)
                self._course.finish()
        except BaseException as late:
            error = error or late
            record_failure(late, _code_of(late), traceback=not isinstance(late, PacelineError))
            raise
        finally:
            with suppress(ValueError):
                _open_sessions.remove(self)
            self._course.close()
            self._stack.__exit__(type(error) if error else None, error, error.__traceback__ if error else None)

    def _fail(self, error: BaseException) -> None:
        whole = not self._steps.updating and self._opened
        if whole and self._steps.body is not None:
            with suppress(Exception):
                self._steps.give_up()
        self._course.fail(error, self._loop_state, whole=whole)
        if not isinstance(error, (KeyboardInterrupt, SystemExit)):  # before any teardown: the first to fail is known
            stalled = None if isinstance(error, PacelineError) else self._guard.stall_error(error)
            record_failure(stalled or error, _code_of(stalled or error), traceback=not isinstance(error, PacelineError))

    # inside

    def _iterate(self, loader: Loader) -> Iterator[Any]:
        self._check_whole()
        training = torch.is_grad_enabled() and any(part.replica.model.training for part in self._parts)
        return self._train(loader) if training else self._evaluate(loader)

    def _evaluate(self, loader: Loader) -> Generator[Any]:
        body = self._steps.body
        if not self._steps.is_over:
            raise UsageError(
                "an evaluation inside a training loop: begin it at the step's last micro-batch, `if s.last:`"
            )
        restore = remembered_streams() if body is not None else lambda: None
        plan, _ = loader.drawn(self.world, None)
        with self._merged(), self._guard.phase(Phase.EVALUATE):
            try:
                for batch, samples in loader.evaluation(plan, self.world):
                    self._evaluated_batch = samples
                    yield batch
                    self._guard.box.tick()
            finally:
                self._evaluated_batch = 0
                restore()

    def _train(self, loader: Loader) -> Generator[Any]:
        if self._steps.body is not None:
            raise UsageError("two training loops at once: their steps cannot be told apart. Let one follow the other")
        where, steps, start = self._where, self._steps, 0
        goes_on = self._resumed
        if goes_on is not None:
            if not self._epochs:
                raise UsageError("a run that goes on needs `for epoch in s.epochs(count):` around its training loops")
            if self._skipped < goes_on["pass"]:  # it was over before the checkpoint
                self._skipped += 1
                return
            start = goes_on["batch"]
        plan, self._streams = loader.drawn(self.world, self._streams if goes_on is not None else None)
        self._open(loader, plan)
        self._resumed, where["batch"] = None, start
        one_each = plan.virtual_ranks == self.size and plan.accumulation == 1
        self._clock(Phase.DATA)
        for bodies in loader.training(plan, self._share, where["passes"], start):
            steps.begin(f"epoch {where['epoch'] + 1}, batch {where['batch'] + 1}", one_each, len(bodies))
            while True:
                for batch in bodies:
                    steps.enter(batch, batch is bodies[-1])
                    try:
                        yield batch.inputs
                    except GeneratorExit:
                        self._left(bodies, plan)
                        raise
                    steps.leave()
                if not steps.again():
                    break
            self._between(bodies, plan, is_end=where["batch"] + 1 == len(loader))
            self._stop_if_asked()
            self._clock(Phase.DATA)
        self._next_pass()

    def _left(self, bodies: list[MicroBatch], plan: BatchPlan) -> None:
        """The loop is left by break or return, in a body. What goes wrong here is raised at the next call."""
        steps = self._steps
        try:
            if steps.untouched:
                steps.give_up()
            elif steps.is_whole:
                steps.leave()  # after its last backward: the step is as whole as it will be
                self._between(bodies, plan, is_end=False)
            else:
                where = f"epoch {self._where['epoch'] + 1}, batch {self._where['batch'] + 1}"
                self._broken = UsageError(
                    f"the loop was left in the middle of the step at {where}, which other ranks may have taken. Leave "
                    "a loop by `break` between two steps only: at the top of its body, or behind `if s.last:`"
                )
        except Exception as error:
            self._broken = error
        # not yet the next pass: an error may have ended this one, and the run goes on here then
        self._was_left = True

    def _next_pass(self) -> None:
        self._where |= {"pass": self._where["pass"] + 1, "passes": self._where["passes"] + 1, "batch": 0}
        self._clock(Phase.USER)

    _was_left = False
    """whether the last loop was left before its end"""
    _skipped = 0
    """passes over data in the epoch that is gone on with, which were over before the checkpoint"""

    def _open(self, loader: Loader, plan: BatchPlan) -> None:
        if self._opened:
            return
        if not self._parts:
            raise UsageError("a training loop without a model: call s.prepare(model, optimizer) first")
        self._opened = True
        definition: dict[str, Any] = {
            **self._settings, "task": self._name, "global_batch": plan.global_batch, "tail": plan.tail,
            "accumulation": plan.accumulation, "batchnorm": "local",
            "optimizer": [type(part.optimizer).__name__ for part in self._parts],
            "threads_per_rank": torch.get_num_threads() if self._exact else None, "hardware": holds_for(self.device),
        }  # fmt: skip
        with preserved_streams(), together(self.world):
            definition["data"] = {"training data": data_fingerprint(loader.dataset, loader.loading)}
        if self._exact:
            compared = {name: definition[name] for name in BITS_ONLY}
            check_equal("processors, libraries and threads", compared, self.world)
        check_equal(
            "data, optimizers and batches", {k: v for k, v in definition.items() if k not in BITS_ONLY}, self.world
        )
        origin = self._course.origin
        if origin is not None:
            with together(self.world):
                check_same(origin.content.definition, definition, (), origin.where)
                if len(self._parts) != len(self._numbers):
                    raise UsageError(
                        f"{origin.where} holds {len(self._numbers)} models, prepared were {len(self._parts)}"
                    )
        for line in opening(plan, self.world, self._strategy, self._name):
            self.print(line)
        holders = Holders(self._parts, self.world, self._virtual_ranks)
        self._course.open(holders, plan, definition, seed=self._seed, strategy=self._strategy, epochs=self._epochs or 1)

    def _between(self, bodies: list[MicroBatch], plan: BatchPlan, *, is_end: bool) -> None:
        done = self._steps.end()
        samples = len(plan.global_indices(bodies[0].work.epoch, self._where["batch"]))
        self._where["batch"] += 1
        if done.left_out is not None:
            self._left_out.goes_back(self._course.step + 1, done.left_out)
        lr = float(self._parts[0].rates()[0])
        self._course.note(done, [batch.work for batch in bodies], samples, self._share, lr, self._clock.take())
        self._stopped = done.votes.stop > 0
        self._course.between(done.votes, self._loop_state, save=self._stopped or is_end, settled=is_end)

    def _stop_if_asked(self) -> None:
        if self._stopped:
            raise SystemExit(int(ExitCode.SAVED))

    def _check_whole(self) -> None:
        if self._closed:
            raise UsageError("the session has ended")
        if self._broken is not None:
            raise self._broken
        self._stop_if_asked()
        if self._was_left:
            self._was_left = False
            self._next_pass()

    def _part(self, model: nn.Module | None) -> Prepared:
        if model is None and len(self._parts) == 1:
            return self._parts[0]
        found = [part for part in self._parts if model in (part.replica.model, part.replica.module)]
        if not found:
            raise UsageError("this model was not prepared, or several were, and none is named")
        return found[0]

    @contextmanager
    def _merged(self) -> Generator[None]:
        with ExitStack() as stack:
            before, self._steps.merged = self._steps.merged, True
            try:
                if not before:
                    for part in self._parts:
                        stack.enter_context(part.replica.merged_buffers())
                yield
            finally:
                self._steps.merged = before

    def _votes(self) -> Any:
        asked = self._request is not None and self._request.by is not None
        return self._course.votes()._replace(stop=float(asked))

    def _loop_state(self) -> dict[str, Any]:
        found: dict[str, Any] = {"where": dict(self._where), "parts": [part.numbers() for part in self._parts]}
        return found if self._streams is None else found | {"streams": self._streams}

    def _enter(self, phase: Phase) -> object:
        return self._clock(phase)


def session(run_dir: str | os.PathLike[str] | None = None, **options: Any) -> Session:
    """A training among the ranks that the launcher has started: see the module's docstring and `Session.__init__`.

    Args:
        run_dir: the folder for checkpoints, events, weights and a summary; None: nothing is written.
        options: resume: go on with the run in that folder, if there is one. strategy, virtual_ranks, seed, threads:
            as --strategy, ... of `paceline train`. checkpoint_every: steps; each epoch's end is saved anyway. keep,
            watch_every, not_finite, device, backend, timeout, trust: as the flags of these names.

    Raises:
        UsageError: for what cannot be; TrainingError if not all ranks come.
    """
    if _open_sessions:
        if _open_sessions[-1].size > 1:
            raise UsageError("a session is open in this process already: end it first, s.close()")
        _open_sessions[-1].close()  # a cell of a notebook that is run again
    _install()
    made = Session(run_dir, **options)
    _install()  # torch has put a hook of its own before ours, which holds back what is printed
    return made


_open_sessions: list[Session] = []


def _close_all(error: BaseException | None = None) -> None:
    while _open_sessions:
        _open_sessions.pop().close(error)


def _install() -> None:
    """At the process's end, however it comes, sessions end in good order; a PacelineError has its own exit code."""
    if getattr(sys.excepthook, "of_paceline", False):
        return
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        with suppress(Exception):
            _close_all(error)
        if isinstance(error, PacelineError):
            sys.stderr = sys.__stderr__
            leave(tell(error))
        before(kind, error, trace)

    hook.of_paceline = True  # pyright: ignore[reportFunctionMemberAccess]
    sys.excepthook = hook
    if not getattr(_close_all, "is_registered", False):
        _close_all.is_registered = True  # pyright: ignore[reportFunctionMemberAccess]
        # before threads are waited for: later none can be started, and a checkpoint's end starts one
        threading._register_atexit(_close_all)  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]


def _code_of(error: BaseException) -> int:
    return int(error.exit_code) if isinstance(error, PacelineError) else int(ExitCode.FAILED)


__all__ = ["Session", "session"]
