"""A sample of `soak_frameworks.py`: Accelerate, whose user's code hangs on a rank."""

from pathlib import Path

import pytest
from tests import warm
from tests.frameworks.soak_frameworks import marked, started


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.needs("accelerate")
def test_the_lines_named_are_those_of_the_user_of_a_framework(tmp_path: Path) -> None:
    told = started("accelerated", "callback", "launch", tmp_path, 3.0, warm.with_ranks)
    assert told.causes == (1,) and told.ran.code == 3, told.ran.text
    assert told.site == f"{marked('accelerated', 'FAULT callback')} in note"
    assert f"{marked('accelerated', 'WAITS callback')} in note, by " in told.page and "accelerate/" in told.page
