"""What does one head cost at 2 to 1,000 nodes? `python benchmarks/thousand.py` (`make bench-thousand`).

For each number of nodes two runs: one that trains and is stopped by SIGTERM, one in which a rank hangs and is named.
Real are the head and every follower, a process each, with their sockets, messages, guard and judge. Stand-ins are what
1,000 machines would bring: the workers (`StandIns` say of themselves what 8 ranks in a training would), the facts of a
machine (gathered once; else this one would hash paceline's code a thousand times), and the way between: the loopback.
With all followers on the same few cores, times are upper limits: the head gets its turn among a thousand others.

With --out the result is written there; what it has of other numbers of nodes stays, so it can be measured in parts.
"""

from __future__ import annotations

import argparse
import gc
import json
import mmap
import os
import platform
import secrets
import select
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import msgspec
import psutil
from msgspec.structs import replace

import paceline.launch.agent.cluster as cluster_module
import paceline.launch.agent.follower as follower_module
import paceline.launch.agent.joining as joining_module
from paceline.host.facts import NodeFacts, gather_facts
from paceline.launch.agent.coordinator import Coordinator
from paceline.launch.agent.follower import Follower
from paceline.launch.agent.workers import InheritedResources
from paceline.launch.plan import Command
from paceline.launch.ssh.sessions import await_agents, open_sessions
from paceline.protocol.control import STOP_SIGNALS, StopSignals, signal_wakeup
from paceline.protocol.evidence import Evidence, Frame, Op, Phase, RankSample, Stack
from paceline.protocol.job import NodePlan

NODES = (2, 10, 30, 100, 300, 1000)
NPROC = 8
STEP_SECONDS = 0.2
QUIET_SECONDS = 20.0
GOALS = {"joined_seconds": 30.0, "quiet_cpu": 0.10, "stop_seconds": 2.0, "named_seconds": 15.0, "head_mib": 300.0}
BOARD = memoryview(mmap.mmap(-1, 8 * 4096)).cast("d")  # shared by all processes: what only their own code sees
BEGAN, HANGS, STARTED, STOPPED = 0, 1, 2, 3
STOP_HEARD = 16  # + node: when its workers were asked to stop
STACKS = tuple(
    Stack(name, tuple(Frame(f"/home/user/training/project/module_{n}.py", 10 * n, f"function_{n}") for n in range(12)))
    for name in ("main", "paceline-watcher", "pin-memory")
)


class StandIns:
    """In place of `Workers` of the agent: ranks that step as one, until the last one of the world hangs."""

    port, machine, gate, left, names, oom_kills = 29500, None, None, (), staticmethod(dict), staticmethod(int)

    def __init__(self, plan: NodePlan, number: int) -> None:
        self.plan, self.number, self.stopping, self.swept = plan, number, False, False
        self._code: int | None = None

    @classmethod
    def start(cls, plan: NodePlan, number: int, inherited: InheritedResources) -> Self:
        return cls(plan, number)

    def worker_samples(self) -> list[RankSample]:
        now = time.monotonic()
        hangs = BOARD[HANGS] or float("inf")
        step = int((min(now, hangs) - BOARD[BEGAN]) / STEP_SECONDS)
        since = BOARD[BEGAN] + step * STEP_SECONDS
        first = self.plan.ranks.first
        return [self._sample(first + n, step, now - since, now >= hangs) for n in range(self.plan.nproc)]

    def _sample(self, rank: int, step: int, still_seconds: float, hanging: bool) -> RankSample:
        is_cause = hanging and rank == self.plan.ranks.world_size - 1
        return RankSample(
            rank, f"n{self.plan.node}", 1000 + rank, self.plan.node, self._code, step=step, still_seconds=still_seconds,
            phase=Phase.FORWARD if is_cause else Phase.SYNC, phase_seconds=tuple(step * 0.01 for _ in Phase),
            waiting=hanging and not is_cause, met=True, fingerprints=b"",
        )  # fmt: skip

    def collect(self, question: int, patience_seconds: float) -> Answers:
        return Answers(question, self.plan.ranks.world_size)

    def release(self, ranks: Sequence[int], word: bytes) -> None:
        if self.plan.ranks.first in ranks:  # they end as freed ranks do; the one that hangs is killed
            self._code = 76

    def stop(self, grace_seconds: float) -> None:
        BOARD[STOP_HEARD + self.plan.node] = BOARD[STOP_HEARD + self.plan.node] or time.monotonic()
        self.stopping, self._code = True, 75

    seconds_left = 0.0

    def sweep(self) -> None:
        self.stopping = self.swept = True

    def close(self) -> None:
        """Nothing is open."""

    def ask_to_save(self) -> None:
        """Nobody asks."""


