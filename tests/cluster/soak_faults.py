"""All faults, several times, with paceline and torchrun: the score table.

    PYTHONPATH=. python tests/cluster/soak_faults.py --part here --out benchmarks/results/faults
    ... --part here --launchers torchrun accelerate fabric --out benchmarks/results/faults-peers

    here   faults on this machine
    hosts  faults between hosts, which are network namespaces (root)

Writes FILE.json after each run and FILE.md from it, both parts into one. What was interrupted goes on: runs that are in
the file already are left out. --minutes ends it in good order. The exit code is 1 if a rank of paceline's is wrong.
"""

import argparse
import os
import platform
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path

import msgspec
from benchmarks.faults.__main__ import missing, score_line
from benchmarks.faults.catalogue import FAULTS, chosen
from benchmarks.faults.fault import Fault, Needs
from benchmarks.faults.run import Launcher, Score, run_fault
from benchmarks.faults.table import LAUNCHERS, markdown
from tests.cluster.fault_hosts import AGENTS, Hosts, run_on_hosts
from tests.cluster.lab import Lab
from tests.cluster.ssh import SshHosts

HEAD = """# Faults: who is named, how fast, what is left

Made by `make soak-faults`. Each fault strikes a small training of 2 to 4 gloo ranks; a stall is one after
{hang_timeout} s, the process-group time-out without paceline is 10 s (30 minutes by default). `rank`: how often the
right one was named, and who was named instead; `line`: of the source, if there is one to be named (without paceline: if
the output contains it anywhere); `verdict s`: from the fault to the first line that names somebody, the median; `left`:
processes and temporary files.

{about}

"""
Run = Callable[[Fault, Launcher, Path], Score]


class Soak(msgspec.Struct):
    machine: dict[str, str]
    hang_timeout: str
    runs: dict[str, Score] = {}  # "fault launcher turn"
    load: dict[str, float] = {}  # what else ran on the machine meanwhile


def machine() -> dict[str, str]:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    kernel = ".".join(platform.release().split(".")[:2])
    return {"cores": str(os.cpu_count()), "kernel": kernel, "python": platform.python_version(),
            "torch": version("torch"), "commit": commit}  # fmt: skip


def wanted(part: str, names: list[str], repeat: Mapping[Launcher, int]) -> Iterator[tuple[str, Fault, Launcher]]:
    """Every run: all faults once, then all of them again, so that what was interrupted is a smaller whole."""
    for turn in range(1, max(repeat.values()) + 1):
        for fault in chosen(names):
            for launcher, times in repeat.items():
                here = (fault.needs is Needs.HOSTS) == (part == "hosts")
                if here and turn <= times and (fault.beside or launcher == "paceline"):
                    yield f"{fault.name} {launcher} {turn}", fault, launcher


def soak(told: argparse.Namespace, run: Run, root: Path) -> Soak:
    """All runs that are not yet in the file, which is written after each."""
    out, deadline = Path(told.out), time.monotonic() + 60 * told.minutes
    kept = out.with_suffix(".json")
    done = msgspec.json.decode(kept.read_bytes(), type=Soak) if kept.exists() else Soak(machine(), told.hang_timeout)
    if done.hang_timeout != told.hang_timeout:
        raise SystemExit(f"{kept} was measured with --hang-timeout {done.hang_timeout}: name another file")
    repeat = {name: told.repeat if name == "paceline" else told.peer_repeat for name in told.launchers}
    for name, fault, launcher in wanted(told.part, told.only, repeat):
        if name in done.runs or (told.part == "here" and missing(fault)):
            continue
        if time.monotonic() > deadline:
            print("out of time: repeat the command to continue", flush=True)
            break
        folder = root / name.replace(" ", "-")
        result = run(fault, launcher, folder)
        done.runs[name] = msgspec.structs.replace(result, words=anonymous(result.words, root))
        done.load[name] = round(os.getloadavg()[0], 1)
        write(out, done)
        print(f"{name}: {score_line(result, fault)}", flush=True)
        if launcher != "paceline" or (result.right_rank and result.right_end and result.right_line is not False):
            shutil.rmtree(folder)
    return done


def anonymous(words: str, root: Path) -> str:
    """Without what is this machine's own business."""
    for own in (root, sysconfig.get_path("purelib"), sysconfig.get_path("stdlib"), sys.prefix, Path.cwd()):
        words = words.replace(f"{own}/", "")
    return words.replace(os.uname().nodename, "host")


def write(out: Path, done: Soak) -> None:
    """Both files, each whole or as it was."""
    about = ", ".join(f"{name} {value}" for name, value in done.machine.items())
    head = HEAD.format(hang_timeout=done.hang_timeout, about=about)
    scores = list(done.runs.values())
    for suffix, content in (
        (".json", msgspec.json.format(msgspec.json.encode(done), indent=1)),
        (".md", (head + markdown(scores, FAULTS)).encode()),
    ):
        part = out.with_suffix(suffix + ".part")
        part.write_bytes(content)
        part.rename(out.with_suffix(suffix))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=("here", "hosts"), required=True)
    parser.add_argument("--out", required=True, help="FILE: FILE.json and FILE.md are written")
    parser.add_argument("--launchers", nargs="+", choices=LAUNCHERS, default=["paceline", "torchrun"])
    parser.add_argument("--repeat", type=int, default=5, help="how often with paceline")
    parser.add_argument("--peer-repeat", type=int, default=1, help="how often with the other launchers")
    parser.add_argument("--hang-timeout", default="5")
    parser.add_argument("--minutes", type=float, default=55.0, help="begin no run after that")
    parser.add_argument("--only", nargs="*", default=[], help="names of faults")
    told = parser.parse_args()
    if told.part == "hosts" and not {*told.launchers} <= {*AGENTS}:
        parser.error(f"--part hosts runs with {' and '.join(AGENTS)}")
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in the background of a shell, by children too
    root = Path(tempfile.mkdtemp(prefix="soak-faults-"))
    with ExitStack() as stack:
        if told.part == "hosts":
            for name in ("lab", "ssh"):
                (root / name).mkdir()
            lab = Lab(root / "lab", 4)
            stack.callback(lab.close)
            hosts = Hosts(lab, SshHosts.start(lab, root / "ssh"))
            run: Run = lambda fault, launcher, folder: run_on_hosts(  # noqa: E731
                fault, launcher, hosts, folder, hang_timeout=told.hang_timeout
            )
        else:
            run = lambda fault, launcher, folder: run_fault(  # noqa: E731
                fault, launcher, folder, hang_timeout=told.hang_timeout
            )
        done = soak(told, run, root)
    wrong = sorted({s.fault for s in done.runs.values() if s.launcher == "paceline" and not s.right_rank})
    print(f"{len(done.runs)} runs; wrong: {', '.join(wrong) or 'none'}; folders of what was wrong: {root}")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
