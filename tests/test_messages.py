"""The texts of errors, src/paceline/messages/: each is used, has the fields that it names, and fits every front end."""

import ast
import functools
import re
import string
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.errors import raises

from paceline.cli.train import parse
from paceline.errors import MESSAGES_FOLDER, TrainingError, UsageError, message_templates
from paceline.sessions.arguments import COMMAND_OPTIONS, format_argument

SOURCE = MESSAGES_FOLDER.parent
FLAG = re.compile(r"(?<![\w-])--[a-z]")
ALL = {code: text for code, text in message_templates().items() if code != "session"}


@functools.cache
def trees() -> dict[Path, ast.Module]:
    """Those of all modules. Not at import: three workers collect the tests, and parsing takes seconds."""
    return {path: ast.parse(path.read_text()) for path in sorted(SOURCE.rglob("*.py"))}


def fields_of(text: str) -> set[str]:
    names = [name for _, name, _, _ in string.Formatter().parse(text) if name is not None]
    values = [name.partition("=")[2] for name in names if name.startswith("--") and " " not in name and "=" in name]
    return {name for name in names if not name.startswith("--")} | set(values)


def raised() -> Iterator[tuple[str, set[str] | None, str]]:
    """(code, fields, where) of each error with a constant code; fields are None if some are not written there."""
    for path, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and (given := {one.arg: one.value for one in node.keywords}).get("code"):
                names = None if None in given else {str(name) for name in given} - {"code", "exit_code"}
                choice = given["code"]
                for one in (choice.body, choice.orelse) if isinstance(choice, ast.IfExp) else (choice,):
                    if isinstance(one, ast.Constant) and isinstance(one.value, str) and one.value:
                        yield one.value, names, f"{path.name}:{node.lineno}"


def test_each_error_has_a_text_and_the_fields_that_it_names() -> None:
    for code, names, where in raised():
        assert code in ALL, (code, where)
        if names is not None:
            for text in filter(None, (ALL[code], message_templates()["session"].get(code))):
                assert fields_of(text) <= names, (code, where)


def test_each_text_is_used_and_stands_in_one_file() -> None:
    words = {node.value for tree in trees().values() for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    assert set(ALL) <= words
    tables = [tomllib.loads(path.read_text()) for path in MESSAGES_FOLDER.glob("*.toml")]
    assert sum(len(table.keys() - {"session"}) for table in tables) == len(ALL)
    assert set(message_templates()["session"]) <= set(ALL)


@pytest.mark.parametrize("file", sorted(path.name for path in MESSAGES_FOLDER.glob("*.toml")))
def test_a_file_is_sorted(file: str) -> None:
    table = tomllib.loads((MESSAGES_FOLDER / file).read_text())
    codes = [code for code in table if code != "session"]
    assert codes == sorted(codes)
    assert all(re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", code) for code in codes)


def test_a_text_names_no_option_as_one_front_end_writes_it() -> None:
    for code, text in ALL.items():
        assert not FLAG.search(re.sub(r"\{--[^}]*\}", "", text)), code
        names = fields_of(text + message_templates()["session"].get(code, ""))
        error = UsageError(code=code, **{**dict.fromkeys(names, 1), "setting": "lr"})
        assert str(error), code
        error.front_end, error.render_option = "session", format_argument
        shown = re.sub(f"--({'|'.join(COMMAND_OPTIONS).replace('_', '-')})", "", str(error))
        assert not FLAG.search(shown), code


def test_a_front_end_renders_options_and_its_own_texts() -> None:
    fields: dict[str, Any] = {"where": "step-4", "differences": "lr: 1, 2", "never": "", "allow": "lr"}
    error = UsageError(code="another-run", **fields)
    assert error.wrong_setting_name == "allow_change" and error.message_with_code == f"{error} [another-run]"
    assert str(error).endswith("--allow-change lr")
    error.front_end, error.render_option = "session", format_argument
    assert str(error).endswith("session('another folder')")


def test_a_value_of_a_file_is_named_as_the_file_names_it(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("[optimizer]\nema = 2.0\n[compute]\ncompile = true\n")
    with raises("ema-out-of-range", setting="ema", value=2.0) as caught:
        parse(["mnist-cnn", "--config", str(path)])
    assert str(caught.value).startswith(f"{path}: optimizer.ema ")
    with raises("ema-out-of-range", value=3.0) as caught:
        parse(["mnist-cnn", "--config", str(path), "--ema", "3"])
    assert str(caught.value).startswith("--ema ")
    with raises("exact-with-compile", setting="compile") as caught:
        parse(["mnist-cnn", "--config", str(path), "--ema", "0.9", "--strategy", "exact"])
    assert str(caught.value).startswith(f"{path}: compute.compile ")


def test_what_another_process_has_rendered_keeps_its_code() -> None:
    error = TrainingError("rank 1: {no template}", code="rank-failed")
    assert (str(error), error.code) == ("rank 1: {no template}", "rank-failed")


def test_wrong_use_can_say_where_it_was_found() -> None:
    found = UsageError.from_error(UsageError(code="no-epochs", value=0), before="run.toml: ", after=" (on rank 1 of 2)")
    assert (found.code, found.fields) == ("no-epochs", {"value": 0})
    assert str(found).startswith("run.toml: ") and str(found).endswith(" (on rank 1 of 2)")
