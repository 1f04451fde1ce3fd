"""A built-in task needs no folder of anybody's; one's own comes after what is installed."""

from tests import warm

LOOK = """
import os, sys
from paceline.config.settings import make_task_path_absolute
from paceline.tasks.registry import load_task
task = load_task(make_task_path_absolute(sys.argv[1]), {})
print(sys.path.index(os.getcwd()) if os.getcwd() in sys.path else "not there", len(sys.path))
"""


def look(task, folder) -> list[str]:
    done = warm.run(["-P", "-c", LOOK, task], cwd=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_the_working_folder_is_in_the_path_for_a_module_in_it_only(tmp_path):
    (tmp_path / "mine.py").write_text("from paceline.tasks.mnist import cnn as task\n")
    assert look("mnist-cnn", tmp_path)[:2] == ["not", "there"]
    for task in ("mine:task", "mine.py:task"):
        place, count = map(int, look(task, tmp_path))
        assert place == count - 1, "after everything installed"


def test_a_module_is_written_down_with_the_folder_that_it_was_found_in(tmp_path, monkeypatch):
    from paceline.config.settings import make_task_path_absolute

    monkeypatch.chdir(tmp_path)
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "tasks.py").write_text("from paceline.tasks.mnist import cnn as task\n")
    in_folder = f"{tmp_path}:pkg.tasks:task"
    assert make_task_path_absolute("pkg.tasks:task") == make_task_path_absolute(in_folder) == in_folder
    for unchanged in ("paceline.tasks.mnist:cnn", "mnist-cnn"):  # installed
        assert make_task_path_absolute(unchanged) == unchanged
    assert make_task_path_absolute("pkg/tasks.py:task").startswith(f"{tmp_path}/pkg/")
