"""LoRA with peft: GPT-2, Llama and BERT x four strategies x 1 to 3 ranks, each killed and resumed.

    PYTHONPATH=. python tests/sessions/soak_lora.py --out benchmarks/results/lora.json

Each case is `lora.py` twice: its last rank kills itself after step 3 of 5, then the run resumes. `problems` says what a
case must fulfil; the tests of the suite use it for three cases. The exit code is 1 if a case has a problem. Repeat
it to continue.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from datetime import UTC, datetime
from itertools import product
from pathlib import Path
from typing import Any

from tests.run_script import run_script

LORA = Path(__file__).with_name("lora.py")
MODELS, STRATEGIES, RANKS = ("gpt2", "llama", "bert"), ("bucketed", "exact", "zero", "fsdp"), (1, 2, 3)
ENV = {"HF_HUB_OFFLINE": "1"}


def killed_and_resumed(model: str, strategy: str, ranks: int, run: Path) -> dict[str, Any]:
    """The facts that `lora.py` writes."""
    killed = run_script(ranks, LORA, model, strategy, run, 3, cwd=run.parent, env=ENV)
    assert killed.returncode == 137, killed.stdout + killed.stderr
    done = run_script(ranks, LORA, model, strategy, run, cwd=run.parent, env=ENV)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(Path(f"{run}.json").read_text())


def problems(facts: dict[str, Any], strategy: str, ranks: int) -> list[str]:
    """What is wrong with a case. Bytes are those of the tensors in collectives of rank 0."""
    trained, frozen = facts["trained_bytes"], facts["frozen_bytes"]
    step, adapter, closed = (sum(facts[moment].values()) for moment in ("step", "saved adapter", "closed"))
    reduced = sum(size for kind, size in facts["step"].items() if kind != "all_gather")
    slack = 4096  # numbers of the step, checksums of replicas
    wrong = {
        "the weights differ from a plain loop's": facts["weights"] > 1e-12,
        "the adapter is not that of the checkpoint": facts["restored"] != 0,
        "the adapter had its values before the restore": facts["initial"] == 0,
        "the adapter that peft loads has other logits": facts["logits"] != 0,
        "frozen weights are reduced": reduced > 2 * trained + slack,  # shards of few rows are padded
        "frozen weights are sent in a step": strategy != "fsdp" and step > 2 * trained + slack,
        "frozen weights are gathered for the adapter": adapter > trained + slack,
        "frozen weights are gathered at the end": closed > trained + slack,
        "the measurement sees no gather": strategy == "fsdp"
        and ranks > 1
        and sum(facts["saved model"].values()) < frozen,
    }
    return [text for text, is_wrong in wrong.items() if is_wrong]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="write the results to this file, or continue it: JSON")
    out = parser.parse_args().out
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True, cwd=LORA.parent)
    cases: dict[str, Any] = json.loads(out.read_text())["cases"] if out.exists() else {}
    for model, strategy, ranks in product(MODELS, STRATEGIES, RANKS):
        name, began = f"{model} {strategy} {ranks}", time.monotonic()
        if name not in cases:
            with tempfile.TemporaryDirectory() as folder:
                facts = killed_and_resumed(model, strategy, ranks, Path(folder, "run"))
            cases[name] = {"commit": commit.stdout.strip(), "seconds": round(time.monotonic() - began), **facts}
        cases[name]["problems"] = problems(cases[name], strategy, ranks)
        print(name, cases[name]["problems"] or "good", flush=True)
        commits = Counter(case["commit"] for case in cases.values())
        record = {"date": datetime.now(UTC).date().isoformat(), "commits": commits, "cases": cases}
        out.write_text(json.dumps(record, indent=1) + "\n")
    return 1 if any(case["problems"] for case in cases.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
