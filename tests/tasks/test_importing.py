"""What is wrong with a user's file is told by the user's own lines, and as early as it can be known."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.errors import UsageError
from paceline.tasks import check_task, is_loop, load_function, load_task


def written(folder: Path, name: str, text: str) -> str:
    (folder / f"{name}.py").write_text(text)
    return f"{folder / name}.py:task"


def told(task: str) -> str:
    with pytest.raises(UsageError) as error:
        load_task(task, {})
    return str(error.value)


@pytest.fixture(autouse=True)
def own_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))


PARSES = (
    "import argparse\nparser = argparse.ArgumentParser()\nparser.add_argument('--x')\nargs = parser.parse_args({})\n"
)


def test_a_file_that_parses_the_command_line_while_it_is_imported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    task = written(tmp_path, "parses_argv", PARSES.format(""))
    words = "parses_argv.py parses the command line while it is imported: put it under if __name__ == '__main__'"
    assert told(task) == words
    assert capsys.readouterr().err == ""
    helped = written(tmp_path, "parses_by_helper", "import parses_argv\ntask = 1\n")
    assert told(helped) == words
    assert "is 'int'" in told(written(tmp_path, "parses_nothing", PARSES.format("[]") + "task = 1\n"))


def test_an_import_that_fails_begins_with_its_line(tmp_path: Path) -> None:
    task = written(tmp_path, "lacks_module", "x = 1\nimport no_such_module_here\n")
    assert told(task).splitlines() == [
        f"{tmp_path}/lacks_module.py:2: import no_such_module_here",
        "  ModuleNotFoundError: No module named 'no_such_module_here'",
    ]
    task = written(tmp_path, "imports_it", "import lacks_module\n")
    assert told(task).splitlines()[-1] == f"  imported in {tmp_path}/imports_it.py:1: import lacks_module"
    task = written(tmp_path, "raises_name", "import math\ny = math.sqrt(undefined)\n")
    assert told(task).startswith(
        f"{tmp_path}/raises_name.py:2: y = math.sqrt(undefined)\n  NameError: name 'undefined'"
    )


def test_a_syntax_error_is_found_before_anything_is_started(tmp_path: Path) -> None:
    task = written(tmp_path, "wrong_syntax", "x = 1\ndef task(:\n    pass\n")
    with pytest.raises(UsageError) as error:
        check_task(task, {})
    assert str(error.value).splitlines() == [
        f"{tmp_path}/wrong_syntax.py:2: def task(:",
        "  SyntaxError: invalid syntax",
    ]
    helped = written(tmp_path, "imports_wrong_syntax", "import wrong_syntax\n")
    assert told(helped).startswith(f"{tmp_path}/wrong_syntax.py:2: def task(:\n  SyntaxError: invalid syntax")


def test_a_loop_is_told_from_a_task_without_importing_it(tmp_path: Path) -> None:
    text = (
        "import paceline\nraise ValueError\ndef main():\n    s = paceline.session()\ndef task():\n    return Task(1)\n"
    )
    task = written(tmp_path, "both", text)
    assert is_loop(task.replace(":task", ":main")) and not is_loop(task) and not is_loop("mnist-cnn")
    needy = written(tmp_path, "needy", "def task(epochs):\n    pass\n")
    with pytest.raises(UsageError, match="must be a function without arguments: missing a required argument: 'epochs'"):
        load_function(needy)
