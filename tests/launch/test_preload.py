"""Workers that are forked from a preloaded process: are they what started ones are, and does nothing depend on it?"""

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from tests import warm
from tests.launch.launch_harness import PRELUDE, Launch, wait_until
from tests.launch.terminals import shown_by_a_launch
from tests.small_mnist import small_mnist as small_mnist

from paceline.cli.train import can_fork_workers_from_preloader
from paceline.config.settings import LaunchConfig, TrainConfig
from paceline.protocol.control import select_import_env
from paceline.protocol.job import JobSpec

pytestmark = pytest.mark.sample(2)

BECOMES = """
import os, sys
{before}
from paceline.protocol.control import WorkerSpec
if (spec := WorkerSpec.from_environment()).preload >= 0:
    {first}
    from paceline.rank.imports import import_without_gc
    from paceline.rank.preload import serve_fork_orders
    serve_fork_orders(spec, lambda: import_without_gc({modules!r}))
forked = b'"preload":' in open("/proc/self/environ", "rb").read()
"""
TELLS_FORKED = "(folder / f'forked-{generation}-{rank}').write_text(str(forked))\n"


@pytest.fixture
def preloaded(launch, tmp_path: Path) -> Callable[..., Launch]:
    """Starts a launcher as `launch` does, whose workers can be forked from a preloader with these modules."""

    def begin(
        worker: str, *, before: str = "", first: str = "pass", modules: tuple[str, ...] = ("json",), **settings: object
    ) -> Launch:
        script = tmp_path / "forking.py"
        script.write_text(BECOMES.format(before=before, first=first, modules=modules) + PRELUDE + TELLS_FORKED + worker)
        return launch("", **{"nproc": 2, "preload": True, "argv": [sys.executable, str(script)], **settings})

    return begin


def forked(one: Launch) -> dict[str, str]:
    """Which worker of which generation was forked."""
    return {path.name: path.read_text() for path in sorted(one.folder.glob("forked-*"))}


LOOKS = """
import json, resource
def lines(path):
    return dict(line.split(":", 1) for line in Path(path).read_text().splitlines())
status = lines("/proc/self/status")
def opened():
    links = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            links[name] = re.sub(r"\\[.*|/proc/.*", "", os.readlink(f"/proc/self/fd/{name}"))
        except OSError:
            pass
    return links
links = None
while (again := opened()) != links:  # the guard's thread may be about to write its name
    links = again
    time.sleep(0.05)
def named(name, value):  # the numbers of descriptors are the agent's business, but what stands behind them is not
    return [links[n] for n in re.split("[;,]", value)] if name.endswith(("_FD", "_FDS")) else value
seen = {
    "env": {k: named(k, v) for k, v in os.environ.items() if not k.endswith(("_MARK", "MASTER_PORT", "_TEMPORARY"))},
    "standard": [links[n] for n in "012"],
    "open": sorted(links.values()),
    "session": os.getsid(0) == os.getpgid(0) == os.getpid(),
    "parent": os.getppid() == json.loads((folder / "agent-0.json").read_text())["agent_pid"],
    "cwd": os.getcwd(),
    "signals": [status[name] for name in ("SigBlk", "SigIgn", "SigCgt", "ShdPnd")],
    "limits": [resource.getrlimit(n) for n in (resource.RLIMIT_NOFILE, resource.RLIMIT_CORE, resource.RLIMIT_STACK)],
    "umask": status["Umask"],
    "nice": os.nice(0),
    "command": Path("/proc/self/cmdline").read_bytes().decode(),
    "name": Path("/proc/self/comm").read_text(),
    "python": [sys.argv, sys.orig_argv, sys.path, list(sys.flags), sys.executable, sys.warnoptions],
    "streams": [[s.encoding, s.errors, s.line_buffering, s.write_through] for s in (sys.stdin, sys.stdout, sys.stderr)],
    "threads": [thread.name for thread in __import__("threading").enumerate()],
}
(folder / f"seen-{rank}.json").write_text(json.dumps(seen))
"""


