"""What a rank writes down of a run, and says: that it begins, each step, what evaluations have found."""

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

from paceline.checkpoint.resume import RunLocation
from paceline.collectives.control import gather_words
from paceline.data.plan import BatchPlan, add, fingerprint
from paceline.host.machine_log import MachineLog
from paceline.protocol.control import WorkerSpec
from paceline.protocol.status_page import StatusPage
from paceline.rank.world import World
from paceline.runs import events
from paceline.runs.events import Event, MemoryBreakdown, Traced
from paceline.runs.summary import finite, scores_line
from paceline.runs.trackers import Tracking, tracker_names
from paceline.runs.writers import EventWriter
from paceline.strategies.base import Strategy
from paceline.train.costs import held_bytes
from paceline.train.fit import Border, StepRecord

LAST = 8  # steps that are always in detail
WHOLE_BITS = 6  # up to 2**6 - 1 all are
MOST_PARAMETERS = 4096


class Records:
    """Without a place, a session's that has no folder, nothing is written down."""

    def __init__(self, place: RunLocation | None, world: World, show: Callable[[str], None]) -> None:
        """`show` prints a line on rank 0."""
        self.place, self.show, self._world = place, show, world
        self._writer: EventWriter | None = None
        self._tracking = Tracking([], Path(), {}, self.say)
        self._machine: MachineLog | None = None

    def begin(self, place: RunLocation, track: str | None) -> EventWriter:
        """Take the files; the trackers in `track` are told what defines the run.

        Raises:
            UsageError: a tracker is not there, or the file cannot be ours.
        """
        self._writer = EventWriter(place.folder / f"events-{self._world.rank}.jsonl")
        self._tracking = Tracking(
            tracker_names(track) if self._world.rank == 0 else [], place.folder, place.definition, self.say
        )
        return self._writer

    def _watch_machine(self) -> None:
        """Have what this machine does written down, by its first rank, where no agent of ours does (a collective)."""
        assert self.place is not None
        spec, world = WorkerSpec.here(), self._world
        if spec is not None and Path(spec.attempt_dir).resolve().parent == self.place.folder:
            return
        node = int(os.environ.get("GROUP_RANK", world.rank // world.local_size))  # torchrun's
        places: list[tuple[int, int, int]] = gather_words((node, world.rank, os.getpid()), world)
        if world.local_rank == 0:
            pids = {rank: pid for its, rank, pid in places if its == node}
            self._machine = MachineLog(self.place.folder, node, pids)

    def write(self, event: events.Event) -> None:
        """Write it down. OSError: the disk is full, say."""
        if self._writer is not None:
            self._writer.write(event)

    def in_detail(self, found: Iterable[events.Event]) -> None:
        """Write down what only people look at: a disk without room for it does not end a training."""
        with suppress(OSError):
            for event in found:
                self.write(event)

    def say(self, line: str) -> None:
        """Show a line, and write it down."""
        self.show(line)
        self.write(events.Notice(line))

    def found(self, step: int, metrics: dict[str, float], split: str = "", seconds: float = 0.0) -> None:
        """An evaluation after `step` has found these; the same on all ranks."""
        self.write(events.Evaluated(step, finite(metrics), seconds, split or "test"))
        self._tracking.log(step, {f"{split}/{name}" if split else name: score for name, score in metrics.items()})
        self.show(f"{split} after step {step}: {scores_line(metrics)}".lstrip())

    def started(self, plan: BatchPlan, start: int) -> None:
        """This rank begins, with the state after `start` steps (a collective)."""
        assert self.place is not None
        self._watch_machine()
        place, world = self.place, self._world
        self.write(events.Started(
            attempt=place.attempt, rank=world.rank, world_size=world.size, host=socket.gethostname(), pid=os.getpid(),
            device=str(world.device), unix_time=time.time(), generation=place.generation, start_step=start,
            num_samples=0 if plan.parts_of_stream else plan.num_samples, steps_per_epoch=plan.known_steps,
            own_order=plan.own_order, stream_parts=plan.parts_of_stream,
        ))  # fmt: skip

    def stepped(self, record: StepRecord, samples: int, share: range, *, listed: bool, tracked: bool = False) -> None:
        """A step on a global batch of `samples` samples, all `listed` or not, has ended; trackers are told, or not."""
        result = record.result
        if tracked:
            norm = {} if result.grad_norm is None else {"grad_norm": result.grad_norm}
            self._tracking.log(record.step, {"loss": result.loss, "lr": record.lr, **norm})
        if self._writer is None:
            return
        epoch = record.microbatches[0].work.epoch
        speaks = self._world.leads  # of several ranks that have seen the same samples
        used = [batch.work for batch in record.microbatches if batch.work.counted and speaks]
        tokens, consumed = record.consumed if speaks else (0, 0)
        for work in used if listed else ():
            indices: list[int] = work.indices.tolist()
            self.write(events.Samples(record.step, epoch, work.virtual_rank, work.part, indices))
        if result.left_out is not None:
            self.write(events.Skipped(record.step, result.left_out.words, result.left_out.samples))
        self.write(events.Step(  # after the samples: the record of a step vouches for them
            step=record.step, epoch=epoch, samples=samples, lr=record.lr, grad_norm=result.grad_norm,
            loss=result.loss if math.isfinite(result.loss) else 0.0,  # JSON has no other number
            seconds=record.seconds, data_seconds=record.data_seconds, unix_time=time.time(),
            share=(share.start, share.stop) if speaks else (0, 0), consumed=consumed,
            fingerprint=f"{add(*(fingerprint(work.indices) for work in used)):016x}",
            skipped=result.left_out is not None,
            phase_seconds={phase: round(seconds, 7) for phase, seconds in record.phase_seconds.items()},
            tokens=tokens,
        ))  # fmt: skip

    def close(self) -> None:
        """Let go of the files."""
        if self._machine is not None:
            self._machine.close()
            self._machine = None
        self._tracking.close()
        if self._writer is not None:
            self._writer.__exit__(None, None, None)
            self._writer = None


class Traces:
    """Steps in detail, for `paceline trace` and the page of a run: few of many, and always the last."""

    def __init__(self, box: StatusPage) -> None:
        self._box, self._last = box, deque[tuple[int, Sequence[Border]]](maxlen=LAST)

    def of(self, record: StepRecord, new: Sequence[Strategy]) -> list[Event]:
        """The step in detail, if it is due; after it what the `new` replicas hold."""
        found: list[Event] = [anatomy(new)] if new else []
        if record.borders and is_due(record.step):
            self._last.clear()  # those before it will not be the last
            found.append(self._traced(record.step, record.borders))
        elif record.borders:
            self._last.append((record.step, record.borders))
        return found

    def rest(self) -> list[Traced]:
        """The last steps, as far as they are not written down yet."""
        found = [self._traced(step, borders) for step, borders in self._last]
        self._last.clear()
        return found

    def _traced(self, step: int, borders: Sequence[Border]) -> Traced:
        began, ended = borders[0][1], borders[-1][1]
        pairs = pairwise(borders)
        calls = [
            (op.name or op.kind, round(at / 1e9 - began, 7), round(seconds, 7), size_of(op.shape, op.dtype))
            for at, seconds, op in self._box.calls_since(int(began * 1e9))
            if at / 1e9 <= ended
        ]
        return Traced(
            step=step,
            unix_time=time.time() - (time.monotonic() - began),
            phases=[(word, round(at - began, 7), round(until - at, 7)) for (word, at), (_, until) in pairs],
            calls=calls,
        )


def is_due(step: int) -> bool:
    """Whether this step, counted from 1, is written down in detail; the same on all ranks.

    The first 63 are, then every second up to 127, every fourth up to 255, and so on: 32 or so in each doubling. So a
    step in a million costs nothing, and a file of any run has room for them.
    """
    return step % (1 << max(0, step.bit_length() - WHOLE_BITS)) == 0


def size_of(shapes: str, dtypes: str) -> int:
    """Bytes of a collective's tensors, as the guard knows them: '[10, 3] [4]', 'float32'; 0 where it does not say."""
    width = max((int("".join(filter(str.isdigit, name)) or 0) // 8 for name in dtypes.split(", ")), default=0)
    each = shapes.removeprefix("[").removesuffix("]").split("] [") if shapes else []
    found = [[number.strip() for number in shape.split(",") if number.strip()] for shape in each]
    total = sum(prod(map(int, shape)) for shape in found if all(map(str.isdigit, shape)))
    return total * width


def anatomy(replicas: Sequence[Strategy]) -> MemoryBreakdown:
    """What this rank holds of all models, after a step."""
    named = [pair for replica in replicas for pair in replica.model.named_parameters()]
    trained = [p for _, p in named if p.requires_grad]
    gradients = [held.tensor for replica in replicas for held in replica.gradients()]
    return MemoryBreakdown(
        parameters=[(name, [*p.shape], p.numel() * p.element_size()) for name, p in named[:MOST_PARAMETERS]],
        weight_bytes=held_bytes(p for _, p in named),
        gradient_bytes=held_bytes(gradients) or held_bytes(trained),
        optimizer_bytes=held_bytes(
            value for replica in replicas for state in replica.optimizer.state.values() for value in state.values()
        ),
        buffer_bytes=held_bytes(buffer for replica in replicas for buffer in replica.model.buffers()),
    )
