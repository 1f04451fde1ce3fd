"""Stops and resumes Hugging Face's Trainer.

`Trainer.train` gets one more callback, the last one, and the checkpoint of the last stop as `resume_from_checkpoint`.
"""

from __future__ import annotations

import os
import re
import sys
from functools import wraps
from pathlib import Path
from typing import Any

from paceline.rank.imports import hide_from_warnings
from paceline.rank.stops import StepStops
from paceline.runs.reading import numbered_files

CHECKPOINT = re.compile(r"checkpoint-(\d+)")


def install(stops: StepStops, module: str) -> None:
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
        callback = _make_callback(stops, trainer, folder)
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
    for checkpoint in reversed(numbered_files(folder, CHECKPOINT).values()):
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


def _make_callback(stops: StepStops, trainer: Any, folder: Path) -> Any:
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