def test_a_forked_worker_sees_what_a_started_one_sees(preloaded, tmp_path: Path) -> None:
    (tmp_path / "lock").touch()
    seen: list[list[dict[str, Any]]] = []
    # agent-0.json, where the parent stands, is complete when the last worker has been started
    waits = (
        "\nwhile len(list(folder.glob('forked-*'))) < 2 or not (folder / 'agent-0.json').exists(): time.sleep(0.01)\n"
    )
    for preload in (True, False):
        one = preloaded(
            waits + LOOKS,
            preload=preload,
            lock=str(tmp_path / "lock"),
            ignored=(signal.SIGHUP,),
            max_restarts=1,
            env={"ODD": "\udcff=x\n", "PACELINE_LEFT_OVER": "1"},
        )
        assert one.finish() == 0, one.stderr
        assert set(forked(one).values()) == {str(preload)}
        texts = [(one.folder / f"seen-{rank}.json").read_text() for rank in (0, 1)]
        seen.append([json.loads(text.replace(str(one.folder), "FOLDER")) for text in texts])
    for ours, theirs in zip(*seen, strict=True):
        assert ours == theirs
        assert ours["session"] and ours["parent"] and ours["standard"][0] == "/dev/null"


def test_how_a_forked_worker_ends_is_seen(preloaded) -> None:
    one = preloaded("os.kill(os.getpid(), signal.SIGKILL) if rank == 1 else forever()")
    assert one.finish() == 137
    assert one.diagnosis[0].startswith("rank 1 (") and "killed by SIGKILL" in one.diagnosis[0]
    two = preloaded("fail(ValueError('bad sample')) if rank == 1 else forever()")
    assert two.finish() == 1
    assert "ValueError: bad sample" in two.stderr
    assert set(forked(one).values()) == set(forked(two).values()) == {"True"}


def test_restarted_workers_are_forked_again_and_an_escaped_child_is_ended(preloaded) -> None:
    """The child is in a session of its own, and runs no program of its own: only its environment says whose it is."""
    one = preloaded(
        "if generation == 0 and rank == 1:\n"
        "    child = os.fork()\n"
        "    if child == 0:\n"
        "        os.setsid(); (folder / 'child').write_text(str(os.getpid())); time.sleep(600)\n"
        "    while not (folder / 'child').exists() or not (folder / 'child').read_text(): time.sleep(0.01)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "if generation == 0: forever()\n"
        "stat = Path('/proc') / (folder / 'child').read_text() / 'stat'\n"
        "sys.exit(stat.exists() and ') Z' not in stat.read_text())",
        max_restarts=1,
    )
    assert one.finish() == 0, one.stderr
    assert forked(one) == {f"forked-{generation}-{rank}": "True" for generation in (0, 1) for rank in (0, 1)}


@pytest.mark.parametrize("how", ["SIGKILL", pytest.param("SIGSTOP", marks=pytest.mark.slow)])
def test_without_an_answer_workers_are_started_by_their_command(preloaded, how: str) -> None:
    one = preloaded(
        "if generation == 0 and rank == 0:\n"
        f"    os.kill(preloader, signal.{how}); os.kill(os.getpid(), signal.SIGKILL)\n"
        "if generation == 0: forever()",
        before="preloader = os.getpid()",
        max_restarts=1,
    )
    assert one.finish() == 0, one.stderr
    assert one.stderr.count("Preloading disabled") == 1
    assert forked(one)["forked-1-0"] == forked(one)["forked-1-1"] == "False"


def test_a_terminal_stays_a_terminal_for_a_forked_rank_0(tmp_path: Path) -> None:
    worker = "print(rank, forked, sys.stdout.isatty(), sys.stdout.line_buffering, flush=True)"
    script = BECOMES.format(before="", first="pass", modules=("json",)) + PRELUDE + worker
    assert shown_by_a_launch(tmp_path, script, preload=True) == b"0 True True True\r\n"
    assert (tmp_path / "rank-1.log").read_text() == "1 True False False\n"


