"""tests/rendered.py: another text than the reviewed one fails, and each reviewed text belongs to a test."""

from pathlib import Path

import pytest
from tests.rendered import rendered, sections


def test_a_text_that_nobody_has_reviewed_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RENDERED", raising=False)
    with pytest.raises(AssertionError, match="RENDERED=write pytest"):
        rendered("anything")


@pytest.mark.parametrize("file", sorted(Path(__file__).parent.rglob("rendered.txt")), ids=str)
def test_each_reviewed_text_belongs_to_a_test(file: Path) -> None:
    for name in sections(file):
        source, _, test = name.partition("[")[0].partition("::")
        assert f"def {test}(" in (file.parent / source).read_text(), name
