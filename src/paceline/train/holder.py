"""What has a state to be saved."""

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.checkpoint.state import Held
from paceline.stepping.trainee import Trainee
from paceline.worker.world import World


@dataclass(frozen=True)
class Holder:
    """All models of a training, as one state to be saved."""

    parts: Sequence[Trainee]
    world: World
    virtual_ranks: int

    @property
    def sharded(self) -> bool:
        """Whether a rank holds a share only of any of them."""
        return any(part.replica.sharded for part in self.parts)

    def state(self) -> list[Held]:
        """All tensors of all models."""
        return [held for part in self.parts for held in part.state()]
