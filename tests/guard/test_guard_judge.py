"""The judge's rules one by one, each on the smallest evidence that tells it from its neighbours."""

from typing import Any

import pytest
from msgspec.structs import replace
from tests.rendered import rendered

from paceline.guard.judge import diagnose
from paceline.guard.sentences import format_loader_worker, format_op
from paceline.protocol.evidence import Diagnosis, DiagnosisKind, Evidence, Frame, LoaderWorker, Op, Phase, Stack

WORLD = {"0": (0, 1, 2)}
INSIDE = (Frame("torch/distributed/distributed_c10d.py", 3000, "all_reduce"), Frame("train.py", 97, "step"))
LOADING = "train.py:88 in load_batch"
OUTSIDE = (Frame("python3.11/gzip.py", 5, "read"), Frame("train.py", 88, "load_batch"), Frame("train.py", 60, "main"))
LOST_PEER = "RuntimeError: [../third_party/gloo] Connection closed by peer [127.0.0.1]:4711"
GLOO_ABORT = "terminate called after throwing an instance of 'gloo::EnforceNotMet'"


def op(seq: int, kind: str = "all_reduce", *, done: bool = False, **changes: Any) -> Op:
    usual = {"name": "", "shape": "[1732]", "dtype": "float32", "site": "train.py:97 in step", "group": "0"}
    return Op(seq=seq, kind=kind, done=done, **(usual | changes))


def rank(number: int, *ops: Op, stack: tuple[Frame, ...] = INSIDE, **changes: Any) -> Evidence:
    runs = changes.get("code") is None
    seen: dict[str, Any] = {"state": "S", "answered": True, "groups": WORLD, "stacks": (Stack("main", stack),)}
    return Evidence(number, f"n{number}", 4700 + number, **({"step": 7, "ops": ops} | (seen if runs else {}) | changes))


BEFORE, WAITS = op(8, done=True), op(9)


def blame(*evidence: Evidence) -> tuple[DiagnosisKind, tuple[int, ...]]:
    diagnosis = diagnose(evidence)
    assert not diagnosis.tie
    return diagnosis.kind, diagnosis.causes


MEETING = (Frame("torch/distributed/rendezvous.py", 200, "_env_rendezvous_handler"), Frame("train.py", 27, "main"))
LATE = (Frame("train.py", 26, "main"),)
MUTE: dict[str, Any] = {"answered": False, "stacks": ()}
FOUR, PAIR = {"groups": {"0": (0, 1, 2, 3)}}, {"groups": WORLD | {"1": (0, 1)}}
READS, BUSY = op(5, done=True), (LoaderWorker(0, 90, 40, 2, "S"),)


def outside(number: int, *ops: Op, **changes: Any) -> Evidence:
    return rank(number, *(ops or (BEFORE,)), stack=OUTSIDE, **changes)


