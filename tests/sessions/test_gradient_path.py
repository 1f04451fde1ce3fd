"""Gradients during backward are those of the global batch's mean, as in a plain loop."""

from pathlib import Path

import pytest
from tests.run_script import run_script

pytestmark = pytest.mark.sample(5)

SCRIPT = Path(__file__).with_name("gradient_path.py")


@pytest.mark.ranks
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    "kind", ["hook", "after", "function", "module", "masked", "accumulated", "tensor", "reentrant"]
)
def test_what_is_not_linear_in_the_gradient_gives_the_plain_loops_weights(
    tmp_path: Path, kind: str, ranks: int
) -> None:
    done = run_script(ranks, SCRIPT, kind, "bucketed", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert float((tmp_path / "difference").read_text()) < 1e-13


@pytest.mark.ranks
@pytest.mark.parametrize(("strategy", "code"), [("exact", 0), ("ddp", 0), ("manual", 0), ("zero", 2)])
def test_other_strategies_run_hooks_on_the_whole_gradient_or_raise_an_error(
    tmp_path: Path, strategy: str, code: int
) -> None:
    done = run_script(2, SCRIPT, "hook", strategy, cwd=tmp_path)
    assert done.returncode == code, done.stderr
    assert code or float((tmp_path / "difference").read_text()) < 1e-13


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("kind", "code"), [("function", 2), ("tensor", 2), ("reentrant", 2), ("module", 2), ("watched", 0), ("hook", 0)]
)
def test_with_weights_that_are_known_later_it_is_an_error(tmp_path: Path, kind: str, code: int) -> None:
    done = run_script(2, SCRIPT, kind, "bucketed", "4", cwd=tmp_path)
    assert done.returncode == code, done.stderr
    assert code or float((tmp_path / "difference").read_text()) < 1e-13
