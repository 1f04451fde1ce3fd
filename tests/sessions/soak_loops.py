"""Training loops drawn from a seed: in a session each equals the plain loop of one process, or is rejected in time.

    PYTHONPATH=. python tests/sessions/soak_loops.py --count 2000 --part 0 2 --out benchmarks/results/loops.json
    PYTHONPATH=. python tests/sessions/soak_loops.py --only 17 --keep folder          # one of them, what it printed
    PYTHONPATH=. python tests/sessions/soak_loops.py --case '{"order": "lazy", "ranks": 2}'
    PYTHONPATH=. python tests/sessions/soak_loops.py --shrink 17                      # the fewest settings that fail

looped.py holds the two loops. What a case comes to:

    equal      weights, buffers, averages, learning rates, the samples of each step, epochs and evaluations are those of
               the plain loop, to 1e-9 in float64
    rejected   exit code 2; the parameters are still those of the plain loop after some step
    anything else is a failure: `different`, `applied` (rejected too late), `failed` (another exit code), `hung`

Loops that are wrong on several ranks are drawn, too (`wrong_of`): these must be rejected, or equal all the same. They
are counted by themselves. Each part writes what it has done beside --out, by commit; repeat it to continue. With
`--since COMMIT...` the cases that were done at these commits count, too, unless they failed. The exit code is 1 if a
case fails, or more than 15 % of the right loops are rejected.
"""

import argparse
import json
import random
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from tests.run_script import run_script
from tests.sessions import looped
from tests.sessions.looped import GLOBAL, ONCE, Case, Result, case_of

from paceline.errors import ExitCode

LOOPED = Path(looped.__file__)
TOLERANCE = 1e-9
MAX_REJECTED = 0.15
SECONDS = 60.0  # of one attempt; then it hangs
GOOD = ("equal", "rejected")
VICTIM = r"^ReportedByPeer|^StallError|closed by peer|onnection reset"  # of another rank's failure

# ---- what is drawn -----------------------------------------------------------------------------------------------

Weighted = dict[Any, float]

AXES: dict[str, Weighted] = {
    "ranks": {1: 2, 2: 4, 3: 2},
    "accumulation": {1: 4, 2: 1},
    "strategy": {"bucketed": 7, "exact": 4, "ddp": 3, "manual": 2, "zero": 1.5, "fsdp": 0.7},
    "samples": {40: 1, 37: 1},
    "workers": {0: 30, 1: 1},
    "order": {
        "sequential": 4, "dataset": 4, "shuffle": 4, "generator": 2, "random_sampler": 2, "subset": 2, "weighted": 2,
        "weighted_generator": 1, "python": 2, "numpy": 2, "torch": 2, "counter": 2, "lazy": 2, "attribute_python": 1,
        "attribute_numpy": 1, "attribute_torch": 1, "by_rank": 1, "dealt": 3, "split": 1, "mining": 1,
        "batches_none": 1, "batches_fewer": 1,
        "batches_more": 1, "batches_uneven": 1, "batches_drawn": 1,
    },
    "seeded": {True: 2, False: 1},
    "drop_last": {False: 4, True: 1},
    "grows": {False: 8, True: 1},
    "collate": {"default": 6, "drops": 1, "dict": 1},
    "loss": {
        "mean": 8, "per_sample": 2, "sum": 2, "tokens": 2, "masked": 2, "ignore_index": 2, "constant": 1, "two": 2,
        "combined": 0.5,
    },
    "path": {"plain": 14, "function": 1, "parameter_hook": 1, "module_hook": 1},
    "clip": {"none": 6, "torch": 1, "session": 1},
    "frozen": {False: 8, True: 1},
    "optimizer": {
        "sgd": 4, "function": 2, "momentum": 3, "adamw": 4, "groups": 2, "extras": 1, "added_group": 1, "two": 2,
    },
    "scheduler": {"none": 6, "step": 2, "epoch": 1, "one_cycle": 1, "plateau": 2},
    "buffers": {
        "none": 16, "count": 3, "sum": 1, "max": 1, "min": 1, "first": 1, "undeclared": 0.2, "grows": 0.2,
        "batch_norm": 2,
    },
    "declared": {True: 3, False: 1},
    "head": {"fixed": 120, "new": 1},
    "phases": {(2,): 4, (3,): 2, (2, 2): 2, (1, 2): 1},
    "loops": {1: 5, 2: 1},
    "evaluation": {"none": 4, "mean": 3, "gather": 2},
    "evaluated": {5: 3, 1: 0.4, 12: 2},
    "average": {"none": 8, "registered": 1.5, "unregistered": 0.15},
    "stop_how": {"before": 2, "after": 1, "between": 1, "term": 1},
    "every": {1: 12, 2: 1},
    "clears": {1: 30, 0: 1},
    "leaves": {0: 15, 3: 1},
    "closure": {False: 20, True: 1},
    "mode": {"train": 80, "eval": 1},
    "touch": {"none": 25, "assigned": 1, "in_place": 1, "vector": 0.5},
    "ranks_after": {1: 1, 2: 1, 3: 1},
}  # fmt: skip
WRONG = (*("inner_backward", "added_gradient", "by_hand", "distributed", "local_buffer", "mining", "local_plateau"),)
WRONG_SHARE = 0.06
SAMPLE = range(20)
"""the cases of CI, by their numbers under seed 0"""


