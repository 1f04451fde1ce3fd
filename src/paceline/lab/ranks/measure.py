"""A rank of `paceline compare` or `paceline scale`: `python -m paceline.lab.ranks.measure FOLDER`.

The folder has order.json and config.toml. Rank 0 adds a line to chunks.jsonl for each candidate. Each rank records its
steps in FOLDER/<candidate>/events-<rank>.jsonl, like a training.
"""

import gc
import os
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, closing, nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch.utils.data import Dataset

from paceline.checkpoint.shards import gather_full_state, hash_tensors
from paceline.checkpoint.state import LockedRun
from paceline.collectives.communicator import make_communicator
from paceline.collectives.control import all_gather_object, raise_on_all_ranks
from paceline.collectives.inter_node import DEFAULT_RANK, PowerSgdCodec
from paceline.compute.flops import FlopCounter, Utilization
from paceline.config import settings as configuration
from paceline.config.mesh import MODEL_DIMENSIONS, format_strategy, resolve_mesh
from paceline.config.settings import TrainConfig, resolve_batch_sizes, task_options
from paceline.config.strategies import EXACT_STRATEGIES, unsupported_settings
from paceline.data.arrays import on_device
from paceline.data.loader import LoadingOptions, MicroBatch, load_steps
from paceline.data.streams import first_samples, is_stream
from paceline.errors import PacelineError, UsageError, plural
from paceline.host.node_utilization import query_gpu_problems
from paceline.lab import measurement as m
from paceline.lab.measurement import NO_EXCHANGE, Candidate, Measurement, MeasurementRequest
from paceline.lab.ranks.memory import SentBytesCounter, record_allocations
from paceline.protocol.evidence import Phase
from paceline.rank.attach import run_worker
from paceline.rank.guard import HangGuard
from paceline.rank.world import World, create_mesh_groups, device_name, process_group
from paceline.runs.utilization import explain_mfu
from paceline.stepping.trained_model import make_loss_scale
from paceline.strategies import Strategy
from paceline.strategies.base import MakeOptimizer
from paceline.tasks.registry import load_task
from paceline.tasks.task import Task
from paceline.train.compute_settings import check_precision
from paceline.train.determinism import use_deterministic_kernels
from paceline.train.optimizer import configured_optimizer_maker, make_lr_schedule
from paceline.train.parallelism import parallelize_model
from paceline.train.prepare import (
    check_stream_settings,
    make_batch_plan,
    make_configured_strategy,
    make_model,
    parallel_config,
    set_up_compute,
    try_loss_on_first_samples,
)
from paceline.train.records import RunRecorder
from paceline.train.step import fit, ignore_phase
from paceline.train.step_record import StepRecord

GPU_DRIVER_WAIT_SECONDS = 2.0  # for the driver to report why a GPU is slow
MAX_STREAM_SAMPLES = 4096  # read from a stream, and then repeated


@dataclass(frozen=True)
class Workload:
    config: TrainConfig
    task: Task
    dataset: Dataset[Any]
    world: World
    notes: tuple[str, ...] = ()  # the aspects that are not measured
    count: FlopCounter = field(default_factory=FlopCounter)
    """the FLOPs of one sample; empty if they could not be counted"""


def load_workload(config: TrainConfig, candidates: Iterable[Candidate], world: World) -> Workload:
    check_precision(config.compute.precision, world.device)
    task = load_task(str(config.task), task_options(config))
    data, notes = task.make_dataset("train"), ()
    largest = max(resolve_batch_sizes(_configured(config, c).data, world.size).global_batch for c in candidates)
    if is_stream(data):
        check_stream_settings(config, data)
        data = first_samples(data, max(MAX_STREAM_SAMPLES, largest))
        notes = (
            f"the training data are a stream: its first {len(data):,} samples were loaded into memory, so the steps do "
            "not include the time to read it",
        )
    samples: int = len(data)  # pyright: ignore[reportArgumentType]
    if samples == 0:
        raise UsageError(code="measure-no-data")
    if samples < largest:
        ranks = plural(world.size, "rank")
        raise UsageError(code="measure-too-few-samples", ranks=ranks, needed=largest, samples=samples)
    if config.data.data_on_device == "auto":
        data = on_device(data, world.device, collate=task.collate)
    count = FlopCounter()
    if config.compute.peak_tflops != 0:
        with suppress(PacelineError):  # each candidate raises it again
            model, loading = make_model(task, config.run.seed, world), LoadingOptions(world.device, 0, task.collate)
            try_loss_on_first_samples(task, model, data, loading, count=count)
    return Workload(config, task, data, world, notes, count)


