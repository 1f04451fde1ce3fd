"""Start one node's workers: their environment, where their output goes, and what they inherit."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from paceline.launch.job import NodePlan
from paceline.launch.procfs import read_process
from paceline.launch.supervise import Member

OURS = "PACELINE_"


class Worker:
    """One worker, and the relay of its error output if it has one."""

    def __init__(
        self, rank: int, process: subprocess.Popen[bytes], log: Path, relay: threading.Thread | None, record: int
    ) -> None:
        seen = read_process(process.pid)
        self.rank, self.process, self.log, self.relay, self.record = rank, process, log, relay, record
        self.member = Member(rank, process.pid, seen.start if seen else 0)

    def log_tail(self, size_bytes: int) -> str:
        """The end of its log."""
        if self.relay is not None and self.process.poll() is not None:
            self.relay.join(0.2)  # its last words may still be in the pipe
        try:
            with self.log.open("rb") as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - size_bytes))
                return file.read().decode(errors="replace")
        except OSError:
            return ""

    def finish(self) -> None:
        """Wait until its last words are on the screen; they come before the verdict."""
        if self.relay is not None:
            self.relay.join(1.0)


def environment(plan: NodePlan, local_rank: int, store: socket.socket | None, record: int) -> dict[str, str]:
    """What a worker sees: torchrun's variables, the whole contract between launching and training, and ours."""
    rank = plan.first_rank + local_rank
    port = store.getsockname()[1] if store is not None else plan.port
    env = {name: value for name, value in os.environ.items() if not name.startswith(OURS)}
    env |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(plan.world_size),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(plan.nproc),
        "GROUP_RANK": str(plan.node),
        "MASTER_ADDR": plan.master_addr,
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": str(plan.threads),
        "PACELINE_AGENT_PID": str(os.getpid()),
        "PACELINE_RUN_ID": plan.run_id,
        "PACELINE_GENERATION": "0",
        "PACELINE_ATTEMPT_DIR": plan.attempt_dir,
        "PACELINE_RECORD_FD": str(record),
    }
    # a killed worker takes unwritten lines with it, a crashed one its Python stack; a user's own setting stays
    env.setdefault("PYTHONUNBUFFERED", "1")
    env.setdefault("PYTHONFAULTHANDLER", "1")
    if plan.master_addr == "127.0.0.1" and sys.platform == "linux":
        # One host: gradients stay on the loopback, and a host whose own name does not resolve does no harm.
        env.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if rank == 0 and store is not None:
        env["PACELINE_STORE_FD"] = str(store.fileno())
    return env


def start_workers(plan: NodePlan, store: socket.socket | None) -> Iterator[Worker]:
    """Start them one by one, rank 0 first, whose stdout is the agent's own: a terminal stays a terminal.

    Main thread only: the kernel takes a thread's end for the parent's (worker.die_with_parent).

    Raises:
        OSError: when the command or a log file cannot be opened.
    """
    for local_rank in range(plan.nproc):
        rank = plan.first_rank + local_rank
        log = Path(plan.attempt_dir) / f"rank-{rank}.log"
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        live = rank == 0
        # Memory, not a file: a worker that fails because the disk is full must still be able to say so.
        record = os.memfd_create(f"paceline-record-{rank}")
        try:
            process = subprocess.Popen(
                plan.argv,
                env=environment(plan, local_rank, store, record),
                stdin=subprocess.DEVNULL,
                stdout=None if live else descriptor,
                stderr=subprocess.PIPE if live else descriptor,
                pass_fds=[record, store.fileno()] if live and store is not None else [record],
                start_new_session=True,
            )
        except OSError:
            os.close(descriptor)
            os.close(record)
            raise
        relay = None
        if live:
            relay = threading.Thread(target=_relay, args=(process, descriptor), daemon=True)
            relay.start()
        else:
            os.close(descriptor)
        yield Worker(rank, process, log, relay, record)


def _relay(process: subprocess.Popen[bytes], log: int) -> None:
    """Pass rank 0's error output on to the screen and into its log, until nobody can write any more."""
    assert process.stderr is not None
    while data := os.read(process.stderr.fileno(), 65536):
        for target in (2, log):
            with suppress(OSError):  # the terminal is gone or the disk is full: the worker must not feel it
                os.write(target, data)
    os.close(log)