WHY = {
    "it ends": ("os._exit(3)", ("json",), "died while importing"),
    "a module is not there": ("pass", ("no_such_module_4711",), "No module named 'no_such_module_4711'"),
    "it has a second thread": (
        "import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()",
        ("json",),
        "has 2 threads",
    ),
    "it has a file open": ("kept = open('/dev/zero')", ("json",), "has opened files while importing: /dev/zero"),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", WHY)
def test_what_is_not_fit_to_be_forked_from_is_said_once_and_not_used(preloaded, name: str) -> None:
    first, modules, why = WHY[name]
    one = preloaded("", first=first, modules=modules)
    assert one.finish() == 0
    assert one.stderr.count("\n") == 1 and why in one.stderr, one.stderr
    assert set(forked(one).values()) == {"False"}


@pytest.fixture
def importing(preloaded, tmp_path: Path) -> tuple[Launch, int]:
    """A launch whose preloader never gets to the end of its imports, and its agent's pid."""
    told = tmp_path / "told"
    (tmp_path / "endless.py").write_text(
        f"import os, time, pathlib\npathlib.Path({str(told)!r}).write_text(str(os.getppid()))\ntime.sleep(600)\n"
    )
    one = preloaded("forever()", modules=("endless",))
    wait_until(lambda: told.exists() and bool(told.read_text()), "the preloader imports")
    return one, int(told.read_text())


def test_a_run_can_be_stopped_while_the_preloader_imports(importing: tuple[Launch, int]) -> None:
    one, _ = importing
    one.process.send_signal(signal.SIGTERM)
    assert one.finish() == 128 + signal.SIGTERM
    assert one.stderr == "stopped by SIGTERM\n"


def test_a_preloader_that_still_imports_dies_with_its_agent(importing: tuple[Launch, int]) -> None:
    """Nobody has written down yet who is to be swept: the kernel ends it. The launch fixture sees what is left."""
    one, agent_pid = importing
    os.kill(agent_pid, signal.SIGKILL)
    assert one.finish() == 137


def test_without_restarts_the_preloader_is_gone_when_the_workers_run(preloaded) -> None:
    one = preloaded(
        "deadline = time.monotonic() + 20\n"
        "while Path('/proc', str(preloader)).exists() and time.monotonic() < deadline: time.sleep(0.02)\n"
        "sys.exit(Path('/proc', str(preloader)).exists())",
        before="preloader = os.getpid()",
    )
    assert one.finish() == 0
    assert set(forked(one).values()) == {"True"}


def test_what_an_import_prints_is_in_every_ranks_log(preloaded) -> None:
    one = preloaded("print('own', rank)", first="print('a warning', file=sys.stderr); os.system('echo from C')")
    assert one.finish() == 0
    for rank in (0, 1):
        log = (one.folder / f"rank-{rank}.log").read_text().splitlines()
        assert sorted(log) == sorted(["a warning", "from C", f"own {rank}"])


def test_random_numbers_that_nobody_has_seeded_differ_between_ranks_and_starts(preloaded) -> None:
    one = preloaded(
        "import random, numpy\n"
        "(folder / f'drawn-{generation}-{rank}').write_text(f'{random.random()} {numpy.random.rand()}')\n"
        "while generation == 0 and len(list(folder.glob('drawn-*'))) < 2: time.sleep(0.01)\n"
        "if generation == 0: os.kill(os.getpid(), signal.SIGKILL)",
        modules=("random", "numpy.random"),
        max_restarts=1,
    )
    assert one.finish() == 0, one.stderr
    assert set(forked(one).values()) == {"True"}
    drawn = [number for path in one.folder.glob("drawn-*") for number in path.read_text().split()]
    assert len(drawn) == len(set(drawn)) == 8


@pytest.mark.slow
def test_the_guard_sees_collectives_through_whatever_an_import_has_kept(preloaded, tmp_path: Path) -> None:
    (tmp_path / "keeper.py").write_text("from torch.distributed import all_reduce, isend\n")
    one = preloaded(
        "import keeper, torch.distributed as dist\n"
        "for name in ('all_reduce', 'isend'):\n"
        "    assert getattr(keeper, name) is getattr(dist, name), name\n"
        "    assert hasattr(getattr(keeper, name), '__wrapped__'), name\n"
        "dist.init_process_group('gloo')\n"
        "dist.P2POp(dist.isend, __import__('torch').ones(1), 1 - rank)\n"
        "keeper.all_reduce(__import__('torch').ones(1))\n"
        "from paceline.rank.guard import HangGuard\n"
        "HangGuard.of_process().ledger.take_order_hash()\n"
        "assert [op.kind for op in HangGuard.of_process().ledger.last_ordered_calls()] == ['all_reduce']\n"
        "dist.destroy_process_group()",
        before="",
        modules=("keeper",),
        plain_store=True,
    )
    assert one.finish() == 0, one.stderr
    assert set(forked(one).values()) == {"True"}


TASK = """
import os, sys
from dataclasses import replace
from pathlib import Path
from paceline.protocol.control import WorkerSpec
from paceline.tasks.mnist import cnn as built_in

def tell(moment):  # after the last step and its evaluation
    forked = b'"preload":' in Path("/proc/self/environ").read_bytes()
    told = f"{forked} {'paceline.launch' in sys.modules}"
    (Path(WorkerSpec.from_environment().attempt_dir) / f"forked-{os.environ['RANK']}").write_text(told)

def cnn(data_dir):
    return replace(built_in(data_dir=data_dir), on_end=tell)
"""


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.timeout(450)  # 10 s on a quiet machine
def test_a_training_has_the_same_bits_whether_its_workers_are_forked_or_not_and_none_imports_a_launcher(
    tmp_path: Path, small_mnist: Path
) -> None:
    (tmp_path / "mine.py").write_text(TASK)
    weights: list[str] = []
    for preload in ("auto", "off"):
        folder = tmp_path / preload
        command = [
            *("-m", "paceline", "train", f"{tmp_path}/mine.py:cnn", "--data-dir", str(small_mnist), "--nproc", "2"),
            *("--steps", "3", "--batch-size", "4", "--strategy", "exact", "--optimizer", "adamw", "--device", "cpu"),
            *("--preload", preload, "--run-dir", str(folder)),
        ]
        # agents are started, as a user's are: what a test's are forked from has imported launchers
        done = warm.run(command, torch=False, agents=False, timeout=360, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        told = {(folder / "attempt-1" / f"forked-{rank}").read_text() for rank in (0, 1)}
        assert told == {f"{preload == 'auto'} False"}, done.stderr
        weights.append(json.loads((folder / "summary.json").read_text())["weights_sha256"])
    assert weights[0] == weights[1]


def test_what_imports_may_read_must_be_alike_and_nothing_else() -> None:
    env = {"OMP_NUM_THREADS": "1", "RANK": "0", "MASTER_PORT": "1", "PACELINE_WORKER": "5", "GLOO_SOCKET_IFNAME": "lo"}
    assert select_import_env(env) == select_import_env({**env, "RANK": "1", "MASTER_PORT": "2", "PACELINE_WORKER": "6"})
    for name in ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "LD_LIBRARY_PATH", "PYTHONPATH", "TORCH_LOGS"):
        assert select_import_env(env) != select_import_env({**env, name: "8"})


def test_no_worker_is_forked_beside_cuda_for_another_python_or_where_it_is_switched_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = JobSpec((), 2, "id", 1, attempt_dir=str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")

    def preloads(where: JobSpec = here, **launch: Any) -> bool:
        return can_fork_workers_from_preloader(TrainConfig(launch=LaunchConfig(nproc=2, **launch)), where)

    elsewhere = replace(here, attempt_dir="")
    assert preloads() and preloads(device="cpu") and preloads(elsewhere, device="cpu")
    assert not preloads(device="cuda") and not preloads(elsewhere)
    assert not preloads(replace(here, python="/other/python")) and not preloads(backend="mpi")
    alone = replace(here, nproc=1)
    assert not preloads(alone) and preloads(alone, max_restarts=1)
    assert not preloads(preload="off")
    monkeypatch.setenv("PACELINE_PRELOAD", "off")
    assert not preloads()
