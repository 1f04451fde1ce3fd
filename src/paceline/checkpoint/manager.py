"""The folder of a run's checkpoints: who may publish one, how it is published, and which one is intact after a crash.

RUN/checkpoints/
    .fence                  who may publish: the newest attempt and generation
    .tmp-100-1-0/           attempt 1, generation 0 writes here; no reader looks into it
    step-00000100/          published by one rename: complete from then on, and never changed again
        shard-0-of-2.safetensors   shard-1-of-2.safetensors   manifest.json
    .trash-50-1-0/          is being deleted

Everything is on the disk before the rename. At every moment the old checkpoints exist, or the old ones and the new one.
A crash leaves a .tmp or .trash folder, which the next claim removes.

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

from paceline.checkpoint.format import (
    MANIFEST,
    Damaged,
    Manifest,
    check_files,
    decode_manifest,
    encode_manifest,
    folder_name,
    read_manifest,
    step_of,
)
from paceline.errors import TrainingError, UsageError
from paceline.runs import writing
from paceline.runs.reading import names

FEWEST_KEPT = 2  # one alone is lost if its disk blocks are
RELISTED = 100  # times: each means that a writer has published since
LOCK_SECONDS = 30.0  # the fence is held for a few renames; longer means that its holder is frozen

_LEFTOVER = re.compile(r"\.(?:tmp|trash)-([0-9]+)-([0-9]+)-([0-9]+)(?:-[0-9]+)?")

Report = Callable[[str], None]


class Fenced(TrainingError):  # noqa: N818 - a state, not a fault
    """A newer generation has taken over. The checkpoint of this one is not published."""


class Claim(NamedTuple):
    """The right to publish; a later claim is greater."""

    attempt: int
    generation: int

    def __str__(self) -> str:
        return f"attempt {self.attempt}, generation {self.generation}"


class Fence:
    """A file with the newest claim on a run's checkpoints. Only the holder of this claim may publish.

    After a restart a process of the older generation may still be alive, frozen or without a connection to its agent.
    If it continues in the middle of its checkpoint, the fence stops it. The file is read and changed only under its
    lock.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def take(self, claim: Claim) -> None:
        """Make `claim` the newest one; repeating it is no error.

        Raises:
            TrainingError: a newer one exists, or another process does not release the fence.
            OSError: it cannot be written, or the file system has no locks.
        """
        with self._locked(make=True) as descriptor:
            newest = _read_claim(descriptor)
            if newest is not None and claim < newest:
                raise TrainingError(code="fence-taken-over", newest=newest, claim=claim)
            _write_claim(descriptor, claim)

    @contextlib.contextmanager
    def holding(self, claim: Claim) -> Generator[None]:
        """Inside, no other process can take over.

        Raises:
            Fenced: if another process has taken over.
            TrainingError: if another process does not release the fence.
        """
        if not self._path.exists():
            raise Fenced(code="fence-missing", path=self._path)
        with self._locked() as descriptor:
            newest = _read_claim(descriptor)
            if newest != claim:
                raise Fenced(code="fence-is-newer", claim=claim, newest=newest)
            yield

    @contextlib.contextmanager
    def _locked(self, *, make: bool = False) -> Generator[int]:
        """The file's descriptor, while no other process has it."""
        descriptor = writing.keep(self._path, make=make)
        try:
            if not writing.lock(descriptor, LOCK_SECONDS):
                raise TrainingError(code="fence-locked", path=self._path)
            try:
                yield descriptor
            finally:
                # Closing is not enough: a child forked meanwhile (a loader's worker) has the same open file.
                fcntl.flock(descriptor, fcntl.LOCK_UN)
        finally:
            os.close(descriptor)


def _read_claim(descriptor: int) -> Claim | None:
    text = os.pread(descriptor, 100, 0)
    if not text.strip(b"\0"):  # new, or a power failure came before the first claim was on the disk
        return None
    match = re.fullmatch(rb"([0-9]{20}) ([0-9]{20})\n", text)
    if not match:
        raise TrainingError(code="fence-damaged", value=text)
    return Claim(int(match[1]), int(match[2]))


def _write_claim(descriptor: int, claim: Claim) -> None:
    """Write a claim into a locked fence, in one write of always the same length: a crash cannot tear it."""
    line = f"{claim.attempt:020d} {claim.generation:020d}\n".encode()
    written = os.pwrite(descriptor, line, 0)
    if written != len(line):
        raise OSError(f"only {written} of {len(line)} bytes were written")
    os.fsync(descriptor)


