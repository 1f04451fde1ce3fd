"""manifest.json is read as it was written, and values that JSON would change raise an error."""

import math

import msgspec
import pytest
from tests.checkpoint.checkpoint_harness import manifest_of
from tests.errors import raises

from paceline.errors import TrainingError
from paceline.runs.checkpoint_format import (
    Manifest,
    Piece,
    ShardFile,
    decode_manifest,
    encode_manifest,
    find_coverage_error,
)

FILES = [("shard-0-of-2.safetensors", 133, "0" * 64), ("shard-1-of-2.safetensors", 133, "f" * 64)]


def of_pieces(*pieces: Piece) -> Manifest:
    file = ShardFile(name="shard-0-of-1.safetensors", bytes=1, sha256="0" * 64, pieces=pieces)
    return msgspec.structs.replace(manifest_of(1, FILES[:1]), files=(file,))


def test_a_manifest_reads_back_as_it_was():
    manifest = manifest_of(7, FILES, scalars={"rng": 2**127 + 1, "lr": 0.1, "names": ["ä", None, True]})
    assert decode_manifest(encode_manifest(manifest)) == manifest


def test_the_order_of_settings_does_not_change_the_bytes():
    one = manifest_of(7, FILES, definition={"a": 1, "b": {"c": 2, "d": 3}})
    other = manifest_of(7, FILES, definition={"b": {"d": 3, "c": 2}, "a": 1})
    assert encode_manifest(one) == encode_manifest(other)


def test_scalars_and_empty_tensors_are_whole():
    scalar = Piece(key="a", name="optimizer/w/step", dtype="F32", shape=(), start=0, stop=1)
    empty = Piece(key="b", name="model/none", dtype="F32", shape=(0, 3), start=0, stop=0)
    assert decode_manifest(encode_manifest(of_pieces(scalar, empty)))


@pytest.mark.parametrize(
    ("scalars", "code", "fields"),
    [
        ({"loss": math.nan}, "scalar-not-finite", {"where": "scalars/loss"}),
        ({"best": [1.0, -math.inf]}, "scalar-not-finite", {"where": "scalars/best/1", "value": -math.inf}),
        ({"groups": {0: 1}}, "scalar-key-not-text", {"where": "scalars/groups", "key": 0}),
        ({"rng": b"state"}, "scalar-not-plain", {"where": "scalars/rng", "kind": "bytes"}),
        ({"seen": {1, 2}}, "scalar-not-plain", {"where": "scalars/seen", "kind": "set"}),
    ],
)
def test_what_json_would_change_silently_is_refused_by_name(scalars, code, fields):
    with raises(code, raised=TrainingError, **fields):
        encode_manifest(manifest_of(1, FILES, scalars=scalars))


def test_metrics_that_are_no_numbers_are_refused_by_name():
    with raises("scalar-not-finite", raised=TrainingError, where="metrics/loss"):
        encode_manifest(manifest_of(1, FILES, metrics={"loss": math.nan}))


@pytest.mark.parametrize(
    ("ranges", "words"),
    [
        ([(0, 4, 4, 8), (4, 8, 4, 8)], ""),
        ([(0, 8, 1, 8), (8, 12, 3, 8), (12, 16, 3, 8)], ""),
        ([(0, 4, 4, 8)], "the pieces have 16"),
        ([(0, 4, 4, 8), (3, 8, 4, 8)], "elements in two pieces"),
        ([(0, 4, 5, 8), (4, 8, 4, 8)], "out of its bounds"),
        ([(0, 4, 4, 8), (4, 8, 4, 4)], "rows of 8 in one piece, and different"),
        ([(0, 4, 4, 0), (4, 8, 4, 0)], "rows of 0"),
    ],
)
def test_ranges_must_hold_each_element_once(ranges: list[tuple[int, int, int, int]], words: str) -> None:
    found = find_coverage_error([Piece("key", "weight", "F32", (4, 8), *numbers) for numbers in ranges])
    assert (words in found) if words else not found
