"""What is planted where, and what `paceline launch --check` must say of it. Used by the tests and by soak_check.py."""

import json
import re
import subprocess
import tempfile
import time
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from tests import warm

HERE = Path(__file__).parent
_RULES = {  # rule -> plants, of which some have the name of their rule
    "same batches": "same batches, own seeds, split apart, weighted sampler",
    "same order": "same order, same order anew",
    "gradients": "not wrapped, past DDP, no sync, own gradient, summed",
    "clipping": "clipped first",
    "different start": "different start, no init sync",
    "replicas": "own learning rate, own plateau, own weights",
    "lost gradients": "cleared in windows",
    "last window": "last window divided, last window scaled, last window dropped, last window carried",
    "schedule": "schedule of one process",
    "same augmentation": "same augmentation, same augmentation in workers, same noise, same noise of its own",
    "one file": "one file, one log, renamed",
} | {name: name for name in (
    "mean over padding", "unequal shares", "uneven steps", "padded score", "score of a share", "mean of means",
    "batch norm", "evaluation alone", "unused parameters", "threads", "batch shrinks",
)}  # fmt: skip
PLAIN = {plant: rule for rule, plants in _RULES.items() for plant in plants.split(", ")}
"""plant -> rule"""
TRAINER = ("same batches", "same augmentation", "batch norm", "mean over padding", "one file", "threads", "split apart")
ACCELERATED = (
    "same batches", "past DDP", "last window divided", "padded score", "batch norm", "same augmentation", "one file",
    "saved state",
)  # fmt: skip
RIGHT = ("plain", "tensors", "streamed", "closures", "trainer", "accelerated", "with_lightning")
CLOSURES = ("same batches", "same order", "last window divided", "no sync")
LIGHTNING = ("same batches", "last window divided", "padded score")
NEEDS = {  # script -> package
    "trainer": "transformers",
    "with_trainer": "transformers",
    "accelerated": "accelerate",
    "with_accelerate": "accelerate",
    "with_lightning": "lightning",
    "with_fabric": "lightning",
}


@dataclass(frozen=True)
class Case:
    """A script, what is planted in it, and the rule that must name it; no rule: nothing may be found."""

    script: str
    plant: str = ""
    rule: str = ""
    kind: str = ""  # of a script that is right in several ways

    @property
    def missing(self) -> str:
        """The package that it needs, if that is not installed."""
        package = NEEDS.get(Path(self.script).stem, "")
        return package if package and find_spec(package) is None else ""


@dataclass
class Outcome:
    case: Case
    code: int
    seconds: float
    text: str
    findings: list[dict[str, str]] = field(default_factory=list[dict[str, str]])

    @property
    def counted(self) -> list[dict[str, str]]:
        """What is said to be wrong, or to cost."""
        return [one for one in self.findings if one["level"] in ("wrong", "costs")]

    @property
    def found(self) -> bool:
        """Whether what was planted was named, or nothing where nothing was."""
        named = {one["rule"] for one in self.findings if one["level"] != "right"}
        return self.case.rule in named if self.case.rule else not self.counted and self.code == 0

    @property
    def on_its_line(self) -> bool:
        """Whether it was named at one of the lines that are marked."""
        sites = [one["site"].partition(" ")[0] for one in self.findings if one["rule"] == self.case.rule]
        return bool({f"{Path(self.case.script).name}:{line}" for line in marked(self.case)} & {*sites})

    @property
    def others(self) -> list[str]:
        """Findings of what was not planted."""
        return [one["rule"] for one in self.counted if one["rule"] != self.case.rule]


def cases() -> list[Case]:
    scripts = sorted((HERE / "clean").glob("*.py"))
    clean = [Case(f"clean/{path.name}", kind=kind) for path in scripts for kind in kinds(path)]
    right = [Case(f"planted/{name}.py") for name in RIGHT]
    windows = [Case(f"planted/{name}.py", "windows") for name in ("plain", "trainer", "accelerated")]
    planted = [Case("planted/plain.py", plant, rule) for plant, rule in PLAIN.items()]
    planted += [Case(f"planted/{name}.py", "same batches", "same batches") for name in ("tensors", "streamed")]
    planted += [Case("planted/trainer.py", plant, PLAIN[plant]) for plant in TRAINER]
    planted += [Case("planted/accelerated.py", plant, PLAIN.get(plant, plant)) for plant in ACCELERATED]
    planted += [Case("planted/closures.py", plant, PLAIN[plant]) for plant in CLOSURES]
    planted += [Case("planted/with_lightning.py", plant, PLAIN[plant]) for plant in LIGHTNING]
    return clean + right + windows + planted


def kinds(script: Path) -> list[str]:
    """The ways in which a script is right: what its last tuple lists; one without a name where there is none."""
    listed = re.search(r"^KINDS = \(([^)]*)\)", script.read_text(), re.MULTILINE)
    return re.findall(r"\w+", listed[1]) if listed else [""]


def marked(case: Case) -> list[int]:
    """The lines at which it is planted."""
    plant = case.plant.removesuffix(" in workers")
    lines = (HERE / case.script).read_text().splitlines()
    return [n for n, line in enumerate(lines, 1) if plant in line.partition("# plant: ")[2].split(", ")]


def checked(case: Case, *, nproc: int = 2, started: bool = False) -> Outcome:
    """Check it, on ranks that have torch already, as under our command, or on ranks that are `started` by theirs."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        words = [str(HERE / case.script), *filter(None, [case.kind])]
        if case.plant:
            words += ["--plant", case.plant]
        if "--folder" in (HERE / case.script).read_text():
            words += ["--folder", folder]
        if case.plant == "windows" or case.plant.startswith("last window"):
            words += ["--samples", "404"] if "plain" in case.script else []
        began = time.monotonic()
        options = ["--check", "--nproc", str(nproc), "--run-dir", str(run_dir), "--hang-timeout", "8"]
        command = ("-m", "paceline", "launch", *options, "--", *words)
        ended = warm.run(command, ranks=not started, stderr=subprocess.STDOUT, timeout=540)
        found = run_dir / "attempt-1" / "check.json"
        findings = json.loads(found.read_text()) if found.exists() else []
        return Outcome(case, ended.returncode, time.monotonic() - began, ended.stdout, findings)