def runs_over(case: Case) -> int:
    """Over how many virtual ranks a step is spread."""
    return (case.virtual_ranks or case.ranks) * case.accumulation


EXCLUDED: dict[str, Callable[[Case], bool]] = {
    "batch norm's statistics are those of a micro-batch: only a whole global batch is comparable": lambda case: (
        case.buffers == "batch_norm"
        and (runs_over(case) > 1 or case.order.startswith("batches") or case.collate == "drops" or case.grows)
    ),
    "a batch without any sample that the loss is about fails in plain torch, too": lambda case: (
        case.loss == "constant" and case.order not in ("sequential", "dataset")
    ),
    "plateau follows an evaluation": lambda case: case.scheduler == "plateau" and case.evaluation == "none",
    "an optimizer without any parameter that has gradients": lambda case: (
        case.frozen and (case.optimizer in ("added_group", "two") or case.path == "module_hook")
    ),
    "torch's OneCycleLR takes no group that is added": lambda case: (
        (case.optimizer == "added_group" or case.head == "new") and case.scheduler == "one_cycle"
    ),
    "a sampler that was made for a fixed number of samples": lambda case: (
        case.grows and case.order in ("subset", "weighted", "weighted_generator", "split")
    ),
    "a new head is one change of the optimizer's groups, on the plainest model": lambda case: (
        case.head == "new"
        and (case.optimizer in ("added_group", "two", "groups") or case.path != "plain" or case.frozen)
    ),
    "a closure computes the step of one optimizer, and nothing comes between the two": lambda case: (
        case.closure and (case.optimizer == "two" or case.clip != "none" or case.every > 1 or case.loss == "combined")
    ),
    "gradients that are combined by hand are not added up over batches": lambda case: (
        case.loss == "combined" and (case.every > 1 or case.path != "plain" or not case.clears)
    ),
    "losses are written down by the index in one dataset": lambda case: case.order == "mining" and case.loops == 2,
    "a model in eval mode counts nothing": lambda case: case.mode == "eval" and case.buffers != "none",
    "only a resume loses an average": lambda case: case.average == "unregistered" and not case.stop,
    "docs/own-loop.md: not under fsdp": lambda case: (
        case.strategy == "fsdp"
        and (case.average != "none" or case.path == "parameter_hook" or case.buffers == "batch_norm")
    ),
    "docs/own-loop.md: an evaluation under fsdp needs a sample for each rank": lambda case: (
        case.strategy == "fsdp" and case.evaluation != "none"
    ),
    "docs/own-loop.md: DataLoader's worker processes draw from a sampler ahead of the loop": lambda case: (
        case.workers > 0 and (case.order == "lazy" or case.grows)
    ),
}  # fmt: skip


