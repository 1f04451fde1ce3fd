"""Where the commands of these pages are typed: on the hosts of tests/cluster, set up as a user's.

On each of them one shared project and this Python lie under /home/me, and ssh finds its settings where it looks for
them: so nothing of the machine that the hosts are made on is on the screen.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.cluster.lab import Lab  # noqa: E402 - not a package that is installed
from tests.cluster.slurm import Slurm  # noqa: E402
from tests.cluster.ssh import SshHosts  # noqa: E402

HOME = "/home/me"
LONGEST_SECONDS = 180.0
BAD = """import os
import time

if os.environ["RANK"] == "3":
    raise ValueError("no such data: x.bin")
time.sleep(60)
"""


@dataclass
class Stage:
    """The hosts, the project that they share, and what was typed and said so far."""

    lab: Lab
    ssh: SshHosts
    slurm: Slurm
    project: Path  # /home/me/project, as this machine knows it
    said: list[str] = field(default_factory=list[str])

    def words(self, line: str) -> tuple[str, ...]:
        """A login shell's command: nothing of this process's environment is in it."""
        path = f"{HOME}/bin:{HOME}/venv/bin:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"
        known = (f"PATH={path}", f"HOME={HOME}", "LANG=C.UTF-8", "COLUMNS=110")
        slurm = (f"{name}={value}" for name, value in self.slurm.environment.items())
        # The tests' own habit with mpirun as root; a user is not root.
        root = ("OMPI_ALLOW_RUN_AS_ROOT=1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1")
        return ("env", "-i", *known, *slurm, *root, "bash", "-c", f"cd {HOME}/project && {line}")

    def begin(self, host: str, line: str) -> subprocess.Popen[str]:
        """Start a command; what it says is told by `end`."""
        out, err = subprocess.PIPE, subprocess.STDOUT
        return self.lab.popen(host, *self.words(line), stdin=subprocess.DEVNULL, stdout=out, stderr=err, text=True)

    def end(self, host: str, line: str, started: subprocess.Popen[str], *, show: str | None = None) -> str:
        """Wait for a command and write down what was typed and said; `show`: what was typed, if that was shorter."""
        said = plain(started.communicate(timeout=LONGEST_SECONDS)[0]).replace(str(ROOT), f"{HOME}/paceline")
        self.said.append(f"{host}$ {show or line}\n{said}")
        if started.returncode:
            self.said.append(f"{host}$ echo $?\n{started.returncode}\n")
        return said

    def type(self, host: str, line: str) -> str:
        """Run a command to its end and write it down; what it said."""
        return self.end(host, line, self.begin(host, line))

    def note(self, words: str) -> None:
        """A line that nobody has typed: what happens to the hosts."""
        self.said.append(f"# {words}\n")

    def wait_for_step(self, run: str, step: int) -> None:
        """Until rank 0 has logged this step."""
        path, deadline = self.project / "runs" / run / "events-0.jsonl", time.monotonic() + LONGEST_SECONDS
        while True:
            lines = path.read_text().splitlines() if path.is_file() else []
            if any(json.loads(line).get("step", 0) >= step for line in lines if line.endswith("}")):
                return
            if time.monotonic() > deadline:
                raise TimeoutError(f"{run} does not come to step {step}")
            time.sleep(0.1)


def start(folder: Path) -> Stage:
    """Hosts n1 to n4 with everything on them."""
    for name in ("lab", "ssh", "slurm", "project"):
        (folder / name).mkdir()
    folder.chmod(0o755)
    lab = Lab(folder / "lab", 4)
    ssh, slurm = SshHosts.start(lab, folder / "ssh"), Slurm.start(lab, folder / "slurm")
    project = folder / "project"
    shutil.copy(ROOT / "examples" / "existing_ddp.py", project)
    shutil.copytree(
        ROOT / "src" / "paceline" / "data" / "mnist",
        project / "mnist",
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    (project / "bad.py").write_text(BAD)
    stage = Stage(lab, ssh, slurm, project)
    for host in lab.hosts:
        furnish(stage, host)
    lab.boot_hooks.insert(0, lambda host: furnish(stage, host))
    return stage


def furnish(stage: Stage, host: str) -> None:
    """Put the user's folders in their place on one host, and his ssh settings where ssh looks for them."""
    places = {"project": stage.project, "venv": Path(sys.prefix)}
    lines = ["mount -t tmpfs tmpfs /home", f"mount --bind {stage.ssh.config} /etc/ssh/ssh_config"]
    lines += [f"mkdir -p {HOME}/{name} && mount --bind {where} {HOME}/{name}" for name, where in places.items()]
    # The script that pip has made knows this Python by its place on this machine.
    shim = f'#!/bin/sh\\nexec {HOME}/venv/bin/python -m paceline "$@"\\n'
    lines += [f"mkdir {HOME}/bin", f"printf '{shim}' >{HOME}/bin/paceline", f"chmod +x {HOME}/bin/paceline"]
    stage.lab.run(host, "sh", "-ec", "\n".join(lines)).check_returncode()


def plain(text: str) -> str:
    """What is left of a terminal's text when the progress bar is gone: mpirun gives rank 0 a terminal."""
    lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text).replace("\r", "\n").splitlines(keepends=True)
    return "".join(line for line in lines if "━━━" not in line or line[0] in "┏┡┗") if "\x1b[" in text else text
