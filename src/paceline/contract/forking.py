"""What an agent and its preloader, the process that workers are forked from, say to each other.

    agent                                   preloader (worker/preload.py)
    starts it, as it would start a worker   imports what every worker imports
                                            -> READY, or why no worker can be forked from it
    ForkOrder, with descriptors                 -> the worker's pid, when it is the agent's child
    a byte, once it knows the worker        the worker begins; without that byte it ends

All over one socket that keeps messages apart; nothing in it is executed or unpickled.
"""

import os
from collections.abc import Mapping

import msgspec

READY = b"ready"
MAX_ORDER_BYTES = 1 << 20
MAX_DESCRIPTORS = 253  # that the kernel sends at once
OWN = ("PACELINE_", "TORCHELASTIC_", "ROLE_", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
RANKS = (
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT"),
)


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
    """The part of a worker's environment that libraries may read while they are imported: the same for all ranks.

    Left out is what differs between ranks or starts, and is only read when a process group is made.
    """
    return {name: value for name, value in env.items() if name not in RANKS and not name.startswith(OWN)}
