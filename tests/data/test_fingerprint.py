"""Data that differ between ranks are noticed; data that cannot be compared are not refused."""

import os

import torch

from paceline.data.fingerprint import UNSTABLE_DATASET_TEXT, data_fingerprint
from paceline.data.loader import LoadingOptions

LOADING = LoadingOptions(torch.device("cpu"), num_workers=2)


def test_other_data_are_compared_by_length_and_samples():
    def items(count, offset=0):
        return [({"x": torch.tensor(i + offset)}, i) for i in range(count)]

    assert data_fingerprint(items(9), LOADING) == data_fingerprint(items(9), LOADING)
    assert data_fingerprint(items(9), LOADING) != data_fingerprint(items(10), LOADING)
    assert data_fingerprint(items(9), LOADING) != data_fingerprint(items(9, 1), LOADING)
    assert data_fingerprint(items(1), LOADING)["samples"] == 1


class Augmented(list):
    """Its samples are drawn anew each time: from torch's stream, or from one that nobody can seed."""

    def __init__(self, source):
        super().__init__(range(5))
        self.source = source

    def __getitem__(self, index):
        return torch.tensor(self.source()), index


def test_seeded_augmentation_is_alike_and_unseeded_is_no_difference():
    seeded = data_fingerprint(Augmented(lambda: float(torch.rand(()))), LOADING)
    assert UNSTABLE_DATASET_TEXT not in seeded.values()
    assert seeded == data_fingerprint(Augmented(lambda: float(torch.rand(()))), LOADING)
    unseeded = data_fingerprint(Augmented(lambda: list(os.urandom(8))), LOADING)
    assert UNSTABLE_DATASET_TEXT in unseeded.values()
