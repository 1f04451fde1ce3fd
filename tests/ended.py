"""What the folder of a run says: where its starts began, and how it ended."""

from pathlib import Path

from paceline.runs.events import Started, read_events
from paceline.runs.summary import Summary, read_summary


def start_steps(run: Path) -> list[int]:
    """The steps that were done when each start began, in order; 0: it began at the beginning."""
    return [event.start_step for event in read_events(run / "events-0.jsonl") if isinstance(event, Started)]


def ended(run: Path) -> Summary:
    summary = read_summary(run)
    assert summary is not None
    return summary


def digest(run: Path) -> str:
    """The digest of the weights with which a run has ended."""
    sha256 = ended(run).weights_sha256
    assert sha256 is not None
    return sha256
