"""Ten thousand hostile folders against every command that reads one: `make soak-hostile`.

Each is a copy of a real run in which files are replaced, linked, grown, nested, cut, given other numbers and words,
opened to everybody, given to the neighbour, or exchanged while they are read. It is the neighbour's, or ours as an
archive's contents are whoever unpacks it. Commands are typed by its finder. Nothing may be run, signalled or written
elsewhere; no answer may take 2 s or 200 MB, or be a traceback. Seeded; goes on where it was stopped.
"""

import argparse
import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
from tests.checkpoint.checkpoint_harness import sealed
from tests.guard.test_guard_story import STALLED
from tests.hostile.folders import write_roster
from tests.hostile.users import ROOT, User, Users, two_users

from paceline.guard.judge import diagnose
from paceline.guard.report import write_diagnosis
from paceline.protocol.evidence import Failure, LiveSamples, RankSample

MAX_SECONDS, MAX_BYTES = 2.0, 200 << 20
CASES_A_SAVE = 200
TRIED = 3  # commands on each folder, of all
TASK = (ROOT / "examples" / "own_task.py").read_text()
# (words, whether torch must be imported for them): {run} is the folder, {home} the finder's
COMMANDS: tuple[tuple[tuple[str, ...], bool], ...] = (
    (("status", "{run}"), False),
    (("status", "{run}", "--json"), False),
    (("runs", "{run}/.."), False),
    (("export", "{run}", "-o", "/proc/w.pt"), True),  # where nobody can write
    (("logs", "{run}"), False),
    (("logs", "{run}", "--rank", "1", "--lines", "0"), False),
    (("hang", "{run}"), False),
    (("cancel", "{run}"), False),
    (("checkpoint", "list", "{run}"), False),
    (("checkpoint", "verify", "{run}"), False),
    (("ledger", "{run}"), True),
    (("train", "--resume", "auto", "--run-dir", "{run}", "--nproc", "1", "--dry-run"), False),
    (("train", "{home}/mine.py:task", "--resume", "auto", "--run-dir", "{run}", "--nproc", "1", "--dry-run"), False),
    (("train", "--config", "{run}/config.toml", "--nproc", "1", "--dry-run"), False),
    (("scale", "--runs", "{run},{home}/one"), False),
    (("report", "{run}", "--explain", "-o", "{home}/found/page.html"), False),
    (("report", "{run}", "{home}/one", "-o", "{home}/found/page.html"), False),
    (("report", "{run}", "-o", "/dev/null"), False),  # where nobody can write
    (("trace", "{run}", "--overwrite", "-o", "{home}/found/trace.json"), False),
    (("analyze", "{run}", "--json"), False),
    (("watch", "{run}"), False),
)
ONLY_OF_OTHERS = (("train", "--resume", "auto", "--run-dir", "{run}", "--nproc", "1"), False)  # ours would be trained


def real_run(victim: User) -> Path:
    """Checkpoints, events, logs, a diagnosis and a submission of a real run."""
    (victim.home / "mine.py").write_text(TASK)
    victim.own(victim.home / "mine.py")
    words = ("train", "mine.py:task", "--steps", "12", "--checkpoint-every", "4", "--record-samples")
    for name, nproc in (("real", 2), ("one", 1)):
        done = victim.paceline(*words, "--nproc", nproc, "--run-dir", name, timeout=360)
        if done.returncode:
            raise RuntimeError(done.stderr)
    run = victim.home / "real"
    (run / "submit-1").mkdir()
    submission = {"on": "ssh", "started_at": 1.0, "hosts": ["n7"], "ssh": ["ssh"], "command": ["paceline"], "cwd": "/"}
    (run / "submit-1" / "submitted.json").write_text(json.dumps(submission))
    (run / "submit-1" / "plan.json").write_text("{}")
    failure = Failure(1, "n1", 9, 1, "ValueError", "no", "", False, 1.0)
    (run / "attempt-1" / "error-1.json").write_bytes(msgspec.json.encode(failure))
    (run / "attempt-1" / "watched").touch()
    live = LiveSamples(1.0, 0, tuple(RankSample(rank, "n1", 9, phase_seconds=(1.0, 2.0)) for rank in range(2)))
    (run / "attempt-1" / "live.json").write_bytes(msgspec.json.encode(live))
    write_diagnosis(run / "attempt-1" / "diagnosis-1", diagnose(STALLED), STALLED, waited_seconds=5.0)
    return run


