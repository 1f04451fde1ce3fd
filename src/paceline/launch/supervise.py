"""The launcher: start the agent of this machine, wait for it, and leave no process behind. Other hosts: ssh/remote.py.

If a process is killed with SIGKILL, the workers end as follows:

    killed         ended by
    the launcher   the agent: its stdin, the lifeline, reaches its end
    the agent      the launcher: it kills the sessions that the agent recorded in agent-0.json
    both           the kernel ends the workers (rank.attach), and the agent's cleanup process ends their child processes
"""

import math
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from secrets import token_hex
from typing import Any

import msgspec
from msgspec.structs import replace

from paceline.host.cleanup import kill_recorded_workers, roster_path
from paceline.launch.plan import Command, Plan, plan_local
from paceline.launch.ssh.remote import SAME_REQUEST_SECONDS, run_plan
from paceline.protocol.control import LIFELINE_GRACE_SECONDS, STOP_SIGNALS, read_stop_signals, signal_wakeup
from paceline.protocol.job import JobSpec, NodePlan
from paceline.runs.console import print_to_stderr

AGENT_MARGIN_SECONDS = 1.2  # time that an agent needs to stop, beyond the grace of its workers


def run(plan: Plan, *, keep_open: Sequence[int] = ()) -> int:
    """Run the plan to its end; return the exit code. Main thread only.

    A stop signal lets the workers save and ends the run. A second one ends the run immediately; scripts are first sent
    SIGTERM and have some seconds to end. All messages are on stderr when this returns. No process of the run is left on
    this host, even if this process is killed.

    Args:
        plan: one agent on this machine, if the plan has the folder of the attempt. Otherwise agents on other hosts,
            which announce themselves; the agent of node 0 then creates the folder.
        keep_open: descriptors that every worker inherits. A lock on them lasts until the last process of the run has
            ended, even if this process is killed. Not for agents on other hosts.

    Returns:
        0 done; 75 stopped after every worker has saved its state; 128 + n stopped by signal n; otherwise the code of
        the first failure.
    """
    if not plan.nodes[0].attempt_dir:
        return run_plan(plan)
    (command,), (node,) = plan.agents, plan.nodes
    attempt_dir = Path(node.attempt_dir)
    roster_path(attempt_dir).unlink(missing_ok=True)  # never kill the processes in the roster of an earlier run
    with signal_wakeup((*STOP_SIGNALS, signal.SIGCHLD)) as wakeup:
        agent = _start(command, node, keep_open)
        try:
            margin_seconds = AGENT_MARGIN_SECONDS + node.term_grace_seconds + node.event_wait_seconds
            code = _wait(agent, wakeup, node.grace_period_seconds, margin_seconds)
        finally:
            _end(agent)
            kill_recorded_workers(attempt_dir)
        return code


def run_workers(
    module: str, arguments: Sequence[str], attempt_dir: Path, nproc: int, threads: int, **options: Any
) -> int:
    """Run `python -m MODULE ARGUMENTS` as `nproc` ranks on this machine. `options` are further fields of JobSpec."""
    attempt_dir.mkdir(parents=True)
    argv = (sys.executable, "-P", "-m", module, *arguments)
    job = JobSpec(argv, nproc, token_hex(8), threads, attempt_dir=str(attempt_dir), **options)
    return run(plan_local(job))


def _start(command: Command, node: NodePlan, keep_open: Sequence[int]) -> subprocess.Popen[bytes]:
    # blocked until the agent can handle them: forwarded too early, SIGINT would end it with a traceback
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    stdin: list[int] = []  # a copy of our standard input for the workers: the agent's standard input is the lifeline
    with suppress(OSError):
        stdin += [os.dup(0)] if node.plain_store else []
    try:
        agent = subprocess.Popen(
            command.argv, stdin=subprocess.PIPE, pass_fds=(*keep_open, *stdin), start_new_session=True
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for descriptor in stdin:
            os.close(descriptor)
    node = replace(node, keep_open=tuple(keep_open), stdin=stdin[0] if stdin else -1)
    assert agent.stdin is not None
    with suppress(BrokenPipeError):  # the agent has ended already; its exit code has the reason
        agent.stdin.write(msgspec.json.encode(node) + b"\n")
        agent.stdin.flush()  # keep it open: it is the lifeline
    return agent


def _wait(agent: subprocess.Popen[bytes], wakeup: socket.socket, grace_seconds: float, margin_seconds: float) -> int:
    stopped_by: signal.Signals | None = None
    deadline = math.inf
    while (code := agent.poll()) is None:
        remaining = deadline - time.monotonic()
        if stopped_by is not None and remaining <= 0:  # it does not react, for example because it is suspended
            agent.kill()
            return 128 + stopped_by
        select.select([wakeup], [], [], None if deadline == math.inf else remaining)
        signals = read_stop_signals(wakeup)
        if not signals:
            continue
        if stopped_by is None:
            stopped_by, deadline = signals[0], time.monotonic() + grace_seconds + margin_seconds
            time.sleep(SAME_REQUEST_SECONDS)
            read_stop_signals(wakeup)
        else:
            deadline = min(deadline, time.monotonic() + margin_seconds)
        agent.send_signal(signals[0])
        agent.send_signal(signal.SIGCONT)
    if code < 0:
        name = signal.Signals(-code).name
        print_to_stderr(f"agent 0 (pid {agent.pid}) was killed by {name}; stopping its workers")
        return 128 - code
    return code


def _end(agent: subprocess.Popen[bytes]) -> None:
    assert agent.stdin is not None
    with suppress(BrokenPipeError):
        agent.stdin.close()
    try:
        agent.wait(LIFELINE_GRACE_SECONDS + 1.0)
    except subprocess.TimeoutExpired:
        agent.kill()
        agent.wait()
