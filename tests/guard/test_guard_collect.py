"""What an agent finds out about a worker that does not move. Real processes: asleep, frozen, deaf, changed, gone."""

import os
import signal
import time
from contextlib import ExitStack
from pathlib import Path

import msgspec
import pytest
from tests.rank.guard_ranks import Rank, ranks

from paceline.guard.collect import MAX_EVIDENCE_BYTES, MAX_TEXT, EvidenceCollection, limit_evidence_size
from paceline.protocol.evidence import Evidence, Frame, Op, RankSample, Stack
from paceline.protocol.status_page import PAGE_BYTES, SIGNAL_SAFE, StatusPage, make_status_page

pytestmark = pytest.mark.sample(2)

GIL = "import re\nready()\nre.match(r'(a+)+$', 'a' * 60 + 'b')  # holds it\n"


def collected(
    rank: Rank, question: int = 1, *, code: int | None = None, patience_seconds: float = 2.0
) -> tuple[Evidence, float]:
    """What is found, and in how many seconds; no single step may hold an agent up."""
    began = time.monotonic()
    worker = RankSample(rank.number, "here", rank.process.pid, code=code)
    collection = EvidenceCollection([worker], {rank.number: rank.page}, question, patience_seconds=patience_seconds)
    done = False
    while not done:
        time.sleep(0.05)
        step = time.monotonic()
        done = collection.advance()
        assert time.monotonic() - step < 0.1
    return collection.evidence([worker])[0], time.monotonic() - began


def test_a_sleeping_worker_says_where_it_is(tmp_path: Path) -> None:
    with ranks("ready()\ntime.sleep(600)  # here\n", 1, tmp_path) as (one,):
        one.wait_ready()
        found, seconds = collected(one)
        frames = found.stacks[0].frames
        assert any(f.file.endswith("script.py") and f.line == one.line("# here") for f in frames), frames
    assert found.answered and found.state == "S" and found.cpu_seconds < 0.5
    assert seconds < 2.0


READ = "threading.Thread(target=os.read, args=(os.pipe()[0], 1), daemon=True).start()"
IDLE = "threading.Thread(target=queue.Queue().get, daemon=True).start()"
CHILD = "r, w = os.pipe()\nos.fork() or (os.close(w), os.read(r, 1), os._exit(0))"
WAITS_FOR = {
    "nothing that still runs": ("queue.Queue().get()", True),
    "a thread that does nothing": (f"{IDLE}\nqueue.Queue().get()", True),
    "a thread that reads": (f"{READ}\nqueue.Queue().get()", False),
    "a child": (f"{CHILD}\nqueue.Queue().get()", False),
    "a file": ("os.read(os.pipe()[0], 1)", False),
}


def test_a_wait_for_a_thread_counts_as_sleep_where_no_thread_is_up(tmp_path: Path) -> None:
    with ExitStack() as stack:
        started: dict[str, Rank] = {}
        for number, (what, (code, _)) in enumerate(WAITS_FOR.items()):
            (folder := tmp_path / str(number)).mkdir()
            script = f"import os, queue, threading\nready()\n{code}\n"
            (started[what],) = stack.enter_context(ranks(script, 1, folder))
        for one in started.values():
            one.wait_ready()
        time.sleep(0.3)
        looks = [{what: collected(one, question)[0].sleep for what, one in started.items()} for question in (1, 2)]
    assert looks[0] == looks[1]
    assert {what: sleep > 0 for what, sleep in looks[0].items()} == {
        what: is_one for what, (_, is_one) in WAITS_FOR.items()
    }


def test_a_frozen_worker_is_not_waited_for_and_nothing_is_sent_to_it(tmp_path: Path) -> None:
    with ranks("ready()\ntime.sleep(600)\n", 1, tmp_path) as (one,):
        one.wait_ready()
        os.kill(one.process.pid, signal.SIGSTOP)
        found, seconds = collected(one)
        os.kill(one.process.pid, signal.SIGCONT)
        assert found.state == "T" and not found.answered and not found.native
        assert seconds < 1.5


def test_native_code_that_holds_the_lock_gives_native_stacks_each_time(tmp_path: Path) -> None:
    with ranks(GIL, 1, tmp_path) as (one,):
        one.wait_ready()
        for question in (1, 2):
            found, seconds = collected(one, question)
            assert not found.answered and found.state == "R"
            assert found.native.count(f'script.py", line {one.line("# holds it")}') == 1  # of this question only
            assert seconds < 3.6
        assert found.cpu_seconds > 0.05


def test_who_has_become_another_program_is_not_killed_by_the_question(tmp_path: Path) -> None:
    """The signal would end it: its handler is gone, but the box still says that it is safe."""
    script = "ready()\ntime.sleep(1)\nos.execvp('sleep', ['sleep', '600'])\n"
    with ranks(script, 1, tmp_path) as (one,):
        one.wait_ready()
        deadline = time.monotonic() + 20
        while Path(f"/proc/{one.process.pid}/comm").read_text().strip() != "sleep":
            assert time.monotonic() < deadline
            time.sleep(0.05)
        page = StatusPage(one.page)
        page.put("ready", 1 | SIGNAL_SAFE)
        page.close()
        found, _ = collected(one)
        assert not found.answered
        assert one.process.poll() is None


