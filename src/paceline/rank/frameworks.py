"""Stops and resumes unmodified scripts of frameworks: see rank/stops.py.

Trainer (Hugging Face): `train` gets one more callback, the last one, and the checkpoint of the last stop as
`resume_from_checkpoint`.

Accelerate: only the script knows what a checkpoint must contain, because the loop is in the script. A stop takes effect
after the next `save_state` of the script, and the script resumes with `load_state`.

Lightning: `fit` gets one more callback, and the checkpoint of the last stop as `ckpt_path`. Lightning restores neither
the random states nor the place of a plain DataLoader in its epoch: the callback does.
"""

from __future__ import annotations

import inspect
import os
import re
import sys
from contextlib import suppress
from functools import wraps
from pathlib import Path
from typing import Any

from paceline.rank.imports import hide_from_warnings
from paceline.rank.stops import StepStops
from paceline.runs import reading, writing
from paceline.runs.reading import numbered_files

TRAINER_CHECKPOINT = re.compile(r"checkpoint-(\d+)")
RESUMES = re.compile(rb"\.save_state\(.*\.load_state\(|\.load_state\(.*\.save_state\(", re.DOTALL)
FOLDER = "paceline-stopped"  # in default_root_dir
MAX_STATE_BYTES = 1 << 20


# ---- Hugging Face's Trainer ----


