"""The fixture that starts launchers."""

from __future__ import annotations

from collections.abc import Callable, Generator
from pathlib import Path

import pytest
from tests.launch.launch_harness import Launch, kill_all, start, survivors


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
    left = {pid: words for one in launches for pid, words in survivors(one.mark).items()}
    for one in launches:
        kill_all(one.mark)
        one.process.kill()
        one.process.wait()
        for pipe in (one.process.stdout, one.process.stderr):
            if pipe is not None:
                pipe.close()
    assert not left, f"left behind: {left}"
