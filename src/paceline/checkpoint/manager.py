"""The folder of a run's checkpoints: permission to publish, atomic publication, and the newest intact checkpoint.

RUN/checkpoints/
    .fence                  the attempt and generation that may publish, the newest ones
    .tmp-100-1-0/           attempt 1, generation 0 writes here; readers ignore it
    step-00000100/          published by one rename: complete, and never changed afterwards
        shard-0-of-2.safetensors   shard-1-of-2.safetensors   manifest.json
    .trash-50-1-0/          is being deleted

All data is on disk before the rename. At any time the old checkpoints exist, or the old ones and the new one. A crash
leaves a .tmp or .trash folder, which the next claim removes.

This module does not import torch: commands list and verify checkpoints without it.
"""

import contextlib
import fcntl
import itertools
import os
import re
import shutil
from collections.abc import Callable, Collection, Generator
from pathlib import Path
from typing import NamedTuple

from paceline.errors import TrainingError
from paceline.runs import checkpoint_format, writing
from paceline.runs.reading import list_names

MAX_LISTINGS = 100  # a new listing is needed when a writer has published and deleted meanwhile
LOCK_SECONDS = 30.0  # the fence is locked for a few renames; if it takes longer, the other process is frozen

_LEFTOVER = re.compile(r"\.(?:tmp|trash)-([0-9]+)-([0-9]+)-([0-9]+)(?:-[0-9]+)?")

MessageCallback = Callable[[str], None]


class FencedError(TrainingError):
    """A newer generation has taken over. The checkpoint of this one is not published."""


class PublishClaim(NamedTuple):
    """The permission to publish. A later claim is greater."""

    attempt: int
    generation: int

    def __str__(self) -> str:
        return f"attempt {self.attempt}, generation {self.generation}"


class PublishFence:
    """A file with the newest claim on a run's checkpoints. Only the holder of this claim may publish.

    After a restart, a process of the older generation may still be alive, frozen or disconnected from its agent. If it
    continues with its checkpoint, the fence stops it. The file is read and changed only under its lock.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def advance_to(self, claim: PublishClaim) -> None:
        """Make `claim` the newest one; may be repeated. Raises TrainingError if a newer claim exists."""
        with self._locked(make=True) as descriptor:
            newest = _read_claim(descriptor, self._path)
            if newest is not None and claim < newest:
                raise TrainingError(code="fence-taken-over", newest=newest, claim=claim)
            line = f"{claim.attempt:020d} {claim.generation:020d}\n".encode()
            if (written := os.pwrite(descriptor, line, 0)) != len(line):  # one write: a crash leaves no partial claim
                raise OSError(f"wrote only {written} of {len(line)} bytes")
            os.fsync(descriptor)

    @contextlib.contextmanager
    def hold_claim(self, claim: PublishClaim) -> Generator[None]:
        """No other process can take the fence during this context. Raises FencedError if one has taken it."""
        if not self._path.exists():
            raise FencedError(code="fence-missing", path=self._path)
        with self._locked() as descriptor:
            newest = _read_claim(descriptor, self._path)
            if newest != claim:
                raise FencedError(code="fence-is-newer", claim=claim, newest=newest)
            yield

    @contextlib.contextmanager
    def _locked(self, *, make: bool = False) -> Generator[int]:
        descriptor = writing.open_or_create(self._path, make=make)
        try:
            if not writing.try_lock(descriptor, LOCK_SECONDS):
                raise TrainingError(code="fence-locked", path=self._path)
            try:
                yield descriptor
            finally:
                # close() is not enough: a child forked meanwhile (a DataLoader worker) has the same open file
                fcntl.flock(descriptor, fcntl.LOCK_UN)
        finally:
            os.close(descriptor)


def _read_claim(descriptor: int, path: Path) -> PublishClaim | None:
    text = os.pread(descriptor, 100, 0)
    if not text.strip(b"\0"):  # a new file, or a power failure before the first claim was on disk
        return None
    match = re.fullmatch(rb"([0-9]{20}) ([0-9]{20})\n", text)
    if not match:
        raise TrainingError(code="fence-damaged", path=path, value=text)
    return PublishClaim(int(match[1]), int(match[2]))


class CheckpointEntry(NamedTuple):
    """A folder with a checkpoint's name, whose content is not checked."""

    step: int
    path: Path


