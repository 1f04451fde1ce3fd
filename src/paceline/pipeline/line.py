"""A pipeline as one of its stages sees it: it sends down what it computes, and up the gradients of what it was sent."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.pipeline.cuts import CutPoint
from paceline.pipeline.schedule import Action, Schedule, actions
from paceline.pipeline.stages import ModelStage, Passing
from paceline.protocol.evidence import Phase
from paceline.rank.world import World


class Pipeline:
    """This rank's stage, and its neighbours.

    Each direction has a process group of its own: on a GPU the messages between two ranks of one group wait for each
    other in the order of their calls, and one on its way down would keep one on its way up from arriving, for ever.
    """

    def __init__(
        self,
        world: World,
        model: nn.Module,
        cuts: Sequence[CutPoint],
        *,
        draws: bool,
        schedule: Schedule,
        names: dict[str, list[str]],
        called: Mapping[str, str],
    ) -> None:
        """The model is cut at `cuts`, one fewer than there are ranks along the pipeline (a collective of all ranks)."""
        self.names = names
        """what `checkpoint.export.state_names` gave of the whole model"""
        self.called = called
        """by its name in the whole model's state_dict, what a tensor is saved as: one that is tied has several"""
        along = world.along("pipeline")
        assert world.mesh is not None
        self._device = world.device
        self._schedule: Schedule = schedule
        self._on_its_way = deque[tuple[Any, Tensor]]()
        for members in sorted({world.mesh.peers(rank, ("pipeline",)) for rank in range(world.size)}):
            down, up = (dist.new_group(members, group_desc=f"pipeline of the mesh, {way}") for way in ("down", "up"))
            if world.rank in members:
                assert isinstance(down, dist.ProcessGroup)
                assert isinstance(up, dist.ProcessGroup)
                self._down, self._up = down, up
        self.number, self.stages = along.rank, along.size
        begin, end = [None, *cuts, None][along.rank : along.rank + 2]
        self.stage = ModelStage(
            model, begin, end, world.device, take=self._from_above, send=self._send_down, draws=draws
        )
        self.sent_bytes = 0
        self.enter: Callable[[Phase], object] | None = None
        """in a step: told what begins, so that waiting for other stages is seen as such"""

    @property
    def is_last(self) -> bool:
        """Whether the model's result, and so the loss, is here."""
        return self.number == self.stages - 1

    def actions(self, microbatches: int) -> list[Action]:
        """What this stage does in a step, in order."""
        return actions(self._schedule, self.number, self.stages, microbatches)

    def backward(self, run: Passing, propagate: Callable[[], object] | None) -> None:
        """Back-propagate a run: on the last stage its loss, by `propagate`; on the others what the next one sends."""
        if propagate is not None:
            propagate()
        elif run.sent:
            torch.autograd.backward(run.sent, [self._from_below(one) for one in run.sent])
        for like, gradient in zip(run.taken, run.gradients, strict=True):
            self._send(torch.zeros_like(like, device=self._device) if gradient is None else gradient, -1, self._up)
        run.forget()

    def settle(self) -> None:
        """Wait until all that was sent has arrived."""
        while self._on_its_way:
            self._on_its_way.popleft()[0].wait()

    def _send_down(self, tensor: Tensor) -> None:
        # an evaluation has no backward that would hold it up; in a step, waiting here could be waiting for each other
        while self.enter is None and len(self._on_its_way) > 4 * self.stages:
            self._on_its_way.popleft()[0].wait()
        self._send(tensor, 1, self._down)

    def _from_above(self, like: Tensor) -> Tensor:
        return self._receive(like, -1, self._down, Phase.FORWARD)

    def _from_below(self, like: Tensor) -> Tensor:
        return self._receive(like, 1, self._up, Phase.BACKWARD)

    def _send(self, tensor: Tensor, step: int, group: dist.ProcessGroup) -> None:
        sent = tensor.to(self._device).contiguous()
        if sent.numel() and (work := dist.isend(sent, group=group, group_dst=self.number + step)) is not None:
            self._on_its_way.append((work, sent))
            self.sent_bytes += sent.nbytes

    def _receive(self, like: Tensor, step: int, group: dist.ProcessGroup, then: Phase) -> Tensor:
        received = torch.empty(like.shape, dtype=like.dtype, device=self._device)
        if received.numel():
            if self.enter is not None:
                self.enter(Phase.SYNC)
            dist.recv(received, group=group, group_src=self.number + step)
            if self.enter is not None:
                self.enter(then)
        return received
