"""A worker's certificate of birth: all that its agent tells it beside torchrun's variables, in one of ours, read once.

A worker takes it out of the environment, for its own children are not the agent's: they neither die with it nor speak
to it. Descriptors are numbers of open files that the worker inherits; -1 is none.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from typing import ClassVar

import msgspec

ROOM = "paceline.worker."  # what runs in a rank
BOOTSTRAP = f"{ROOM}bootstrap"  # runs any script as a worker of our agent
BIRTH = "PACELINE_BIRTH"


class WorkerBirth(msgspec.Struct, frozen=True, omit_defaults=True):
    """A worker's certificate of birth."""

    _here: ClassVar[WorkerBirth | None] = None

    agent_pid: int
    attempt_dir: str = ""
    generation: int = 0  # how often the run was restarted before
    record: int = -1  # memory, into which it writes why it fails
    box: int = -1  # memory, in which it shows what it does: see `contract.box`
    store: int = -1  # where its ranks meet: memory with a FileStore in it, or rank 0's listening socket
    snapshots: tuple[tuple[int, int], ...] = ()  # two memory files for each rank of the node, kept over restarts
    temporary: str = ""  # a folder that goes with the agent, however it ends
    guarded: bool = True  # False: no hang guard, --stall-after off
    shares_gradients: bool = False  # DDP's, through shared memory: --collectives shared
    preload: int = -1  # of what workers are forked from, and is none: the socket on which the agent orders them

    @classmethod
    def here(cls, env: MutableMapping[str, str] = os.environ) -> WorkerBirth | None:
        """This process's; None in one that no agent of ours has started."""
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