def draw(seed: int, number: int) -> Case:
    """The case of that number; always the same."""
    chance = random.Random(f"{seed}:{number}")
    while True:
        told: dict[str, Any] = {
            axis: chance.choices(list(choices), list(choices.values()))[0] for axis, choices in AXES.items()
        }
        wrong = chance.random() < WRONG_SHARE
        stops = chance.random() < 0.25 or told["average"] == "unregistered"
        most = max(told["ranks"], told["ranks_after"] if stops else 1)
        told["virtual_ranks"] = chance.choice([0, 0, 4] if not stops else [most, 4])
        told["stop"] = chance.randint(1, 12) if stops else 0
        if wrong:
            kind = chance.choice(WRONG)
            plainest = {"optimizer": "momentum", "path": "plain", "frozen": False, "buffers": "none", "stop": 0}
            plainest |= {"every": 1, "clears": 1, "leaves": 0, "closure": False, "mode": "train", "touch": "none"}
            told |= {**plainest, "average": "none", "head": "fixed", "collate": "default", "loss": "mean"}
            told |= {"ranks": chance.choice([2, 3]), "clip": "none", "wrong": kind, "virtual_ranks": 0}
            if kind == "distributed":
                told |= {"order": "distributed", "grows": False}
            if kind == "mining":
                told |= {"order": "mining", "grows": False, "loops": 1}
            if kind == "local_plateau":
                told |= {"scheduler": "plateau", "evaluation": "mean", "phases": (3,)}
            if kind == "local_buffer":
                told |= {"buffers": "undeclared"}
        if told["loss"] == "constant":
            told["order"] = chance.choice(["sequential", "dataset"])
        if told["buffers"] == "batch_norm":
            told |= {"ranks": 1, "ranks_after": 1, "virtual_ranks": 0, "accumulation": 1, "collate": "default"}
        case = Case(number=number, **told)
        case = replace(case, seeded=(case.seeded or case.order not in GLOBAL) and case.order != "dealt")
        if not any(excludes(case) for excludes in EXCLUDED.values()):
            return case


def settings(case: Case) -> dict[str, Any]:
    """Those that are not the defaults."""
    return {one.name: value for one in fields(Case) if (value := getattr(case, one.name)) != one.default}


# ---- what it comes to --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """Of a case: a word of the module's docstring, and what was said or differs."""

    case: Case
    word: str
    what: str = ""
    seconds: float = 0.0

    @property
    def is_good(self) -> bool:
        return self.word in GOOD or (self.case.wrong != "none" and self.word == "caught")


_streams = threading.Lock()


def plain(case: Case, orders: Any = None) -> Result:
    """The plain loop in this process, whose random streams are one thread's at a time."""
    with _streams:
        return looped.plain(case, orders)


def examine(case: Case, folder: Path) -> Outcome:
    """Train it, in that empty folder, and compare."""
    begin = time.monotonic()
    word, what = _compared(case, folder)
    return Outcome(case, word, what, round(time.monotonic() - begin, 2))


def _compared(case: Case, folder: Path) -> tuple[str, str]:
    (folder / "case.json").write_text(json.dumps(asdict(case)))
    attempts = [case.ranks, case.ranks_after] if case.stop else [case.ranks]
    for attempt, ranks in enumerate(attempts, 1):
        try:
            done = run_script(ranks, LOOPED, folder, attempt, cwd=folder, timeout=SECONDS)
        except subprocess.TimeoutExpired:
            return "hung", f"attempt {attempt}"
        (folder / f"out-{attempt}").write_text(f"{done.stdout}\n{done.stderr}\n-> {done.returncode}\n")
        if done.returncode == 0 and (folder / "result.pt").exists():
            break  # the first attempt has ended before it was to be stopped
        stopped = looped.PLANNED in done.stderr or done.returncode == ExitCode.SAVED
        if attempt < len(attempts) and stopped and done.returncode in (ExitCode.FAILED, ExitCode.SAVED):
            continue
        if done.returncode == ExitCode.USAGE:
            return _rejected(case, folder, attempt)
        if case.wrong != "none" and done.returncode in (ExitCode.MISMATCH, ExitCode.DIVERGED):
            return "caught", f"exit code {done.returncode}"
        return "failed", f"attempt {attempt}, exit code {done.returncode}: {_said(folder, attempt)}"
    differences = list(_differences(case, folder))
    return ("different", "; ".join(differences)) if differences else ("equal", "")


def _failures(folder: Path, attempt: int) -> list[dict[str, Any]]:
    """What each rank has left behind that failed in its loop."""
    return [torch.load(path) for path in sorted(folder.glob(f"failed-{attempt}-*.pt"))]


def _said(folder: Path, attempt: int) -> str:
    """The error of the rank that failed by itself; else the first line of the output that looks like one."""
    errors = [str(one["error"]) for one in _failures(folder, attempt)]
    lines = [line.strip() for line in (folder / f"out-{attempt}").read_text().splitlines()]
    errors = [error for error in errors if not re.search(VICTIM, error)] or errors
    errors += [line for line in lines if re.match(r"(\[rank\d\]: )?[\w.]*(Error|ReportedByPeer)\b", line)]
    errors += [line for line in lines if line and "RuntimeWarning" not in line]
    return errors[0] if errors else ""


