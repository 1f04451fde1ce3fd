"""Measures for doctor how long a step of a task takes here, and how long the sum of its gradients over all ranks.

`python -m paceline.proofs.rehearsal`, one process for each rank, started by doctor/host.py with torchrun's
variables; the request comes on stdin as JSON, and rank 0 writes what it found to stdout.

On the run's own device and over its backend: each rank on its GPU, so that one that does not work is found before.
A step is what a rank computes by itself, forward, backward and optimizer step, on one micro-batch of real samples:
the median of STEPS after WARM_UP, while all other ranks do the same, since they share its machine when they train.
The sum is one all-reduce of a vector as long as the gradients, the median of REDUCTIONS. In training a part of it
hides behind the backward pass, so its share of a step is an upper bound.
"""

import os
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from statistics import median
from typing import Any

from paceline.data.streams import first_of
from paceline.worker.attach import attach, leave

if __name__ == "__main__":  # before anything slow
    attach()

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from paceline.collectives.control import gather_words
from paceline.compute.precision import await_device
from paceline.data.ahead import moved
from paceline.doctor.messages import Rehearse, Rehearsed
from paceline.errors import PacelineError, UsageError
from paceline.tasks import load_task
from paceline.tasks.task import call
from paceline.tensor.plan import bytes_along_tensor
from paceline.worker.device import device_words
from paceline.worker.world import World, joined

WARM_UP, STEPS, REDUCTIONS = 1, 3, 5
TRIAL_ELEMENTS = 1 << 18
LONGEST_SECONDS = 0.5  # that one measured all-reduce may take
PLAIN_BYTES = 25 << 20  # without a task: torch's usual bucket


def _rehearse(request: Rehearse) -> Rehearsed:
    """Take part as the rank that the environment says, and measure; rank 0's numbers count."""
    torch.set_num_threads(max(1, request.threads))
    world = World.from_env(device=request.device, backend=request.backend)
    try:
        parameters, shared, step = _prepare(request, world.device) if request.task else (PLAIN_BYTES // 4, 0, None)
        with joined(world, timeout_seconds=request.seconds):
            dist.barrier()  # no rank has the machine to itself while others still import
            step_seconds = _median(step, WARM_UP, STEPS, world.device) if step else 0.0
            reduce_seconds = _reduce_seconds(torch.zeros(parameters, device=world.device))
            of_ranks = tuple(gather_words(step_seconds, world))
    except RuntimeError as error:
        if world.device.type == "cpu":
            raise
        raise RuntimeError(f"rank {world.rank} on {world.device}: {str(error).splitlines()[0]}") from error
    gradient_bytes, rate = 4 * parameters, 4 * parameters / reduce_seconds
    device = device_words(world.device)
    return Rehearsed(parameters, gradient_bytes, step_seconds, reduce_seconds, rate, device, of_ranks, shared)


def _prepare(request: Rehearse, device: torch.device) -> tuple[int, int, Callable[[], None]]:
    """The number of trainable parameters, the bytes along tensor, and a function that computes one step."""
    task = load_task(request.task, request.options)
    model = task.make_model().to(device)
    dataset = first_of(task.make_dataset("train"), request.batch_size)
    if len(dataset) == 0:  # pyright: ignore[reportArgumentType]
        raise UsageError("the training data are empty")
    parameters = [p for p in model.parameters() if p.requires_grad]
    samples = [dataset[i % len(dataset)] for i in range(request.batch_size)]  # pyright: ignore[reportArgumentType]
    collate = task.collate or torch.utils.data.default_collate
    batch = moved(collate(samples), device)
    inputs, targets = (batch, batch) if isinstance(batch, Mapping) else batch
    optimizer = torch.optim.SGD(parameters, lr=1e-6)

    def step() -> None:
        optimizer.zero_grad()
        found: Any = task.loss(call(model, inputs), targets)
        losses = found[0] if isinstance(found, tuple) else found
        losses.mean().backward()
        optimizer.step()

    shared, ranks = 0, request.along_tensor
    if ranks > 1:
        asked = task.parallelize(model) if task.parallelize else None
        shared = bytes_along_tensor(model, ranks, asked, partial(call, model, inputs))
    return sum(p.numel() for p in parameters), shared, step


def _reduce_seconds(gradients: Tensor) -> float:
    """What one all-reduce takes; of a long vector on a slow network a part is measured, and its time scaled up."""
    trial = gradients[:TRIAL_ELEMENTS]
    dist.all_reduce(trial)  # connections are made
    seconds = torch.tensor([_median(partial(dist.all_reduce, trial), 0, 1, trial.device)], device=trial.device)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)  # all must measure the same part
    predicted_seconds = float(seconds) * len(gradients) / len(trial)
    length = int(len(gradients) * min(1.0, LONGEST_SECONDS / predicted_seconds))
    part = gradients[: max(length, len(trial))]
    return _median(partial(dist.all_reduce, part), WARM_UP, REDUCTIONS, part.device) * len(gradients) / len(part)


def _median(action: Callable[[], Any], warm_up: int, times: int, device: torch.device) -> float:
    seconds: list[float] = []
    for _ in range(warm_up + times):
        start = time.perf_counter()
        action()
        await_device(device)
        seconds.append(time.perf_counter() - start)
    return median(seconds[warm_up:])


def main() -> int:
    """Read the request, take part, write the result."""
    request = msgspec.json.decode(sys.stdin.buffer.read(), type=Rehearse)
    answer = os.dup(1)
    os.dup2(2, 1)  # a task may print
    try:
        os.write(answer, msgspec.json.encode(_rehearse(request)))
    except PacelineError as error:  # doctor shows the last line
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    leave(main())
