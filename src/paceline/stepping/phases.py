"""The phases of a loop's body that updates models one after the other.

A body that goes on computing after an optimizer's step (a GAN's) needs what that step has made of the model, which
only the last micro-batch can have. So it runs over all micro-batches once for each such part, its phase:

    optimizer_d.zero_grad(); s.backward(loss_d); optimizer_d.step()      # pass 1: this counts, over all micro-batches
    optimizer_g.zero_grad(); s.backward(loss_g); optimizer_g.step()      # pass 2: this counts

The loop is the user's, so whatever it does in a body is either right for every number of bodies, or refused in words.
A task's body has one phase.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.stepping.bodies import Body
from paceline.stepping.trainee import Trainee


class Phases:
    """Of the bodies of one rank; in a step of a single micro-batch all of them count at once."""

    def __init__(self, parts: Sequence[Trainee]) -> None:
        self._parts = parts
        self.number = 1
        """of phases in a body, as far as is known"""
        self.alone = True
        """whether this rank computes the step in one body"""

    def begin(self, bodies: int) -> None:
        """A step begins."""
        self.alone, self._pass = bodies == 1, 0
        self._buffers: dict[tuple[int, int, int], list[Tensor]] = {}

    def again(self) -> bool:
        """After a pass over the micro-batches: whether they are gone through once more, for the next phase."""
        self._pass += 1
        return not self.alone and self._pass < self.number

    def counts(self, body: Body) -> bool:
        """Whether the phase that the body is in is the one that this pass is for."""
        return self.alone or body.phase == self._pass

    def is_last(self, body: Body) -> bool:
        """Whether it is the last body of the last pass."""
        return body.is_last and (self.alone or self._pass == self.number - 1)

    def keep_buffers(self, body: Body) -> None:
        """At the end of a phase: keep the buffers as its own pass has left them; in a later pass put them back."""
        if self.alone:
            return
        key = (body.work.virtual_rank, body.work.part, len(body.stepped))
        now = [buffer for part in self._parts for buffer in part.replica.model.buffers()]
        if body.phase == self._pass:
            self._buffers[key] = [buffer.clone() for buffer in now]
        elif body.phase < self._pass:
            with torch.no_grad():
                for buffer, then in zip(now, self._buffers[key], strict=True):
                    buffer.copy_(then)
