"""Two users of one machine, created by root: `victim`, who types commands, and `mallory`, who prepares files."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACELINE = Path(sys.prefix) / "bin" / "paceline"

KEPT = ("PATH", "LANG", "PACELINE_TEST_RUN", "PYTHONPATH")

# A user must be able to enter the folders of the interpreter and of this project, which may lie in root's own: in a
# mount namespace these are shown alone, in an empty folder that everybody can enter. $1: the closed folder.
SHOW = r"""
set -eu
closed=$1; shift
stage=/mnt
mount -t tmpfs -o mode=755 tmpfs "$stage"
while [ "$1" != -- ]; do
  mkdir -p "$stage/${1#"$closed"/}"; mount --bind "$1" "$stage/${1#"$closed"/}"; shift
done
shift
mount --rbind "$stage" "$closed"
exec "$@"
"""


@dataclass(frozen=True)
class User:
    """One of the users, with a private folder."""

    name: str
    uid: int
    gid: int
    home: Path

    def popen(
        self,
        *argv: object,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        umask: int = 0o022,
        stdin: bool = False,
    ) -> subprocess.Popen[str]:
        kept = {name: os.environ[name] for name in KEPT if name in os.environ}
        drop = ("setpriv", f"--reuid={self.uid}", f"--regid={self.gid}", "--clear-groups", "--inh-caps=-all")
        return subprocess.Popen(
            [*shown(), *(drop if self.uid else ()), *map(str, argv)], cwd=cwd or self.home,
            env={**kept, "HOME": str(self.home), "USER": self.name, "COLUMNS": "200", **(env or {})},
            stdin=subprocess.PIPE if stdin else subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True, errors="replace", start_new_session=True, umask=umask,
        )  # fmt: skip

    def run(self, *argv: object, timeout: float = 150, **options: object) -> subprocess.CompletedProcess[str]:
        with self.popen(*argv, **options) as process:  # pyright: ignore[reportArgumentType]
            try:
                out, err = process.communicate(timeout=timeout)
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, 9)
        return subprocess.CompletedProcess(argv, process.returncode, out, err)

    def paceline(self, *arguments: object, **options: object) -> subprocess.CompletedProcess[str]:
        return self.run(PACELINE, *arguments, **options)  # pyright: ignore[reportArgumentType]

    def own(self, *paths: Path) -> None:
        for path in paths:
            for one in (path, *(path.rglob("*") if path.is_dir() and not path.is_symlink() else ())):
                os.chown(one, self.uid, self.gid, follow_symlinks=False)


def shown() -> list[str]:
    """The start of a command that all users can run, for any location of the interpreter."""
    needed = [Path(sys.base_prefix).resolve(), Path(sys.prefix), ROOT]
    closed: dict[Path, list[Path]] = {}
    for path in needed:
        for folder in reversed(path.parents):
            if not folder.stat().st_mode & 0o001:
                closed.setdefault(folder, []).append(path)
                break
    words: list[str] = []
    for folder, paths in closed.items():
        words += ["unshare", "--mount", "--propagation", "private", "sh", "-c", SHOW, "sh"]
        words += [str(folder), *map(str, paths), "--"]
    return words


@dataclass(frozen=True)
class Users:
    """Both users, root, and a folder that all can enter but only root can write."""

    victim: User
    mallory: User
    root: User
    place: Path

    def folder(self, name: str, mode: int, owner: User) -> Path:
        made = self.place / name
        made.mkdir()
        os.chown(made, owner.uid, owner.gid)
        made.chmod(mode)
        return made


@contextmanager
def two_users(place: Path) -> Iterator[Users]:
    place.chmod(0o755)
    names = [f"pl{role}{os.getpid() % 1000000}" for role in ("victim", "mallory")]
    made: list[User] = []
    try:
        for name in names:
            _retried("useradd", "--no-create-home", "--user-group", "--shell", "/bin/sh", name)
            ids = [int(_retried("id", flag, name)) for flag in ("-u", "-g")]
            home = place / f"home-{name}"
            home.mkdir(0o700)
            os.chown(home, *ids)
            made.append(User(name, *ids, home))
        roots = place / "home-root"
        roots.mkdir(0o700)
        yield Users(*made, User("root", 0, 0, roots), place)
    finally:
        for name in names:
            if shutil.which("userdel"):
                subprocess.run(["userdel", name], capture_output=True, check=False)


def _retried(*argv: str) -> str:
    """A different test run may create users at this moment, and hold the lock."""
    for _ in range(50):
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return done.stdout
        time.sleep(0.1)
    raise RuntimeError(f"{argv}: {done.stderr}")
