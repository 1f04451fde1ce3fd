"""Only paceline.runs.reading and writing open files of a run."""

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "paceline"
COMMANDS = ("run_state", "status", "logs", "hang", "cancel", "ledger", "checkpoint", "train", "launch", "jobs")
OF_RUNS = (
    *(f"cli/{name}.py" for name in COMMANDS), "runs/*.py", "checkpoint/*.py", "train/*.py",
    "config/settings.py", "launch/output.py", "launch/plan.py", "host/cleanup.py",
    "host/node_utilization.py", "report/*.py",
    "guard/report.py", "rank/attach.py", "launch/agent/*.py", "lab/ranks/ledger.py", "lab/scale.py",
)  # fmt: skip
DOOR = {SOURCE / "runs" / f"{name}.py" for name in ("owners", "reading", "writing")}
PAST_THE_DOOR = {
    "read_text", "read_bytes", "write_text", "write_bytes", "touch", "mkdir", "glob", "rglob", "iterdir", "symlink_to",
    "hardlink_to", "open", "rmtree", "rename",
}  # fmt: skip
ALLOWED = {
    ("cli/run_state.py", "iterdir"): "/proc",
    ("cli/live.py", "rmtree"): "the answer that was made for us, in a run that is ours",
    ("checkpoint/manager.py", "iterdir"): "what older generations of the same run have left",
    ("host/cleanup.py", "read_bytes"): "/proc",
    ("host/cleanup.py", "open"): "/dev/null",
    ("host/cleanup.py", "rmtree"): "the agent's temporary folder",
    ("launch/agent/__main__.py", "open"): "/dev/null",
    ("launch/agent/workers.py", "open"): "the log of a worker of ours",
    ("launch/agent/monitor.py", "rmtree"): "a diagnosis that could not be written whole",
    ("train/consistency.py", "read_bytes"): "the user's own code, compared between ranks",
    ("train/determinism.py", "read_text"): "/proc",
    ("host/node_utilization.py", "read_text"): "/proc",
    ("runs/folder.py", "read_bytes"): "/proc",
    ("cli/monitor.py", "read_bytes"): "/proc",
    ("cli/monitor.py", "read_text"): "/proc",
    ("report/page.py", "read_text"): "its own templates, and plotly's script",
}


def calls(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            of_writing = isinstance(node.func, ast.Attribute) and getattr(node.func.value, "id", "") == "writing"
            found |= {name} - ({name} if of_writing else set())
    return found & PAST_THE_DOOR


@pytest.mark.parametrize(
    "path", sorted({p for glob in OF_RUNS for p in SOURCE.glob(glob)} - DOOR), ids=lambda p: p.stem
)
def test_a_module_that_knows_runs_opens_nothing_by_itself(path: Path) -> None:
    name = str(path.relative_to(SOURCE))
    assert calls(path) == {call for module, call in ALLOWED if module == name}
