"""A whole launch of small workers without torch: what is on the screen, who is named, which exit code."""

import json
import os
import signal
import socket
import sys
from pathlib import Path

import pytest
from tests.errors import codes
from tests.launch.launch_harness import PRELUDE, carriers, wait_until
from tests.launch.terminals import shown_by_a_launch

pytestmark = pytest.mark.sample(2)

LOST = 'DistNetworkError("Connection closed by peer [127.0.0.1]:5120")'

# name -> (the worker, exit code, how rank 1 failed by the diagnosis's headline, a line that must stand in it)
FAILURES = {
    "raises": (f"fail(ValueError('bad sample 4711')) if rank == 1 else fail({LOST}, cleanup=0.1)",
               1, "exit code 1", "ValueError: bad sample 4711"),
    "raises and cleans up while its victims die": (
        f"fail(ValueError('bad sample'), cleanup=1.5) if rank == 1 else fail({LOST})",
        1, "exit code 1", "ValueError: bad sample"),
    "victims end before the culprit, who leaves no record": (
        f"fail({LOST}) if rank != 1 else (time.sleep(0.8), sys.exit(3))", 3, "exit code 3", "output of the ranks"),
    "victims without a record, by their log": (
        "if rank == 1: time.sleep(0.8); sys.exit(3)\n"
        "print('gloo: Connection reset by peer', file=sys.stderr); os.abort()",
        3, "exit code 3", "output of the ranks"),
    "SIGKILL": (f"os.kill(os.getpid(), 9) if rank == 1 else (time.sleep(0.1), fail({LOST}))", 137,
                "killed by SIGKILL (if no user sent it, the kernel's OOM killer may have: see dmesg)",
                "output of the ranks"),
    "segmentation fault": ("if rank == 1:\n    ctypes.string_at(0)\nforever()",
                           139, "killed by SIGSEGV", "  Fatal Python error: Segmentation fault"),
    "sys.exit(3)": ("if rank == 1:\n    print('last words'); sys.exit(3)\nforever()", 3, "exit code 3", "  last words"),
    "in words": ("fail(ValueError('the dataset is truncated'), 2, traceback=False) if rank == 1 else forever()",
                 2, "exit code 2", "the dataset is truncated"),
    "early end": (f"sys.exit(0) if rank == 0 else fail({LOST}, cleanup=0.3)",
                  1, "exit code 1", "had already ended, with code 0, while others ran"),
}  # fmt: skip


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", FAILURES)
def test_first_failure(launch, name: str) -> None:
    worker, code, headline, line = FAILURES[name]
    one = launch(worker, nproc=2)
    assert one.finish() == code, one.stderr
    rank, _, rest = one.diagnosis[0].partition(" (")
    assert f"{rank}{rest[rest.index(') failed') + 1 :]}" == f"rank 1 failed: {headline}"
    assert any(line in told for told in one.stderr.splitlines()), one.stderr
    if name == "in words":
        assert "Traceback" not in one.stderr


def test_every_rank_alike_is_told_once(launch) -> None:
    one = launch("fail(ValueError('mine'), 2, traceback=False)")
    assert one.finish() == 2
    assert one.stderr.count("\nmine\n") == 1


def test_output_is_folded_and_the_diagnosis_stands_last(launch) -> None:
    one = launch(
        "print('out', rank, flush=True); print('err', rank, file=sys.stderr); ready()\n"
        "if rank == 1:\n"
        "    while len(list(folder.glob('ready-*'))) < 3: time.sleep(0.01)\n"
        "    fail(ValueError('bad'))\n"
        "def last(*_): print('stops', file=sys.stderr); sys.exit(1)\n"
        "signal.signal(signal.SIGTERM, last)\n"
        "forever()"
    )
    assert one.finish() == 1
    assert one.stdout == "out 0\n"
    assert one.stderr.startswith("err 0\nstops\nrank 1 (")
    assert one.stderr.splitlines()[-1].endswith(f": {one.folder}/rank-<rank>.log")
    assert sorted((one.folder / "rank-0.log").read_text().splitlines()) == ["err 0", "out 0", "stops"]
    assert sorted((one.folder / "rank-2.log").read_text().split("\n")) == ["", "err 2", "out 2", "stops"]


