"""The documents are true: links lead somewhere, code runs, commands and their flags exist, pictures are shown."""

import ast
import importlib
import importlib.util
import json
import os
import re
import shlex
import struct
import subprocess
import sys
from functools import cache
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest
from tests import warm
from tests.run_script import run_script

from paceline.cli import COMMANDS
from paceline.config.strategies import STRATEGY_INFO
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
def test_python_compiles_and_imports_what_exists(page):
    for code in blocks(page, "python"):
        for node in ast.walk(ast.parse(code, page.name)):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("paceline"):
                for alias in node.names:
                    assert hasattr(importlib.import_module(node.module), alias.name), f"{node.module}.{alias.name}"


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


# ---- README.md ------------------------------------------------------------------------------------------------------

README = (ROOT / "README.md").read_text()


def scripts() -> tuple[str, str]:
    """The loop of one process, and the loop with a session, by the lines of the README's diff."""
    diff = re.search(r"```diff\n(.*?)```", README, re.DOTALL)
    assert diff is not None
    lines = diff[1].splitlines()
    return tuple("\n".join(line[1:] for line in lines if line[:1] != left) for left in "+-")  # pyright: ignore


@pytest.mark.slow
@pytest.mark.ranks
def test_the_loop_has_the_weights_of_one_process(tmp_path: Path) -> None:
    before, after = scripts()
    (tmp_path / "before.py").write_text(before)
    (tmp_path / "loop.py").write_text(after)
    plain = warm.run((tmp_path / "before.py",))
    right = float(plain.stdout.split()[-1])
    for ranks in (1, 2):
        done = run_script(ranks, "loop.py", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        found = [float(line) for line in done.stdout.splitlines() if re.fullmatch(r"\d+\.\d+", line)]
        assert found == pytest.approx([right] * ranks, rel=1e-5)


def test_it_fits_on_a_page() -> None:
    assert len(README.splitlines()) <= 110
    assert len(re.findall(r"!\[[^\]]{20,}\]\(docs/pictures/[\w-]+\.png\)", README)) == 1


def test_the_comparison_is_that_of_its_record() -> None:
    record = json.loads((ROOT / "benchmarks" / "results" / "one_process.json").read_text())
    rows = [line.split("|")[2:6] for line in README.splitlines() if "results/one_process.json" in line]
    for case, row in zip(("last batch", "last window"), rows, strict=False):
        for name, cell in zip(("DDP", "Accelerate", "Fabric", "paceline"), row, strict=True):
            assert float(cell) == pytest.approx(record[name][case], rel=0.05)
    assert [cell.split()[0].strip(",") for cell in rows[2]] == ["no", "no", "no", "yes"]
    assert [record[name]["bits"] for name in ("DDP", "Accelerate", "Fabric", "paceline")] == [False] * 3 + [True]


# ---- docs/support.md ------------------------------------------------------------------------------------------------

SUPPORT_PAGE = ROOT / "docs" / "support.md"


@pytest.fixture(scope="module")
def support() -> ModuleType:
    spec = importlib.util.spec_from_file_location("support", ROOT / "tools" / "support.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_each_table_has_a_column_for_each_strategy_and_a_row_for_each_feature(support: ModuleType) -> None:
    for kind, (_, titles) in support.TABLES.items():
        assert {*support.told(SUPPORT_PAGE.read_text(), kind)} == {
            (title, name) for title in titles for name in STRATEGY_INFO
        }


@pytest.mark.slow
def test_what_the_checks_of_settings_find_is_in_the_tables(
    support: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    page = SUPPORT_PAGE.read_text()
    for kind in ("task", "check"):
        for (title, name), found in support.told(page, kind).items():
            now = support.checked(name, title)
            if now[0] or kind == "check_support":
                assert found == now, f"{title}, {name}"
    assert [*tmp_path.iterdir()] == []


def check_support(*words: str, seconds: int) -> None:
    done = warm.run((ROOT / "tools" / "support.py", "--check", *words), timeout=seconds)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.timeout(360)
def test_the_sessions_of_zero_are_those_of_the_table() -> None:
    check_support("zero", seconds=330)


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_every_cell_is_what_the_program_does() -> None:
    check_support(seconds=1200)


# ---- pictures that the product made of itself -----------------------------------------------------------------------

PICTURES = ROOT / "docs" / "pictures"
WIDTHS = {"report-light.png": 1440, "report-dark.png": 1440, "report-phone.png": 390}
RUNGS = {f"ladder-{name}.svg" for name in STRATEGY_INFO if name != "dp"}  # dp needs several GPUs
MOST_BYTES = {".png": 150_000, ".svg": 100_000}
DRAWN = sorted(PICTURES.glob("*.svg"))

svgs = pytest.mark.parametrize("path", DRAWN, ids=lambda path: path.stem)


def test_every_picture_is_there_and_small() -> None:
    assert {path.name for path in PICTURES.iterdir()} == {*WIDTHS, "watch.svg", *RUNGS}
    assert [path.name for path in PICTURES.iterdir() if path.stat().st_size > MOST_BYTES[path.suffix]] == []


@pytest.mark.parametrize(("name", "width"), WIDTHS.items())
def test_a_page_was_seen_at_its_width(name: str, width: int) -> None:
    head = (PICTURES / name).read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", head[16:])[0] == width


@svgs
def test_a_drawing_asks_for_nothing_runs_nothing_and_names_nothing_of_the_machine(path: Path) -> None:
    text = path.read_text()
    root = ElementTree.fromstring(text)
    assert {node.tag.rpartition("}")[2] for node in root.iter()} & {"script", "image", "foreignObject", "a"} == set()
    assert [name for node in root.iter() for name in node.attrib if name.endswith("href")] == []
    requests, machine = r"@import|url\((?!#)|https?://(?!www\.w3\.org/2000/svg\")", r"/tmp/|/home/|/root/|/work/|\x1b"
    assert re.findall(f"{requests}|{machine}", text) == []


@pytest.mark.parametrize("name", sorted(RUNGS))
def test_a_rungs_drawing_has_all_its_colours_in_light_and_in_dark(name: str) -> None:
    text = (PICTURES / name).read_text()
    style = text.partition("<style>")[2].partition("</style>")[0]
    light, _, dark = style.partition("prefers-color-scheme: dark")
    used = {word for words in re.findall(r'class="([^"]*)"', text) for word in words.split()} - {"plain"}
    assert used >= {"ground", "on"}
    assert [word for word in used if f".{word} " not in style] == []
    for variable in set(re.findall(r"var\((--[a-z]+)\)", style)):
        assert f"{variable}:" in light and f"{variable}:" in dark, variable


def test_an_unknown_picture_is_refused() -> None:
    command = [sys.executable, ROOT / "tools" / "pictures.py", "ladder-none"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert "ladder-single" in done.stderr
