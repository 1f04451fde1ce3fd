"""The six scripts of examples/classic: equal to their single-device originals, and to themselves after kills.

    PYTHONPATH=. python tests/sessions/soak_classic.py --out benchmarks/results/classic.json

    equal    in float64 without dropout or noise, on 1, 2 and 3 ranks: how far the weights are from the original's
    bits     with them, under exact on 1, 2 and 3 ranks: how many digests there are
    killed   a run that is killed three times and goes on, each time on another number of ranks: is it the same digest,
             and is its ledger clean?

The exit code is 1 if a script is not equal to 1e-12, has two digests, or a ledger with findings.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from tests.run_script import run_script

from paceline.cli import ledger
from paceline.runs.events import Step, last_events

CLASSIC = Path(__file__).parents[2] / "examples" / "classic"
SCRIPTS = {
    "mnist": ("--samples", "1500", "--dropout"),
    "vae": ("--samples", "1500", "--noise"),
    "gan": ("--samples", "800", "--noise"),
    "lm": ("--samples", "400", "--dropout"),
    "classifier": ("--samples", "300", "--dropout"),
    "gpt2": ("--samples", "300", "--dropout"),
}
SIZES = (1, 2, 3)
SETTINGS = 'paceline.session({folder!r}, resume=True, strategy="exact", virtual_ranks=6, checkpoint_every=4)'


def weights(saved: Path) -> dict[str, torch.Tensor]:
    """What a script has saved: in one file, or in several that begin with its name."""
    files = [saved] if saved.is_file() else sorted(saved.parent.glob(f"{saved.name}-*.pt"))
    return {f"{file.name}/{name}": tensor for file in files for name, tensor in torch.load(file).items()}


def launched(ranks: int, script: Path, *words: str) -> list[str]:
    return [sys.executable, "-m", "paceline", "launch", "--nproc", str(ranks), "--", str(script), *words]


def run(ranks: int, script: Path, *words: str, cwd: Path) -> None:
    done = run_script(ranks, script, *words, cwd=cwd, timeout=900)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


def apart(name: str, cwd: Path, settings: str = "") -> float:
    """In float64 without chance: the largest distance of any weight from the original's; in `session(settings)`."""
    script = cwd / f"with_{name}.py"
    script.write_text((CLASSIC / f"{name}.py").read_text().replace("session()", f"session({settings})"))
    (cwd / "mnist_single.py").write_bytes((CLASSIC / "mnist_single.py").read_bytes())
    words = (*SCRIPTS[name], "0", "--double", "--epochs", "1")
    run(1, CLASSIC / f"{name}_single.py", *words, "--save", "original", cwd=cwd)
    original = {key.partition("/")[2]: t for key, t in sorted(weights(cwd / "original").items())}
    farthest = 0.0
    for size in SIZES:
        run(size, script, *words, "--save", f"on-{size}", cwd=cwd)
        ours = {key.partition("/")[2]: t for key, t in sorted(weights(cwd / f"on-{size}").items())}
        assert ours.keys() == original.keys()
        farthest = max(farthest, *(float((ours[k].double() - original[k].double()).abs().max()) for k in ours))
    return farthest


def going_on(name: str, cwd: Path, folder: str) -> Path:
    """The script with a run folder, under `exact`: what a user changes for it."""
    text = (CLASSIC / f"{name}.py").read_text()
    text = text.replace("paceline.session()", SETTINGS.format(folder=folder))
    text = text.replace("in range(args.epochs):", "in s.epochs(args.epochs):")
    assert "s.epochs" in text and "exact" in text
    path = cwd / f"{name}.py"
    path.write_text(text)
    (cwd / "mnist_single.py").write_bytes((CLASSIC / "mnist_single.py").read_bytes())
    return path


def same_bits(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.values(), other.values(), strict=True))


def killed(name: str, cwd: Path, chance: random.Random) -> int:
    """Run it, and kill it three times, on 3, 1, 2 and then 3 ranks; return how often it was killed."""
    words, kills = (*SCRIPTS[name], "0.2", "--save", "killed"), 0
    events = cwd / "killed-run" / "events-0.jsonl"
    for size in (3, 1, 2):
        before, after = steps(events), chance.randint(5, 12)
        process = subprocess.Popen(
            launched(size, cwd / f"{name}.py", *words), cwd=cwd, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip
        while process.poll() is None and steps(events) < before + after:
            time.sleep(0.01)
        if process.poll() is None:
            kills += 1
            os.kill(process.pid, signal.SIGKILL)
        process.wait()
        time.sleep(1.0)  # its workers end by themselves
    run(3, cwd / f"{name}.py", *words, cwd=cwd)
    return kills


def steps(events: Path) -> int:
    """The last step that a run has logged."""
    if not events.exists():
        return 0
    return max((event.step for event in last_events(events) if isinstance(event, Step)), default=0)


def examine(name: str, seed: int) -> dict[str, object]:
    with tempfile.TemporaryDirectory() as folder:
        cwd = Path(folder)
        found: dict[str, object] = {"apart": apart(name, cwd)}
        saved: list[dict[str, torch.Tensor]] = []
        for size in SIZES:
            script = going_on(name, cwd, f"run-{size}")
            run(size, script, *SCRIPTS[name], "0.2", "--save", f"bits-{size}", cwd=cwd)
            saved.append(weights(cwd / f"bits-{size}"))
        found["same bits"] = all(same_bits(saved[0], other) for other in saved)
        going_on(name, cwd, "killed-run")
        found["kills"] = killed(name, cwd, random.Random(f"{seed} {name}"))
        found["same bits after kills"] = same_bits(saved[0], weights(cwd / "killed"))
        found["ledger clean"] = ledger.main([str(cwd / "killed-run")]) == 0
        return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the results to this file: JSON")
    parser.add_argument("--only", nargs="*", default=[*SCRIPTS], choices=[*SCRIPTS])
    parser.add_argument("--seed", type=int, default=0)
    told = parser.parse_args()
    results = {name: examine(name, told.seed) for name in told.only}
    for name, found in results.items():
        print(name, found)
    if told.out:
        told.out.write_text(json.dumps(results, indent=1) + "\n")
    good = [
        float(str(f["apart"])) <= 1e-12 and f["same bits"] and f["same bits after kills"] and f["ledger clean"]
        for f in results.values()
    ]
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
