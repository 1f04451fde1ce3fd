"""Random streams: draws inside depend on the seed only, and draws outside are those of a program without streams."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from paceline import seeding
from paceline.seeding import GeneratorStates, fork_rng_with_seed, generator_states, restore_generator_states

INSIDE: dict[str, Callable[[], Any]] = {
    "nothing": lambda: None,
    "uniform": lambda: np.random.rand(3),
    "normal": np.random.randn,  # leaves a cached number, which is not in the generator's words
    "seeded": lambda: np.random.seed(5),
    "nested": lambda: drawn(8),
}


def drawn(seed: int) -> list[float]:
    with fork_rng_with_seed(seed, torch.device("cpu")):
        return everything()


def everything() -> list[float]:
    return [np.random.randn(), np.random.rand(), random.random(), torch.rand(1).item()]


def outside(inside: Callable[[], Any] | None) -> list[float]:
    """An odd number of normal draws between any two streams: every second state has a cached number."""
    for seed in (np.random.seed, random.seed, torch.manual_seed):
        seed(3)
    found: list[float] = []
    for number in range(6):
        if inside is not None:
            with fork_rng_with_seed(number, torch.device("cpu")):
                inside()
        found += everything() if number % 3 else [np.random.randn()]
    return found


@pytest.mark.parametrize("inside", INSIDE)
def test_draws_outside_a_stream_are_untouched(inside: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert outside(INSIDE[inside]) == outside(None)
    monkeypatch.setattr(seeding._NumpyStream, "_words", lambda *_: b"other")  # of another layout
    assert outside(INSIDE[inside]) == outside(None)


@pytest.mark.parametrize("before", INSIDE)
def test_draws_inside_a_stream_depend_on_its_seed_only(before: str) -> None:
    want = drawn(7)
    INSIDE[before]()
    assert drawn(7) == want != drawn(6)


def test_streams_that_are_put_back_have_their_cached_normal_number() -> None:
    np.random.seed(3)
    _, want = np.random.randn(2)
    np.random.seed(3)
    np.random.randn()
    streams = GeneratorStates()
    np.random.randn()  # uses the cached number: the same words, without one
    drawn(1)
    streams.restore()
    drawn(1)
    assert np.random.randn() == want


def test_a_state_that_was_saved_without_numpy_leaves_its_generator() -> None:
    cpu = torch.device("cpu")
    state = generator_states(cpu)
    np.random.seed(3)
    want = np.random.rand()
    np.random.seed(3)
    state[-8:] = torch.tensor([float("nan")], dtype=torch.float64).view(torch.uint8)
    restore_generator_states(state, cpu)
    assert np.random.rand() == want
