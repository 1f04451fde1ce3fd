"""The documents are true: links lead somewhere, code compiles, commands and their flags exist."""

import ast
import os
import re
import shlex
from functools import cache
from pathlib import Path

import pytest
from tests import warm

from paceline.cli import COMMANDS
from paceline.errors import MESSAGES_FOLDER, ExitCode
from paceline.launch.agent.workers import worker_environment
from paceline.protocol.job import NodePlan

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
TRANSCRIPT = re.compile(r"<!-- transcript ([\w-]+) -->\n+```text\n(.*?)^```$", re.MULTILINE | re.DOTALL)
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
TYPED = re.compile(r"^(?:n\d)?\$ (.*)(?<!\.\.\.)$", re.MULTILINE)  # in a transcript; long lines are cut off with dots

CODE = re.compile(r"`([^`\n]+)`")
# In what a page quotes of the program: stands for something else each time.
VARIES = re.compile(r"\.\.\.|node \d \(n\d\)|\bn\d\b|\d[\d.:]*|SIGKILL|paceline \w+")

pages = pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)


def blocks(page: Path, *languages: str) -> list[str]:
    return [code for language, code in BLOCK.findall(page.read_text()) if language in languages]


def commands(page: Path) -> list[list[str]]:
    lines = [line.removeprefix("$ ") for code in blocks(page, "console", "bash") for line in code.splitlines()]
    lines += [line for _, text in TRANSCRIPT.findall(page.read_text()) for line in TYPED.findall(text)]
    return [shlex.split(line, comments=True) for line in lines if line.strip() and not line.startswith(" ")]


def literals(path: Path) -> str:
    """All texts in a module's code, f-strings with their values left out; one on each line."""
    found = list[str]()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.JoinedStr):
            found.append("\n".join(str(part.value) for part in node.values if isinstance(part, ast.Constant)))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append(node.value)
    return "\n".join(found)


@cache
def help_of(command: str) -> str:
    run = warm.run(["-m", "paceline", command, "--help-all"], torch=False)
    assert run.returncode == 0, run.stderr
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
        rest = rest[: rest.index("--")] if "--" in rest else rest  # what follows is the script's own
        assert command in COMMANDS, f"{page.name}: paceline {command}"
        for word in rest:
            if word.startswith("--"):
                assert re.search(rf"{word}\b", help_of(command)), f"{page.name}: paceline {command} {word}"


@pages
def test_make_targets_exist(page):
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"`make ([a-z-]+)", page.read_text()) + [w[1] for w in commands(page) if w[0] == "make"]:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"{page.name}: make {target}"


@pytest.mark.parametrize(
    "page", [page for page in PAGES if "<!-- transcript" in page.read_text()], ids=lambda p: p.name
)
def test_every_transcript_was_made_and_names_nothing_of_the_machine_it_was_made_on(page):
    text = page.read_text()
    assert text.count("<!-- transcript") == len(TRANSCRIPT.findall(text))
    for name, said in TRANSCRIPT.findall(text):
        assert said.strip(), f"{page.name}: {name}"
        assert "/tmp/" not in said and "\x1b" not in said, f"{page.name}: {name}"


@pytest.mark.parametrize("tool", ["includes.py", "api.py", "reference.py", "measured.py"])
def test_what_a_tool_writes_into_the_docs_is_not_stale(tool: str) -> None:
    done = warm.run([ROOT / "tools" / tool, "--check"])
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_symptom_is_what_the_program_says():
    source = "\n".join(literals(path) for path in sorted((ROOT / "src").rglob("*.py")))
    source += "".join(path.read_text() for path in MESSAGES_FOLDER.glob("*.toml"))
    page = (ROOT / "docs" / "launch" / "troubleshooting.md").read_text()
    symptoms = CODE.findall("\n".join(re.findall(r"^\| ([^|]*) \|", page, re.MULTILINE)))
    assert len(symptoms) > 20
    for words in symptoms:
        if words.startswith("-"):
            continue  # a flag
        for part in VARIES.split(words):
            assert part.strip() in source, f"nobody says {part.strip()!r} of {words!r}"
        # short parts, such as "ranks, but", are in many messages: one of them has the parts between dots, in order
        for quote in words.split("..."):
            parts = [re.escape(part.strip()) for part in VARIES.split(quote) if part.strip()]
            assert re.search(".{0,40}?".join(parts), source, re.DOTALL), f"no message says {quote.strip()!r}"


def test_the_table_of_exit_codes_is_the_programs():
    rows = re.findall(r"^\| (\d+) \|", (ROOT / "docs" / "exit-codes.md").read_text(), re.MULTILINE)
    assert [int(row) for row in rows] == [code.value for code in ExitCode]


def test_the_page_of_environment_variables_has_all_of_ours_and_all_that_the_agent_sets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ours = {
        name for path in (ROOT / "src").rglob("*.py") for name in re.findall(r'"(PACELINE_[A-Z_]+)"', path.read_text())
    }
    monkeypatch.setattr(os, "environ", {})
    set_by_agent = {*worker_environment(NodePlan(("x",), 1, master_addr="n1", interface="eth0"), 0, 1)}
    page = (ROOT / "docs" / "environment.md").read_text()
    assert {*re.findall(r"^\| (\w+) \|", page, re.MULTILINE)} >= ours | set_by_agent
