"""No file of a hostile user acts in the name of the user who finds it: the rows of docs/security.md."""

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from tests.errors import ended_with
from tests.hostile.folders import canary, payload, run_folder, write_roster
from tests.hostile.soak_hostile import Typist
from tests.hostile.users import PACELINE, User, Users

from paceline.host.procfs import read_process
from paceline.rank.function_worker import __file__ as CALLED

pytestmark = pytest.mark.sample(2)

LOOKING = (["status"], ["status", "--json"], ["hang"], ["logs", "--follow"], ["checkpoint", "list"], ["ledger"])
BELONGS = "belongs to user {}, and we are {}"
TASK = (Path(__file__).parents[2] / "examples" / "own_task.py").read_text()
Type = Callable[..., CompletedProcess[str]]


@pytest.fixture(scope="module")
def types(made_users: Users) -> Iterator[Type]:
    """A command of a user, forked from a process of his that has imported all that it needs."""
    heavy = ("paceline.cli.ledger", "paceline.train.prepare", "paceline.lab.ranks.ledger")
    typists = {user.uid: Typist(user, *heavy) for user in (made_users.victim, made_users.root)}

    def typed(user: User, *words: object) -> CompletedProcess[str]:
        done = typists[user.uid].type([str(word) for word in words])
        assert not done["traceback"], done["text"]
        return CompletedProcess(words, done["code"], done["text"], done["stderr"])

    yield typed
    for typist in typists.values():
        typist.end()


def finder(users: Users, name: str) -> User:
    return users.root if name == "root" else users.victim


@pytest.fixture
def shared(users: Users) -> Path:
    return users.folder("shared", 0o1777, users.root)


def prepared(users: Users, folder: Path, *, by: User) -> Path:
    by.own(folder)
    for path in (folder, *folder.rglob("*")):
        if not path.is_symlink():
            path.chmod(0o755 if path.is_dir() else 0o644)
    return folder


# ---- a call that lies in a folder ------------------------------------------------------------------------------------


@pytest.mark.parametrize("whose", ["mallory's", "the victim's, but anybody may write it"])
def test_no_call_is_unpickled_that_others_could_have_written(users: Users, shared: Path, whose: str) -> None:
    file, command = canary(shared)
    folder = shared / "paceline-run-x"
    folder.mkdir(mode=0o755)
    bomb = b"cposix\nsystem\n(S" + repr(command).encode() + b"\ntR."
    (folder / "call").write_bytes(bomb)
    (folder / "call").chmod(0o644 if whose == "mallory's" else 0o666)
    (users.mallory if whose == "mallory's" else users.victim).own(folder)
    one = {"RANK": "0", "WORLD_SIZE": "1"}
    done = users.victim.run(sys.executable, "-P", CALLED, folder, env=one)
    assert done.returncode != 0 and not file.exists(), done.stdout + done.stderr
    assert "is not trusted" in done.stderr, done.stderr


# ---- A1: a program that a folder names -------------------------------------------------------------------------------


@pytest.mark.sample(2)
@pytest.mark.parametrize("who", ["victim", "root"])
def test_no_command_that_stands_in_a_folder_is_run(users: Users, shared: Path, types: Type, who: str) -> None:
    me = finder(users, who)
    file, words = canary(shared)
    evil = prepared(users, run_folder(shared / "evil", ssh=["/bin/sh", "-c", words]), by=users.mallory)
    before = sorted(evil.rglob("*"))
    for command in (*LOOKING, ["cancel"]):
        done = types(me, *command, evil)
        assert not file.exists(), f"{command}: run as {file.read_text()}"
        assert BELONGS.format(users.mallory.name, me.name) in done.stderr, command
        if command == ["cancel"]:
            assert done.returncode == 2 and "pass --trust" in done.stderr
        elif command[0] in ("status", "logs"):
            assert done.returncode == 0, command
        assert sorted(evil.rglob("*")) == before, command


def test_nor_in_a_folder_that_was_unpacked_and_is_ours(users: Users, types: Type) -> None:
    """Files from an unpacked archive belong to the user who unpacks it."""
    file, words = canary(users.victim.home)
    mine = prepared(users, run_folder(users.victim.home / "run", ssh=["/bin/sh", "-c", words]), by=users.victim)
    for command in ("status", "cancel"):
        done = types(users.victim, command, mine, "--ssh", "/bin/false")
        assert not file.exists(), command
        assert "n7" in done.stdout and "--ssh" in done.stdout, command


