"""A release of torch that is newer than any tested one is reported in one line, and used."""

import re
from pathlib import Path

import pytest

from paceline.cli import launch, train
from paceline.config.choices import NEWEST_TORCH, OLDEST_TORCH, torch_unsupported_reason, untested_torch_notices
from paceline.errors import UsageError

ROOT = Path(__file__).parents[2]


@pytest.fixture
def newer(monkeypatch):
    monkeypatch.setattr("importlib.metadata.version", lambda name: "3.0.0a0+cu140")


@pytest.mark.parametrize("found", ["2.11.0", "2.13.0+cpu", f"{NEWEST_TORCH}.9", "0+unknown"])
def test_a_tested_release_is_not_reported(monkeypatch, found):
    monkeypatch.setattr("importlib.metadata.version", lambda name: found)
    assert untested_torch_notices() == []


def test_a_newer_release_is_one_line(newer):
    (line,) = untested_torch_notices()
    assert "3.0.0a0+cu140" in line and OLDEST_TORCH in line and NEWEST_TORCH in line


@pytest.mark.parametrize("command", [launch, train])
def test_a_command_reports_a_newer_release_once_and_starts(newer, capfd, tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").touch()
    what = ["script.py"] if command is launch else ["mnist-cnn"]
    assert command.main(["--nproc", "2", "--dry-run", *what]) == 0
    assert capfd.readouterr().err.count("3.0.0a0+cu140") == 1


@pytest.mark.parametrize(("found", "lacks"), [("2.11.0", True), ("2.12.1+cpu", True), ("2.13.0", False)])
def test_a_strategy_that_torch_lacks_is_refused_before_a_process_starts(monkeypatch, found, lacks):
    monkeypatch.setattr("importlib.metadata.version", lambda name: found)
    assert bool(torch_unsupported_reason("fsdp")) is lacks and not torch_unsupported_reason("zero")
    command = ["mnist-cnn", "--nproc", "2", "--strategy", "fsdp", "--dry-run"]
    if not lacks:
        assert train.main(command) == 0
        return
    with pytest.raises(UsageError, match=r"requires torch 2\.13"):
        train.main(command)


def test_the_tested_releases_are_those_of_the_package_and_of_ci():
    pinned = re.search(r"^torch==(\d+\.\d+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned is not None and pinned[1] == NEWEST_TORCH
    assert f'"torch>={OLDEST_TORCH}"' in (ROOT / "pyproject.toml").read_text()
    assert f"torch=={OLDEST_TORCH}." in (ROOT / ".ci" / "oldest").read_text()
