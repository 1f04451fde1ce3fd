"""No damaged or forged checkpoint is loaded. A report names the file, and the previous checkpoint is used."""

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.checkpoint.checkpoint_harness import newest, saved, sealed, shard_name
from tests.checkpoint.damage import kill_trial, trial

from paceline.checkpoint.manager import Checkpoints
from paceline.runs.checkpoint_format import DamagedCheckpoint
from paceline.runs.owners import user_name

NOBODY = 65534


@pytest.mark.parametrize(("attempt", "count"), [(trial, 30), (kill_trial, 15)], ids=["damage", "killed writer"])
def test_random_damage_is_told_by_file_and_a_writer_killed_at_any_byte_publishes_nothing(tmp_path, attempt, count):
    template = tmp_path / "template"
    saved(template, 1, 2)
    failures = [attempt(template, tmp_path / "trial", f"suite-{number}") for number in range(count)]
    assert [failure for failure in failures if failure] == []


@pytest.mark.parametrize("cut", [0, 1, 0.5, -1])
def test_a_torn_manifest_is_never_loaded(tmp_path, cut):
    saved(tmp_path, 1, 2)
    manifest = tmp_path / "step-00000002" / "manifest.json"
    data = manifest.read_bytes()
    manifest.write_bytes(data[: int(len(data) * cut) if cut == 0.5 else cut])
    refused(tmp_path, "step-00000002 cannot be used: manifest.json is not JSON")


def refused(root: Path, words: str, *, newest_step: int = 1) -> None:
    step, told = newest(root)
    assert step == newest_step
    assert words in told[0]
    assert len(told[0]) < 600


def test_a_file_of_another_checkpoint_is_never_loaded(tmp_path):
    saved(tmp_path, 1, 2)
    name = shard_name(1, 2)
    (tmp_path / "step-00000002" / name).write_bytes((tmp_path / "step-00000001" / name).read_bytes())
    refused(tmp_path, f"{name} has the sha256")


def test_a_checkpoint_under_the_name_of_another_step_is_never_loaded(tmp_path):
    saved(tmp_path, 1, 2)
    (tmp_path / "step-00000001").rename(tmp_path / "step-00000009")
    refused(tmp_path, "is of step 1, its folder is step-00000009", newest_step=2)


def test_ranks_share_the_hashing_and_each_compares_all_sizes(tmp_path):
    checkpoints = saved(tmp_path, 1)
    path = tmp_path / "step-00000001"
    (path / shard_name(1, 2)).write_bytes(b"x" * 3128)
    checkpoints.check(path, files=[shard_name(0, 2)])
    with pytest.raises(DamagedCheckpoint, match="shard-1-of-2"):
        checkpoints.check(path, files=[shard_name(1, 2)])
    (path / shard_name(1, 2)).write_bytes(b"x" * 3127)
    with pytest.raises(DamagedCheckpoint, match=r"shard-1-of-2\.safetensors has 3,127 bytes instead of 3,128"):
        checkpoints.check(path, files=[shard_name(0, 2)])


# ---- forged: the hashes are right --------------------------------------------------------------------------------


def with_name(name: str) -> Callable[[dict[str, Any]], object]:
    def change(inner: dict[str, Any]) -> object:
        inner["files"][0]["name"] = name
        return inner

    return change


def with_value(key: str, value: object) -> Callable[[dict[str, Any]], object]:
    return lambda inner: {**inner, key: value}


def with_piece(**values: object) -> Callable[[dict[str, Any]], object]:
    def change(inner: dict[str, Any]) -> object:
        inner["files"][1]["pieces"][0].update(values)
        return inner

    return change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (with_name("../step-00000001/shard-0-of-2.safetensors"), "not a plain shard"),
        (with_name("/etc/passwd"), "not a plain shard"),
        (with_name(".."), "not a plain shard"),
        (with_name("shard-0-of-2.safetensors\n"), "not a plain shard"),
        (with_name("shard-00-of-2.safetensors"), "not a plain shard"),
        (with_name("shard-2-of-2.safetensors"), "world size is 2"),
        (with_name("shard-0-of-3.safetensors"), "world size is 2"),
        (with_name("shard-1-of-2.safetensors"), "twice"),
        (with_value("files", []), "lists no file"),
        (with_value("format", 2), "format 2 is newer than this paceline's 1"),
        (with_value("format", 0), "format 0 is not this paceline's, 1"),
        (with_value("format", "1"), "not the manifest of a paceline checkpoint"),
        (with_value("step", -2), "Expected `int` >= 0"),
        (with_value("step", 10**30), "Expected `int` <="),
        (with_value("world_size", 0), "Expected `int` >= 1"),
        (with_value("metrics", {"loss": None}), "Expected `float`"),
        (with_value("surprise", 1), "unknown field `surprise`"),
        (with_value("\x1b[2J", 1), "?[2J"),
        (with_value("x" * 5000, 1), "xxx ..."),
        (with_piece(start=2999), "'model/w' has the elements 2999 to 3000 in two pieces"),
        (with_piece(start=3001), "'model/w' has no piece with the elements 3000 to 3001"),
        (with_piece(stop=5999), "with 6000 elements, but the pieces have 5999"),
        (with_piece(stop=6001), "with 6000 elements, but the pieces have 6001"),
        (with_piece(start=6000, stop=3000), "a piece from element 6000 back to 3000"),
        (with_piece(start=0, stop=3000), "in two pieces"),
        (with_piece(start=-1), "Expected `int` >= 0"),
        (with_piece(shape=[2**62, 2**62]), "U8[6000] in one piece"),
        (with_piece(dtype="F32"), "is U8[6000] in one piece and F32[6000] in a different one"),
        (with_piece(name="model/v"), "'model/w' is U8[6000] with 6000 elements, but the pieces have 3000"),
        (lambda _: [], "not the manifest of a paceline checkpoint"),
        (lambda _: {"weights": "elsewhere"}, "not the manifest of a paceline checkpoint"),
    ],
)
def test_a_forged_manifest_is_refused_whatever_its_hash_says(tmp_path, change, words):
    saved(tmp_path, 1, 2)
    manifest = tmp_path / "step-00000002" / "manifest.json"
    inner = msgspec.json.decode(manifest.read_bytes())["manifest"]
    assert sealed(inner) == manifest.read_bytes()  # the forger seals as paceline does
    manifest.write_bytes(sealed(change(inner)))
    refused(tmp_path, words)