def test_a_terminal_stays_a_terminal_for_rank_0(tmp_path: Path) -> None:
    shown = shown_by_a_launch(tmp_path, PRELUDE + "print(rank, sys.stdout.isatty(), flush=True)")
    assert shown == b"0 True\r\n" and (tmp_path / "rank-1.log").read_text() == "1 False\n"


def test_without_a_guard_the_worker_does_not_watch_either(launch) -> None:
    one = launch("print(spec.guarded)", nproc=1, hang_timeout=" Off ")
    assert one.finish() == 0 and one.stdout == "False\n"


def test_what_a_worker_sees(launch) -> None:
    one = launch(
        "import json\n"
        "kept = ('GLOO_', 'RANK', 'WORLD_SIZE', 'LOCAL_', 'GROUP_', 'MASTER_', 'OMP_', 'PACELINE_')\n"
        "env = {k: v for k, v in os.environ.items() if k.startswith(kept)}\n"
        "env['parent'] = os.getppid()\n"
        "links = [os.readlink(p) for p in Path('/proc/self/fd').iterdir() if os.path.islink(p)]\n"
        "env['sockets'] = sum(link.startswith('socket:') for link in links)\n"
        "env['store'] = os.readlink(f'/proc/self/fd/{spec.store}')\n"
        "env['stdin'] = os.readlink('/proc/self/fd/0')\n"
        "env['session'] = os.getsid(0) == os.getpid()\n"
        "(folder / f'env-{rank}.json').write_text(json.dumps(env))",
        nproc=2,
        env={"PACELINE_WORKER": "99", "PACELINE_LEFT_OVER": "of an outer run", "RANK": "7"},
    )
    assert one.finish() == 0, one.stderr
    zero, other = (json.loads((one.folder / f"env-{rank}.json").read_text()) for rank in (0, 1))
    assert other.pop("PACELINE_AGENT_MARK").startswith(f"{one.agent_pid}-")
    assert other == {
        "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": zero["MASTER_PORT"], "OMP_NUM_THREADS": "1",
        "PACELINE_RUN_ID": "test", "GLOO_SOCKET_IFNAME": "lo", "parent": one.agent_pid, "sockets": 0,
        "store": "/memfd:paceline-store (deleted)",  # not a port: other users reach that
        "stdin": "/dev/null", "session": True,
    }  # fmt: skip
    assert zero["sockets"] == 0 and zero["store"] == other["store"]
    with socket.socket() as free:  # for the workers' own code
        free.bind(("127.0.0.1", int(zero["MASTER_PORT"])))


def test_port_taken(launch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        one = launch("", port=port)
        assert one.finish() == 2
    assert codes(one.stderr) == ["port-taken"]
    assert f" {port} " in one.stderr and f"pid {os.getpid()} " in one.stderr
    assert not list(one.folder.glob("rank-*.log"))


def test_command_that_does_not_exist(launch) -> None:
    one = launch("", argv=["/no/such/program"])
    assert one.finish() == 2
    assert "/no/such/program" in one.stderr and "Traceback" not in one.stderr


def test_a_wrapped_worker_runs(launch) -> None:
    one = launch("print('ran', rank)", nproc=1)
    assert one.finish() == 0
    shell = ["sh", "-c", f"{sys.executable} {one.folder}/worker.py; exit $?"]
    wrapped = launch("", nproc=1, argv=shell)
    assert wrapped.finish() == 0 and wrapped.stdout == "ran 0\n", wrapped.stderr


def test_a_users_module_in_the_working_directory_does_not_reach_the_agent(launch, tmp_path: Path) -> None:
    (tmp_path / "select.py").write_text("raise SystemExit('the wrong select')")
    one = launch("print('ran', rank)", nproc=1, cwd=tmp_path)
    assert one.finish() == 0 and one.stdout == "ran 0\n", one.stderr


def test_what_a_finished_worker_leaves_is_ended(launch) -> None:
    one = launch("grandchild()", nproc=2)  # the launch fixture fails if it is left
    assert one.finish() == 0


def test_records_of_an_earlier_generation_are_not_told(launch) -> None:
    one = launch("fail(ValueError('before')) if rank == 1 else forever()", nproc=2)
    assert one.finish() == 1 and "ValueError: before" in one.stderr
    two = launch("sys.exit(3) if rank == 1 else forever()", nproc=2, reuse=one.folder)
    assert two.finish() == 3 and "before" not in two.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR2])  # more of them: test_stop_signals.py