class Case:
    """One folder. Its number determines all changes to it."""

    def __init__(self, number: int, seed: int, users: Users, canary: Path, bystander: int) -> None:
        self.random = random.Random(f"{seed} {number}")
        self.users, self.canary, self.bystander = users, canary, bystander
        self.foreign = self.random.random() < 0.5
        self.done: list[str] = []

    def spoil(self, run: Path) -> None:
        """Apply one to four changes to the copy."""
        for name in ("summary.json", "attempt-1/ended.json", "attempt-1/error-1.json"):
            if self.random.random() < 0.5:  # or they would answer for all the others
                (run / name).unlink()
        for _ in range(self.random.randint(1, 4)):
            files = sorted(path for path in run.rglob("*") if not path.is_symlink())
            path = self.random.choice([run / "config.toml", run / "events-0.jsonl", *self.small(files), *files])
            often = [self.words, self.words, self.words, self.forge, self.forge]
            ways = [self.replace, self.link, self.grow, self.nest, self.cut, self.open, self.give, self.pipe, *often]
            ways += [self.drop, self.folder, self.copy_of_another, self.many]
            way = self.random.choice(ways)
            if path in self.usable(run):
                self.done.append(f"{way.__name__} {path.relative_to(run)}")
                with suppress(
                    OSError, ValueError, LookupError, TypeError, RecursionError
                ):  # another way has left nothing for it
                    way(path, run)

    @staticmethod
    def usable(run: Path) -> set[Path]:
        """Files and folders that this process can read: no pipes, and no files that were enlarged."""
        paths = {path for path in run.rglob("*") if not path.is_symlink()}
        return {path for path in paths if path.is_dir() or (path.is_file() and path.stat().st_size < 1 << 26)}

    @staticmethod
    def small(files: list[Path]) -> list[Path]:
        return [path for path in files if path.suffix in (".json", ".toml")] * 2

    def clear(self, path: Path) -> None:
        shutil.rmtree(path) if path.is_dir() else path.unlink()

    def replace(self, path: Path, run: Path) -> None:
        self.clear(path)
        path.write_bytes(self.random.randbytes(self.random.choice([0, 1, 100, 100_000])))

    def link(self, path: Path, run: Path) -> None:
        self.clear(path)
        path.symlink_to(
            self.random.choice(
                ["/dev/zero", "/dev/tty", str(self.canary.parent / "precious"), str(self.users.victim.home), "/", ".",
                 str(self.users.victim.home / "real" / path.relative_to(run)), "/proc/self/environ", path.name]
            )
        )  # fmt: skip

    def grow(self, path: Path, run: Path) -> None:
        if path.is_file():
            os.truncate(path, self.random.choice([1 << 20, 1 << 33, 1 << 40]))

    def nest(self, path: Path, run: Path) -> None:
        self.clear(path)
        deep = self.random.choice(["[" * 300_000, '{"a":' * 100_000, "a = " + "[" * 30_000, ".".join(["a"] * 30_000)])
        path.write_text(deep + "\n")

    def cut(self, path: Path, run: Path) -> None:
        if path.is_file():
            os.truncate(path, self.random.randint(0, path.stat().st_size))

    def open(self, path: Path, run: Path) -> None:
        path.chmod(self.random.choice([0o777, 0o666, 0o775, 0o000, 0o4755, 0o1777]))

    def give(self, path: Path, run: Path) -> None:
        self.users.mallory.own(path)
        self.done[-1] += " (to mallory)"

    def pipe(self, path: Path, run: Path) -> None:
        self.clear(path)
        os.mkfifo(path)

    def drop(self, path: Path, run: Path) -> None:
        self.clear(path)

    def folder(self, path: Path, run: Path) -> None:
        self.clear(path)
        path.mkdir()

    def copy_of_another(self, path: Path, run: Path) -> None:
        other = self.random.choice(sorted(one for one in self.usable(run) if one.is_file()))
        data = other.read_bytes()
        self.clear(path)
        path.write_bytes(data)

    def many(self, path: Path, run: Path) -> None:
        folder = path if path.is_dir() else path.parent
        stem = self.random.choice(["attempt-", "submit-", "events-", "step-0000", "rank-", "error-", "x"])
        for number in range(self.random.choice([10, 2000])):
            (folder / f"{stem}{number}{self.random.choice(['', '.json', '.jsonl', chr(27) + '[2J'])}").touch()
        (folder / f"{stem}{'9' * 200}").touch()

    def words(self, path: Path, run: Path) -> None:
        """Replace values by programs, processes, numbers and escape sequences."""
        if path.suffix == ".jsonl":
            lines = path.read_text().splitlines()
            at = self.random.randrange(len(lines))
            lines[at] = json.dumps(self.other(json.loads(lines[at])))
            path.write_text("\n".join(lines) + "\n")
        elif path.name.startswith("agent-"):
            write_roster(run, self.bystander, started=started(self.bystander), host=self.random.choice(
                [os.uname().nodename, "n7", "-oProxyCommand=touch x", "\x1b[2Jn7"]))  # fmt: skip
        elif path.name == "submitted.json":
            table = json.loads(path.read_text())
            table["ssh"] = ["/bin/sh", "-c", f"touch {self.canary}"]
            table["on"] = self.random.choice(["ssh", "slurm", "local"])
            table["slurm_job"] = self.random.choice(["", "1", f"1; touch {self.canary}", "--help"])
            table["hosts"] = self.random.choice([["n7"], [f"-oProxyCommand=touch {self.canary}"], ["\x1b[2J"], []])
            path.write_text(json.dumps(table))
        elif path.suffix == ".json":
            path.write_text(json.dumps(self.other(json.loads(path.read_text()))))
        elif path.name == "config.toml":
            self.settings(path)
        elif path.is_file():
            data = bytearray(path.read_bytes())
            for _ in range(self.random.randint(1, 40) if data else 0):
                data[self.random.randrange(min(len(data), self.random.choice([16, 4096, len(data)])))] ^= 0xFF
            path.write_bytes(data)

    def forge(self, path: Path, run: Path) -> None:
        """A checkpoint with changed content and matching hashes."""
        folder = self.random.choice(sorted((run / "checkpoints").glob("step-*")))
        manifest = folder / "manifest.json"
        if not self.usable(run).issuperset(folder.iterdir()):
            return
        inner = json.loads(manifest.read_bytes())["manifest"]
        self.done[-1] = f"forge {folder.name}"
        if self.random.random() < 0.5:
            inner = self.other(inner)
        else:
            file = self.random.choice(inner["files"])
            data = bytearray((folder / file["name"]).read_bytes())
            length = int.from_bytes(data[:8], "little")
            if self.random.random() < 0.5:
                wrong = self.random.choice([0, 1, length + 1, 2**31, 2**62, 2**64 - 1])
                data[:8] = wrong.to_bytes(8, "little")
            else:
                header = self.other(json.loads(data[8 : 8 + length]))
                data[8 : 8 + length] = json.dumps(header).encode()[:length].ljust(length)
            (folder / file["name"]).write_bytes(data)
            file["sha256"] = hashlib.sha256(data).hexdigest()
        manifest.write_bytes(sealed(inner))

    def settings(self, path: Path) -> None:
        evil = path.parent / "payload.py"
        evil.write_text(f"open({str(self.canary)!r}, 'w')\n")
        lines = [line for line in path.read_text().splitlines() if not line.startswith("task")]
        number = self.random.choice(["0", "-1", "1e308", "9" * 30, "nan", "true", '"x"', "[]"])
        key = self.random.choice(["epochs", "steps", "seed", "global_batch", "virtual_ranks", "batch_size"])
        lines = [f"{key} = {number}" if line.startswith(f"{key} ") else line for line in lines]
        lines.insert(0, f'task = "{evil}:task"')
        if self.random.random() < 0.5:
            lines += ["[cluster]", f'python = "/bin/sh -c touch {self.canary}"', f'ssh = "touch {self.canary}"']
        path.write_text("\n".join(lines) + "\n")

    def other(self, value: Any) -> Any:
        """`value` with one part replaced."""
        numbers = [-1, 0, 1, 2**31, 2**62, 2**63, 10**30, 1e308, -1e308]
        texts = ["", "[/bold]x", "\x1b[2J\x9b", "x" * 1_000_000, "../../etc", "\u202e", "\n" * 1000]
        strange: list[Any] = [*numbers, *texts, None, True, [], {}, [0] * 100_000, {"a": {}}, [2**63 - 1] * 300]
        if isinstance(value, dict) and value and self.random.random() < 0.9:
            key = self.random.choice([*value])
            return {**value, key: self.other(value[key])}
        if isinstance(value, list) and value and self.random.random() < 0.9:
            at = self.random.randrange(len(value))
            return [*value[:at], self.other(value[at]), *value[at + 1 :]]
        return self.random.choice(strange)


