"""`paceline shards`: shows who sees which sample, and what the textbook variants repeat, miss and mix up."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import tyro
from rich.table import Table

from paceline.cli.flags import check_positive, table_console
from paceline.errors import ExitCode

MAX_SHOWN = 16  # indices in one cell


@dataclass(frozen=True)
class ShardsConfig:
    """Show which rank sees which sample of an epoch, unshuffled, and whether the global batches are one process's."""

    samples: int = 10
    """how many there are"""
    ranks: int = 4
    """world size"""
    batch_size: int = 1
    """samples per rank and step"""
    scheme: Literal["all", "dealt", "chunked", "padded"] = "all"
    """dealt: paceline's; chunked: a contiguous piece each; padded: torch's DistributedSampler"""


def main(arguments: Sequence[str]) -> int:
    """Run `paceline shards ARGUMENTS`."""
    config = tyro.cli(ShardsConfig, prog="paceline shards", args=arguments)
    check_positive(config, "samples", "ranks", "batch_size")
    from paceline.scratch.sampler import chunked, dealt, padded  # imports torch

    schemes = {"dealt": dealt, "chunked": chunked, "padded": padded}
    for name, scheme in schemes.items():
        if config.scheme in ("all", name):
            _show(name, scheme(config.samples, config.ranks), config)
    return ExitCode.DONE


def _show(name: str, shards: Sequence[Sequence[int]], config: ShardsConfig) -> None:
    console = table_console()
    table = Table("rank", "samples", "count", title=name, title_justify="left")
    for rank, indices in enumerate(shards):
        more = f" ... {indices[-1]}" if len(indices) > MAX_SHOWN else ""
        table.add_row(str(rank), " ".join(map(str, indices[:MAX_SHOWN])) + more, str(len(indices)))
    console.print(table)
    seen = Counter(index for indices in shards for index in indices)
    repeated = sorted(index for index, count in seen.items() if count > 1)
    missed = sorted(set(range(config.samples)) - set(seen))
    console.print(f"  repeated: {_some(repeated)}   missed: {_some(missed)}")
    lengths = {len(indices) for indices in shards}
    if len(lengths) > 1 and name != "dealt":
        console.print("  ranks have different numbers of samples: with a collective each step, some wait for ever")
    equal, total = _equal_batches(shards, config.samples, config.batch_size)
    console.print(
        f"  global batches (of {config.ranks * config.batch_size}) that one process would have: {equal} of {total}\n"
    )


def _equal_batches(shards: Sequence[Sequence[int]], samples: int, batch_size: int) -> tuple[int, int]:
    """How many of one process's global batches the ranks' k-th batches together equal, as (equal, all)."""
    from paceline.scratch.sampler import global_batches

    one_process = global_batches([range(samples)], len(shards) * batch_size)
    together = global_batches(shards, batch_size)
    pairs = zip(one_process, together, strict=False)  # padding may make one more batch
    return sum(sorted(a) == sorted(b) for a, b in pairs), len(one_process)


def _some(indices: Sequence[int]) -> str:
    more = f" ... ({len(indices)})" if len(indices) > MAX_SHOWN else ""
    return (" ".join(map(str, indices[:MAX_SHOWN])) + more) or "none"
