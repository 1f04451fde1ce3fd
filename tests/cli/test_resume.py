"""`--resume auto`: what is refused before anything starts, and what a person is told where the run goes on."""

import json
import os
import re
import shutil
import tomllib
from pathlib import Path

import pytest
from tests import warm
from tests.checkpoint.checkpoint_harness import sealed
from tests.cli.test_bad_input import WITHOUT_TORCH
from tests.ended import start_steps
from tests.errors import ended_with, raises
from tests.run_script import run_script

import paceline
from paceline.config.settings import load
from paceline.runs.events import Started, Step, read_events
from paceline.runs.folder import lock_run_dir

TIMED = {"seconds", "samples_per_second", "data_share", "peak_memory_bytes", "goodput", "flops_per_second", "mfu"}
TASK = """
import os
import torch
from torch import nn
from paceline import ArrayDataset, Task

def data(split):
    return ArrayDataset(torch.arange(60.0).reshape(60, 1) / 60 + float(os.environ.get("OFFSET", 0)), torch.zeros(60))

task = Task(lambda: nn.Linear(1, 1), data, lambda outputs, targets: (outputs[:, 0] - targets).square())
"""
# Waits for a lock 0.2 s instead of 10.
IMPATIENT = WITHOUT_TORCH.replace(
    "import sys\n",
    "import sys\nfrom paceline.runs.folder import lock_run_dir\nlock_run_dir.__kwdefaults__['wait_seconds'] = 0.2\n",
)


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> tuple[Path, str]:
    """A folder with a run of 12 steps for 4 virtual ranks, checkpoints at 4, 8 and 12; and what it has said."""
    folder = tmp_path_factory.mktemp("finished")
    (folder / "mine.py").write_text(TASK)
    arguments = "train mine.py:task --run-dir run --resume auto --virtual-ranks 4 --global-batch 3 --steps 12"
    more = "--checkpoint-every 4 --lr 0.002 --strategy bucketed"
    run = warm.run(["-m", "paceline", *arguments.split(), *more.split()], cwd=folder)
    assert run.returncode == 0, run.stderr
    return folder, run.stdout


@pytest.fixture
def resume(paceline, finished, tmp_path):
    """Run `paceline train --resume auto --run-dir run ARGUMENTS` on a copy of the finished run."""
    shutil.copytree(finished[0], tmp_path, dirs_exist_ok=True)

    def run(arguments: str = "", **more):
        return paceline("train", "--resume", "auto", "--run-dir", "run", *arguments.split(), **more)

    return run


def kept(folder: Path) -> list[str]:
    return sorted(p.name for p in (folder / "run/checkpoints").glob("step-*"))


def contents(folder: Path) -> dict[Path, bytes]:
    return {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def summary_of(folder: Path) -> dict:
    return json.loads((folder / "run/summary.json").read_text())


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


# ---- refused, before torch is imported, and nothing is changed -----------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ("--virtual-ranks 5", "another-run-for-good", ["virtual_ranks: 4", "5 now", "random streams"]),
        ("--seed 7", "another-run-for-good", ["seed: 0", "7 now"]),
        ("--global-batch 8", "another-run-for-good", ["global_batch: 3", "8 now"]),
        ("--optimizer sgd", "another-run", ["optimizer: adamw", "sgd now", "different state"]),
        ("--optimizer sgd --nproc 2", "another-run", ["optimizer: adamw", "sgd now"]),
        ("--lr 3", "another-run", ["lr: 0.002", "3.0 now", "--allow-change lr"]),
        ("--lr 3 --steps 20 --allow-change steps", "another-run", ["lr: 0.002", "--allow-change steps,lr"]),
        ("--steps 20 --seed 7", "another-run", ["steps: 12", "20 now", "seed: 0", "--allow-change steps"]),
        ("--allow-change seed", "change-never-allowed", ["seed"]),
        ("--allow-change epoch", "unknown-name", ["setting to change 'epoch'", "'epochs'?"]),
        ("--keep-checkpoints 1", "keep-checkpoints-too-few", ["got 1"]),
        ("--max-restarts 1", "restarts-need-nproc", []),
        ("--nproc 2 --max-restarts 1 --min-nproc 3", "min-nproc-too-large", ["3", "2"]),
        ("--nproc 5", "processes-without-work", ["5 processes", "--virtual-ranks 4"]),
    ],
)
def test_another_run_is_refused_before_anything_starts(resume, tmp_path, arguments, code, words):
    before = contents(tmp_path)
    run = resume(arguments, command=("-c", WITHOUT_TORCH))
    ended_with(run, code)
    for word in words:
        assert word in run.stderr
    assert "Traceback" not in run.stderr
    assert contents(tmp_path) == before
    assert (f"{tmp_path}/run/checkpoints/step-00000012" in run.stderr) == code.startswith("another-run")


