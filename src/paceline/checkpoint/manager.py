"""The folder of a run's checkpoints: how one is published, and which one is trusted after any crash.

RUN/checkpoints/
    .fence                  who may publish: the newest attempt and generation (fence.py)
    .tmp-100-1-0/           being written by attempt 1, generation 0; nobody reads it
    step-00000100/          published by one rename: whole from its first moment, and never changed again
        shard-0-of-2.safetensors   shard-1-of-2.safetensors   manifest.json
    .trash-50-1-0/          on its way out

Everything is on the disk before the rename, so that at every moment either the old checkpoints are there, or they and
the new one. A crash leaves a .tmp or .trash folder, which the next claim removes.
"""

import itertools
import os
import re
from collections.abc import Callable, Collection
from pathlib import Path

from paceline.checkpoint.fence import Claim, Fenced, holding, take
from paceline.checkpoint.files import sync_folder, write_file
from paceline.checkpoint.format import Damaged, Manifest, decode_manifest, encode_manifest
from paceline.checkpoint.published import MANIFEST, Entry, check_checkpoint, check_files, entries, folder_name
from paceline.disk import writing
from paceline.errors import TrainingError, UsageError

__all__ = ["Checkpoints", "Claim", "Damaged", "Entry", "Fenced", "Report", "write_file"]

FEWEST_KEPT = 2  # one alone is lost when its disk blocks are
RELISTED = 100  # times: each means that a writer has published since

_LEFTOVER = re.compile(r"\.(?:tmp|trash)-([0-9]+)-([0-9]+)-([0-9]+)(?:-[0-9]+)?")

Report = Callable[[str], None]


def _silent(_words: str) -> None: ...


