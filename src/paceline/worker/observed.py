"""A rank that another launcher has started makes itself known to its node's observer: `paceline watchover`.

Local rank 0 starts the observer (`agent/observer.py`), as nobody's child: the script must not find a child that it has
not made, and the observer outlives a rank that dies. Whatever goes wrong here is said once, and the script runs on.
"""

from __future__ import annotations

import os
import select
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import msgspec

from paceline.contract.birth import restarts
from paceline.contract.box import make_box
from paceline.contract.introduction import (
    Introduction,
    Leaving,
    Meeting,
    observer_address,
    own_peer,
    receive_word,
    send_word,
)
from paceline.contract.node_plan import NodePlan
from paceline.observe.terminal import say
from paceline.worker import recorder
from paceline.worker.foreign import job_token
from paceline.worker.guard import Guard

OBSERVER = "paceline.agent.observer"
FREE_SECONDS = 3.0  # for the observer of an earlier start to leave the name
SEEK_SECONDS, LOOK_SECONDS = 60.0, 0.1
LEAVE_SECONDS = 1.5
PROBE_SECONDS, STORE_SECONDS = 2.0, 10.0


def begin(plan: NodePlan, options: Sequence[str], env: Mapping[str, str]) -> None:
    """Show this process to its node's observer, from now on; local rank 0 starts that first. Never raises.

    `plan` is the observer's, `options` its further words; `env` has torchrun's variables.
    """
    # torch reads it when it is imported: looking at its 2000 operations would take 20 ms each time
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "256")
    rank, is_first = int(env["RANK"]), env["LOCAL_RANK"] == "0"
    address = observer_address(env, job_token(env))
    try:
        box, record = make_box(rank), os.memfd_create(f"paceline-record-{rank}")
        if is_first:
            start_observer(address, plan, options)
        presence = Presence(rank, address, (box, record), first=is_first, several_nodes=plan.nodes > 1)
        presence.look()
        guard = Guard.observed(box, record).start(presence.look).watch_torch()
        guard.last_word = presence.leave
    except Exception as error:
        if is_first:
            say(f"warning: nobody watches over this node's ranks: {error}")


def start_observer(address: bytes, plan: NodePlan, options: Sequence[str]) -> None:
    """Start it, with a door that is open already; raises OSError."""
    door = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    told = os.memfd_create("paceline-plan")
    os.write(told, msgspec.json.encode(plan))
    os.lseek(told, 0, os.SEEK_SET)
    try:
        _bind(door, address)
        door.listen(128)
        if child := os.fork():  # there are no threads yet: nothing of the script has run
            os.waitpid(child, 0)
            return
        try:
            os.setsid()  # no signal to this rank's group or terminal is one to the observer
            if os.fork() == 0:
                os.dup2(told, 0)
                os.dup2(2, 1)  # what it prints are words about the job, no output of it
                os.set_inheritable(door.fileno(), True)
                command = [sys.executable, "-P", "-m", OBSERVER, str(door.fileno()), *options]
                os.execv(sys.executable, command)
        finally:
            os._exit(1)
    finally:
        door.close()
        os.close(told)


def _bind(door: socket.socket, address: bytes) -> None:
    deadline = time.monotonic() + FREE_SECONDS
    while True:
        try:
            return door.bind(address)
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


class Presence:
    """This rank's connection to its node's observer; `look` is for a thread that calls it now and then."""

    def __init__(
        self, rank: int, address: bytes, descriptors: tuple[int, int], *, first: bool, several_nodes: bool
    ) -> None:
        """`descriptors` are of this rank's box and record; the `first` of its node speaks for all of them."""
        self._rank, self._address, self._descriptors = rank, address, descriptors
        self._first, self._meets = first, first and several_nodes
        self._connection: socket.socket | None = None
        self._over = False
        self._meeting: Meeting | None = None  # what the other nodes shall know
        self._seeks_until = time.monotonic() + SEEK_SECONDS

    def look(self) -> None:
        """Do what is to be done now; never waits."""
        if self._over:
            return
        if self._connection is None:
            self._introduce()
        else:
            self._hear(self._connection)
        if self._meets and (self._rank or self._meeting) and recorder.distributed() is not None:
            self._meets = False
            threading.Thread(target=self._meet, name="paceline-meet", daemon=True).start()

    def leave(self, code: int) -> None:
        """Say that this rank ends now, and wait until that has been heard."""
        connection, self._over = None if self._over else self._connection, True
        with suppress(OSError):
            if connection is not None:
                send_word(connection, Leaving(code))
                select.select([connection], [], [], LEAVE_SECONDS)

    def _introduce(self) -> None:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.setblocking(False)
        try:
            connection.connect(self._address)
            if not own_peer(connection):
                raise PermissionError
            send_word(connection, Introduction(self._rank), self._descriptors)
            self._connection = connection
        except OSError:
            connection.close()
            self._over = time.monotonic() > self._seeks_until  # the observer says who has not come

    def _hear(self, connection: socket.socket) -> None:
        try:
            word, _ = receive_word(connection)
        except BlockingIOError:
            return
        except OSError:
            word = None
        if isinstance(word, Meeting):
            self._meeting = word
            return
        self._over = True
        connection.close()
        if self._first:
            say("warning: the observer of this node is gone: nobody judges its hangs any more")

    def _meet(self) -> None:
        """Tell the other nodes' first ranks where node 0's observer is, or learn it: by a store that all share.

        In a thread of its own, over connections of its own: the main thread may wait in a store for ever.
        """
        key = f"paceline/observer/{restarts()}"
        stores: list[Any] = [None, None]
        try:
            while stores[1] is None or self._rank:  # not all can be reached at the port; then they have met elsewhere
                stores = [one or make() for one, make in zip(stores, (_store_at_port, _default_store), strict=True)]
                for store in filter(None, stores):
                    if self._rank == 0:
                        store.set(key, msgspec.json.encode(self._meeting))
                    elif store.check([key]) and self._connection is not None:
                        return send_word(self._connection, msgspec.json.decode(store.get(key), type=Meeting))
                time.sleep(LOOK_SECONDS)
        except Exception as error:
            say(f"warning: rank {self._rank} cannot tell the nodes' observers of each other: {error}")


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
    """The store of the default group, where the script has made one; a clone, for this thread alone."""
    module: Any = recorder.distributed()
    return module._get_default_store().clone() if module.is_initialized() else None