def started(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])


@contextmanager
def exchanging(run: Path, chooser: random.Random, *, on: bool) -> Iterator[None]:
    """Meanwhile, repeatedly replace or remove a file of the folder."""
    files = [path for path in run.rglob("*") if path.is_file() and not path.is_symlink()] if on else []
    if not files:
        yield
        return
    path, over = chooser.choice(files), threading.Event()
    aside = path.with_name(path.name + ".aside")

    def exchange() -> None:
        while not over.is_set():
            with suppress(OSError):
                path.rename(aside)
                path.symlink_to("/dev/zero")
                time.sleep(0.0005)
                path.unlink()
                aside.rename(path)
                time.sleep(0.0005)

    thread = threading.Thread(target=exchange)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


class Typist:
    def __init__(self, user: User, *modules: str) -> None:
        self.process = user.popen(sys.executable, "-P", Path(__file__).with_name("server.py"), *modules, stdin=True)

    def type(self, words: list[str]) -> dict[str, Any]:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(words) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def end(self) -> None:
        self.process.communicate(timeout=90)


def soak(numbers: Iterable[int], seed: int, place: Path, told: Callable[[int, dict[str, Any]], None]) -> None:
    """Run these cases, and call `told` with the number and result of each."""
    with two_users(place) as users:
        victim, mallory = users.victim, users.mallory
        real = real_run(victim)
        canary = users.folder("marks", 0o777, users.root) / "canary"
        precious = canary.parent / "precious"
        precious.write_text("thesis")
        victim.own(precious)
        modules = ("cli.ledger", "train.prepare", "lab.ranks.ledger", "train.weights")
        plain, heavy = Typist(victim), Typist(victim, *(f"paceline.{module}" for module in modules))
        bystander = victim.popen("sleep", "100000")
        time.sleep(0.3)
        try:
            for number in numbers:
                case = Case(number, seed, users, canary, bystander.pid)
                owner = mallory if case.foreign else victim
                run = users.place / "found" if case.foreign else victim.home / "found"
                shutil.copytree(real, run)
                case.spoil(run)
                for path in (run, *run.rglob("*")):  # what was given to the neighbour stays his
                    if path.lstat().st_uid == 0 or (case.foreign and path.lstat().st_uid == victim.uid):
                        os.chown(path, owner.uid, owner.gid, follow_symlinks=False)
                        if case.foreign and not path.is_symlink() and path.lstat().st_mode & 0o777 in (0o600, 0o700):
                            path.chmod(0o755 if path.is_dir() else 0o644)
                before = marks(victim, canary)
                exchange = case.foreign and case.random.random() < 0.2
                case.done += ["exchanged meanwhile"] if exchange else []
                results: list[dict[str, Any]] = []
                tried = case.random.sample(COMMANDS, TRIED) + ([ONLY_OF_OTHERS] if case.foreign else [])
                with exchanging(run, case.random, on=exchange):
                    for words, torch in tried:
                        typed = [word.format(run=run, home=victim.home) for word in words]
                        typist = heavy if torch else plain
                        answer = typist.type(typed)
                        if answer["seconds"] > MAX_SECONDS:  # the machine may have paused; a folder is slow twice
                            answer = {**typist.type(typed), "paused_seconds": answer["seconds"]}
                        results.append({"words": typed, **answer})
                told(number, judged(case, results, canary, bystander, before, marks(victim, canary)))
                shutil.rmtree(run)
        finally:
            plain.end()
            heavy.end()
            bystander.kill()
            bystander.communicate()


