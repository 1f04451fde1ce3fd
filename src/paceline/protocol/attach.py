"""How a rank that another launcher started attaches to its node's agent: `paceline watchover`.

    rank -> agent    Hello, with two descriptors: its box, and its record of failure
    agent -> rank    Meeting, on node 0 of several, to local rank 0, which shows it to the other nodes' ranks
    rank -> agent    the same Meeting, on the other nodes
    rank -> agent    Goodbye, its last message; it waits until the agent closes the connection

They meet at a Unix socket without a file. Its name is no secret, so each end asks the kernel for the user of the other.
"""

import hashlib
import os
import socket
import struct
from collections.abc import Mapping, Sequence

import msgspec

MAX_MESSAGE_BYTES = 1 << 16


class Hello(msgspec.Struct, frozen=True, tag=True):
    """The rank that comes."""

    rank: int


class Meeting(msgspec.Struct, frozen=True, tag=True):
    """Where node 0's agent listens, and the secret by which the nodes' agents know each other."""

    addresses: tuple[str, ...]
    port: int
    secret: str


class Goodbye(msgspec.Struct, frozen=True, tag=True):
    """The exit code of a rank that ends now. The kernel tells it to the parent only, and a launcher may end the agent
    together with the rank.
    """

    code: int


Message = Hello | Meeting | Goodbye


def agent_address(env: Mapping[str, str], job: str) -> bytes:
    """The name of the socket: the same for all ranks of a job on this node, and different for every other job.

    `env` has torchrun's variables, `job` is what all ranks of the job have in common.
    """
    names = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT", "GROUP_RANK", "SLURM_NODEID")
    words = [str(os.geteuid()), job, *(env.get(name, "") for name in names)]
    return b"\0paceline-watchover-" + hashlib.sha256("\0".join(words).encode()).hexdigest()[:32].encode()


def peer_pid(connection: socket.socket) -> int:
    """The process at the other end, if it is of the same user; else 0."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, user, _ = struct.unpack("3i", credentials)
    return max(0, pid) if user == os.geteuid() else 0


def send(connection: socket.socket, message: Message, descriptors: Sequence[int] = ()) -> None:
    """Send it; raises OSError."""
    socket.send_fds(connection, [msgspec.json.encode(message)], descriptors)


def receive(connection: socket.socket) -> tuple[Message | None, list[int]]:
    """What has come, and the descriptors that came with it; None: the other end is gone, or sent something else.

    Raises:
        BlockingIOError: nothing has come.
    """
    try:
        data, descriptors, _, _ = socket.recv_fds(connection, MAX_MESSAGE_BYTES, 2, socket.MSG_CMSG_CLOEXEC)
    except BlockingIOError:
        raise
    except OSError:
        return None, []
    try:
        return msgspec.json.decode(data, type=Message), descriptors
    except msgspec.MsgspecError:
        return None, descriptors
