"""Restarts of small workers without torch: who starts again, with what, and what stays of the start before."""

import signal

import pytest
from tests.errors import codes
from tests.launch.launch_harness import wait_until
from tests.run_script import free_port

pytestmark = pytest.mark.sample(2)

KILL = "os.kill(os.getpid(), signal.SIGKILL)"
LOST = 'DistNetworkError("Connection closed by peer [127.0.0.1]:5120")'


def restarts(one) -> list[str]:
    return [line for line in one.stderr.splitlines() if line.startswith("restart ")]


def test_a_killed_worker_is_started_again_with_all_others(launch) -> None:
    one = launch(
        "(folder / f'env-{generation}-{rank}').write_text(os.environ['WORLD_SIZE'] + ' ' + os.environ['MASTER_PORT'])\n"
        "print('starts', file=sys.stderr); ready()\n"
        "if generation == 0 and rank == 1:\n"
        "    while not (folder / 'ready-0').exists(): time.sleep(0.01)\n"
        f"    {KILL}\n"
        "if generation == 0: forever()",
        nproc=2,
        max_restarts=3,
    )
    assert one.finish() == 0, one.stderr
    assert one.diagnosis[0].startswith("rank 1 (") and "killed by SIGKILL" in one.diagnosis[0]
    (line,) = restarts(one)
    assert line.startswith("restart 1 of 3: 2 ranks ") and one.stderr.index(line) > one.stderr.index(one.diagnosis[0])
    for rank in (0, 1):
        assert (one.folder / f"rank-{rank}.log").read_text() == "starts\n---- generation 1 ----\nstarts\n"
    seen = {path.name: path.read_text().split() for path in one.folder.glob("env-*")}
    assert seen["env-0-0"] == seen["env-0-1"] and seen["env-1-0"] == seen["env-1-1"]
    assert [words[0] for words in seen.values()] == ["2"] * 4


def test_nothing_of_the_old_generation_runs_when_the_new_one_starts(launch) -> None:
    one = launch(
        "if generation == 0:\n"
        "    signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "    (folder / f'pids-{rank}').write_text(f'{os.getpid()} {grandchild().pid}')\n"
        "    ready()\n"
        "    while len(list(folder.glob('ready-*'))) < 2: time.sleep(0.01)\n"
        f"    {KILL} if rank == 1 else forever()\n"
        "pids = [pid for path in folder.glob('pids-*') for pid in path.read_text().split()]\n"
        "alive = [p for p in pids if Path('/proc', p).exists() and ') Z' not in Path('/proc', p, 'stat').read_text()]\n"
        "sys.exit(len(pids) != 4 or bool(alive))",
        nproc=2,
        max_restarts=1,
        grace_seconds=0.3,
    )
    assert one.finish() == 0, one.stderr


@pytest.mark.slow
def test_a_rank_that_fails_twice_alike_is_left_out(launch) -> None:
    one = launch(
        f"if rank == 2: {KILL}\n"
        "if os.environ['WORLD_SIZE'] == '3': forever()\n"
        "names = ('LOCAL_WORLD_SIZE', 'OMP_NUM_THREADS')\n"
        "print(*(os.environ[name] for name in names), generation, len(spec.snapshots))",
        nproc=3,
        min_nproc=2,
        max_restarts=2,
    )
    assert one.finish() == 0, one.stderr
    assert one.stdout == "2 1 2 3\n"
    assert restarts(one)[1].startswith("restart 2 of 2: 2 ranks ")


def test_the_same_failure_at_the_same_step_twice_ends_the_run(launch) -> None:
    one = launch(
        "from paceline.protocol.status_page import StatusPage\n"
        "box = StatusPage.from_descriptor(spec.page)\n"
        "box.set_step(7 + rank)\n"
        f"ready(); {KILL} if rank == 0 else forever()",
        nproc=1,
        max_restarts=5,
    )
    assert one.finish() == 137
    sentence = "the same failure at the same step twice: rank 0, exit code 137, after step 7"
    assert one.stderr.splitlines()[-1] == f"not restarted: {sentence}"
    assert len(restarts(one)) == 1


def test_failures_at_later_steps_are_forgiven_until_the_restarts_are_used_up(launch) -> None:
    """The step is the largest of all ranks: rank 0's alone would say that nothing moves."""
    one = launch(
        "from paceline.protocol.status_page import StatusPage\n"
        "StatusPage.from_descriptor(spec.page).set_step(generation * rank)\nready()\n"
        "while not (folder / 'ready-1').exists(): time.sleep(0.01)\n"
        f"{KILL} if rank == 0 else forever()",
        nproc=2,
        max_restarts=2,
    )
    assert one.finish() == 137
    assert one.stderr.splitlines()[-1].startswith("not restarted: 2 of 2 ")
    assert len(restarts(one)) == 2