def test_the_checkpoint_of_another_task_names_both_tasks(resume, tmp_path):
    shutil.copy(tmp_path / "mine.py", tmp_path / "other.py")
    run = resume("other.py:task --steps 20", command=("-c", WITHOUT_TORCH))
    ended_with(run, "another-task")
    assert "mine.py:task" in run.stderr and "--allow-change task" in run.stderr and "steps" not in run.stderr


def test_a_folder_without_a_run_is_an_error_if_no_task_is_named(paceline, tmp_path):
    run = paceline("train", "--resume", "auto", "--run-dir", "runs/mistyped", command=("-c", WITHOUT_TORCH))
    ended_with(run, "resume-of-nothing")
    assert not (tmp_path / "runs").exists()


def test_a_second_run_in_the_folder_names_the_first(resume, tmp_path):
    lock = lock_run_dir(tmp_path / "run")
    try:
        before = contents(tmp_path)
        run = resume("--nproc 2", command=("-c", IMPATIENT))
        assert contents(tmp_path) == before
    finally:
        os.close(lock)
    ended_with(run, "run-is-active")
    assert f"{tmp_path}/run (pid {os.getpid()} on " in run.stderr


# ---- going on ------------------------------------------------------------------------------------------------------


def test_a_new_folder_is_a_fresh_start(finished):
    folder, said = finished
    assert "resumes after" not in said and said.count("no checkpoint") == 1
    assert kept(folder) == ["step-00000004", "step-00000008", "step-00000012"]
    assert [e.step for e in read_events(folder / "run/events-0.jsonl") if isinstance(e, Step)] == list(range(1, 13))


def test_more_virtual_ranks_than_samples_in_a_batch_are_told_once(finished):
    _, said = finished
    assert said.count("1 of 4 virtual ranks ") == 1


def test_a_complete_run_has_nothing_left_and_keeps_its_result(resume, tmp_path):
    before, weights = summary_of(tmp_path), (tmp_path / "run/model.safetensors").read_bytes()
    run = resume()
    assert run.returncode == 0, run.stderr
    assert start_steps(tmp_path / "run") == [0, 12]
    assert "never get a sample" in run.stdout  # it is said once a start
    for summary in (before, after := summary_of(tmp_path)):
        for name in {*summary} & TIMED:
            del summary[name]
    assert after == before
    assert (tmp_path / "run/model.safetensors").read_bytes() == weights
    assert [e.step for e in read_events(tmp_path / "run/events-0.jsonl") if isinstance(e, Step)] == list(range(1, 13))


@pytest.mark.ranks
def test_damaged_and_unknown_checkpoints_are_passed_over_in_words_and_unset_flags_stay(resume, tmp_path):
    """Only the number of ranks and an allowed lr are given: everything else is as the run was."""
    newest, second = (tmp_path / f"run/checkpoints/step-{step:08d}" for step in (12, 8))
    manifest = json.loads((newest / "manifest.json").read_text())["manifest"]
    (newest / "manifest.json").write_bytes(sealed({**manifest, "format": 2}))
    flip(second / "shard-0-of-1.safetensors")
    run = resume("--lr 0.004 --allow-change lr", ranks=2)
    assert run.returncode == 0, run.stderr
    reasons = dict(re.findall(r"(step-\d{8}) .*?: (\S+)", run.stdout))
    assert (reasons[newest.name], reasons[second.name]) == ("manifest.json", "shard-0-of-1.safetensors")
    assert re.search(r"changed .*: lr: 0.002 .*, 0.004 now", run.stdout)
    summary = summary_of(tmp_path)
    assert (summary["steps"], summary["samples_seen"], summary["virtual_ranks"]) == (12, 36, 4)
    assert (summary["global_batch"], summary["strategy"]) == (3, "bucketed")
    starts = [e for e in read_events(tmp_path / "run/events-0.jsonl") if isinstance(e, Started)]
    assert [(e.attempt, e.start_step, e.world_size) for e in starts] == [(1, 0, 1), (2, 4, 2)]
    assert kept(tmp_path)[-1] == "step-00000012"


def test_without_any_whole_checkpoint_it_is_fresh_or_nothing(resume, tmp_path):
    for path in (tmp_path / "run/checkpoints").glob("step-*/shard-*"):
        flip(path)
    before = contents(tmp_path / "run/checkpoints")
    run = resume()
    assert run.returncode == 2 and "[no-whole-checkpoint]" in run.stderr, run.stdout
    assert "paceline checkpoint verify" in run.stderr and "--restart" in run.stderr
    assert {p: b for p, b in contents(tmp_path / "run/checkpoints").items() if p in before} == before
    run = resume("--restart --lr 3 --steps 4")  # nothing is compared
    assert run.returncode == 0, run.stderr
    assert start_steps(tmp_path / "run")[-1] == 0
    assert kept(tmp_path) == ["step-00000004"]
    assert [*(tmp_path / "run").glob("model-before-restart-1.*")]
    aside = tmp_path / "run/checkpoints-before-restart-1"
    assert {aside / p.relative_to(tmp_path / "run/checkpoints"): b for p, b in before.items()} == contents(aside)


