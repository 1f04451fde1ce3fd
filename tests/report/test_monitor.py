"""`paceline monitor`: this machine, another over ssh, one that does not answer; and whose processes they are."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests import warm

from paceline.cli import main
from paceline.cli.monitor import NodeUsageSampler


def test_the_machine_and_the_rank_that_is_busy_are_seen() -> None:
    env = {**os.environ, "PACELINE_RUN_ID": "abc", "RANK": "3"}
    words = [sys.executable, "-c", "while True: pass", "secret"]
    with subprocess.Popen(words, env=env) as busy:
        try:
            monitor = NodeUsageSampler()
            found = None
            while found is None or not found.cores:
                now = monitor.sample()
                found = next((one for one in now.processes if one.pid == busy.pid), None)
        finally:
            busy.kill()
    assert found.run == "abc rank 3"
    assert found.program == f"{Path(sys.executable).name} -c"
    assert now.use is not None
    assert 0 <= now.use.cores_busy <= now.use.cores


def test_hosts_are_asked_by_ssh_and_one_that_is_silent_hides_none(tmp_path: Path) -> None:
    ssh = tmp_path / "ssh"
    ssh.write_text('#!/bin/sh\ncase "$*" in *bad*) printf "\\033[2Jno route" >&2; exit 255;; esac\n'
                   'for last; do :; done\nexec sh -c "$last"\n')  # fmt: skip
    ssh.chmod(0o755)
    words = ["-m", "paceline", "monitor", "--hosts", "good,bad", "--ssh", ssh]
    done = warm.run([*words, "--json"], torch=False)
    good, bad = json.loads(done.stdout)
    assert done.returncode == 1
    assert (good["name"], good["use"]["host"]) == ("good", os.uname().nodename)
    assert bad["failure"] == "no route"


@pytest.mark.parametrize("hosts", ["-oProxyCommand=x", ","])
def test_a_host_that_is_none_is_refused(hosts: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["monitor", f"--hosts={hosts}"]) == 2
    assert "--hosts" in capsys.readouterr().err
