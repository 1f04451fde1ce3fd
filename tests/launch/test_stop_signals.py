"""Which signals a script hears when its launcher is told to stop, and when."""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.launch.agent.nodes_harness import several
from tests.launch.launch_harness import Launch, wait_until
from tests.launch.terminals import on_terminal, read_until

from paceline.protocol.control import BOOTSTRAP

pytestmark = pytest.mark.sample(4)

IMPORTS = "import os, signal, time\nfrom pathlib import Path\nfolder, rank = Path(), os.environ['RANK']\n"
NOTE = "def note(n, frame):\n    with (folder / f'heard-{rank}').open('a') as file: file.write(f'{n} ')\n"
NOTES = f"{NOTE}for n in (1, 2, 3, 10, 12, 15): signal.signal(n, note)\n"


@pytest.fixture
def script(launch, tmp_path: Path) -> Callable[..., Launch]:
    """Starts a launcher of one script, as `paceline launch` does."""

    def begin(code: str, **settings: object) -> Launch:
        argv = [sys.executable, "-P", "-m", BOOTSTRAP, str(tmp_path / "attempt-0" / "worker.py")]
        return launch(code, **{"plain_store": True, "argv": argv, "nproc": 1, **settings})

    return begin


def heard(one: Launch, rank: int = 0) -> list[int]:
    return [int(word) for word in (one.folder / f"heard-{rank}").read_text().split()]


@pytest.mark.sample(2)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2])
def test_the_signal_that_was_sent_then_sigterm_then_sigkill(script, number: signal.Signals) -> None:
    one = script(f"{NOTES}forever()", nproc=2, grace_period_seconds=0.5, grace_seconds=0.5)
    one.wait_ready(2)
    one.process.send_signal(number)
    assert one.finish() == 128 + number and one.stderr == f"stopped by {number.name}\n"
    assert heard(one) == heard(one, 1) == [number, signal.SIGTERM]


def test_sigterm_comes_once(script) -> None:
    one = script(f"{NOTES}forever()", grace_period_seconds=1.0, grace_seconds=0.5)
    one.wait_ready(1)
    one.process.send_signal(signal.SIGTERM)
    assert one.finish() == 143 and heard(one) == [signal.SIGTERM]


def test_a_second_signal_ends_the_grace_with_sigterm(script) -> None:
    one = script(f"{NOTES}forever()", grace_period_seconds=3600.0, grace_seconds=0.5)
    one.wait_ready(1)
    one.process.send_signal(signal.SIGINT)
    wait_until((one.folder / "heard-0").exists, "the first one was heard")
    one.process.send_signal(signal.SIGINT)
    assert one.finish() == 130 and heard(one) == [signal.SIGINT, signal.SIGTERM]


def test_a_rank_may_save_for_long_after_another_has_ended(script) -> None:
    """As where rank 0 alone saves: it has the whole grace."""
    waits = "ready()\ntry: time.sleep(600)\nexcept KeyboardInterrupt:\n"
    saves = f"{waits}    if rank: raise\n    time.sleep(2.5)\n    print('saved')"
    one = script(saves, nproc=2, grace_seconds=0.2)
    one.wait_ready(2)
    one.process.send_signal(signal.SIGINT)
    assert one.finish() == 130 and "saved" in one.stdout


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGUSR1])
def test_who_does_not_handle_what_was_sent_hears_sigterm(script, number: signal.Signals) -> None:
    one = script(f"{NOTE}signal.signal(15, lambda *a: (note(*a), sys.exit(0)))\nforever()")
    one.wait_ready(1)
    one.process.send_signal(number)
    assert one.finish() == 0 and heard(one) == [signal.SIGTERM]