def _rejected(case: Case, folder: Path, attempt: int) -> tuple[str, str]:
    """Whether it was in time: each rank's parameters are those of the plain loop after some step."""
    words = _said(folder, attempt)
    if "Traceback" in words:
        return "failed", "rejected with a traceback: " + words.strip().splitlines()[-2][:200]
    if case.wrong in ("by_hand", "added_gradient") or not case.seeded:
        return "rejected", words
    try:
        states = plain(case).after
    except Exception:  # of torch: a batch without samples
        return "rejected", words
    for one in _failures(folder, attempt):
        state: dict[str, torch.Tensor] = one.get("state", {})
        if case.head == "new":  # it was made after the last step
            state, *states = ({k: v for k, v in s.items() if not k.startswith("head")} for s in (state, *states))
        if state and all(_apart(state, other) for other in states):
            return "applied", f"after step {one['step']}: {words}"
    return "rejected", words


def _differences(case: Case, folder: Path) -> Any:
    ours = _merged(folder)
    orders: dict[tuple[int, ...], list[list[int]]] = {}
    for where, indices in ours.steps:
        orders.setdefault(tuple(where), []).append(indices)
    try:
        plainly = plain(case, None if case.seeded else orders)
    except Exception as error:
        yield f"the plain loop fails: {error}"
        return
    result = torch.load(folder / "result.pt")
    if ours.epochs != plainly.epochs:
        yield f"epochs {ours.epochs}, right {plainly.epochs}"
    if ours.steps != plainly.steps:
        yield _steps_apart(ours, plainly)
    if not case.seeded and case.order in ONCE:
        yield from _not_once(case, orders)
    for name, one, other in (
        ("weights", result["weights"], plainly.weights),
        ("average", result["average"], plainly.average),
        ("numbers", _tensors(result["numbers"]), _tensors(plainly.numbers)),
        ("evaluations", _tensors(ours.evaluations), _tensors(plainly.evaluations)),
    ):
        if words := _apart(one, other):
            yield f"{name}: {words}"


def _tensors(values: dict[str, list[float]]) -> dict[str, torch.Tensor]:
    return {name: torch.tensor(value, dtype=torch.float64) for name, value in values.items()}


def _merged(folder: Path) -> Result:
    """What the ranks of all attempts have reported: a step that was done again counts once, as it was done last."""
    steps: dict[tuple[int, ...], list[int]] = {}
    epochs: dict[int, set[int]] = {}
    found = Result()
    for attempt in (1, 2):
        reports = [json.loads(path.read_text()) for path in sorted(folder.glob(f"reports-{attempt}-*.json"))]
        begins = min((tuple(one["first"]) for one in reports if one["first"] is not None), default=None)
        if begins is not None:
            steps = {where: indices for where, indices in steps.items() if where < begins}
        for number, one in enumerate(reports):
            for where, indices in one["steps"]:
                steps.setdefault(tuple(where), []).extend(indices)
            for phase, seen in one["epochs"] if number == 0 else ():
                epochs.setdefault(phase, set()).update(seen)
            if number == 0:
                found.evaluations |= one["evaluations"]
    found.steps = [([*where[:3]], sorted(indices)) for where, indices in sorted(steps.items())]
    found.epochs = [sorted(seen) for _, seen in sorted(epochs.items())]
    return found


def _steps_apart(ours: Result, plainly: Result) -> str:
    for number, (one, other) in enumerate(zip(ours.steps, plainly.steps, strict=False)):
        if one != other:
            return f"batch {number + 1} of {len(ours.steps)} has {one}, right {other}"
    return f"{len(ours.steps)} batches, right {len(plainly.steps)}"


def _not_once(case: Case, orders: dict[tuple[int, ...], list[list[int]]]) -> Any:
    broken = looped.Collate(case).broken
    parts = {frozenset(i for batch in batches for i in batch) for (_, _, n), batches in orders.items() if n == 0}
    if case.order == "split" and len(parts) > 1 and not case.drop_last and not case.leaves:
        yield f"{len(parts)} sets of samples in as many epochs"
    for (phase, epoch, number), batches in orders.items():
        if number == 0:
            count = 30 if case.order == "split" else looped.rows_in(case, phase, epoch)
            seen = Counter(index for batch in batches for index in batch)
            most = count - (count % case.batch if case.drop_last and not case.order.startswith("batches") else 0)
            least = 0 if case.leaves else most - len(broken)
            if max(seen.values()) > 1 or not least <= len(seen) <= most:
                missing = count - len(seen) - len(broken & set(range(count)))
                twice = sum(1 for times in seen.values() if times > 1)
                yield f"epoch {phase}.{epoch}: {missing} of {count} samples never seen, {twice} more than once"


