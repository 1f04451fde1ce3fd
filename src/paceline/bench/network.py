"""Parses `--network 100Gbit,5us`: bytes a second and seconds a message, of one link."""

from __future__ import annotations

import re
from dataclasses import dataclass

from paceline.errors import UsageError

EXAMPLES = "100Gbit,5us   10Gbit,30us   12.5GB,2us   1Gbit"
_SCALE = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30}
_RATE = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?(k|K|M|m|G|g|T|t|Ki|Mi|Gi)?(bit|bps|B)(?:/s|ps)?")
_TIME = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?(ns|us|\u00b5s|\u03bcs|ms|s)")  # two letters look like a Greek mu
_SECONDS = {"ns": 1e-9, "us": 1e-6, "\u00b5s": 1e-6, "\u03bcs": 1e-6, "ms": 1e-3, "s": 1.0}


@dataclass(frozen=True)
class Network:
    """One link, as each rank has it to itself."""

    bytes_per_second: float
    latency_seconds: float = 0.0


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
