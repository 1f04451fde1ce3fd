"""How much a rank sends: a ring's volume, by the size of what is put in."""

import pytest

from paceline.lab.ranks.memory import collective_sent_bytes


@pytest.mark.parametrize(
    ("kind", "ranks", "sent"),
    [
        ("all_reduce", 2, 100), ("all_reduce", 4, 150), ("all_gather", 4, 300), ("all_gather_into_tensor", 2, 100),
        ("reduce_scatter", 4, 75), ("all_to_all", 4, 75), ("all_reduce", 1, 0), ("all_gather", 1, 0),
    ],
)  # fmt: skip
def test_the_volume_is_that_of_a_ring(kind: str, ranks: int, sent: float) -> None:
    assert collective_sent_bytes(kind, 100, ranks) == sent


@pytest.mark.parametrize(("ranks", "size"), [(2, 1000), (3, 999), (8, 64)])
def test_a_reduce_scatter_and_an_all_gather_of_the_shares_are_an_all_reduce(ranks: int, size: int) -> None:
    both = collective_sent_bytes("reduce_scatter", size, ranks) + collective_sent_bytes(
        "all_gather", size // ranks, ranks
    )
    assert both == pytest.approx(collective_sent_bytes("all_reduce", size, ranks))
