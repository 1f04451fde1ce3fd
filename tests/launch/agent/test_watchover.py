"""Ranks that others have started are watched over: real torchrun, real gloo ranks, and nothing is left behind."""

import os
import re
import signal
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests import warm
from tests.launch.launch_harness import carriers, wait_until

from paceline.guard.report import read_diagnosis
from paceline.host.procfs import processes, read_process

pytestmark = [pytest.mark.ranks, pytest.mark.sample(2)]
SCRIPT = """
import os, sys, time
from pathlib import Path
import torch, torch.distributed as dist
here = Path(__file__).parent
assert __name__ == "__main__" and sys.argv == [__file__, "--epochs", "5"] and sys.path[0] == str(here), sys.argv
try:
    os.waitpid(-1, os.WNOHANG)
    raise AssertionError("a child that this script has not made")
except ChildProcessError:
    pass
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
for step in range(10_000):
    dist.all_reduce(torch.ones(8))
    if step == 5 and rank == 1:
        while not (here / "go").exists():
            time.sleep(0.05)  # the fault
    time.sleep(0.02)
    (here / f"pid-{rank}").write_text(str(os.getpid()))
    stop = torch.tensor([float((here / "stop").exists())])
    dist.all_reduce(stop)
    if stop.item():
        break
"""
LINE = SCRIPT.splitlines().index("            time.sleep(0.05)  # the fault") + 1


class Watched:
    """A job under watchover, and what it has said so far."""

    def __init__(self, folder: Path, process: subprocess.Popen[bytes]) -> None:
        self.folder, self.process, self.output = folder, process, folder / "output.txt"

    def says(self, pattern: str) -> re.Match[str]:
        wait_until(lambda: re.search(pattern, self.output.read_text()) is not None, pattern)
        return next(re.finditer(pattern, self.output.read_text()))


@contextmanager
def under_torchrun(folder: Path, *options: str) -> Iterator[Watched]:
    (folder / "job.py").write_text(SCRIPT)
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "paceline"]
    words = [*start, "watchover", *options, "--hang-timeout", "2", str(folder / "job.py"), "--epochs", "5"]
    env: Mapping[str, str] = {**os.environ, "TMPDIR": str(folder), "OMP_NUM_THREADS": "1"}
    with (folder / "output.txt").open("wb") as output:
        process = warm.Popen(words, env=env, stdout=output, stderr=output)
    try:
        yield Watched(folder, process)
    finally:
        process.kill()
        process.wait()


def agents() -> list[int]:
    """Those of this test run."""
    of_this_run = carriers(os.environ["PACELINE_TEST_RUN"], "PACELINE_TEST_RUN")
    return [pid for pid, words in of_this_run.items() if "-m paceline.launch.agent" in words]


@pytest.mark.slow
def test_under_torchrun_a_hang_is_named_once_and_nobody_is_ended_not_even_by_the_death_of_the_agent(
    tmp_path: Path,
) -> None:
    with under_torchrun(tmp_path) as job:
        page = job.says(r"STALL after .* CAUSE: rank 1 .*\n.*\n.*")[0]
        assert re.search(rf" 1 .*_reduce .*\bjob.py:{LINE}\b", page) and "rank 0 waits" in page, page
        (tmp_path / "go").touch()
        job.says("ranks 0, 1 are making progress again")
        (watching,) = agents()
        os.kill(watching, signal.SIGKILL)
        job.says("the agent of this node has ended")
        (tmp_path / "stop").touch()
        assert job.process.wait(30) == 0, job.output.read_text()
        assert job.output.read_text().count("STALL") == 1


def test_a_launcher_that_is_killed_leaves_nothing_where_watchover_may_end_ranks(tmp_path: Path) -> None:
    with under_torchrun(tmp_path, "--end") as job:
        job.says("no progress for")
        job.process.kill()
        job.says("the launcher of the ranks on .* has ended, but the ranks still run; stopping them")
        wait_until(lambda: not agents(), "the agent ends")
        for rank in range(2):
            process = read_process(int((tmp_path / f"pid-{rank}").read_text()))
            assert process is None or not process.runs  # a zombie waits for init, which takes its time


def by_hand(folder: Path, world: int, *options: str) -> list[subprocess.Popen[bytes]]:
    """Ranks as some launcher of somebody's starts them: with torchrun's variables."""
    port = str(20000 + os.getpid() % 9000)
    env = {**os.environ, "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world), "MASTER_PORT": port}
    words = ["-m", "paceline", "watchover", "--hang-timeout", "2", *options, folder / "job.py", "--epochs", "5"]
    own = [{**env, "MASTER_ADDR": "127.0.0.1", "RANK": str(n), "LOCAL_RANK": str(n)} for n in range(world)]
    with (folder / "output.txt").open("wb") as output:
        # rank 0 last: its agent must not become our child, as what ends while we fork does
        ranks = [warm.Popen(words, env=one, stdout=output, stderr=output, rank=n) for n, one in enumerate(own[::-1])]
    return ranks[::-1]


@pytest.mark.slow
def test_where_it_may_the_ranks_that_wait_are_freed_and_all_are_ended_with_what_they_have_started(
    tmp_path: Path,
) -> None:
    begins = "        while not (here"
    starts = "subprocess.Popen(['sh', '-c', 'sleep 601; :'], start_new_session=True)"
    child = f"        import subprocess; (here / 'child').write_text(str({starts}.pid))\n"
    (tmp_path / "job.py").write_text(SCRIPT.replace(begins, child + begins))
    ranks = by_hand(tmp_path, 3, "--end", "--run-dir", str(tmp_path / "run"))
    codes = [one.wait(30) for one in ranks]
    text = (tmp_path / "output.txt").read_text()
    assert codes[1] == -signal.SIGTERM and 1 in codes and 0 not in codes, text  # a busy machine's may raise too late
    assert "RuntimeError" in text and text.count("CAUSE: rank 1 ") == 1
    told = read_diagnosis(tmp_path / "run" / "attempt-1" / "diagnosis-1")
    assert told.diagnosis.causes == (1,) and told.diagnosis.site.startswith(f"job.py:{LINE + 1}")
    wait_until(lambda: not agents(), "the agent ends")
    child = int((tmp_path / "child").read_text())
    assert not [p.pid for p in processes() if p.runs and child in (p.pid, p.parent)]


def test_who_failed_first_is_told_and_exit_codes_are_the_scripts_own(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(
        "import os, sys, time\nfrom pathlib import Path\nhere = Path(__file__).with_name('here')\n"
        "while os.environ['RANK'] == '1' and not here.exists():\n    time.sleep(0.1)\n"
        "here.touch()\ntime.sleep(1)\n"
        "if os.environ['RANK'] == '1':\n    raise ValueError('bad sample 4711')\n"
        "time.sleep(1.5)\nsys.exit(7)\n"
    )
    ranks = by_hand(tmp_path, 2)
    assert [one.wait(30) for one in ranks] == [7, 1]
    wait_until(lambda: not agents(), "the agent ends")
    text = (tmp_path / "output.txt").read_text()
    assert re.search(r"rank 1 \(.*\) failed: .*\n(.*\n)+ValueError: .* 4711", text), text
    assert text.count("Traceback") == 2  # the rank's own, and the diagnosis's
