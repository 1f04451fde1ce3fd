"""Stops and resumes unmodified scripts of frameworks: see rank/stops.py.

Trainer (Hugging Face): `train` gets one more callback, the last one, and the checkpoint of the last stop as
`resume_from_checkpoint`. A checkpoint belongs to a training if its trainer_state.json has the name of the training and
this step. Other programs that save there, or continue from there, leave no such file.

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
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import wraps
from pathlib import Path
from typing import Any

import torch

from paceline.rank.imports import hide_from_warnings
from paceline.rank.probes import wrap_function
from paceline.rank.stops import ResumeRecordFile, StepStopHandler, read_main_script
from paceline.runs import reading, writing
from paceline.runs.reading import numbered_files
from paceline.seeding import generator_states, restore_generator_states

TRAINER_CHECKPOINT = re.compile(r"checkpoint-(\d+)")
RESUMES = re.compile(rb"\.save_state\(.*\.load_state\(|\.load_state\(.*\.save_state\(", re.DOTALL)
FOLDER = "paceline-stopped"  # in default_root_dir
MARK = "paceline"  # in trainer_state.json: the name of the training, and the step
MAX_STATE_BYTES = 1 << 20
PLAIN_BATCHES = ("BatchSampler", "NoneType")  # types of batch samplers that draw nothing themselves


# ---- Hugging Face's Trainer ----


def patch_hf_trainer(stops: StepStopHandler, module: str) -> None:
    trainer_class: Any = sys.modules[module].Trainer
    original = trainer_class.train

    @hide_from_warnings
    @wraps(original)
    def train(trainer: Any, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        arguments, training = trainer.args, None
        is_search = (args[0] if args else kwargs.get("trial")) is not None  # for hyperparameters: it trains many times
        if getattr(arguments, "save_only_model", False):
            stops.warn("save_only_model=True leaves the optimizer out of its checkpoints")
        elif not is_search and stops.can_install_handlers:
            training = stops.register_training(Path(arguments.output_dir).resolve())
        if training is None:
            return original(trainer, resume_from_checkpoint, *args, **kwargs)
        if (checkpoint := _checkpoint_of_stop(stops, training)) is not None:
            resume_from_checkpoint = str(checkpoint)
        callback = _trainer_callback(stops, trainer, training)
        trainer.add_callback(callback)
        try:
            return original(trainer, resume_from_checkpoint, *args, **kwargs)
        finally:
            trainer.remove_callback(callback)

    trainer_class.train = train


def _checkpoint_of_stop(stops: StepStopHandler, training: ResumeRecordFile) -> Path | None:
    """The newest whole checkpoint of this training; None if it was not stopped."""
    if (record := training.stopped) is None:
        training.check_same_checkpoint(None)
        return None
    world_sizes = {record.world_size, int(os.environ["WORLD_SIZE"])}
    checkpoints = reversed(numbered_files(training.folder, TRAINER_CHECKPOINT).values())
    checkpoint = next((path for path in checkpoints if _is_whole(path, training.name, world_sizes)), None)
    training.check_same_checkpoint(checkpoint)
    if checkpoint is None:
        stops.say(f"warning: {training.folder} has no whole checkpoint of the stopped training: not resumed")
    else:
        stops.say(f"resuming from {checkpoint}: this command was stopped after step {record.step}")
    return checkpoint


def _is_whole(checkpoint: Path, training: str, world_sizes: set[int]) -> bool:
    """Whether all ranks of this training have saved it, and steps remain.

    Trainer would add a step to a training that has ended.
    """
    states = sys.modules["transformers.trainer_callback"].TrainerState
    random_states = [*checkpoint.glob("rng_state*.pth")]
    try:
        state = states.load_from_json(str(checkpoint / "trainer_state.json"))
    except (OSError, ValueError, TypeError):
        return False
    is_own = state.stateful_callbacks.get(MARK) == [training, state.global_step]
    is_over = state.global_step >= state.max_steps and not float(state.epoch).is_integer()
    return is_own and len(random_states) in world_sizes and not is_over


def _trainer_callback(stops: StepStopHandler, trainer: Any, training: ResumeRecordFile) -> Any:
    base: Any = sys.modules["transformers.trainer_callback"].TrainerCallback

    class StopAfterStep(base):
        is_stopping = False

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if training.stopped is not None:
                _restore_callbacks(trainer.callback_handler.callbacks, state.stateful_callbacks)
            stops.install_handlers()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.is_stopping = stops.end_step() and not control.should_training_stop  # the last step ends it anyway
            if self.is_stopping or training.stopped is not None:
                state.stateful_callbacks[MARK] = [training.name, state.global_step]
            # An epoch's end may evaluate first. With save_strategy="best" an evaluation decides about the checkpoint,
            # and may discard this one: then stop after the next step.
            if self.is_stopping and not float(state.epoch).is_integer():
                control.should_save = True

        def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_save |= self.is_stopping and not control.should_training_stop

        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if self.is_stopping and not control.should_training_stop:  # an evaluation may also end the training
                trainer.accelerator.wait_for_everyone()
                trainer.callback_handler.on_train_end(args, state, control)
                training.record_saved_step(state.global_step)
                stops.exit_saved(f"in {training.folder} after step {state.global_step}")

    return StopAfterStep()


def _restore_callbacks(callbacks: Sequence[Any], saved: Mapping[str, Any]) -> None:
    """Restore the attributes of callbacks, e.g. the patience of early stopping. Trainer does it only on request."""
    for name, states in saved.items():
        named = [callback for callback in callbacks if type(callback).__name__ == name]
        states = states if isinstance(states, list) else [states]  # Trainer appends the states of each checkpoint
        for callback, state in zip(named, states[-len(named) :], strict=False):
            vars(callback).update(state["attributes"])


# ---- Accelerate ----


def patch_accelerate(stops: StepStopHandler, module: str) -> None:
    accelerator_class: Any = sys.modules[module].Accelerator

    @stops.report_hook_error()
    def begin(_: Any, accelerator: Any, *__: Any, **___: Any) -> None:
        if stops.can_install_handlers and RESUMES.search(read_main_script()):
            stops.install_handlers()
            if any(getattr(loader, "synchronized_generator", None) is not None for loader in accelerator._dataloaders):
                stops.warn(
                    "Accelerate saves no order of samples without DataLoaderConfiguration(use_seedable_sampler=True)"
                )

    @stops.report_hook_error()
    def end_step(folder: Any, accelerator: Any, *_: Any, **__: Any) -> None:
        if stops.can_install_handlers:
            stops.install_handlers()
        if not accelerator.sync_gradients:
            stops.warn("save_state in an accumulation window leaves out the gradients of the window")
        elif stops.end_step():
            for tracker in accelerator.trackers:  # no collective: a script may save on rank 0 only
                with suppress(Exception):  # without its service: the stop does not depend on it
                    tracker.finish()
            stops.exit_saved(f"in {folder}", "the same command resumes if it loads this state")

    wrap_function(accelerator_class, "prepare", after=begin)
    wrap_function(accelerator_class, "save_state", after=end_step)


# ---- Lightning ----


def patch_lightning_trainer(stops: StepStopHandler, module: str) -> None:
    trainer_class: Any = sys.modules[module].Trainer
    original = trainer_class.fit
    signature = inspect.signature(original)
    make_callback = _lightning_callback(stops, module.partition(".trainer.")[0])

    @hide_from_warnings
    @wraps(original)
    def fit(trainer: Any, *args: Any, **kwargs: Any) -> Any:
        folder = Path(trainer.default_root_dir).resolve() / FOLDER
        has_all_ranks = trainer.world_size == int(os.environ["WORLD_SIZE"])
        training = stops.register_training(folder) if stops.can_install_handlers and has_all_ranks else None
        if training is None:
            return original(trainer, *args, **kwargs)
        call = signature.bind(trainer, *args, **kwargs)
        if training.stopped is not None:
            call.arguments["ckpt_path"] = str(folder / training.stopped.files[0])
            if "weights_only" in signature.parameters:
                call.arguments["weights_only"] = False  # hyperparameters may have any type. The file is ours
            stops.say(f"resuming from {call.arguments['ckpt_path']}: this command was stopped after this step")
        callback = make_callback(training)
        trainer.callbacks.append(callback)
        try:
            result = original(*call.args, **call.kwargs)
        finally:
            trainer.callbacks.remove(callback)
        if callback.files_saved:
            training.record_saved_step(callback.step, callback.files_saved)
            stops.exit_saved(f"in {folder} after step {callback.step}")
        return result

    trainer_class.fit = fit


def _lightning_callback(stops: StepStopHandler, package: str) -> Any:
    base: Any = sys.modules[f"{package}.callbacks"].Callback
    call_hook: Any = sys.modules[f"{package}.trainer.call"]._call_lightning_module_hook
    end_quietly: Any = sys.modules[f"{package}.utilities.exceptions"]._TunerExitException

    class StopAfterStep(base):
        def __init__(self, training: ResumeRecordFile) -> None:
            self.step, self.files_saved = 0, tuple[str, ...]()
            self._training, self._random_file = training, ""
            self._is_resumable = False
            if training.stopped is not None and stops.rank < training.stopped.world_size:
                self._random_file = training.stopped.files[1 + stops.rank]

        def setup(self, trainer: Any, module: Any, stage: str) -> None:
            self._training.check_same_checkpoint(self._training.stopped)

        def on_train_start(self, trainer: Any, module: Any) -> None:
            trainer.callbacks = [callback for callback in trainer.callbacks if callback is not self] + [self]
            if obstacle := _obstacle(trainer.fit_loop):
                stops.warn(obstacle)
                return
            self._is_resumable, self.step = True, trainer.global_step
            if self._training.stopped is not None:
                _skip_batches(trainer.fit_loop)
            stops.install_handlers()

        def on_train_batch_start(self, trainer: Any, module: Any, *args: Any) -> None:
            if self._random_file:
                path = self._training.folder / self._random_file
                state = bytearray(reading.read_file(path, limit_bytes=MAX_STATE_BYTES))
                restore_generator_states(torch.frombuffer(state, dtype=torch.uint8), module.device)
                self._random_file = ""

        def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
            if not self._is_resumable or trainer.global_step == self.step:
                return  # gradients are being accumulated
            self.step = trainer.global_step
            if not stops.end_step() or _must_continue(trainer):
                return
            call_hook(trainer, "on_train_batch_end", *args)  # Lightning calls the hook of the module after callbacks
            folder, name = self._training.folder, f"{self._training.name}-step={self.step}"
            files = f"{name}.ckpt", *(f"{name}-random-{rank}.bin" for rank in range(trainer.world_size))
            writing.make_folder(folder, exist_ok=True)
            writing.replace_file(folder / files[1 + stops.rank], generator_states(module.device).numpy().tobytes())
            trainer.save_checkpoint(folder / files[0])  # ends with a barrier
            self.files_saved = files
            for logger in trainer.loggers:
                logger.finalize("success")
            raise end_quietly

    return StopAfterStep


def _must_continue(trainer: Any) -> bool:
    """Whether the training must take another step, or ends here.

    Lightning repeats or omits a validation that is due after this batch, and a checkpoint has no `should_stop`.
    """
    loop = trainer.fit_loop.epoch_loop
    is_validation_due = loop._should_check_val_fx(trainer.fit_loop._data_fetcher)
    return is_validation_due or loop._num_ready_batches_reached() or loop._is_training_done or trainer.should_stop


def _obstacle(loop: Any) -> str:
    """Why a training could not continue in the middle of an epoch with the same batches; empty if it can."""
    if type(loop._data_fetcher).__name__ == "_DataLoaderIterDataFetcher":
        return "training_step takes the iterator of the batches"
    for loader in loop._combined_loader.flattened:
        sampler = getattr(loader, "sampler", None)
        is_plain = type(getattr(loader, "batch_sampler", None)).__name__ in PLAIN_BATCHES
        is_ordered = type(sampler).__name__ == "SequentialSampler" or hasattr(sampler, "set_epoch")
        if not (is_plain and is_ordered) and not hasattr(loader, "load_state_dict"):
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