def _apart(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> str:
    """Which of these tensors are not equal, "" for none."""
    if one.keys() != other.keys():
        return f"{sorted(one)}, right {sorted(other)}"
    words: list[str] = []
    for name, right in other.items():
        mine = one[name]
        if mine.shape != right.shape:
            words.append(f"{name} has shape {tuple(mine.shape)}, right {tuple(right.shape)}")
        elif right.is_floating_point() and right.numel():
            relative = float((mine - right).abs().max() / right.abs().max().clamp(min=1e-6))
            if not relative <= TOLERANCE:
                words.append(f"{name} {relative:.1e}")
        elif not torch.equal(mine, right):
            words.append(f"{name} is {mine.tolist()}, right {right.tolist()}")
    return ", ".join(words)


# ---- many of them ------------------------------------------------------------------------------------------------


def examine_all(cases: Sequence[Case], jobs: int, told: Callable[[Outcome], None]) -> list[Outcome]:
    """Several at a time, each in a folder of its own; `told` hears of each as it ends."""

    def one(case: Case) -> Outcome:
        with tempfile.TemporaryDirectory(prefix="loop-") as folder:
            outcome = examine(case, Path(folder))
        told(outcome)
        return outcome

    with ThreadPoolExecutor(jobs) as pool:
        return list(pool.map(one, cases))


def shrink(case: Case) -> Outcome:
    """The same failure (its word) of as few settings as can be found by taking one back at a time."""
    (best,) = examine_all([case], 1, lambda _: None)
    print(f"{best.word}: {best.what}", flush=True)
    again = not best.is_good
    while again:
        again = False
        for name in settings(best.case):
            if name == "number":
                continue
            default = next(one.default for one in fields(Case) if one.name == name)
            (tried,) = examine_all([replace(best.case, **{name: default})], 1, lambda _: None)
            if tried.word == best.word:
                best, again = tried, True
                print(f"without {name}: {tried.word}: {tried.what[:200]}", flush=True)
    return best


def wrong_of(case: Case) -> str:
    """What is wrong with it by design, or by docs/own-loop.md; "none"."""
    if case.average == "unregistered":
        return "average that is not registered"
    if case.buffers in ("undeclared", "grows") and case.wrong == "none":
        return {"undeclared": "running average without a declaration", "grows": "buffer that changes its shape"}[
            case.buffers
        ]
    return case.wrong


def kind_of(words: str) -> str:
    """A rejection's words without what is of this case alone."""
    words = re.sub(r"/\S+", "PATH", words)
    return re.sub(r"\d+(\.\d+)?(e[-+]?\d+)?", "N", words)[:120]


def summary(outcomes: Sequence[Outcome], seed: int, count: int) -> dict[str, Any]:
    right = [one for one in outcomes if wrong_of(one.case) == "none"]
    rejected = [one for one in right if one.word == "rejected"]
    kinds: dict[str, dict[str, Any]] = {}
    for one in sorted(rejected, key=lambda one: one.case.number):
        kind = kinds.setdefault(kind_of(one.what), {"loops": 0, "example": one.case.number})
        kind["loops"] += 1
    wrong = Counter(f"{wrong_of(one.case)}: {one.word}" for one in outcomes if wrong_of(one.case) != "none")
    failures = [
        {"number": one.case.number, "word": one.word, "what": one.what, "settings": settings(one.case)}
        for one in sorted(outcomes, key=lambda one: one.case.number)
        if not one.is_good
    ]
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=LOOPED.parent)
    return {
        "commit": commit.stdout.strip(), "date": datetime.now(UTC).strftime("%Y-%m-%d"), "seed": seed, "loops": count,
        "done": len(outcomes), "seconds": round(sum(one.seconds for one in outcomes)),
        "right loops": {"loops": len(right), "equal": sum(one.word == "equal" for one in right),
         "rejected": len(rejected), "share rejected": round(len(rejected) / max(1, len(right)), 4),
         "failures": sum(not one.is_good for one in right)},
        "rejected, by kind": dict(sorted(kinds.items(), key=lambda item: -item[1]["loops"])),
        "wrong loops": dict(sorted(wrong.items())), "failures": failures, "excluded": list(EXCLUDED),
    }  # fmt: skip


