"""docs/support.md says what the program does; `make soak-support` asks for every cell."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
from tests import warm

from paceline.config.strategies import STRATEGY_INFO

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "support.md"


@pytest.fixture(scope="module")
def support() -> ModuleType:
    spec = importlib.util.spec_from_file_location("support", ROOT / "tools" / "support.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_each_table_has_a_column_for_each_strategy_and_a_row_for_each_feature(support: ModuleType) -> None:
    for kind, (_, titles) in support.TABLES.items():
        assert {*support.told(PAGE.read_text(), kind)} == {(title, name) for title in titles for name in STRATEGY_INFO}


@pytest.mark.slow
def test_what_the_checks_of_settings_find_is_in_the_tables(
    support: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    page = PAGE.read_text()
    for kind in ("task", "check"):
        for (title, name), found in support.told(page, kind).items():
            now = support.checked(name, title)
            if now[0] or kind == "check":
                assert found == now, f"{title}, {name}"
    assert [*tmp_path.iterdir()] == []


def check(*words: str, seconds: int) -> None:
    done = warm.run((ROOT / "tools" / "support.py", "--check", *words), timeout=seconds)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.timeout(360)
def test_the_sessions_of_zero_are_those_of_the_table() -> None:
    check("zero", seconds=330)


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_every_cell_is_what_the_program_does() -> None:
    check(seconds=1200)