def test_a_neighbours_run_is_listed_as_data_and_its_weights_are_not_believed(users: Users, shared: Path) -> None:
    file, words = canary(shared)
    evil = prepared(users, run_folder(shared / "evil", ssh=["/bin/sh", "-c", words]), by=users.mallory)
    done = users.victim.paceline("runs", shared)
    assert not file.exists() and done.returncode == 0 and "evil" in done.stdout
    assert BELONGS.format(users.mallory.name, users.victim.name) in done.stderr
    done = users.victim.paceline("export", evil, "-o", users.victim.home / "w.pt")
    assert done.returncode == 2 and BELONGS.format(users.mallory.name, users.victim.name) in done.stderr
    assert not (users.victim.home / "w.pt").exists()


# ---- A2: code and programs that settings name ------------------------------------------------------------------------


@pytest.mark.parametrize("who", ["victim", "root"])
@pytest.mark.parametrize(
    "command",
    [
        ["--resume", "auto", "--run-dir", "{evil}"],
        ["mnist-cnn", "--nproc", "2", "--resume", "auto", "--run-dir", "{evil}"],
        ["--config", "{evil}/config.toml"],
    ],
    ids=["resumed", "task named", "config"],
)
def test_no_code_that_settings_of_others_name_is_imported(
    users: Users, shared: Path, types: Type, who: str, command: list[str]
) -> None:
    me, file = finder(users, who), shared / "canary"
    (shared / "payload.py").write_text(payload(file))
    program = shared / "python"
    program.write_text(f"#!/bin/sh\n{canary(shared)[1]}\n")
    program.chmod(0o755)
    settings = f'task = "{shared}/payload.py:task"\n[cluster]\npython = "{program}"\n'
    evil = prepared(users, run_folder(shared / "evil", config=settings), by=users.mallory)
    done = types(me, "train", *(word.format(evil=evil) for word in command))
    assert not file.exists(), f"run as {file.read_text()}"
    assert done.returncode == 2
    assert BELONGS.format(users.mallory.name, me.name) in done.stderr
    assert sorted(path.name for path in evil.iterdir()) == ["attempt-1", "config.toml"]


@pytest.mark.slow
def test_trust_is_the_word_by_which_all_of_it_is_believed(users: Users, shared: Path) -> None:
    file = shared / "canary"
    (shared / "payload.py").write_text(payload(file))
    evil = prepared(users, run_folder(shared / "evil", config=f'task = "{shared}/payload.py:task"\n'), by=users.mallory)
    done = users.root.paceline("train", "--resume", "auto", "--run-dir", evil, "--trust")
    assert file.read_text() == "root\n", done.stderr


@pytest.mark.parametrize(("mode", "who"), [(0o777, "all users"), (0o770, "group users")])
@pytest.mark.parametrize("inner", ["", "inner"])
def test_a_folder_that_others_may_write_is_no_place_for_a_run(
    users: Users, types: Type, mode: int, who: str, inner: str
) -> None:
    out = users.folder("out", mode, users.victim)
    os.chown(out, users.victim.uid, 100)
    done = types(users.victim, "train", "mnist-cnn", "--nproc", "1", "--steps", "1", "--run-dir", out / inner)
    ended_with(done, "run-of-others")
    assert str(out) in done.stderr and who in done.stderr
    assert not list((out / inner).iterdir())


def groups_folder(users: Users) -> Path:
    """As on clusters: a folder of a group, and ours in it."""
    group = users.folder("group", 0o2775, users.root)
    os.chown(group, 0, 100)
    (group / "mine").mkdir()
    users.victim.own(group / "mine")
    return group


def test_a_run_straight_in_a_groups_folder_is_refused(users: Users, types: Type) -> None:
    straight = groups_folder(users) / "run"  # which anybody of the group can exchange for another
    straight.mkdir()
    users.victim.own(straight)
    done = types(users.victim, "train", "mnist-cnn", "--nproc", "1", "--steps", "1", "--run-dir", straight)
    ended_with(done, "run-of-others")
    assert str(straight.parent) in done.stderr and "group users" in done.stderr


