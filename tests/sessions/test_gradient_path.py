"""Gradients during backward are those of the global batch's mean, as in a plain loop."""

from pathlib import Path

import pytest
from tests.run_script import run_script

pytestmark = pytest.mark.sample(5)

SCRIPT = Path(__file__).with_name("gradient_path.py")


KINDS = ["hook", "after", "function", "module", "masked", "accumulated", "tensor", "reentrant"]
LATER = {"function": 2, "tensor": 2, "reentrant": 2, "module": 2, "watched": 0, "hook": 0}
CASES = [  # ranks, arguments of the script, exit code
    # what is not linear in the gradient
    *((ranks, (kind, "bucketed"), 0) for kind in KINDS for ranks in (1, 2)),
    # other strategies run hooks on the whole gradient, or raise an error
    *((2, ("hook", strategy), code) for strategy, code in (("exact", 0), ("ddp", 0), ("manual", 0), ("zero", 2))),
    # weights that are known later
    *((2, (kind, "bucketed", "4"), code) for kind, code in LATER.items()),
]


@pytest.mark.ranks
@pytest.mark.parametrize(("ranks", "words", "code"), CASES, ids=str)
def test_the_weights_are_those_of_the_plain_loop_or_it_is_an_error(
    tmp_path: Path, ranks: int, words: tuple[str, ...], code: int
) -> None:
    done = run_script(ranks, SCRIPT, *words, cwd=tmp_path)
    assert done.returncode == code, done.stderr
    assert code or float((tmp_path / "difference").read_text()) < 1e-13
