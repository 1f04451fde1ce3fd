"""The orders and results of `paceline compare` and `paceline scale`, as data between the command and its workers."""

import msgspec

ORDER, CONFIG, CHUNKS, RUNNING = "order.json", "config.toml", "chunks.jsonl", "running.json"
INSPECTED_STEPS = 3  # first steps, in which memory and bytes are counted: the minimum warm-up
NO_EXCHANGE = "no exchange"  # the upper limit: each rank trains alone on its part, without communication of gradients


class Candidate(msgspec.Struct, frozen=True):
    """A strategy with its settings, measured for a chunk of steps. Its `name` is also the name of a folder."""

    name: str
    strategy: str  # or NO_EXCHANGE
    batch_size: int  # samples per rank in a step
    threads: int  # per rank
    virtual_ranks: int = 0  # 0: the number of ranks
    mesh: str = ""  # empty: data parallelism only
    sequence: bool = False  # sequence parallelism


class MeasurementRequest(msgspec.Struct, frozen=True):
    candidates: list[Candidate]
    warmup: int  # steps before the chunk, which are not measured
    steps: int  # measured
    folder: str
    started_unix: float  # when the command started the processes
    memory: bool = False  # also measure memory, in the first steps


class MemoryUse(msgspec.Struct, frozen=True):
    """Maximum bytes over all ranks, by purpose; None if this machine cannot measure it."""

    weights: int
    gradients: int  # passed to the optimizer
    optimizer: int
    activations: int | None = None  # allocated in the forward of a micro-batch and still there when backward begins
    exchange: int | None = None  # buckets, staging buffers and all else that exists while ranks exchange gradients
    peak: int | None = None  # of all tensors together
    rss_peak: int | None = None  # of the process, libraries included

    @property
    def state_bytes(self) -> int:
        return self.weights + self.gradients + self.optimizer

    @property
    def needed_bytes(self) -> int:
        """The peak memory of a rank: measured if possible, otherwise the sum of the known parts."""
        return self.state_bytes + (self.activations or 0) + (self.exchange or 0) if self.peak is None else self.peak


class Measurement(msgspec.Struct, frozen=True):
    candidate: Candidate
    world_size: int
    global_batch: int
    samples: int
    seconds: float
    cpu_seconds: float  # user and system, of all ranks
    first_step_seconds: float  # to apply the strategy to the model, and take the first step
    launch_seconds: float  # from the command until the processes are ready
    digest: str  # of the parameters after the chunk
    weight_bytes: int  # of all trained parameters, which is the size of the exchanged gradients
    low_rank_bytes: int = 0  # that a host sends with --compress powersgd
    sent_bytes: float | None = None  # per step and rank
    sync_share: float = 0.0  # fraction of a step, in [0, 1], in which a rank waits for others; mean of all ranks
    memory: MemoryUse | None = None
    device: str = "cpu"
    notes: tuple[str, ...] = ()  # the aspects that were not measured
    gpus: dict[int, str] = {}
    """By rank, the reason why its GPU was slow at the end: heat, power, memory errors, other processes."""
    use: dict[str, float] = {}  # tokens and FLOPs per second, and MFU, if known
    mfu_words: str = ""  # how the MFU was computed

    @property
    def rate(self) -> float:
        return self.samples / self.seconds


class FailedMeasurement(msgspec.Struct, frozen=True):
    name: str
    strategy: str
    world_size: int
    batch_size: int
    reason: str
    mesh: str = ""