class Checkpoints:
    """The checkpoints of one run. Everybody may read; rank 0 claims, begins and commits, in an emergency another one.

    Two things are remembered: the claim, and which checkpoints this process has written or read in full, so that
    each is hashed at most once to decide what may be deleted.
    """

    def __init__(self, root: Path, *, trust: bool = False) -> None:
        """With `trust`, checkpoints that belong to others, or that they could have written, are read all the same."""
        self.root = root
        self._trust, self._fence = trust, root / ".fence"
        self._claim: Claim | None = None
        self._place: tuple[int, int] | None = None
        self._known_whole: dict[Path, bool] = {}

    def claim(self, attempt: int, generation: int, report: Report = _silent) -> None:
        """Make the folder, take the fence, and remove what older generations left half done.

        Raises:
            TrainingError: if a newer generation has claimed it, or the folder cannot be written.
        """
        claim = Claim(attempt, generation)
        try:
            writing.make_folder(self.root, exist_ok=True)
            take(self._fence, claim)
            sync_folder(self.root)
            sync_folder(self.root.parent)
        except OSError as error:
            raise TrainingError(
                code="checkpoints-not-written", folder=self.root, reason=error.strerror or str(error)
            ) from None
        self._claim, self._place = claim, self._found()
        for path in sorted(self.root.iterdir()):
            if path.name.startswith((".tmp-", ".trash-")) and not _is_newer(path.name, claim):
                _remove(path, report)

    def begin(self, step: int) -> Path:
        """A new empty folder for the ranks to write their files into.

        Raises:
            OSError: if it cannot be made.
        """
        attempt, generation = self._claimed()
        return self._made(self.root / f".tmp-{step}-{attempt}-{generation}")

    def begin_alone(self, step: int, claim: Claim, rank: int) -> Path:
        """As `begin`, for a rank that saves the whole state alone, with the `claim` of its rank 0."""
        self._claim = claim
        return self._made(self.root / f".tmp-{step}-{claim.attempt}-{claim.generation}-{rank}")

    def _made(self, tmp: Path) -> Path:
        if tmp.exists():  # left by a failed attempt of ours: nobody else has this name
            writing.remove(tmp)
        writing.make_folder(tmp)
        return tmp

    def commit(self, tmp: Path, manifest: Manifest, keep: int, report: Report = _silent) -> Path:
        """Publish `tmp` as the checkpoint of its step, then delete what is older than the newest `keep` whole ones.

        A whole checkpoint of this step that is there already is kept, and ours dropped. That an old one cannot be
        deleted is reported, and no error. Where this fails, no published checkpoint has changed.

        Returns:
            The folder of the checkpoint.

        Raises:
            Fenced: a newer generation has taken over; nothing is published.
            Damaged: a file of the manifest is missing or has another size; nothing is published.
            OSError: the disk is full, or worse.
        """
        if keep < FEWEST_KEPT:
            raise UsageError(code="keep-too-few-checkpoints", least=FEWEST_KEPT, value=keep)
        encoded = encode_manifest(manifest)
        decode_manifest(encoded)  # what could not be read back is not worth writing
        try:
            check_files(tmp, manifest, hashed=())
            write_file(tmp / MANIFEST, [encoded])
            sync_folder(tmp)
        except (OSError, Damaged):
            with holding(self._fence, self._claimed()):
                pass  # a newer generation removes our files: if one is there, this is what happened
            raise
        path = self._publish(tmp, self.root / folder_name(manifest.step), report)
        self._retire(keep, report)
        return path

    def _publish(self, tmp: Path, path: Path, report: Report) -> Path:
        there = os.path.lexists(path)
        whole = there and self._is_whole(path)  # may hash for minutes: not under the lock
        dropped = tmp if whole else None
        with holding(self._fence, self._claimed()):
            if not whole:
                dropped = self._to_trash(path) if there else None
                writing.rename(tmp, path)
                sync_folder(self.root)
                self._known_whole[path] = True
        if whole:
            report(f"{path.name} is there already, and whole: it is kept")
        if dropped:
            _remove(dropped, report)
        return path

    def _retire(self, keep: int, report: Report) -> None:
        """Delete all that is older than the newest `keep` whole ones; what is damaged does not count.

        Whole means: sizes right now, and the full hash once in this process. Sizes alone are not enough: after a
        resume from an older checkpoint the newer, damaged ones would push out the one that training continues from.
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
            with holding(self._fence, self._claimed()):  # whoever has taken over may be reading them
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
        names = itertools.chain([stem], (f"{stem}-{number}" for number in itertools.count(2)))
        trash = next(self.root / name for name in names if not (self.root / name).exists())
        self._known_whole.pop(path, None)
        return writing.rename(path, trash)

    def _claimed(self) -> Claim:
        if self._claim is None:
            raise RuntimeError("claim() comes before begin() and commit()")
        if self._place is not None and self._found() != self._place:
            raise TrainingError(code="checkpoints-exchanged", folder=self.root)
        return self._claim

    def _found(self) -> tuple[int, int] | None:
        """Which folder it is, whatever its name."""
        try:
            found = self.root.lstat()
        except OSError:
            return None
        return found.st_dev, found.st_ino

    def entries(self) -> list[Entry]:
        """What has the name of a checkpoint, the newest first; nothing if there is no folder."""
        return entries(self.root)

    def check(self, path: Path, files: Collection[str] | None = None) -> Manifest:
        """The manifest of a checkpoint that can be trusted, as `check_checkpoint` says; raises Damaged."""
        if files is not None:
            return check_checkpoint(path, files, trust=self._trust)
        self._known_whole[path] = False
        manifest = check_checkpoint(path, trust=self._trust)
        self._known_whole[path] = True
        return manifest

    def newest_valid(self, report: Report) -> tuple[Path, Manifest] | None:
        """The newest checkpoint that is whole, every byte of it hashed; None if there is none.

        Args:
            report: given each newer one that is not: its name, and why.

        Raises:
            TrainingError: if another process deletes them faster than they can be read.
        """
        told: set[Path] = set()
        for _ in range(RELISTED):
            for _, path in self.entries():
                try:
                    return path, self.check(path)
                except Damaged as error:
                    if not os.path.lexists(path):
                        break  # retired while we read it: newer ones are there by now
                    if path not in told:
                        report(f"{path.name} cannot be used: {error}")
                    told.add(path)
            else:
                return None
        raise TrainingError(code="checkpoints-deleted", folder=self.root)


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
