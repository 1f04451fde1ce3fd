"""The facts that `launch --check` records about the script of one rank, in a file per rank. `lab.check` judges them.

A digest is a short hash of a tensor's bytes. It is empty if all elements are equal or the tensor cannot be read. A site
is a line of the user's program, "train.py:40 in main".
"""

import math

import msgspec

EPOCHS = 2  # that are looked at; the later ones are cut to one batch each
WHOLE = 24  # an epoch has so many batches and those that are left over of as many: windows end as they do in the whole
MAX_STEPS = 100  # after which a script without epochs is ended, and the training of a session
MAX_INDICES, MAX_DIGESTS = 5000, 32
OWN_GENERATORS = "generators of its own"


def kept_batches(batches: int) -> int:
    """The number of batches of an epoch that are computed: accumulation windows of 2, 3, 4, 6, 8, 12 end as before."""
    return min(batches, WHOLE + batches % WHOLE)


def finite(value: float, instead: float = 0.0) -> float:
    """A number for a fact: JSON has none that is NaN or infinite, and could not be read again."""
    return float(value) if math.isfinite(value) else instead


def facts_file(rank: int) -> str:
    """Its name, in the attempt's folder."""
    return f"facts-{rank}.json"


class Pass(msgspec.Struct):
    """One way through a loader."""

    indices: list[int] = []  # in the order of the sampler, also those that were passed over; the first MAX_INDICES
    drawn: int = 0  # how many indices there were
    cut_off: bool = False  # the sampler was not drawn to its end: it is endless, or too long
    leaves: list[list[str]] = []  # of the first batches: the digest of each tensor in it
    sizes: list[int] = []  # samples in each batch that the script got
    trains: bool = False
    seconds: float = 0.0
    summed: bool = False  # values of ranks were brought together before the script went on training
    printed: bool = False
    ended: bool = False
    reduced: list[float] = []  # what of this rank then went into sums over ranks: of small tensors
    reduced_site: str = ""


class SeenLoader(msgspec.Struct):
    """A DataLoader."""

    site: str  # where it is gone through
    made: str
    sampler: str
    shuffles: bool | None  # None: unknown
    samples: int  # in the data set; -1: unknown
    batches: int  # of a whole epoch; -1: unknown
    batch_size: int
    workers: int
    plain: bool = False  # its samplers are torch's own: they do nothing after the last index
    batch_sampler: str = ""  # the class of a batch sampler that is not torch's
    divided: str = ""  # its batch size, as the script has it, where that is divided by the number of ranks
    probes: list[list[str]] = []  # of a few samples of the data set: the digest of each tensor in it
    private: bool = False  # trained on by this rank for itself, beside or after what ranks train together
    random: dict[str, str] = {}  # generators that fetching a batch used -> the digest of their state before
    passes: list[Pass] = []

    @property
    def training(self) -> list[Pass]:
        """The epochs in which it was trained on."""
        return [one for one in self.passes if one.trains]


class SeenStep(msgspec.Struct):
    """An optimizer's step."""

    optimizer: int  # in the order of their first steps
    site: str
    loader: int = -1  # which one gave the batch
    epoch: int = 0
    gradients: str = ""
    parameters: str = ""  # before it
    after: str = ""  # the parameters after it
    shapes: str = ""
    backwards: int = 0  # since its last step
    lost: int = 0  # those of them, on batches before its last one, whose gradients were cleared before any step
    clear_site: str = ""  # where gradients were cleared last, before a backward
    backward_site: str = ""
    factors: list[float] = []  # constants by which the last loss was multiplied or divided
    forwards: int = 0  # of replicas, since its last step
    synced: int = 0  # those of them after which gradients are reduced
    scaled: float = 1.0  # by which all gradients were multiplied after the last backward; only with a replica
    learning_rate: float = 0.0
    settings: str = ""  # a digest of all settings of the optimizer: learning rates, momentum, ...
    local: float = 0.0  # a linear function of the gradients after the last backward; only without a replica
    applied: float = 0.0  # the same when the step begins
    own: bool = False  # some of the parameters belong to a replica, or are sharded
    met: bool = False  # since the last step collectives were called, or replicas have gone forward
    past: bool = False  # the replica was trained through DDP before, and went forward only past it now
    exchanged: int = 0  # tensors, no numbers, that were exchanged between forward and the end of the last backward
    outside: list[int] = []  # which parameters belong to no replica; these and the next only of the first steps
    each: list[str] = []  # digests of gradients, one by one
    each_before: list[str] = []  # and of parameters
    each_after: list[str] = []
    strangers: int = 0  # parameters with gradients that no replica averages, where there is a replica
    norm: float = 0.0  # of gradients that were clipped last, to this limit
    limit: float = 0.0
    clip_site: str = ""


class Dropped(msgspec.Struct):
    """Gradients that were cleared, or left over, when an epoch began."""

    optimizer: int
    loader: int
    epoch: int
    backwards: int
    cleared: bool


class MeanLoss(msgspec.Struct):
    """A loss that is a mean over those elements that are not padding."""

    site: str
    counts: list[int] = []
    sizes: list[int] = []


class SeenReplica(msgspec.Struct):
    """A DistributedDataParallel."""

    site: str
    by_library: bool
    find_unused: bool
    looked: int = 0  # forwards after which it was looked for unused parameters
    unused: int = 0  # the most of them
    past_site: str = ""  # where the model within was trained, past DDP
    no_sync_site: str = ""
    buffers: list[str] = []  # their digest, at each evaluation
    evaluation_site: str = ""
    joined: bool = False
    inputs: list[list[str]] = []  # as Pass.leaves


class SeenSchedule(msgspec.Struct):
    """A schedule of the learning rate."""

    site: str
    made: str
    steps: int  # that it has gone
    length: int  # after which it is constant; -1: unknown
    name: str = ""  # of its class


class PaddedMetric(msgspec.Struct):
    """The score of a `compute_metrics` for some samples, and for the same samples with one more column of padding."""

    site: str
    name: str = ""  # of the first score that is another one then; empty: none is
    value: float = 0.0
    padded: float = 0.0


class PlacedFile(msgspec.Struct):
    """A file that was written, or read by torch.load: its path, and the line."""

    path: str
    site: str
    devices: list[int] = []  # GPUs that its tensors were loaded to
    own_device: int = -1


class ScriptFacts(msgspec.Struct):
    """All of a rank."""

    rank: int
    world: int
    local_world: int
    host: str
    cores: int
    threads: int = 0
    threads_site: str = ""
    ended: bool = False
    session: bool = False  # it trains in a session, which checks samples, gradients and weights itself
    split: int = 1  # ranks among which layers are split: these are given the same batches
    split_rank: int = 0  # which of them it is
    gathers_for_metrics: bool = False  # Accelerate's, which drops what was padded
    seeds: dict[str, str] = {}  # generator -> the line that has seeded it last
    loaders: list[SeenLoader] = []
    steps: list[SeenStep] = []
    dropped: list[Dropped] = []
    losses: list[MeanLoss] = []
    replicas: list[SeenReplica] = []
    schedules: list[SeenSchedule] = []
    metrics: list[PaddedMetric] = []
    written: list[PlacedFile] = []
    loaded: list[PlacedFile] = []