class Done:
    """What was done at this commit: a line for each case, in FILE-PART.jsonl beside the results."""

    def __init__(self, out: Path | None, part: int, since: Sequence[str] = ()) -> None:
        self._file = out.with_name(f"{out.stem}-{part}.jsonl") if out else None
        self._commit = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],
            capture_output=True, text=True, cwd=LOOPED.parent,
        ).stdout.strip()  # fmt: skip
        self.outcomes: dict[tuple[int, int], Outcome] = {}
        self.commits: dict[tuple[int, int], str] = {}
        if self._file is not None and self._file.exists():
            lines = [json.loads(line) for line in self._file.read_text().splitlines()]
            for line in lines:
                key = line["seed"], line["number"]
                outcome = Outcome(draw(*key), line["word"], line["what"], line["s"])
                if line["commit"] == self._commit or (line["commit"] in since and outcome.is_good):
                    self.outcomes[key], self.commits[key] = outcome, line["commit"]

    def add(self, seed: int, outcome: Outcome) -> None:
        self.outcomes[seed, outcome.case.number] = outcome
        self.commits[seed, outcome.case.number] = self._commit
        if self._file is not None:
            words = {"commit": self._commit, "seed": seed, "number": outcome.case.number}
            line = {**words, "word": outcome.word, "what": outcome.what, "s": outcome.seconds}
            with self._file.open("a") as file:
                file.write(json.dumps(line) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--part", type=int, nargs=2, default=(0, 1), metavar=("PART", "PARTS"))
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--since", nargs="+", default=(), metavar="COMMIT", help="what was done at these counts, too")
    parser.add_argument("--out", type=Path, help="write the results to this file: JSON")
    parser.add_argument("--only", type=int, nargs="+", help="the cases of these numbers, in full")
    parser.add_argument("--case", type=json.loads, help="a case of one's own: settings that are not Case's defaults")
    parser.add_argument("--shrink", action="store_true", help="with --only or --case: the fewest settings that fail")
    parser.add_argument("--keep", type=Path, help="with --only or --case: in this folder, with what was printed")
    told = parser.parse_args()
    torch.set_num_threads(1)
    if told.only or told.case is not None:
        chosen = [draw(told.seed, n) for n in told.only or ()] or [case_of(told.case)]
        return _in_full(chosen, told.keep, told.shrink)
    part, parts = told.part
    done = Done(told.out, part, told.since)
    cases = [draw(told.seed, n) for n in range(part, told.count, parts) if (told.seed, n) not in done.outcomes]

    def heard(outcome: Outcome) -> None:
        done.add(told.seed, outcome)
        if not outcome.is_good:
            print(f"{outcome.case.number} {outcome.word}: {outcome.what}\n    {settings(outcome.case)}", flush=True)

    examine_all(cases, told.jobs, heard)
    return finish(told.out, parts, told.seed, told.count, done, told.since)


def finish(out: Path | None, parts: int, seed: int, count: int, done: Done, since: Sequence[str]) -> int:
    """The summary over all parts that have been done so far at this commit."""
    outcomes, commits = dict(done.outcomes), dict(done.commits)
    for part in range(parts):
        other = Done(out, part, since)
        outcomes, commits = outcomes | other.outcomes, commits | other.commits
    found = summary([one for (s, n), one in outcomes.items() if s == seed and n < count], seed, count)
    found["commits"] = Counter(commit for (s, n), commit in commits.items() if s == seed and n < count)
    if out is not None:
        out.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps({key: found[key] for key in ("done", "seconds", "right loops", "wrong loops")}, indent=1))
    for kind, content in found["rejected, by kind"].items():
        print(f"{content['loops']:5} rejected: {kind} (case {content['example']})")
    return int(bool(found["failures"]) or found["right loops"]["share rejected"] > MAX_REJECTED)


def _in_full(cases: Sequence[Case], keep: Path | None, shrunk: bool) -> int:
    good = True
    for case in cases:
        if shrunk:
            outcome = shrink(case)
        elif keep is not None:
            keep.mkdir(parents=True, exist_ok=True)
            outcome = examine(case, keep)
        else:
            (outcome,) = examine_all([case], 1, lambda _: None)
        print(f"{outcome.word}: {outcome.what}\n    {json.dumps(settings(outcome.case))}   {outcome.seconds} s")
        good = good and outcome.is_good
    return int(not good)


if __name__ == "__main__":
    sys.exit(main())
