"""The table of strategies: one file and one line make a strategy, and everything else finds it by the table."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from paceline.config.strategies import DEFAULT_STRATEGY, SINGLE_PROCESS_STRATEGY, STRATEGY_INFO

ROOT = Path(__file__).parents[2]
STRATEGIES = ROOT / "src" / "paceline" / "strategies"
SHARED = {  # modules that are not strategies
    "__init__", "average", "base", "buffers", "inter_node", "model_parallel", "optimizer_scope",
    "optimizers", "pipelined", "validation",
}  # fmt: skip
TASK = f"{ROOT / 'tests' / 'lab' / 'ranks' / 'tasks_under_test.py'}:dropout"
LISTS = {  # where a page lists the strategies, and what its words are there
    "CHANGELOG.md": (r"^- Strategies (.*?) compute the gradient", r"`(\w+)`"),
    "docs/design.md": (r"^strategies/ +the ladder: (.*?)$", r"\w+"),
    "docs/textbook.md": (r"^\| strategy \|.*?\n\|[-|]+\n(.*?)\n\n", r"ladder/(\w+)\.md"),
    "docs/memory.md": (r"^\| strategy \|.*?\n\|[-|]+\n(.*?)\n\n", r"(?:^\| |, )(\w+)(?=[, ])"),
}
Paceline = Callable[..., subprocess.CompletedProcess[str]]


def pages_that_differ(names: Iterable[str]) -> dict[str, set[str]]:
    """The pages that list other strategies, with what they have too much or too little."""
    differ = dict[str, set[str]]()
    for page, (where, word) in LISTS.items():
        found = re.search(where, (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)
        assert found, f"{page}: no list"
        # memory.md is of ranks, and dp has none
        wanted = {*names} - ({"dp"} if page == "docs/memory.md" else set())
        if odd := wanted ^ {*re.findall(word, found[1], re.MULTILINE)}:
            differ[page] = odd
    return differ


def test_every_page_that_lists_strategies_lists_those_of_the_table():
    assert pages_that_differ(STRATEGY_INFO) == {}


def test_every_file_of_a_strategy_is_in_the_table():
    assert {path.stem for path in STRATEGIES.glob("*.py")} == {*STRATEGY_INFO} | SHARED


def test_the_defaults_are_what_the_help_says():
    source = (ROOT / "src" / "paceline" / "config" / "settings.py").read_text()
    assert f"(default: {DEFAULT_STRATEGY} for several processes, {SINGLE_PROCESS_STRATEGY} for one)" in source


@pytest.fixture
def extended(tmp_path: Path) -> Path:
    """A paceline with one more strategy: one more file, and one more line in the table."""
    package = tmp_path / "src" / "paceline"
    package.mkdir(parents=True)
    changed = ("strategies", "config")
    for path in STRATEGIES.parent.iterdir():
        if path.name not in (*changed, "__pycache__"):
            (package / path.name).symlink_to(path)
    for name in changed:
        shutil.copytree(STRATEGIES.parent / name, package / name)
    (package / "strategies" / "mine.py").write_text((STRATEGIES / "manual.py").read_text().replace("manual", "mine"))
    table, line = package / "config" / "strategies.py", '    "manual": StrategyInfo("Manual"),\n'
    table.write_text(table.read_text().replace(line, line + line.replace("manual", "mine")))
    return package


@pytest.fixture
def paceline(extended: Path, tmp_path: Path) -> Paceline:
    """Run its `paceline ARGUMENTS`, which must succeed."""

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-P", "-m", "paceline", *arguments]
        env = {**os.environ, "PYTHONPATH": str(extended.parent), "COLUMNS": "200"}
        ran = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=150)
        assert ran.returncode == 0, ran.stdout + ran.stderr
        return ran

    return run


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.timeout(450)  # 20 s on a quiet machine
def test_a_strategy_of_one_file_and_one_line_is_found_everywhere(extended: Path, paceline: Paceline, tmp_path: Path):
    for command in ("train", "scale"):
        assert "manual,mine,bucketed" in paceline(command, "--help").stdout
    assert "manual,mine,bucketed" in paceline("verify", "--help").stdout
    paceline("train", TASK, "--strategy", "mine", "--nproc", "2", "--steps", "2", "--device", "cpu", "--run-dir", "run")
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["strategy"] == "mine"

    verified = paceline("verify", TASK, "--strategies", "mine", "--optimizers", "sgd", "--ranks", "2", "--steps", "1")
    assert "│ mine " in verified.stdout

    quick = ("--steps", "1", "--warmup", "3", "--rounds", "1", "--nproc", "1", "--batch-sizes", "4", "--device", "cpu")
    paceline("compare", TASK, "--strategies", "mine", *quick, "--out", "compared.json")
    assert "mine" in {row["strategy"] for row in json.loads((tmp_path / "compared.json").read_text())["rows"]}

    spec = importlib.util.spec_from_file_location("extended_table", extended / "config" / "strategies.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules[spec.name]
    assert pages_that_differ(module.STRATEGY_INFO) == {page: {"mine"} for page in LISTS}
