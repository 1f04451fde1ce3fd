"""paceline.run: ranks from Python, functions that no file holds, and the exception of the rank that failed first."""

import os
import signal
import textwrap
import threading
from pathlib import Path

import pytest
from tests import warm
from tests.errors import raises

import paceline
from paceline.errors import TrainingError


class Net:
    def __init__(self, bias: float) -> None:
        self.bias = bias


def total(numbers: list[int]) -> float:
    import torch

    with paceline.session() as s:
        return s.sum(float(sum(numbers[s.rank :: s.size]))) + torch.zeros(1).item()


def fails(kind: str) -> None:
    with paceline.session() as s:
        if s.rank == 1 and kind == "raises":
            raise KeyError("no such sample")
        if s.rank == 1 and kind == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        s.sum(1.0)
        s.sum(2.0)


def test_what_ranks_return_comes_back(capsys: pytest.CaptureFixture[str]) -> None:
    offset = 5
    returned = paceline.run(
        lambda numbers, x: (total(numbers), int(os.environ["RANK"]), x + offset), 2, ([1, 2, 3],), kwargs={"x": 1}
    )
    assert returned == [(6.0, 0, 6), (6.0, 1, 6)]


@pytest.mark.usefixtures("forked")
def test_the_exception_of_the_rank_that_failed_first_is_raised() -> None:
    with pytest.raises(KeyError, match="no such sample") as found:
        paceline.run(fails, 2, ("raises",))
    assert "rank 1" in found.value.__notes__[0] and "in fails" in found.value.__notes__[0]


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_a_rank_that_was_killed_is_named() -> None:
    with pytest.raises(TrainingError, match=r"rank 1 .* killed by SIGKILL"):
        paceline.run(fails, 2, ("killed",))


def trains(epochs: int) -> Net:
    import torch

    torch.manual_seed(0)
    with paceline.session() as s:
        model, optimizer = s.prepare(torch.nn.Linear(4, 1), lambda p: torch.optim.SGD(p, lr=0.1))
        data = torch.utils.data.TensorDataset(torch.randn(33, 4))
        for _ in s.epochs(epochs):
            for (x,) in s.loader(data, global_batch=8):
                optimizer.zero_grad()
                s.backward(model(x).square().mean())
                optimizer.step()
            s.log(accuracy=0.5)
        return Net(s.weights(model)["bias"].item())


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_the_bar_shows_how_far_a_session_is(capsys: pytest.CaptureFixture[str]) -> None:
    first, second = paceline.run(trains, 2, (3,))
    shown = capsys.readouterr().out.splitlines()
    assert first.bias == second.bias
    assert [line for line in shown if line.startswith("epoch")][-1].startswith("epoch 3/3  step 5/5  [##########]")
    assert sum("accuracy" in line for line in shown) == 3


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_what_cannot_come_back_is_refused_in_words() -> None:
    with raises("result-not-sendable", kind="lock"):
        paceline.run(threading.Lock, 1)


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_a_run_that_is_refused_says_why() -> None:
    with raises("negative") as caught:
        paceline.run(total, 1, ([],), options=["--max-restarts", "-2"])
    assert str(caught.value).startswith("--max-restarts ") and str(caught.value).endswith(" -2")


def test_places_that_cannot_be_are_refused_before_anything_starts() -> None:
    for settings, code in (
        ({"on": "ssh"}, "run-ssh-hosts"),
        ({"hosts": ["n1"]}, "run-ssh-hosts"),
        ({"on": "slurm"}, "run-on"),
        ({"on": "sssh"}, "run-on"),
        ({"nodes": 2}, "run-nodes"),
    ):
        with raises(code):
            paceline.run(total, 1, ([],), **settings)


def test_what_cannot_be_sent_is_refused() -> None:
    with raises("run-not-sent"):
        paceline.run(total, 2, (threading.Lock(),))
    with raises("run-nproc", value=0):
        paceline.run(total, 0)


@pytest.mark.slow
def test_from_the_main_module_of_a_script(tmp_path: Path) -> None:
    """As in a notebook: its functions are in no module that a rank could import."""
    (tmp_path / "mine.py").write_text(
        textwrap.dedent("""
            import paceline

            def square(x):
                print("computing")
                return x * x

            if __name__ == "__main__":
                print(paceline.run(square, nproc=2, args=(7,)))
        """)
    )
    done = warm.run(("mine.py",), cwd=tmp_path)
    assert (done.returncode, done.stdout.count("computing"), "[49, 49]" in done.stdout) == (0, 1, True), done.stderr
