"""Does `paceline diff` find where two runs diverge? Pairs of runs that differ by one planted cause.

    PYTHONPATH=. python tests/soak_diff.py --out diff.json

B differs from A by one line of its task, one setting, or its environment. The result must have the right step, and the
right layer or setting. The exit code is 1 if a case failed. tests/lab/test_diff.py is a small sample of this.
"""

import argparse
import json
import random
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests import warm
from tests.run_script import run_script

from paceline.data.plan import BatchPlan

TASK = Path(__file__).parent / "lab" / "task_to_diff.py"
SAMPLES, BATCH, RANKS, STEPS, EVERY = 110, 32, 3, 12, 4


@dataclass(frozen=True)
class Planted:
    """How B differs from A, and what must be found."""

    name: str
    step: int
    """the step of the first difference"""
    where: str
    """in the name of the first tensor, or the kind of it"""
    cause: str
    edit: tuple[str, str] | None = None
    """a text of the task, and its replacement"""
    settings: tuple[object, ...] = ()


def train(run_dir: Path, planted: Planted | None = None, nproc: int = 2, strategy: str = "exact") -> Path:
    """A run, with a planted difference."""
    text = TASK.read_text()
    if planted is not None and planted.edit is not None:
        assert text.count(planted.edit[0]) == 1, planted.edit
        text = text.replace(*planted.edit)
    code = run_dir.with_name(f"{run_dir.name}-code")
    code.mkdir(parents=True)
    (code / TASK.name).write_text(text)
    settings: list[object] = [
        "--run-dir", run_dir, "--virtual-ranks", RANKS, "--global-batch", BATCH, "--steps", STEPS, "--checkpoint-every",
        EVERY, "--keep-checkpoints", 9, "--last-batch", "drop", "--device", "cpu", "--strategy", strategy,
    ]  # fmt: skip
    changed = planted.settings if planted else ()
    for name, value in zip(changed[::2], changed[1::2], strict=True):
        if name in settings:
            settings[settings.index(name) + 1] = value
        else:
            settings += [name, value]
    done = run_script(nproc, "-m", "paceline", "train", f"{code / TASK.name}:task", *settings, cwd=run_dir.parent)
    if done.returncode:
        raise SystemExit(f"{run_dir}: {done.stdout}{done.stderr}")
    return run_dir


def diffed(a: Path, *more: object) -> tuple[int, str, dict[str, Any]]:
    """`paceline diff A ...`: its exit code, its output and its result."""
    out = a.with_name("diff.json")
    out.unlink(missing_ok=True)
    done = warm.run(["-m", "paceline", "diff", "--json", out, a, *more], cwd=a.parent)
    return done.returncode, done.stdout + done.stderr, json.loads(out.read_bytes()) if out.is_file() else {}


def fault(planted: Planted, code: int, output: str, result: dict[str, Any]) -> str:
    """What is wrong with a result; empty if it is right."""
    if code != 1 or not result:
        return f"exit code {code}: {output[-1500:]}"
    first = result["first"] or {}
    if first.get("step") != planted.step:
        return f"step {first.get('step')}, not {planted.step}: {first.get('kind')} {first.get('name')}"
    found = f"{first.get('kind')} {first.get('name')}"
    if planted.where not in found:
        return f"first difference {found}, not {planted.where}"
    return "" if result["cause"] == planted.cause else f"cause {result['cause']}, not {planted.cause}"


def step_with(sample: int) -> int:
    plan = BatchPlan(SAMPLES, BATCH, RANKS, last_batch="drop")
    per_epoch = plan.steps_per_epoch
    return next(n + 1 for n in range(99) if sample in plan.global_indices(*divmod(n, per_epoch)).tolist())


