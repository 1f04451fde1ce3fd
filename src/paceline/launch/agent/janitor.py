"""The last one out: a fork of the agent that outlives it, and ends what one killed with SIGKILL leaves behind.

Workers die with their agent by the kernel's hand (worker.attach), but a program that a worker had started does not,
and with the launcher killed too nobody would be left to end it. The janitor sleeps on a pipe that ends with the agent.
"""

import os
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path

from paceline.contract.orders import STOP_SIGNALS
from paceline.host.sweep import sweep_recorded


def start_janitor(not_kept: Sequence[int] = (), temporary: str = "") -> int:
    """Fork it; return the descriptor that keeps it asleep as long as this process lives.

    Call it before there are threads, sockets or children: a fork holds everything open that its parent has. It closes
    `not_kept`, what the run holds as long as it lives, at once; at the end it removes the folder `temporary`.
    """
    asleep, awake = os.pipe()
    agent_pid = os.getpid()
    if os.fork():
        os.close(asleep)
        return awake
    try:
        os.setsid()
        os.close(awake)
        for descriptor in not_kept:
            os.close(descriptor)
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        nowhere = os.open(os.devnull, os.O_RDWR)
        for standard in (0, 1, 2):  # or a pipe that reads the agent's output would wait for the janitor, too
            os.dup2(nowhere, standard)
        told = b""
        while data := os.read(asleep, 4096):
            told += data
        for folder in {*told.split(b"\0")} - {b""}:
            sweep_recorded(Path(os.fsdecode(folder)), agent_pid)
        if temporary:
            shutil.rmtree(temporary, ignore_errors=True)
    finally:
        os._exit(0)  # never back into the agent's code


def tell_janitor(descriptor: int, attempt_dir: str) -> None:
    """Say where the workers that are about to be started will be recorded."""
    os.write(descriptor, os.fsencode(attempt_dir) + b"\0")
