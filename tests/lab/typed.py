"""A command that measures, as it is typed; measuring takes its time on a machine that does something else, too."""

import json
import subprocess
from pathlib import Path
from typing import Any

from tests import warm


def typed(folder: Path, *arguments: object, timeout: float = 510) -> subprocess.CompletedProcess[str]:
    return warm.run(["-m", "paceline", *arguments], ranks=True, cwd=folder, timeout=timeout)


def measured(folder: Path, *arguments: object, timeout: float = 510) -> tuple[dict[str, Any], str]:
    """What `paceline ARGUMENTS` has written down, and printed; it must succeed."""
    run = typed(folder, *arguments, "--device", "cpu", "--out", "found.json", timeout=timeout)
    assert run.returncode == 0, run.stdout + run.stderr
    return json.loads((folder / "found.json").read_text()), run.stdout