def test_a_finished_run_without_checkpoints_does_not_begin_again_by_itself(resume, tmp_path):
    for path in (tmp_path / "run/checkpoints").glob("step-*"):
        shutil.rmtree(path)
    before = contents(tmp_path)
    run = resume(command=("-c", WITHOUT_TORCH))
    ended_with(run, "run-has-ended")
    assert contents(tmp_path) == before


def test_other_data_are_named_and_refused(resume, tmp_path):
    run = resume(env={"OFFSET": "1"})
    ended_with(run, "another-run-for-good")
    there, now = re.findall(r"{'test data': {.*?}, 'training data': {.*?}}", run.stderr)
    assert there != now and f"data: {there}" in run.stderr
    assert kept(tmp_path) == ["step-00000004", "step-00000008", "step-00000012"]


# ---- settings that were renamed ------------------------------------------------------------------------------------


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """The run folders `run` and `own` as the version before 2026-11-29 wrote them, with the script of each."""
    shutil.copytree(Path(__file__).with_name("old_run"), tmp_path, dirs_exist_ok=True)
    return tmp_path


def test_a_run_with_the_former_names_of_settings_resumes(paceline, old: Path) -> None:
    former = load(old / "run/config.toml", must_own=False)
    assert (former.data.last_batch, former.run.report_to, former.task_arg) == ("drop", "tensorboard", ("width=5",))
    words = ("train", "mine.py:task", "--resume=auto", "--run-dir=run", "--allow-change=task", "--report-to=")
    changed = paceline(*words, "--task-arg", "width=6", "--last-batch", "keep", command=("-c", WITHOUT_TORCH))
    ended_with(changed, "another-run")
    assert "task_arg.width: " in changed.stderr and "last_batch: " in changed.stderr
    run = paceline(*words, ranks=2)
    assert run.returncode == 0, run.stderr
    now = tomllib.loads((old / "run/config.toml").read_text())
    assert now["checkpoint"]["keep_checkpoints"] == 4 and now["checkpoint"]["check_replicas_every"] == 3
    assert (now["guard"]["hang_timeout"], now["launch"]["grace_period"], now["task_arg"]) == ("90", 20, {"width": 5})
    assert start_steps(old / "run") == [12] and json.loads((old / "run/summary.json").read_text())["steps"] == 20


def test_a_file_with_both_names_of_a_setting_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "both.toml").write_text("[data]\ntail = 'drop'\nlast_batch = 'keep'\n")
    with raises("renamed", value="tail", current="last_batch"):
        load(tmp_path / "both.toml", must_own=False)


def test_a_session_with_the_former_names_of_settings_resumes(old: Path) -> None:
    run = warm.run([old / "own.py", "own", "resume"], cwd=old)
    assert run.returncode == 0, run.stderr
    assert start_steps(old / "own") == [9] and json.loads((old / "own/summary.json").read_text())["steps"] == 12


def test_a_script_and_a_task_do_not_resume_each_others_runs(paceline, old: Path) -> None:
    task = paceline("train", "mine.py:task", "--resume=auto", "--run-dir=own", command=("-c", WITHOUT_TORCH))
    ended_with(task, "resume-of-session")
    assert "own.py" in task.stderr
    script = run_script(1, old / "own.py", "run", "resume", cwd=old)
    ended_with(script, "another-task")
    assert "mine.py:task" in script.stderr and "own.py" in script.stderr


@pytest.mark.parametrize(
    ("arguments", "current"),
    [
        ("train mnist-cnn --tail drop", "--last-batch"), ("train mnist-cnn --set=a=1", "--task-arg"),
        ("train mnist-cnn --stall-after 9", "--hang-timeout"), ("train mnist-cnn --stop-grace 9", "--grace-period"),
        ("train mnist-cnn --keep 3", "--keep-checkpoints"), ("train mnist-cnn --track wandb", "--report-to"),
        ("train mnist-cnn --fresh", "--restart"), ("train mnist-cnn --watch_every 9", "--check-replicas-every"),
        ("train mnist-cnn --resume auto --run-dir x --allow-change set.width", "task_arg.width"),
        ("launch --stall-after 9 a.py", "--hang-timeout"), ("verify mnist-cnn --set a=1", "--task-arg"),
    ],
)  # fmt: skip
def test_the_former_name_of_an_option_is_an_error_with_its_name(paceline, arguments: str, current: str) -> None:
    run = paceline(*arguments.split(), command=("-c", WITHOUT_TORCH))
    ended_with(run, "renamed")
    assert f"Use {current} " in run.stderr


def test_the_former_name_of_an_argument_is_an_error_with_its_name() -> None:
    with raises("renamed", value="track", current="report_to"):
        paceline.session("run", track="wandb")
    with paceline.session() as s, raises("renamed", value="tail", current="last_batch"):
        s.loader([], tail="drop")
