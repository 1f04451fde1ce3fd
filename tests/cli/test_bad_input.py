"""Wrong use: exit code 2 with an explanation, before torch is imported and before anything is started or written."""

import json
import os
import signal
import socket
import subprocess
import sys

import pytest
from tests import warm
from tests.errors import codes, raises

from paceline.cli import _train_as_rank  # pyright: ignore[reportPrivateUsage]

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
# Runs many commands in one process, and prints the exit code and the output of each.
MANY = """
import contextlib, io, json, sys
from paceline.cli import main
for arguments in json.loads(sys.argv[1]):
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(shown):
        try:
            code = main(arguments.split())
        except SystemExit as end:
            code = end.code
    print(json.dumps((99 if "torch" in sys.modules else code, shown.getvalue())))
"""
CNN, TWO = "train mnist-cnn", "train mnist-cnn --nproc 2"
MINE = "train mine.py:task"
ROWS = [  # arguments, code of the error, a part of its text
    ("trian", "unknown-name", "'train'"),
    ("train", "no-task", ""),
    ("train mnist-cn", "unknown-name", "'mnist-cnn'"),
    (f"{CNN} --strategy dpp", "wrong-command-line", "'dpp'"),
    (f"{CNN} --epohs 3", "unknown-option", "--epochs?"),
    (f"{CNN} --learning-rate 3", "unknown-option", "--lr?"),
    (f"{CNN} --learning_rate=3", "unknown-option", "--lr?"),
    (f"{CNN} --num-processes 2", "unknown-option", "--nproc?"),
    (f"{CNN} --n_epochs 2", "unknown-option", "--epochs?"),
    ("launch --num-processes 2 -- x.py", "unknown-option", "--nproc?"),
    ("launch --nproc 2 -- no_such.py --learning-rate 3", "script-not-found", "no_such.py"),
    (f"{CNN} --lr fast", "wrong-command-line", "--lr"),
    (f"{CNN} --batch-size 0", "not-positive", "--batch-size"),
    (f"{CNN} --epochs -1", "not-positive", "--epochs"),
    (f"{CNN} --lr nan", "not-positive", "--lr"),
    (f"{CNN} --nproc 0", "not-positive", "--nproc"),
    (f"{CNN} --nproc two", "wrong-command-line", "--nproc"),
    (f"{CNN} --device tpu", "wrong-command-line", "--device"),
    (f"{CNN} --device cuda", "no-cuda", ""),
    (f"{CNN} --stem small", "task-option", "--stem"),
    (f"{TWO} --strategy single", "strategy-of-one-process", ""),
    (f"{TWO} --strategy dp", "strategy-of-one-process", "manual, bucketed, ddp"),
    (f"{CNN} --nproc 4 --virtual-ranks 2", "processes-without-work", "--virtual-ranks 2"),
    (f"{CNN} --global-batch 100 --batch-size 8 --accumulation 2", "batch-does-not-fit", ""),
    (f"{CNN} --data-dir /nowhere", "", "/nowhere"),
    (f"{CNN} --config /nowhere.toml", "config-unreadable", "/nowhere.toml"),
    (f"{CNN} --config", "wrong-command-line", "--config"),
    ("train no.such.module:task", "no-such-module-file", "'no'"),
    ("train paceline.nope:task", "no-such-module-file", "'paceline.nope'"),
    ("train nofile.py:task", "no-such-task-file", ""),
    ("train nofile.py:", "not-a-name", ""),
    (f"{TWO} --run-dir /proc/run", "run-dir-not-writable", ""),
    (f"{TWO} --run-dir full", "run-dir-not-empty", ""),
    (f"{MINE} --resume auto", "resume-without-run-dir", ""),
    (f"{MINE} --restart --run-dir new", "option-needs-resume", ""),
    (f"{MINE} --allow-change lr --run-dir new", "option-needs-resume", ""),
    (f"{MINE} --resume auto --run-dir full --nproc 2", "not-a-run", ""),
    (f"{MINE} --run-dir full --nproc 2", "run-dir-not-empty", ""),
    (f"{MINE} --strategy exact --batchnorm sync", "exact-with-sync-batchnorm", ""),
    (f"{MINE} --strategy zero --batchnorm sync --nproc 2", "exact-with-sync-batchnorm", ""),
    *((f"{TWO} --hang-timeout={s}", "hang-timeout-invalid", "--hang-") for s in ("0", "-3", "abc", "nan", "1e3", "")),
    ("launch --hang-timeout never -- script.py", "hang-timeout-invalid", "--hang-timeout"),
    (f"{CNN} --hang-timeout 5", "hang-timeout-without-agent", "--nproc"),
    (f"{TWO} --not-finite ignore", "wrong-command-line", "'ignore'"),
    ("launch --collectives shard -- script.py", "wrong-command-line", "'shard'"),
    ("launch --collectives shared --nodes 2 --on print -- script.py", "collectives-not-shared", "2 nodes"),
    ("launch --collectives shared --nodes 1 --on print -- script.py", "collectives-not-shared", "--agent paceline"),
    ("launch --collectives shared -- echo", "collectives-not-shared", "auto or torch"),
    ("verify mnist-cn", "unknown-name", "'mnist-cnn'"),
    ("verify mnist-cnn --ranks 1,x", "not-whole-numbers", ""),
    ("verify mnist-cnn --ranks 0", "not-whole-numbers", ""),
    ("verify mnist-cnn --strategies ddp,megatron", "unknown-name", "'megatron'"),
    ("verify mnist-cnn --optimizers lion", "unknown-name", "'lion'"),
    ("verify mnist-cnn --json nowhere/x.json", "out-folder-missing", ""),
]


