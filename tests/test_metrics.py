"""The numbers of tools/metrics.py stay within their limits."""

import importlib.util
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
SPEC = importlib.util.spec_from_file_location("metrics", ROOT / "tools" / "metrics.py")
assert SPEC is not None and SPEC.loader is not None
metrics = importlib.util.module_from_spec(SPEC)
sys.modules["metrics"] = metrics
SPEC.loader.exec_module(metrics)


def test_no_number_is_over_its_limit() -> None:
    too_many = {one.name: (one.number, one.found) for one in metrics.counts() if one.number > one.limit}
    assert not too_many
