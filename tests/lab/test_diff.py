"""`paceline diff` finds planted differences, and says so if there is none. tests/soak_diff.py has more."""

import random
import sys
from pathlib import Path

import pytest
from tests import warm
from tests.errors import ended_with, raises
from tests.run_script import run_script
from tests.soak_diff import Planted, cases, diffed, fault, train
from tests.soak_replay import LOOP, hashes

from paceline.lab.replay import TensorRecord, differing_settings, first_difference, first_different_step, probable_cause
from paceline.runs.events import Step

CASES = {planted.name: planted for planted in cases(random.Random(0))}
OLD = "    def forward(self, x: Tensor) -> Tensor:\n        return self.head("
NEW = f"        self.tail = self.head\n        del self.head\n\n{OLD}".replace("self.head(", "2 * self.tail(")
CHOSEN = [
    *("bf16 in a layer", "a backward", "seed", "precision", "clipping", "virtual ranks"),
    *(next(name for name in reversed(CASES) if name.startswith(start)) for start in ("rate", "sample", "label")),
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory):
    """Trains run A, runs with planted differences, and sessions."""
    folder = tmp_path_factory.mktemp("runs")

    def run_dir(name: str = "a", *more: object, nproc: int = 2, strategy: str = "exact") -> Path:
        run_dir = folder / f"{name.replace(' ', '-')}-{nproc}-{strategy}"
        if run_dir.exists():
            return run_dir
        if name.startswith(("session", "unseeded")):
            assert run_script(nproc, LOOP, "--run", run_dir, *more, cwd=folder).returncode == 0
            return run_dir
        return train(run_dir, CASES.get(name), nproc, strategy)

    return run_dir


@pytest.mark.parametrize("name", CHOSEN)
def test_a_planted_difference_is_found(runs, name: str) -> None:
    a, b = runs(), runs(name)
    before = hashes(a) | hashes(b)
    code, output, result = diffed(a, b)
    assert fault(CASES[name], code, output, result) == ""
    assert result["loss_step"] in (CASES[name].step, CASES[name].step + 1)
    assert hashes(a) | hashes(b) == before


def test_a_changed_sample_is_named_with_the_size_of_its_change(runs) -> None:
    name = CHOSEN[-2]
    result = diffed(runs(), runs(name))[2]
    assert (result["elements"], result["samples"]) == (1, [int(name.split()[1])])
    assert result["largest"] == pytest.approx(1e-2, rel=1e-2)


def test_runs_of_other_processes_and_strategies_have_no_difference(runs) -> None:
    for b in (runs(nproc=3), runs(strategy="zero")):
        code, output, result = diffed(runs(), b)
        assert (code, result["loss_step"], result["first"]) == (0, None, None), output


def test_weights_that_no_loss_depends_on_are_a_difference(runs, tmp_path: Path) -> None:
    edit = "nn.BatchNorm1d(32)", "nn.BatchNorm1d(32, momentum=0.11)"
    code, output, result = diffed(runs(), train(tmp_path / "b", Planted("", 1, "", "", edit)))
    assert (code, result["loss_step"], result["only_weights"]) == (1, None, True), output


def test_code_that_has_changed_since_is_not_reproduced(runs) -> None:
    b = runs("a loss in double")
    code_file = next(b.with_name(f"{b.name}-code").iterdir())
    text = code_file.read_text()
    code_file.write_text((runs().with_name(f"{runs().name}-code") / code_file.name).read_text())
    try:
        code, output, result = diffed(runs(), b)
    finally:
        code_file.write_text(text)
    assert (code, result["not_reproduced"], result["first"], result["cause"]) == (1, ["B"], None, "not reproduced"), (
        output
    )


def test_sessions_are_repeated_by_their_script(runs) -> None:
    a, b = runs("session"), runs("session two", "--two-optimizers")
    code, output, result = diffed(a, b, LOOP, "--", "--run", a, "--", "--run", b, "--two-optimizers")
    assert (code, result["first"]["step"], result["first"]["kind"]) == (1, 1, "state after"), output
    assert result["cause"] == "optimizer"
    code, output, result = diffed(a, runs("session", nproc=3), LOOP, "--", "--run", a)
    assert (code, result["loss_step"]) == (0, None), output