# ---- A3: processes that a folder names -------------------------------------------------------------------------------


@pytest.mark.parametrize("who", ["victim", "root"])
def test_no_process_that_stands_in_a_folder_is_signalled(users: Users, shared: Path, who: str) -> None:
    me = finder(users, who)
    bystander = me.popen("sleep", "60")
    try:
        time.sleep(0.5)  # until it is sleep itself
        found = read_process(bystander.pid)
        assert found is not None
        evil = run_folder(shared / "evil")
        write_roster(evil, bystander.pid, started=found.start_ticks)
        prepared(users, evil, by=users.mallory)
        done = me.paceline("cancel", evil)
        assert done.returncode == 2 and BELONGS.format(users.mallory.name, me.name) in done.stderr
        me.own(evil)  # unpacked, say: it does not hold the run's lock
        done = me.paceline("cancel", evil)
        assert done.returncode in (0, 1) and "nothing to cancel" in done.stderr
        assert bystander.poll() is None
    finally:
        os.killpg(bystander.pid, signal.SIGKILL)
        bystander.communicate()


# ---- A4: files that a folder's links lead to -------------------------------------------------------------------------


@pytest.mark.sample(2)
@pytest.mark.parametrize("mode", [0o777, 0o755])
@pytest.mark.parametrize("owner", ["mallory", "victim"])
def test_nothing_is_written_through_a_link(users: Users, types: Type, mode: int, owner: str) -> None:
    whose = users.mallory if owner == "mallory" else users.victim
    for name in ("config.toml.partial", "environment.json", ".lock", "attempt-1", "checkpoints"):
        evil = users.folder(f"evil-{name}", mode, whose)
        precious = users.victim.home / f"precious-{name}"
        if name in ("attempt-1", "checkpoints"):
            precious.mkdir()
        else:
            precious.write_text("thesis")
        users.victim.own(precious)
        (evil / name).symlink_to(precious)
        whose.own(evil / name)
        done = types(users.victim, "train", "mnist-cnn", "--nproc", "1", "--steps", "1", "--run-dir", evil)
        assert done.returncode == 2, name
        assert precious.read_text() == "thesis" if precious.is_file() else not list(precious.iterdir()), name
        if (owner, mode) == ("victim", 0o755) and name != "checkpoints":
            assert f"contains a symbolic link ({name})" in done.stderr


def test_what_others_have_put_into_a_folder_of_ours_is_no_part_of_a_run(users: Users, types: Type) -> None:
    """The folder was writable for all users earlier."""
    for name in ("checkpoints", ".lock", "attempt-1", "checkpoints/.tmp-2-1-0"):
        run = users.folder(f"run-{name.replace('/', '-')}", 0o755, users.victim)
        (run / name).parent.mkdir(exist_ok=True)
        users.victim.own(run)
        (run / name).mkdir() if name != ".lock" else (run / name).touch()
        users.mallory.own(run / name)
        done = types(users.victim, "train", "mnist-cnn", "--nproc", "1", "--steps", "1", "--run-dir", run)
        assert done.returncode == 2 and f"{run / name} belongs to user {users.mallory.name}" in done.stderr, done.stderr


def test_nor_is_a_host_asked_that_others_have_named_in_it(users: Users, shared: Path) -> None:
    file, words = canary(shared)
    program = shared / "my-ssh"
    program.write_text(f"#!/bin/sh\n{words}\n")
    program.chmod(0o755)
    run = prepared(users, run_folder(users.victim.home / "run", ssh=["ssh"]), by=users.victim)
    for command, asked in (("status", True), ("cancel", True)):
        users.victim.paceline(command, run, "--ssh", program)
        assert file.exists() == asked, command  # all is his own: his ssh asks
        file.unlink()
    users.mallory.own(run / "submit-1")  # who could write there once
    for command in ("status", "cancel"):
        done = users.victim.paceline(command, run, "--ssh", program)
        assert not file.exists() and f"{run / 'submit-1'} belongs to user {users.mallory.name}" in done.stderr


