"""Small scripts under torchrun and under `paceline launch`: do they end, speak, save and hear signals alike?

    python tests/same/soak_same.py --out benchmarks/results/same.json [NAME...]

What FILE.json has already is left out, so that it can be typed again. `--seed` is the order. The exit code is 1 where
a script differs, and `cases.DIFFERENCES` does not say so.
"""

import argparse
import importlib.util
import random
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
from tests.same.cases import CASES, DIFFERENCES, PRELUDE, Case

MOST_SECONDS = 120
THROUGH = {
    "torchrun": ("torch.distributed.run", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "--nproc-per-node=2"),
    "launch": ("paceline", "launch", "--nproc-per-node=2"),
}
MARKED = re.compile(r"MARK (.*?)(?=MARK |\n|$)")  # ranks may write into one line
OWN_FAULT = "paceline: internal error in the hang guard"
RANK_ENDS = re.compile(r"Root Cause.*?exitcode\s*:\s*(-?\d+)", re.DOTALL)


class Seen(msgspec.Struct, frozen=True):
    ended: int  # its first failed rank's code, 128 + n of a signal; 0: well. Where it was stopped by a signal, 0
    marked: tuple[str, ...]  # in order of each rank
    saved: dict[str, str]


class Compared(msgspec.Struct, frozen=True):
    name: str
    same: bool
    known: str
    torchrun: Seen
    launch: Seen


def seen(case: Case, by: str) -> Seen:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "script.py"
        path.write_text(("" if case.bare else PRELUDE) + case.code)
        what = ("-m", "script") if case.module else ("script.py",)
        command = [sys.executable, "-P", "-m", *THROUGH[by], *case.options, *what, *case.arguments]
        with subprocess.Popen(
            command, cwd=folder, text=True, stdin=-1, stdout=-1, stderr=subprocess.STDOUT, start_new_session=True
        ) as process:
            assert process.stdin is not None and process.stdout is not None
            timer = threading.Timer(MOST_SECONDS, process.terminate)  # killed, torchrun leaves its ranks
            timer.start()
            try:
                process.stdin.write(case.given)
                process.stdin.close()
                said = _to_the_end(process, case)
            finally:
                timer.cancel()
        if by == "launch":  # the diagnosis shows a failed rank's last lines once more
            said = "".join(line for line in said.splitlines(keepends=True) if line.startswith("[rank "))
        if OWN_FAULT in said:
            return Seen(process.wait(), (said,), {})
        saved = {
            str(one.relative_to(folder)): one.read_text(errors="replace")
            for one in sorted(Path(folder).glob("saved-*"))
            if one.is_file()
        }
        marked = tuple(sorted((one.replace(folder, "") for one in MARKED.findall(said)), key=lambda one: one[:2]))
        return Seen(_ended(process.wait(), said, case), marked, saved)


def _to_the_end(process: subprocess.Popen[str], case: Case) -> str:
    assert process.stdout is not None
    said, waiting = "", 2
    for line in process.stdout:
        said += line
        waiting -= "READY" in line
        if waiting == 0 and "READY" in line:
            for number in case.signals:
                time.sleep(0.3)
                process.send_signal(number)
    return said


def _ended(code: int, said: str, case: Case) -> int:
    if case.signals:  # torchrun ends with 1 then, we with what the ranks did
        return 0
    found = RANK_ENDS.search(said)
    code = int(found[1]) if found else code
    return 128 - code if code < 0 else code


def compare(case: Case) -> Compared:
    theirs, ours = (seen(case, by) for by in THROUGH)
    ran = bool(theirs.marked) or case.name == "syntax"  # else both may fail for a reason of the test's own
    return Compared(case.name, ran and theirs == ours, DIFFERENCES.get(case.name, ""), theirs, ours)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    found: dict[str, Compared] = {}
    if options.out.exists():
        found = {one.name: one for one in msgspec.json.decode(options.out.read_bytes(), type=list[Compared])}
    cases = [one for one in CASES if one.name in options.names or (not options.names and one.name not in found)]
    for case in [one for one in cases if one.needs and importlib.util.find_spec(one.needs) is None]:
        print(f"left out: {case.name} needs {case.needs}")
        cases.remove(case)
    random.Random(options.seed).shuffle(cases)
    for case in cases:
        found[case.name] = one = compare(case)
        word = "same" if one.same else "known" if one.known else "DIFFERS"
        print(word, case.name, *(() if one.same else (one.torchrun, one.launch)), flush=True)
        known = [found[each.name] for each in CASES if each.name in found]
        options.out.write_bytes(msgspec.json.format(msgspec.json.encode(known), indent=1) + b"\n")
    wrong = [one.name for one in found.values() if not one.same and not one.known]
    differ = sum(not one.same for one in found.values())
    print(
        f"{len(found)} scripts: {len(found) - differ} the same, {differ - len(wrong)} known to differ, {wrong} differ"
    )
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