HANGS = outside(1)
BLAMED: dict[str, tuple[list[Evidence], DiagnosisKind, tuple[int, ...]]] = {
    "two ranks hang": ([rank(0, WAITS), HANGS, outside(2)], DiagnosisKind.BEHIND, (1, 2)),
    "one waits for the hanging rank in a different group": (
        [rank(0, BEFORE, op(3, group="1"), **PAIR), outside(1, **PAIR), rank(2, WAITS)], DiagnosisKind.BEHIND, (1,)
    ),
    "stopped before the collective": (
        [rank(0, BEFORE, WAITS), rank(1, BEFORE, state="T", **MUTE), rank(2, BEFORE, WAITS)],
        DiagnosisKind.STOPPED, (1,),
    ),
    "stopped while it waits for a hanging rank": (
        [rank(0, WAITS, state="T", **MUTE), HANGS, rank(2, WAITS)], DiagnosisKind.STOPPED, (0, 1)
    ),
    "in the kernel": ([rank(0, WAITS), outside(1, state="D"), rank(2, WAITS)], DiagnosisKind.UNINTERRUPTIBLE, (1,)),
    "busy loaders of a rank that waits for others": (
        [rank(0, WAITS, loaders=BUSY, phase=Phase.SYNC), HANGS, rank(2, WAITS)], DiagnosisKind.BEHIND, (1,)
    ),
    "an abort of gloo without other evidence": (
        [rank(0, WAITS, code=-6, error_text=GLOO_ABORT), rank(1, WAITS), rank(2, WAITS)], DiagnosisKind.DIED, ()
    ),
    "a mismatch while another rank computes": (
        [*(rank(n, op(9, "broadcast") if n == 1 else WAITS, **FOUR) for n in range(3)), outside(3, state="R", **FOUR)],
        DiagnosisKind.MISMATCH, (1,),
    ),
    "different lines are no mismatch": (
        [rank(0, op(9, site="train.py:12 in root_only")), HANGS, rank(2, WAITS)], DiagnosisKind.BEHIND, (1,)
    ),
    "a name that one rank does not have is no mismatch": (
        [rank(0, op(9, name="bucket 3")), rank(1, WAITS), outside(2)], DiagnosisKind.BEHIND, (2,)
    ),
    "a completed operation is no mismatch": (
        [rank(0, op(5, "broadcast", done=True), WAITS), outside(1, READS), rank(2, READS, WAITS)],
        DiagnosisKind.BEHIND, (1,),
    ),
    "one calls more than all that have ended": (
        [rank(0, BEFORE, code=0), rank(1, BEFORE, WAITS), rank(2, BEFORE, code=0)], DiagnosisKind.MISMATCH, (1,)
    ),
    "one rank in the collective does not answer": (
        [rank(0, BEFORE, WAITS), rank(1, BEFORE, WAITS, **MUTE), rank(2, BEFORE, WAITS)], DiagnosisKind.STOPPED, (1,)
    ),
    "an old flag of a rank that cannot answer": (  # it could not record the end of its call
        [rank(0, BEFORE, WAITS), rank(1, op(8), **MUTE, native='  File "train.py", line 41 in parse\n', state="R"),
         rank(2, BEFORE, WAITS)], DiagnosisKind.BEHIND, (1,),
    ),
    "an old flag before a completed call": (
        [rank(0, BEFORE, WAITS), rank(1, op(7), op(8, done=True), **MUTE), rank(2, BEFORE, WAITS)],
        DiagnosisKind.BEHIND, (1,),
    ),
    "killed from outside, with a log about peers": (
        [rank(0, BEFORE, WAITS), rank(1, BEFORE, code=-9, error_text=LOST_PEER), rank(2, BEFORE, WAITS)],
        DiagnosisKind.DIED, (1,),
    ),
    "victims of a rank that still hangs": (
        [HANGS, *(rank(n, BEFORE, WAITS, code=1, error_text="Timed out waiting 10000ms for recv") for n in (0, 2))],
        DiagnosisKind.BEHIND, (1,),
    ),
    "no rank waits, and one is at a different line": (
        [rank(n, stack=LATE if n == 1 else OUTSIDE, groups={}) for n in range(3)], DiagnosisKind.NOT_MET, (1,)
    ),
    "a single process": ([rank(0, stack=OUTSIDE, groups={})], DiagnosisKind.BEHIND, (0,)),
    "a single process with a busy loader": (
        [rank(0, stack=OUTSIDE, phase=Phase.DATA, loaders=BUSY, groups={})], DiagnosisKind.LOADER, (0,)
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BLAMED)
def test_ranks_that_are_blamed(name: str) -> None:
    evidence, kind, causes = BLAMED[name]
    assert blame(*evidence) == (kind, causes)


def test_who_has_not_entered_the_collective_in_which_others_wait_is_behind() -> None:
    diagnosis = diagnose([rank(0, BEFORE, WAITS), rank(1, BEFORE, stack=OUTSIDE), rank(2, BEFORE, WAITS)])
    rendered(diagnosis.sentences)
    assert replace(diagnosis, sentences=()) == Diagnosis(DiagnosisKind.BEHIND, (1,), op=WAITS, site=LOADING, step=7)


def test_of_several_buckets_on_their_way_the_first_that_a_rank_has_not_called_counts() -> None:
    buckets = [op(n, name=f"bucket {n}") for n in (5, 6, 7, 8)]
    got = [op(n, name=f"bucket {n}", done=True) for n in (5, 6)]
    diagnosis = diagnose([rank(0, *got, *buckets[2:]), rank(1, *got, stack=OUTSIDE), rank(2, *got, *buckets[2:])])
    assert (diagnosis.kind, diagnosis.causes) == (DiagnosisKind.BEHIND, (1,))
    assert diagnosis.op is not None and diagnosis.op.name == "bucket 7"


def test_whose_group_a_collective_belongs_to_is_said_where_the_group_has_a_title() -> None:
    pair, title = op(3, group="1"), "tensor of the mesh"
    seen = {"groups": WORLD | {"1": (0, 1)}, "titles": {"1": title}}
    diagnosis = diagnose([rank(0, BEFORE, pair, **seen), rank(1, BEFORE, stack=OUTSIDE, **seen), rank(2, WAITS)])
    assert title in diagnosis.sentences[0]


def test_a_rank_stopped_inside_the_collective_is_the_culprit_too() -> None:
    stopped = rank(1, BEFORE, WAITS, state="T", answered=False, stacks=())
    diagnosis = diagnose([rank(0, BEFORE, WAITS), stopped, rank(2, BEFORE, WAITS)])
    assert (diagnosis.kind, diagnosis.causes, diagnosis.op) == (DiagnosisKind.STOPPED, (1,), WAITS)
    rendered(diagnosis.sentences)


@pytest.mark.parametrize(
    ("loaders", "kind", "named"),
    [
        ([(0, "S", False), (1, "S", True)], DiagnosisKind.LOADER, [1]),
        ([(0, "T", True), (1, "S", True)], DiagnosisKind.LOADER, [0]),
        ([(0, "", True)], DiagnosisKind.LOADER, [0]),
        ([(0, "S", False)], DiagnosisKind.BEHIND, []),
        ([], DiagnosisKind.BEHIND, []),
    ],
    ids=["busy", "stopped before busy", "gone", "idle", "none"],
)
def test_a_rank_that_waits_for_a_loader_process_is_told_with_process_and_item(
    loaders: list[tuple[int, str, bool]], kind: DiagnosisKind, named: list[int]
) -> None:
    workers = tuple(LoaderWorker(n, 90 + n, 40 + n, 2, state, busy) for n, state, busy in loaders)
    diagnosis = diagnose(
        [rank(0, WAITS), rank(1, BEFORE, stack=OUTSIDE, phase=Phase.DATA, loaders=workers), rank(2, WAITS)]
    )
    assert (diagnosis.kind, diagnosis.causes) == (kind, (1,))
    assert [one.number for one in workers if format_loader_worker(one) in "\n".join(diagnosis.sentences)] == named


def test_the_phase_of_a_rank_that_evaluates_alone_is_told() -> None:
    diagnosis = diagnose([rank(0, BEFORE, stack=OUTSIDE, phase=Phase.EVALUATE), rank(1, WAITS), rank(2, WAITS)])
    assert diagnosis.causes == (0,)
    assert "phase evaluate" in diagnosis.sentences[0]


def test_another_collective_under_the_same_number_is_a_mismatch_of_the_minority() -> None:
    other = op(9, "broadcast", site="train.py:12 in odd")
    diagnosis = diagnose([rank(0, WAITS), rank(1, other), rank(2, WAITS)])
    assert (diagnosis.kind, diagnosis.causes, diagnosis.site) == (DiagnosisKind.MISMATCH, (1,), other.site)
    rendered(diagnosis.sentences)


@pytest.mark.parametrize("change", [{"shape": "[5]"}, {"dtype": "float64"}, {"kind": "barrier"}, {"name": "bucket 1"}])
def test_gloo_aborts_the_innocent_but_the_minority_is_named(change: dict[str, str]) -> None:
    named = op(9, name="bucket 0")
    odd = op(9, **({"kind": "all_reduce", "name": "bucket 0"} | change))  # type: ignore[arg-type]
    aborted = rank(0, named, code=-6, error_text=GLOO_ABORT)
    assert blame(aborted, rank(1, odd), rank(2, named, code=1, error_text=LOST_PEER)) == (DiagnosisKind.MISMATCH, (1,))


def test_a_rank_that_takes_itself_for_the_source_is_a_mismatch_whoever_is_done() -> None:
    to_all, own = op(9, "broadcast", peer=0), op(9, "broadcast", peer=1, done=True)
    diagnosis = diagnose([rank(0, replace(to_all, done=True), op(10)), rank(1, own, op(10)), rank(2, to_all)])
    assert (diagnosis.kind, diagnosis.causes) == (DiagnosisKind.MISMATCH, (1,))
    assert format_op(own) in diagnosis.sentences[0]


def test_two_ranks_at_odds_are_a_tie() -> None:
    diagnosis = diagnose([rank(0, WAITS, groups={"0": (0, 1)}), rank(1, op(9, "broadcast"), groups={"0": (0, 1)})])
    assert (diagnosis.kind, diagnosis.causes, diagnosis.tie) == (DiagnosisKind.MISMATCH, (), ((0,), (1,)))


@pytest.mark.parametrize("kind", ["all_gather", "all_to_all_single", "gather", "scatter"])
def test_shapes_that_ranks_may_choose_are_no_mismatch(kind: str) -> None:
    behind = rank(2, BEFORE, stack=OUTSIDE)
    assert blame(rank(0, op(9, kind, shape="[3]")), rank(1, op(9, kind, shape="[4]")), behind)[1] == (2,)


def test_who_ends_with_code_0_while_the_others_wait_has_left() -> None:
    left = rank(1, BEFORE, code=0, step=3)
    diagnosis = diagnose([rank(0, BEFORE, WAITS), left, rank(2, BEFORE, WAITS, code=1, error_text=LOST_PEER)])
    assert (diagnosis.kind, diagnosis.causes) == (DiagnosisKind.LEFT, (1,))
    rendered(diagnosis.sentences)


@pytest.mark.parametrize(
    ("phase", "causes"), [(Phase.USER, ()), (Phase.CLOSE, ()), (Phase.FORWARD, (1,))], ids=["script", "closed", "amid"]
)
def test_of_two_ranks_the_one_that_ended_is_blamed_only_if_it_was_amid_its_steps(
    phase: Phase, causes: tuple[int, ...]
) -> None:
    groups = {"0": (0, 1)}
    diagnosis = diagnose([rank(0, BEFORE, WAITS, groups=groups), rank(1, BEFORE, code=0, phase=phase)])
    assert (diagnosis.kind, diagnosis.causes) == (DiagnosisKind.LEFT, causes)
    assert bool(diagnosis.tie) is not bool(causes)


def test_two_that_ended_amid_their_steps_are_both_blamed_though_as_many_wait() -> None:
    left = [rank(n, BEFORE, code=0, phase=Phase.FORWARD) for n in (2, 3)]
    groups = {"0": (0, 1, 2, 3)}
    diagnosis = diagnose([rank(0, BEFORE, WAITS, groups=groups), rank(1, BEFORE, WAITS, groups=groups), *left])
    assert (diagnosis.kind, diagnosis.causes, diagnosis.tie) == (DiagnosisKind.LEFT, (2, 3), ())


def test_groups_entered_in_another_order_are_a_deadlock_of_the_minority() -> None:
    groups = WORLD | {"1": (0, 1, 2)}
    first = [rank(n, op(4, group="1"), groups=groups) for n in (0, 2)]
    diagnosis = diagnose([first[0], rank(1, WAITS, groups=groups), first[1]])
    assert (diagnosis.kind, diagnosis.causes) == (DiagnosisKind.DEADLOCK, (1,))
    rendered(diagnosis.sentences)


def test_a_receive_that_nobody_sends_is_a_tie_of_the_two_who_should_agree() -> None:
    receives = op(1, "recv", peer=0)
    diagnosis = diagnose([rank(0, WAITS), rank(1, receives), rank(2, WAITS)])
    assert (diagnosis.kind, diagnosis.tie) == (DiagnosisKind.DEADLOCK, ((0,), (1,)))


def test_a_rank_with_a_message_on_its_way_may_be_in_work_wait_and_is_tied_not_blamed() -> None:
    loose = op(1, "send", peer=0, site="train.py:50 in step")
    diagnosis = diagnose([rank(0, WAITS), rank(1, BEFORE, loose, stack=OUTSIDE), rank(2, WAITS)])
    assert (diagnosis.causes, diagnosis.tie) == ((), ((0,), (1,)))


def test_a_message_that_has_arrived_is_not_waited_for_by_who_has_not_looked_yet() -> None:
    sent, came = op(1, "send", peer=0, site="line.py:103 in _send"), op(1, "recv", peer=1, done=True)
    diagnosis = diagnose([rank(0, came, op(2, "recv", peer=1)), rank(1, sent, stack=OUTSIDE)])
    assert (diagnosis.kind, diagnosis.causes) == (DiagnosisKind.BEHIND, (1,))


def test_messages_are_matched_by_direction() -> None:
    there = [op(n, "send", peer=1, done=True) for n in (1, 2)]
    got_there = [op(n, "recv", peer=0, done=True) for n in (1, 2)]
    back, got_back = op(1, "send", peer=0, done=True), op(1, "recv", peer=1, done=True)
    waits = op(2, "recv", peer=1)
    behind = rank(1, *got_there, back, stack=OUTSIDE)
    diagnosis = diagnose([rank(0, *there, got_back, waits), behind, rank(2, BEFORE)])
    assert (diagnosis.kind, diagnosis.causes, diagnosis.op) == (DiagnosisKind.BEHIND, (1,), waits)
    rendered(diagnosis.sentences[0])


def test_all_in_the_same_collective_and_nothing_comes_out_is_the_network_between_hosts() -> None:
    diagnosis = diagnose([rank(n, BEFORE, WAITS) for n in range(3)])
    assert (diagnosis.kind, diagnosis.causes, diagnosis.tie) == (DiagnosisKind.NETWORK, (), ())
    assert "n0: rank 0; n1: rank 1; n2: rank 2" in diagnosis.sentences[-1]


def test_a_rank_that_holds_the_interpreter_is_told_with_the_line_from_outside() -> None:
    native = (
        'Thread 0x00007f1 (most recent call first):\n  File "/home/me/beside.py", line 5 in wait\n\n'
        'Thread 0x00007f0 (most recent call first):\n  File "/usr/lib/python3.11/re/__init__.py", line 9 in match\n'
        '  File "/home/me/train.py", line 41 in parse\n'
    )
    held = rank(1, BEFORE, answered=False, stacks=(), native=native, state="R", cpu_seconds=1.0)
    diagnosis = diagnose([rank(0, WAITS), held, rank(2, WAITS)])
    assert (diagnosis.kind, diagnosis.causes) == (DiagnosisKind.BEHIND, (1,)) and diagnosis.site.startswith(
        "train.py:41 "
    )
    rendered(diagnosis.sentences[0])


def test_who_died_by_itself_is_named_before_those_who_lost_it() -> None:
    victims = [rank(n, BEFORE, WAITS, code=1, error_text=LOST_PEER) for n in (0, 2)]
    diagnosis = diagnose([victims[0], rank(1, BEFORE, code=-9), victims[1]])
    assert (diagnosis.kind, diagnosis.causes) == (DiagnosisKind.DIED, (1,))
    rendered(diagnosis.sentences[0])


def test_a_lost_node_is_named_with_its_host() -> None:
    diagnosis = diagnose([rank(0, WAITS), rank(1, lost_reason="node 1 is lost: cut off"), rank(2, WAITS)])
    assert (diagnosis.kind, diagnosis.causes) == (DiagnosisKind.DIED, (1,))
    rendered(diagnosis.sentences[0])


def test_models_of_other_sizes_are_a_mismatch_of_the_minority() -> None:
    words = (
        "RuntimeError: DDP expects same model across all ranks, but Rank {} has {} params, while rank {} has {} params"
    )
    diagnosis = diagnose(
        [rank(n, code=1, error_text=words.format(n, own, to, 4)) for n, own, to in ((0, 4, 1), (1, 6, 0), (2, 4, 1))]
    )
    assert (diagnosis.kind, diagnosis.causes) == (DiagnosisKind.MISMATCH, (1,))
    assert diagnosis.failed == 1  # its message is shown, although all have raised
    two = diagnose([rank(n, code=1, error_text=words.format(n, own, 1 - n, 4)) for n, own in ((0, 4), (1, 6))])
    assert (two.causes, two.tie, two.failed) == ((), ((0,), (1,)), 0)


@pytest.mark.parametrize("size", [2, 3])
def test_before_the_first_collective_who_stands_elsewhere_than_those_who_wait_has_not_met(size: int) -> None:
    ranks = [rank(n, stack=LATE if n == 1 else MEETING, groups={}, step=0) for n in range(size)]
    diagnosis = diagnose(ranks)
    assert (diagnosis.kind, diagnosis.causes) == (DiagnosisKind.NOT_MET, (1,)) and diagnosis.site.startswith(
        "train.py:26 "
    )


def test_everybody_at_another_place_and_nothing_called_is_unknown_with_all_places() -> None:
    ranks = [rank(n, stack=(Frame("train.py", 10 + n, "main"),), groups={}) for n in range(3)]
    diagnosis = diagnose(ranks)
    assert (diagnosis.kind, diagnosis.causes, diagnosis.tie) == (DiagnosisKind.UNKNOWN, (), ())
    assert [f"train.py:{10 + n}" in diagnosis.sentences[n] for n in range(3)] == [True] * 3


def test_a_thousand_ranks_are_judged_within_seconds() -> None:
    world = {"0": tuple(range(1000))}
    ranks = [rank(n, BEFORE, *([] if n == 77 else [WAITS]), groups=world) for n in range(1000)]
    ranks[77] = rank(77, BEFORE, op(1, group="7"), groups=world | {"7": tuple(range(1000))})
    diagnosis = diagnose(ranks)
    assert (diagnosis.kind, diagnosis.causes) == (DiagnosisKind.DEADLOCK, (77,))