FIRST, RELU, NORM, SCALE = "self.first(x).tanh()", "F.relu(self.linear(x))", "nn.BatchNorm1d(32)", "gradient * 1.0"
BY_HAND = "F.relu((x.double() @ self.linear.weight.double().T + self.linear.bias).float())"
ORDER = "self.x.sum(1) > 0).long()"
SHIFTED = "self.head.weight.data.mul_(1.0001)"
CODE = [
    ("an input of a layer", "output middle.linear", FIRST, f"{FIRST} * (1 + 2**-20)"),
    ("gelu for tanh", "output middle.linear", FIRST, "F.gelu(self.first(x))"),
    ("tanh by sigmoid", "output middle.linear", FIRST, "(2 * torch.sigmoid(2 * self.first(x)) - 1)"),
    ("leaky relu", "output middle.norm", RELU, "F.leaky_relu(self.linear(x), 1e-6)"),
    ("a product by hand", "output middle.linear", RELU, BY_HAND),
    ("bf16 in a layer", "output middle.norm", RELU, f"{RELU}.bfloat16().float()"),
    ("another eps", "output middle.norm", NORM, "nn.BatchNorm1d(32, eps=1.1e-5)"),
    ("a backward", "gradient of output middle.norm", SCALE, "gradient * (1 + 2**-20)"),
    ("a backward in bf16", "gradient of output middle.norm", SCALE, "gradient.bfloat16().float()"),
    ("dropout", "output drop", "nn.Dropout(0.1)", "nn.Dropout(0.11)"),
    ("an output scaled", "output the model", "return self.head(", "return 1.0001 * self.head("),
    ("label smoothing", "loss", 'reduction="none")', 'reduction="none", label_smoothing=1e-3)'),
    ("a loss in double", "loss", "F.cross_entropy(outputs,", "F.cross_entropy(outputs.double() * (1 + 1e-9),"),
]
"""Another operator: its name, the first tensor that differs, a text of the task, and its replacement."""
SETTINGS = [
    ("seed", "state before", "seed", "--seed", 1),
    ("seed 7", "state before", "seed", "--seed", 7),
    ("batch", "samples", "global_batch", "--global-batch", 16),
    ("virtual ranks", "samples", "virtual_ranks", "--virtual-ranks", 2),
    ("precision", "output first", "precision", "--precision", "bf16"),
    ("threads", "", "threads_per_rank", "--threads-per-rank", 2),
    ("clipping", "applied gradient", "clip_norm", "--clip-norm", 0.1),
]
"""Another setting: its name, the first tensor that differs, the cause, the option and its value."""
OTHERS = [
    ("augmentation", "input", "data", "0.01 * torch.randn", "0.011 * torch.randn"),
    ("order of the data", "input", "data", ORDER, f"{ORDER}\n        self.x, self.y = self.x.flip(0), self.y.flip(0)"),
    ("weight decay", "state after", "make_optimizer", "lr=0.01)", "lr=0.01, weight_decay=0.02)"),
    ("optimizer", "state after", "make_optimizer", "optim.AdamW(", "optim.Adam("),
    (
        "initial weights",
        "state before",
        "initial weights",
        "nn.Linear(32, 2)\n",
        f"nn.Linear(32, 2)\n        {SHIFTED}\n",
    ),
]
"""The rest: name, the first tensor that differs, the cause, a text of the task, and its replacement."""


def cases(dice: random.Random) -> list[Planted]:
    planted = [Planted(name, 1, where, "code", (text, new)) for name, where, text, new in CODE]
    planted += [Planted(name, 1, where, cause, None, (flag, value)) for name, where, cause, flag, value in SETTINGS]
    planted += [Planted(name, 1, where, cause, (text, new)) for name, where, cause, text, new in OTHERS]
    for step in dice.sample(range(2, STEPS), 7):
        edit = "return 1.0\n", f"return 1.01 if step == {step - 1} else 1.0\n"
        planted.append(Planted(f"rate at step {step}", step, "learning rate", "learning rate", edit))
    seen = [n for n in range(SAMPLES) if step_with(n) <= STEPS]
    for sample in dice.sample(seen, 6):
        edit = ORDER, f"{ORDER}\n        self.x[{sample}, 3] += 1e-2"
        planted.append(Planted(f"sample {sample}", step_with(sample), "input", "data", edit))
    for sample in dice.sample(seen, 2):
        edit = ORDER, f"{ORDER}\n        self.y[{sample}] = 1 - self.y[{sample}]"
        planted.append(Planted(f"label {sample}", step_with(sample), "input", "data", edit))
    return planted


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="where the results go: JSON")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="only cases with this text in their name")
    chosen = parser.parse_args()
    results = dict[str, str]()
    with tempfile.TemporaryDirectory(prefix="soak-diff-") as name:
        folder = Path(name).resolve()
        a = train(folder / "a")
        planted = [case for case in cases(random.Random(chosen.seed)) if chosen.only in case.name]
        for number, case in enumerate(planted):
            found = results[f"{number} {case.name}"] = fault(case, *diffed(a, train(folder / f"b-{number}", case)))
            print(f"{case.name}: {found or 'found'}", flush=True)
            chosen.out.write_text(json.dumps({"seed": chosen.seed, "cases": results}, indent=2) + "\n")
        same = diffed(a, train(folder / "same", nproc=3))
        results["the same run on 3 processes"] = "" if same[0] == 0 else same[1]
        print(f"the same run: {results['the same run on 3 processes'] or 'no difference'}", flush=True)
        chosen.out.write_text(json.dumps({"seed": chosen.seed, "cases": results}, indent=2) + "\n")
    failed = sum(map(bool, results.values()))
    print(f"{len(results)} cases, {failed} failed")
    return int(failed > 0)


if __name__ == "__main__":
    try:
        sys.exit(main())
    finally:
        warm.close()