def install_trainer(stops: StepStops, module: str) -> None:
    """Change `Trainer.train`. Call it after the import of `module`, which has the class."""
    trainer_class: Any = sys.modules[module].Trainer
    original = trainer_class.train

    @hide_from_warnings
    @wraps(original)
    def train(trainer: Any, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        arguments = trainer.args
        is_search = bool(args) or kwargs.get("trial") is not None  # for hyperparameters: it trains many times
        if is_search or not stops.can_begin:
            return original(trainer, resume_from_checkpoint, *args, **kwargs)
        if getattr(arguments, "save_only_model", False):
            stops.warn("save_only_model=True leaves the optimizer out of its checkpoints")
            return original(trainer, resume_from_checkpoint, *args, **kwargs)
        folder = Path(arguments.output_dir).resolve()
        if resume_from_checkpoint is not False and (checkpoint := _checkpoint_of_stop(stops, folder)) is not None:
            resume_from_checkpoint = str(checkpoint)
        callback = _trainer_callback(stops, trainer, folder)
        trainer.add_callback(callback)
        try:
            return original(trainer, resume_from_checkpoint, *args, **kwargs)
        finally:
            trainer.remove_callback(callback)

    trainer_class.train = train


def _checkpoint_of_stop(stops: StepStops, folder: Path) -> Path | None:
    """The newest whole checkpoint since this command was stopped; None if it was not stopped."""
    record = stops.stopped_in(folder)
    if record is None:
        return None
    for checkpoint in reversed(numbered_files(folder, TRAINER_CHECKPOINT).values()):
        if _is_whole(checkpoint, {record.world_size, int(os.environ["WORLD_SIZE"])}):
            stops.say(f"resuming from {checkpoint}: this command was stopped after step {record.step}")
            return checkpoint
    return None


def _is_whole(checkpoint: Path, world_sizes: set[int]) -> bool:
    """Whether all ranks have saved it, and steps remain. Trainer would add a step to a training that has ended."""
    states = sys.modules["transformers.trainer_callback"].TrainerState
    random_states = [*checkpoint.glob("rng_state*.pth")]
    try:
        state = states.load_from_json(str(checkpoint / "trainer_state.json"))
    except (OSError, ValueError, TypeError):
        return False
    is_over = state.global_step >= state.max_steps and not float(state.epoch).is_integer()
    return len(random_states) in world_sizes and not is_over


def _trainer_callback(stops: StepStops, trainer: Any, folder: Path) -> Any:
    base: Any = sys.modules["transformers.trainer_callback"].TrainerCallback

    class StopAfterStep(base):
        """Saves and ends the training after the step that the agents have chosen."""

        is_stopping = False

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            stops.begin()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            # The last step ends the training anyway. With save_strategy="best" an evaluation decides about the
            # checkpoint, and would discard this one: stop after the next step.
            is_chosen_by_score = args.save_strategy == "best" and control.should_evaluate
            if not stops.end_step() or control.should_training_stop or is_chosen_by_score:
                return
            self.is_stopping = control.should_training_stop = True
            control.should_save = not float(state.epoch).is_integer()  # an epoch's end may evaluate first

        def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_save = control.should_save or self.is_stopping

        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if self.is_stopping:
                trainer.callback_handler.on_train_end(args, state, control)
                stops.record(folder, state.global_step)
                stops.exit_saved(f"in {folder} after step {state.global_step}")

    return StopAfterStep()


# ---- Accelerate ----


def install_accelerate(stops: StepStops, module: str) -> None:
    """Change `Accelerator.prepare` and `Accelerator.save_state`. Call it after the import of `module`."""
    accelerator_class: Any = sys.modules[module].Accelerator
    prepare, save_state = accelerator_class.prepare, accelerator_class.save_state

    @hide_from_warnings
    @wraps(prepare)
    def prepare_and_begin(accelerator: Any, *args: Any, **kwargs: Any) -> Any:
        if stops.can_begin and _is_resumable():
            stops.begin()
        return prepare(accelerator, *args, **kwargs)

    @hide_from_warnings
    @wraps(save_state)
    def save_and_stop(accelerator: Any, *args: Any, **kwargs: Any) -> Any:
        result = save_state(accelerator, *args, **kwargs)
        if stops.can_begin:
            stops.begin()
        if stops.end_step():
            for tracker in accelerator.trackers:
                tracker.finish()
            stops.exit_saved("after its save_state")
        return result

    accelerator_class.prepare, accelerator_class.save_state = prepare_and_begin, save_and_stop


def _is_resumable() -> bool:
    """Whether the file of the script both saves and loads states."""
    with suppress(OSError):
        return RESUMES.search(Path(sys.modules["__main__"].__file__ or "").read_bytes()) is not None
    return False


# ---- Lightning ----


def install_lightning(stops: StepStops, module: str) -> None:
    """Change `Trainer.fit`. Call it after the import of `module`, which has the class."""
    trainer_class: Any = sys.modules[module].Trainer
    original = trainer_class.fit
    signature = inspect.signature(original)
    make_callback = _lightning_callback(stops, module.partition(".trainer.")[0])

    @hide_from_warnings
    @wraps(original)
    def fit(trainer: Any, *args: Any, **kwargs: Any) -> Any:
        if not stops.can_begin:
            return original(trainer, *args, **kwargs)
        call = signature.bind(trainer, *args, **kwargs)
        folder = Path(trainer.default_root_dir).resolve() / FOLDER
        if (record := stops.stopped_in(folder)) is not None:
            call.arguments["ckpt_path"] = str(folder / _lightning_checkpoint(record.step))
            stops.say(f"resuming from {call.arguments['ckpt_path']}: this command was stopped after this step")
        callback = make_callback(folder, is_resumed=record is not None)
        trainer.callbacks.append(callback)
        try:
            result = original(*call.args, **call.kwargs)
        finally:
            trainer.callbacks.remove(callback)
        if callback.step_saved:
            files = [
                _lightning_checkpoint(callback.step_saved),
                *(_random_file(rank) for rank in range(trainer.world_size)),
            ]
            stops.record(folder, callback.step_saved, files)
            stops.exit_saved(f"in {folder} after step {callback.step_saved}")
        return result

    trainer_class.fit = fit


def _lightning_checkpoint(step: int) -> str:
    return f"step={step}.ckpt"


def _random_file(rank: int) -> str:
    return f"random-{rank}.bin"


def _lightning_callback(stops: StepStops, package: str) -> Any:
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
            writing.replace_file(self._state_file, _random_state(module.device))
            trainer.save_checkpoint(self.folder / _lightning_checkpoint(self._step))
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
    from paceline.seeding import generator_states

    return generator_states(device).numpy().tobytes()


def _load_random_state(path: Path, device: Any) -> None:
    import torch

    from paceline.seeding import restore_generator_states

    data = bytearray(reading.read(path, limit_bytes=MAX_STATE_BYTES))
    restore_generator_states(torch.frombuffer(data, dtype=torch.uint8), device)
