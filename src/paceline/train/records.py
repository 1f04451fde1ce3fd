"""Records a run in event files, trackers and printed lines: its start, each step, and the results of evaluations."""

import math
import os
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.checkpoint.state import LockedRun
from paceline.collectives.control import all_gather_object
from paceline.data.loader import MicroBatch
from paceline.data.plan import BatchPlan
from paceline.protocol.control import WorkerSpec
from paceline.protocol.status_page import StatusPage
from paceline.rank.world import World
from paceline.runs import events
from paceline.runs.events import Event, MemoryBreakdown, TracedStep
from paceline.runs.summary import finite_metrics, format_metrics
from paceline.runs.trackers import TrackerQueue, parse_report_to
from paceline.runs.writers import EventWriter
from paceline.strategies.base import Strategy
from paceline.train.step_record import PhaseStart, StepRecord

if TYPE_CHECKING:
    from paceline.host.node_utilization import NodeUtilizationLogger

NUM_LAST_TRACED_STEPS = 8  # the last steps of a run are always traced
MAX_LISTED_PARAMETERS = 4096
FULLY_TRACED_STEP_BITS = 6  # the first 2**6 - 1 steps are all traced


class RunRecorder:
    """Writes the records of this rank. Without a place (a session that has no run folder) it writes no files."""

    def __init__(self, place: LockedRun | None, world: World, show: Callable[[str], None]) -> None:
        self.place, self.show, self._world = place, show, world
        self._writer: EventWriter | None = None
        self._tracking = TrackerQueue([], Path(), {}, self.say)
        self._machine: NodeUtilizationLogger | None = None
        self._listed_step = 0  # the last step whose samples are recorded

    def open_writers(self, place: LockedRun, report_to: str | None) -> EventWriter:
        self._writer = EventWriter(place.folder / f"events-{self._world.rank}.jsonl")
        self._tracking = TrackerQueue(
            parse_report_to(report_to) if self._world.rank == 0 else [], place.folder, place.definition, self.say
        )
        return self._writer

    def _watch_machine(self) -> None:
        """Record the load of this node from its first rank, if no agent of paceline does so (collective)."""
        assert self.place is not None
        spec, world = WorkerSpec.from_environment(), self._world
        if spec is not None and Path(spec.attempt_dir).resolve().parent == self.place.folder:
            return
        node = int(os.environ.get("GROUP_RANK", world.rank // world.local_size))  # torchrun's
        processes: list[tuple[int, int, int]] = all_gather_object((node, world.rank, os.getpid()), world)
        if world.local_rank == 0:
            from paceline.host.node_utilization import NodeUtilizationLogger  # most runs have an agent

            pids = {rank: pid for rank_node, rank, pid in processes if rank_node == node}
            self._machine = NodeUtilizationLogger(self.place.folder, node, pids)

    def write(self, event: events.Event) -> None:
        """Write an event. Raise OSError if the file cannot be written, e.g. because the disk is full."""
        if self._writer is not None:
            self._writer.write(event)

    def write_optional(self, optional: Iterable[events.Event]) -> None:
        """Write events that no resume needs. A full disk does not end the training here."""
        with suppress(OSError):
            for event in optional:
                self.write(event)

    def say(self, line: str) -> None:
        self.show(line)
        self.write(events.Notice(line))

    def log_evaluation(self, step: int, metrics: dict[str, float], split: str = "", seconds: float = 0.0) -> None:
        self.write(events.Evaluated(step, finite_metrics(metrics), seconds, split or "test"))
        self._tracking.log(step, {f"{split}/{name}" if split else name: score for name, score in metrics.items()})
        self.show(f"{split} after step {step}: {format_metrics(metrics)}".lstrip())

    def log_start(self, plan: BatchPlan, start: int) -> None:
        assert self.place is not None
        self._watch_machine()
        place, world = self.place, self._world
        self.write(events.Started(
            attempt=place.attempt, rank=world.rank, world_size=world.size, host=socket.gethostname(), pid=os.getpid(),
            device=str(world.device), unix_time=time.time(), generation=place.generation, start_step=start,
            num_samples=0 if plan.parts_of_stream else plan.num_samples, steps_per_epoch=plan.known_steps_per_epoch,
            own_order=plan.own_order, stream_parts=plan.parts_of_stream,
        ))  # fmt: skip

    def log_sample_indices(self, step: int, micro_batches: Sequence[MicroBatch]) -> None:
        """Record the samples of this rank. Before the exchange of the step: a killed rank may not record the step."""
        if self._writer is None or step == self._listed_step or not self._world.is_replica_leader:
            return
        self._listed_step = step
        counted = [batch.work for batch in micro_batches if batch.work.is_counted]
        for work in counted or [micro_batches[0].work]:  # a rank without samples records that it has none
            indices: list[int] = work.indices.tolist() if counted else []
            self.write(events.SampleIndices(step, work.epoch, work.virtual_rank, work.micro_batch, indices))

    def log_step(self, record: StepRecord, samples: int, share: range, *, listed: bool, tracked: bool = False) -> None:
        result = record.result
        if tracked:
            norm = {} if result.grad_norm is None else {"grad_norm": result.grad_norm}
            self._tracking.log(record.step, {"loss": result.loss, "lr": record.lr, **norm})
        if self._writer is None:
            return
        epoch = record.microbatches[0].work.epoch
        reports_samples = self._world.is_replica_leader  # one of several ranks that have used the same samples
        tokens, consumed = record.num_tokens_and_samples() if reports_samples else (0, 0)
        if listed:
            self.log_sample_indices(record.step, record.microbatches)
        if result.skip_cause is not None:
            self.write(events.Skipped(record.step, result.skip_cause.message, result.skip_cause.samples))
        self.write(events.Step(  # after the samples: the record of a step confirms that its samples are complete
            step=record.step, epoch=epoch, samples=samples, lr=record.lr, grad_norm=result.grad_norm,
            loss=result.loss if math.isfinite(result.loss) else 0.0,  # JSON has no NaN or infinity
            seconds=record.seconds, data_seconds=record.data_seconds, unix_time=time.time(),
            share=(share.start, share.stop) if reports_samples else (0, 0), consumed=consumed,
            fingerprint=f"{record.fingerprint() if reports_samples else 0:016x}",
            skipped=result.skip_cause is not None,
            phase_seconds={phase: round(seconds, 7) for phase, seconds in record.phase_seconds.items()},
            tokens=tokens,
        ))  # fmt: skip

    def close(self) -> None:
        if self._machine is not None:
            self._machine.close()
            self._machine = None
        self._tracking.close()
        if self._writer is not None:
            self._writer.__exit__(None, None, None)
            self._writer = None


class StepTraces:
    """Traces of some steps, for `paceline trace` and `paceline report`: fewer as the run gets longer, plus the last."""

    def __init__(self, page: StatusPage) -> None:
        self._page, self._last = page, deque[tuple[int, Sequence[PhaseStart]]](maxlen=NUM_LAST_TRACED_STEPS)

    def take_due(self, record: StepRecord, new: Sequence[Strategy]) -> list[Event]:
        """The trace of the step, if it is due, preceded by the memory of the `new` replicas."""
        traces: list[Event] = [memory_breakdown(new)] if new else []
        if record.phase_starts and is_traced_step(record.step):
            self._last.clear()  # earlier steps are no longer among the last ones
            traces.append(self._traced(record.step, record.phase_starts))
        elif record.phase_starts:
            self._last.append((record.step, record.phase_starts))
        return traces

    def take_remaining(self) -> list[TracedStep]:
        traces = [self._traced(step, borders) for step, borders in self._last]
        self._last.clear()
        return traces

    def _traced(self, step: int, borders: Sequence[PhaseStart]) -> TracedStep:
        began, ended = borders[0][1], borders[-1][1]
        pairs = pairwise(borders)
        calls = [
            (op.name or op.kind, round(at / 1e9 - began, 7), round(seconds, 7), count_tensor_bytes(op.shape, op.dtype))
            for at, seconds, op in self._page.calls_since(int(began * 1e9))
            if at / 1e9 <= ended
        ]
        phases = [(phase, round(at - began, 7), round(until - at, 7)) for (phase, at), (_, until) in pairs]
        return TracedStep(step=step, unix_time=time.time() - (time.monotonic() - began), phases=phases, calls=calls)


def is_traced_step(step: int) -> bool:
    """Whether this step, counted from 1, is traced. The result is the same on all ranks.

    The first 63 steps are traced, then every second step up to 127, every fourth up to 255, and so on. That is 32 per
    doubling, so even a long run has few traces and a small file.
    """
    return step % (1 << max(0, step.bit_length() - FULLY_TRACED_STEP_BITS)) == 0


def count_tensor_bytes(shapes: str, dtypes: str) -> int:
    """Bytes of a collective's tensors, from the guard's texts, e.g. '[10, 3] [4]' and 'float32'; 0 if unknown."""
    width = max((int("".join(filter(str.isdigit, name)) or 0) // 8 for name in dtypes.split(", ")), default=0)
    shape_texts = shapes.removeprefix("[").removesuffix("]").split("] [") if shapes else []
    sizes = [[number.strip() for number in shape.split(",") if number.strip()] for shape in shape_texts]
    total = sum(prod(map(int, shape)) for shape in sizes if all(map(str.isdigit, shape)))
    return total * width


def memory_breakdown(replicas: Sequence[Strategy]) -> MemoryBreakdown:
    from paceline.compute.memory import storage_bytes

    named = [pair for replica in replicas for pair in replica.model.named_parameters()]
    trained = [p for _, p in named if p.requires_grad]
    gradients = [shard.tensor for replica in replicas for shard in replica.gradients()]
    states = [state for replica in replicas for one in replica.optimizers for state in one.state.values()]
    return MemoryBreakdown(
        parameters=[(name, [*p.shape], p.numel() * p.element_size()) for name, p in named[:MAX_LISTED_PARAMETERS]],
        weight_bytes=storage_bytes(p for _, p in named),
        gradient_bytes=storage_bytes(gradients) or storage_bytes(trained),
        optimizer_bytes=storage_bytes(value for state in states for value in state.values()),
        buffer_bytes=storage_bytes(buffer for replica in replicas for buffer in replica.model.buffers()),
    )  # fmt: skip
