"""How a worker says that it fails, and which errors only say that others are gone."""

import re
from collections.abc import Iterator
from typing import Any

import msgspec

from paceline.errors import ExitCode, ToldElsewhere

GOOD_ENDS = (ExitCode.DONE, ExitCode.SAVED)

PEER_LOST = (  # lower case
    "connection closed by peer",
    "connection reset by peer",
    "connection refused",
    "connection was likely closed",  # TCPStore's client
    "broken pipe",
    "timed out waiting",
    "application timeout caused pair closure",
    "connectfullmesh",
    "wait timeout after",  # TCPStore.wait
    "socket timeout",
    "client socket has timed out",
    "failed to recv, got 0 bytes",
    "ncclremoteerror",
    "communicator was aborted",
    "watchdog caught collective operation timeout",
    "remote process exited or there was a network error",
)
LOADER_KILLED = re.compile(r"DataLoader worker .* killed by signal: Killed")  # torch's words for it
TRANSPORT_TYPES = frozenset({"DistNetworkError", "DistStoreError"})
LIBRARY_TYPES = frozenset({"RuntimeError", "DistError", "DistBackendError"})  # torch raises lost peers as these, too


class Failure(msgspec.Struct, frozen=True):
    """How a worker failed, in its own words: the content of error-<rank>.json."""

    rank: int
    host: str
    pid: int
    exit_code: int
    type: str
    message: str
    traceback: str  # empty where the message says it all
    victim: bool
    monotonic_seconds: float  # when it was caught, on the host's CLOCK_MONOTONIC: comparable on one host only
    code: str = ""  # with the fields, of an error of paceline's
    fields: dict[str, Any] = {}


def speaks_of_lost_peer(text: str) -> bool:
    """Whether a message or the end of a log says that another rank is gone."""
    text = text.lower()
    return any(phrase in text for phrase in PEER_LOST)


def is_victim(error: BaseException) -> bool:
    """Whether `error`, or what it was raised from, only says that other ranks are gone.

    Judged by names, for torch must stay unimported.
    """
    return any(_says_peers_are_gone(cause) for cause in _causes(error))


def _causes(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:  # a hand-made chain may be a ring
        seen.add(id(current))
        yield current
        current = current.__cause__


def _says_peers_are_gone(error: BaseException) -> bool:
    if isinstance(error, ToldElsewhere):
        return True
    names = {base.__name__ for base in type(error).__mro__}
    if names & TRANSPORT_TYPES:
        return "failed to listen" not in str(error)  # the store's own side of it: nobody else is to blame
    # A bare ConnectionResetError is not torch's: the user's own download failed, and that is a culprit.
    return bool(names & LIBRARY_TYPES) and speaks_of_lost_peer(str(error))
