"""Is the run's folder shared, is there room, and is the data the same? A host's answers."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from contextlib import suppress
from pathlib import Path

import paceline
from paceline.doctor.messages import Disk, Done, File, Files

PACKAGED_DATA = Path(paceline.__file__).parent / "datasets" / "mnist"
IDX_FILE = re.compile(r"(images|labels)-idx\d-ubyte(\.gz)?$")
MAX_FILES = 64
TOKEN = re.compile(r"[0-9a-f]{32}")


def write_probe(folder: str, token: str) -> Done:
    """Leave a file that only this doctor knows."""
    try:
        path = _probe(folder, token)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        try:
            os.write(descriptor, token.encode())
            os.fsync(descriptor)  # a full disk may only say so now
        except OSError:
            path.unlink(missing_ok=True)
            raise
        finally:
            os.close(descriptor)
    except OSError as error:
        return Done(False, f"{existing(folder)} cannot be written to: {error.strerror}")
    return Done(True)


def read_probe(folder: str, token: str) -> Done:
    """Whether the file can be seen here, with its content."""
    path = _probe(folder, token)
    try:
        os.scandir(path.parent).close()  # makes NFS look again
        content = path.read_bytes()[:64]
    except OSError as error:
        return Done(False, error.strerror or str(error))
    return Done(content == token.encode(), "" if content == token.encode() else "it has another content here")


def remove_probe(folder: str, token: str) -> Done:
    """Remove the file; no error if there is none."""
    with suppress(OSError):
        _probe(folder, token).unlink()
    return Done(True)


def disk(folder: str) -> Disk:
    """Room at the folder, or at the parent that it will be made in."""
    path = existing(folder)
    try:
        usage = shutil.disk_usage(path)
    except OSError as error:
        return Disk(str(path), 0, 0, error.strerror or str(error))
    return Disk(str(path), usage.free, usage.total)


def fingerprint(folder: str) -> Files:
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


def _probe(folder: str, token: str) -> Path:
    if not TOKEN.fullmatch(token):  # it becomes a file's name
        raise ValueError(f"a token is 32 hex digits, got {token[:40]!r}")
    return existing(folder) / f".paceline-doctor-{token}"


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
