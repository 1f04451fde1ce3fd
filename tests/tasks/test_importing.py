"""What is wrong with a user's file is told by the user's own lines, and as early as it can be known."""

from pathlib import Path

import pytest
from tests.errors import raises

from paceline.errors import UsageError
from paceline.tasks.registry import check_task_without_import, is_session_loop, load_function, load_task


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
    with raises("parses-at-import", name="parses_argv.py"):
        load_task(task, {})
    assert capsys.readouterr().err == ""
    helped = written(tmp_path, "parses_by_helper", "import parses_argv\ntask = 1\n")
    with raises("parses-at-import", name="parses_argv.py"):
        load_task(helped, {})
    with raises("not-a-task", kind="int"):
        load_task(written(tmp_path, "parses_nothing", PARSES.format("[]") + "task = 1\n"), {})


def test_an_import_that_fails_begins_with_its_line(tmp_path: Path) -> None:
    task = written(tmp_path, "lacks_module", "x = 1\nimport no_such_module_here\n")
    first = f"{tmp_path}/lacks_module.py:2: import no_such_module_here"
    with raises("import-failed", lines=[first]) as caught:
        load_task(task, {})
    assert caught.value.fields["reason"].startswith("ModuleNotFoundError: ")
    assert str(caught.value) == f"{first}\n  {caught.value.fields['reason']}"
    task = written(tmp_path, "imports_it", "import lacks_module\n")
    with raises("import-failed", lines=[first, f"{tmp_path}/imports_it.py:1: import lacks_module"]):
        load_task(task, {})
    task = written(tmp_path, "raises_name", "import math\ny = math.sqrt(undefined)\n")
    with raises("import-failed", lines=[f"{tmp_path}/raises_name.py:2: y = math.sqrt(undefined)"]) as caught:
        load_task(task, {})
    assert caught.value.fields["reason"].startswith("NameError: name 'undefined'")


def test_a_syntax_error_is_found_before_anything_is_started(tmp_path: Path) -> None:
    task = written(tmp_path, "wrong_syntax", "x = 1\ndef task(:\n    pass\n")
    line = f"{tmp_path}/wrong_syntax.py:2: def task(:"
    with raises("syntax-error", line=line, reason="invalid syntax"):
        check_task_without_import(task, {})
    helped = written(tmp_path, "imports_wrong_syntax", "import wrong_syntax\n")
    with raises("import-failed") as caught:
        load_task(helped, {})
    assert caught.value.fields["lines"][0] == line and caught.value.fields["reason"].startswith("SyntaxError")


def test_a_loop_is_told_from_a_task_without_importing_it(tmp_path: Path) -> None:
    text = (
        "import paceline\nraise ValueError\ndef main():\n    s = paceline.session()\ndef task():\n    return Task(1)\n"
    )
    task = written(tmp_path, "both", text)
    assert (
        is_session_loop(task.replace(":task", ":main"))
        and not is_session_loop(task)
        and not is_session_loop("mnist-cnn")
    )
    needy = written(tmp_path, "needy", "def task(epochs):\n    pass\n")
    with raises("task-needs-arguments"):
        load_function(needy)