class Checkpoints:
    """The checkpoints of one run. Every rank may read. Rank 0 claims, begins and commits; any rank in an emergency.

    This object remembers which checkpoints this process has written or read completely. To decide which ones to delete,
    it hashes each checkpoint at most once.
    """

    def __init__(self, root: Path, *, trust: bool = False) -> None:
        """`trust`: also read checkpoints that other users own or can write."""
        self.root = root
        self._trust, self._fence = trust, PublishFence(root / ".fence")
        self._claim: PublishClaim | None = None
        self._inode: tuple[int, int] | None = None
        self._known_intact: dict[Path, bool] = {}

    # ---- read

    def entries(self) -> list[CheckpointEntry]:
        """The folders with a checkpoint's name, the newest first. Empty without a folder of checkpoints."""
        steps = {name: checkpoint_format.step_of(name) for name in list_names(self.root)}
        return sorted(
            (CheckpointEntry(step, self.root / name) for name, step in steps.items() if step is not None),
            reverse=True,
        )

    def check(self, path: Path, files: Collection[str] | None = None) -> checkpoint_format.Manifest:
        """Check a checkpoint, and return its manifest; raises Damaged (see `read_manifest` and `check_files`).

        `files`: the names of the files to hash, so that ranks can split the work. None: all files.
        """
        if files is None:
            self._known_intact[path] = False
        manifest = checkpoint_format.read_manifest(path, trust=self._trust)
        checkpoint_format.check_files(path, manifest, files, trust=self._trust)
        if files is None:
            self._known_intact[path] = True
        return manifest

    def newest_valid(self, report: MessageCallback) -> tuple[Path, checkpoint_format.Manifest] | None:
        """The newest intact checkpoint, with all files hashed; None if there is none.

        `report` is called for each newer, damaged checkpoint, with its name and the damage.
        """
        reported: set[Path] = set()
        for _ in range(MAX_LISTINGS):
            for _, path in self.entries():
                try:
                    return path, self.check(path)
                except checkpoint_format.DamagedCheckpoint as error:
                    if not os.path.lexists(path):
                        break  # deleted during the check: newer ones exist
                    if path not in reported:
                        report(f"{path.name} cannot be used: {error}")
                    reported.add(path)
            else:
                return None
        raise TrainingError(code="checkpoints-deleted", folder=self.root)

    # ---- publish

    def claim_publishing(self, attempt: int, generation: int, report: MessageCallback = lambda _: None) -> None:
        """Create the folder, take the fence, and remove the partial checkpoints of older generations."""
        claim = PublishClaim(attempt, generation)
        try:
            writing.make_folder(self.root, exist_ok=True)
            self._fence.advance_to(claim)
            writing.sync_folder(self.root)
            writing.sync_folder(self.root.parent)
        except OSError as error:
            reason = error.strerror or str(error)
            raise TrainingError(code="checkpoints-not-written", folder=self.root, reason=reason) from None
        self._claim, self._inode = claim, self._root_inode()
        for path in sorted(self.root.iterdir()):
            match = _LEFTOVER.fullmatch(path.name)
            is_newer = match is not None and PublishClaim(int(match[2]), int(match[3])) > claim
            if path.name.startswith((".tmp-", ".trash-")) and not is_newer:
                _remove(path, report)

    def find_space_shortage(self, size_bytes: int) -> str | None:
        """None if the file system has `size_bytes` free for the folder, which may not exist yet; else a message."""
        free_bytes = self.usable_bytes(0)
        if free_bytes >= size_bytes:
            return None
        return f"a checkpoint needs {size_bytes:,} bytes, and the file system of {self.root} has {free_bytes:,} free"

    def usable_bytes(self, keep: int) -> int:
        """The free space of the file system, and that of the newest `keep` checkpoints, which later ones replace."""
        folder = next(path for path in (self.root, *self.root.absolute().parents) if path.is_dir())
        held = [file.stat().st_size for _, path in self.entries()[:keep] for file in path.iterdir()]
        return shutil.disk_usage(folder).free + sum(held)

    def begin(self, step: int, *, alone: tuple[PublishClaim, int] | None = None) -> Path:
        """A new empty folder for the files of all ranks.

        `alone`: of a rank that saves the whole state alone; its number, and the claim of rank 0.
        """
        if alone is not None:
            self._claim = alone[0]
        attempt, generation = self._checked_claim()
        tmp = self.root / f".tmp-{step}-{attempt}-{generation}{'' if alone is None else f'-{alone[1]}'}"
        if tmp.exists():  # left by an earlier failure of this process: no other process uses this name
            writing.remove(tmp)
        writing.make_folder(tmp)
        return tmp

    def commit(
        self, tmp: Path, manifest: checkpoint_format.Manifest, keep: int, report: MessageCallback = lambda _: None
    ) -> Path:
        """Publish `tmp` as the checkpoint of its step, then delete those older than the newest `keep` intact ones.

        If an intact checkpoint of this step exists, it stays, and the new one is removed. If an old one cannot be
        deleted, `report` is called. If the commit fails, no published checkpoint has changed. It fails if a newer
        generation has taken the fence, or if a file of the manifest is missing or has a different size.
        """
        encoded = checkpoint_format.encode_manifest(manifest)
        checkpoint_format.decode_manifest(encoded)  # raises an error unless it can be read again
        try:
            checkpoint_format.check_files(tmp, manifest, hashed=())
            writing.write_new_file(tmp / checkpoint_format.MANIFEST_NAME, [encoded])
            writing.sync_folder(tmp)
        except (OSError, checkpoint_format.DamagedCheckpoint):
            with self._fence.hold_claim(self._checked_claim()):
                pass  # raises Fenced if a newer generation has removed the files
            raise
        path = self._publish(tmp, self.root / checkpoint_format.folder_name(manifest.step), report)
        self._retire(keep, report)
        return path

    def _publish(self, tmp: Path, path: Path, report: MessageCallback) -> Path:
        exists = os.path.lexists(path)
        is_intact = exists and self._is_intact(path)  # not under the lock, because it may hash for minutes
        discarded = tmp if is_intact else None
        with self._fence.hold_claim(self._checked_claim()):
            if not is_intact:
                discarded = self._to_trash(path) if exists else None
                writing.rename(tmp, path)
                writing.sync_folder(self.root)
                self._known_intact[path] = True
        if is_intact:
            report(f"{path.name} already exists and is intact: it is kept")
        if discarded:
            _remove(discarded, report)
        return path

    def _retire(self, keep: int, report: MessageCallback) -> None:
        """Delete all checkpoints older than the newest `keep` intact ones.

        Intact means that the sizes match now, and the hashes matched once in this process. The sizes are not enough:
        after a resume from an older checkpoint, newer damaged ones would count, and the older one would be deleted.
        """
        intact = 0
        surplus: list[Path] = []
        for _, path in self.entries():
            if intact == keep:
                surplus.append(path)
            else:
                intact += self._is_intact(path)
        if not surplus:
            return
        try:
            with self._fence.hold_claim(self._checked_claim()):  # a newer generation may be reading them
                trash = [self._to_trash(path) for path in surplus]
        except (OSError, TrainingError) as error:
            report(f"cannot delete old checkpoints: {error}")
            return
        for path in trash:
            _remove(path, report)

    def _is_intact(self, path: Path) -> bool:
        try:
            self.check(path, files=() if path in self._known_intact else None)
        except checkpoint_format.DamagedCheckpoint:
            self._known_intact[path] = False
        return self._known_intact[path]

    def _to_trash(self, path: Path) -> Path:
        """Rename a checkpoint: a partly deleted one must not have a checkpoint's name."""
        attempt, generation = self._checked_claim()
        stem = f".trash-{path.name.removeprefix('step-')}-{attempt}-{generation}"
        candidates = itertools.chain([stem], (f"{stem}-{number}" for number in itertools.count(2)))
        trash = next(self.root / name for name in candidates if not (self.root / name).exists())
        self._known_intact.pop(path, None)
        return writing.rename(path, trash)

    def _checked_claim(self) -> PublishClaim:
        assert self._claim is not None, "call claim_publishing() before begin() and commit()"
        if self._inode is not None and self._root_inode() != self._inode:
            raise TrainingError(code="checkpoints-exchanged", folder=self.root)
        return self._claim

    def _root_inode(self) -> tuple[int, int] | None:
        try:
            stat = self.root.lstat()
        except OSError:
            return None
        return stat.st_dev, stat.st_ino


def _remove(path: Path, report: MessageCallback) -> None:
    try:
        if os.path.lexists(path):
            writing.remove(path)
    except OSError as error:
        report(f"cannot remove {path}: {error.strerror}")