def test_of_one_that_has_ended_only_the_box_is_left(tmp_path: Path) -> None:
    script = (
        "from paceline.protocol.status_page import StatusPage\n"
        "from paceline.protocol.evidence import Op\n"
        "StatusPage.from_descriptor(spec.page).begin_op(Op('0', 9, 'all_reduce', shape='[8]'))\n"
        "os.kill(os.getpid(), 9)\n"
    )
    with ranks(script, 1, tmp_path) as (one,):
        one.process.wait()
        found, seconds = collected(one, code=-9)
    assert found.code == -9 and not found.answered and found.state == ""
    assert [(op.kind, op.seq, op.done) for op in found.ops] == [("all_reduce", 9, False)]
    assert seconds < 0.6


def test_a_dying_run_waits_for_nobody(tmp_path: Path) -> None:
    with ranks(GIL, 1, tmp_path) as (one,):
        one.wait_ready()
        found, seconds = collected(one, patience_seconds=0.3)
    assert not found.answered and not found.native
    assert seconds < 0.6


def test_processes_that_load_data_are_looked_at_and_strangers_with_their_number_are_not(tmp_path: Path) -> None:
    script = (
        "import signal, subprocess\n"
        "from paceline.protocol.status_page import SLOT, SLOTS_AT, StatusPage\n"
        "memory = WorkerSpec.from_environment().page\n"
        "os.setsid()\n"
        "child = subprocess.Popen(['sleep', '600'])\n"
        "child.send_signal(signal.SIGSTOP)\n"
        "for worker, pid in enumerate((child.pid, os.getppid(), 2**40)):\n"
        "    os.pwrite(memory, SLOT.pack(pid, 1, 37 + worker, True), SLOTS_AT + worker * SLOT.size)\n"
        "ready()\n"
        "import time; time.sleep(600)\n"
    )
    with ranks(script, 1, tmp_path) as (one,):
        one.wait_ready()
        found, _ = collected(one)
        os.kill(found.loaders[0].pid, signal.SIGKILL)
    assert [(loader.item, loader.state) for loader in found.loaders] == [(37, "T"), (38, ""), (39, "")]


@pytest.mark.parametrize("size_bytes", [0, 4096, PAGE_BYTES])
def test_a_box_full_of_rubbish_gives_evidence_all_the_same(size_bytes: int) -> None:
    descriptor = make_status_page(0)
    try:
        worker = RankSample(3, "here", os.getpid())
        for _ in range(20):
            collection = EvidenceCollection([worker], {3: descriptor}, 1, patience_seconds=0.0)
            os.ftruncate(descriptor, size_bytes)
            os.pwrite(descriptor, os.urandom(size_bytes), 0)
            collection.advance()
            (found,) = collection.evidence([worker])
            assert found.rank == 3
            assert len(msgspec.json.encode(found)) <= MAX_EVIDENCE_BYTES
    finally:
        os.close(descriptor)


def test_an_answer_that_is_none_still_says_that_the_interpreter_runs() -> None:
    descriptor = make_status_page(0)
    mine = StatusPage(descriptor)
    try:
        worker = RankSample(3, "here", os.getpid())
        for text in (b"", b"[" * 100_000, b'{"ops": 7}', b'{"stacks": [{"thread": "\\ud800", "frames": []}]}'):
            collection = EvidenceCollection([worker], {3: descriptor}, 5)
            mine.answer(5, text)
            (found,) = collection.evidence([worker])
            assert found.answered and not found.stacks
            mine.put("answered", 0)
    finally:
        mine.close()
        os.close(descriptor)


def test_numbers_that_can_be_none_are_not_passed_on() -> None:
    """Python refuses to print those of more than some thousand digits."""
    huge = 10**4000
    op, frame = Op("0", huge, "send", peer=huge), Frame("job.py", huge, "main")
    found = limit_evidence_size(
        Evidence(0, "here", 1, ops=(op,), stacks=(Stack("main", (frame,)),), groups={"0": (1, huge)})
    )
    assert (found.ops[0].seq, found.ops[0].peer, found.stacks[0].frames[0].line) == (0, 0, 0)
    assert found.groups == {"0": (1, 0)}


def test_a_title_is_no_longer_than_a_line() -> None:
    assert limit_evidence_size(Evidence(0, "here", 1, titles={"0": "t" * 5000})).titles == {"0": "t" * MAX_TEXT}


def test_no_evidence_is_longer_than_anybody_reads() -> None:
    frames = tuple(Frame("f" * 5000, n, "g" * 5000) for n in range(500))
    huge = Evidence(
        0,
        "here",
        1,
        ops=tuple(Op("g" * 5000, n, "k" * 5000, "n" * 5000) for n in range(500)),
        groups={f"group {n}": tuple(range(5000)) for n in range(200)},
        titles={f"group {n}": "t" * 5000 for n in range(200)},
        stacks=tuple(Stack("t" * 5000, frames) for _ in range(100)),
        native="x" * 1_000_000,
        error_text="é\n" * 1_000_000,
    )
    small = limit_evidence_size(huge)
    assert len(msgspec.json.encode(small)) <= MAX_EVIDENCE_BYTES
    assert small.stacks and small.ops[-1].seq == 499
