"""What a worker shows of itself: real ranks, with the test as their agent."""

import os
import signal
import time
from pathlib import Path

import pytest
from tests.rank.guard_ranks import TORCH, calls, ranks, wait

from paceline.protocol import status_page
from paceline.protocol.evidence import Phase

pytestmark = pytest.mark.sample(2)

ONE_OF_EACH = f"""{TORCH}
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(7, 3)
    def forward(self, x):
        return self.layer(x)
model = torch.nn.parallel.DistributedDataParallel(Model())
x = torch.ones(4, 7)
model(x).sum().backward()
for _ in range(2):
    total = torch.ones(5)
    total.__dict__["collective"] = "bucket 3"
    dist.all_reduce(total, async_op=True).wait()
    assert total.tolist() == [2.0] * 5
if rank == 0: dist.send(x, 1)
else: dist.recv(x, 0)
both = [dist.P2POp(dist.isend, x, 1 - rank), dist.P2POp(dist.irecv, torch.empty(4, 7), 1 - rank)]
for request in dist.batch_isend_irecv(both): request.wait()
dist.monitored_barrier()
model(x).sum().backward()  # in DDP's backward
received = [torch.empty(2), torch.empty(2)]
dist.reduce_scatter(torch.empty(2), [torch.ones(2)] * 2)
dist.all_gather(received, torch.ones(2))
dist.broadcast_object_list([rank], src=1)
time.sleep(0.5)
dist.all_reduce(torch.ones(3))  # ends alone: see recorder.in_flight
ready()
if rank == 1: time.sleep(1000)  # it sleeps
dist.all_reduce(torch.ones(9))  # it waits
"""


@pytest.mark.slow
def test_both_ranks_number_alike_what_wrappers_and_torch_itself_have_called(tmp_path: Path) -> None:
    """Messages, barriers and collectives made of others raise torch's own numbers by what they like."""
    with ranks(ONE_OF_EACH, 2, tmp_path, started=True) as (waits, sleeps):
        waits.wait_ready()
        sleeps.wait_ready()
        wait(lambda: status_page.read_counters(waits.page).waiting, "rank 0 is not said to wait")
        answers = [waits.ask(2**40), sleeps.ask(2**40)]
        assert answers[0] is not None and answers[1] is not None
        *zero, last = calls([op for op in answers[0].ops if not op.is_message])
        assert zero == calls([op for op in answers[1].ops if not op.is_message])
        assert [int(call.split()[0]) for call in zero] == [*range(1, len(zero) + 1)]
        messages = [calls([op for op in answer.ops if op.is_message]) for answer in answers]
        assert messages[0] == ["1 send [4, 7]", "2 send [4, 7]", "1 recv [4, 7]"]
        assert messages[1] == ["1 recv [4, 7]", "1 send [4, 7]", "2 recv [4, 7]"]
        for call in ("5 all_reduce bucket 3 [5]", "6 all_reduce bucket 3 [5]", "7 monitored_barrier"):
            assert call in zero, zero
        assert last.endswith("all_reduce [9]") and not answers[0].ops[-1].done
        assert all(op.done for op in (*answers[0].ops[:-1], *answers[1].ops))
        assert answers[0].ops[-1].site == f"script.py:{waits.line('it waits')} in <module>"
        enqueued = [status_page.read_counters(one.page).enqueued for one in (waits, sleeps)]
        assert answers[0].groups == {"0": ()} and enqueued[0] == enqueued[1] + 1
        main = answers[1].stacks[0]
        assert (main.thread, main.frames[0].file, main.frames[0].line) == (
            "main",
            "script.py",
            sleeps.line("it sleeps"),
        )
        assert not status_page.read_counters(sleeps.page).waiting


WAITS_IN_BACKWARD = f"""{TORCH}
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(7, 3))
for _ in range(2): model(torch.ones(4, 7)).sum().backward()  # after the first one it settles its buckets
ready()
if rank == 1: time.sleep(1000)
model(torch.ones(4, 7)).sum().backward()  # in DDP's backward
"""


def test_the_bucket_that_ddp_waits_for_in_cpp_has_the_users_line(tmp_path: Path) -> None:
    with ranks(WAITS_IN_BACKWARD, 2, tmp_path) as (waits, _):
        waits.wait_ready()
        for question in range(1, 20):  # until it waits
            answer = waits.ask(question)
            assert answer is not None
            in_flight = [op for op in answer.ops if not op.done]
            if in_flight:
                break
            time.sleep(0.3)
        assert [(op.kind, op.site) for op in in_flight] == [
            ("all_reduce", f"script.py:{waits.line('in DDP')} in <module>")
        ]