def test_another_python_repeats_the_steps(runs, tmp_path: Path) -> None:
    code, output, result = diffed(runs(), "--against-python", sys.executable, "--steps", 2)
    assert (code, result["loss_step"]) == (0, None), output
    (tmp_path / "bin").mkdir()
    python = tmp_path / "bin" / "python"
    python.write_text(f'#!/bin/sh\nexport PYTHONPATH="{tmp_path}:$PYTHONPATH"\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    (tmp_path / "sitecustomize.py").write_text(
        "import torch\ntorch.__version__ = '9.9.0'\nold = torch.nn.functional.relu\n"
        "torch.nn.functional.relu = lambda x: old(x) * (1 + 2**-20)\n"
    )
    code, output, result = diffed(runs(), "--against-python", tmp_path, "--step", 5, "--steps", 2)
    first = result["first"]
    assert (code, first["step"], first["kind"], first["name"]) == (1, 5, "output", "middle.norm"), output
    assert (result["cause"], result["settings"]["torch"][1]) == ("torch", "9.9.0")


@pytest.mark.parametrize(("a", "b", "more", "code"), [
    ("a", "", [], "diff-two-runs"),
    ("a", "seed", ["--against-python", "/usr/bin/python3"], "diff-two-runs"),
    ("a", "seed", ["--step", 3], "diff-two-runs"),
    ("a", "", ["--against-python", "nowhere"], "diff-no-python"),
    ("a", "seed", [LOOP], "replay-script-of-task"),
    ("session", "session two", [], "replay-needs-script"),
    ("unseeded", "unseeded two", [LOOP, "--", "--unseeded", "--run", "x"], "diff-not-repeated"),
])  # fmt: skip
def test_what_cannot_be_compared_is_an_error(runs, a: str, b: str, more: list[object], code: str) -> None:
    flags = {"session two": ["--two-optimizers"], "unseeded": ["--unseeded"], "unseeded two": ["--unseeded"]}
    dirs = [runs(name, *flags.get(name, [])) for name in (a, b) if name]
    done = warm.run(["-m", "paceline", "diff", *dirs, *more], cwd=dirs[0].parent)
    ended_with(done, code)


def test_a_strategy_without_guaranteed_bits_and_another_model_are_errors(runs, tmp_path: Path) -> None:
    done = warm.run(["-m", "paceline", "diff", runs(), runs("seed", strategy="bucketed")], cwd=tmp_path)
    ended_with(done, "diff-not-exact")
    b = train(tmp_path / "b", Planted("", 1, "", "", (OLD, NEW)))
    done = warm.run(["-m", "paceline", "diff", runs(), b], cwd=tmp_path)
    ended_with(done, "diff-other-models")


def step(number: int, loss: float, norm: float | None = None, steps: int = 1) -> Step:
    return Step(number, 0, loss, 8, 0.1, 0.0, 0.0, 0.0, grad_norm=norm, steps=steps)


def test_the_first_step_that_differs_in_the_logs() -> None:
    a = {n: step(n, 1.0, 2.0) for n in (1, 2, 3)}
    assert first_different_step(a, a | {2: step(2, 1.0 + 2**-52, 2.0)}) == 2
    assert first_different_step(a, a | {3: step(3, 1.0, 2.5)}) == 3
    assert first_different_step(a, {n: step(n, 1.0) for n in a}) is None  # only one of them clips
    with raises("diff-no-common-step", last_a=3, last_b=9):
        first_different_step(a, {9: step(9, 1.0)})
    with raises("diff-merged-steps", first=1, last=4):
        first_different_step({4: step(4, 1.0, steps=4)}, {4: step(4, 2.0, steps=4)})


def test_the_first_record_that_differs_is_in_the_order_of_execution() -> None:
    a = [TensorRecord(1, "output", name, "same") for name in "xyz"]
    b = [TensorRecord(1, "output", "x", "same"), TensorRecord(1, "output", "y", "other")]
    assert first_difference(a, a) is None
    assert first_difference(a, b) == (1, 1)
    assert first_difference(a, a[:2]) == (2, -1)
    assert first_difference(a[:2], a) == (-1, 2)


def test_a_setting_is_the_cause_only_if_it_explains_the_first_difference() -> None:
    settings = differing_settings({"seed": 0, "hardware": {"torch": "1"}}, {"seed": 1, "hardware": {"torch": "2"}})
    assert settings == {"seed": (0, 1), "torch": ("1", "2")}
    assert probable_cause(TensorRecord(1, "samples", "", ""), settings, []) == "seed"
    assert probable_cause(TensorRecord(1, "output", "", ""), settings, []) == "torch"
    assert probable_cause(TensorRecord(1, "learning rate", "", ""), settings, []) == "learning rate"
    assert probable_cause(None, settings, ["B"]) == "torch"
    assert probable_cause(None, {}, ["B"]) == "not reproduced"
