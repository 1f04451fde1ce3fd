"""A rank of `paceline compare` or `paceline scale`: trains each candidate for a chunk of steps, and times it.

`python -m paceline.proofs.bench.worker FOLDER`, started with torchrun's variables. The folder holds order.json and
config.toml; rank 0 adds a line to chunks.jsonl for each candidate, and every rank writes its steps as a training does,
into FOLDER/<candidate>/events-<rank>.jsonl.
"""

import gc
import os
import time
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import torch

from paceline import config as configuration
from paceline.bench.spec import (
    CHUNKS,
    CONFIG,
    LOOKED_AT,
    ORDER,
    RUNNING,
    Candidate,
    Measurement,
    MeasureOrder,
    Memory,
)  # fmt: skip
from paceline.checkpoint.shards import sha256_of, whole
from paceline.collectives.communicator import make_communicator
from paceline.collectives.compress import DEFAULT_RANK, LowRank
from paceline.collectives.control import gather_words, together
from paceline.compute.flops import Utilization
from paceline.host.gpu_use import ask_gpus
from paceline.ladder import EXACT
from paceline.mesh import OF_MODEL, mesh_of
from paceline.observe.utilization import arithmetic
from paceline.proofs.bench.memory import Traffic, inspected
from paceline.proofs.bench.training import CandidateTraining, Ground, load_ground
from paceline.train.determinism import deterministic
from paceline.train.step import ignore
from paceline.worker.attach import run_worker
from paceline.worker.device import device_words
from paceline.worker.guard import Guard
from paceline.worker.world import World, joined, on_mesh

DRIVER_SECONDS = 2.0  # to say what holds a GPU back


def measure_candidates(order: MeasureOrder, ground: Ground) -> None:
    """Measure all candidates (a collective); rank 0 writes down what they did."""
    folder, world, compute = Path(order.folder), ground.world, ground.config.compute
    _import_lazily(world)
    launched = time.time() - order.started_unix
    for candidate in order.candidates:
        laid_out = on_mesh(world, mesh_of(candidate.mesh or None, world.size))
        if world.rank == 0:
            (folder / RUNNING).write_bytes(msgspec.json.encode(candidate))
        torch.set_num_threads(candidate.threads)
        if world.rank == 0 and compute.precision != "auto":  # the others wait in `_measure`
            Utilization(world, compute.peak_tflops, ground.count, compute.precision).peak_tflops(measure=True)
        with deterministic() if candidate.strategy in EXACT else nullcontext():
            measured = _measure(order, replace(ground, world=laid_out), candidate, launched)
        if world.rank == 0:
            with (folder / CHUNKS).open("ab") as file:
                file.write(msgspec.json.encode(measured) + b"\n")
        gc.collect()  # models hang in cycles of hooks and closures


def _measure(order: MeasureOrder, ground: Ground, candidate: Candidate, launched: float) -> Measurement:
    """One candidate: applied to a new model, its first steps, its warm-up, its chunk."""
    world, box = ground.world, Guard.of_process().box
    folder, last = Path(order.folder) / candidate.name, order.warmup + order.steps
    with inspected(world.device) if order.memory else nullcontext() as inspection:
        gather_words(0, world)
        began = time.perf_counter()
        training = CandidateTraining(ground, candidate, folder, last, inspection.enter if inspection else ignore)
        replica = training.parts.replica
        if inspection:
            inspection.watch(replica)
        training.take(1)
        first = time.perf_counter() - began
        training.take(1)  # DDP rebuilds its buckets in the second step, and is what it will be in the third
        traffic = Traffic(box, replica.world, replica.pipeline)
        microbatches = training.take_one()
        sent = traffic.sent()
        if inspection:
            inspection.batch(microbatches)
    with training:
        training.take(order.warmup - LOOKED_AT)
        gather_words(0, world)
        began, cpu = time.perf_counter(), sum(os.times()[:2])
        samples = training.take(order.steps)
        mine: dict[str, Any] = {
            "seconds": time.perf_counter() - began, "cpu": sum(os.times()[:2]) - cpu, "first": first, "sent": sent,
            "memory": msgspec.to_builtins(inspection.found) if inspection else None,
            "sync": training.sync_seconds,
        }  # fmt: skip
        mine["gpu"] = ask_gpus([os.getpid()], wait_seconds=DRIVER_SECONDS).get(os.getpid(), "")  # while it is still hot
        weights = [held for held in replica.state() if held.name.startswith("model/")]
        digest = sha256_of(whole(weights, world))
    trained, memory = [p for p in replica.model.parameters() if p.requires_grad], None
    mine["weights"] = sum(p.numel() * p.element_size() for p in trained)
    everybody = gather_words(mine, world)
    one_copy = replica.world.mesh.peers(0, OF_MODEL) if replica.world.mesh else (0,)
    if inspection:  # of each number the largest of all ranks
        names = Memory.__struct_fields__
        memory = Memory(**{name: _most(each["memory"][name] for each in everybody) for name in names})
    return Measurement(
        name=candidate.name,
        strategy=candidate.strategy,
        world_size=world.size,
        batch_size=candidate.batch_size,
        threads=candidate.threads,
        global_batch=training.parts.plan.global_batch,
        samples=samples,
        seconds=max(each["seconds"] for each in everybody),
        cpu_seconds=sum(each["cpu"] for each in everybody),
        first_step_seconds=max(each["first"] for each in everybody),
        launch_seconds=launched,
        digest=digest,
        weight_bytes=sum(everybody[rank]["weights"] for rank in one_copy),
        low_rank_bytes=4 * LowRank([p.shape for p in trained], torch.float32, DEFAULT_RANK).sent,
        sent_bytes=_most(each["sent"] for each in everybody),
        memory=memory,
        device=device_words(world.device),
        sync_share=sum(each["sync"] / each["seconds"] for each in everybody) / world.size,
        notes=(*ground.notes, *training.notes),
        mesh=candidate.mesh,
        use=training.use.speed(rate := samples / max(each["seconds"] for each in everybody)),
        mfu_words=arithmetic(rate, ground.count.per_sample, training.use.peak_tflops(), world.size),
        gpus={rank: each["gpu"] for rank, each in enumerate(everybody) if each["gpu"]},
    )


def _import_lazily(world: World) -> None:
    """Let torch import what it imports at the first step of any optimizer, so that it is no candidate's time."""
    parameter = torch.nn.Parameter(torch.zeros(1, device=world.device))
    parameter.grad = torch.zeros_like(parameter)
    torch.optim.SGD([parameter], lr=0.0).step()
    gather_words(0, world)


def _most(values: Iterable[Any]) -> Any:
    return max((value for value in values if value is not None), default=None)


def main(arguments: Sequence[str]) -> int:
    """Measure what the order in folder `arguments[0]` says."""
    folder = Path(arguments[0])
    order = msgspec.json.decode((folder / ORDER).read_bytes(), type=MeasureOrder)
    config = configuration.load(folder.resolve() / CONFIG, ours=True)
    world = World.from_env(device=config.launch.device, backend=config.launch.backend)
    with joined(world, timeout_seconds=config.launch.timeout):
        make_communicator(config.launch.collectives)
        with together(world):
            ground = load_ground(config, order.candidates, world)
        measure_candidates(order, ground)
    return 0


if __name__ == "__main__":
    run_worker(main)
