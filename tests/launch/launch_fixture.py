"""The fixture that starts launchers, and one for those of `paceline.run`."""

import subprocess
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests import warm
from tests.launch.launch_harness import Launch, end_all, start

from paceline.launch import from_python


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


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher, agent and ranks of `paceline.run` are forked from what has imported everything."""

    def start(command: Sequence[str], process_group: int, **settings: Any) -> warm.Popen:
        return warm.with_ranks(command, **settings)

    names = {name: getattr(subprocess, name) for name in ("DEVNULL", "PIPE", "STDOUT")}
    monkeypatch.setattr(from_python, "subprocess", SimpleNamespace(Popen=start, **names))
