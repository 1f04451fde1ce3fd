"""The facts that `launch --check` records about the script of one rank, in a file per rank. `lab.check` evaluates them.

A digest is a short hash of a tensor's bytes. It is empty if all elements are equal or the tensor cannot be read. A site
is a line of the user's program, "train.py:40 in main".
"""

import math

import msgspec

RECORDED_EPOCHS = 2  # epochs that are recorded; later epochs are shortened to one batch each
# batches of a shortened epoch, plus the remainder, so that accumulation windows end as in a full epoch
SHORTENED_EPOCH_BATCHES = 24
MAX_STEPS = 100  # limit for a script without epochs, and for the training of a session
MAX_INDICES, MAX_DIGESTS = 5000, 32
OWN_GENERATORS = "generators of its own"
ORDER = "order of a loader"


def shortened_epoch_length(batches: int) -> int:
    """The number of batches in a shortened epoch. Accumulation windows of 2, 3, 4, 6, 8, 12 end as in a full epoch."""
    return min(batches, SHORTENED_EPOCH_BATCHES + batches % SHORTENED_EPOCH_BATCHES)


def finite_or_default(value: float, instead: float = 0.0) -> float:
    """`value`, or `instead` if it is NaN or infinite, which JSON cannot represent."""
    return float(value) if math.isfinite(value) else instead


def facts_file_name(rank: int) -> str:
    return f"facts-{rank}.json"


class LoaderPass(msgspec.Struct):
    indices: list[int] = []  # the first MAX_INDICES in the order of the sampler, including skipped ones
    drawn: int = 0  # number of indices
    cut_off: bool = False  # the sampler did not end: it is infinite or too long
    leaves: list[list[str]] = []  # the digest of each tensor in each of the first batches
    sizes: list[int] = []  # number of samples in each batch that the script received
    trains: bool = False
    seconds: float = 0.0
    summed: bool = False  # collectives combined values of ranks before the script continued to train
    printed: bool = False
    ended: bool = False
    reduced: list[float] = []  # small values of this rank that went into sums over ranks
    reduced_site: str = ""


class SeenLoader(msgspec.Struct):
    site: str  # the line that iterates over it
    constructed_at: str = msgspec.field(name="made")
    sampler: str
    shuffles: bool | None  # None: unknown
    samples: int  # in the data set; -1: unknown
    batches: int  # in a full epoch; -1: unknown
    batch_size: int
    workers: int
    plain: bool = False  # all its samplers are torch's: they do nothing after the last index
    batch_sampler: str = ""  # the class of a batch sampler that is not torch's
    divided: str = ""  # the expression of its batch size, if it is divided by the number of ranks
    probes: list[list[str]] = []  # the digest of each tensor in a few samples of the data set
    local_only: bool = msgspec.field(default=False, name="private")  # only this rank trains on it, not jointly
    random: dict[str, str] = {}  # generators that were used to fetch a batch -> the digest of their state before
    passes: list[LoaderPass] = []

    @property
    def training_passes(self) -> list[LoaderPass]:
        return [loader_pass for loader_pass in self.passes if loader_pass.trains]


class OptimizerStep(msgspec.Struct):
    optimizer: int  # in the order of their first steps
    site: str
    loader: int = -1  # the loader of the batch
    epoch: int = 0
    gradients: str = ""
    parameters: str = ""  # before it
    after: str = ""  # the parameters after it
    shapes: str = ""
    backwards: int = 0  # since its last step
    lost: int = 0  # backwards on earlier batches whose gradients were cleared before any step
    clear_site: str = ""  # the line that cleared gradients last, before a backward
    backward_site: str = ""
    factors: list[float] = []  # constants by which the last loss was multiplied or divided
    forwards: int = 0  # forwards of replicas since its last step
    synced: int = 0  # forwards after which gradients are reduced
    scaled: float = 1.0  # factor applied to all gradients after the last backward; only with a replica
    learning_rate: float = 0.0
    settings: str = ""  # a digest of all settings of the optimizer: learning rates, momentum, ...
    local: float = 0.0  # a linear function of the gradients after the last backward; only without a replica
    applied: float = 0.0  # the same when the step begins
    own: bool = False  # some of the parameters belong to a replica or are sharded
    met: bool = False  # collectives were called or replicas ran forward since the last step
    past: bool = False  # the replica was trained through DDP before, and bypassed DDP since the last step
    exchanged: int = 0  # tensors (except scalars) in collectives from forward to the end of the last backward
    outside: list[int] = []  # indices of parameters of no replica; this and the next lists only for the first steps
    each: list[str] = []  # the digest of each gradient
    each_before: list[str] = []  # the digest of each parameter
    each_after: list[str] = []
    strangers: int = 0  # parameters with gradients that no replica averages, if there is a replica
    norm: float = 0.0  # the norm of the gradients that were clipped last, to this limit
    limit: float = 0.0
    clip_site: str = ""


