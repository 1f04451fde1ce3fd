"""Stops and resumes Lightning's Trainer.

`Trainer.fit` gets one more callback, and the checkpoint of the last stop as `ckpt_path`. Lightning restores neither the
random states nor the place of a plain DataLoader in its epoch: the callback does.
"""

from __future__ import annotations

import inspect
import sys
from functools import wraps
from pathlib import Path
from typing import Any

from paceline.rank.imports import hide_from_warnings
from paceline.rank.stops import StepStops
from paceline.runs import reading, writing

FOLDER = "paceline-stopped"  # in default_root_dir
MAX_STATE_BYTES = 1 << 20


def install(stops: StepStops, module: str) -> None:
    """Change `Trainer.fit`. Call it after the import of `module`, which has the class."""
    trainer_class: Any = sys.modules[module].Trainer
    original = trainer_class.fit
    signature = inspect.signature(original)
    make_callback = _callback_class(stops, module.partition(".trainer.")[0])

    @hide_from_warnings
    @wraps(original)
    def fit(trainer: Any, *args: Any, **kwargs: Any) -> Any:
        if not stops.can_begin:
            return original(trainer, *args, **kwargs)
        call = signature.bind(trainer, *args, **kwargs)
        folder = Path(trainer.default_root_dir).resolve() / FOLDER
        if (record := stops.stopped_in(folder)) is not None:
            call.arguments["ckpt_path"] = str(folder / _checkpoint(record.step))
            stops.say(f"resuming from {call.arguments['ckpt_path']}: this command was stopped after this step")
        callback = make_callback(folder, is_resumed=record is not None)
        trainer.callbacks.append(callback)
        try:
            result = original(*call.args, **call.kwargs)
        finally:
            trainer.callbacks.remove(callback)
        if callback.step_saved:
            files = [_checkpoint(callback.step_saved), *(_random_file(rank) for rank in range(trainer.world_size))]
            stops.record(folder, callback.step_saved, files)
            stops.exit_saved(f"in {folder} after step {callback.step_saved}")
        return result

    trainer_class.fit = fit


def _checkpoint(step: int) -> str:
    return f"step={step}.ckpt"


def _random_file(rank: int) -> str:
    return f"random-{rank}.bin"


def _callback_class(stops: StepStops, package: str) -> Any:
    base: Any = sys.modules[f"{package}.callbacks"].Callback
    call_hook: Any = sys.modules[f"{package}.trainer.call"]._call_lightning_module_hook
    end_quietly: Any = sys.modules[f"{package}.utilities.exceptions"]._TunerExitException

    class StopAfterStep(base):
        """Saves and ends the training after the step that the coordinator has chosen."""

        def __init__(self, folder: Path, *, is_resumed: bool) -> None:
            self.folder, self.step_saved = folder, 0
            self._state_file = folder / _random_file(stops.rank)
            self._state_to_load = self._state_file if is_resumed else None
            self._step = 0
            self._is_resumable = False

        def on_train_start(self, trainer: Any, module: Any) -> None:
            if obstacle := _obstacle(trainer.fit_loop):
                stops.warn(obstacle)
                return
            self._is_resumable, self._step = True, trainer.global_step
            if self._state_to_load is not None:
                _skip_batches(trainer.fit_loop)
            stops.begin()

        def on_train_batch_start(self, trainer: Any, module: Any, *args: Any) -> None:
            if self._state_to_load is not None:
                _load_random_state(self._state_to_load, module.device)
                self._state_to_load = None

        def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
            loop = trainer.fit_loop.epoch_loop
            if not self._is_resumable or trainer.global_step == self._step:
                return  # gradients are being accumulated
            self._step = trainer.global_step
            # Lightning repeats or omits a validation that is due after this batch: stop after the next step
            is_at_edge = loop._num_ready_batches_reached() or loop._should_check_val_fx(trainer.fit_loop._data_fetcher)
            if not stops.end_step() or is_at_edge or loop._is_training_done:
                return
            call_hook(trainer, "on_train_batch_end", *args)  # Lightning calls the hook of the module after callbacks
            writing.make_folder(self.folder, exist_ok=True)
            writing.replace(self._state_file, _random_state(module.device))
            trainer.save_checkpoint(self.folder / _checkpoint(self._step))
            self.step_saved = self._step
            for logger in trainer.loggers:
                logger.finalize("success")
            raise end_quietly

    return StopAfterStep


def _obstacle(loop: Any) -> str:
    """Why a training could not continue in the middle of an epoch with the same batches; empty if it can."""
    if type(loop._data_fetcher).__name__ == "_DataLoaderIterDataFetcher":
        return "training_step takes the iterator of the batches"
    for loader in loop._combined_loader.flattened:
        sampler = getattr(loader, "sampler", None)
        is_ordered = type(sampler).__name__ == "SequentialSampler" or hasattr(sampler, "set_epoch")
        if not is_ordered and not hasattr(loader, "load_state_dict"):
            return f"the order of the batches of {type(loader).__name__} cannot be repeated"
    return ""


def _skip_batches(loop: Any) -> None:
    """Skip the batches of this epoch before the stop, unless the loaders restore their place themselves."""
    loaders = loop._combined_loader.flattened
    if all(hasattr(loader, "load_state_dict") for loader in loaders):
        return
    for loader in loaders:
        if hasattr(loader.sampler, "set_epoch"):
            loader.sampler.set_epoch(loop.epoch_progress.current.processed)
    iter(loop._data_fetcher)  # begins again, with the order of this epoch
    for _ in range(loop.epoch_loop.batch_progress.current.ready):
        next(loop._data_fetcher)
    loop._data_fetcher.fetched = 0  # the epoch loop adds the skipped batches


def _random_state(device: Any) -> bytes:
    from paceline.seeding import stream_states

    return stream_states(device).numpy().tobytes()


def _load_random_state(path: Path, device: Any) -> None:
    import torch

    from paceline.seeding import put_stream_states

    data = bytearray(reading.read(path, limit_bytes=MAX_STATE_BYTES))
    put_stream_states(torch.frombuffer(data, dtype=torch.uint8), device)
