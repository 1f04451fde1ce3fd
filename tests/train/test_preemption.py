"""Being asked to stop: a flag first, the end at the second time, and a run that can be gone on with."""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests import warm
from tests.ended import ended, start_steps
from tests.errors import codes
from tests.launch.launch_harness import wait_until

from paceline.checkpoint.manager import Checkpoints
from paceline.runs.events import Checkpointed, Started, Step, read_events
from paceline.train.preemption import SIGNALS, record_stop_signals

PATIENCE_SECONDS = 50.0

# ---- the flag ----------------------------------------------------------------------------------------------------

# Says what it has noted after each signal that it gets; a second one ends it.
NOTING = """
import signal, sys
from paceline.train.preemption import record_stop_signals
with record_stop_signals() as request:
    print("ready", flush=True)
    for _ in sys.stdin:
        print(request.by, flush=True)
print([signal.getsignal(n) in (signal.SIG_DFL, signal.SIG_IGN, signal.default_int_handler) for n in
       (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)], flush=True)
"""


DEFAULT = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
"""
"""whoever runs the tests may have had them ignored, as nohup does"""


@pytest.fixture
def noting() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start NOTING, after `before` has run in the child."""
    started: list[subprocess.Popen[str]] = []

    def start(before: str = "") -> subprocess.Popen[str]:
        pipe = subprocess.PIPE
        code = DEFAULT + before + NOTING
        process = subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe, text=True)
        started.append(process)
        assert answer(process) == "ready"
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def answer(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def ask(process: subprocess.Popen[str]) -> str:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()
    return answer(process)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP], ids=lambda n: n.name)
def test_the_first_signal_is_noted_and_the_second_ends_the_process_by_itself(noting, number):
    process = noting()
    assert ask(process) == "None"
    process.send_signal(number)
    deadline = time.monotonic() + PATIENCE_SECONDS
    while ask(process) != number.name:  # another thread may receive it, and note it a moment later
        assert time.monotonic() < deadline
    process.send_signal(number)
    assert process.wait(PATIENCE_SECONDS) == -number


def test_sigterm_ends_a_process_that_was_forked_meanwhile():
    with record_stop_signals() as request:
        reader, writer = os.pipe()
        process = multiprocessing.get_context("fork").Process(target=begun, args=(writer,))
        process.start()
        os.read(reader, 1)
        os.close(reader), os.close(writer)
        process.terminate()  # as `with Pool()` does at its end
        process.join(PATIENCE_SECONDS)
    code = process.exitcode
    process.kill()
    assert (code, request.by) == (-signal.SIGTERM, None)


def begun(told: int) -> None:
    os.write(told, b".")
    time.sleep(600)


def test_the_second_signal_may_be_another_one(noting):
    process = noting()
    process.send_signal(signal.SIGUSR1)
    assert ask(process) == "SIGUSR1"
    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE_SECONDS) == -signal.SIGTERM


def test_an_ignored_hangup_stays_ignored(noting):
    """As nohup leaves it."""
    process = noting("import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)\n")
    process.send_signal(signal.SIGHUP)
    process.send_signal(signal.SIGHUP)
    assert ask(process) == "None"
    process.send_signal(signal.SIGTERM)
    assert ask(process) == "SIGTERM"


@pytest.mark.parametrize("fails", [False, True])
def test_the_handlers_are_put_back(fails):
    before = {number: signal.getsignal(number) for number in SIGNALS}
    with pytest.raises(ValueError) if fails else record_stop_signals(), record_stop_signals() as request:
        assert signal.getsignal(signal.SIGTERM) == request.handle
        if fails:
            raise ValueError
    assert {number: signal.getsignal(number) for number in SIGNALS} == before


def test_outside_the_main_thread_nothing_is_touched():
    before = {number: signal.getsignal(number) for number in SIGNALS}
    seen: list[object] = []

    def body() -> None:
        with record_stop_signals() as request:
            seen.extend([request.by, {number: signal.getsignal(number) for number in SIGNALS}])

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert seen == [None, before]


# ---- the command -------------------------------------------------------------------------------------------------

# Steps of 20 ms, without an end; a dataset whose samples come one by one, so that loader workers load them. Where there
# is a file named `stuck`, a step takes a minute.
TASK = """
import os
import time
import torch
from torch import nn
from paceline import ArrayDataset, Task

class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 6400
    def __getitem__(self, index):
        return torch.tensor([index / 6400]), torch.tensor(0.5)

def loss(outputs, targets):
    if is_stuck := os.path.exists("stuck"):
        open(f"stuck-{os.environ.get('RANK', '')}", "w").close()
    time.sleep(60 if is_stuck else 0.02)
    return (outputs[:, 0] - targets).square()

endless = Task(lambda: nn.Linear(1, 1), lambda split: Samples(), loss)
"""


