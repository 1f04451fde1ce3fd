"""What folders of runs tell: which of them can be compared, and whether their ranks met over a network."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.bench.made_up import Rank, lockstep

from paceline.bench.from_runs import comparable, over_network
from paceline.bench.scale_report import At
from paceline.errors import UsageError

ONE, TWO = lockstep([Rank()]), lockstep([Rank()] * 2)


def test_runs_met_over_a_network_if_any_of_them_was_on_several_hosts() -> None:
    apart = replace(TWO, hosts={0: "n1", 1: "n2"})
    assert not over_network({At(1, 64): [ONE], At(2, 64): [TWO]})
    assert over_network({At(1, 64): [ONE], At(2, 64): [TWO, apart]})


def test_only_runs_on_as_many_samples_can_be_compared() -> None:
    assert comparable({At(1, 64): [ONE], At(2, 64): [TWO]}) == (64, None)
    assert comparable({At(1, 64): [ONE], At(2, 32): [TWO]}) == (None, 64)
    with pytest.raises(UsageError, match="1 x 64, 2 x 48"):
        comparable({At(1, 64): [ONE], At(2, 48): [TWO]})