class Answers:
    """In place of `EvidenceCollection`: what ranks say that wait in a collective, and the one that has not come."""

    def __init__(self, question: int, world_size: int) -> None:
        self.question, self._world_size = question, world_size

    def advance(self) -> bool:
        return True

    def evidence(self, workers: Sequence[RankSample]) -> list[Evidence]:
        return [self._of(one) for one in workers]

    def _of(self, one: RankSample) -> Evidence:
        waits = one.rank != self._world_size - 1
        what = "[25000000]", "float32", "train.py:97 in step"
        ops = [
            Op("0", 100 + n, "all_reduce", f"bucket {n}", *what, done=n < 7 or not waits)
            for n in range(8 if waits else 7)
        ]
        return replace(Evidence.from_sample(one), state="S", answered=True, ops=tuple(ops), stacks=STACKS)


def stand_in(facts: NodeFacts, node: int) -> Callable[[], NodeFacts]:
    """The facts of a machine of its own."""
    return lambda: replace(facts, host=f"n{node}", pid=os.getpid(), wall_seconds=time.time())


def be_agent(plan: NodePlan, facts: NodeFacts, output: Path) -> int:
    """One agent, in a process of its own; its exit code."""
    words = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(words, 1)
    os.dup2(words, 2)
    modules: Any = (follower_module, joining_module)
    for module in modules:
        module.gather_facts = stand_in(facts, plan.node)
    for module in (follower_module, cluster_module):
        setattr(module, "Workers", StandIns)  # noqa: B010
    with signal_wakeup((*STOP_SIGNALS, signal.SIGCHLD)) as wakeup:
        orders = StopSignals(wakeup, lifeline=False)
        if plan.node:
            return Follower(plan, orders, InheritedResources(), lambda: None).run()
        return Coordinator(
            plan, orders, InheritedResources(), lambda: BOARD.__setitem__(STARTED, time.monotonic())
        ).run()


class Run:
    """All agents of one run. Use it in a `with`: none is left after it."""

    def __init__(self, nodes: int, facts: NodeFacts, folder: Path) -> None:
        self._nodes, self._facts, self._folder = nodes, facts, folder
        self._children: list[int] = []
        self.head: psutil.Process
        self.peak_mib = 0.0

    def __enter__(self) -> Self:
        for place in range(len(BOARD)):
            BOARD[place] = 0.0
        BOARD[BEGAN] = time.monotonic()
        base, run_dir = secrets.randbelow(800) * 8 + 20000, self._folder / "run"
        attempt = run_dir / "attempt-1"
        attempt.mkdir(parents=True)
        plan = NodePlan(
            argv=("train",), nproc=NPROC, nodes=self._nodes, min_nodes=self._nodes, node0=("127.0.0.1",),
            node0_ports=tuple(range(base, base + 8)), secret=secrets.token_hex(32), run_id="thousand",
            run_dir=str(run_dir), attempt_dir=str(attempt), join_seconds=240.0,
        )  # fmt: skip
        for node in range(self._nodes):
            child = os.fork()
            if not child:
                code = 1
                try:
                    code = be_agent(replace(plan, node=node), self._facts, self._folder / f"agent-{min(node, 1)}.txt")
                finally:
                    os._exit(code)
            self._children.append(child)
        self.head = psutil.Process(self._children[0])
        self.forked_seconds = time.monotonic() - BOARD[BEGAN]
        return self

    def __exit__(self, *_: object) -> None:
        for child in self._children:
            try:
                os.kill(child, signal.SIGKILL)
            except ProcessLookupError:
                continue
            os.waitpid(child, 0)

    def said(self, words: str, seconds: float) -> float:
        """Wait until the head has said this; when it did, monotonic."""
        deadline, output = time.monotonic() + seconds, self._folder / "agent-0.txt"
        while not output.exists() or words not in output.read_text():
            if time.monotonic() > deadline:
                said = output.read_text()[-3000:] if output.exists() else "nothing"
                raise SystemExit(f"{self._nodes} nodes: no {words!r} within {seconds:g} s; the head said: {said}")
            self._look()
            time.sleep(0.05)
        return time.monotonic()

    def _look(self) -> None:
        for line in Path(f"/proc/{self.head.pid}/status").read_text().splitlines():
            if line.startswith("VmHWM"):
                self.peak_mib = int(line.split()[1]) / 1024

    def started(self) -> tuple[float, float]:
        """Seconds until all have come and can reach each other; and until all have started their workers."""
        joined = self.said("nodes are here:", 240.0) - BOARD[BEGAN]
        deadline = time.monotonic() + 60.0
        while not BOARD[STARTED]:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        return joined, BOARD[STARTED] - BOARD[BEGAN]

    def cpu_seconds(self) -> float:
        times = self.head.cpu_times()
        return times.user + times.system

    def stops(self) -> float:
        """When the last node's workers were asked to stop; the head has ended by then."""
        self._look()
        end = os.pidfd_open(self.head.pid)
        assert select.select([end], [], [], 60.0)[0], "the head has not ended"
        os.close(end)
        heard = [BOARD[STOP_HEARD + node] for node in range(self._nodes)]
        assert all(heard), f"{heard.count(0.0)} nodes were not asked to stop"
        return max(heard)


