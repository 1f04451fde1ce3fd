"""A rank that another launcher started attaches to an agent of its node: `paceline watchover`.

Local rank 0 starts the agent, not as its child: the script must not find a child that it has not made, and the agent
outlives a rank that dies. Whatever fails here is reported once, and the script runs on.
"""

from __future__ import annotations

import os
import select
import socket
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any

import msgspec
from msgspec.structs import replace

from paceline.contract.attach import Goodbye, Hello, Meeting, agent_address, peer_pid, receive, send
from paceline.contract.birth import restarts
from paceline.contract.box import make_box
from paceline.contract.job import NodePlan
from paceline.observe.terminal import say
from paceline.worker import recorder
from paceline.worker.foreign import job_token
from paceline.worker.guard import Guard

FREE_SECONDS = 3.0  # for the agent of an earlier start to leave the name
SEEK_SECONDS, LOOK_SECONDS = 60.0, 0.1
LEAVE_SECONDS = 1.5
PROBE_SECONDS, STORE_SECONDS = 2.0, 10.0


def attach_to_agent(plan: NodePlan, env: Mapping[str, str]) -> None:
    """Show this process to its node's agent from now on; local rank 0 starts that first, by `plan`. Never raises.

    `env` has torchrun's variables.
    """
    # torch reads it when it is imported: looking at its 2000 operations would take 20 ms each time
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "256")
    rank, is_first = int(env["RANK"]), env["LOCAL_RANK"] == "0"
    address = agent_address(env, job_token(env))
    try:
        box, record = make_box(rank), os.memfd_create(f"paceline-record-{rank}")
        if is_first:
            start_agent(address, plan)
        attachment = Attachment(rank, address, (box, record), first=is_first, several_nodes=plan.nodes > 1)
        guard = Guard.observed(box, record).start().watch_torch()
        guard.leave = attachment.leave
    except Exception as error:
        if is_first:
            say(f"warning: the ranks of this node are not watched over: {error}")


def start_agent(address: bytes, plan: NodePlan) -> None:
    """Start the agent of this node, with a socket at `address` that listens already; raises OSError."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with listener, os.fdopen(os.memfd_create("paceline-plan"), "w+b") as plan_file:
        deadline = time.monotonic() + FREE_SECONDS
        while listener.getsockname() != address:
            try:
                listener.bind(address)
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)
        listener.listen(128)
        plan_file.write(msgspec.json.encode(replace(plan, attach=listener.fileno())) + b"\n")
        plan_file.seek(0)
        if child := os.fork():  # there are no threads yet: nothing of the script has run
            os.waitpid(child, 0)
            return
        try:
            os.setsid()  # no signal to this rank's group or terminal is one to the agent
            if os.fork() == 0:
                os.dup2(plan_file.fileno(), 0)
                os.dup2(2, 1)  # what the agent prints is about the job, no output of it
                os.set_inheritable(listener.fileno(), True)
                os.execv(sys.executable, [sys.executable, "-P", "-m", "paceline.launch.agent"])
        finally:
            os._exit(1)


class Attachment:
    """This rank's connection to its node's agent, and a thread that listens to it."""

    def __init__(
        self, rank: int, address: bytes, descriptors: tuple[int, int], *, first: bool, several_nodes: bool
    ) -> None:
        """`descriptors` are of this rank's box and record; the `first` of its node speaks for all of them."""
        self._rank, self._address, self._descriptors = rank, address, descriptors
        self._first, self._several_nodes = first, several_nodes
        self._over = False
        self._connection = self._connect()
        threading.Thread(target=self._listen, name="paceline-attach", daemon=True).start()

    def leave(self, code: int) -> None:
        """Tell the agent that this rank ends now, and wait until it has heard that."""
        self._over = True
        with suppress(OSError):
            if self._connection is not None:
                send(self._connection, Goodbye(code))
                select.select([self._connection], [], [], LEAVE_SECONDS)

    def _connect(self) -> socket.socket | None:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            connection.connect(self._address)
            if not peer_pid(connection):
                raise PermissionError
            send(connection, Hello(self._rank), self._descriptors)
        except OSError:
            connection.close()
            return None
        return connection

    def _listen(self) -> None:
        deadline = time.monotonic() + SEEK_SECONDS
        while self._connection is None:
            if time.monotonic() > deadline:
                return  # the agent reports who has not come
            time.sleep(LOOK_SECONDS)
            self._connection = self._connect()
        if self._first and self._several_nodes and self._rank:
            threading.Thread(target=self._meet, args=(None,), name="paceline-meet", daemon=True).start()
        while isinstance(message := receive(self._connection)[0], Meeting):
            threading.Thread(target=self._meet, args=(message,), name="paceline-meet", daemon=True).start()
        if self._first and not self._over:
            say("warning: the agent that watches over this node is gone; its hangs are no longer judged")

    def _meet(self, meeting: Meeting | None) -> None:
        """Show the other nodes' first ranks where node 0's agent is, or learn it, through a store that all share.

        In a thread and over connections of its own: the main thread may wait in a store forever.
        """
        key = f"paceline/agent/{restarts()}"
        stores: list[Any] = [None, None]
        try:
            while stores[1] is None or meeting is None:  # not all can be reached at the port: they have met elsewhere
                if recorder.distributed() is not None:
                    stores = [one or make() for one, make in zip(stores, (_store_at_port, _default_store), strict=True)]
                for store in filter(None, stores):
                    if meeting is not None:
                        store.set(key, msgspec.json.encode(meeting))
                    elif store.check([key]) and self._connection is not None:
                        return send(self._connection, msgspec.json.decode(store.get(key), type=Meeting))
                time.sleep(LOOK_SECONDS)
        except Exception as error:
            say(f"warning: rank {self._rank} cannot connect the agents of the nodes: {error}")


def _store_at_port() -> Any:
    """A client of the store at the launcher's address, as soon as there is one: before the script comes to it."""
    address, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    try:
        socket.create_connection((address, int(port)), PROBE_SECONDS).close()  # torch would complain aloud
        make = sys.modules["torch.distributed"].TCPStore
        return make(address, int(port), None, False, timedelta(seconds=STORE_SECONDS), wait_for_workers=False)
    except (OSError, ValueError, RuntimeError):
        return None


def _default_store() -> Any:
    """The store of the default group, if the script has made one; a clone, for this thread alone."""
    module: Any = recorder.distributed()
    return module._get_default_store().clone() if module.is_initialized() else None