def test_stop_signals(launch, number: signal.Signals) -> None:
    one = launch("forever()", nproc=2)
    one.wait_ready(2)
    one.process.send_signal(number)
    assert one.finish() == 128 + number
    assert one.stderr == f"stopped by {number.name}\n"


ASKED = "def stop(*_): time.sleep(0.3); (folder / 'asked').write_text({what}); sys.exit(0)\n"
GOOD_ORDER = {
    # a DataLoader worker that died of our SIGTERM would make its trainer fail
    "the trainer alone is asked": ("child = grandchild()\n" + ASKED.format(what="str(child.poll())"), "forever()"),
    "also one that is stopped": (ASKED.format(what="'None'"), "ready(); os.kill(os.getpid(), signal.SIGSTOP)"),
}


@pytest.mark.parametrize("name", GOOD_ORDER)
def test_a_worker_can_stop_in_good_order(launch, name: str) -> None:
    before, waits = GOOD_ORDER[name]
    one = launch(f"{before}signal.signal(signal.SIGTERM, stop)\n{waits}", nproc=1)
    one.wait_ready(1)
    one.process.send_signal(signal.SIGTERM)
    assert one.finish() == 0
    assert (one.folder / "asked").read_text() == "None"


def test_ctrl_c_while_the_agent_starts(launch) -> None:
    one = launch("forever()", nproc=1)
    wait_until(lambda: len(carriers(one.mark)) > 1, "the agent exists")
    one.process.send_signal(signal.SIGINT)
    assert one.finish() == 130
    assert one.stderr == "stopped by SIGINT\n"


def test_ctrl_c_while_the_agent_cleans_up_changes_nothing(launch) -> None:
    """Its temporary folder has many files, so that the signal arrives in between."""
    one = launch("for n in range(50_000): open(f'{spec.temporary}/{n}', 'w').close()", nproc=1)
    wait_until((one.folder / "ended.json").exists, "the run has ended")
    os.kill(one.agent_pid, signal.SIGINT)
    assert one.finish() == 0
    assert one.stderr == ""


def test_a_second_signal_of_another_kind_ends_the_grace(launch) -> None:
    one = launch(
        "signal.signal(signal.SIGTERM, lambda *_: (folder / 'asked').touch())\nforever()",
        nproc=1,
        grace_period_seconds=3600.0,  # without the second signal this would outlast the test
    )
    one.wait_ready(1)
    one.process.send_signal(signal.SIGINT)
    wait_until((one.folder / "asked").exists, "the worker was asked to stop")
    one.process.send_signal(signal.SIGUSR2)
    assert one.finish() == 130
    assert one.stderr == "stopped by SIGINT\n"


def test_nohup_is_respected(launch) -> None:
    one = launch("ready()\nwhile not (folder / 'go').exists(): time.sleep(0.02)", nproc=1, ignored=(signal.SIGHUP,))
    one.wait_ready(1)
    one.process.send_signal(signal.SIGHUP)
    (one.folder / "go").touch()
    assert one.finish() == 0
