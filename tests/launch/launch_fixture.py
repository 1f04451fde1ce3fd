"""The fixture that starts launchers."""

from __future__ import annotations

from collections.abc import Callable, Generator
from pathlib import Path

import pytest
from tests.launch.launch_harness import Launch, end_all, start


@pytest.fixture
def launch(tmp_path: Path) -> Generator[Callable[..., Launch]]:
    """Starts launchers (see launch_harness.start); fails the test if one of their processes is left at its end."""
    launches: list[Launch] = []

    def begin(worker: str, **settings: object) -> Launch:
        folder = settings.pop("reuse", None) or tmp_path / f"attempt-{len(launches)}"
        folder.mkdir(exist_ok=True)
        launches.append(start(folder, worker, **settings))  # type: ignore[arg-type]
        return launches[-1]

    yield begin
    end_all(launches)
