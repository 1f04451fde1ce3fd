"""What is published, and whether a checkpoint is what its manifest says. Needs no claim, changes nothing."""

import re
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

from paceline.checkpoint.files import check_file, check_folder, read_whole
from paceline.checkpoint.format import Damaged, Manifest, decode_manifest
from paceline.disk.reading import names

MANIFEST = "manifest.json"
MANIFEST_LIMIT_BYTES = 1 << 24  # about 100,000 pieces

_STEP = re.compile(r"step-([0-9]{8,15})")


class Entry(NamedTuple):
    """A folder with a checkpoint's name; what is in it is another question."""

    step: int
    path: Path


def folder_name(step: int) -> str:
    """The name that the checkpoint of a step is published under; sorts like the step up to 99,999,999."""
    return f"step-{step:08d}"


def entries(root: Path) -> list[Entry]:
    """What has the name of a checkpoint, the newest first; nothing if there is no folder."""
    matches = [(_STEP.fullmatch(name), root / name) for name in names(root)]
    found = [Entry(int(match[1]), path) for match, path in matches if match]
    return sorted((entry for entry in found if entry.path.name == folder_name(entry.step)), reverse=True)


def check_checkpoint(path: Path, files: Collection[str] | None = None, *, trust: bool = False) -> Manifest:
    """The manifest of a checkpoint that can be trusted.

    Args:
        path: its folder.
        files: names of the files to hash, so that ranks can share the work; None means all. The sizes of all files
            are compared in any case.
        trust: whether it may belong to somebody else, or be writable by others.

    Raises:
        Damaged: names the file, with what was expected and what is there. Links count as damage, and what is not ours.
        ValueError: if `files` has a name that the manifest has not.
    """
    check_folder(path, trust=trust)
    data = read_whole(path / MANIFEST, MANIFEST_LIMIT_BYTES, trust=trust)
    try:
        manifest = decode_manifest(data)
    except Damaged as error:
        raise Damaged(f"{MANIFEST} {error}") from None
    if path.name != folder_name(manifest.step):
        raise Damaged(f"{MANIFEST} is of step {manifest.step}, its folder is {path.name}")
    check_files(path, manifest, files, trust=trust)
    return manifest


def check_files(folder: Path, manifest: Manifest, hashed: Collection[str] | None, *, trust: bool = False) -> None:
    """Refuse a folder whose files are not those of the manifest; hash the files named in `hashed`, None: all.

    Raises:
        Damaged: names the file.
    """
    if unknown := set(hashed or ()) - {file.name for file in manifest.files}:
        raise ValueError(f"the manifest has no file {sorted(unknown)}")
    for file in manifest.files:  # sizes first: they cost nothing
        check_file(folder / file.name, file, hashed=False, trust=trust)
    for file in manifest.files:
        if hashed is None or file.name in hashed:
            check_file(folder / file.name, file, hashed=True, trust=trust)