def test_what_failed_first_is_still_on_disk_after_the_second_failure(launch) -> None:
    one = launch(f"fail({LOST} if generation == 0 else ValueError('bad'))", nproc=1, max_restarts=3)
    assert one.finish() == 1
    assert "DistNetworkError" in (one.folder / "error-0.json").read_text()
    assert "ValueError" in (one.folder / "error-0-generation-1.json").read_text()
    assert one.diagnosis[-2:][0] == "ValueError: bad"  # the record of this generation, not of the last


def test_the_last_words_of_an_earlier_generation_explain_nothing(launch) -> None:
    one = launch(
        f"if generation == 0: print('Connection reset by peer', flush=True); {KILL}\n"
        "sys.exit(3) if rank == 1 else forever()",
        nproc=2,
        max_restarts=3,
    )
    assert one.finish() == 3, one.stderr  # a victim would have been started again
    assert len(restarts(one)) == 1


def test_snapshots_outlive_the_workers_also_when_there_are_fewer(launch) -> None:
    one = launch(
        "slots = spec.snapshots\n"
        "assert [len(pair) for pair in slots] == [2, 2, 2]\n"
        "if generation == 0:\n"
        "    for turn in (0, 1): os.write(slots[rank][turn], f'rank {rank} turn {turn}'.encode())\n"
        "    ready()\n"
        "    while len(list(folder.glob('ready-*'))) < 3: time.sleep(0.01)\n"
        "if os.environ['WORLD_SIZE'] == '3':\n"
        f"    {KILL} if rank == 2 else forever()\n"
        "print([os.pread(fd, 99, 0).decode() for pair in slots for fd in pair])",
        nproc=3,
        min_nproc=2,
        max_restarts=2,
    )
    assert one.finish() == 0, one.stderr
    assert one.stdout.strip() == str([f"rank {rank} turn {turn}" for rank in range(3) for turn in (0, 1)])


def test_without_restarts_nobody_pays_for_snapshots(launch) -> None:
    one = launch("print(bool(spec.snapshots))", nproc=1)
    assert one.finish() == 0 and one.stdout == "False\n"


def test_restarts_use_up_no_descriptors_of_the_agent(launch) -> None:
    one = launch(
        "from paceline.protocol.status_page import StatusPage\n"
        "StatusPage.from_descriptor(spec.page).set_step(generation)\n"
        "time.sleep(0.1)\n"  # until the agent has closed the store
        "print(len(os.listdir(f'/proc/{os.getppid()}/fd')), flush=True)\n"
        f"if generation < 3: {KILL}",
        nproc=1,
        max_restarts=3,
    )
    assert one.finish() == 0, one.stderr
    assert len(set(one.stdout.split())) == 1 and len(one.stdout.split()) == 4


OWN_STORE = """import socket
store = socket.socket()
store.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
store.bind(('127.0.0.1', int(os.environ['MASTER_PORT'])))
store.listen()
"""


def test_a_fixed_port_is_used_again(launch) -> None:
    port = free_port()
    one = launch(
        f"{OWN_STORE}"
        "client = socket.create_connection(('127.0.0.1', int(os.environ['MASTER_PORT'])))\n"
        "there, _ = store.accept(); there.close(); client.close()\n"  # the port is left in TIME_WAIT
        "print(os.environ['MASTER_PORT'], flush=True)\n"
        f"if generation == 0: {KILL}",
        nproc=1,
        max_restarts=1,
        port=port,
    )
    assert one.finish() == 0, one.stderr
    assert one.stdout == f"{port}\n{port}\n"


def test_a_port_that_is_lost_between_two_starts_is_no_wrong_use(launch) -> None:
    """Exit code 2 would say that nothing was trained."""
    port = free_port()
    one = launch(
        f"{OWN_STORE}"
        "apart = {'stderr': subprocess.DEVNULL, 'env': {}, 'start_new_session': True}\n"  # not swept
        "subprocess.Popen(['sleep', '2'], pass_fds=[store.fileno()], **apart)\n"
        f"{KILL}",
        nproc=1,
        max_restarts=1,
        port=port,
    )
    assert one.finish() == 1
    assert codes(one.stderr) == ["port-taken"] and f" {port} " in one.stderr.splitlines()[-1]


def test_a_stop_signal_while_the_old_workers_end_forbids_the_restart(launch) -> None:
    one = launch(
        "signal.signal(signal.SIGTERM, lambda *_: (folder / 'asked').touch())\nready()\n"
        "while len(list(folder.glob('ready-*'))) < 2: time.sleep(0.01)\n"
        f"{KILL} if rank == 1 else forever()",
        nproc=2,
        max_restarts=3,
        grace_seconds=3600.0,
    )
    wait_until((one.folder / "asked").exists, "the survivor is asked to stop")
    one.process.send_signal(signal.SIGTERM)
    assert one.finish() == 128 + signal.SIGTERM
    assert one.stderr.splitlines()[-1] == "stopped by SIGTERM" and not restarts(one)
