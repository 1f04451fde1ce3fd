"""The scripts of examples/classic and docs/from-*.md: few lines change, and the result does not."""

import difflib
import importlib.util
import re
from pathlib import Path

import pytest
from tests import warm
from tests.sessions import soak_classic
from tests.sessions.soak_classic import CLASSIC, SCRIPTS

MOST_LINES = {"mnist": 8, "vae": 7, "gan": 9, "lm": 7, "classifier": 6, "gpt2": 6}
OF_HUGGING_FACE = ("classifier", "gpt2")


@pytest.mark.parametrize("name", SCRIPTS)
def test_few_lines_change(name: str) -> None:
    before, after = ((CLASSIC / f"{name}{kind}.py").read_text().splitlines() for kind in ("_single", ""))
    changed = [line for line in difflib.ndiff(before, after) if line.startswith("+ ") and line[2:].strip()]
    assert len(changed) <= MOST_LINES[name], changed


MARKS = {
    "mnist": (),
    **dict.fromkeys(("gpt2", "classifier"), pytest.mark.soak),
}  # 15 to 20 s each: `make soak-sessions`


CUT = {
    "lm": "strategy='fsdp', fsdp_wrap='TransformerEncoderLayer'",
    "classifier": "strategy='fsdp'",
    "gpt2": "strategy='fsdp'",
}
CASES = [
    *(pytest.param(name, (2,), "", marks=MARKS.get(name, pytest.mark.slow)) for name in SCRIPTS),
    *(pytest.param(name, (1, 3), CUT[name], marks=MARKS.get(name, pytest.mark.slow)) for name in CUT),
]


@pytest.mark.parametrize(("name", "sizes", "how"), CASES)
@pytest.mark.timeout(360)
def test_the_original_is_equalled_also_where_the_model_is_cut_over_ranks(
    name: str, sizes: tuple[int, ...], how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name in OF_HUGGING_FACE and importlib.util.find_spec("transformers") is None:
        pytest.skip("needs transformers: pip install -e '.[hf]'")
    monkeypatch.setattr(soak_classic, "SIZES", sizes)
    monkeypatch.setitem(SCRIPTS, name, (SCRIPTS[name][0], "200", SCRIPTS[name][2]))
    assert soak_classic.apart(name, tmp_path, how) <= 1e-12


# ---- docs/from-*.md -------------------------------------------------------------------------------------------------

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").glob("from-*.md"))
MNIST = ROOT / "src" / "paceline" / "data" / "mnist"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_names_scripts_that_compile_and_functions_that_exist(page: Path) -> None:
    from paceline.sessions import Session

    text = page.read_text()
    before, after = re.findall(r"<!-- diff (\S+) (\S+) -->", text)[0]
    for script in (before, after):
        compile((ROOT / script).read_text(), script, "exec")
    assert "paceline" in (ROOT / after).read_text()
    used = {*re.findall(r"\bs\.(\w+)", text)}
    attributes = {name for kind in Session.__mro__ for name in vars(kind).get("__annotations__", ())}
    assert used and not [name for name in used if not hasattr(Session, name) and name not in attributes]


def said(size: int, script: str, cwd: Path, *words: object) -> list[str]:
    """What rank 0 prints that has a number of the result in it."""
    command = ["-m", "paceline", "launch", "--nproc", size, "--show", "rank 0", "--run-dir", cwd / f"launch-{size}"]
    done = warm.run([*command, "--", ROOT / "examples" / "from" / script, *words], ranks=True, cwd=cwd, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return [line for line in done.stdout.splitlines() if re.match("epoch .* loss|after step|weights", line)]


@pytest.mark.slow
@pytest.mark.timeout(450)
def test_ddp(tmp_path: Path) -> None:
    words = ("--data", MNIST, "--samples", 300, "--epochs", 2)
    one = said(1, "ddp.py", tmp_path, *words, "--batch-size", 64)
    assert len(one) == 2 and one == said(2, "ddp.py", tmp_path, *words, "--batch-size", 32)


@pytest.mark.slow
@pytest.mark.timeout(450)
def test_trainer(tmp_path: Path) -> None:
    if importlib.util.find_spec("transformers") is None:
        pytest.skip("needs transformers: pip install -e '.[hf]'")
    one, two = (said(size, "trainer.py", tmp_path, "--samples", 200, "--folder", f"on-{size}") for size in (1, 2))
    assert len(one) == 3 and one == two  # two epochs and the digest of the weights
    assert (tmp_path / "on-2" / "model" / "config.json").is_file()
