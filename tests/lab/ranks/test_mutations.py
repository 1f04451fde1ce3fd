"""Verify catches planted bugs and names them; without one it is silent. Here a sample, at least one for each cause.

All of them: `make soak-mutations`.
"""

import random

import pytest
from tests.lab.ranks.mutation_table import IN_MEMORY, THROUGH_MEMORY, WORLD_SIZE, findings, findings_in_memory, judge
from tests.lab.ranks.mutations import CONTROL, CONTROLS_OF_SCALE, MUTATIONS
from tests.run_ranks import run_ranks

from paceline.lab.verify import CAUSES


def sample(seed: int) -> list:
    """One mutation for each cause that can be named, shuffled by `seed`."""
    order = random.Random(seed).sample(MUTATIONS, len(MUTATIONS))
    chosen = {cause: next((m for m in order if cause in m.causes), None) for cause in CAUSES}
    assert None not in chosen.values(), chosen
    return list(dict.fromkeys([*chosen.values(), *order]))[:14]


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.timeout(720)
def test_planted_bugs_are_caught_and_named_and_nothing_else_is(tmp_path):
    chosen = sample(seed=0)
    assert len(chosen) >= 12
    found = run_ranks(findings, WORLD_SIZE, tmp_path, [m.name for m in [CONTROL, *chosen]], timeout=660)[0]
    assert [r.finding for r in found[CONTROL.name]] == [None] * len(found[CONTROL.name])
    assert found[CONTROL.name]
    wrong = {m.name: verdict for m in chosen if (verdict := judge(m, found[m.name])) != "named"}
    assert not wrong


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.timeout(720)
def test_hooks_and_functions_that_are_not_linear_see_the_gradients_of_one_process(tmp_path):
    names = [control.name for control in CONTROLS_OF_SCALE]
    found = run_ranks(findings, WORLD_SIZE, tmp_path, names, timeout=660)[0]
    assert {name: [r.finding for r in found[name] if r.finding] for name in names} == {name: [] for name in names}
    assert all(found[name] for name in names)


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.timeout(720)
def test_bugs_planted_into_shared_memory_are_caught_and_named(tmp_path):
    found = run_ranks(findings_in_memory, WORLD_SIZE, tmp_path, [m.name for m in THROUGH_MEMORY], timeout=660)[0]
    assert [r.finding for r in found[IN_MEMORY.name]] == [None, None, None]
    bugs = [m for m in THROUGH_MEMORY if m is not IN_MEMORY]
    assert len(bugs) >= 8
    wrong = {m.name: verdict for m in bugs if (verdict := judge(m, found[m.name])) != "named"}
    assert not wrong
