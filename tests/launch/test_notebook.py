"""Notebooks, in a real kernel: the example's numbers, functions and errors of cells, and what an interrupt leaves."""

import contextlib
import json
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

NOTEBOOK = Path(__file__).parents[2] / "examples" / "notebook.ipynb"
COLOURS = re.compile(r"\x1b\[[0-9;]*m")
SECONDS = 55.0
DEFINED = """
import os, time, torch, paceline
from pathlib import Path

class NoSample(Exception):
    pass

class Found:
    pass

def train(kind, folder):
    with paceline.session() as s:
        if kind == "raises" and s.rank == 1:
            raise NoSample("no such sample")
        Path(folder, f"rank-{s.rank}").write_text(str(os.getpid()))
        while kind == "endless":
            time.sleep(0.05)
        return Found()
"""
LOOP = """
for epoch in s.epochs(1):
    for number, (x,) in enumerate(s.loader(data, global_batch=4)):
        optimizer.zero_grad()
        s.backward(model(x).square().mean())
        if number == fails_at:
            raise ValueError("in the middle of a step")
        optimizer.step()
print("steps", s.step)
"""
SESSION = """
s = paceline.session()
model, optimizer = s.prepare(torch.nn.Linear(3, 1), lambda p: torch.optim.SGD(p, lr=0.1))
data = torch.utils.data.TensorDataset(torch.randn(10, 3))
"""


def test_the_example_is_committed_without_outputs_and_is_short() -> None:
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert not any(cell["outputs"] or cell["execution_count"] for cell in code)
    assert sum(len(cell["source"]) for cell in code) <= 80


@pytest.mark.slow
@pytest.mark.needs("nbclient", "ipykernel")
@pytest.mark.timeout(360)
@pytest.mark.filterwarnings("default")
def test_the_example_has_the_same_numbers_on_two_ranks() -> None:
    import nbformat
    from nbclient import NotebookClient

    book = nbformat.read(NOTEBOOK, as_version=4)
    NotebookClient(book, timeout=330, resources={"metadata": {"path": str(NOTEBOOK.parent)}}).execute()
    outputs: list[Any] = [output for cell in book.cells for output in cell.get("outputs", ())]
    assert outputs[-1]["data"]["text/plain"] == "True"
    printed = "".join(output.get("text", "") for output in outputs)
    one, two = printed.split("session: 2 processes")
    assert re.findall("accuracy .*", one) == re.findall("accuracy .*", two)
    assert float(re.findall("accuracy (.*)%", two)[-1]) > 60
    assert "\repoch 3/3  step 20/20  [##########]" in two


class Kernel:
    """A kernel, as a browser talks to it."""

    def __init__(self) -> None:
        from jupyter_client.manager import KernelManager

        self.manager = KernelManager(transport="ipc")
        self.manager.start_kernel()
        self.client = self.manager.blocking_client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=SECONDS)
        self.process = psutil.Process(self.manager.provisioner.pid)

    def begin(self, code: str) -> str:
        return self.client.execute(code)

    def end(self, asked: str, seconds: float = SECONDS) -> tuple[str, str]:
        """What the cell has printed, and the error with which it has ended, as shown; without colours."""
        printed, error, deadline = "", "", time.monotonic() + seconds
        while True:
            message = self.client.get_iopub_msg(timeout=max(0.0, deadline - time.monotonic()))
            content = message["content"]
            if message["parent_header"].get("msg_id") != asked:
                continue
            if message["msg_type"] == "error":
                error = COLOURS.sub("", "\n".join(content["traceback"]))
            printed += content.get("text", "") + content.get("data", {}).get("text/plain", "")
            if content.get("execution_state") == "idle":
                return printed, error

    def run(self, code: str) -> tuple[str, str]:
        return self.end(self.begin(code))


@pytest.fixture(scope="module")
def kernel() -> Iterator[Kernel]:
    made = Kernel()
    assert made.run(DEFINED) == ("", "")
    yield made
    made.client.stop_channels()
    made.manager.shutdown_kernel(now=True)


def started(folder: Path, seconds: float = 30.0) -> list[psutil.Process]:
    """The processes of both ranks, once they are there."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError, ValueError):
            return [psutil.Process(int((folder / f"rank-{rank}").read_text())) for rank in range(2)]
        time.sleep(0.05)
    raise AssertionError("the ranks have not come")


def with_kernel(test: Any) -> Any:
    for mark in (pytest.mark.needs("jupyter_client", "ipykernel"), pytest.mark.timeout(360)):
        test = mark(test)
    return pytest.mark.slow(pytest.mark.filterwarnings("default")(test))  # Jupyter's own deprecations


@with_kernel
def test_classes_and_errors_of_a_cell_are_those_of_the_cell(kernel: Kernel, tmp_path: Path) -> None:
    printed, error = kernel.run(f"[type(one) is Found for one in paceline.run(train, 2, ('ends', {str(tmp_path)!r}))]")
    assert "[True, True]" in printed, error
    printed, error = kernel.run(f"""
try:
    paceline.run(train, 2, ("raises", {str(tmp_path)!r}))
except NoSample:
    print("it was ours")
    raise
""")
    assert "it was ours" in printed
    assert re.search(r"NoSample: .*\non rank 1", error) and "raise NoSample(" in error


@with_kernel
def test_an_interrupt_ends_the_ranks_and_not_the_kernel(kernel: Kernel, tmp_path: Path) -> None:
    asked = kernel.begin(f"paceline.run(train, 2, ('endless', {str(tmp_path)!r}))")
    ranks = started(tmp_path)
    below = kernel.process.children(recursive=True)
    assert {rank.pid for rank in ranks} <= {process.pid for process in below}
    kernel.manager.interrupt_kernel()
    _, error = kernel.end(asked)
    assert "KeyboardInterrupt" in error.splitlines()[-1]
    assert not psutil.wait_procs(below, timeout=10)[1]
    assert kernel.run("6 * 7")[0] == "42"


@with_kernel
def test_a_session_goes_cell_by_cell(kernel: Kernel) -> None:
    assert not kernel.run(SESSION)[1]
    assert "ValueError: " in kernel.run("fails_at = 1" + LOOP)[1]
    assert "UsageError" in kernel.run("fails_at = -1" + LOOP)[1]  # the session is in the middle of a step
    for _ in range(2):
        assert not kernel.run(SESSION)[1]
        printed, error = kernel.run(LOOP)
        assert "steps 3" in printed, error


@with_kernel
def test_a_kernel_that_is_killed_takes_the_ranks_with_it(kernel: Kernel, tmp_path: Path) -> None:
    """The last test: nobody needs the kernel any more."""
    kernel.begin(f"paceline.run(train, 2, ('endless', {str(tmp_path)!r}))")
    started(tmp_path)
    below = kernel.process.children(recursive=True)
    os.kill(kernel.process.pid, 9)
    assert len(below) >= 4 and not psutil.wait_procs(below, timeout=15)[1]
