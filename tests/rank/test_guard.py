"""The guard of this process: phases, the message of the agent, import hooks, and ports that are shut to strangers."""

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.errors import ExitCode, StallError
from paceline.protocol import status_page
from paceline.protocol.evidence import Phase
from paceline.protocol.status_page import StatusPage, make_status_page
from paceline.rank import guard
from paceline.rank.guard import HangGuard
from paceline.rank.sites import CodeOwner, code_owner, short_filename

LOST_PEER = RuntimeError("[pair.cc:553] Connection closed by peer [127.0.0.1]:4711")


@pytest.fixture
def mine() -> Iterator[HangGuard]:
    page = StatusPage(make_status_page(0))
    yield HangGuard(page, on=True)
    page.close()
    os.close(page.descriptor)


def test_a_phase_ends_where_it_began_also_on_an_error(mine: HangGuard) -> None:
    with pytest.raises(KeyError), mine.enter_phase(Phase.EVALUATE):
        with mine.enter_phase(Phase.CHECKPOINT):
            assert status_page.read_counters(mine.page.descriptor).phase == Phase.CHECKPOINT
        assert status_page.read_counters(mine.page.descriptor).phase == Phase.EVALUATE
        raise KeyError
    assert status_page.read_counters(mine.page.descriptor).phase == Phase.USER


def test_the_agents_word_becomes_the_error(mine: HangGuard) -> None:
    assert mine.release_reason() == "" and mine.stall_error(ValueError()) is None
    word = json.dumps({"kind": "BEHIND", "page": "CAUSE: rank 2", "exit_code": 4, "causes": [2]})
    status_page.release_from_collective(mine.page.descriptor, word.encode())
    assert mine.release_reason() == word
    error = mine.stall_error(ValueError())
    assert isinstance(error, StallError) and (str(error), error.exit_code) == ("CAUSE: rank 2", ExitCode.MISMATCH)


@pytest.mark.parametrize("word", [b"", b'{"page": "%s"}' % (b"x" * (1 << 16)), b'{"exit_code": 137}'])
def test_a_release_without_a_usable_word_is_a_stall_all_the_same(mine: HangGuard, word: bytes) -> None:
    status_page.release_from_collective(mine.page.descriptor, word)
    error = mine.stall_error(ValueError())
    assert error is not None and error.exit_code == ExitCode.STALLED and "guard" in str(error)


def test_a_rank_whose_peer_was_freed_first_waits_for_its_own_word(mine: HangGuard) -> None:
    later = threading.Timer(0.3, status_page.release_from_collective, (mine.page.descriptor, b'{"page": "late"}'))
    later.start()
    begun = time.monotonic()
    assert str(mine.stall_error(LOST_PEER)) == "late"
    assert 0.2 < time.monotonic() - begun < 10
    later.join()


def test_a_lost_peer_without_a_word_is_no_stall(mine: HangGuard) -> None:
    begun = time.monotonic()
    assert mine.stall_error(LOST_PEER) is None
    assert time.monotonic() - begun < 2.0
    begun = time.monotonic()
    assert mine.stall_error(ValueError("mine")) is None
    assert time.monotonic() - begun < 0.9  # it waits for nobody: a wait is at least a second


IMPORTS = """
import sys
from paceline.rank.imports import when_imported
def then(): print("imported", hasattr(sys.modules["decimal"], "Decimal"))
when_imported("decimal", then)
when_imported("decimal", then)
when_imported("decimal", lambda: print("another"))
import json
print("json")
from decimal import Decimal
import decimal, importlib, inspect
print(decimal.__spec__.loader is decimal.__loader__, "exec_module" in vars(decimal.__loader__), len(inspect.getsource(decimal)) > 0)
importlib.reload(decimal)
when_imported("decimal", lambda: print("now"))
print(any("paceline" in type(finder).__module__ for finder in sys.meta_path))
"""  # noqa: E501


def test_whoever_waits_for_a_module_is_called_once_and_leaves_no_trace() -> None:
    run = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines() == [
        "json", "imported True", "another", "True False True", "now", "False",
    ]  # fmt: skip


def test_a_module_that_cannot_be_imported_fails_as_ever() -> None:
    script = "from paceline.rank.imports import when_imported\nwhen_imported('no_such', print)\nimport no_such"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert "ModuleNotFoundError" in run.stderr and "'no_such'" in run.stderr and run.stdout == ""


