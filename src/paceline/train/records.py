"""Writes a run's records: that a rank begins, and each of its steps."""

from __future__ import annotations

import math
import os
import socket
import time
from collections.abc import Callable

from paceline.data.consumed import add, fingerprint
from paceline.data.plan import BatchPlan
from paceline.observe import events
from paceline.train.fit import StepRecord
from paceline.train.keeping import Place
from paceline.worker.world import World

Write = Callable[[events.Event], None]


def write_started(write: Write, world: World, plan: BatchPlan, place: Place, start: int) -> None:
    """Write that this rank begins, with the state after `start` steps."""
    write(
        events.Started(
            attempt=place.attempt,
            rank=world.rank,
            world_size=world.size,
            host=socket.gethostname(),
            pid=os.getpid(),
            device=str(world.device),
            unix_time=time.time(),
            generation=place.generation,
            start_step=start,
            num_samples=0 if plan.parts_of_stream else plan.num_samples,
            steps_per_epoch=plan.known_steps,
            own_order=plan.own_order,
            stream_parts=plan.parts_of_stream,
        )
    )


def write_step(write: Write, record: StepRecord, samples: int, share: range, *, listed: bool) -> None:
    """Write the events of one step on a global batch of `samples` samples, all `listed` or not.

    Raises:
        OSError: if the disk is full, say.
    """
    result, epoch = record.result, record.microbatches[0].work.epoch
    used = [batch.work for batch in record.microbatches if batch.work.counted]
    for work in used if listed else ():
        indices: list[int] = work.indices.tolist()
        write(events.Samples(record.step, epoch, work.virtual_rank, work.part, indices))
    if result.left_out is not None:
        write(events.Skipped(record.step, result.left_out.words, result.left_out.samples))
    write(  # after the samples: the record of a step vouches for them
        events.Step(
            step=record.step,
            epoch=epoch,
            loss=result.loss if math.isfinite(result.loss) else 0.0,  # JSON has no other number
            samples=samples,
            lr=record.lr,
            seconds=record.seconds,
            data_seconds=record.data_seconds,
            unix_time=time.time(),
            grad_norm=result.grad_norm,
            share=(share.start, share.stop),
            consumed=sum(len(work.indices) for work in used),
            fingerprint=f"{add(*(fingerprint(work.indices) for work in used)):016x}",
            skipped=result.left_out is not None,
            phase_seconds={phase: round(seconds, 7) for phase, seconds in record.phase_seconds.items()},
        )
    )