class CandidateTraining:
    def __init__(
        self, workload: Workload, candidate: Candidate, folder: Path, steps: int, on_phase: Callable[[Phase], object]
    ) -> None:
        """Apply the strategy to a new model (a collective)."""
        self._open = ExitStack()
        self.sync_seconds = 0.0  # the time that the last chunk of steps waited for other ranks
        self.microbatches: Sequence[MicroBatch] = ()  # of the last step
        task, dataset, world, data = workload.task, workload.dataset, workload.world, workload.world.data
        config = _configured(workload.config, candidate)
        shape = resolve_batch_sizes(config.data, data.size)
        samples: int = len(dataset)  # pyright: ignore[reportArgumentType]
        self.plan = make_batch_plan(replace(config, data=replace(config.data, last_batch="drop")), shape, samples)
        self._share = data.share(shape.virtual_ranks)
        self._lists_samples = config.run.record_samples
        model = make_model(task, config.run.seed, world)
        loading = LoadingOptions(world.device, config.data.num_workers, task.collate)
        precision, *_ = set_up_compute(config.compute, model, task, dataset, loading, candidate.batch_size, world)
        self.use = Utilization(world, config.compute.peak_tflops, workload.count, precision)
        optimizer = replace(config.optimizer, schedule="constant", warmup_steps=0)
        maker = configured_optimizer_maker(optimizer, optimizer.lr, task, model)
        inline_loading = replace(loading, num_workers=0)
        sharing = parallelize_model(task, model, dataset, inline_loading, self.plan, world, parallel_config(config))
        lines = sharing.notices if sharing.stage_plan else ()  # the stages; a table of split layers is too long
        self.notes = tuple(f"{format_strategy(candidate.strategy, candidate.mesh)}: {line.strip()}" for line in lines)
        if candidate.strategy == NO_EXCHANGE:
            self.replica = sharing.make_strategy(_without_exchange, model, maker, world, shape.virtual_ranks)
        else:
            self.replica = make_configured_strategy(config, maker, model, world, shape.virtual_ranks, sharing)
        schedule = make_lr_schedule(optimizer, optimizer.lr, task, self.replica.optimizer, steps)
        folder.mkdir(parents=True, exist_ok=True)
        location = LockedRun(folder, 1, 0, None)
        self._records = self._open.enter_context(closing(RunRecorder(location, world, print)))
        self._records.open_writers(location, None)
        self._records.log_start(self.plan, 0)
        batches = load_steps(dataset, self.plan, self._share, loading, start=0, stop=steps)
        self._open.enter_context(closing(batches))
        page = HangGuard.of_process().page
        taken = fit(
            self.replica, batches, task.loss, schedule, max_norm=config.optimizer.clip_norm,
            enter=lambda phase: (page.enter(phase), on_phase(phase)),
            ahead=loading.ahead, scale=make_loss_scale(precision),
        )  # fmt: skip
        self._taken = self._open.enter_context(closing(taken))

    def take_steps(self, steps: int) -> int:
        self.sync_seconds = 0.0
        return sum(self._record(next(self._taken)) for _ in range(steps))

    def _record(self, record: StepRecord) -> int:
        tokens, samples = record.num_tokens_and_samples()
        self.use.tokens, self.use.samples = self.use.tokens + tokens, self.use.samples + samples
        self.microbatches = record.microbatches
        self.sync_seconds += record.phase_seconds.get(Phase.SYNC.word, 0.0)
        samples = len(self.plan.global_indices(*divmod(record.step - 1, self.plan.steps_per_epoch)))
        self._records.log_step(record, samples, self._share, listed=self._lists_samples)
        return samples

    def close(self) -> None:
        self._open.close()


def _configured(config: TrainConfig, candidate: Candidate) -> TrainConfig:
    virtual_ranks = candidate.virtual_ranks or None
    data = replace(config.data, batch_size=candidate.batch_size, global_batch=None, virtual_ranks=virtual_ranks)
    launch = replace(config.launch, mesh=candidate.mesh or None, sequence_parallel=candidate.sequence)
    config = replace(config, launch=launch, data=data)
    if candidate.strategy == NO_EXCHANGE:
        return config
    other_options = dict.fromkeys(unsupported_settings(candidate.strategy))
    model = replace(config.model, **{name: None for name in other_options if hasattr(config.model, name)})
    network = replace(config.network, **{name: None for name in other_options if hasattr(config.network, name)})
    return replace(config, model=model, network=network, strategy=candidate.strategy)


def _without_exchange(model: torch.nn.Module, maker: MakeOptimizer, world: World, /, *, virtual_ranks: int) -> Strategy:
    """A strategy without communication, which measures only the computation: each copy of the model trains alone."""
    return Strategy(model, maker(model.parameters()), world, virtual_ranks=virtual_ranks)


def measure_candidates(order: MeasurementRequest, workload: Workload) -> None:
    folder, world, compute = Path(order.folder), workload.world, workload.config.compute
    _trigger_lazy_imports(world)
    launch_seconds = time.time() - order.started_unix
    for candidate in order.candidates:
        mesh_world = create_mesh_groups(world, resolve_mesh(candidate.mesh or None, world.size))
        if world.rank == 0:
            (folder / m.RUNNING).write_bytes(msgspec.json.encode(candidate))
        torch.set_num_threads(candidate.threads)
        if world.rank == 0 and compute.precision != "auto":  # the others wait in `_measure`
            Utilization(world, compute.peak_tflops, workload.count, compute.precision).peak_tflops(measure=True)
        with use_deterministic_kernels() if candidate.strategy in EXACT_STRATEGIES else nullcontext():
            measured = _measure(order, replace(workload, world=mesh_world), candidate, launch_seconds)
        if world.rank == 0:
            with (folder / m.CHUNKS).open("ab") as file:
                file.write(msgspec.json.encode(measured) + b"\n")
        gc.collect()  # hooks and closures keep models in reference cycles