@pytest.fixture(scope="module")
def ended(tmp_path_factory) -> dict[str, tuple[int, str]]:
    """The exit code and the output of each command in ROWS; none of them has written a file."""
    folder = tmp_path_factory.mktemp("wrong")
    files = {"script.py": "", "mine.py": "task = None", "full/events-0.jsonl": "", "full/thesis.tex": "precious"}
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    arguments = [row[0] for row in ROWS]
    done = warm.run(["-c", MANY, json.dumps(arguments)], cwd=folder, env={**os.environ}, torch=False)
    assert done.returncode == 0, done.stderr
    assert {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()} == files
    assert sorted(path.name for path in folder.iterdir()) == ["full", "mine.py", "script.py"]
    return dict(zip(arguments, map(json.loads, done.stdout.splitlines()), strict=True))


@pytest.mark.parametrize(("arguments", "code", "part"), ROWS, ids=[row[0] for row in ROWS])
def test_wrong_use_is_an_error_before_anything_is_started(ended, arguments, code, part):
    exit_code, shown = ended[arguments]
    assert exit_code == 2, shown
    assert codes(shown) == [code] * bool(code) and part in " ".join(shown.split()), shown
    assert "Traceback" not in shown


def test_without_a_command_the_usage_is_shown(paceline):
    run = paceline(command=("-c", WITHOUT_TORCH))
    assert run.returncode == 2 and "usage" in run.stdout


DAMAGES = {"missing": None, "truncated": lambda found: found[:-100], "magic": lambda found: b"PK" + found[2:]}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_damaged_data(paceline, small_mnist, tmp_path, damage):
    for path in small_mnist.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    victim = tmp_path / "train-images-idx3-ubyte"
    victim.write_bytes(damage(victim.read_bytes())) if damage else victim.unlink()
    run = paceline("train", "mnist-cnn", "--data-dir", tmp_path, "--nproc", 2, command=("-c", WITHOUT_TORCH))
    assert run.returncode == 2, run.stderr
    assert victim.name in run.stderr


@pytest.mark.slow
def test_a_port_that_is_taken(paceline, small_mnist):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        run = paceline("train", "mnist-cnn", "--data-dir", small_mnist, "--nproc", 2, "--port", port)
    assert run.returncode == 2, run.stderr
    assert str(port) in run.stderr
    assert "Traceback" not in run.stderr


RANK = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "x"}


@pytest.mark.parametrize(
    ("words", "env", "code", "part"),
    [
        ("", {"RANK": "0", "WORLD_SIZE": "2"}, "variables-missing", "not LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR"),
        ("--nproc 2", {**RANK, "MASTER_PORT": "1"}, "nproc-within-launcher", ""),
        ("--hang-timeout 5", {"RANK": "0", "WORLD_SIZE": "1"}, "hang-timeout-without-agent", "paceline watchover"),
    ],
)
def test_what_a_rank_of_another_launcher_cannot_do_is_an_error(paceline, words, env, code, part):
    command = ("-c", WITHOUT_TORCH) if code else ("-m", "paceline")
    run = paceline("train", "mnist-cnn", *words.split(), env=env, command=command)
    assert (run.returncode, codes(run.stderr)) == (2, [code] * bool(code)), run.stderr
    assert part in " ".join(run.stderr.split())


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


def test_the_file_of_a_worker_is_checked_before_it_trains(tmp_path) -> None:
    """`paceline launch -m paceline train --config FILE`: no launcher has read the file."""
    file = tmp_path / "config.toml"
    file.write_text('task = "no_such.py:task"\n[optimizer]\nclip_norm = -1.0\n')
    with raises("not-positive", value=-1.0):
        _train_as_rank(file)
