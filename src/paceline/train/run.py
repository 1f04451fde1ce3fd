"""A whole training on this rank: from the configuration to the weights on disk."""

from __future__ import annotations

import os
import platform
import socket
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import torch

from paceline import __version__
from paceline.collectives import check_equal, gather_words, together
from paceline.config import TrainConfig, batch_shape, default_strategy, dump
from paceline.data.loader import load_steps
from paceline.errors import ExitCode, PacelineError, TrainingError
from paceline.observe import events
from paceline.observe.folder import create_attempt_dir, create_run_dir
from paceline.observe.progress import Display
from paceline.observe.summary import Summary, write_summary
from paceline.observe.throughput import Throughput
from paceline.train.evaluate import evaluate
from paceline.train.fit import StepRecord, fit
from paceline.train.prepare import Parts, prepare
from paceline.train.weights import digest, rescue, save
from paceline.train.wording import closing_lines, opening_lines, scores
from paceline.world import World, joined


def train(config: TrainConfig, *, run_dir: Path | None = None) -> Path:
    """Train as `config` says, as the rank that the environment says; return the run folder.

    Args:
        config: all settings.
        run_dir: the run folder, if a launcher has made it already.

    Raises:
        UsageError: before the first step, told by one rank.
        TrainingError: while training, on every rank that notices.
    """
    world = World.from_env(device=config.launch.device, backend=config.launch.backend)
    with joined(world, timeout_seconds=config.launch.timeout):
        with together(world):
            made = run_dir or (create_run_dir(config.run.run_dir, str(config.task)) if world.rank == 0 else None)
        folder = Path(gather_words(str(made), world)[0])
        with together(world):
            attempt = _open_attempt(config, folder, world, prepared=run_dir is not None)
        try:
            parts = prepare(config, world)
            _Training(parts, folder, attempt).run()
        except BaseException as error:
            if run_dir is None and world.rank == 0:  # with a launcher of ours, that one knows the exit code
                _summarise_failure(config, folder, world, error)
            raise
    return folder


def _summarise_failure(config: TrainConfig, folder: Path, world: World, error: BaseException) -> None:
    code = error.exit_code if isinstance(error, PacelineError) else ExitCode.FAILED
    code = 130 if isinstance(error, KeyboardInterrupt) else int(code)
    name = default_strategy(config, world.size)
    with suppress(OSError):  # the full disk is the error itself
        write_summary(
            folder, Summary(str(config.task), code, name, world.size, failure=f"{type(error).__name__}: {error}")
        )


def resolved(config: TrainConfig, world_size: int) -> TrainConfig:
    """`config` with every default that depends on the world size filled in, so that the record repeats the run."""
    shape = batch_shape(config.data, world_size)
    data = replace(
        config.data,
        virtual_ranks=shape.virtual_ranks,
        accumulation=shape.accumulation,
        global_batch=shape.global_batch,
        batch_size=None,
    )
    run = replace(config.run, run_dir=None)  # a run is never repeated into its own folder
    return replace(config, data=data, run=run, strategy=default_strategy(config, world_size))


def _open_attempt(config: TrainConfig, folder: Path, world: World, *, prepared: bool) -> int:
    if world.rank != 0:
        return 1  # there is no second attempt yet
    attempt = 1 if prepared else create_attempt_dir(folder)[0]
    (folder / "config.toml").write_text(dump(resolved(config, world.size)))
    (folder / "environment.json").write_bytes(msgspec.json.format(msgspec.json.encode(_environment(world)), indent=2))
    return attempt


def _environment(world: World) -> Mapping[str, Any]:
    gpu = torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else None
    return {
        "paceline": __version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "host": socket.gethostname(),
        "device": str(world.device),
        "gpu": gpu,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "backend": world.backend,
        "world_size": world.size,
        "threads_per_rank": torch.get_num_threads(),
        "started_by": "torchrun" if "TORCHELASTIC_RUN_ID" in os.environ else "paceline",
    }


