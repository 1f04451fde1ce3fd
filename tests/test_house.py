"""The counts of tools/house.py stay within their limits, and each of them can be broken."""

import importlib.util
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
SPEC = importlib.util.spec_from_file_location("house", ROOT / "tools" / "house.py")
assert SPEC is not None and SPEC.loader is not None
house = importlib.util.module_from_spec(SPEC)
sys.modules["house"] = house
SPEC.loader.exec_module(house)

# what is not yet within its limit, and must not get worse
STILL = {
    "lines of src": 62_698,  # may only fall; "Shrink the codebase" asks for 47,000
}


def test_the_house_is_in_order() -> None:
    too_many = {
        count.name: (count.number, count.found)
        for count in house.counts()
        if count.number > max(count.limit, STILL.get(count.name, 0))
    }
    assert not too_many
