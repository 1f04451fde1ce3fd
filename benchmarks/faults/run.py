"""Lets a fault strike in a run of paceline or torchrun, and scores what is said of it."""

import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Literal

import msgspec
from benchmarks.faults.fault import Fate, Fault, Way
from benchmarks.faults.reading import Said, said_by_paceline, said_by_torchrun
from benchmarks.faults.setups import Popen, Ran, Setup, run_command, surroundings

from paceline.errors import UsageError
from paceline.guard.report import read_diagnosis
from paceline.protocol.evidence import Diagnosis

Launcher = Literal["paceline", "torchrun", "accelerate", "fabric"]
"""torchrun: with DDP; accelerate and fabric: with their wrappers, started by torchrun"""

USERS = Path(__file__).with_name("user")  # program.py, strikes.py, task.py
PROGRAM, TASK = "program.py", "task.py"
STEPS = 40
GROUP_TIMEOUT_SECONDS = 10  # the only limit without paceline; 30 minutes by default
LIMIT_SECONDS = 120.0  # nothing that is to be reported takes so long
WORDS_CHARS = 2000
MARKER = re.compile(r"# FAULT: (?P<names>.*)")


class Score(msgspec.Struct, frozen=True):
    """One run with one fault. Seconds are from the moment at which it struck."""

    fault: str
    launcher: Launcher
    right_rank: bool
    right_line: bool | None  # None: there is none to be named
    right_end: bool
    right_code: bool | None  # None: not known what it should be
    end: Fate
    named: tuple[int, ...]
    tie: bool
    code: int | None  # None: it hung, and was ended
    verdict_seconds: float | None
    exit_seconds: float
    processes_left: tuple[str, ...]
    files_left: tuple[str, ...]
    words: str  # what was said, or the end of the output


def run_fault(
    fault: Fault, launcher: Launcher, folder: Path, *, hang_timeout: str, popen: Popen = subprocess.Popen
) -> Score:
    """One run in `folder`, which must be empty or not exist. `popen` starts it."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in USERS.glob("*.py"):
        shutil.copy(file, folder)
    first = _command(fault, launcher, Setup(), hang_timeout, steps=STEPS // 2)
    env = fault_environment(fault, launcher, folder)
    with surroundings(fault.setup, folder, tuple(first), env) as setup:
        argv = [*setup.before, *_command(fault, launcher, setup, hang_timeout)]
        if setup.strikes or fault.way is Way.EACH or fault.name == "nothing":
            struck_now(folder)
        ran = run_command(argv, folder, {**env, **setup.env}, limit_seconds=LIMIT_SECONDS, popen=popen)
    return score(fault, launcher, ran, folder)


def struck_now(folder: Path) -> None:
    """Write down that a fault strikes that no rank brings about."""
    (folder / "struck-outside").write_text(str(time.monotonic()))


def fault_environment(fault: Fault, launcher: Launcher, folder: Path) -> dict[str, str]:
    """The variables that the programs in `user` read."""
    return {
        "FAULT": fault.name,
        "FAULT_RANKS": ",".join(map(str, fault.ranks)),
        "FAULT_STEP": str(fault.step),
        "FAULT_STEPS": str(STEPS),
        "FAULT_FOLDER": str(folder),
        "OMP_NUM_THREADS": "1",
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),  # torch's own; else it makes one in TMPDIR
        "FAULT_FRAMEWORK": launcher,
        **({} if launcher == "paceline" else {"GROUP_TIMEOUT": str(GROUP_TIMEOUT_SECONDS)}),
    }


def _command(fault: Fault, launcher: Launcher, setup: Setup, hang_timeout: str, steps: int = STEPS) -> list[str]:
    nproc, port = str(fault.world), str(setup.port)
    if launcher != "paceline":
        where = ["--master-port", port] if setup.port else []
        return [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", nproc, *where, PROGRAM]
    train = ["train", f"{TASK}:task", "--steps", str(steps), "--batch-size", "16", *fault.options, *setup.words]
    own = [sys.executable, "-P", "-m", "paceline"]
    more = ["--nproc", nproc, "--hang-timeout", hang_timeout, "--run-dir", run_dir(fault)]
    more += ["--port", port] if setup.port else []
    if fault.way is Way.TASK:
        return [*own, *train, *more]
    if fault.way is Way.EACH:  # each rank is given another learning rate
        rate = f"0.0$((1 + (RANK == {fault.ranks[0]})))"
        each = " ".join([*own, *train, "--run-dir", "each", "--lr", rate])
        return [*own, "launch", *more, "--", "sh", "-c", f"exec {each}"]
    return [*own, "launch", *more, "--", PROGRAM]


def run_dir(fault: Fault) -> str:
    """Where the run writes, within its folder."""
    return "disk/run" if fault.setup == "small disk" else "run"


def score(fault: Fault, launcher: Launcher, ran: Ran, folder: Path) -> Score:
    """Compare what was said with the truth."""
    (folder / "output.txt").write_text(ran.text)
    if launcher == "paceline":
        said = said_by_paceline(ran.lines, ran.code, _diagnosis(folder), fault.words)
        shown = said.words
    else:
        said = said_by_torchrun(ran.lines, ran.code, fault.words)
        shown = ran.text  # also the tracebacks that the ranks print before the root cause
    struck = [float(path.read_text()) for path in folder.glob("struck-*") if path.read_text()]
    since = min(struck, default=ran.began_seconds)  # the whole run was in vain then: nothing about it is right
    return Score(
        fault=fault.name,
        launcher=launcher,
        right_rank=bool(struck) and _right_rank(fault, said, ran),
        right_line=_right_line(fault, shown) if fault.line else None,
        right_end=said.end in fault.ends,
        right_code=ran.code in fault.codes if launcher == "paceline" else None,
        end=said.end,
        named=said.named,
        tie=said.tie,
        code=ran.code,
        verdict_seconds=None if said.seconds is None else round(said.seconds - since, 2),
        exit_seconds=round(ran.ended_seconds - since, 2),
        processes_left=ran.processes_left,
        files_left=ran.files_left,
        words=(said.words or ran.text[-WORDS_CHARS:])[:WORDS_CHARS],
    )


def _right_rank(fault: Fault, said: Said, ran: Ran) -> bool:
    if fault.tie:
        return said.tie and set(said.named) == set(range(fault.world))
    if fault.causes:
        return not said.tie and said.named == fault.causes
    if fault.words:
        return bool(said.words) and re.search(fault.words, ran.text) is not None
    return not said.named and said.end in fault.ends


def _right_line(fault: Fault, words: str) -> bool:
    return any(
        re.search(rf"{re.escape(file.name)}(?::|\", line ){number}\b", words)
        for file in USERS.glob("*.py")
        for number in marked_lines(file, fault.name)
    )


def marked_lines(file: Path, name: str) -> list[int]:
    """The numbers of the lines with the fault's marker."""
    lines = enumerate(file.read_text().splitlines(), 1)
    return [n for n, line in lines if (match := MARKER.search(line)) and name in match["names"].split(", ")]


def _diagnosis(folder: Path) -> Diagnosis | None:
    found = sorted(folder.glob("*run/attempt-*/diagnosis-[0-9]*"))
    try:
        return read_diagnosis(found[-1]).diagnosis if found else None
    except UsageError:
        return None
