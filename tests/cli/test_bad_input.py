"""Wrong use: exit code 2, in words, before torch is imported and before anything is started or written."""

import signal
import socket
import subprocess
import sys

import pytest

# Runs the command in a process of its own, and fails with 99 if that imported torch.
WITHOUT_TORCH = """
import sys
from paceline.cli import main
try:
    code = main(sys.argv[1:])
except SystemExit as end:
    code = end.code
sys.exit(99 if "torch" in sys.modules else code)
"""


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("", "usage"),
        ("trian", "Did you mean 'train'"),
        ("train", "no task given"),
        ("train mnist-cn", "Did you mean 'mnist-cnn'"),
        ("train mnist-cnn --strategy dpp", "unknown choice"),
        ("train mnist-cnn --epohs 3", "Did you mean --epochs?"),
        ("train mnist-cnn --learning-rate 3", "paceline train has no --learning-rate. Did you mean --lr?"),
        ("train mnist-cnn --learning_rate=3", "Did you mean --lr?"),
        ("train mnist-cnn --num-processes 2", "Did you mean --nproc?"),
        ("train mnist-cnn --n_epochs 2", "Did you mean --epochs?"),
        ("launch --num-processes 2 -- x.py", "paceline launch has no --num-processes. Did you mean --nproc?"),
        ("launch --nproc 2 -- no_such.py --learning-rate 3", "there is no script"),
        ("train mnist-cnn --lr fast", "--lr"),
        ("train mnist-cnn --batch-size 0", "--batch-size must be greater than 0, got 0"),
        ("train mnist-cnn --epochs -1", "--epochs"),
        ("train mnist-cnn --lr nan", "--lr"),
        ("train mnist-cnn --nproc 0", "--nproc"),
        ("train mnist-cnn --nproc two", "--nproc"),
        ("train mnist-cnn --device tpu", "--device"),
        ("train mnist-cnn --device cuda", "[no-cuda]"),
        ("train mnist-cnn --stem small", "has no --stem"),
        ("train mnist-cnn --nproc 2 --strategy single", "single-process"),
        ("train mnist-cnn --nproc 2 --strategy dp", "manual, bucketed, ddp"),
        ("train mnist-cnn --nproc 4 --virtual-ranks 2", "--virtual-ranks 2"),
        ("train mnist-cnn --global-batch 100 --batch-size 8 --accumulation 2", "does not fit"),
        ("train mnist-cnn --data-dir /nowhere", "does not exist"),
        ("train mnist-cnn --config /nowhere.toml", "No such file"),
        ("train mnist-cnn --config", "--config: expected one argument"),
        ("train no.such.module:task", "there is no module 'no'"),
        ("train paceline.nope:task", "there is no module 'paceline.nope'"),
        ("train nofile.py:task", "there is no file"),
        ("train nofile.py:", "[not-a-name]"),
        ("train mnist-cnn --run-dir /proc/run", "cannot be written"),
        ("train mnist-cnn --nproc 2 --run-dir full", "[run-dir-not-empty]"),
        ("verify mnist-cn", "Did you mean 'mnist-cnn'"),
        ("verify mnist-cnn --ranks 1,x", "[not-whole-numbers]"),
        ("verify mnist-cnn --ranks 0", "[not-whole-numbers]"),
        ("verify mnist-cnn --strategies ddp,megatron", "unknown strategy 'megatron'"),
        ("verify mnist-cnn --optimizers lion", "unknown optimizer"),
        ("verify mnist-cnn --json nowhere/x.json", "does not exist"),
    ],
)
def test_is_told_before_anything_is_started(paceline, tmp_path, arguments, words):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "events-0.jsonl").write_text("")
    run = paceline(*arguments.split(), command=("-c", WITHOUT_TORCH))
    if "/proc/run" in arguments:  # a world of one finds it when it makes the folder
        assert run.returncode in (2, 99)
    else:
        assert run.returncode == 2, run.stdout + run.stderr
    said = " ".join((run.stdout + run.stderr).split())
    assert words in said
    assert "Traceback" not in said
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("damage", ["missing", "truncated", "magic"])
def test_damaged_data(paceline, small_mnist, tmp_path, damage):
    for path in small_mnist.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    victim = tmp_path / "train-images-idx3-ubyte"
    if damage == "missing":
        victim.unlink()
    elif damage == "truncated":
        victim.write_bytes(victim.read_bytes()[:-100])
    else:
        victim.write_bytes(b"PK" + victim.read_bytes()[2:])
    run = paceline("train", "mnist-cnn", "--data-dir", tmp_path, "--nproc", 2, command=("-c", WITHOUT_TORCH))
    assert run.returncode == 2, run.stderr
    assert "train-images-idx3-ubyte" in run.stderr


def test_a_port_that_is_taken(paceline, small_mnist):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        run = paceline("train", "mnist-cnn", "--data-dir", small_mnist, "--nproc", 2, "--port", port)
    assert run.returncode == 2, run.stderr
    assert str(port) in run.stderr
    assert "Traceback" not in run.stderr


def test_a_partly_set_environment_is_no_world_of_one(paceline):
    run = paceline("train", "mnist-cnn", env={"RANK": "0", "WORLD_SIZE": "2"})
    assert run.returncode == 2
    assert "not LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT" in run.stderr


def test_nproc_within_a_launcher_that_decided_otherwise(paceline):
    env = {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "x",
        "MASTER_PORT": "1",
    }
    run = paceline("train", "mnist-cnn", "--nproc", 2, env=env, command=("-c", WITHOUT_TORCH))
    assert run.returncode == 2
    assert "[nproc-within-launcher]" in run.stderr


def test_a_reader_that_goes_away_is_no_error() -> None:
    command = subprocess.Popen(
        [sys.executable, "-m", "paceline", "launch", "--help"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,
    )
    assert command.stdout is not None and command.stderr is not None
    command.stdout.close()
    assert command.stderr.read() == b""
    command.stderr.close()
    assert command.wait(20) == 128 + signal.SIGPIPE
