"""What a set of processes is asked to measure, and what it found: plain data between command and workers."""

import msgspec

ORDER, CONFIG, CHUNKS, RUNNING = "order.json", "config.toml", "chunks.jsonl", "running.json"
LOOKED_AT = 3  # first steps in which memory and bytes are counted: the least warm-up
NO_EXCHANGE = "no exchange"
"""the limit: every rank trains alone on its share; the same computation without any communication of gradients"""


class Candidate(msgspec.Struct, frozen=True):
    """One way to train, to be measured for a chunk of steps. Its `name` is also that of a folder."""

    name: str
    strategy: str  # or NO_EXCHANGE
    batch_size: int  # samples of each rank in a step
    threads: int  # of each rank
    virtual_ranks: int = 0  # 0: as many as ranks
    mesh: str = ""  # how ranks share the model and the batch; empty: the batch only
    sequence: bool = False  # and the places of a sequence between layers that are cut


class MeasureOrder(msgspec.Struct, frozen=True):
    """What one set of processes does: all candidates, one after the other."""

    candidates: list[Candidate]
    warmup: int  # steps before the chunk, which are not counted
    steps: int  # of the chunk
    folder: str
    started_unix: float  # when the command started the processes
    memory: bool = False  # also look at memory, in the first steps


class Memory(msgspec.Struct, frozen=True):
    """Bytes on the rank that holds most of each; None where this machine does not say."""

    weights: int
    gradients: int  # what the optimizer is given
    optimizer: int
    activations: int | None = None  # allocated in the forward of a micro-batch and still there when backward begins
    exchange: int | None = None  # buckets, staging and what else is there while ranks exchange gradients
    peak: int | None = None  # of all tensors together
    rss_peak: int | None = None  # of the process, libraries included

    @property
    def state(self) -> int:
        """What a rank keeps from step to step."""
        return self.weights + self.gradients + self.optimizer

    @property
    def needed(self) -> int:
        """The most that a rank has held at a time: measured where it could be, else the sum of what is known."""
        return self.state + (self.activations or 0) + (self.exchange or 0) if self.peak is None else self.peak


class Measurement(msgspec.Struct, frozen=True):
    """What one candidate did in one round: a chunk of steps."""

    name: str
    strategy: str
    world_size: int
    batch_size: int
    threads: int
    global_batch: int
    samples: int
    seconds: float
    cpu_seconds: float  # user and system, of all ranks
    first_step_seconds: float  # of applying the strategy to the model, and the first step
    launch_seconds: float  # from the command to processes that are ready
    digest: str  # of the parameters after the chunk
    weight_bytes: int  # of all parameters that are trained: what ranks exchange
    low_rank_bytes: int = 0  # what leaves a host of them with --compress powersgd
    sent_bytes: float | None = None  # per step and rank
    sync_share: float = 0.0  # of a step's time, in [0, 1]: what a rank waits for others, mean of all ranks
    memory: Memory | None = None
    device: str = "cpu"
    notes: tuple[str, ...] = ()
    """what was not measured"""
    gpus: dict[int, str] = {}
    """by rank, what held its GPU back at the end: heat, power, memory errors, other processes"""
    mesh: str = ""
    use: dict[str, float] = {}  # tokens and FLOPs per second, MFU: as far as they are known
    mfu_words: str = ""  # how the MFU was computed

    @property
    def rate(self) -> float:
        """Samples a second, over all ranks."""
        return self.samples / self.seconds


class NotMeasured(msgspec.Struct, frozen=True):
    """A candidate that could not be measured."""

    name: str
    strategy: str
    world_size: int
    batch_size: int
    reason: str
    mesh: str = ""
