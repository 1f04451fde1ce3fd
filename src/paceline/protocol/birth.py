"""What an agent passes to its workers when they start, and its protocol with the preloader.

An agent starts a worker as a process of its own, or has the preloader fork it, a process that has imported everything:

    agent                                   preloader (rank/preload.py)
    starts it, as it would start a worker   imports what every worker imports
                                            -> READY, or why no worker can be forked from it
    ForkOrder, with descriptors                 -> the worker's pid, when it is the agent's child
    a byte, once it knows the worker        the worker begins; without that byte it ends

All messages use one socket that keeps them apart. Nothing in them is executed or unpickled.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from typing import ClassVar

import msgspec

ROOM = "paceline.rank."  # what runs in a rank
BOOTSTRAP = f"{ROOM}bootstrap"  # runs any script as a worker of our agent
BIRTH = "PACELINE_BIRTH"
READY = b"ready"
MAX_ORDER_BYTES = 1 << 20
MAX_DESCRIPTORS = 253  # that the kernel sends at once
LATE_PREFIXES = ("PACELINE_", "TORCHELASTIC_", "ROLE_", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
LATE = (  # variables that differ between ranks or starts, and are only read when a process group is made
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT"),
)


class WorkerBirth(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a worker gets from its agent beside torchrun's variables, in one environment variable.

    The worker removes the variable from its environment, because its own children are not the agent's: they neither
    die with it nor report to it. Descriptors are numbers of open files that the worker inherits; -1: none.
    """

    _here: ClassVar[WorkerBirth | None] = None

    agent_pid: int
    attempt_dir: str = ""
    generation: int = 0  # how often the run was restarted before
    record: int = -1  # memory, into which it writes why it fails
    box: int = -1  # memory, in which it shows what it does: see `protocol.box`
    store: int = -1  # where its ranks meet: memory with a FileStore in it, or rank 0's listening socket
    snapshots: tuple[tuple[int, int], ...] = ()  # two memory files for each rank of the node, kept over restarts
    temporary: str = ""  # a folder that goes with the agent, however it ends
    guarded: bool = True  # False: no hang guard, --stall-after off
    shares_gradients: bool = False  # DDP's, through shared memory: --collectives shared
    preload: int = -1  # of what workers are forked from, and is none: the socket on which the agent orders them

    @classmethod
    def here(cls, env: MutableMapping[str, str] = os.environ) -> WorkerBirth | None:
        """That of this process; None if no agent of paceline has started it."""
        if (text := env.pop(BIRTH, None)) is not None:  # not only once: a forked worker gets its own after its fork
            WorkerBirth._here = msgspec.json.decode(text, type=WorkerBirth)
        return WorkerBirth._here

    def variable(self) -> dict[str, str]:
        """The environment variable in which a worker finds it."""
        return {BIRTH: msgspec.json.encode(self).decode()}


def restarts(env: Mapping[str, str] = os.environ) -> int:
    """How often this process's run was restarted before, by our agent or by torchrun's."""
    birth = WorkerBirth.here()
    return birth.generation if birth is not None else int(env.get("TORCHELASTIC_RESTART_COUNT", "0"))


class ForkOrder(msgspec.Struct, frozen=True, array_like=True):
    """Fork a worker with this environment. The descriptors sent along are where it waits for its beginning, and these.

    `numbers` are those they get in the worker; 1 and 2 among them.
    """

    env: tuple[tuple[bytes, bytes], ...]
    numbers: tuple[int, ...]
    blocked_signals: tuple[int, ...]


def as_bytes(env: Mapping[str, str]) -> tuple[tuple[bytes, bytes], ...]:
    """An environment as the kernel has it: a value need not be UTF-8."""
    return tuple((os.fsencode(name), os.fsencode(value)) for name, value in env.items())


def at_import(env: Mapping[str, str]) -> dict[str, str]:
    """The part of a worker's environment that libraries may read while they are imported: the same for all ranks."""
    return {name: value for name, value in env.items() if name not in LATE and not name.startswith(LATE_PREFIXES)}