def _measure(order: MeasurementRequest, workload: Workload, candidate: Candidate, launch_seconds: float) -> Measurement:
    world, status_page = workload.world, HangGuard.of_process().page
    folder, last = Path(order.folder) / candidate.name, order.warmup + order.steps
    with record_allocations(world.device) if order.memory else nullcontext() as inspection:
        all_gather_object(0, world)
        start = time.perf_counter()
        enter = inspection.mark_phase if inspection else ignore_phase
        training = CandidateTraining(workload, candidate, folder, last, enter)
        replica = training.replica
        if inspection:
            inspection.watch(replica)
        training.take_steps(1)
        first = time.perf_counter() - start
        training.take_steps(1)  # DDP rebuilds its buckets in the second step; the third is like all later ones
        traffic = SentBytesCounter(status_page, replica.world, replica.pipeline)
        training.take_steps(1)
        sent = traffic.sent_bytes()
        if inspection:
            inspection.record_batch_bytes(training.microbatches)
    with closing(training):
        training.take_steps(order.warmup - m.INSPECTED_STEPS)
        all_gather_object(0, world)
        start, cpu_base = time.perf_counter(), sum(os.times()[:2])
        samples = training.take_steps(order.steps)
        local: dict[str, Any] = {
            "seconds": time.perf_counter() - start, "cpu": sum(os.times()[:2]) - cpu_base, "first": first, "sent": sent,
            "memory": msgspec.to_builtins(inspection.found) if inspection else None,
            "sync": training.sync_seconds,
        }  # fmt: skip
        # before it cools down
        local["gpu"] = query_gpu_problems([os.getpid()], wait_seconds=GPU_DRIVER_WAIT_SECONDS).get(os.getpid(), "")
        weights = [shard for shard in replica.state() if shard.name.startswith("model/")]
        digest = hash_tensors(gather_full_state(weights, world))
    trained = [p for p in replica.model.parameters() if p.requires_grad]
    local["weights"] = sum(p.nbytes for p in trained)
    results = all_gather_object(local, world)
    one_copy = replica.world.mesh.peers(0, MODEL_DIMENSIONS) if replica.world.mesh else (0,)
    seconds = max(result["seconds"] for result in results)
    memory = None
    if inspection:
        memory = m.MemoryUse(
            **{n: _most(result["memory"][n] for result in results) for n in m.MemoryUse.__struct_fields__}
        )
    if world.rank == 0:  # measures the peak again if the machine was busy when it was measured
        training.use.peak_tflops(measure=True, samples_per_second=samples / seconds)
    return Measurement(
        candidate,
        world.size,
        global_batch=training.plan.global_batch,
        samples=samples,
        seconds=seconds,
        cpu_seconds=sum(result["cpu"] for result in results),
        first_step_seconds=max(result["first"] for result in results),
        launch_seconds=launch_seconds,
        digest=digest,
        weight_bytes=sum(results[rank]["weights"] for rank in one_copy),
        low_rank_bytes=4 * PowerSgdCodec([p.shape for p in trained], torch.float32, DEFAULT_RANK).sent,
        sent_bytes=_most(result["sent"] for result in results),
        memory=memory,
        device=device_name(world.device),
        sync_share=sum(result["sync"] / result["seconds"] for result in results) / world.size,
        notes=(*workload.notes, *training.notes),
        use=training.use.throughput_metrics(samples / seconds),
        mfu_words=explain_mfu(samples / seconds, workload.count.per_sample, training.use.peak_tflops(), world.size),
        gpus={rank: result["gpu"] for rank, result in enumerate(results) if result["gpu"]},
    )


def _trigger_lazy_imports(world: World) -> None:
    """Take a step with a dummy optimizer, so that torch imports its modules before the first candidate."""
    parameter = torch.nn.Parameter(torch.zeros(1, device=world.device))
    parameter.grad = torch.zeros_like(parameter)
    torch.optim.SGD([parameter], lr=0.0).step()
    all_gather_object(0, world)


def _most(values: Iterable[Any]) -> Any:
    return max((value for value in values if value is not None), default=None)


def main(arguments: Sequence[str]) -> int:
    folder = Path(arguments[0])
    order = msgspec.json.decode((folder / m.ORDER).read_bytes(), type=MeasurementRequest)
    config = configuration.load(folder.resolve() / m.CONFIG, must_own=True)
    world = World.from_env(device=config.launch.device, backend=config.launch.backend)
    with process_group(world, timeout_seconds=config.launch.timeout):
        make_communicator(config.launch.collectives)
        with raise_on_all_ranks(world):
            workload = load_workload(config, order.candidates, world)
        measure_candidates(order, workload)
    return 0


if __name__ == "__main__":
    run_worker(main)
