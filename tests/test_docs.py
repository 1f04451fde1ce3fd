"""The documents are true: links lead somewhere, code compiles, commands and their flags exist."""

import re
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from paceline.cli import COMMANDS
from paceline.errors import ExitCode

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)

pages = pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)


def blocks(page: Path, *languages: str) -> list[str]:
    return [code for language, code in BLOCK.findall(page.read_text()) if language in languages]


def commands(page: Path) -> list[list[str]]:
    """Every command line in the page's shell blocks, as words."""
    lines = [line.removeprefix("$ ") for code in blocks(page, "console", "bash") for line in code.splitlines()]
    return [shlex.split(line, comments=True) for line in lines if line.strip() and not line.startswith(" ")]


@cache
def help_of(command: str) -> str:
    run = subprocess.run(
        [sys.executable, "-m", "paceline", command, "--help"], capture_output=True, text=True, check=True, timeout=30
    )
    return run.stdout


@pages
def test_links_lead_to_files(page):
    for target in re.findall(r"\]\(([^)#\s]+)", BLOCK.sub("", page.read_text())):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name}: {target}"


@pages
def test_python_compiles(page):
    for code in blocks(page, "python"):
        compile(code, page.name, "exec")


@pages
def test_commands_and_their_flags_exist(page):
    for words in commands(page):
        if "paceline" not in words:
            continue
        command, *rest = words[words.index("paceline") + 1 :]
        assert command in COMMANDS, f"{page.name}: paceline {command}"
        for word in rest:
            if word.startswith("--"):
                assert re.search(rf"{word}\b", help_of(command)), f"{page.name}: paceline {command} {word}"


@pages
def test_make_targets_exist(page):
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"`make ([a-z-]+)", page.read_text()) + [w[1] for w in commands(page) if w[0] == "make"]:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"{page.name}: make {target}"


def test_the_table_of_exit_codes_is_the_programs():
    rows = re.findall(r"^\| (\d+) \|", (ROOT / "docs" / "exit-codes.md").read_text(), re.MULTILINE)
    assert [int(row) for row in rows] == [code.value for code in ExitCode]
