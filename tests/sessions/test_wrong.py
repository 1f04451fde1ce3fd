"""Whatever users write into a loop is right, or refused in words: never silently wrong."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests import warm
from tests.errors import raises
from tests.launch.launch_fixture import forked as forked
from tests.run_script import run_script
from tests.sessions import wrong

import paceline
from paceline.sessions.state import copy_json_values


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, str]]:
    file = tmp_path_factory.mktemp("wrong") / "told.json"
    done = warm.run((wrong.__file__, str(file)), cwd=file.parent)
    assert done.returncode == 0, done.stderr
    return json.loads(file.read_text())


@pytest.mark.parametrize("name", wrong.CASES)
def test_what_is_wrong_is_refused_in_words(told: dict[str, tuple[str, str]], name: str) -> None:
    (code, words), (found, text) = wrong.CASES[name][1], told[name]
    assert found == code and words in text
    assert " --" not in text and text.count("NOTE") < 2


def run_mine(launcher: str, folder: Path) -> subprocess.CompletedProcess[str]:
    if launcher == "python":  # which calls sys.excepthook
        return subprocess.run((sys.executable, "mine.py"), cwd=folder, capture_output=True, text=True, timeout=150)
    return warm.run(("-m", "paceline", "launch", "--nproc", "2", "--", "mine.py"), ranks=True, cwd=folder)


SCRIPT = "import paceline\ns = paceline.session()\ns.loader(3, global_batch=2)\n"


def test_the_error_names_the_argument_that_skips_the_step(told: dict[str, tuple[str, str]]) -> None:
    assert '(not_finite="skip")' in told["not_finite"][1]


@pytest.mark.parametrize("launcher", [pytest.param("python", marks=pytest.mark.slow), "paceline"])
def test_it_ends_with_code_2_and_is_said_once_without_a_traceback(tmp_path: Path, launcher: str) -> None:
    (tmp_path / "mine.py").write_text(SCRIPT)
    done = run_mine(launcher, tmp_path)
    assert (done.returncode, done.stderr.count("[not-data]")) == (2, 1), done.stdout + done.stderr
    assert "Traceback" not in done.stderr + done.stdout
    assert "mine.py:3: " in done.stderr
    records = [json.loads(path.read_text()) for path in tmp_path.rglob("error-*.json")]
    assert {(one["code"], one["fields"]["kind"]) for one in records} == ({("not-data", "int")} if records else set())
    assert bool(records) == (launcher == "paceline")


LATE = """
import torch, paceline
from torch import nn

with paceline.session("run") as s:
    model, optimizer = s.prepare(nn.Linear(2, 1), lambda p: torch.optim.SGD(p, lr=0.1))
    for number, (x,) in enumerate(s.loader([(torch.ones(2),)] * 12, global_batch=4)):
        optimizer.zero_grad()
        loss = model(x).mean()
        loss.backward() if number == 2 else s.backward(loss)
        optimizer.step()
"""


@pytest.mark.parametrize(
    "value", [float("nan"), float("inf"), {1: "one"}, (1, 2), {3}, b"x", [0, [{"deep": float("-inf")}]], torch.ones(1)]
)
def test_what_a_file_would_give_back_as_something_else_is_not_saved(value: Any) -> None:
    right = {"best": 0.5, "seen": [1, True, None, "x", {"a": []}]}
    found = copy_json_values(right, strict=True)
    assert found == right and found["seen"] is not right["seen"]
    with raises("saved-not-plain", name="odd"):
        copy_json_values({**right, "odd": value}, strict=True)
    assert copy_json_values({**right, "odd": value}, strict=False) == right


def test_what_cannot_be_saved_is_named_and_the_rest_is_saved(tmp_path: Path) -> None:
    kept = LATE.replace("loss.backward() if number == 2 else ", "").replace(
        "        loss =", "        s.saved |= {'best': 0.5, 'model': model} if number == 2 else {}\n        loss ="
    )
    (tmp_path / "mine.py").write_text(kept)
    done = run_script(1, "mine.py", cwd=tmp_path)
    assert done.returncode == 2 and "[saved-not-plain]" in done.stderr, done.stdout + done.stderr
    manifest = next((tmp_path / "run" / "checkpoints" / "step-00000003").glob("*.json")).read_text()
    assert '"best"' in manifest and '"model"' not in manifest.split('"saved"')[1].split("}")[0]


@pytest.mark.parametrize("launcher", ["python", pytest.param("paceline", marks=pytest.mark.slow)])
def test_an_error_of_use_after_some_steps_has_code_2_and_the_steps_are_saved(tmp_path: Path, launcher: str) -> None:
    (tmp_path / "mine.py").write_text(LATE)
    done = run_mine(launcher, tmp_path)
    assert done.returncode == 2 and "s.backward(loss)" in done.stderr, done.stdout + done.stderr
    assert "Traceback" not in done.stderr + done.stdout
    assert (tmp_path / "run" / "checkpoints" / "step-00000002").is_dir()


def refused() -> list[tuple[str, int]]:
    """What ranks raise, and its exit code, before any step and after some."""
    found: list[tuple[str, int]] = []
    for act in (lambda s: s.gather(torch.ones(2, s.rank + 1)), lambda s: s.main(Path("nowhere").read_text)):
        for number in (0, 8):
            try:
                with paceline.session() as s:
                    model, optimizer = s.prepare(torch.nn.Linear(2, 1), lambda p: torch.optim.SGD(p, lr=0.1))
                    for (x,) in s.loader([(torch.ones(2),)] * number, global_batch=4) if number else ():
                        optimizer.zero_grad()
                        s.backward(model(x).mean())
                        optimizer.step()
                    act(s)
            except Exception as error:
                found.append((type(error).__name__, int(getattr(error, "exit_code", 1))))
    return found


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_an_error_of_use_has_code_2_on_each_rank_and_an_error_of_the_users_own_stays_it() -> None:
    first, second = paceline.run(refused, 2)
    assert first == [("UsageError", 2), ("UsageError", 2), ("FileNotFoundError", 1), ("FileNotFoundError", 1)]
    assert second == [("ReportedByPeer", code) for code in (2, 2, 1, 1)]