FREED = f"""{TORCH}
group = dist.new_group()
ready()
if rank == 1: time.sleep(1000)
try:
    dist.all_reduce(torch.ones(9), group=group)
except RuntimeError:
    store = dist.distributed_c10d._get_default_store()
    store.set("freed", "yes")
    (folder / "freed").write_bytes(store.get("freed"))
    dist.destroy_process_group()
"""


@pytest.mark.parametrize("call", ["dist.all_reduce(torch.ones(9), group=group)", "work.wait()", "loss.backward()"])
def test_a_blocked_rank_is_freed_with_the_store_alive(tmp_path: Path, call: str) -> None:
    """Also where it waits in C++ for DDP's buckets."""
    before = {
        "work.wait()": "work = dist.all_reduce(torch.ones(9), group=group, async_op=True)\n",
        "loss.backward()": "loss = model(torch.ones(4, 7)).sum()\n",
    }
    model = "model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(7, 3))\n"
    script = FREED.replace("ready()\n", model + "ready()\n")
    script = script.replace("try:\n", before.get(call, "") + "try:\n")
    script = script.replace("    dist.all_reduce(torch.ones(9), group=group)", f"    {call}")
    with ranks(script, 2, tmp_path) as (blocked, _):
        blocked.wait_ready()
        blocked.release_from_wait()
        wait(lambda: (tmp_path / "freed").exists(), "not freed")
        assert (tmp_path / "freed").read_text() == "yes"
        assert blocked.process.wait(20) == 0, blocked.output()


def test_a_connection_of_the_users_own_is_not_cut(tmp_path: Path) -> None:
    own = """import socket
listens = socket.create_server(("127.0.0.1", 0))
out = socket.create_connection(listens.getsockname())
got = listens.accept()[0]
ready()
"""
    script = FREED.replace("ready()\n", own)
    script += "    out.send(b'x'); (folder / 'web').write_bytes(got.recv(1))\n"
    with ranks(script, 2, tmp_path) as (blocked, _):
        blocked.wait_ready()
        blocked.release_from_wait()
        assert blocked.process.wait(20) == 0, blocked.output()
        assert (tmp_path / "web").read_bytes() == b"x"


def test_a_freed_script_that_does_not_catch_is_a_victim(tmp_path: Path) -> None:
    script = FREED.partition("try:")[0] + "dist.all_reduce(torch.ones(9), group=group)\n"
    with ranks(script, 2, tmp_path) as (blocked, _):
        blocked.wait_ready()
        blocked.release_from_wait()
        assert blocked.process.wait(20) == 1
        failure = blocked.failure()
        assert failure is not None and failure.victim and failure.type == "RuntimeError"
        assert "all_reduce" in failure.traceback  # for people, in the log; the screen is the diagnosis's
        log = tmp_path / "rank-0.log"
        assert "Traceback" not in blocked.output() and str(log) in blocked.output()
        assert "Traceback" in log.read_text() and "all_reduce" in log.read_text()


def test_an_error_of_another_kind_after_the_release_is_a_victims_too(tmp_path: Path) -> None:
    """A script may turn the broken collective into an error of its own."""
    with ranks("ready(); time.sleep(1.0)\nraise ValueError('the loss is gone')\n", 1, tmp_path) as (one,):
        one.wait_ready()
        status_page.release_from_collective(one.page, b"{}")
        assert one.process.wait(20) == 1
        failure = one.failure()
        assert failure is not None and failure.victim


def test_the_ring_outlives_an_abort(tmp_path: Path) -> None:
    """What gloo does to the innocent rank of two with different shapes."""
    script = TORCH + "work = dist.all_reduce(torch.ones(4, 2), async_op=True); os.abort()\n"
    with ranks(script, 1, tmp_path, started=True, PYTHONFAULTHANDLER="") as (one,):
        assert one.process.wait(30) == -signal.SIGABRT
        (op,) = status_page.read_recent_ops(one.page)
        assert (op.kind, op.seq, op.shape, op.dtype) == ("all_reduce", 1, "[4, 2]", "float32")
        assert op.site == f"script.py:{one.line('os.abort()')} in <module>"


