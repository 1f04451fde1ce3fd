"""Two machines that hold different versions of a user's code do not train together."""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import ModuleType

import pytest
from tests import warm
from tests.run_script import free_port

from paceline.train import consistency

TASK = (Path(__file__).parents[2] / "examples" / "own_task.py").read_text()


def train_in(folders: list[Path]) -> list[tuple[int, str]]:
    """One rank in each folder, as a launcher starts them on machines that share nothing."""
    port, ranks = free_port(), []
    for rank, folder in enumerate(folders):
        ranks_here, size = dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank)), str(len(folders))
        env = {**ranks_here, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1"}
        env |= {"MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
        command = ["-m", "paceline", "train", "mine:task", "--steps", "2", "--device", "cpu"]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        ranks.append(warm.Popen(command, rank=rank, cwd=folder, env={**os.environ, **env}, **pipes))
    said = [rank.communicate(timeout=150)[0] for rank in ranks]
    return [(rank.returncode, words) for rank, words in zip(ranks, said, strict=True)]


def test_different_code_is_refused_before_the_first_step_and_named(tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
        (folder / "mine.py").write_text(TASK)
    (folders[1] / "mine.py").write_text(TASK + "\n# an older version\n")
    (first, told), (second, _) = train_in(folders)
    assert (first, second) == (2, 2), told
    assert "different code: mine (" in told and "on rank 0" in told and "--sync" in told


@pytest.mark.slow
def test_what_only_one_rank_has_imported_is_no_difference(tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
        (folder / "mine.py").write_text(TASK + "\nimport os\nif os.environ['RANK'] == '0': import plots\n")
        (folder / "plots.py").write_text("")
    assert [code for code, _ in train_in(folders)] == [0, 0]


@pytest.mark.slow
def test_an_installed_module_is_nobodys_own_but_one_that_is_linked_there_is(tmp_path: Path, monkeypatch) -> None:
    site = tmp_path / "site"
    site.mkdir()
    (tmp_path / "outside.py").write_text("")
    (site / "linked_4711.py").symlink_to(tmp_path / "outside.py")
    (site / "installed_4711.py").write_text("")
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    monkeypatch.setattr(sysconfig, "get_paths", lambda: dict.fromkeys(names, str(site)))
    for name in ("linked_4711", "installed_4711"):
        module = ModuleType(name)
        module.__file__ = str(site / f"{name}.py")
        monkeypatch.setitem(sys.modules, name, module)
    assert "linked_4711" in consistency._user_code() and "installed_4711" not in consistency._user_code()
