"""A sample of `soak_silent.py`: faults in an Accelerate and in a Trainer script, with lines of their user."""

import pytest
from tests.silent.soak_silent import planted

pytestmark = pytest.mark.sample(2)

STEPS = 60


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.needs("accelerate")
def test_with_accelerate_the_rank_the_users_line_and_the_batch_of_a_nan_are_named() -> None:
    row = planted("accelerated", "nan in one batch", STEPS, ranks=2, fork=True)
    assert row.well and row.line == "yes", row
    assert ", batch 12 " in row.told


@pytest.mark.ranks
@pytest.mark.needs("transformers")
def test_with_the_trainer_the_rank_and_the_users_line_of_two_exchanged_sums_are_named() -> None:
    row = planted("trainer", "two sums swapped", STEPS, ranks=2, fork=True)
    assert row.code == 4 and row.line == "yes", row