def marks(victim: User, canary: Path) -> list[tuple[str, int, int]]:
    """Everything that must not change: the user's files, and the files next to the folder."""
    paths = [path for top in (victim.home, canary.parent) for path in top.rglob("*") if "found" not in path.parts]
    return sorted((str(path), path.lstat().st_mtime_ns, path.lstat().st_size) for path in paths if not path.is_dir())


def judged(
    case: Case,
    results: list[dict[str, Any]],
    canary: Path,
    bystander: subprocess.Popen[str],
    before: object,
    after: object,
) -> dict[str, Any]:
    wrong = [f"{what}: {' '.join(one['words'][:4])}: {one['text'][-600:]}" for one in results for what in faults(one)]
    wrong += ["the canary: something was run"] if canary.exists() else []
    wrong += ["the bystander was killed"] if bystander.poll() is not None else []
    wrong += [f"written elsewhere: {before} {after}"] if before != after and not canary.exists() else []
    canary.unlink(missing_ok=True)
    return {
        "foreign": case.foreign,
        "done": case.done,
        "wrong": wrong,
        "seconds": max(one["seconds"] for one in results),
        "paused_seconds": max(one.get("paused_seconds", 0.0) for one in results),
        "grown_bytes": max(one["grown_bytes"] for one in results),
        "codes": [one["code"] for one in results],
    }