@pytest.mark.slow
def test_another_module_of_the_same_name_is_not_resumed(users: Users, shared: Path) -> None:
    home, file = users.victim.home, shared / "canary"
    (home / "minetask.py").write_text(TASK)
    users.victim.own(home / "minetask.py")
    words = ["train", "minetask:task", "--nproc", "1", "--steps", "2", "--checkpoint-every", "1", "--run-dir"]
    done = users.victim.paceline(*words, home / "run")
    assert done.returncode == 0, done.stderr
    (shared / "minetask.py").write_text(payload(file))
    users.mallory.own(shared / "minetask.py")
    done = users.victim.paceline("train", "--resume", "auto", "--run-dir", home / "run", "--nproc", "1", cwd=shared)
    assert not file.exists() and done.returncode == 0, done.stderr


def test_a_link_among_ones_neighbours_runs_is_no_run(users: Users, shared: Path) -> None:
    important = prepared(users, run_folder(users.victim.home / "important"), by=users.victim)
    (shared / "runs").mkdir()
    (shared / "runs" / "mnist-1").symlink_to(important)
    users.mallory.own(shared / "runs")
    done = users.victim.paceline("cancel", "mnist", cwd=shared)
    assert done.returncode == 2 and "unknown run 'mnist'" in done.stderr


# ---- B1: modules beside the user -------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("task", ["mnist-cnn", "{home}/mine.py:task"])
def test_no_module_of_the_working_folder_takes_an_installed_ones_place(
    users: Users, shared: Path, mnist: Path, task: str
) -> None:
    """And what the run leaves is its owner's alone: in a folder of ours inside a group's, and in one made before."""
    file, home = shared / "canary", users.victim.home
    for name in ("numpy", "paceline", "random", "safetensors", "torch", "sitecustomize", "msgspec", "triton"):
        (shared / f"{name}.py").write_text(payload(file))
    users.mallory.own(*shared.iterdir())
    (home / "mine.py").write_text(TASK)
    data = ("--data-dir", mnist) if task == "mnist-cnn" else ()
    run = groups_folder(users) / "mine" / "run" if data else home / "run"
    if not data:
        run.mkdir(0o755)
    users.victim.own(*home.iterdir())
    words = ("train", task.format(home=home), *data, "--nproc", "2", "--steps", "4", "--checkpoint-every", "2")
    done = users.victim.paceline(*words, "--run-dir", run, cwd=shared, umask=0)
    assert not file.exists(), f"imported as {file.read_text()}"
    assert done.returncode == 0, done.stderr
    check_private(*([run] if data else []), *run.rglob("*"))


def check_private(*paths: Path) -> None:
    """No other user can read them, although the umask was 0."""
    for path in paths:
        wanted = 0o700 if path.is_dir() else 0o600
        assert path.stat().st_mode & 0o777 == wanted, path
    assert len(paths) > 15


@pytest.mark.slow
def test_a_module_beside_the_task_that_is_not_imported_is_told(users: Users) -> None:
    home, file = users.victim.home, users.victim.home / "canary"
    (home / "mine.py").write_text(TASK)
    (home / "numpy.py").write_text(payload(file))
    (home / "json.py").write_text((home / "mine.py").read_text())
    users.victim.own(*home.iterdir())
    words = ("train", "mine.py:task", "--nproc", "1", "--steps", "4", "--checkpoint-every", "2")
    done = users.victim.paceline(*words, umask=0)
    assert done.returncode == 0 and not file.exists()
    check_private(home / "runs", *(home / "runs").rglob("*"))
    assert f"json.py, numpy.py in {home}" in done.stderr
    done = users.victim.paceline("train", "json.py:task", "--nproc", "1", "--steps", "1", "--run-dir", "other")
    assert done.returncode == 2 and "[task-file-shadowed]" in done.stderr


