"""The loader of a session for a stream, a dataset without a length."""

from collections.abc import Iterable
from typing import Any

from torch.utils.data import DataLoader

from paceline.data.loader import LoadingOptions
from paceline.data.plan import BatchPlan, LastBatch
from paceline.data.streams import ENDLESS_NUM_SAMPLES, StreamBatchPlan
from paceline.errors import UsageError
from paceline.rank.world import World
from paceline.sessions.lifecycle import SessionRun
from paceline.sessions.loader import IterateLoader, Loader
from paceline.sessions.order import consume_base_seed
from paceline.train.streaming import GlobalBatchStream


def make_stream_loader(
    iterate: IterateLoader,
    stream: Any,
    run: SessionRun,
    split: bool,
    loading: LoadingOptions,
    dataloader: DataLoader[Any] | None,
    *,
    batch: int,
    accumulation: int,
    shuffle: bool | None,
    last_batch: LastBatch,
    sets_epoch: bool,
) -> Loader:
    if not isinstance(stream, Iterable):
        raise UsageError(code="not-data", kind=type(stream).__name__)
    if shuffle:
        raise UsageError(code="stream-shuffled")
    if last_batch == "pad":
        raise UsageError(code="stream-padded")
    if split and loading.num_workers > 1:
        raise UsageError(code="stream-in-processes", value=loading.num_workers)
    parts = run.virtual_ranks if split else max(1, loading.num_workers)
    plan = StreamBatchPlan(
        ENDLESS_NUM_SAMPLES, batch, run.virtual_ranks, accumulation, run.definition["seed"], False, last_batch,
        parts_of_stream=parts, is_split=split, sets_epoch=sets_epoch,
    )  # fmt: skip
    return StreamLoader(iterate, stream, run, plan, loading, dataloader)


class StreamLoader(GlobalBatchStream, Loader):
    """Batches of a stream, which has no length."""

    plan: StreamBatchPlan  # pyright: ignore[reportIncompatibleVariableOverride]

    is_stream = True

    def __init__(
        self,
        iterate: IterateLoader,
        stream: Any,
        run: SessionRun,
        plan: StreamBatchPlan,
        loading: LoadingOptions,
        dataloader: DataLoader[Any] | None,
    ) -> None:
        """`dataloader`: of the script, which reads the stream."""
        self._dataloader, self._has_workers = dataloader, False
        Loader.__init__(self, iterate, stream, plan, loading, None)
        GlobalBatchStream.__init__(self, stream, plan, loading, run.world, run.print)

    def __len__(self) -> int:
        """Raises TypeError: the length is unknown."""
        raise TypeError("a stream has no length: count steps, and end the loop by `break` or at the end of the stream")

    def draw_epoch_plan(
        self, world: World, saved_position: dict[str, Any] | None, start: int = 0, *, is_training: bool = False
    ) -> BatchPlan:
        """The plan. The stream uses the state of a checkpoint when it is read."""
        if self._dataloader is not None and not self._has_workers:
            consume_base_seed(self._dataloader)
            self._has_workers = self._dataloader.persistent_workers
        self.saved = saved_position or {}
        return self.plan
