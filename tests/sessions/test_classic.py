"""The six classic scripts: few lines change, and the result does not. `make soak-sessions` looks at more of them."""

import difflib
import importlib.util
from pathlib import Path

import pytest
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
