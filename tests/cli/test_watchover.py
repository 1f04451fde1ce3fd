"""`paceline watchover`: what is ours and what is the script's; where ranks find their agent; how strangers ended."""

import os
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from tests.errors import raises

from paceline.cli.watchover import WatchoverConfig, main, make_agent_plan, split_options_and_script
from paceline.launch.agent.attach import ForeignProcess, read_process_exit_code
from paceline.protocol.control import agent_address, peer_pid
from paceline.protocol.job import AUTO

ENV = {
    "RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "n1",
    "MASTER_PORT": "29500", "GROUP_RANK": "1",
}  # fmt: skip


@pytest.mark.parametrize(
    ("words", "own", "script"),
    [
        ("train.py --end 3", "", "train.py --end 3"),
        ("--end train.py", "--end", "train.py"),
        ("--hang-timeout 5 --run-dir=x -m a.b -v", "--hang-timeout 5 --run-dir=x", "-m a.b -v"),
        ("--end -- train.py -- x", "--end", "train.py -- x"),
        ("--help", "--help", ""),
    ],
)
def test_words_before_the_script_are_ours_and_all_others_its_own(words: str, own: str, script: str) -> None:
    assert split_options_and_script(words.split()) == (own.split(), script.split())


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ("", "watchover-no-script", ""),
        ("no-such-script.py", "script-not-found", "no-such-script.py"),
        ("--hang-timeout soon x.py", "hang-timeout-invalid", "--hang-timeout "),
        ("sleep 5", "watchover-not-python", "sleep"),
    ],
)
def test_bad_words_are_refused_before_anything_is_started(words: str, code: str, said: str) -> None:
    with raises(code) as caught:
        main(words.split())
    assert said in str(caught.value)


def test_the_plan_of_the_agent_is_what_the_launcher_has_said() -> None:
    plan = make_agent_plan(WatchoverConfig(), AUTO, ENV)
    assert (plan.ranks.first, plan.nproc, plan.ranks.world_size, plan.node) == (2, 2, 4, 1) and plan.nodes > 1
    assert make_agent_plan(WatchoverConfig(), AUTO, {**ENV, "LOCAL_WORLD_SIZE": "4"}).nodes == 1
    with raises("launcher-variables-missing", missing=["LOCAL_WORLD_SIZE"]):
        make_agent_plan(WatchoverConfig(), AUTO, {name: ENV[name] for name in ENV if name != "LOCAL_WORLD_SIZE"})


def test_ranks_of_a_job_on_a_node_share_an_address_with_nobody_else() -> None:
    address = agent_address(ENV, "job")
    assert address == agent_address({**ENV, "RANK": "3", "LOCAL_RANK": "1"}, "job") and address[0] == 0
    others = [{**ENV, name: "7"} for name in ("MASTER_PORT", "GROUP_RANK", "TORCHELASTIC_RESTART_COUNT")]
    assert address not in [agent_address(ENV, "another"), *(agent_address(env, "job") for env in others)]


@pytest.mark.parametrize("reaped", [False, True])
@pytest.mark.parametrize(("act", "code"), [("sys.exit(7)", 7), ("os.kill(os.getpid(), 11)", -11)])
def test_the_kernel_says_how_a_process_ended_that_is_no_child(act: str, code: int, *, reaped: bool) -> None:
    code_to_run = f"import os, sys; sys.stdin.read(); {act}"
    child = subprocess.Popen([sys.executable, "-S", "-c", code_to_run], stdin=subprocess.PIPE)
    one = ForeignProcess(child.pid)
    try:
        assert one.poll() is None
        assert child.stdin is not None
        child.stdin.close()
        select.select([one], [], [], 20)
        if reaped:
            child.wait()
        found = read_process_exit_code(child.pid, one.pidfd)
        assert one.wait(20) == (-signal.SIGKILL if found is None else found)  # of one that nobody knows: killed
        if found is None and reaped:
            pytest.skip("this kernel forgets a process that its parent has waited for: Linux 6.15")
        assert found == code
    finally:
        child.wait()
        os.close(one.pidfd)


@pytest.mark.root
def test_another_users_process_is_not_taken_for_a_rank(tmp_path: Path) -> None:
    address = agent_address(ENV, str(tmp_path))
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as door:
        door.bind(address)
        door.listen()
        for user, taken in ((65534, False), (0, True)):
            connect = f"s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET); s.connect({address!r}); s.recv(1)"
            code = f"import os, socket; os.setuid({user}); {connect}"
            with subprocess.Popen([sys.executable, "-S", "-c", code]) as child, door.accept()[0] as connection:
                assert peer_pid(connection) == (child.pid if taken else 0)
