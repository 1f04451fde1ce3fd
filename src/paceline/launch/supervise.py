"""The launcher's half: start the agents, wait, and leave nothing behind.

Who ends the workers, when one of us is killed with SIGKILL:

    the launcher   the agent: its stdin, the lifeline, ends
    an agent       the launcher: it sweeps the sessions that the agent wrote down in agent.json
    both           the kernel ends the workers (worker.attach), the agent's janitor ends what they had started
"""

from __future__ import annotations

import math
import os
import select
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from paceline.contract.failure import GOOD_ENDS
from paceline.contract.node_plan import NodePlan
from paceline.contract.orders import LIFELINE_GRACE_SECONDS, STOP_SIGNALS, read_inbox, signal_inbox
from paceline.errors import ExitCode
from paceline.host.sweep import roster_path, sweep_recorded
from paceline.launch.job import Command, Plan
from paceline.launch.ssh.remote import Check, run_remote
from paceline.observe.terminal import say as say

SAME_REQUEST_SECONDS = 0.1  # timeout(1), for one, sends every signal twice: to its child and to the child's group
AGENT_MARGIN_SECONDS = 1.2  # an agent that was told to stop needs that much more than its workers' grace


class RunningAgent(NamedTuple):
    """An agent and its name."""

    name: str
    process: subprocess.Popen[bytes]


def run(plan: Plan, attempt_dir: Path | None, *, keep_open: Sequence[int] = (), check: Check | None = None) -> int:
    """Run the plan to its end; return the exit code. Main thread only.

    What there is to tell is on stderr by then. SIGINT, SIGTERM, SIGHUP, SIGUSR1 and SIGUSR2 stop the run in good
    order, a second one at once. No process of the run is left on this host when this returns or is killed.

    Args:
        plan: what to run.
        attempt_dir: an existing folder of this attempt alone; None: the agents are on other hosts, announce themselves,
            and node 0's makes the folder.
        keep_open: descriptors that every worker inherits, so that what they hold (a lock) lasts until the last process
            of the run is gone, also when this one is killed. Not for agents on other hosts.
        check: of other hosts' facts, before anything is started there.

    Returns:
        0 done; 75 stopped, and every worker has saved its state; 128 + n stopped by signal n; else the first failure's.

    Raises:
        OSError: when an agent cannot be started.
        UsageError: when other hosts cannot be used; nothing was started then.
    """
    if attempt_dir is None:
        return run_remote(plan, check)
    roster_path(attempt_dir).unlink(missing_ok=True)  # never sweep by an earlier run's
    agents: list[RunningAgent] = []
    with signal_inbox((*STOP_SIGNALS, signal.SIGCHLD)) as inbox:
        try:
            agents += (_start(agent, node, keep_open) for agent, node in zip(plan.agents, plan.nodes, strict=True))
            return _wait(agents, inbox, max(node.stop_grace_seconds for node in plan.nodes) + AGENT_MARGIN_SECONDS)
        finally:
            _end(agents)
            sweep_recorded(attempt_dir)


def _start(agent: Command, node: NodePlan, keep_open: Sequence[int]) -> RunningAgent:
    # blocked, until the agent can handle them: forwarded too early, SIGINT would end it with a traceback
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        process = subprocess.Popen(
            agent.argv,
            env={**os.environ, **agent.env},
            stdin=subprocess.PIPE,
            pass_fds=keep_open,
            start_new_session=True,
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    assert process.stdin is not None
    with suppress(BrokenPipeError):  # it ended at once; its exit code says so
        process.stdin.write(msgspec.json.encode(replace(node, keep_open=tuple(keep_open))) + b"\n")
        process.stdin.flush()  # and stays open: the lifeline
    return RunningAgent(agent.name, process)


def _wait(agents: Sequence[RunningAgent], inbox: socket.socket, patience_seconds: float) -> int:
    stopped_by: signal.Signals | None = None
    deadline = math.inf
    while True:
        codes = [agent.process.poll() for agent in agents]
        for agent, code in zip(agents, codes, strict=True):
            if code not in (None, *GOOD_ENDS):
                return _tell_end(agent, code)
        if None not in codes:
            return ExitCode.SAVED if ExitCode.SAVED in codes else ExitCode.DONE
        if ExitCode.SAVED in codes:  # the other agents' workers have agreed to stop at the same step
            deadline = min(deadline, time.monotonic() + patience_seconds)
        left = deadline - time.monotonic()
        if left <= 0:  # an agent that does not react: stopped itself, say
            for agent in agents:
                agent.process.kill()
            return ExitCode.FAILED if stopped_by is None else 128 + stopped_by
        select.select([inbox], [], [], None if deadline == math.inf else left)
        received = read_inbox(inbox)
        if not received:
            continue
        if stopped_by is None:
            stopped_by, deadline = received[0], time.monotonic() + patience_seconds
            time.sleep(SAME_REQUEST_SECONDS)
            read_inbox(inbox)
        else:
            deadline = min(deadline, time.monotonic() + AGENT_MARGIN_SECONDS)
        for agent in agents:
            agent.process.send_signal(received[0])
            agent.process.send_signal(signal.SIGCONT)


def _tell_end(agent: RunningAgent, code: int) -> int:
    if code > 0:
        return code
    name = signal.Signals(-code).name
    say(f"{agent.name} (pid {agent.process.pid}) was killed by {name}; its workers are being stopped with it")
    return 128 - code


def _end(agents: Sequence[RunningAgent]) -> None:
    """Close the lifelines of what still runs and wait; kill what does not end by itself."""
    deadline = time.monotonic() + LIFELINE_GRACE_SECONDS + 1.0
    for agent in agents:
        assert agent.process.stdin is not None
        with suppress(BrokenPipeError):
            agent.process.stdin.close()
    for agent in agents:
        try:
            agent.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            agent.process.kill()
            agent.process.wait()
