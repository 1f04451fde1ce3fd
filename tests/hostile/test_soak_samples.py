"""A seeded sample of the cases of `make soak-hostile` and `make soak-connections`."""

import tempfile
from pathlib import Path
from typing import Any

import pytest
from tests.hostile import soak_connections, soak_hostile
from tests.hostile.users import Users

FOLDERS = 10


@pytest.mark.slow
@pytest.mark.timeout(540)
def test_no_hostile_folder_of_a_sample_does_anything(tmp_path: Path) -> None:
    wrong: list[Any] = []
    tried: list[int] = []
    with tempfile.TemporaryDirectory(prefix="paceline-soak-") as folder:  # pytest's own are closed to others

        def told(number: int, result: dict[str, Any]) -> None:
            tried.extend(result["codes"])
            wrong.extend((number, result["done"], words) for words in result["wrong"])

        soak_hostile.soak(range(40_000, 40_000 + FOLDERS), 1, Path(folder), told)
    assert not wrong
    assert len(tried) >= FOLDERS * soak_hostile.TRIED and {0, 2} <= {*tried}


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.timeout(360)
def test_a_neighbour_at_every_port_from_the_first_moment_changes_no_bit(users: Users, mnist: Path) -> None:
    data = ("--data-dir", mnist)
    code, digest, _, said = soak_connections.train(users.victim, "alone", 12, *data)
    assert code == 0, said
    both = (users.victim, users.mallory)
    (code, attacked, _, said), counts = soak_connections.attacked(*both, "beside", 12, 1000, *data)
    assert counts[0] > 20 and counts[1] >= 2, counts  # a machine that is busy knocks less often
    if code:  # he was faster each time, and is named
        assert code == 2 and f"a process of user {users.mallory.name} has connected" in said
    else:
        assert attacked == digest
