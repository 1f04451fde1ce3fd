"""The launcher's half: start the agent of this machine, wait, and leave nothing behind. Other hosts: ssh/remote.py.

Who ends the workers, when one of us is killed with SIGKILL:

    the launcher   the agent: its stdin, the lifeline, ends
    the agent      the launcher: it sweeps the sessions that the agent wrote down in agent-0.json
    both           the kernel ends the workers (worker.attach), the agent's janitor ends what they had started
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

from paceline.host.sweep import roster_path, sweep_recorded
from paceline.launch.plan import Command, Plan, local
from paceline.launch.ssh.remote import SAME_REQUEST_SECONDS, run_remote
from paceline.protocol.control import LIFELINE_GRACE_SECONDS, STOP_SIGNALS, read_inbox, signal_inbox
from paceline.protocol.job import JobSpec, NodePlan
from paceline.runs.console import say

AGENT_MARGIN_SECONDS = 1.2  # how much longer than its workers' grace an agent needs to stop


def run(plan: Plan, *, keep_open: Sequence[int] = ()) -> int:
    """Run the plan to its end; return the exit code. Main thread only.

    By then all messages are on stderr. Stop signals end the run in good order, a second one at once (scripts hear
    SIGTERM first, for some seconds). No process of the run is left on this host when this returns or is killed.

    Args:
        plan: what to run: one agent on this machine, if its plan names the folder of the attempt; else agents on other
            hosts, which announce themselves, and of which node 0's makes the folder.
        keep_open: descriptors that every worker inherits, so that what they hold (a lock) lasts until the last process
            of the run is gone, also when this one is killed. Not for agents on other hosts.

    Returns:
        0 done; 75 stopped, and every worker has saved its state; 128 + n stopped by signal n; else the first failure's.

    Raises:
        OSError: when the agent cannot be started.
        UsageError: when other hosts cannot be used; nothing was started then.
    """
    if not plan.nodes[0].attempt_dir:
        return run_remote(plan)
    (command,), (node,) = plan.agents, plan.nodes
    attempt_dir = Path(node.attempt_dir)
    roster_path(attempt_dir).unlink(missing_ok=True)  # never sweep by an earlier run's
    with signal_inbox((*STOP_SIGNALS, signal.SIGCHLD)) as inbox:
        agent = _start(command, node, keep_open)
        try:
            code = _wait(agent, inbox, node.stop_grace_seconds, AGENT_MARGIN_SECONDS + node.term_grace_seconds)
        finally:
            _end(agent)
            sweep_recorded(attempt_dir)
        return code


def run_workers(module: str, words: Sequence[str], attempt_dir: Path, nproc: int, threads: int, **options: Any) -> int:
    """Run `python -m MODULE WORDS` as `nproc` ranks on this machine; the exit code. `options` are fields of JobSpec."""
    attempt_dir.mkdir(parents=True)
    argv = (sys.executable, "-P", "-m", module, *words)
    job = JobSpec(argv, nproc, token_hex(8), threads, attempt_dir=str(attempt_dir), **options)
    return run(local(job))


def _start(command: Command, node: NodePlan, keep_open: Sequence[int]) -> subprocess.Popen[bytes]:
    # blocked, until the agent can handle them: forwarded too early, SIGINT would end it with a traceback
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    given: list[int] = []  # our standard input, if it is open: that of the agent is the lifeline
    with suppress(OSError):
        given += [os.dup(0)] if node.plain_store else []
    try:
        agent = subprocess.Popen(
            command.argv,
            env={**os.environ, **command.env},
            stdin=subprocess.PIPE,
            pass_fds=(*keep_open, *given),
            start_new_session=True,
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for descriptor in given:
            os.close(descriptor)
    node = replace(node, keep_open=tuple(keep_open), stdin=given[0] if given else -1)
    assert agent.stdin is not None
    with suppress(BrokenPipeError):  # it ended at once; its exit code says so
        agent.stdin.write(msgspec.json.encode(node) + b"\n")
        agent.stdin.flush()  # and stays open: the lifeline
    return agent


def _wait(agent: subprocess.Popen[bytes], inbox: socket.socket, grace_seconds: float, margin_seconds: float) -> int:
    stopped_by: signal.Signals | None = None
    deadline = math.inf
    while (code := agent.poll()) is None:
        left = deadline - time.monotonic()
        if stopped_by is not None and left <= 0:  # it does not react: stopped itself, say
            agent.kill()
            return 128 + stopped_by
        select.select([inbox], [], [], None if deadline == math.inf else left)
        received = read_inbox(inbox)
        if not received:
            continue
        if stopped_by is None:
            stopped_by, deadline = received[0], time.monotonic() + grace_seconds + margin_seconds
            time.sleep(SAME_REQUEST_SECONDS)
            read_inbox(inbox)
        else:
            deadline = min(deadline, time.monotonic() + margin_seconds)
        agent.send_signal(received[0])
        agent.send_signal(signal.SIGCONT)
    if code < 0:
        name = signal.Signals(-code).name
        say(f"agent 0 (pid {agent.pid}) was killed by {name}; its workers are being stopped with it")
        return 128 - code
    return code


def _end(agent: subprocess.Popen[bytes]) -> None:
    """Close the lifeline if the agent still runs, and wait; kill it if it does not end by itself."""
    assert agent.stdin is not None
    with suppress(BrokenPipeError):
        agent.stdin.close()
    try:
        agent.wait(LIFELINE_GRACE_SECONDS + 1.0)
    except subprocess.TimeoutExpired:
        agent.kill()
        agent.wait()
