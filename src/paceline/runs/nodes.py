"""Which hosts are in a run, wait to come in, or are gone, as the head last saw it: attempt-N/nodes.json."""

from contextlib import suppress
from pathlib import Path
from typing import Literal

import msgspec

from paceline.runs import writing
from paceline.runs.reading import decode
from paceline.runs.terminal import clean

State = Literal["in", "waits", "lost", "left", "refused"]

NODES = "nodes.json"
MAX_CHARS = 300


class NodeNow(msgspec.Struct, frozen=True):
    """One of them. `words` say why it is gone."""

    node: int
    host: str
    state: State
    words: str = ""


class NodesNow(msgspec.Struct, frozen=True):
    """All of a run that was started with --nodes LEAST:MOST, other than 0."""

    least: int
    most: int
    all: tuple[NodeNow, ...]

    @property
    def line(self) -> str:
        """For people."""
        inside = [one.host for one in self.all if one.state == "in"]
        asked = f"--nodes {self.least}:{self.most}"
        groups = [f"{len(inside)} in ({asked}): {', '.join(inside)}"]
        for state in ("waits", "lost", "left", "refused"):
            found = [one for one in self.all if one.state == state]
            told = ", ".join(one.host + (f" ({one.words[:MAX_CHARS]})" if one.words else "") for one in found)
            groups += [f"{state}: {told}"] if told else []
        return clean("; ".join(groups))


def write_nodes(attempt_dir: Path, nodes: NodesNow) -> None:
    """Write it down, where the disk allows."""
    with suppress(OSError):
        writing.replace(attempt_dir / NODES, msgspec.json.encode(nodes))


def read_nodes(attempt_dir: Path) -> NodesNow | None:
    """What was last written; None for a run whose hosts do not come and go."""
    with suppress(OSError):
        return decode(attempt_dir / NODES, NodesNow)
    return None
