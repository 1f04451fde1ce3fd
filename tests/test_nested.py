"""Tensors are found and changed in whatever holds them, and the holder keeps its type and what else it knows."""

from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

from paceline.compute.precision import autocast_bf16
from paceline.data.loader import move_to_device
from paceline.nested import map_tensors, tensors

Pair = namedtuple("Pair", ["first", "second"])
ONE, TWO = torch.tensor([1.0]), torch.tensor([2.0])


class Output(OrderedDict[str, Any]):
    """As transformers give: a mapping whose keys are attributes, too."""

    note = "kept"

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        self.__dict__[key] = value


@dataclass(frozen=True)
class Record:
    logits: Tensor
    hidden: list[Any]


def output() -> Output:
    found = Output()
    found["logits"], found["n"] = ONE, 3
    return found


HOLDERS = {
    "list": [ONE, "word", TWO], "tuple": (ONE, (TWO,)), "namedtuple": Pair(ONE, TWO), "dict": {"a": ONE, "b": [TWO]},
    "read-only": MappingProxyType({"a": ONE, "b": TWO}), "record": Record(ONE, [TWO, None]),
}  # fmt: skip


@pytest.mark.parametrize("name", HOLDERS)
def test_every_tensor_is_found_and_changed_and_nothing_is_written_into(name):
    value = HOLDERS[name]
    assert [float(tensor) for tensor in tensors(value)] == [1, 2]
    changed = map_tensors(value, lambda tensor: tensor * 10)
    assert [float(tensor) for tensor in tensors(changed)] == [10, 20]
    assert [float(tensor) for tensor in tensors(value)] == [1, 2]
    assert type(changed) is type(value) or name == "read-only"


def test_packed_sequences_move_but_for_their_batch_sizes_which_torch_needs_on_the_cpu():
    packed = pack_padded_sequence(torch.ones(4, 2, 3), torch.tensor([2, 4]), enforce_sorted=False)
    moved = move_to_device({"packed": packed, "array": (array := np.ones(2))}, torch.device("meta"))
    there = moved["packed"]
    assert type(there) is type(packed) and there.batch_sizes.device.type == "cpu" and moved["array"] is array
    assert {tensor.device.type for tensor in (there.data, there.unsorted_indices)} == {"meta"}


def test_a_model_in_bf16_gives_float32_in_the_container_of_its_own():
    class Model(nn.Module):
        def __init__(self, kind: type) -> None:
            super().__init__()
            self.kind, self.layer = kind, nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Any:
            hidden = self.layer(x)
            assert hidden.dtype == torch.bfloat16
            if self.kind is Record:
                return Record(hidden, [hidden])
            found = output()
            found["logits"] = hidden
            return found

    for kind in (Record, Output):
        model = Model(kind)
        autocast_bf16(model, torch.device("cpu"))
        found = model(torch.ones(2, 4))
        assert type(found) is kind and found.logits.dtype == torch.float32
        assert {tensor.dtype for tensor in tensors(found)} == {torch.float32}


def test_what_a_mapping_knows_beside_its_items_stays():
    changed = map_tensors(output(), lambda tensor: tensor * 10)
    assert changed.note == "kept" and float(changed.logits) == 10 and changed["n"] == 3
