"""Whoever starts a run may close its standard streams, or stop reading them: the run and its code do not change."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.sample(2)

SSH = '#!/bin/bash\nexec bash -c "${@: -1}"\n'  # a host that is this machine
SCRIPT = """
import time
for number in range(4):
    print(number, flush=True)
    time.sleep(0.5)
"""


@pytest.fixture
def run(tmp_path: Path) -> str:
    """A shell's words for a run of 2 s by "ssh"."""
    (tmp_path / "ssh").write_text(SSH)
    (tmp_path / "ssh").chmod(0o755)
    (tmp_path / "script.py").write_text(SCRIPT)
    where = f"--on ssh --hosts n1 --ssh {tmp_path}/ssh --run-dir {tmp_path}/run"
    return f"{sys.executable} -m paceline launch {where} -- {tmp_path}/script.py"


def shell(text: str) -> int:
    words = ("bash", "-c", text)
    return subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, timeout=180).returncode


@pytest.mark.slow
@pytest.mark.parametrize("how", ["<&-", ">&- 2>&-", "<&- >&- 2>&-", "2>&1 | head -n 1"])
def test_a_run_goes_on_to_its_end_when_streams_are_closed_or_nobody_reads(run: str, tmp_path: Path, how: str) -> None:
    assert shell(f"set -o pipefail; {run} {how}") == 0
    assert (tmp_path / "run" / "attempt-1" / "rank-0.log").read_text() == "0\n1\n2\n3\n"
