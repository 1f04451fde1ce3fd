"""The launcher's half of a run on other hosts, with stubs in the place of ssh and the agents: processes on this one."""

import json
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Generator
from pathlib import Path

import pytest
from tests import warm
from tests.launch.launch_harness import MARK, Launch, end_all, survivors, wait_until

pytestmark = pytest.mark.sample(2)

LAUNCHER = """
import json, sys
from paceline.protocol.job import NodePlan
from paceline.errors import PacelineError
from paceline.launch.plan import Command, Plan
from paceline.launch.supervise import run
told = json.loads(sys.argv[1])
agents = [Command(f"n{k + 1}", tuple(argv)) for k, argv in enumerate(told["agents"])]
nodes = [NodePlan(argv=("x",), nproc=1, node=k, node0=("n1",), **told["plan"]) for k in range(len(agents))]
try:
    sys.exit(run(Plan(agents=tuple(agents), nodes=tuple(nodes))))
except PacelineError as error:
    print(error, file=sys.stderr)
    sys.exit(error.exit_code)
"""

STUB = """
import json, os, select, sys, time
from pathlib import Path
here = Path(sys.argv[1])
def write(text, fd=1):
    os.write(fd, text.encode())
def line():
    data = b""
    while not data.endswith(b"\\n"):
        byte = os.read(0, 1)
        if not byte:
            sys.exit(1)
        data += byte
    return data.decode().strip()
def announce():
    write(Path(sys.argv[2]).read_text() + "\\n")
def begin():
    announce()
    return json.loads(line())
def until(word):
    while (said := line()) != word:
        pass
def forever():
    (here / f"ready-{os.getpid()}").touch()
    while True:
        line()
"""