class DroppedGradients(msgspec.Struct):
    """Gradients that were cleared or not yet applied when an epoch began."""

    optimizer: int
    loader: int
    epoch: int
    backwards: int
    cleared: bool


class MaskedMeanLoss(msgspec.Struct):
    """A loss that is the mean over all elements except padding."""

    site: str
    counts: list[int] = []
    sizes: list[int] = []


class SeenReplica(msgspec.Struct):
    site: str
    by_library: bool
    find_unused: bool
    looked: int = 0  # forwards that were searched for unused parameters
    unused: int = 0  # the largest number of unused parameters
    past_site: str = ""  # the line that trained the wrapped model directly, bypassing DDP
    no_sync_site: str = ""
    buffers: list[str] = []  # the digest of the buffers at each evaluation
    evaluation_site: str = ""
    joined: bool = False
    inputs: list[list[str]] = []  # as Pass.leaves


class SeenSchedule(msgspec.Struct):
    site: str
    made: str
    steps: int  # steps so far
    length: int  # the step from which it is constant; -1: unknown
    name: str = ""  # the name of its class


class PaddingEffect(msgspec.Struct):
    """The score of a `compute_metrics` for some samples, and for the same samples with one more column of padding."""

    site: str
    name: str = ""  # the first score that changes; empty: none
    value: float = 0.0
    padded: float = 0.0


class FileAccess(msgspec.Struct):
    """A file that was written or read by torch.load: its path and the line."""

    path: str
    site: str
    devices: list[int] = []  # the GPUs of its tensors after loading
    own_device: int = -1


class CheckpointDiff(msgspec.Struct):
    """A checkpoint of a framework, compared with the memory of this rank when it was saved."""

    site: str
    name: str  # of its file or folder
    weights_only: bool = False  # the script asked for a checkpoint without the optimizer: it was not compared
    open_window: bool = False  # saved between two micro-batches of an accumulation window
    parts: int = 0  # number of parts that were compared; 0: only the random states
    missing: list[str] = []  # parts that it does not have, or with different values
    random: list[str] = []  # generators whose states it does not have


class ScriptFacts(msgspec.Struct):
    rank: int
    world: int
    local_world: int
    host: str
    cores: int
    threads: int = 0
    threads_site: str = ""
    ended: bool = False
    session: bool = False  # it trains in a session, which checks samples, gradients and weights itself
    split: int = 1  # number of ranks among which layers are split; these ranks get the same batches
    split_rank: int = 0  # index of this rank among them
    gathers_for_metrics: bool = False  # Accelerate's gather_for_metrics, which drops padding
    seeds: dict[str, str] = {}  # generator -> the line that seeded it last
    loaders: list[SeenLoader] = []
    steps: list[OptimizerStep] = []
    dropped: list[DroppedGradients] = []
    losses: list[MaskedMeanLoss] = []
    replicas: list[SeenReplica] = []
    schedules: list[SeenSchedule] = []
    metrics: list[PaddingEffect] = []
    saved_states: list[CheckpointDiff] = []
    saved_files: list[FileAccess] = msgspec.field(default_factory=list[FileAccess], name="written")
    loaded_files: list[FileAccess] = msgspec.field(default_factory=list[FileAccess], name="loaded")
