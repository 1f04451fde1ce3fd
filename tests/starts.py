"""Where the starts of a run began."""

from pathlib import Path

from paceline.runs.events import Started, read_events


def start_steps(run: Path) -> list[int]:
    """The steps that were done when each start began, in order; 0: it began at the beginning."""
    return [event.start_step for event in read_events(run / "events-0.jsonl") if isinstance(event, Started)]
