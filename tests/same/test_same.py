"""A sample of `make soak-same`; and the record of the whole is of the scripts that there are."""

from pathlib import Path

import msgspec
import pytest
from tests.same.cases import CASES, DIFFERENCES, SAMPLE
from tests.same.soak_same import Compared, compare

RECORD = Path(__file__).parents[2] / "benchmarks" / "results" / "same.json"


@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLE)
def test_a_script_does_the_same_as_under_torchrun(name: str) -> None:
    found = compare(next(case for case in CASES if case.name == name))
    assert found.torchrun.marked
    assert found.launch == found.torchrun


def test_the_record_has_no_difference_that_is_not_known() -> None:
    found = {one.name: one for one in msgspec.json.decode(RECORD.read_bytes(), type=list[Compared])}
    assert found.keys() == {case.name for case in CASES} and len(found) >= 60
    assert {name for name, one in found.items() if not one.same} <= DIFFERENCES.keys()
