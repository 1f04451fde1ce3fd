"""A host's answers about files: whether the run's folder is shared, how much room it has, and the hashes of data."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from contextlib import suppress
from pathlib import Path

import paceline
from paceline.doctor.messages import Disk, Done, File, Files, Probe

PACKAGED_DATA = Path(paceline.__file__).parent / "datasets" / "mnist"
IDX_FILE = re.compile(r"(images|labels)-idx\d-ubyte(\.gz)?$")
MAX_FILES = 64
TOKEN = re.compile(r"[0-9a-f]{32}")


def probe(request: Probe) -> Done:
    """Write, look for or remove the file that only this doctor knows."""
    if not TOKEN.fullmatch(request.token):  # it becomes a file's name
        raise ValueError(f"a token is 32 hex digits, got {request.token[:40]!r}")
    folder = existing(request.folder)
    path, token = folder / f".paceline-doctor-{request.token}", request.token.encode()
    if request.act == "write":
        try:
            _write_whole(path, token)
        except OSError as error:
            return Done(False, f"{folder} cannot be written to: {error.strerror}")
    elif request.act == "read":
        try:
            os.scandir(folder).close()  # makes NFS look again
            if path.read_bytes()[:64] != token:
                return Done(False, "it has another content here")
        except OSError as error:
            return Done(False, error.strerror or str(error))
    else:
        with suppress(OSError):
            path.unlink()
    return Done(True)


def _write_whole(path: Path, content: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        os.write(descriptor, content)
        os.fsync(descriptor)  # a full disk may only say so now
    except OSError:
        path.unlink(missing_ok=True)
        raise
    finally:
        os.close(descriptor)


def disk(folder: str) -> Disk:
    """Room at the folder, or at the parent that it will be made in."""
    path = existing(folder)
    try:
        usage = shutil.disk_usage(path)
    except OSError as error:
        return Disk(str(path), 0, 0, error.strerror or str(error))
    return Disk(str(path), usage.free, usage.total)


def hash_data(folder: str) -> Files:
    """Sizes and SHA-256 of the IDX files in `folder`, by name; of the packaged ones if it is empty."""
    root = Path(folder) if folder else PACKAGED_DATA
    try:
        paths = sorted(path for path in root.iterdir() if IDX_FILE.search(path.name))[:MAX_FILES]
        return Files(tuple(File(path.name, path.stat().st_size, _sha256(path)) for path in paths))
    except OSError as error:
        return Files((), f"{root}: {error.strerror}")


def existing(folder: str) -> Path:
    """The folder, or its nearest parent that is there."""
    path = Path(folder).absolute()
    while not path.is_dir() and path != path.parent:
        path = path.parent
    return path


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
