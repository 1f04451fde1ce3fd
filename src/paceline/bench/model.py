"""A model of how long a step takes on any number of ranks, with eight numbers (fitted in fit.py).

    step(N, b) = crowd * (1 + wait) * (compute + data) + exchange, for N ranks with b samples each

    compute    (fixed + per_sample * b) * (1 + contention * (A - 1)), where A ranks compute at once
    data       data_per_sample * b
    wait       jitter * sqrt(2 ln A): the largest of A random deviations
    exchange   2 (N-1) * latency + 2 (N-1)/N * bytes * seconds_per_byte: over a network, a ring's messages and volume
               crowd * (2 (N-1) * latency + bytes * seconds_per_byte): in memory each rank reads and writes as much,
               however many they are, and its core does it
    crowd      threads per core, at least 1; or that rounded up, or something between (packing)

Where ranks take turns, a waiting rank yields its core to a late one: deviations of more than A ranks do not add up. But
3 ranks on 2 cores take the time of 1.5 ranks on each only if the system moves them within a step; else two of them
share a core to its end, and all take the time of 2. Which of these happens depends on system and task.

docs/scaling.md says what the model leaves out. Predictions for more machines take each of them to be like this one.
"""

import math
import re
from dataclasses import dataclass

from paceline.errors import UsageError

UNKNOWN_PACKING = 0.25  # measured for 3 ranks on 2 cores: 0.05 to 0.2 on a quiet machine, up to 0.9 beside other work

PAYLOAD = 1448 / 1538  # of what an Ethernet link sends, data: a full frame, without its headers and the gap after it
AFTER_FORWARD = 2 / 3  # of a step, about: backward, twice a forward, during which losses and votes travel
EXAMPLES = "100Gbit,5us   10Gbit,30us   12.5GB,2us   1Gbit"
_SCALE = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30}
_RATE = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?(k|K|M|m|G|g|T|t|Ki|Mi|Gi)?(bit|bps|B)(?:/s|ps)?")
_TIME = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?(ns|us|\u00b5s|\u03bcs|ms|s)")  # two letters look like a Greek mu
_SECONDS = {"ns": 1e-9, "us": 1e-6, "\u00b5s": 1e-6, "\u03bcs": 1e-6, "ms": 1e-3, "s": 1.0}


@dataclass(frozen=True)
class Network:
    """One link, as each rank has it to itself."""

    bytes_per_second: float  # headers included
    latency_seconds: float = 0.0

    @property
    def seconds_per_byte(self) -> float:
        """Of data."""
        return 1 / (PAYLOAD * self.bytes_per_second)


@dataclass(frozen=True)
class Sent:
    """What leaves a host for the others."""

    share: float  # of all bytes
    messages: float  # that follow each other; what is sent to all at once is one
    every: int = 1  # so many steps