def stopped_run(nodes: int, facts: NodeFacts, quiet_seconds: float) -> dict[str, float]:
    """All come, all train, and a signal ends it."""
    with tempfile.TemporaryDirectory() as folder, Run(nodes, facts, Path(folder)) as run:
        joined, started = run.started()
        time.sleep(3.0)
        before, since = run.cpu_seconds(), time.monotonic()
        time.sleep(quiet_seconds)
        cpu = (run.cpu_seconds() - before) / (time.monotonic() - since)
        cpu_start = before
        ordered = time.monotonic()
        run.head.send_signal(signal.SIGTERM)
        heard = run.stops()
        return {
            "forked_seconds": run.forked_seconds,
            "joined_seconds": joined,
            "started_seconds": started,
            "start_cpu_seconds": cpu_start,
            "quiet_cpu": cpu,
            "stop_seconds": heard - ordered,
            "ended_seconds": time.monotonic() - ordered,
            "head_mib": run.peak_mib,
        }


def hanging_run(nodes: int, facts: NodeFacts) -> dict[str, float]:
    """All train, the last rank hangs, and is named."""
    with tempfile.TemporaryDirectory() as folder, Run(nodes, facts, Path(folder)) as run:
        run.started()
        time.sleep(5.0)  # some steps, so that the window is that of steps
        BOARD[HANGS] = hangs = time.monotonic()
        named = run.said(f"CAUSE: rank {nodes * NPROC - 1} ", 120.0) - hangs
        run.stops()
        return {"named_seconds": named, "hang_ended_seconds": time.monotonic() - hangs, "hang_head_mib": run.peak_mib}


def ssh_start(nodes: int, facts: NodeFacts) -> dict[str, float]:
    """How long the launcher takes until all agents have announced themselves, through clients that log in for 0.3 s."""
    with tempfile.TemporaryDirectory() as folder, signal_wakeup((signal.SIGCHLD,)) as wakeup:
        words = Path(folder) / "facts"
        words.write_bytes(msgspec.json.encode(facts) + b"\n")
        client = "sleep 0.3; cat $0; exec cat > /dev/null"
        commands = [Command(f"n{node}", ("sh", "-c", client, str(words))) for node in range(nodes)]
        began, cpu = time.monotonic(), time.process_time()
        with open_sessions(commands, wakeup) as every:
            announced = await_agents(every, seconds=240.0)
            assert isinstance(announced, list) and len(announced) == nodes
            seconds, cpu = time.monotonic() - began, time.process_time() - cpu
        return {"ssh_seconds": seconds, "ssh_cpu_seconds": cpu}


def main() -> int:
    """1 if a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=lambda text: tuple(map(int, text.split(","))), default=NODES)
    parser.add_argument("--quiet-seconds", type=float, default=QUIET_SECONDS)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    facts = replace(gather_facts(), cores=64)
    gc.collect()
    gc.freeze()  # what the children share with us is not copied because a collector has looked at it
    before = json.loads(options.out.read_text())["rows"] if options.out and options.out.exists() else []
    rows: list[dict[str, float]] = [row for row in before if row["nodes"] not in options.nodes]
    for nodes in options.nodes:
        found: dict[str, float] = {"nodes": nodes, "ranks": nodes * NPROC}
        found |= ssh_start(nodes, facts)
        found |= stopped_run(nodes, facts, options.quiet_seconds) | hanging_run(nodes, facts)
        found["head_mib"] = max(found["head_mib"], found.pop("hang_head_mib"))
        rows.append({name: round(value, 4) for name, value in found.items()})
        print(json.dumps(rows[-1]), flush=True)
    rows.sort(key=lambda row: row["nodes"])
    missed = [
        f"{row['nodes']:g} nodes: {name} {row[name]}" for row in rows for name in GOALS if row[name] >= GOALS[name]
    ]
    result: Mapping[str, Any] = {
        "machine": f"{os.cpu_count()} cores, {platform.platform()}, Python {platform.python_version()}",
        "stand_ins": "workers, facts, network (loopback); all followers on this machine",
        "goals": GOALS,
        "missed": missed,
        "rows": rows,
    }
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    print("\n".join(missed) or "all goals reached")
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main())
