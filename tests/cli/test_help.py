"""The help of every command: examples that its own parser takes, common options in groups, all of them on request."""

import re
import shlex
import sys
from pathlib import Path

import pytest
from tests import warm

from paceline.cli import COMMANDS, load_command_main, make_parser, train
from paceline.cli.launch import takes_value_by_option
from paceline.cli.options import MAX_OPTIONS_SHOWN_IN_FULL, build_settings
from paceline.cli.torchrun import read_arguments
from paceline.cli.watchover import split_options_and_script
from paceline.config.settings import TrainConfig
from paceline.errors import ExitCode, UsageError

COLUMNS = 100
commands = pytest.mark.parametrize("command", COMMANDS)


def shown(command: str, flag: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as end:
        load_command_main(command)([flag])
    assert end.value.code == ExitCode.DONE
    return capsys.readouterr().out


def options_in(text: str) -> list[str]:
    return re.findall(r"^  (?:-\w, )?(--[\w-]+)", text, re.MULTILINE)


@commands
def test_two_examples_that_the_commands_own_parser_takes_come_first(command: str) -> None:
    line = make_parser(command)
    assert len(line.examples) == 2
    for example in line.examples:
        words = shlex.split(example)
        words = words[words.index("paceline") + 1 :]
        assert words.pop(0) == command, example
        if command == "launch":
            typed = read_arguments(words, {}, takes_value_by_option())
            words, script = typed.paceline_arguments, [*typed.script]
        elif command == "watchover":
            words, script = split_options_and_script(words)
        else:
            words, script = words[: [*words, "--"].index("--")], ["none is needed"]
        line.parse(words)
        assert script, example


@commands
@pytest.mark.parametrize("flag", ["--help", "--help-all"])
def test_metavars_are_words_a_default_is_stated_once_and_lines_fit(
    command: str, flag: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(COLUMNS))
    text = shown(command, flag, capsys)
    assert max(map(len, text.splitlines())) <= COLUMNS
    assert text.index("Examples:\n") < text.index("usage:")
    assert {"None", "STR", "INT", "FLOAT", "PosixPath"}.isdisjoint(re.findall(r"\w+", text))
    for entry in re.split(r"\n(?=  \S)", text):
        assert len(re.findall(r"\bdefault\b", entry, re.IGNORECASE)) <= 1, entry
    assert sys.executable not in text


@commands
def test_help_has_the_common_options_and_help_all_every_one(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    line, common, whole = make_parser(command), shown(command, "--help", capsys), shown(command, "--help-all", capsys)
    names = [one.name for one in line.options() if one.name.startswith("-")]
    assert sorted(options_in(whole)) == sorted(names)
    assert 0 < len(options_in(common)) <= MAX_OPTIONS_SHOWN_IN_FULL or not names
    assert set(options_in(common)) <= set(names)
    assert len(options_in(common)) == len(names) or f"{line.prog} --help-all" in common
    assert {*line.common_options.split()} <= {name[2:] for name in names}


@commands
def test_every_option_and_argument_has_a_text(command: str) -> None:
    for one in make_parser(command).options():
        assert one.text, one.name
        assert not one.text.endswith("."), one.name
        assert one.is_flag or one.metavar.strip("-"), one.name


@commands
def test_an_unknown_option_is_an_error_that_names_the_nearest(command: str) -> None:
    names = [one.name for one in make_parser(command).options() if one.name.startswith("-")]
    for name in names[:3]:
        with pytest.raises(UsageError) as caught:
            make_parser(command).parse([f"{name}x"])
        assert f"{name}x" in str(caught.value)
        assert f"Did you mean {name}?" in str(caught.value)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("train --epochs", "--epochs"),
        ("train --epochs --steps 3", "--epochs"),
        ("train --compile=yes", "--compile"),
        ("train one two", "'two'"),
        ("train --last-batch kep", "Did you mean 'keep'?"),
        ("train --nproc two", "a whole number or auto"),
        ("train --epoch 3", "Did you mean --epochs?"),
        ("export -o x", "RUN"),
        ("export runs/a", "--out"),
        ("export --ou x", "--out?"),  # what is missing is named after what is unknown
    ],
)
def test_what_cannot_be_parsed_is_a_usage_error_that_names_it(words: str, said: str) -> None:
    command, *rest = words.split()
    with pytest.raises(UsageError) as caught:
        make_parser(command).parse(rest)
    assert said in str(caught.value)


def test_values_are_parsed_by_the_types_of_their_fields_over_the_default() -> None:
    line = make_parser("train")
    words = "mnist-cnn --lr=-1 --nproc auto --task-arg a=1 --task-arg b=2 --run_dir x --checkpoint-every 10min "
    words += "--no-checkpoint-epochs"
    found = line.parse(words.split())
    assert (found.task, found.optimizer.lr, found.launch.nproc, found.task_arg) == (
        "mnist-cnn",
        -1.0,
        "auto",
        ("a=1", "b=2"),
    )
    assert (str(found.run.run_dir), found.checkpoint.checkpoint_every) == ("x", "10min")
    assert found.checkpoint.checkpoint_epochs is False
    given = line.values(["--nproc", "3", "--task-arg", "c=3", "--checkpoint-every", "5", "--lr", "-2"])
    again = build_settings(TrainConfig, given, found)
    assert (again.task, again.launch.nproc, again.task_arg) == ("mnist-cnn", 3, ("a=1", "b=2", "c=3"))
    assert (again.checkpoint.checkpoint_every, again.optimizer.lr, again.run) == (5, -2.0, found.run)


def test_arguments_may_stand_between_options() -> None:
    found = make_parser("report").parse(["runs/a", "--open", "runs/b", "-o", "x.html", "runs/c"])
    assert (found.runs, found.open, str(found.out)) == (("runs/a", "runs/b", "runs/c"), True, "x.html")


def test_the_help_of_a_command_imports_no_torch() -> None:
    code = "import sys; from paceline.cli import main\ntry: main(['train', '--help'])\nexcept SystemExit: pass\n"
    done = warm.run(["-c", f"{code}sys.exit('torch' in sys.modules)"], torch=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("words", [["--help", "--config", "FILE"], ["--resume", "auto", "--run-dir", "RUN", "--help"]])
def test_the_help_shows_what_the_file_gives_in_place_of_the_defaults(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "config.toml"
    file.write_text("[data]\nbatch_size = 32\n[optimizer]\nlr = 0.25\n[compute]\ncompile = true\n[run]\nseed = 7\n")
    with pytest.raises(SystemExit) as end:
        train.main([{"FILE": str(file), "RUN": str(tmp_path)}.get(word, word) for word in words])
    assert end.value.code == ExitCode.DONE
    text = capsys.readouterr().out
    more, named = re.search(r"(\d+) more options", text), [one for one in make_parser("train").options() if one.names]
    assert more is not None and int(more[1]) + len(options_in(text)) == len(named)
    entries = re.split(r"\n(?=  \S)", text)
    values = {entry.split()[0]: re.search(r"\(in\s+config\.toml:\s+(.*)\)", entry) for entry in entries}
    values = {name: value[1] for name, value in values.items() if value}
    assert values == {"--batch-size": "32", "--lr": "0.25", "--compile": "true", "--seed": "7"}