@dataclass(frozen=True)
class Machine:
    """What all measured points share."""

    cores: int
    threads: int  # of each rank
    weight_bytes: int  # what ranks exchange in a step
    over_network: bool = False  # whether ranks exchange over a network, which is no core's work
    in_parts: bool = False  # whether a rank is a copy of the model that several processes share
    low_rank_bytes: int = 0  # what they exchange with --compress powersgd; 0: it is not known
    over_gloo: bool = True  # whose receiver asks for each message first; NCCL's does not

    def message_seconds(self, network: Network) -> float:
        """How long one takes over a stated network, besides its bytes."""
        return network.latency_seconds * (2 if self.over_gloo else 1)

    def crowd(self, ranks: int) -> float:
        """How many threads there are for each core, at least 1."""
        return max(1.0, ranks * self.threads / self.cores)

    def uneven(self, ranks: int) -> float:
        """How many threads more there are on some cores than on the mean of all, where they do not divide evenly."""
        return math.ceil(self.crowd(ranks) - 1e-9) - self.crowd(ranks)

    def at_once(self, ranks: int) -> int:
        """How many ranks can compute at the same time."""
        return max(1, min(ranks, self.cores // self.threads))


@dataclass(frozen=True)
class Model:
    """The eight numbers; seconds."""

    machine: Machine
    fixed: float
    per_sample: float
    data_per_sample: float
    contention: float  # relative, for each further rank that computes at the same time
    latency: float
    seconds_per_byte: float
    jitter: float  # relative
    packing: float = UNKNOWN_PACKING
    """0: ranks that do not divide evenly among the cores share them evenly all the same; 1: some cores have one more"""

    def turns(self, ranks: int) -> float:
        """How much longer work takes so many ranks on a machine, because they take turns."""
        return self.machine.crowd(ranks) + self.packing * self.machine.uneven(ranks)

    def compute(self, ranks: int, batch: int) -> float:
        """Without crowd."""
        alone = self.fixed + self.per_sample * batch
        return alone * (1 + self.contention * (self.machine.at_once(ranks) - 1))

    def exchange(self, ranks: int, network: Network | None = None) -> float:
        """As it was measured, or over `network`."""
        if network is not None:
            return self._ring(ranks, self.machine.message_seconds(network), network.seconds_per_byte)
        if self.machine.over_network:
            return self._ring(ranks, self.latency, self.seconds_per_byte)
        in_memory = ring_messages(ranks) * self.latency + self.machine.weight_bytes * self.seconds_per_byte
        return in_memory * self.turns(ranks) if ranks > 1 else 0.0

    def _ring(self, ranks: int, latency: float, per_byte: float) -> float:
        return ring_messages(ranks) * latency + ring_volume(ranks) * self.machine.weight_bytes * per_byte

    def step(self, ranks: int, batch: int) -> float:
        """Seconds of a step on this machine."""
        return self._step(ranks, batch, ranks, self.exchange(ranks))

    def step_on_many(self, ranks: int, batch: int, per_machine: int, network: Network) -> float:
        """Seconds of a step on machines like this one, each with so many ranks; ranks exchange over `network`."""
        return self._step(ranks, batch, per_machine, self.exchange(ranks, network))

    def step_between(self, machines: int, each: int, batch: int, network: Network, sent: Sent) -> float:
        """Seconds of a step on machines like this one with `each` ranks and one link, that add up by themselves."""
        message, size = self.machine.message_seconds(network), self.machine.weight_bytes * sent.share
        seconds = sent.messages * message + ring_volume(machines) * size * network.seconds_per_byte
        inside = 0.0 if self.machine.over_network else self.exchange(each)
        alone = self._step(machines * each, batch, each, inside)
        votes = message - AFTER_FORWARD * alone if sent.every > 1 else 0.0  # where all is sent, they travel meanwhile
        return alone + seconds / sent.every + max(0.0, votes)

    def _step(self, ranks: int, batch: int, per_machine: int, exchange: float) -> float:
        work = self.compute(per_machine, batch) + self.data_per_sample * batch
        at_once = ranks * self.machine.at_once(per_machine) // per_machine
        work *= (1 + self.jitter * largest_deviation(at_once)) * self.turns(per_machine)
        return work + exchange


def ring_messages(ranks: int) -> float:
    """How many messages of a ring follow each other."""
    return 2.0 * (ranks - 1)


def ring_volume(ranks: int) -> float:
    """How many times its gradients each rank of a ring sends."""
    return 2.0 * (ranks - 1) / ranks


def largest_deviation(ranks: int) -> float:
    """By how many standard deviations the largest of so many normal numbers exceeds their mean, about."""
    return math.sqrt(2 * math.log(ranks)) if ranks > 1 else 0.0


def parse_network(text: str) -> Network:
    """The link that `text` describes: a rate, and after a comma the latency of one message (default 0).

    Raises:
        UsageError: says what is not understood, with examples.
    """
    rate, comma, latency = (word.strip() for word in text.partition(","))
    if (found := _RATE.fullmatch(rate)) is None or float(found[1]) <= 0:
        raise _refused(text, f"{rate!r} is no rate above 0: a number, then Gbit, Mbit, GB, MB (bits or bytes a second)")
    # k, m, g, t in either case, as tc and people write them: a rate is never in thousandths
    prefix = found[2] or ""
    prefix = prefix if len(prefix) == 2 else {"K": "k", "m": "M", "g": "G", "t": "T"}.get(prefix, prefix)
    size = _SCALE[prefix] * (1.0 if found[3] == "B" else 1 / 8)
    if not comma:
        return Network(float(found[1]) * size)
    if (time := _TIME.fullmatch(latency)) is None:
        raise _refused(text, f"{latency!r} is no time: a number, then us, ms or ns")
    return Network(float(found[1]) * size, float(time[1]) * _SECONDS[time[2]])


def _refused(text: str, why: str) -> UsageError:
    return UsageError(f"--network {text!r}: {why}. Examples: {EXAMPLES}")
