"""The next batch is on its way before the current one is handed out; on the CPU nothing happens ahead."""

import pytest
import torch

from paceline.data.ahead import on_its_way, one_ahead


def counting(number, log):
    for i in range(number):
        log.append(f"begin {i}")
        yield torch.tensor([i])


@pytest.mark.parametrize("number", [0, 1, 2, 5])
def test_each_is_begun_before_the_one_before_it_is_handed_out(number):
    log = []
    source = counting(number, log)
    for i, item in enumerate(one_ahead(lambda: next(source), int)):
        assert item == i
        log.append(f"use {i}")
    uses = [log.index(f"use {i}") for i in range(number)]
    assert uses == sorted(uses) and len(log) == 2 * number
    for i in range(number - 1):
        assert log.index(f"begin {i + 1}") < uses[i]
        assert i + 2 >= number or uses[i] < log.index(f"begin {i + 2}")  # one ahead, not more


def test_an_error_of_the_source_comes_through():
    def source():
        yield 1
        raise OSError("disk")

    items = source()
    with pytest.raises(OSError, match="disk"):
        list(one_ahead(lambda: next(items), int))
    items = source()
    ahead = one_ahead(lambda: next(items), int)
    assert next(ahead) == 1  # what was there before it is not lost
    with pytest.raises(OSError, match="disk"):
        next(ahead)


def test_on_the_cpu_a_batch_is_made_when_it_is_asked_for():
    log = []
    batches = on_its_way(counting(3, log), torch.device("cpu"))
    assert int(next(batches)) == 0 and log == ["begin 0"]
