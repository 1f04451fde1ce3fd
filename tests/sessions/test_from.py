"""The scripts of docs/from-*.md: those before compile, those after run, and have one result on one rank and on two."""

import importlib.util
import re
from pathlib import Path

import pytest
from tests import warm

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
