"""How a rank that others have started and its node's observer find each other, and what they say: `paceline watchover`.

    rank -> observer       Introduction, with two descriptors: its box, and its record of failure
    observer -> rank       Meeting, on node 0 of several, to local rank 0: it shows that to the other nodes' ranks
    rank -> observer       the same Meeting, on the other nodes
    rank -> observer       Leaving, as its last word; it waits a little for the answer, the same

They meet at a Unix socket without a file. Anybody may know its name, so each asks the kernel whose the other end is.
"""

import hashlib
import os
import socket
import struct
from collections.abc import Mapping, Sequence

import msgspec

MAX_MESSAGE_BYTES = 1 << 16


class Introduction(msgspec.Struct, frozen=True, tag=True):
    """Who comes."""

    rank: int


class Meeting(msgspec.Struct, frozen=True, tag=True):
    """Where the observers of several nodes meet, and the secret by which they know each other."""

    addresses: tuple[str, ...]
    port: int
    secret: str


class Leaving(msgspec.Struct, frozen=True, tag=True):
    """That it ends now: whoever did not start it might not learn how. And a launcher may end the observer with it."""

    code: int


Word = Introduction | Meeting | Leaving


def observer_address(env: Mapping[str, str], job: str) -> bytes:
    """The name of the socket: the same for all ranks of a job on this node, and for no other job's.

    `env` has torchrun's variables, `job` is what all ranks of the job have in common.
    """
    names = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT", "GROUP_RANK", "SLURM_NODEID")
    words = [str(os.geteuid()), job, *(env.get(name, "") for name in names)]
    return b"\0paceline-watchover-" + hashlib.sha256("\0".join(words).encode()).hexdigest()[:32].encode()


def own_peer(connection: socket.socket) -> int:
    """The process at the other end, if it is of the same user; else 0."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, user, _ = struct.unpack("3i", credentials)
    return max(0, pid) if user == os.geteuid() else 0


def send_word(connection: socket.socket, word: Word, descriptors: Sequence[int] = ()) -> None:
    """Send it; raises OSError."""
    socket.send_fds(connection, [msgspec.json.encode(word)], descriptors)


def receive_word(connection: socket.socket) -> tuple[Word | None, list[int]]:
    """What has come, and the descriptors that came with it; None: the other end is gone, or talks nonsense.

    Raises:
        BlockingIOError: nothing has.
    """
    data, descriptors, _, _ = socket.recv_fds(connection, MAX_MESSAGE_BYTES, 2, socket.MSG_CMSG_CLOEXEC)
    try:
        return msgspec.json.decode(data, type=Word), descriptors
    except msgspec.MsgspecError:
        return None, descriptors