@pytest.fixture(scope="module")
def announcement(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What an agent says of its host."""
    path = tmp_path_factory.mktemp("facts") / "announcement"
    code = (
        "import sys, msgspec; from paceline.host.facts import gather_facts\n"
        "sys.stdout.buffer.write(msgspec.json.encode(gather_facts()))"
    )
    path.write_bytes(subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=90, check=True).stdout)
    return path


@pytest.fixture
def remote(tmp_path: Path, announcement: Path) -> Generator[Callable[..., Launch]]:
    """Starts a launcher whose agents run these Python texts; nothing of it may be left when the test ends."""
    launches: list[Launch] = []

    def begin(*texts: str, **plan: object) -> Launch:
        agents = [[sys.executable, "-c", STUB + text, str(tmp_path), str(announcement), "--announce"] for text in texts]
        told = {"agents": agents, "plan": {"nodes": len(texts), "min_nodes": len(texts), **plan}}
        mark = uuid.uuid4().hex
        process = warm.Popen(
            ["-P", "-c", LAUNCHER, json.dumps(told)],
            torch=False,
            env={**os.environ, MARK: mark},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        launches.append(Launch(tmp_path, process, mark))
        return launches[-1]

    yield begin
    end_all(launches)


def test_the_end_of_node_0_is_that_of_the_run(remote) -> None:
    for code in (0, 1, 7, 75):
        one = remote(f"begin(); sys.exit({code})", f"begin(); sys.exit({code})")
        assert one.finish() == code
        assert one.stdout == "" and one.stderr == ""


def test_each_agent_is_told_its_own_plan_and_the_addresses_of_node_0(remote, announcement: Path) -> None:
    one = remote(*["plan = begin(); (here / str(plan.get('node', 0))).write_text(json.dumps(plan))"] * 2)
    assert one.finish() == 0, one.stderr
    plans = [json.loads((one.folder / str(node)).read_text()) for node in (0, 1)]
    assert [plan.get("node", 0) for plan in plans] == [0, 1]
    addresses = [address["address"] for address in json.loads(announcement.read_text())["addresses"]]
    assert plans[0]["node0"] == plans[1]["node0"] == ["n1", *addresses]


@pytest.mark.slow
def test_a_sign_of_life_comes_every_two_seconds(remote) -> None:
    one = remote("begin(); t = time.monotonic(); a = line(); b = line(); write(repr((a, b, time.monotonic() - t)))")
    assert one.finish() == 0
    first, second, seconds = eval(one.stdout)
    assert (first, second) == ("", "") and 1.9 < seconds < 6


def test_all_hosts_without_an_agent_are_named_at_once_and_nothing_starts(remote) -> None:
    one = remote(
        "begin(); (here / 'started').touch()",
        "write('root@n2: Permission denied (publickey).\\n', 2); sys.exit(255)",
        "write('ssh: Could not resolve hostname n3: Name or service not known\\n', 2); sys.exit(255)",
        "write('sh: 1: exec: /opt/python: not found\\n', 2); sys.exit(127)",
    )
    assert one.finish() == 2
    told = one.stderr.splitlines()
    assert told[0].startswith("3 of 4 hosts ")
    assert [line.split(":")[0] for line in told[1:]] == ["  n2", "  n3", "  n4"]
    assert "ssh-copy-id" in told[1] and "/etc/hosts" in told[2] and "--python" in told[3]
    assert one.stdout == "" and not (one.folder / "started").exists()


def test_an_agent_that_ends_after_its_announcement_is_named(remote) -> None:
    one = remote("announce(); sys.exit(3)", "time.sleep(1); begin()")
    assert one.finish() == 2
    assert "n1: " in one.stderr and "exit code 3" in one.stderr and "n2" not in one.stderr


def test_a_host_whose_profile_talks_is_used_and_told(remote) -> None:
    one = remote("write('Welcome!\\n'); begin(); write('done\\n')")
    assert one.finish() == 0
    assert one.stdout == "done\n"
    assert one.stderr.startswith("n1: ") and "('Welcome!')" in one.stderr


def test_a_profile_that_never_ends_talking_is_refused(remote) -> None:
    one = remote("while True: write('x' * 4096)")
    assert one.finish() == 2 and "65536 bytes" in one.stderr


def test_node_0_passes_unchanged_and_the_others_by_lines(remote) -> None:
    one = remote(
        "begin(); write('\\x1b[1mstep 1\\r'); write('step 2\\r\\n'); write('to stderr', 2); time.sleep(0.5)",
        "begin(); write('hal'); time.sleep(0.1); write('f\\x1b[2J \\x07bell\\nlast')",
    )
    assert one.finish() == 0
    assert "\x1b[1mstep 1\rstep 2\r\n".replace("\r\n", "\n").replace("\r", "\n") in one.stdout.replace("\r", "\n")
    assert "[n2] half bell\n" in one.stdout and "[n2] last\n" in one.stdout
    assert one.stderr == "to stderr"


@pytest.mark.slow
def test_a_lost_follower_ends_the_run_and_is_named(remote) -> None:
    one = remote(
        "begin(); forever()",
        "begin(); write('Timeout, server n2 not responding.\\n', 2); sys.exit(255)",
        grace_seconds=0.1,
    )
    assert one.finish() == 1
    assert "node 1 (n2)" in one.stderr and "(ssh: Timeout, server n2 " in one.stderr
    assert "node 0 (n1)" in one.stderr and "5.1 s" in one.stderr


def test_node_0_that_ends_by_itself_gives_the_code_after_a_lost_follower(remote) -> None:
    one = remote("begin(); time.sleep(1); write('rank 3 failed\\n', 2); sys.exit(9)", "begin(); sys.exit(255)")
    assert one.finish() == 9
    assert "node 1 (n2) is lost" in one.stderr and one.stderr.endswith("rank 3 failed\n")


@pytest.mark.slow
def test_a_run_that_may_shrink_goes_on_without_a_lost_follower(remote) -> None:
    one = remote("begin(); time.sleep(7); write('done\\n')", "begin(); sys.exit(255)", min_nodes=1, grace_seconds=0.1)
    assert one.finish() == 0
    assert "node 1 (n2) is lost" in one.stderr and one.stdout.endswith("done\n")


def test_wrong_use_found_by_a_follower_ends_a_run_that_may_shrink(remote) -> None:
    one = remote(
        "begin(); forever()", "begin(); write('no such file\\n', 2); sys.exit(2)", min_nodes=1, grace_seconds=0.1
    )
    assert one.finish() == 2
    assert "[n2] no such file" in one.stderr and "node 1 (n2): " in one.stderr and "exit code 2" in one.stderr


def test_node_0_lost_ends_all_and_says_so(remote) -> None:
    one = remote("begin(); sys.exit(255)", "begin(); forever()")
    assert one.finish() == 1
    assert "node 0 (n1) is lost" in one.stderr and "newest checkpoint" in one.stderr
    killed = remote("begin(); os.kill(os.getpid(), 9)", "begin(); forever()")
    assert killed.finish() == 1
    assert "killed by signal 9" in killed.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_stop_signal_is_passed_on_as_a_line(remote, number: signal.Signals) -> None:
    text = f"begin(); (here / f'ready-{{os.getpid()}}').touch(); until('stop {number.name}'); sys.exit(75)"
    one = remote(text, text)
    one.wait_ready(2)
    one.process.send_signal(number)
    assert one.finish() == 75 and one.stderr == ""


def test_a_second_signal_closes_the_lifelines_at_once(remote) -> None:
    one = remote("begin(); forever()", "begin(); forever()")
    one.wait_ready(2)
    one.process.send_signal(signal.SIGINT)
    with pytest.raises(subprocess.TimeoutExpired):
        one.process.wait(1.0)
    one.process.send_signal(signal.SIGINT)
    one.process.wait(3.0)
    assert one.finish() == 130


@pytest.mark.slow
def test_an_agent_that_takes_no_orders_is_ended_after_the_grace(remote) -> None:
    one = remote(
        "begin(); (here / f'ready-{os.getpid()}').touch(); time.sleep(600)", grace_period_seconds=0.1, grace_seconds=0.1
    )
    one.wait_ready(1)
    one.process.terminate()
    assert one.finish() == 143
    assert "SIGTERM; node 0 (n1)" in one.stderr


def test_a_signal_before_the_start_stops_and_starts_nothing(remote) -> None:
    one = remote("begin(); (here / 'started').touch()", "(here / 'ready-2').touch(); time.sleep(600)")
    one.wait_ready(1)
    one.process.send_signal(signal.SIGINT)
    assert one.finish() == 130
    assert one.stderr.startswith("stopped by SIGINT ") and not (one.folder / "started").exists()


def test_a_killed_launcher_ends_every_lifeline(remote) -> None:
    one = remote("begin(); forever()", "begin(); forever()")
    one.wait_ready(2)
    one.process.kill()
    assert one.finish() == 137
    assert not survivors(one.mark)


@pytest.mark.slow
def test_a_reader_that_pauses_does_not_stop_the_signs_of_life(remote) -> None:
    one = remote(
        "begin()\nfor _ in range(40): write('x' * 65536)\nsys.exit(5)",
        "begin(); line(); line(); line(); (here / 'alive').touch(); forever()",
    )
    wait_until((one.folder / "alive").exists, "three signs of life")
    assert one.process.poll() is None
    assert one.finish() == 5
    assert one.stdout.count("x") == 40 * 65536


def test_a_detached_agent_on_this_machine_need_not_announce_itself(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from paceline.protocol.job import *\n"
        "from paceline.launch.plan import plan_local; from paceline.launch.supervise import run\n"
        f"folder = Path({str(tmp_path)!r})\n"
        "job = JobSpec(('sh', '-c', f'echo ran > {folder}/ran'), 1, 'x', 1, run_dir=str(folder), detached=True)\n"
        "sys.exit(run(plan_local(job)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 0, done.stderr
    wait_until((tmp_path / "ran").exists, "the worker has run")


def test_a_missing_ssh_is_wrong_use(tmp_path: Path) -> None:
    code = (
        "from paceline.launch.plan import *; from paceline.launch.supervise import run\n"
        "run(Plan(agents=(Command('n1', ('/no/such/ssh',)),), nodes=(NodePlan(argv=(), nproc=1),)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=90, check=False)
    assert "UsageError: " in done.stderr and "'/no/such/ssh'" in done.stderr