@pytest.fixture
def endless(tmp_path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start a training of TASK that nobody would wait for, and wait until every rank has taken a step."""
    (tmp_path / "mine.py").write_text(TASK)
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: object, ranks: int = 2, command: tuple[str, ...] = ("-m", "paceline")):
        words = (*command, "train", "mine.py:endless", "--batch-size", 4, "--epochs", 50, "--run-dir", "run")
        process = warm.Popen(
            (*words, *arguments), agents="--nproc" in arguments, cwd=tmp_path, text=True, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        started.append(process)
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not all(steps(tmp_path, rank) for rank in range(ranks)):
            assert process.poll() is None and time.monotonic() < deadline, process.communicate()
            time.sleep(0.05)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def steps(folder: Path, rank: int) -> list[int]:
    path = folder / f"run/events-{rank}.jsonl"
    return [e.step for e in read_events(path) if isinstance(e, Step)] if path.is_file() else []


def pids(folder: Path, ranks: int = 2) -> list[int]:
    starts = [e for r in range(ranks) for e in read_events(folder / f"run/events-{r}.jsonl") if isinstance(e, Started)]
    return [start.pid for start in starts]


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def saved_step(folder: Path, ranks: int = 2) -> int:
    """The step that all ranks stopped at together and that is on disk, whole."""
    checkpoints = Checkpoints(folder / "run/checkpoints")
    found = checkpoints.newest_valid(print)
    assert found is not None
    assert {tuple(steps(folder, rank)) for rank in range(ranks)} == {tuple(range(1, found[1].step + 1))}
    return found[1].step


pytestmark = pytest.mark.timeout(270)


@pytest.mark.ranks
def test_sigterm_to_the_command_saves_and_says_how_to_go_on(endless, tmp_path):
    process = endless("--nproc", 2, "--num-workers", 1)
    assert all(children(pid) for pid in pids(tmp_path))  # loader workers, who must not end before the last step has
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 75, err
    assert err.startswith("paceline: SIGTERM: ") and err.count("\n") == 1
    first, second = (tmp_path.joinpath("run", "attempt-1", f"rank-{rank}.log").read_text() for rank in (0, 1))
    assert "killed" not in first and second == ""  # nobody was reported killed
    step = saved_step(tmp_path)
    assert f" {step} of 40000" in out and f"--resume auto --run-dir {tmp_path}/run" in out
    summary = ended(tmp_path / "run")
    assert (summary.exit, summary.steps) == (75, step)


@pytest.mark.slow
@pytest.mark.ranks
def test_a_signal_to_one_worker_stops_all_of_them_together(endless, tmp_path):
    """As Slurm's --signal does it."""
    process = endless("--nproc", 2)
    os.kill(pids(tmp_path)[1], signal.SIGUSR1)
    out, err = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 75, err
    assert f"saved after step {saved_step(tmp_path)} of" in out
    assert err == ""


@pytest.mark.ranks
def test_the_second_signal_ends_all_at_once(endless, tmp_path):
    process = endless("--nproc", 2)
    (tmp_path / "stuck").touch()
    wait_until(lambda: all((tmp_path / f"stuck-{rank}").exists() for rank in (0, 1)), "both ranks are in a long step")
    process.send_signal(signal.SIGTERM)  # takes effect after the step
    log = tmp_path / "run" / "attempt-1" / "rank-0.log"
    wait_until(lambda: "SIGTERM" in log.read_text(), "the first signal has arrived")
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    began = time.monotonic()
    _, err = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 128 + signal.SIGTERM
    assert time.monotonic() - began < 25
    assert "stopped by SIGTERM" in err
    assert not list((tmp_path / "run").glob("checkpoints/step-*"))


@pytest.mark.slow
def test_ctrl_c_in_a_world_of_one_saves_too(endless, tmp_path):
    """A terminal sends it to everybody in the foreground, loader workers as well."""
    process = endless("--num-workers", 1, ranks=1)
    (loader,) = children(process.pid)
    for pid in (loader, process.pid):
        os.kill(pid, signal.SIGINT)
    out, err = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 75, err
    assert f"saved after step {saved_step(tmp_path, 1)} of" in out


@pytest.mark.slow
@pytest.mark.ranks
def test_workers_of_torchrun_save_and_end_with_75(endless, tmp_path):
    command = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "paceline")
    process = endless(command=command)
    for pid in pids(tmp_path):
        os.kill(pid, signal.SIGTERM)
    out, err = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 1  # torchrun's own, for whatever its workers ended with
    assert "exitcode  : 75" in err.replace("exitcode: 75", "exitcode  : 75"), err
    assert f"saved after step {saved_step(tmp_path)} of" in out


@pytest.mark.slow
def test_a_rehearsal_after_the_end_is_refused(paceline, tmp_path):
    (tmp_path / "mine.py").write_text(TASK.replace("0.02", "0"))
    run = paceline("train", "mine.py:endless", "--batch-size", 64, "--steps", 3, "--rehearse-preemption", 3)
    assert run.returncode == 2, run.stdout
    assert codes(run.stderr) == ["rehearsal-too-late"]


@pytest.mark.slow
def test_a_rehearsal_stops_and_resumes_by_itself(paceline, tmp_path):
    (tmp_path / "mine.py").write_text(TASK.replace("0.02", "0"))
    run = paceline("train", "mine.py:endless", "--batch-size", 64, "--steps", 8, "--rehearse-preemption", 3)
    assert run.returncode == 0, run.stderr
    (made,) = (tmp_path / "runs").iterdir()  # no --run-dir: it goes on where it has begun
    assert "rehearsal: " in run.stderr and start_steps(made) == [0, 4]
    made.rename(tmp_path / "run")
    assert steps(tmp_path, 0) == list(range(1, 9))
    saved = [e for e in read_events(tmp_path / "run/events-0.jsonl") if isinstance(e, Checkpointed)]
    assert [(e.step, e.failure) for e in saved] == [(4, ""), (8, "")]
