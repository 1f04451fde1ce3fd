"""A file's header matches the manifest, or the checkpoint is damaged: `verify` and a resumed run agree."""

import hashlib
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.checkpoint.checkpoint_harness import HEADER, newest, saved, sealed, shard_name

from paceline.runs.checkpoint_format import MOST_ELEMENTS


def forge(root: Path, data: bytes | None = None, **changes: Any) -> None:
    """Replace the content of the newest checkpoint's first file, or fields of its piece. All hashes match."""
    folder = root / "step-00000002"
    inner = msgspec.json.decode((folder / "manifest.json").read_bytes())["manifest"]
    if data is not None:
        (folder / shard_name(0, 2)).write_bytes(data)
        inner["files"][0] |= {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    for file in inner["files"]:
        for piece in file["pieces"]:
            piece.update(changes)
    (folder / "manifest.json").write_bytes(sealed(inner))


def header(entry: object, *, length: int | None = None) -> bytes:
    text = json.dumps(entry).encode().ljust(HEADER - 8)
    return (len(text) if length is None else length).to_bytes(8, "little") + text


GOOD = {"dtype": "U8", "shape": [3000], "data_offsets": [0, 3000]}


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (header({"w": GOOD}, length=2**62), "states a header of 4,611,686,018,427,387,904 bytes"),
        (header({"w": GOOD}, length=10**4), "states a header of 10,000 bytes"),
        (header({"w": GOOD}, length=3), "no valid safetensors header"),
        (header([1]), "no valid safetensors header"),
        (header({"w": {**GOOD, "shape": [2**63 - 1] * 9}}), "unlike the manifest"),
        (header({"w": {**GOOD, "shape": [1] * 65}}), "no valid safetensors header"),
        (header({"w": {**GOOD, "dtype": "F64"}}), "unlike the manifest"),
        (header({"w": {**GOOD, "data_offsets": [0, 2999]}}), "the bytes 0 to 2999, which is not its size"),
        (header({"w": {**GOOD, "data_offsets": [1, 3001]}}), "no tensor, or two tensors, at byte 0"),
        (header({"v": GOOD}), "different tensors than the manifest"),
        (header({"w": GOOD, "v": GOOD}), "different tensors than the manifest"),
        (header({"w": GOOD, "__metadata__": {"a": 1}}), "no valid safetensors header"),
        (header({"w": GOOD})[:50], "states a header"),
        (b"", "states a header"),
    ],
)
def test_a_header_that_no_reader_would_take_is_damage(tmp_path: Path, data: bytes, words: str) -> None:
    saved(tmp_path, 1, 2)
    forge(tmp_path, data + b"x" * (3000 if len(data) == HEADER else 0))
    step, told = newest(tmp_path)
    assert step == 1 and words in told[0], told


def test_numbers_of_dimensions_and_elements_are_bounded(tmp_path: Path) -> None:
    for changes, words in (
        ({"shape": [2**63 - 1] * 300}, "Expected `array` of length <= 64"),
        ({"shape": [1] * 1_500_000}, "Expected `array` of length <= 64"),
        ({"shape": [2**40, 2**40]}, "larger than any memory"),
        ({"shape": [2**63 - 1] * 64}, "larger than any memory"),
    ):
        (tmp_path / "run").mkdir()
        saved(tmp_path / "run", 1, 2)
        forge(tmp_path / "run", **changes)
        step, told = newest(tmp_path / "run")
        assert (step == 1 and words in told[0]) or "pieces have" in told[0], told
        (tmp_path / "run").rename(tmp_path / f"run-{len(list(tmp_path.iterdir()))}")
    assert MOST_ELEMENTS < 2**63
