"""The next batch is on its way before the current one is handed out; on the CPU nothing happens ahead."""

from dataclasses import dataclass
from typing import Any

import numpy
import pytest
import torch
from torch.nn.utils.rnn import pack_padded_sequence

from paceline.data.ahead import Prefetch, moved, on_its_way, one_ahead


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


def test_a_step_says_when_as_many_are_begun_as_it_had():
    log, ahead = [], Prefetch()
    things = counting(7, log)
    items = one_ahead(lambda: next(things), int, ahead)
    assert [next(items), next(items)] == [0, 1] and len(log) == 2  # not before the step is launched
    ahead.begin()
    assert log[2:] == ["begin 2", "begin 3"]
    ahead.begin()  # nothing was handed out since
    assert len(log) == 4
    assert [next(items) for _ in range(3)] == [2, 3, 4] and len(log) == 5
    ahead.begin()
    assert log[5:] == ["begin 5", "begin 6"] and list(items) == [5, 6]
    ahead.begin()  # of data that have ended


def test_what_goes_wrong_in_a_step_ahead_is_raised_when_it_is_due():
    def source():
        yield from (1, 2)
        raise OSError("disk")

    things, ahead = source(), Prefetch()
    items = one_ahead(lambda: next(things), int, ahead)
    assert [next(items), next(items)] == [1, 2]
    ahead.begin()  # the step that is under way is not disturbed
    with pytest.raises(OSError, match="disk"):
        next(items)


def test_data_that_are_left_are_not_loaded_any_more():
    log, ahead = [], Prefetch()
    things = counting(5, log)
    items = one_ahead(lambda: next(things), int, ahead)
    assert next(items) == 0
    items.close()
    ahead.begin()
    assert log == ["begin 0"]


@dataclass(frozen=True)
class Record:
    x: Any
    name: str


def test_tensors_move_in_nested_containers_and_nothing_else_does():
    one, meta = torch.ones(2, 3), torch.device("meta")
    packed = pack_padded_sequence(torch.ones(4, 2, 3), torch.tensor([2, 4]), enforce_sorted=False)
    batch = {"list": [one, (one, "word")], "record": Record({"deep": one}, "word"), "array": numpy.ones(2), "n": 1}
    there = moved({**batch, "packed": packed}, meta)
    found = [there["list"][0], there["list"][1][0], there["record"].x["deep"], there["packed"].data]
    assert {tensor.device.type for tensor in (*found, there["packed"].unsorted_indices)} == {"meta"}
    assert type(there["packed"]) is type(packed)
    assert there["packed"].batch_sizes.device.type == "cpu"  # torch's LSTM needs them there
    assert there["list"][1][1] == there["record"].name == "word"
    assert there["array"] is batch["array"]
    assert one.device.type == "cpu"