def faults(one: dict[str, Any]) -> list[str]:
    found = ["traceback"] if one["traceback"] else []
    found += ["escapes"] if one["escapes"] else []
    found += [f"{one['seconds']:.1f} s"] if one["seconds"] > MAX_SECONDS else []
    found += [f"{one['grown_bytes'] >> 20} MB"] if one["grown_bytes"] > MAX_BYTES else []
    return found + ([f"exit code {one['code']}"] if one["code"] not in (0, 1, 2) else [])


def main() -> int:
    """Continue after the results in --out. 1 if any case was wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--part", type=int, nargs=2, default=(0, 1), metavar=("K", "OF"), help="every OF-th case, from K"
    )
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    state: dict[str, Any] = {"seed": options.seed, "cases": 0, "commands": 0, "slowest_seconds": 0.0, "most_bytes": 0,
                             "codes": {}, "wrong": []}  # fmt: skip
    if options.out and options.out.exists():
        state = json.loads(options.out.read_text())

    def told(number: int, result: dict[str, Any]) -> None:
        state["cases"] += 1
        state["commands"] += len(result["codes"])
        state["slow_once"] = state.get("slow_once", 0) + (result["paused_seconds"] > 0)
        state["slowest_seconds"] = max(state["slowest_seconds"], round(result["seconds"], 3))
        state["most_bytes"] = max(state["most_bytes"], result["grown_bytes"])
        for code in result["codes"]:
            state["codes"][str(code)] = state["codes"].get(str(code), 0) + 1
        if result["wrong"]:
            print(f"case {number}: {result['done']}\n  " + "\n  ".join(result["wrong"]), flush=True)
            state["wrong"].append({"case": number, "done": result["done"], "wrong": result["wrong"]})
        if options.out and state["cases"] % CASES_A_SAVE == 0:
            options.out.write_text(json.dumps(state, indent=1) + "\n")
            print(
                f"{state['cases']} folders, {len(state['wrong'])} wrong, slowest {state['slowest_seconds']} s",
                flush=True,
            )

    first, of = options.part
    start = first + of * state["cases"]
    place = Path(tempfile.mkdtemp(prefix="paceline-soak-"))
    again = [one["case"] for one in state["wrong"]]  # mended since, perhaps
    state["mended"] = [*state.get("mended", []), *state["wrong"]]
    state["wrong"], state["cases"] = [], state["cases"] - len(again)
    try:
        soak([*again, *range(start, options.count, of)], state["seed"], place, told)
    finally:
        shutil.rmtree(place)
        if options.out:
            options.out.write_text(json.dumps(state, indent=1) + "\n")
    print(f"{state['cases']} folders, {state['commands']} commands: {len(state['wrong'])} wrong")
    return 1 if state["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
