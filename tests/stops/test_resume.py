"""Which checkpoint a training resumes from: its own, and only if the same command trains in the folder first."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.errors import raises

from paceline.errors import ExitCode
from paceline.protocol.status_page import StatusPage, make_status_page
from paceline.rank import framework_stops
from paceline.rank.stops import RECORD, ResumeRecordFile, StepStopHandler


@pytest.fixture(autouse=True)
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The script of this process, rank 0 of 2 on one node."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    script = tmp_path / "train.py"
    script.write_text("train()")
    monkeypatch.setitem(sys.modules, "__main__", SimpleNamespace(__file__=str(script)))
    monkeypatch.chdir(tmp_path)
    return script


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "out").mkdir()
    return tmp_path / "out"


def command(*argv: str) -> StepStopHandler:
    return StepStopHandler(StatusPage(make_status_page(0)), argv)


def opened(stops: StepStopHandler, folder: Path) -> ResumeRecordFile:
    training = stops.register_training(folder)
    assert training is not None
    return training


def stopped(folder: Path, *argv: str, step: int = 7, files: tuple[str, ...] = ()) -> ResumeRecordFile:
    """A training of this command that was stopped after this step."""
    training = opened(command(*argv), folder)
    training.record_saved_step(step, files)
    return training


def test_the_same_command_resumes_from_each_folder_of_its_script(folder: Path, script: Path) -> None:
    first = stopped(folder, "train.py", "--epochs", "3")
    again = opened(command(str(script), "--epochs", "3"), folder)
    assert again.stopped is not None and again.stopped.step == 7 and again.name == first.name


def test_another_command_neither_resumes_nor_forgets(folder: Path, tmp_path: Path) -> None:
    stopped(folder, "train.py")
    (tmp_path / "b").mkdir()
    for argv in (["train.py", "--lr", "1"], ["b/train.py"], ["-m", "train.py"]):
        stops = command(*argv)
        assert opened(stops, folder).stopped is None
        stops.remove_resume_records()
    assert (folder / RECORD).exists()


def test_a_changed_script_is_an_error(folder: Path, script: Path) -> None:
    stopped(folder, "train.py")
    script.write_text("train(lr=1)")
    with raises("stopped-script-changed", step=7):
        command("train.py").register_training(folder)


def test_a_record_that_others_could_have_written_is_not_used(folder: Path, capfd: Any) -> None:
    stopped(folder, "train.py")
    (folder / RECORD).chmod(0o666)
    assert opened(command("train.py"), folder).stopped is None
    assert RECORD in capfd.readouterr().err


def test_a_second_training_in_a_folder_cannot_be_stopped_and_ends_the_record_of_the_first(folder: Path) -> None:
    (folder / "state").touch()
    stopped(folder, "train.py", files=("state",))
    stops = command("train.py")
    assert opened(stops, folder).stopped is not None
    assert stops.register_training(folder) is None
    assert not [*folder.iterdir()]


def test_a_command_that_succeeds_removes_its_record(folder: Path) -> None:
    stopped(folder, "train.py")
    stops = command("train.py")
    stops.register_training(folder)
    stops.remove_resume_records()
    assert not [*folder.iterdir()]


def test_nodes_with_different_folders_are_an_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    training = opened(command("train.py"), folder)

    def gather(choices: list[Any], chosen: object) -> None:
        choices[:] = [chosen, "checkpoint-7"]

    monkeypatch.setitem(
        sys.modules, "torch.distributed", SimpleNamespace(get_world_size=lambda: 2, all_gather_object=gather)
    )
    training.check_same_checkpoint(None)  # one node: no collective
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    training.check_same_checkpoint("checkpoint-7")
    with raises("stop-record-not-shared", folder=folder):
        training.check_same_checkpoint(None)


# ---- checkpoints of Hugging Face's Trainer ----


class State:
    def __init__(self, step: int, *, mark: object = None, epoch: float = 0.5) -> None:
        self.global_step, self.max_steps, self.epoch = step, 100, epoch
        self.stateful_callbacks = {} if mark is None else {framework_stops.MARK: mark}

    @classmethod
    def load_from_json(cls, path: str) -> State:
        state = cls(0)
        vars(state).update(json.loads(Path(path).read_text()))
        return state


@pytest.fixture
def transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    module = SimpleNamespace(TrainerState=State, TrainerCallback=object)
    monkeypatch.setitem(sys.modules, "transformers.trainer_callback", module)


def save(folder: Path, step: int, mark: object, *, ranks: int = 2, epoch: float = 0.5) -> Path:
    checkpoint = folder / f"checkpoint-{step}"
    checkpoint.mkdir()
    (checkpoint / "trainer_state.json").write_text(json.dumps(vars(State(step, mark=mark, epoch=epoch))))
    for rank in range(ranks):
        (checkpoint / f"rng_state_{rank}.pth").touch()
    return checkpoint


def test_trainer_resumes_from_the_newest_whole_checkpoint_of_its_own(folder: Path, transformers: None) -> None:
    name = stopped(folder, "train.py").name
    save(folder, 7, [name, 7])
    own = save(folder, 9, [name, 9])
    save(folder, 11, [name, 11], ranks=1)  # rank 1 has not saved
    save(folder, 12, [name, 7])  # another program has continued from the first one
    save(folder, 13, ["other", 13])  # another command
    save(folder, 14, None)  # a start without paceline
    save(folder, 100, [name, 100])  # its last step, in the middle of an epoch
    stops = command("train.py")
    assert framework_stops._checkpoint_of_stop(stops, opened(stops, folder)) == own


def test_trainer_says_that_it_has_no_checkpoint_of_its_own(folder: Path, transformers: None, capfd: Any) -> None:
    stopped(folder, "train.py")
    save(folder, 7, None)
    stops = command("train.py")
    assert framework_stops._checkpoint_of_stop(stops, opened(stops, folder)) is None
    assert "not resumed" in capfd.readouterr().err


# ---- the callback of Trainer ----


class Requested(StepStopHandler):
    """Stops with a request that takes effect after this step."""

    last_step = 2

    def begin(self) -> None:
        self.begun = True

    def end_step(self) -> bool:
        self._steps += 1
        return self._steps >= self.last_step


def callback_of(stops: StepStopHandler, folder: Path) -> tuple[Any, Any, list[str]]:
    """The callback, its control, and the order of what it does at the end."""
    done: list[str] = []
    trainer = SimpleNamespace(
        accelerator=SimpleNamespace(wait_for_everyone=lambda: done.append("barrier")),
        callback_handler=SimpleNamespace(callbacks=[], on_train_end=lambda *_: done.append("end")),
    )
    control = SimpleNamespace(should_save=False, should_evaluate=False, should_training_stop=False)
    return framework_stops._trainer_callback(stops, trainer, opened(stops, folder)), control, done


def test_trainer_saves_after_the_chosen_step_with_its_mark(folder: Path, transformers: None) -> None:
    stops = Requested(StatusPage(make_status_page(0)), ["train.py"])
    callback, control, done = callback_of(stops, folder)
    callback.on_step_end(None, State(1), control)
    assert not control.should_save
    callback.on_step_end(None, state := State(2), control)
    assert control.should_save and not control.should_training_stop
    assert state.stateful_callbacks[framework_stops.MARK][1] == 2
    with pytest.raises(SystemExit) as ended:
        callback.on_save(None, state, control)
    assert ended.value.code == ExitCode.SAVED and done == ["barrier", "end"] and (folder / RECORD).exists()


def test_trainer_saves_at_the_end_of_an_epoch_after_its_evaluation(folder: Path, transformers: None) -> None:
    callback, control, _ = callback_of(Requested(StatusPage(make_status_page(0)), ["train.py"]), folder)
    for step in (1, 2):
        callback.on_step_end(None, State(step, epoch=1.0), control)
    assert not control.should_save
    callback.on_epoch_end(None, State(2, epoch=1.0), control)
    assert control.should_save


def test_trainer_goes_on_if_an_evaluation_discards_the_checkpoint_or_ends_the_training(
    folder: Path, transformers: None
) -> None:
    callback, control, done = callback_of(Requested(StatusPage(make_status_page(0)), ["train.py"]), folder)
    for step in (2, 3, 4):
        control.should_save = False  # save_strategy="best": the evaluation after the step before was not the best
        callback.on_step_end(None, State(step), control)
        assert control.should_training_stop is False
    assert control.should_save
    control.should_training_stop = True  # early stopping, in the evaluation before the checkpoint
    callback.on_save(None, State(4), control)
    control.should_save = False
    callback.on_epoch_end(None, State(4), control)
    assert not done and not control.should_save


def test_callbacks_of_trainer_continue_with_their_last_state() -> None:
    class Patience:
        counter = 0

    callbacks = [Patience(), object(), Patience()]
    states = [{"args": {}, "attributes": {"counter": number}} for number in range(4)]  # of two checkpoints
    framework_stops._restore_callbacks(callbacks, {"Patience": states, "Other": states[0]})
    assert [callbacks[0].counter, callbacks[2].counter] == [2, 3]


# ---- Accelerate ----


def test_accelerate_stops_after_a_save_of_rank_0_alone_and_not_in_a_window(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    finished: list[str] = []
    offline = SimpleNamespace(finish=lambda: 1 / 0)
    tracker = SimpleNamespace(finish=lambda: finished.append("tracker"))
    of_accelerate = {"sync_gradients": False, "trackers": [offline, tracker], "_dataloaders": []}
    accelerator_class: Any = type(
        "Accelerator", (), {"prepare": None, "save_state": lambda _, path: path, **of_accelerate}
    )
    monkeypatch.setitem(sys.modules, "accelerate.accelerator", SimpleNamespace(Accelerator=accelerator_class))
    stops = Requested(StatusPage(make_status_page(0)), ["train.py"])
    stops.last_step = 1
    framework_stops.patch_accelerate(stops, "accelerate.accelerator")
    accelerator = accelerator_class()
    assert accelerator.save_state("state-1") == "state-1" and "window" in capfd.readouterr().err
    accelerator.sync_gradients = True
    with pytest.raises(SystemExit) as ended:  # this accelerator has no collectives
        accelerator.save_state("state-2")
    assert ended.value.code == ExitCode.SAVED and finished == ["tracker"] and "state-2" in capfd.readouterr().err
    del accelerator_class.trackers  # as in a different version
    assert accelerator.save_state("state-3") == "state-3" and "without a checkpoint" in capfd.readouterr().err


# ---- the hook in each step ----


def test_a_step_without_a_request_only_accesses_memory() -> None:
    stops = command("train.py")
    stops.end_step()
    called: list[str] = []

    def note(frame: Any, event: str, function: Any) -> None:
        if event == "c_call":
            called.append(function.__name__)
        elif event == "call":
            called.append(Path(frame.f_code.co_filename).name)

    sys.setprofile(note)
    try:
        is_last = stops.end_step()
    finally:
        sys.setprofile(None)
    assert is_last is False
    assert {*called} <= {"stops.py", "status_page.py", "__exit__", "setprofile"}  # the lock is a memory fence
