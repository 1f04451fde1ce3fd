"""Import contracts: a planted violation of each in pyproject.toml is reported. Metrics stay within their limits."""

import importlib.util
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import paceline

ROOT = Path(__file__).parents[1]

PLANTED = {
    "Upper packages import lower ones only": ("data/plan.py", "import paceline.train.optimizer"),
    "Strategies do not know each other": ("strategies/manual.py", "import paceline.strategies.single"),
    "Launchers do not know each other, and the agent knows none": (
        "launch/ssh/plan.py",
        "import paceline.launch.by_hand",
    ),
    "Packages outside a rank import neither torch nor packages inside a rank": (
        "lab/scale.py",
        "def f():\n    import torch",
    ),
    "Commands read checkpoints and MNIST without torch": ("checkpoint/manager.py", "import paceline.rank.world"),
    "Packages inside a rank import no launcher, agent or judge": ("train/step.py", "import paceline.guard.judge"),
    "No part takes the whole configuration": ("strategies/ddp.py", "import paceline.config.settings"),
}


@pytest.fixture(scope="module")
def copy(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("contracts")
    shutil.copytree(ROOT / "src", folder / "src", ignore=shutil.ignore_patterns("*.gz", "__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


def diagnoses(folder: Path) -> dict[str, str]:
    """Each contract's name and KEPT or BROKEN, for the package in `folder`/src."""
    program = "import sys; sys.path.insert(0, 'src'); from importlinter.cli import lint_imports_command as c; c()"
    run = subprocess.run(
        [sys.executable, "-c", program, "--no-cache"], cwd=folder, capture_output=True, text=True, timeout=150
    )
    found = dict(re.findall(r"^(.+?) (KEPT|BROKEN)", run.stdout, re.MULTILINE))
    assert found, run.stdout + run.stderr
    return found


def test_every_contract_is_kept_and_reported_when_it_is_broken(copy):
    assert diagnoses(copy) == dict.fromkeys(PLANTED, "KEPT")
    for file, line in PLANTED.values():
        path = copy / "src" / "paceline" / file
        with path.open("a") as source:
            source.write(f"\n{line}\n")
    assert diagnoses(copy) == dict.fromkeys(PLANTED, "BROKEN")


def test_no_module_has_the_name_of_a_public_function():
    """Its import would replace the function: paceline.run, for example."""
    assert [name for name in paceline.__all__ if find_spec(f"paceline.{name}")] == []


# ---- tools/metrics.py -----------------------------------------------------------------------------------------------

SPEC = importlib.util.spec_from_file_location("metrics", ROOT / "tools" / "metrics.py")
assert SPEC is not None and SPEC.loader is not None
metrics = importlib.util.module_from_spec(SPEC)
sys.modules["metrics"] = metrics
SPEC.loader.exec_module(metrics)


def test_no_number_is_over_its_limit() -> None:
    too_many = {one.name: (one.number, one.found) for one in metrics.counts() if one.number > one.limit}
    assert not too_many