@pytest.mark.parametrize(("number", "reached"), [(signal.SIGINT, True), (signal.SIGTERM, False)])
def test_what_a_script_has_started_hears_ctrl_c_alone(script, number: signal.Signals, reached: bool) -> None:
    waits = "import sys, time\ntry: print('child', flush=True), time.sleep(600)\n"
    child = f"{waits}except KeyboardInterrupt: open(sys.argv[1], 'w')"
    one = script(
        f"signal.signal(15, lambda *_: (time.sleep(0.5), sys.exit(0)))\n"
        f"child = subprocess.Popen([sys.executable, '-c', {child!r}, str(folder / 'child')], stdout=-1)\n"
        "child.stdout.readline()\nready()\ntry: time.sleep(600)\nexcept KeyboardInterrupt: child.wait()"
    )
    one.wait_ready(1)
    one.process.send_signal(number)
    assert one.finish() == 0 and (one.folder / "child").exists() is reached


def test_a_program_hears_it_with_all_that_it_has_started(launch, tmp_path: Path) -> None:
    program = f"sh -c 'trap : USR1; {sys.executable} {tmp_path}/attempt-0/worker.py; exit 0'"
    code = "def saved(*_): (folder / 'saved').touch(); sys.exit(0)\nsignal.signal(10, saved)\nforever()"
    one = launch(code, argv=["sh", "-c", program], nproc=1, plain_store=True)
    one.wait_ready(1)
    one.process.send_signal(signal.SIGUSR1)
    one.finish()
    assert (one.folder / "saved").exists()


def test_a_session_hears_sigterm_once(script) -> None:
    one = script(
        f"{NOTES}from paceline.train.preemption import record_stop_signals\n"
        "with record_stop_signals() as request:\n    ready()\n    while request.by is None: time.sleep(0.05)\n"
        "    time.sleep(1.0)\n    print(request.by)\nsys.exit(75)",
        grace_period_seconds=5.0,
    )
    one.wait_ready(1)
    one.process.send_signal(signal.SIGINT)
    assert one.finish() == 75 and one.stdout == "SIGTERM\n"


def test_ctrl_c_in_a_terminal_is_heard_once(tmp_path: Path) -> None:
    """The terminal sends it to a whole process group, where no rank is."""
    (tmp_path / "script.py").write_text(f"{IMPORTS}{NOTES}print('READY')\nwhile True: time.sleep(60)")
    launcher = [sys.executable, "-P", "-m", "paceline", "launch", "--nproc=2", "--grace-period=0.5", "script.py"]
    with on_terminal(launcher, cwd=tmp_path) as (process, keyboard):
        shown = read_until(keyboard, b"READY", times=2)
        os.write(keyboard, b"\x03")
        read_until(keyboard, b"run folder")
        assert process.wait(30) == 130, shown
    assert {(tmp_path / f"heard-{rank}").read_text() for rank in range(2)} == {"2 15 "}


def test_what_a_shell_has_ignored_for_a_job_in_the_background_is_heard(script) -> None:
    one = script(f"{NOTES}forever()", ignored=(signal.SIGINT,), grace_period_seconds=0.5, grace_seconds=0.5)
    one.wait_ready(1)
    one.process.send_signal(signal.SIGINT)
    assert one.finish() == 130 and heard(one)[0] == signal.SIGINT


@pytest.mark.parametrize("agent", [0, 1])
def test_on_other_nodes_the_same(tmp_path: Path, agent: int) -> None:
    settings = {"argv": (sys.executable, "-P", "-m", BOOTSTRAP, str(tmp_path / "worker.py"))}
    grace = {"grace_period_seconds": 0.5, "grace_seconds": 0.5}
    with several(tmp_path, f"{NOTES}forever()", nproc=1, plain_store=True, **settings, **grace) as run:
        run.start(0, 1)
        for rank in range(2):
            run.wait_for(f"ready-{rank}")
        run.agents[agent].send_signal(signal.SIGUSR2)
        run.codes()
        assert {path.name: path.read_text() for path in tmp_path.rglob("heard-*")} == dict.fromkeys(
            ("heard-0", "heard-1"), "12 15 "
        )
