"""--stall-after and --not-finite: what they take, and where they arrive."""

from __future__ import annotations

import pytest
from tests.cli.test_bad_input import WITHOUT_TORCH

WANTED = "--stall-after must be auto, off, or a number of seconds"
TASK = "train mnist-cnn --nproc 2"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        *((f"{TASK} --stall-after={value}", WANTED) for value in ("0", "-3", "abc", "nan", "1e3", "")),
        ("launch --stall-after never -- script.py", WANTED),
        ("train mnist-cnn --stall-after 5", "requires --nproc"),
        (f"{TASK} --not-finite ignore", "unknown choice"),
    ],
)
def test_a_wrong_value_is_told_before_anything_is_started(paceline, tmp_path, arguments: str, words: str) -> None:
    (tmp_path / "script.py").write_text("")
    ended = paceline(*arguments.split(), command=("-c", WITHOUT_TORCH))
    said = " ".join((ended.stdout + ended.stderr).replace("│", " ").split())
    assert ended.returncode == 2, said
    assert words in said
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    "arguments",
    [
        f"{TASK} --stall-after 30s --dry-run",
        "launch --stall-after 30s --dry-run -- script.py",
        f"{TASK} --stall-after 30s --dry-run --on ssh --hosts n1,n2",
        f"{TASK} --stall-after 30s --dry-run --on slurm --nodes 2",
    ],
    ids=["train", "launch", "ssh", "slurm"],
)
def test_the_window_reaches_every_agent(paceline, tmp_path, arguments: str) -> None:
    (tmp_path / "script.py").write_text("")
    ended = paceline(*arguments.split())
    assert ended.returncode == 0, ended.stderr
    assert '"stall_after": {"seconds": 30.0}' in " ".join(ended.stdout.split()).replace("{ ", "{").replace(" }", "}")


def test_a_launcher_that_is_not_ours_cannot_look_and_says_so(paceline) -> None:
    ended = paceline("train", "mnist-cnn", "--stall-after", "5", env={"RANK": "0", "WORLD_SIZE": "1"})
    assert ended.returncode == 2 and "paceline watchover" in " ".join(ended.stderr.split())