def test_a_manifest_changed_by_hand_is_told_as_such(tmp_path):
    saved(tmp_path, 1, 2)
    manifest = tmp_path / "step-00000002" / "manifest.json"
    before = manifest.read_bytes()
    manifest.write_bytes(before.replace(b'"samples_seen":128', b'"samples_seen":129'))
    assert manifest.read_bytes() != before
    said = json.loads(before)["sha256"]
    refused(tmp_path, f"manifest.json was changed: it states the sha256 {said}, but has")


def test_a_newer_format_is_told_before_its_hash_and_its_fields(tmp_path):
    saved(tmp_path, 1)
    path = tmp_path / "step-00000001"
    (path / "manifest.json").write_bytes(sealed({"format": 2, "cipher": "new"}, sha256="blake3:0"))
    with pytest.raises(DamagedCheckpoint, match=r"manifest\.json format 2 is newer than this paceline's 1"):
        Checkpoints(tmp_path).check(path)


@pytest.mark.parametrize(
    "data", [b"[" * 200_000, b'{"manifest":' + b'{"a":' * 100_000, b"\xff\xfe", b'"\xff"', b"9" * 9999]
)
def test_what_is_no_manifest_at_all_is_told_in_words(tmp_path, data):
    saved(tmp_path, 1)
    path = tmp_path / "step-00000001"
    (path / "manifest.json").write_bytes(data)
    with pytest.raises(DamagedCheckpoint, match=r"manifest\.json is") as caught:
        Checkpoints(tmp_path).check(path)
    assert len(str(caught.value)) < 600


# ---- links, pipes, owners ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["manifest.json", "shard-0-of-2.safetensors", ""])
def test_a_symbolic_link_is_refused_even_to_the_right_contents(tmp_path, name):
    saved(tmp_path, 1, 2)
    path = tmp_path / "step-00000002" / name if name else tmp_path / "step-00000002"
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    refused(tmp_path, f"{name or 'its folder'} is a symbolic link")


@pytest.mark.timeout(10)
@pytest.mark.parametrize("name", ["manifest.json", "shard-0-of-2.safetensors"])
def test_a_pipe_is_refused_and_not_waited_for(tmp_path, name):
    saved(tmp_path, 1, 2)
    path = tmp_path / "step-00000002" / name
    path.unlink()
    os.mkfifo(path)
    refused(tmp_path, f"{name} is not a plain file")


@pytest.mark.parametrize("name", ["manifest.json", "shard-0-of-2.safetensors", ""])
def test_what_everybody_can_write_is_refused(tmp_path, name):
    saved(tmp_path, 1, 2)
    path = tmp_path / "step-00000002" / name
    path.chmod(path.stat().st_mode | 0o002)
    refused(tmp_path, f"{name or 'its folder'} is not trusted: {path} can be written by all users")


@pytest.mark.root
@pytest.mark.parametrize("name", ["manifest.json", "shard-0-of-2.safetensors", ""])
def test_what_belongs_to_somebody_else_is_refused(name):
    with tempfile.TemporaryDirectory() as folder:  # pytest's folders are closed to others
        root = Path(folder) / "checkpoints"
        saved(root, 1, 2)
        for path in (Path(folder), root, *root.rglob("*")):
            os.chown(path, NOBODY, NOBODY)
        other = root / "step-00000002" / name
        os.chown(other, 0, NOBODY)
        other.chmod(0o755)
        step, told = newest(root)
        assert step is None  # root is not exempt
        assert f"belongs to user {user_name(NOBODY)}" in told[0]
        assert Checkpoints(root, trust=True).newest_valid(told.append), "but may trust"
        os.seteuid(NOBODY)
        try:
            step, told = newest(root)
        finally:
            os.seteuid(0)
    assert step == 1
    assert f"{other} belongs to user {user_name(0)}" in told[0]


def test_a_manifest_too_large_to_be_true_is_not_read(tmp_path):
    saved(tmp_path, 1)
    path = tmp_path / "step-00000001"
    os.truncate(path / "manifest.json", 1 << 40)  # sparse
    with pytest.raises(DamagedCheckpoint, match=r"manifest\.json has 1,099,511,627,776 bytes"):
        Checkpoints(tmp_path).check(path)