# ---- B3: what cannot be read -----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["config.toml", "events-0.jsonl", "attempt-1/agent-0.json", "submit-1/submitted.json", "summary.json"]
)
def test_what_cannot_be_read_is_told_and_not_waited_for(users: Users, types: Type, name: str) -> None:
    for kind in ("pipe", "zeros", "huge", "deep", "dots", "folder"):
        run = run_folder(users.victim.home / kind, ssh=["ssh"])
        path = run / name
        path.unlink(missing_ok=True)
        match kind:
            case "pipe":
                os.mkfifo(path)
            case "zeros":
                path.symlink_to("/dev/zero")
            case "huge":
                path.touch()
                os.truncate(path, 1 << 40)
            case "deep":
                path.write_text("x = " + "[" * 30_000 if name.endswith("toml") else "[" * 1_000_000)
            case "dots":
                path.write_text(".".join(["a"] * 30_000) + " = 1")
            case _:
                path.mkdir()
        users.victim.own(run)
        for command in ("status", "hang", "ledger", "cancel"):
            done = types(users.victim, command, run)  # who waits for a pipe is killed
            assert done.returncode in (0, 1, 2), (kind, command, done.stdout)


# ---- C ---------------------------------------------------------------------------------------------------------------


def test_a_folder_that_cannot_be_entered_is_told(users: Users, types: Type) -> None:
    closed = users.folder("closed", 0o700, users.mallory)
    for command in (["status"], ["logs"], ["hang"], ["cancel"], ["ledger"], ["checkpoint", "list"]):
        assert types(users.victim, *command, closed).returncode == 2, command
    assert types(users.victim, "train", "mnist-cnn", "--nproc", "1", "--run-dir", closed / "run").returncode == 2


@pytest.mark.slow
def test_live_output_does_not_steer_the_terminal_and_keeps_its_colours(users: Users) -> None:
    (users.victim.home / "script.py").write_text(
        "print('\\x1b]0;title\\x07\\x1b[31mred\\x1b[0m \\x1b[2Jgone \\x1b]52;c;AAAA\\x0710\\r\\n', flush=True)\n"
    )
    done = users.victim.paceline("launch", "--nproc", "1", "--", "script.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[rank 0] \x1b[31mred\x1b[0m gone 10\n"


def test_an_error_does_not_steer_the_terminal(users: Users) -> None:
    done = users.victim.paceline("train", "mnist-cnn", "--on", "ssh", "--hosts", "n1,\x1b[2Jn2", "--nproc", "1")
    assert done.returncode == 2 and "\x1b" not in done.stderr


def test_a_secret_on_the_command_line_is_told(users: Users) -> None:
    words = ("train", "mnist-cnn", "--nproc", "1", "--dry-run")
    done = users.victim.paceline(*words, "--env", "HF_TOKEN=hunter-two")
    assert done.returncode == 0 and "HF_TOKEN=..." in done.stderr and "every user" in done.stderr
    assert "hunter-two" not in done.stdout + done.stderr
    done = users.victim.paceline(*words, "--env", "HF_TOKEN", env={"HF_TOKEN": "hunter-two"})
    assert done.returncode == 0 and "every user" not in done.stderr and "hunter-two" not in done.stdout


@pytest.mark.slow
@pytest.mark.ranks
def test_no_port_of_a_training_is_open_to_others(users: Users, mnist: Path) -> None:
    words = ("train", "mnist-cnn", "--data-dir", mnist, "--nproc", "2", "--steps", "2000", "--log-interval", "1")
    process = users.victim.popen(PACELINE, *words, "--run-dir", "run")
    try:
        log = users.victim.home / "run" / "attempt-1" / "rank-0.log"
        deadline = time.monotonic() + 40
        while not (log.exists() and b"step 2/" in log.read_bytes()):
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.1)
        ports = _listening(users.victim.uid)
        assert ports, "gloo listens"
        tried = users.mallory.run(
            "python3", "-c",
            "import socket, sys\n"
            "for port in sys.argv[1:]:\n"
            "    try: socket.create_connection(('127.0.0.1', int(port)), 1); print('open', port)\n"
            "    except OSError as error: print('shut', port)\n", *ports,
        )  # fmt: skip
        assert "open" not in tried.stdout and tried.stdout.count("shut") == len(ports), tried.stdout + tried.stderr
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def _listening(uid: int) -> list[int]:
    found: list[int] = []
    for table in ("tcp", "tcp6"):
        for fields in map(str.split, Path(f"/proc/net/{table}").read_text().splitlines()[1:]):
            if fields[3] == "0A" and int(fields[7]) == uid:
                found.append(int(fields[1].rpartition(":")[2], 16))
    return found