class Entry(NamedTuple):
    """A folder with a checkpoint's name. Its contents are not checked."""

    step: int
    path: Path


class Checkpoints:
    """The checkpoints of one run. Every rank may read. Rank 0 claims, begins and commits; in an emergency another rank.

    Two things are remembered: the claim, and which checkpoints this process has written or read in full, so that
    each is hashed at most once to decide what may be deleted.
    """

    def __init__(self, root: Path, *, trust: bool = False) -> None:
        """With `trust`, checkpoints that belong to other users, or that they could have written, are also read."""
        self.root = root
        self._trust, self._fence = trust, Fence(root / ".fence")
        self._claim: Claim | None = None
        self._inode: tuple[int, int] | None = None
        self._known_whole: dict[Path, bool] = {}

    # ---- read

    def entries(self) -> list[Entry]:
        """The folders with a checkpoint's name, the newest first; empty if there is no folder of checkpoints."""
        steps = {name: step_of(name) for name in names(self.root)}
        return sorted((Entry(step, self.root / name) for name, step in steps.items() if step is not None), reverse=True)

    def check(self, path: Path, files: Collection[str] | None = None) -> Manifest:
        """The manifest of an intact checkpoint; raises as `read_manifest` and `check_files`.

        Hashes the files with the names `files`, so that ranks can split the work. None means all.
        """
        if files is None:
            self._known_whole[path] = False
        manifest = read_manifest(path, trust=self._trust)
        check_files(path, manifest, files, trust=self._trust)
        if files is None:
            self._known_whole[path] = True
        return manifest

    def newest_valid(self, report: Report) -> tuple[Path, Manifest] | None:
        """The newest checkpoint that is intact, every byte of it hashed; None if there is none.

        Args:
            report: called for each newer one that is damaged, with its name and the damage.

        Raises:
            TrainingError: if another process deletes them faster than they can be read.
        """
        reported: set[Path] = set()
        for _ in range(RELISTED):
            for _, path in self.entries():
                try:
                    return path, self.check(path)
                except Damaged as error:
                    if not os.path.lexists(path):
                        break  # retired while we read it: newer ones are there by now
                    if path not in reported:
                        report(f"{path.name} cannot be used: {error}")
                    reported.add(path)
            else:
                return None
        raise TrainingError(code="checkpoints-deleted", folder=self.root)

    # ---- publish

    def claim(self, attempt: int, generation: int, report: Report = lambda _: None) -> None:
        """Make the folder, take the fence, and remove the partial checkpoints of older generations.

        Raises:
            TrainingError: if a newer generation has claimed it, or the folder cannot be written.
        """
        claim = Claim(attempt, generation)
        try:
            writing.make_folder(self.root, exist_ok=True)
            self._fence.take(claim)
            writing.sync_folder(self.root)
            writing.sync_folder(self.root.parent)
        except OSError as error:
            reason = error.strerror or str(error)
            raise TrainingError(code="checkpoints-not-written", folder=self.root, reason=reason) from None
        self._claim, self._inode = claim, self._found()
        for path in sorted(self.root.iterdir()):
            if path.name.startswith((".tmp-", ".trash-")) and not _is_newer(path.name, claim):
                _remove(path, report)

    def room_for(self, size_bytes: int) -> str | None:
        """None if the file system of the folder, which may not exist yet, has `size_bytes` free; else a sentence."""
        folder = next(path for path in (self.root, *self.root.absolute().parents) if path.is_dir())
        free_bytes = shutil.disk_usage(folder).free
        if free_bytes >= size_bytes:
            return None
        return f"a checkpoint needs {size_bytes:,} bytes, and the file system of {self.root} has {free_bytes:,} free"

    def begin(self, step: int) -> Path:
        """A new empty folder for the ranks to write their files into.

        Raises:
            OSError: if it cannot be made.
        """
        attempt, generation = self._claimed()
        return self._made(f".tmp-{step}-{attempt}-{generation}")

    def begin_alone(self, step: int, claim: Claim, rank: int) -> Path:
        """As `begin`, for a rank that saves the whole state alone, with the `claim` of its rank 0."""
        self._claim = claim
        return self._made(f".tmp-{step}-{claim.attempt}-{claim.generation}-{rank}")

    def _made(self, name: str) -> Path:
        tmp = self.root / name
        if tmp.exists():  # left by a failed attempt of ours: no other process has this name
            writing.remove(tmp)
        writing.make_folder(tmp)
        return tmp

    def commit(self, tmp: Path, manifest: Manifest, keep: int, report: Report = lambda _: None) -> Path:
        """Publish `tmp` as the checkpoint of its step, then delete those older than the newest `keep` intact ones.

        An intact checkpoint of this step that exists already is kept, and ours is removed. If an old one cannot be
        deleted, this is reported, and is no error. If the commit fails, no published checkpoint has changed.

        Returns:
            The folder of the checkpoint.

        Raises:
            Fenced: a newer generation has taken over; nothing is published.
            Damaged: a file of the manifest is missing or has a different size; nothing is published.
            OSError: the disk is full, or worse.
        """
        if keep < FEWEST_KEPT:
            raise UsageError(code="keep-too-few-checkpoints", least=FEWEST_KEPT, value=keep)
        encoded = encode_manifest(manifest)
        decode_manifest(encoded)  # what could not be read back is not worth writing
        try:
            check_files(tmp, manifest, hashed=())
            writing.write_new(tmp / MANIFEST, [encoded])
            writing.sync_folder(tmp)
        except (OSError, Damaged):
            with self._fence.holding(self._claimed()):
                pass  # a newer generation removes our files: if there is one, this is the reason
            raise
        path = self._publish(tmp, self.root / folder_name(manifest.step), report)
        self._retire(keep, report)
        return path

    def _publish(self, tmp: Path, path: Path, report: Report) -> Path:
        there = os.path.lexists(path)
        whole = there and self._is_whole(path)  # may hash for minutes: not under the lock
        dropped = tmp if whole else None
        with self._fence.holding(self._claimed()):
            if not whole:
                dropped = self._to_trash(path) if there else None
                writing.rename(tmp, path)
                writing.sync_folder(self.root)
                self._known_whole[path] = True
        if whole:
            report(f"{path.name} is there already, and whole: it is kept")
        if dropped:
            _remove(dropped, report)
        return path

    def _retire(self, keep: int, report: Report) -> None:
        """Delete all that are older than the newest `keep` intact ones; damaged ones do not count.

        Intact means: the sizes are right now, and the hashes were right once in this process. Sizes alone are not
        enough: after a resume from an older checkpoint the newer, damaged ones would push out the one that training
        continues from.
        """
        whole = 0
        surplus: list[Path] = []
        for _, path in self.entries():
            if whole == keep:
                surplus.append(path)
            else:
                whole += self._is_whole(path)
        if not surplus:
            return
        try:
            with self._fence.holding(self._claimed()):  # a newer generation may be reading them
                trash = [self._to_trash(path) for path in surplus]
        except (OSError, TrainingError) as error:
            report(f"old checkpoints are not deleted: {error}")
            return
        for path in trash:
            _remove(path, report)

    def _is_whole(self, path: Path) -> bool:
        try:
            self.check(path, files=() if path in self._known_whole else None)
        except Damaged:
            self._known_whole[path] = False
        return self._known_whole[path]

    def _to_trash(self, path: Path) -> Path:
        """Rename a checkpoint, so that no half deleted one is ever seen under a checkpoint's name."""
        attempt, generation = self._claimed()
        stem = f".trash-{path.name.removeprefix('step-')}-{attempt}-{generation}"
        candidates = itertools.chain([stem], (f"{stem}-{number}" for number in itertools.count(2)))
        trash = next(self.root / name for name in candidates if not (self.root / name).exists())
        self._known_whole.pop(path, None)
        return writing.rename(path, trash)

    def _claimed(self) -> Claim:
        if self._claim is None:
            raise RuntimeError("claim() comes before begin() and commit()")
        if self._inode is not None and self._found() != self._inode:
            raise TrainingError(code="checkpoints-exchanged", folder=self.root)
        return self._claim

    def _found(self) -> tuple[int, int] | None:
        """The identity of the folder, independent of its name."""
        try:
            found = self.root.lstat()
        except OSError:
            return None
        return found.st_dev, found.st_ino


def _is_newer(name: str, claim: Claim) -> bool:
    """Whether a leftover belongs to a generation that has taken over since `claim`."""
    match = _LEFTOVER.fullmatch(name)
    return bool(match) and Claim(int(match[2]), int(match[3])) > claim


def _remove(path: Path, report: Report) -> None:
    try:
        if os.path.lexists(path):
            writing.remove(path)
    except OSError as error:
        report(f"{path} cannot be removed: {error.strerror}")
