"""`paceline checkpoint list RUN` and `verify RUN`: their output and exit codes."""

import os
import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from tests.checkpoint.checkpoint_harness import saved, sealed, shard_name
from tests.errors import codes, raises

from paceline.cli.checkpoint import main
from paceline.errors import UsageError


@pytest.fixture
def run(tmp_path) -> Path:
    saved(tmp_path / "run" / "checkpoints", 1, 2, 3)
    return tmp_path / "run"


def spoil(run: Path, step: int, *, short: bool = False) -> None:
    path = run / "checkpoints" / f"step-{step:08d}" / shard_name(1, 2)
    path.write_bytes(path.read_bytes()[: 3127 if short else 3128][:-1] + b"?" * (not short))


@pytest.mark.parametrize("inner", ["", "checkpoints"])
def test_list_shows_every_checkpoint_the_newest_last(run, capsys, inner):
    assert main(["list", str(run / inner)]) == 0
    row = r"│ (\d) +│ \d{4}-\d\d-\d\d \d\d:\d\d:\d\d │ 6,256 bytes │ 2 +│ 2 +│ sizes are right"
    rows = re.findall(row, capsys.readouterr().out)
    assert rows == ["1", "2", "3"]


def test_a_run_without_a_subcommand_gets_the_commands_to_type(run):
    with raises("checkpoint-without-action", run=str(run), allowed=["list", "verify"]):
        main([str(run)])
    with raises("checkpoint-without-action", run=str(run)):
        main([str(run), "list"])
    with raises("wrong-command-line"):
        main(["lst", str(run)])


def test_list_says_what_is_damaged_and_does_not_read_the_contents(run, capsys):
    spoil(run, 2)
    spoil(run, 3, short=True)
    assert main(["list", str(run)]) == 0
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert shown.count("sizes are right") == 2
    assert "shard-1-of-2.safetensors" in shown and "3,126 bytes" in shown and "3,128" in shown


def test_verify_says_that_all_are_whole(run, capsys):
    assert main(["verify", str(run)]) == 0
    shown = capsys.readouterr().out
    assert shown.count("whole") == 3
    assert shown.splitlines()[-1].endswith(" step-00000003")


def test_verify_reads_every_byte_and_says_which_one_a_resumed_run_would_go_on_from(run, capsys):
    spoil(run, 3)
    assert main(["verify", str(run)]) == 1
    shown = capsys.readouterr().out
    (damage,) = (line for line in shown.splitlines() if "damaged" in line)
    assert damage.startswith("step-00000003") and shard_name(1, 2) in damage and "sha256" in damage
    assert shown.splitlines()[-1].endswith(" step-00000002")


def test_verify_says_that_none_can_be_resumed_from(run, capsys):
    for step in (1, 2, 3):
        spoil(run, step)
    assert main(["verify", str(run)]) == 1
    assert "no checkpoint can" in capsys.readouterr().out


def test_hostile_names_do_not_reach_the_terminal(run, capsys):
    manifest = run / "checkpoints" / "step-00000003" / "manifest.json"
    inner = msgspec.json.decode(manifest.read_bytes())["manifest"]
    manifest.write_bytes(sealed({**inner, "\x1b[2J[red]": 1}))
    for action in ("list", "verify"):
        main([action, str(run)])
        shown = capsys.readouterr().out
        assert "\x1b" not in shown
        assert "?[2J[red]" in shown


@pytest.mark.parametrize("action", ["list", "verify"])
def test_nothing_is_written_by_looking(run, action):
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    main([action, str(run)])
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before


@pytest.mark.parametrize("name", ["nowhere", "empty", "begun", "foreign", "file"])
def test_a_folder_without_checkpoints_is_told(tmp_path, name):
    (tmp_path / "empty").mkdir()
    saved(tmp_path / "begun" / "checkpoints").begin(1)
    (tmp_path / "foreign" / "checkpoint-500").mkdir(parents=True)
    (tmp_path / "file").write_text("")
    with raises("no-checkpoints" if (tmp_path / name).is_dir() else "no-such-folder") as caught:
        main(["list", str(tmp_path / name)])
    assert tmp_path / name in caught.value.fields.values()


@pytest.mark.parametrize(("arguments", "code"), [([], 2), (["--help"], 0), (["lst", "x"], 2), (["list"], 2)])
def test_usage(capsys, arguments, code):
    with pytest.raises((SystemExit, UsageError)) as end:
        main(arguments)
    assert (getattr(end.value, "code", code) if isinstance(end.value, SystemExit) else end.value.exit_code) == code
    assert "paceline checkpoint" in capsys.readouterr().out + str(end.value)


def test_the_command_as_it_is_typed_imports_no_torch(run):
    spoil(run, 3)
    look = "import sys; from paceline.cli import main; code = main(); sys.exit(99 if 'torch' in sys.modules else code)"
    command = [sys.executable, "-c", look, "checkpoint", "verify", str(run)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, env={**os.environ, "COLUMNS": "200"})
    assert done.returncode == 1, done.stderr
    assert done.stdout.splitlines()[-1].endswith(" step-00000002")
    command = [sys.executable, "-m", "paceline", "checkpoint", "list", str(run / "nowhere")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150)
    assert (done.returncode, done.stdout) == (2, "")
    assert codes(done.stderr) == ["no-such-folder"] and str(run / "nowhere") in done.stderr
