"""What docs/own-loop.md says of losses that are no mean over samples gives the result of the plain loop."""

import json
from pathlib import Path

import pytest
from tests.run_script import run_script

pytestmark = pytest.mark.sample(4)

SCRIPT = Path(__file__).with_name("losses.py")


@pytest.mark.ranks
@pytest.mark.parametrize("kind", ["classes", "crops", "rows", "summed", "penalty", "kept", "contrastive", "sam"])
def test_a_loss_written_as_the_page_says_is_that_of_one_process(tmp_path: Path, kind: str) -> None:
    done = run_script(3 if kind != "contrastive" else 2, SCRIPT, kind, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "found.json").read_text()) < 1e-12