class _Training:
    """One rank's run over its steps: the state that the loop, its records and its end share."""

    def __init__(self, parts: Parts, folder: Path, attempt: int) -> None:
        self._parts, self._folder, self._attempt = parts, folder, attempt
        self._world = parts.replica.world
        self._throughput = Throughput()
        self._step = self._samples = 0
        self._metrics: dict[str, float] = {}

    def run(self) -> None:
        """Train, evaluate, save, summarise."""
        parts, began = self._parts, time.perf_counter()
        config = parts.config.run
        writer = events.EventWriter(self._folder / f"events-{self._world.rank}.jsonl")
        display = Display(total_steps=parts.total_steps, interval=config.log_interval, shown=self._world.rank == 0)
        with self._weights_survive(), writer, display:
            writer.write(self._started())
            for line in opening_lines(parts):
                display.say(line)
                writer.write(events.Notice(line))
            self._loop(writer, display)
            writer.write(events.Ended(self._step, time.time()))
        with self._weights_survive():
            self._finish(display, time.perf_counter() - began)

    def _loop(self, writer: events.EventWriter, display: Display) -> None:
        parts = self._parts
        plan, loop = parts.plan, parts.config
        batches = load_steps(
            parts.train_set, plan, parts.share, parts.loading,
            start=0, stop=parts.total_steps, merged=loop.model.batchnorm == "sync",
        )  # fmt: skip
        records = fit(parts.replica, batches, parts.task.loss, parts.schedule, max_norm=loop.optimizer.clip_norm)
        try:
            for record in records:
                self._note(record, writer, display)
                if record.step % plan.steps_per_epoch == 0 or record.step == parts.total_steps:
                    self._evaluate(writer, display)
        finally:  # ends the loader's processes also when a step fails
            records.close()
            batches.close()

    def _note(self, record: StepRecord, writer: events.EventWriter, display: Display) -> None:
        plan = self._parts.plan
        epoch, step = divmod(record.step - 1, plan.steps_per_epoch)
        samples = len(plan.global_indices(epoch, step))
        self._step, self._samples = record.step, self._samples + samples
        self._throughput.step(samples)
        loss, norm = record.result.loss, record.result.grad_norm
        writer.write(
            events.Step(
                step=record.step,
                epoch=epoch,
                loss=loss,
                samples=samples,
                lr=record.lr,
                seconds=record.seconds,
                data_seconds=record.data_seconds,
                unix_time=time.time(),
                grad_norm=norm,
            )
        )
        if self._parts.config.run.record_samples:
            for batch in record.microbatches:
                work = batch.work
                if work.counted:
                    indices: list[int] = work.indices.tolist()
                    writer.write(events.Samples(record.step, epoch, work.virtual_rank, work.part, indices))
        left = (self._parts.total_steps - record.step) * plan.global_batch
        display.step(
            record.step, epoch=epoch, loss=loss, lr=record.lr, rate=self._throughput.recent(), samples_left=left
        )

    def _evaluate(self, writer: events.EventWriter, display: Display) -> None:
        parts, began = self._parts, time.perf_counter()
        self._metrics = evaluate(parts.replica, parts.test_set, parts.task.loss, parts.task.metrics, parts.loading)
        seconds = time.perf_counter() - began
        self._throughput.pause(seconds)
        writer.write(events.Evaluated(self._step, self._metrics, seconds))
        display.say(f"test after step {self._step}: {scores(self._metrics)}")

    def _finish(self, display: Display, seconds: float) -> None:
        parts, replica = self._parts, self._parts.replica
        with replica.merged_buffers():
            sha256 = digest(replica.model)
            # In lockstep to the last: a rank whose weights differ has not computed this run.
            check_equal("final weights", sha256, self._world, error=TrainingError)
            if self._world.rank != 0:
                return
            save(replica.model, self._folder / "model.safetensors")
        summary = Summary(
            task=str(parts.config.task),
            exit=0,
            strategy=default_strategy(parts.config, self._world.size),
            world_size=self._world.size,
            virtual_ranks=parts.plan.virtual_ranks,
            global_batch=parts.plan.global_batch,
            epochs=self._step / parts.plan.steps_per_epoch,
            steps=self._step,
            samples_seen=self._samples,
            test_accuracy=self._metrics.get("accuracy"),
            test_loss=self._metrics.get("loss"),
            test_metrics=self._metrics,
            samples_per_second=self._throughput.overall(),
            seconds=seconds,
            weights_sha256=sha256,
        )
        write_summary(self._folder, summary)
        for line in closing_lines(summary, self._folder):
            display.say(line)

    @contextmanager
    def _weights_survive(self) -> Generator[None]:
        """Inside, a file that cannot be written ends the run, but not without putting the weights somewhere."""
        try:
            yield
        except OSError as error:
            where = rescue(self._parts.replica.model, self._folder) if self._step else "nothing was trained yet"
            raise TrainingError(
                f"rank {self._world.rank} cannot go on after step {self._step}: {error}; {where}"
            ) from error

    def _started(self) -> events.Started:
        world = self._world
        return events.Started(
            self._attempt, world.rank, world.size, socket.gethostname(), os.getpid(), str(world.device), time.time()
        )
