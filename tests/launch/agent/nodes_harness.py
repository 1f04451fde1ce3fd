"""Several nodes on one machine: their agents, started as `--on print --agent paceline` says, on the loopback."""

import secrets
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
from tests import warm
from tests.launch.launch_harness import PRELUDE

from paceline.protocol.job import HangTimeout, NodePlan

PRELOADED = Path(__file__).with_name("preloaded.py")


class Nodes:
    """The agents of one run, and what they say."""

    def __init__(self, folder: Path, code: str, *, nodes: int = 2, nproc: int = 2, **settings: Any) -> None:
        self.folder = folder
        self.run_dir = folder / "run"
        self.run_dir.mkdir(exist_ok=True)
        script = folder / "worker.py"
        script.write_text(PRELUDE + code)
        base = secrets.randbelow(800) * 8 + 20000
        plan: dict[str, Any] = {
            "argv": (sys.executable, *(("-P", str(PRELOADED)) if settings.get("preload") else ()), str(script)),
            "nproc": nproc,
            "node": -1,
            "nodes": nodes,
            "min_nodes": nodes,
            "node0": ("127.0.0.1",),
            "node0_ports": tuple(range(base, base + 8)),
            "secret": secrets.token_hex(32),
            "run_id": "test",
            "run_dir": str(self.run_dir),
            "join_seconds": 20.0,
            **settings,
            "hang_timeout": HangTimeout.parse(settings.get("hang_timeout", "auto")),
        }
        self.preload = bool(plan.get("preload"))
        self.plan_file = folder / "plan.json"
        self.plan_file.write_bytes(msgspec.json.encode(NodePlan(**plan)))
        self.agents: dict[int, subprocess.Popen[bytes]] = {}
        self.before: list[subprocess.Popen[bytes]] = []  # those whose names others have now
        self.output: dict[int, Path] = {}

    def start(
        self,
        *numbers: int,
        plan_file: Path | None = None,
        through: tuple[str, ...] = (),
        instead: tuple[str, ...] = (),
        number: int | None = None,
    ) -> None:
        """Start these; `instead` are words in the place of the number, and `number` is said in the place of a name."""
        said = number
        for number in numbers:
            if number in self.agents:
                self.before.append(self.agents[number])
            self.output[number] = self.folder / f"agent-{number}.txt"
            with self.output[number].open("ab") as out:
                words = ["-P", "-m", "paceline.launch.agent", "--plan", str(plan_file or self.plan_file)]
                words += instead or ("--node", str(number if said is None else said))
                more: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": subprocess.STDOUT}
                self.agents[number] = (
                    subprocess.Popen([*through, sys.executable, *words], **more)
                    if through
                    else warm.Popen(words, torch=False, agents=self.preload, **more)
                )

    def said(self, number: int) -> str:
        return self.output[number].read_text()

    def codes(self, seconds: float = 30.0) -> list[int]:
        deadline = time.monotonic() + seconds
        return [agent.wait(max(0.1, deadline - time.monotonic())) for _, agent in sorted(self.agents.items())]

    def wait_for(self, name: str, seconds: float = 20.0) -> None:
        """Until the workers have made this file in the newest attempt's folder."""
        deadline = time.monotonic() + seconds
        while not list(self.run_dir.glob(f"attempt-*/{name}")):
            assert time.monotonic() < deadline, {n: self.said(n) for n in self.agents}
            time.sleep(0.02)

    def end(self) -> None:
        for agent in (*self.agents.values(), *self.before):
            if agent.poll() is None:
                agent.kill()
            agent.wait()


@contextmanager
def several(folder: Path, code: str, **settings: Any) -> Iterator[Nodes]:
    nodes = Nodes(folder, code, **settings)
    try:
        yield nodes
    finally:
        nodes.end()