SIGNALS = """
import signal
got = []
signal.signal(signal.SIGUSR1, lambda *_: got.append(1))
signal.signal(signal.SIGUSR2, lambda *_: got.append(2))
ready()
while len(got) < 2: time.sleep(0.01)
print(got, flush=True)
"""


def test_the_users_own_signals_are_the_users(tmp_path: Path) -> None:
    with ranks(SIGNALS, 1, tmp_path) as (one,):
        one.wait_ready()
        assert "script.py" in one.native()
        for number in (signal.SIGUSR1, signal.SIGUSR2):
            one.process.send_signal(number)
            time.sleep(0.1)
        assert one.process.wait(10) == 0 and one.output() == "[1, 2]\n"


FORKS = f"""{TORCH}
import threading
from paceline.protocol.evidence import Phase
from paceline.rank.guard import HangGuard
box = HangGuard.of_process().page
dist.all_reduce(torch.ones(2))
box.set_step(7); box.enter(Phase.DATA)
if os.fork() == 0:
    box.set_step(99); box.enter(Phase.CLOSE); box.tick()
    box.set_loader(3, epoch=1, item=4711, busy=True)
    dist.distributed_c10d._world.default_pg = None
    (folder / "threads").write_text(str([t.name for t in threading.enumerate()]))
    time.sleep(1000 if os.fork() else 0)
    os._exit(0)
ready()
time.sleep(1000)
"""


def test_a_forked_child_says_what_it_loads_and_nothing_in_its_parents_name(tmp_path: Path) -> None:
    with ranks(FORKS, 1, tmp_path) as (one,):
        one.wait_ready()
        wait(lambda: status_page.read_loader_workers(one.page), "the child says nothing")
        (loader,) = status_page.read_loader_workers(one.page)
        try:
            assert (loader.number, loader.item, loader.epoch, loader.busy) == (3, 4711, 1, True)
            assert loader.pid != one.process.pid
            time.sleep(0.3)
            seen = status_page.read_counters(one.page)
            assert (seen.step, seen.phase, seen.progress_values[3]) == (7, Phase.DATA, 1)
            assert (tmp_path / "threads").read_text() == "['MainThread']"
            assert one.ask() is not None
        finally:
            os.kill(loader.pid, signal.SIGKILL)


def test_off_leaves_the_count_of_steps_only(tmp_path: Path) -> None:
    script = TORCH + (
        "from paceline.rank.guard import HangGuard\n"
        "from paceline.protocol.evidence import Phase\n"
        "guard = HangGuard.of_process()\n"
        "guard.page.enter(Phase.DATA); guard.page.set_step(5); dist.all_reduce(torch.ones(2))\n"
        "print(dist.all_reduce.__code__.co_filename, guard.ledger.take_order_hash(), "
        "guard.ledger.last_ordered_calls(), flush=True)\n"
        "ready(); time.sleep(1000)\n"
    )
    with ranks(script, 1, tmp_path, guarded=False) as (one,):
        one.wait_ready()
        assert one.ask(seconds=0.6) is None
        seen = status_page.read_counters(one.page)
        assert seen.step == 5 and not any((seen.ready, seen.answered, seen.beat_ns, seen.waiting, *seen.phase_seconds))
        assert not seen.has_called_collective and seen.progress_values == (5, 0, 0, 0, 0)
        assert not status_page.handles_signal(one.process.pid)
        assert "ledger.py" not in one.output() and one.output().endswith("[]\n")


def test_a_program_that_closes_all_descriptors_is_not_sent_the_signal(tmp_path: Path) -> None:
    """Its stacks would be written into whatever file it opens next."""
    script = "os.closerange(3, 200); mine = open(folder / 'mine', 'w'); ready(); time.sleep(1000)\n"
    with ranks(script, 1, tmp_path) as (one,):
        one.wait_ready()
        assert one.ask() is not None, one.output()
        wait(
            lambda: status_page.read_counters(one.page).ready == status_page.WATCHED, "still said to be safe", seconds=3
        )
        assert not status_page.handles_signal(one.process.pid)


def test_the_watcher_keeps_no_process_alive_and_prints_nothing(tmp_path: Path) -> None:
    script = "import threading; time.sleep(0.6); print([t.name for t in threading.enumerate()])\n"
    with ranks(script, 1, tmp_path) as (one,):
        assert one.process.wait(10) == 0
        assert one.output() == "['MainThread', 'paceline-guard']\n"
