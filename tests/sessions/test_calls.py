"""What a session costs the host in each step, counted: time is not tested, since machines differ."""

import json
from pathlib import Path

import pytest
from tests.run_script import run_script

SCRIPT = Path(__file__).with_name("calls.py")
# Beyond a plain loop. The count differs by one or two between releases of Python.
MOST = {1: {"calls": 80, "operations": 8}, 2: {"calls": 140, "operations": 11}}


@pytest.mark.ranks
@pytest.mark.parametrize("ranks", MOST)
def test_a_step_makes_few_calls_and_operations_beyond_a_plain_loop(ranks: int, tmp_path: Path) -> None:
    found: dict[str, dict[str, float]] = {}
    for kind, size in (("plain", 1), ("session", ranks)):
        done = run_script(size, SCRIPT, kind, cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
        found[kind] = json.loads((tmp_path / f"{kind}-0.json").read_text())
    beyond = {name: number - found["plain"][name] for name, number in found["session"].items()}
    assert all(beyond[name] <= most for name, most in MOST[ranks].items()), beyond
