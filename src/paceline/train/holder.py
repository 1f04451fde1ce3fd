"""What has a state to be saved."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from paceline.checkpoint.state import Held
from paceline.worker.world import World


class Holder(Protocol):
    """What has a state to be saved: a replica, or several of them."""

    @property
    def world(self) -> World:
        """This rank's place."""
        ...

    @property
    def virtual_ranks(self) -> int:
        """See Replica."""
        ...

    @property
    def sharded(self) -> bool:
        """See Replica."""
        ...

    @property
    def state(self) -> Callable[[], list[Held]]:
        """See Replica."""
        ...