PACKAGE = Path(status_page.__file__).parents[1]


@pytest.mark.parametrize(
    ("file", "expected_owner", "name"),
    [
        (f"{PACKAGE}/train/step.py", CodeOwner.OURS, "paceline/train/step.py"),
        (f"{PACKAGE}/collectives/control.py", CodeOwner.NOBODY, "paceline/collectives/control.py"),
        ("/x/site-packages/torch/distributed/c10d_logger.py", CodeOwner.NOBODY, "torch/distributed/c10d_logger.py"),
        (threading.__file__, CodeOwner.NOBODY, f"python3.{sys.version_info.minor}/threading.py"),
        ("/home/u/my/train.py", CodeOwner.USER, "train.py"),
        ("/home/u/my-packages/train.py", CodeOwner.USER, "train.py"),
        ("/usr/lib/python3/dist-packages/tqdm/std.py", CodeOwner.LIBRARY, "tqdm/std.py"),
    ],
)
def test_files_have_owners_and_the_same_names_everywhere(file: str, expected_owner: CodeOwner, name: str) -> None:
    assert (code_owner(file), short_filename(file)) == (expected_owner, name)


NEIGHBOUR = """
import os, socket, sys
os.setgroups([]); os.setgid(65432); os.setuid(65432)
one = socket.socket()
one.connect(('127.0.0.1', int(sys.argv[1])))
print('in', flush=True)
sys.stdin.read()
"""


@pytest.fixture
def listening() -> Iterator[socket.socket]:
    with closing(socket.socket()) as one:
        one.bind(("127.0.0.1", 0))
        one.listen()
        yield one


def connects(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), 0.5):
            return True
    except OSError:
        return False


def test_a_door_is_shut_to_new_ones_and_who_is_in_stays(listening: socket.socket) -> None:
    port = listening.getsockname()[1]
    with socket.create_connection(("127.0.0.1", port)) as early:
        assert guard.block_new_connections([listening.fileno(), early.fileno()])
        inside, _ = listening.accept()
        with inside:
            assert not connects(port)
            early.sendall(b"word")
            assert inside.recv(10) == b"word"
            inside.sendall(b"back")
            assert early.recv(10) == b"back"


def test_what_cannot_be_shut_is_said(listening: socket.socket, monkeypatch) -> None:
    monkeypatch.setattr(guard, "set_tcp_md5_key", lambda *_: False)
    assert not guard.block_new_connections([listening.fileno()])
    assert guard.block_new_connections([]) and connects(listening.getsockname()[1])


def test_a_node_whose_kernel_cannot_shut_its_ports_says_so(monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    monkeypatch.setattr(guard, "block_new_connections", lambda _: False)
    world = SimpleNamespace(pg_backend_config={})
    distributed: Any = SimpleNamespace(_new_process_group_helper=lambda: ("group", None), _world=world)
    guard.ProcessGroupSockets().install(distributed)
    monkeypatch.setenv("RANK", "2")  # the kernel of another node may be able to
    for local_rank in ("0", "1"):
        monkeypatch.setenv("LOCAL_RANK", local_rank)
        distributed._new_process_group_helper()
        assert ("ports" in capfd.readouterr().err) == (local_rank == "0")


def test_ones_own_connections_are_no_strangers(listening: socket.socket) -> None:
    with socket.create_connection(listening.getsockname()) as one:
        other, _ = listening.accept()
        with other:
            assert guard.foreign_peer_users([listening.fileno(), one.fileno(), other.fileno()]) == []


@pytest.mark.root
def test_a_neighbour_who_was_faster_than_a_rank_is_found(listening: socket.socket) -> None:
    words = (sys.executable, "-S", "-c", NEIGHBOUR, str(listening.getsockname()[1]))
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as neighbour:
        assert neighbour.stdout is not None and neighbour.stdout.readline() == "in\n"
        stranger, _ = listening.accept()
        with stranger:
            assert guard.foreign_peer_users([listening.fileno(), stranger.fileno()]) == ["65432"]
        neighbour.communicate("")


def test_torch_is_wrapped_once_for_all_sessions_of_a_process() -> None:
    torch = SimpleNamespace(_new_process_group_helper=lambda: None)
    connections = guard.ProcessGroupSockets()
    connections.install(torch)
    wrapped = torch._new_process_group_helper
    connections.install(torch)
    assert torch._new_process_group_helper is wrapped
